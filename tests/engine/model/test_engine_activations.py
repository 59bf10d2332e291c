"""Activation checkpointing: the same gradients to the bit, less kept."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from frameworm import Trainer
from frameworm.config.schema import MemoryConfig, ParallelConfig
from frameworm.engine.model import activations
from frameworm.engine.model.activations import Mode, apply, apply_checkpointing, find_layers
from frameworm.errors import ConfigError, StateError
from frameworm.models.gpt import GPT, DecoderLayer
from frameworm.models.text_classifier import TextClassifier
from frameworm.parallel.replicated import DDPStrategy

MODES: list[Mode] = ["full", "selective"]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 6))

    def forward(self, inputs: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return inputs + scale * self.inner(inputs)


class Own(nn.Module):
    """A user's model: says nothing of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Residual()
        self.second = Residual()
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(inputs), scale=0.5)
        return self.head(hidden)  # type: ignore[no-any-return]


def gpt() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(30, (3, 8))
    return GPT(30, 16, 2, 3, 8, dropout=0.2, fused_loss=True), lambda model: model(tokens, tokens)


def classifier() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    torch.manual_seed(0)
    model = TextClassifier(30, 3, 16, 2, 2, 32, max_seq_len=6, dropout=0.2)
    tokens, offsets = torch.randint(30, (12,)), torch.tensor([0, 5, 6, 12, 12], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5])
    return model, lambda model: model(tokens, offsets=offsets, positions=positions).pow(2).sum()


def own() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    torch.manual_seed(0)
    inputs = torch.randn(5, 6)
    return Own(), lambda model: model(inputs).pow(2).sum()


WORKLOADS = [(gpt, None), (classifier, None), (own, ["Residual"])]


