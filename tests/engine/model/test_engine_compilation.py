"""What torch.compile did in a run is written down, and it does something for every kind of model."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from workbench import classification, fit, mlp

from frameworm import Trainer
from frameworm.config.schema import GPUConfig
from frameworm.engine.model.compilation import Compiler

# torch looks at the gradients of what it compiles for, and what a block gets is no leaf.
INNER = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The compiler's front without its code generator, which needs a C++ compiler and seconds."""
    monkeypatch.setattr(torch, "compile", functools.partial(_compile_quickly, torch.compile))
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
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
@pytest.mark.slow
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sizes_that_differ_from_step_to_step_are_compiled_for_at_once() -> None:
    class Nodes(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, place: int) -> Any:
            return torch.ones(3 + place % 5, 6), torch.tensor(place % 3)

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)

        def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            nodes, owner = inputs
            return self.net(torch.zeros(4, 6).index_add_(0, owner, nodes))

    def join(rows: Any) -> Any:
        owner = torch.cat([torch.full((len(nodes),), place) for place, (nodes, _) in enumerate(rows)])
        return (torch.cat([nodes for nodes, _ in rows]), owner), torch.stack([label for _, label in rows])

    loader = torch.utils.data.DataLoader(Nodes(), 4, collate_fn=join)
    model = Pooled()
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), run_dir=None, compile_model=True
    )
    record = trainer.train(loader, epochs=2)
    assert record.compilation is not None
    assert (record.compilation.graphs, record.compilation.recompilations) == (1, 0), record.compilation.reasons


class SetsItselfUp(Own):
    """Finds out at its first call what it is for, as Hugging Face's classifiers do."""

    kind: str | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "classes"
        return self.net(inputs)


def test_nothing_is_compiled_for_a_first_step_or_for_a_rare_short_one() -> None:
    expected = fit(SetsItselfUp(), classification(46), batch_size=4)
    record, parameters, _ = fit(SetsItselfUp(), classification(46), batch_size=4, compile_model=True)
    assert torch.allclose(parameters, expected[1], atol=1e-6)
    assert record.compilation is not None
    assert (record.compilation.graphs, record.compilation.recompilations) == (1, 0)


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


class Block(nn.Module):
    """One that knows its place among the others, as many models' do."""

    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.index = index

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.inner(self.norm(inputs))) / (self.index + 1)


class Trunk(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width, index) for index in range(depth))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden  # type: ignore[no-any-return]


class Headed(nn.Module):
    def __init__(self, *trunks: nn.Module) -> None:
        super().__init__()
        self.trunks = nn.ModuleList(trunks)
        self.head = nn.LazyLinear(3)
        self(torch.zeros(2, 6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.head(torch.cat([trunk(inputs) for trunk in self.trunks], -1)), -1)


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Trunk(8, 12), nn.Linear(8, 3))


def two_widths() -> nn.Module:
    torch.manual_seed(0)
    return Headed(Trunk(8, 6), Trunk(4, 6))


