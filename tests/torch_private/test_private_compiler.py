"""torch.compile's insides under private names; nothing here generates code, which takes long."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frameworm.torch_private import compiler


def test_patched_settings_and_recompile_limit() -> None:
    before = compiler.recompile_limit()
    with compiler.patched_settings(suppress_errors=True, recompile_limit=before + 3):
        assert compiler.recompile_limit() == before + 3
        assert torch._dynamo.config.suppress_errors
    assert compiler.recompile_limit() == before


def test_allow_graphs_of_alike_modules() -> None:
    before = compiler.recompile_limit()
    with compiler.patched_settings(allow_unspec_int_on_nn_module=False, recompile_limit=before):
        compiler.allow_graphs_of_alike_modules(5)
        assert compiler.recompile_limit() == before + 5
        assert torch._dynamo.config.allow_unspec_int_on_nn_module


def test_draw_as_eager() -> None:
    import torch._inductor.config as config

    with compiler.draw_as_eager():
        assert config.fallback_random
    assert not config.fallback_random


def test_options_of_modes() -> None:
    assert compiler.options_of("reduce-overhead") == {"triton.cudagraphs": True}


def test_compile_package_is_there() -> None:
    with pytest.raises(Exception, match=r"ExportedProgram|NoneType|example_inputs"):
        compiler.compile_package(None, "nowhere.pt2")


def test_mark_varying_compiles_for_all_sizes_at_once() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(lambda value: value * 2, backend=backend)
    for size in (3, 4, 5):
        tensor = torch.ones(size)
        compiler.mark_varying(tensor, 0)
        step(tensor)
    assert len(graphs) == 1


def test_compilations_are_noted() -> None:
    torch._dynamo.reset()
    before = len(compiler.compilations(keep=100_000))
    torch.compile(lambda value: value - 1, backend="eager")(torch.ones(2))
    noted = compiler.compilations()[before:]
    assert len(noted) == 1
    assert noted[0].is_forward
    assert noted[0].duration_us > 0
    assert noted[0].recompile_reason is None


def test_known_to_compiler_is_a_constant_in_graphs() -> None:
    asked: list[int] = []

    @compiler.known_to_compiler
    def choice() -> bool:
        asked.append(len(asked))
        torch._dynamo.graph_break()  # would be one, were it traced
        return True

    torch._dynamo.reset()
    step = torch.compile(lambda value: value + 1 if choice() else value, backend="eager", fullgraph=True)
    assert step(torch.ones(1)).item() == 2
    assert step(torch.ones(1)).item() == 2
    assert len(asked) == 1


def test_keep_compiler_out_leaves_a_frame_alone() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def work(value: torch.Tensor) -> torch.Tensor:
        return value * 3

    torch._dynamo.reset()
    compiler.keep_compiler_out(work, also_of_calls=True)
    assert torch.compile(work, backend=backend)(torch.ones(1)).item() == 3
    assert not graphs
