"""What torch.compile did in a run is written down, and it does something for every kind of model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from workbench import classification, fit, mlp

from frameworm.config.schema import GPUConfig
from frameworm.engine.model.compilation import Compiler


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The compiler's front without its code generator, which needs a C++ compiler and seconds."""
    monkeypatch.setattr(torch, "compile", functools.partial(_compile_quickly, torch.compile))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compile_quickly(compile: Any, function: Any, mode: str | None = None) -> Any:
    return compile(function, backend="aot_eager")


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [mlp, Own])
def test_graphs_and_recompilations_are_counted(make: Any) -> None:
    expected = fit(make(), classification(30), batch_size=4)
    record, parameters, _ = fit(make(), classification(30), batch_size=4, compile_model=True)
    assert torch.allclose(parameters, expected[1], atol=1e-6)
    assert record.compilation is not None
    assert record.compilation.time_s > 0
    assert record.compilation.graphs == 2
    assert record.compilation.recompilations == 1, "the last batch is short"
    assert record.compilation.reasons
    assert expected[0].compilation is None


def test_a_compiled_model_can_still_be_copied() -> None:
    model = mlp()
    Compiler(GPUConfig(compile_model=True), captured=False).apply(model)
    inputs = torch.randn(2, 6)
    assert torch.equal(copy.deepcopy(model)(inputs), model(inputs))


@pytest.mark.parametrize(
    ("mode", "captured", "deterministic", "expected"),
    [
        ("default", False, False, None),
        ("reduce-overhead", False, False, "reduce-overhead"),
        ("reduce-overhead", True, False, None),
        ("max-autotune", True, False, "max-autotune-no-cudagraphs"),
        ("max-autotune", False, True, None),
    ],
)
def test_the_mode_suits_capture_and_determinism(mode: Any, captured: bool, deterministic: bool, expected: Any) -> None:
    gpu = GPUConfig(compile_model=True, compile_mode=mode, deterministic=deterministic)
    assert Compiler(gpu, captured=captured).mode == expected
