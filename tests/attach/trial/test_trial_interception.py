"""Switches are set from outside, where the script has left them open, and leave its objects as they were."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset

from frameworm.attach.patches import Patches
from frameworm.attach.trial.interception import attention_of, intercept
from frameworm.attach.trial.switches import WORDS, Switches, by_hand, in_words
from frameworm.errors import ConfigError


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    before = torch.optim.Optimizer.__init__, DataLoader.__init__
    yield made
    made.remove()
    assert (torch.optim.Optimizer.__init__, DataLoader.__init__) == before


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_that_can_are_fused(kind: Any, patches: Patches) -> None:
    intercept(Switches(fused_optimizer=True), patches)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("settings", "fused"), [({"fused": False}, False), ({"foreach": True}, None), ({"foreach": False}, None)]
)
def test_what_the_script_says_itself_stays(settings: dict[str, Any], fused: bool | None, patches: Patches) -> None:
    intercept(Switches(fused_optimizer=True), patches)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], **settings)
    assert optimizer.param_groups[0]["fused"] is fused


def test_optimizers_without_such_a_kernel_are_left_alone(patches: Patches) -> None:
    intercept(Switches(fused_optimizer=True), patches)
    optimizer = torch.optim.RMSprop([nn.Parameter(torch.ones(2))])
    assert "fused" not in optimizer.param_groups[0]


def test_gradients_are_dropped_where_the_script_fills_them_with_zeros(patches: Patches) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def zeroed(owner: Any) -> bool:
        model(torch.ones(1, 3)).sum().backward()
        owner.zero_grad(set_to_none=False)
        return model.weight.grad is not None

    assert zeroed(model)
    intercept(Switches(none_gradients=True), patches)
    assert not zeroed(model)
    assert not zeroed(optimizer)
    patches.remove()
    assert zeroed(optimizer)


def attended() -> torch.Tensor:
    query = torch.ones(1, 1, 4, 8, requires_grad=True)
    return nn.functional.scaled_dot_product_attention(query, query, query).sum()


@pytest.mark.parametrize("wanted", ["math", "flash"])
def test_attention_takes_the_back_end_that_is_set(wanted: Any, patches: Patches) -> None:
    assert attention_of(attended()) == "flash"
    intercept(Switches(attention=wanted), patches)
    assert attention_of(attended()) == (None if wanted == "math" else wanted)
    patches.remove()
    assert attention_of(attended()) == "flash"
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


def test_a_loss_without_attention_has_no_back_end() -> None:
    assert attention_of(nn.Linear(3, 2)(torch.ones(1, 3)).sum()) is None
    assert attention_of(torch.zeros(())) is None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(4))


def test_loaders_that_shuffle_get_processes(patches: Patches) -> None:
    intercept(Switches(workers=1), patches)
    samples = TensorDataset(torch.arange(8.0))
    torch.manual_seed(0)
    shuffled = DataLoader(samples, 2, shuffle=True)
    assert shuffled.num_workers == 1
    found = [item for (batch,) in shuffled for item in batch.tolist()]
    patches.remove()
    torch.manual_seed(0)
    assert found == [item for (batch,) in DataLoader(samples, 2, shuffle=True) for item in batch.tolist()]


def test_other_loaders_do_not(patches: Patches) -> None:
    intercept(Switches(workers=1), patches)
    samples = TensorDataset(torch.arange(8.0))
    for loader in (
        DataLoader(samples, 2),
        DataLoader(samples, 2, sampler=SequentialSampler(samples)),
        DataLoader(Stream()),
    ):
        assert loader.num_workers == 0
    assert DataLoader(samples, 2, shuffle=True, num_workers=2).num_workers == 2


class Network(nn.Module):
    """Returns what models of libraries return: tensors in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> dict[str, Any]:
        scores = self.inner(batch)
        return {"scores": scores, "all": [scores], "ids": torch.arange(2)}


def test_autocast_computes_in_half_and_returns_what_was_returned(patches: Patches) -> None:
    model, batch = Network(), torch.randn(2, 4)
    plain = model(batch)
    intercept(Switches(autocast="bf16"), patches).found(model)
    found = model(batch)
    assert (found["scores"].dtype, found["all"][0].dtype, found["ids"].dtype) == (torch.float32,) * 2 + (torch.int64,)
    assert not torch.equal(found["scores"], plain["scores"])
    assert torch.equal(found["scores"], plain["scores"].bfloat16().float()) or torch.allclose(
        found["scores"], plain["scores"], rtol=0.02, atol=0.02
    )
    model.eval()
    assert torch.equal(model(batch)["scores"], plain["scores"]), "evaluation runs as written"
    model.train()
    with torch.no_grad():
        assert torch.equal(model(batch)["scores"], plain["scores"])


def test_a_model_with_switches_is_saved_and_copied_without(patches: Patches) -> None:
    model, batch = Network(), torch.randn(2, 4)
    keys = list(model.state_dict())
    plain = model(batch)["scores"]
    intercept(Switches(autocast="bf16"), patches).found(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(copy.deepcopy(model)(batch)["scores"], plain)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(batch)["scores"], plain)