def encoder_and_decoder() -> nn.Module:
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(6, 8)
            self.transformer = nn.Transformer(8, 2, 3, 3, 16, dropout=0.1, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.enter(inputs)[:, None]
            return self.head(self.transformer(hidden, hidden)[:, 0])  # type: ignore[no-any-return]

    return Both()


def compiled_by_blocks(model: nn.Module) -> tuple[Compiler, nn.Module]:
    """A compiler and the model that it was applied to."""
    compiler = Compiler(GPUConfig(compile_model=True, compile_scope="blocks"), captured=False)
    compiler.apply(model)
    return compiler, model


def gradients_of(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def names_of_graphs() -> Counter[str]:
    """How many graphs the compiler made, by what it made them of."""
    events = torch._dynamo.utils.get_compilation_metrics()
    return Counter(str(event.co_name).rpartition("_")[0] for event in events if event.is_forward)


@pytest.mark.slow
@INNER
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [deep, two_widths, encoder_and_decoder])
@pytest.mark.parametrize("recompute", ["off", "full"])
def test_training_with_compiled_blocks_is_as_training_eagerly(make: Any, recompute: str) -> None:
    settings = {"batch_size": 5, "activation_checkpointing": recompute}
    _, expected, _ = fit(make(), classification(30), **settings)
    record, parameters, _ = fit(make(), classification(30), compile_model=True, compile_scope="blocks", **settings)
    assert torch.allclose(parameters, expected, atol=1e-6)
    assert record.compilation is not None
    assert record.compilation.graphs > 0
    assert not [note for note in record.notes if "compile" in note]


@INNER
def test_all_blocks_of_one_shape_share_a_graph() -> None:
    model = two_widths()
    expected = gradients_of(copy.deepcopy(model), torch.ones(4, 6))
    compiler, _ = compiled_by_blocks(model)
    with compiler.eager_if_it_fails():
        found = gradients_of(model, torch.ones(4, 6))
        once = names_of_graphs()
        gradients_of(model, torch.ones(4, 6))
    assert all(map(torch.equal, found, expected))
    # Each width of a block has two: for the first index, which is taken for a constant, and for any other.
    assert once["Block"] == 4
    assert once["Headed"] == 1
    assert names_of_graphs() == once, "the second step compiles nothing"


@INNER
def test_batches_of_many_widths_do_not_compile_again_and_again() -> None:
    compiler, model = compiled_by_blocks(deep())
    with compiler.eager_if_it_fails():
        for size in (3, 5, 8, 13):
            gradients_of(model, torch.ones(size, 6))
        known = names_of_graphs()
        for size in (4, 7, 21):
            gradients_of(model, torch.ones(size, 6))
    assert known["Block"] <= 4
    assert names_of_graphs() == known


@pytest.mark.slow
@INNER
@pytest.mark.long
def test_blocks_that_differ_in_what_they_do_are_each_compiled() -> None:
    class Filling(Block):
        def forward(self, inputs: torch.Tensor, entries: list[torch.Tensor | None]) -> torch.Tensor:
            entries[self.index] = inputs
            return super().forward(inputs)

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Filling(6, index) for index in range(10))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            entries: list[torch.Tensor | None] = [None] * len(self.blocks)
            for block in self.blocks:
                inputs = block(inputs, entries)
            return torch.stack([entry for entry in entries if entry is not None])

    torch.manual_seed(0)
    model = Caching().double()  # gradients are added up in another order
    inputs = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    expected = gradients_of(copy.deepcopy(model), inputs)
    compiler, _ = compiled_by_blocks(model)
    with compiler.eager_if_it_fails():
        assert all(map(torch.allclose, gradients_of(model, inputs), expected))
    assert names_of_graphs()["Filling"] == 10


@INNER
def test_a_graph_may_break_inside_a_block() -> None:
    class Breaking(Block):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(inputs)
            torch._dynamo.graph_break()
            return hidden * 2

    model = nn.Sequential(*(Breaking(6, index) for index in range(4)))
    inputs = torch.ones(4, 6, requires_grad=True)
    expected = gradients_of(copy.deepcopy(model), inputs)
    compiler, _ = compiled_by_blocks(model)
    with compiler.eager_if_it_fails():
        assert all(map(torch.equal, gradients_of(model, inputs), expected))
    assert compiler.note is None
    assert names_of_graphs().total() >= 2


def test_a_model_that_repeats_no_block_is_compiled_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    compiler, model = compiled_by_blocks(Own())
    model(torch.ones(2, 6))
    assert names_of_graphs() == {"Own": 1}
    assert compiler.note == "gpu.compile_scope: Own repeats no block, so it was compiled as a whole"
    assert compiler.note in caplog.text


@INNER
def test_blocks_run_as_written_where_asked_and_where_they_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, model = compiled_by_blocks(two_widths())
    with compiler.uncompiled():
        gradients_of(model, torch.ones(4, 6))
    assert not names_of_graphs()

    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda function, mode: torch._dynamo.optimize(fail)(function))
    broken = two_widths()
    expected = gradients_of(copy.deepcopy(broken), torch.ones(4, 6))
    failing = Compiler(GPUConfig(compile_model=True, compile_scope="blocks"), captured=False)
    failing.apply(broken)
    with failing.eager_if_it_fails():
        assert all(map(torch.equal, gradients_of(broken, torch.ones(4, 6)), expected))
    assert "no compiler here" in (failing.note or "")
    assert all(module._compiled_call_impl is None for module in broken.modules())


@pytest.mark.slow
@INNER
def test_compiled_blocks_can_be_copied() -> None:
    _, model = compiled_by_blocks(two_widths())
    copied = copy.deepcopy(model)
    assert all(map(torch.equal, gradients_of(copied, torch.ones(2, 6)), gradients_of(model, torch.ones(2, 6))))


@INNER
@pytest.mark.slow
def test_compiled_blocks_compute_in_half_precision() -> None:
    compiler, model = compiled_by_blocks(two_widths())
    eager = copy.deepcopy(model)
    with compiler.eager_if_it_fails(), torch.autocast("cpu", torch.bfloat16):
        found, expected = model(torch.ones(4, 6)), eager(torch.ones(4, 6))
    assert torch.allclose(found, expected, atol=1e-2)
    assert names_of_graphs()["Block"] > 0