def gradients(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def kept_bytes(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> int:
    """Bytes that autograd keeps between forward and backward, parameters left out."""
    own_storage = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own_storage:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model)
    total = sum(kept.values())
    del loss
    return total


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("workload", "classes"), WORKLOADS)
def test_gradients_are_the_same_to_the_bit(workload: Callable[[], Any], classes: list[str] | None, mode: Mode) -> None:
    model, loss_of = workload()
    expected = gradients(model, loss_of)
    apply(model, mode, classes)
    for ours, theirs in zip(gradients(model, loss_of), expected, strict=True):
        assert torch.equal(ours, theirs)


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().split(".")[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def test_what_is_recomputed() -> None:
    """Full runs each layer's products and activations a second time, selective only the activations."""
    counts = {}
    for mode in ("off", *MODES):
        model, loss_of = gpt()
        apply(model, mode)  # type: ignore[arg-type]
        with Counted() as counted:
            loss_of(model).backward()
        counts[mode] = [counted.counts[name] for name in ("aten::addmm", "aten::gelu")]
    assert counts["off"] == [12, 3]
    assert counts["full"] == [24, 6]
    assert counts["selective"] == [12, 6]


def test_full_keeps_less() -> None:
    model, loss_of = gpt()
    before = kept_bytes(model, loss_of)
    apply(model, "full")
    assert kept_bytes(model, loss_of) < before / 4


def test_module_and_state_dict_stay() -> None:
    model, _ = gpt()
    names, layers = list(model.state_dict()), list(model.layers)  # type: ignore[arg-type]
    chosen = apply(model, "full")
    assert all(one is other for one, other in zip(chosen, layers, strict=True))
    assert list(model.state_dict()) == names
    assert all(isinstance(layer, DecoderLayer) and type(layer).__name__ == "DecoderLayer" for layer in layers)
    assert list(model.layers) == layers  # type: ignore[arg-type]


def test_again_and_off() -> None:
    model, loss_of = gpt()
    layer = model.layers[0]  # type: ignore[index]
    apply(model, "full")
    first = type(layer)
    apply(model, "full")
    assert type(layer) is first
    apply(model, "selective")
    assert type(layer) is not first
    assert type(layer).__mro__[1] is DecoderLayer
    apply(model, "off")
    assert type(layer) is DecoderLayer
    assert len(gradients(model, loss_of)) > 1


def test_single_products_are_kept_only_of_layers_without_fused_ones() -> None:
    model = GPT(11, d_model=16, n_heads=2, num_layers=2, max_seq_len=8)

    def own() -> set[bool]:
        return {bool(layer.own_kernels) for layer in model.layers}

    apply(model, "full")
    assert own() == {True}
    apply(model, "selective")
    assert own() == {False}
    apply(model, "selective", whole=True)
    assert own() == {True}
    apply(model, "selective")
    apply(model, "off")
    assert own() == {True}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_recompute_with_their_own_weights(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, loss_of = gpt()
    apply(model, "full")
    other = duplicate(model)
    assert type(other.layers[0]) is type(model.layers[0])  # type: ignore[index]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(gradients(other, loss_of)[0], gradients(model, loss_of)[0])
    assert other.layers[0].expand.weight.grad is not None  # type: ignore[index]


def test_replicas_use_their_own_weights() -> None:
    """DataParallel copies a module's attributes one by one, not deeply."""
    model, _ = own()
    apply(model, "full", ["Residual"])
    replica = model.first._replicate_for_data_parallel()  # type: ignore[union-attr, operator]
    replica.inner = nn.Identity()
    assert torch.equal(replica(torch.ones(2, 6)), torch.full((2, 6), 2.0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_compiles_in_one_graph(mode: Mode) -> None:
    model, loss_of = own()
    model.eval()
    expected = gradients(model, loss_of)
    apply(model, mode, ["Residual"])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    loss_of(compiled).backward()  # type: ignore[arg-type]
    for parameter, theirs in zip(model.parameters(), expected[1:], strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, theirs, atol=1e-6)


def _ddp(rank: int, world_size: int) -> dict[str, list[torch.Tensor]]:
    results = {}
    for mode in ("off", *MODES):
        torch.manual_seed(0)
        model = Own()
        apply(model, mode, ["Residual"])  # type: ignore[arg-type]
        wrapped = DDPStrategy(torch.device("cpu"), rank, world_size, ParallelConfig()).place(model)
        torch.manual_seed(rank)
        inputs = torch.randn(4, 6)
        wrapped(inputs).pow(2).sum().backward()
        results[mode] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return results


def test_under_ddp(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(_ddp, 2)
    for mode in MODES:
        for ours, theirs, expected in zip(first[mode], second[mode], first["off"], strict=True):
            assert torch.equal(ours, expected)
            assert torch.equal(ours, theirs)


def test_without_gradients_nothing_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("checkpoint was called")

    model, loss_of = gpt()
    apply(model, "full")
    monkeypatch.setattr(activations, "checkpoint", refuse)
    with torch.no_grad():
        assert torch.isfinite(loss_of(model))
    with pytest.raises(AssertionError, match="checkpoint was called"):
        loss_of(model)


def test_declared_layers() -> None:
    model, _ = own()
    model.checkpoint_layers = [model.second]
    assert find_layers(model) == [model.second]


def test_inner_modules_are_recomputed_with_the_outer() -> None:
    model, _ = own()
    assert find_layers(model, ["Residual", "Linear"]) == [model.first, model.second, model.head]


def test_the_blocks_that_a_model_repeats_are_found() -> None:
    model, _ = own()
    assert find_layers(model) == [model.first, model.second]


def test_blocks_inside_of_two_towers_are_found() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 6)
            self.blocks = nn.Sequential(Residual(), Residual(), Residual())

    model = nn.ModuleDict({"left": Tower(), "right": Tower()})
    assert [type(layer) for layer in find_layers(model)] == [Residual] * 6


def test_experts_inside_of_many_blocks_are_not_taken_for_the_blocks() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Residual() for _ in range(4))

    model = nn.Sequential(*(Experts() for _ in range(6)))
    assert find_layers(model) == list(model)


WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "sizes", "model", "block"),
    [
        ("BertConfig", WIDE, "BertForMaskedLM", "BertLayer"),
        ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2}, "GPT2LMHeadModel", "GPT2Block"),
        ("LlamaConfig", WIDE, "LlamaForCausalLM", "LlamaDecoderLayer"),
    ],
)
def test_blocks_of_hugging_face_models_are_recomputed(config: str, sizes: Any, model: str, block: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = getattr(transformers, config)(vocab_size=50, bos_token_id=1, eos_token_id=2, **sizes)
    made = getattr(transformers, model)(settings).train()
    tokens = torch.randint(50, (2, 8))

    def gradients() -> list[torch.Tensor]:
        made.zero_grad()
        torch.manual_seed(1)
        made(input_ids=tokens, labels=tokens).loss.backward()
        return [parameter.grad.clone() for parameter in made.parameters() if parameter.grad is not None]

    expected = gradients()
    Trainer(made, torch.optim.SGD(made.parameters())).enable_gradient_checkpointing()
    chosen = apply(made, "full")
    assert [type(layer).__name__ for layer in chosen] == [block, block]
    found = gradients()
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_class_that_is_not_there() -> None:
    model, _ = own()
    says = r"memory\.checkpoint_modules: Own has no module of a class Block; it repeats Residual"
    with pytest.raises(ConfigError, match=says):
        apply(model, "full", ["Block"])
    with pytest.raises(ConfigError, match=says):
        Trainer(model, torch.optim.SGD(model.parameters())).enable_gradient_checkpointing(modules=["Block"])


def test_a_model_without_repeated_blocks_is_told_how_to_name_them() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(ConfigError, match=r"Sequential has no block that it repeats.*modules=\[...\].*repeats Linear"):
        Trainer(model, torch.optim.SGD(model.parameters())).enable_gradient_checkpointing()


def test_forward_of_the_instance() -> None:
    model, _ = own()
    model.first.forward = model.first.inner.forward  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="a Residual has a forward of its own"):
        apply(model, "full", ["Residual"])
    assert type(model.second) is Residual


def test_by_config() -> None:
    model, _ = own()
    apply_checkpointing(model, MemoryConfig(activation_checkpointing="selective", checkpoint_modules=["Residual"]))
    assert type(model.first) is not Residual
    apply_checkpointing(model, MemoryConfig())
    assert type(model.first) is Residual


def test_trainer() -> None:
    model, _ = own()
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), run_dir=None)
    assert trainer.enable_gradient_checkpointing("selective", [Residual]) is trainer
    assert trainer.config.memory.activation_checkpointing == "selective"
    assert trainer.config.memory.checkpoint_modules == ["Residual"]
    with pytest.raises(ConfigError, match=r"activation_checkpointing: .* got 'some'"):
        trainer.enable_gradient_checkpointing("some", ["Residual"])
    trainer._began = True
    with pytest.raises(StateError, match=r"enable_gradient_checkpointing\(\) comes too late"):
        trainer.enable_gradient_checkpointing()


@pytest.mark.slow
def test_training_takes_the_same_course() -> None:
    weights = []
    for mode in ("off", *MODES):
        torch.manual_seed(0)
        model = Own()
        data = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)]
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None, device="cpu", seed=1)
        if mode != "off":
            trainer.enable_gradient_checkpointing(mode, ["Residual"])
        trainer.train(data)
        assert (type(model.first) is Residual) == (mode == "off")
        weights.append(list(model.parameters()))
    for off, full, selective in zip(*weights, strict=True):
        assert torch.equal(off, full)
        assert torch.equal(off, selective)