def test_switches_are_read_as_they_were_written() -> None:
    switches = Switches(autocast="bf16", workers=2, compile=True)
    assert Switches.from_dict(switches.to_dict()) == switches
    assert in_words(switches.to_dict()) == "bf16 autocast, compiled model, loader processes: 2"
    assert by_hand({"workers": 2}) == ["DataLoader(..., num_workers=2)"]
    options = {"dataloader_num_workers": 0}
    trainer = {"name": "transformers", "arguments": "TrainingArguments", "options": options}
    assert by_hand({"workers": 2, "channels_last": True}, {"framework": trainer}) == [
        "TrainingArguments(dataloader_num_workers=2)",
        "model.to(memory_format=torch.channels_last)",
    ]
    assert list(WORDS) == list(Switches.__dataclass_fields__)
    with pytest.raises(ConfigError, match="there is no such switch"):
        Switches.from_dict({"faster": True})
    with pytest.raises(ConfigError, match="does not have the type"):
        Switches.from_dict({"workers": "many"})


def test_shuffling_loaders_trim_what_they_pad(patches: Patches) -> None:
    intercept(Switches(trim_padding=True), patches)
    ids, mask = torch.arange(2, 322).view(8, 40), torch.zeros(8, 40, dtype=torch.long)
    mask[:, :10] = 1
    samples = TensorDataset(ids * mask, mask)
    for shuffle, width in ((True, 16), (False, 40)):
        loader = DataLoader(samples, 4, shuffle=shuffle)
        copied = DataLoader(samples, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
        for made in (loader, copied):
            assert [tuple(part.shape) for part in next(iter(made))] == [(4, width)] * 2


def rows_of(loader: Any) -> list[Any]:
    torch.manual_seed(3)
    return list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_that_are_indexed_at_once_are_the_same(patches: Patches, workers: int) -> None:
    data = TensorDataset(torch.randn(23, 3, 5), torch.arange(23), torch.randn(23, dtype=torch.float64))
    parts = [data, Subset(data, range(4, 20)), Subset(Subset(data, [3, 1, 4, 1, 5, 9, 2, 6]), [7, 0, 0, 2])]
    loaders = [DataLoader(part, 4, shuffle=True, num_workers=workers) for part in parts]
    own = DataLoader(data, 4, collate_fn=lambda samples: len(samples))
    alone = DataLoader(data, batch_size=None)
    expected = [rows_of(loader) for loader in loaders]
    singles = rows_of(alone)
    taken = []
    with patch.object(TensorDataset, "__getitem__", lambda self, place: taken.append(place)):
        intercept(Switches(whole_batches=True), patches)
        found = [rows_of(loader) for loader in loaders]
    assert not taken
    for one, other in zip(found, expected):
        assert [type(batch) for batch in one] == [type(batch) for batch in other]
        for batch, known in zip(one, other):
            assert all(torch.equal(part, true) and part.dtype == true.dtype for part, true in zip(batch, known))
            assert [part.stride() for part in batch] == [part.stride() for part in known]
    assert rows_of(own) == [4, 4, 4, 4, 4, 3]
    assert all(torch.equal(row[0], known[0]) for row, known in zip(rows_of(alone), singles))


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner, self.number = nn.Linear(6, 6), number

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.inner(hidden)) * self.number


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(number) for number in range(12))
        self.head = nn.Linear(6, 1)

    def forward(self, hidden: torch.Tensor) -> Any:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it compiles
def test_blocks_that_are_alike_are_compiled_once(patches: Patches, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiling = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiling(call, backend=backend))
    torch.manual_seed(0)
    model, batch = Stack(), torch.randn(3, 6)
    expected, names = model(batch), list(model.state_dict())
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=False, recompile_limit=8):  # to be put back
        intercept(Switches(compile_blocks=True), patches).found(model)
        torch.testing.assert_close(model(batch), expected)
        assert 1 <= len(graphs) <= 2, "one graph, or another once a layer's number has turned out to differ"
        before = len(graphs)
        with torch.no_grad():
            model.eval()(batch)
        assert len(graphs) == before, "evaluation runs as written"
    assert list(model.state_dict()) == names


def test_the_whole_is_compiled_instead_of_its_blocks() -> None:
    assert Switches(compile_blocks=True).having({"compile": True}) == Switches(compile=True)
    assert Switches(compile_blocks=True).having({"tf32": True}).compile_blocks


def test_autocast_returns_outputs_that_are_mappings_with_attributes(patches: Patches) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, batch: torch.Tensor) -> Any:
            logits = self.inner(batch)
            return outputs.SequenceClassifierOutput(loss=logits.mean(), logits=logits)

    model = Classifier()
    intercept(Switches(autocast="bf16"), patches).found(model)
    found = model(torch.ones(2, 4))
    assert type(found) is outputs.SequenceClassifierOutput
    assert found.logits.dtype == found["logits"].dtype == found.loss.dtype == torch.float32
    found.loss.backward()
    assert model.inner.weight.grad is not None


@pytest.mark.parametrize(
    ("changes", "modes"), [({"compile": True}, [None]), ({"compile": True, "cuda_graphs": True}, ["reduce-overhead"])]
)
def test_a_model_is_compiled_in_one_way(
    patches: Patches, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], modes: list[str | None]
) -> None:
    seen = []

    def compile_(call: Any, mode: str | None = None) -> Any:
        seen.append(mode)
        return call

    monkeypatch.setattr(torch, "compile", compile_)
    model, batch = Stack(), torch.randn(3, 6)
    expected = model(batch)
    switches = Switches(compile_blocks=True).having({"compile": True}).having(changes)
    intercept(switches, patches).found(model)
    assert torch.equal(model(batch), expected)
    assert seen == modes
    assert len([name for name in switches.to_dict() if name in ("compile", "compile_blocks", "cuda_graphs")]) == 1
