"""Small models as others write them, changes that only round, and changes that are wrong, for `proof.py`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from frameworm import Workload
from frameworm.engine.gate import Session
from frameworm.engine.lockstep import FollowingGate
from frameworm.numerics.state import Named

SAMPLES = 192


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Encoder(nn.Module):
    """A transformer over padded texts, with dropout; 0 is padding."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 32)
        self.place = nn.Parameter(torch.randn(12, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        real = ids != 0
        hidden = self.layers(self.embedding(ids) + self.place, src_key_padding_mask=~real)
        return self.head((hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True))


class Pictures(nn.Module):
    """Convolutions with batch norm, whose biases in front of the norm have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, 2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(64, 5)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(pictures))


class Tagger(nn.Module):
    """A bidirectional LSTM with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.lstm = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(32, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0].mean(1))


class Denoiser(nn.Module):
    """A small U-Net with group norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(inner: int, outer: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.SiLU())

        self.down, self.middle = block(3, width), block(width, 2 * width)
        self.up, self.out = block(3 * width, width), nn.Conv2d(width, 3, 1)

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        down = self.down(noisy)
        middle = self.middle(F.avg_pool2d(down, 2))
        return self.out(self.up(torch.cat([F.interpolate(middle, scale_factor=2), down], 1)))


class Recommender(nn.Module):
    """Tables of categories and pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(rows[:, :3])
        parts = torch.stack([dense, *(table(rows[:, 3 + i].long()) for i, table in enumerate(self.tables))], 1)
        first, second = torch.triu_indices(5, 5, 1, device=rows.device)
        products = (parts @ parts.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


def _language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
        attention_bias=True,
    )
    return LlamaForCausalLM(config)


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tokens that a language model can learn."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def build(name: str, seed: int) -> Workload:
    """A model with its own weights and data for each seed."""
    torch.manual_seed(seed)
    draw = _generator(seed + 1)
    data: Any
    if name == "encoder":
        ids = torch.randint(1, 200, (SAMPLES, 12), generator=draw)
        lengths = torch.randint(3, 13, (SAMPLES, 1), generator=draw)
        ids[torch.arange(12) >= lengths] = 0
        data, loss = TensorDataset(ids, ids[:, 0] % 4), F.cross_entropy
        return Workload(Encoder(), data, None, loss)
    if name == "pictures":
        labels = torch.randint(0, 5, (SAMPLES,), generator=draw)
        pictures = torch.randn(SAMPLES, 3, 8, 8, generator=draw) + labels.view(-1, 1, 1, 1) * 0.3
        return Workload(Pictures(), TensorDataset(pictures, labels), None, F.cross_entropy)
    if name == "tagger":
        ids = torch.randint(0, 100, (SAMPLES, 10), generator=draw)
        return Workload(Tagger(), TensorDataset(ids, ids[:, 0] % 3), None, F.cross_entropy)
    if name == "denoiser":
        clean = torch.randn(SAMPLES, 3, 8, 8, generator=draw)
        noisy = clean + 0.3 * torch.randn(clean.shape, generator=draw)
        return Workload(Denoiser(), TensorDataset(noisy, clean), None, F.mse_loss)
    if name == "recommender":
        dense = torch.rand(SAMPLES, 3, generator=draw)
        rows = torch.cat([dense, torch.randint(0, 50, (SAMPLES, 4), generator=draw).float()], 1)
        return Workload(Recommender(), TensorDataset(rows, (dense[:, 0] > 0.5).float()), None, _logits_loss)
    assert name == "llama", name
    ids = torch.randint(0, 96, (SAMPLES, 16), generator=draw)
    ids[:, 1::2] = (ids[:, 0::2] * 7 + 3) % 96
    return Workload(_language_model(), Words(ids))


def _logits_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits.float(), target)


MODELS = ("encoder", "pictures", "tagger", "denoiser", "recommender", "llama")
REPEATING = ("encoder", "llama")  # those with blocks of one class, whose activations can be recomputed
RANDOM = ("encoder", "tagger", "recommender")  # those with dropout


# Changes that only round

HONEST: dict[str, dict[str, dict[str, Any]]] = {
    "smaller micro-batches": {"training": {"micro_batch": 8, "accumulation": 2}},
    "smallest micro-batches": {"training": {"micro_batch": 2, "accumulation": 8}},
    "another loader": {"data": {"num_workers": 0, "prefetch_factor": 4}},
    "activation checkpointing": {"memory": {"activation_checkpointing": "full"}},
    "another kernel of GELU": {"training": {"cpu_gelu": "keep_slope"}},
    "bf16": {"gpu": {"mixed_precision": "bf16"}},
    "compiled": {"gpu": {"compile_model": True}},
    "compiled in bf16": {"gpu": {"compile_model": True, "mixed_precision": "bf16"}},
    "captured": {"gpu": {"capture": "step"}},
    "captured in bf16": {"gpu": {"capture": "step", "mixed_precision": "bf16"}},
    "compiled and captured in bf16": {"gpu": {"compile_model": True, "capture": "step", "mixed_precision": "bf16"}},
    "TF32": {"gpu": {"tf32": True}},
    "fp16": {"gpu": {"mixed_precision": "fp16"}},
    "channels last": {"gpu": {"channels_last": True}},
}


# Changes that are wrong


@dataclass
class Fault:
    """A planted fault.

    Attributes:
        change: What it does to the workload of the side after the change.
        gate: What it does to the run itself.
        settings: Changes to its config.
        models: Where it makes sense.
        eager: It cannot be planted into a captured step.
    """

    change: Callable[[Workload, random.Random], object] = lambda workload, draw: None
    gate: type[FollowingGate] = FollowingGate
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: tuple[str, ...] = MODELS
    eager: bool = False


def _layers(model: nn.Module) -> list[nn.Module]:
    """Layers whose weights have a gradient of some size."""
    return [layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d, nn.LSTM, nn.Embedding))]


def _scale(factor: float) -> Callable[[Workload, random.Random], None]:
    def change(workload: Workload, draw: random.Random) -> None:
        layer = draw.choice(_layers(workload.model))
        for parameter in layer.parameters(recurse=False):
            parameter.register_hook(lambda gradient: gradient * factor)

    return change


def _scale_all(factor: float) -> Callable[[Workload, random.Random], None]:
    def change(workload: Workload, draw: random.Random) -> None:
        for parameter in workload.model.parameters():
            parameter.register_hook(lambda gradient: gradient * factor)

    return change


def _freeze(workload: Workload, draw: random.Random) -> None:
    for parameter in draw.choice(_layers(workload.model)).parameters(recurse=False):
        parameter.requires_grad_(False)


def _stop_gradient(workload: Workload, draw: random.Random) -> None:
    """A layer that is still trained, by nothing."""
    for parameter in draw.choice(_layers(workload.model)).parameters(recurse=False):
        parameter.register_hook(torch.zeros_like)


def _no_dropout(workload: Workload, draw: random.Random) -> None:
    for layer in workload.model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
            layer.dropout = 0.0


class _SameMask(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share
        self._masks: dict[torch.Size, torch.Tensor] = {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return values
        mask = self._masks.get(values.shape)
        if mask is None:
            mask = self._masks[values.shape] = (torch.rand_like(values) >= self._share) / (1 - self._share)
        return values * mask


def _constant_masks(workload: Workload, draw: random.Random) -> None:
    """What a graph does that has recorded the host's random numbers."""
    _no_dropout(workload, draw)
    model = workload.model
    last = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][-1]
    parent = model.get_submodule(last.rpartition(".")[0])
    name = last.rpartition(".")[2]
    layer = model.get_submodule(last)
    setattr(parent, name, _Named(_SameMask(0.1), layer))


class _Named(nn.Module):
    """Two layers in a row under the parameter names of the second."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self._first = [first]
        self.weight, self.bias = second.weight, second.bias

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return F.linear(self._first[0](values), self.weight, self.bias)  # type: ignore[arg-type]


def _weaker_dropout(workload: Workload, draw: random.Random) -> None:
    for layer in workload.model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p /= 4
        elif isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
            layer.dropout /= 4


def _with_inputs(change: Callable[[Any], Any]) -> Callable[[Workload, random.Random], None]:
    def plant(workload: Workload, draw: random.Random) -> None:
        forward = workload.model.forward

        def other(*inputs: Any, **named: Any) -> Any:
            if inputs:
                return forward(change(inputs[0]), *inputs[1:], **named)
            return forward(**{**named, "input_ids": change(named["input_ids"])})

        workload.model.forward = other  # type: ignore[method-assign]
        _keep_signature(other, forward)

    return plant


def _keep_signature(other: Any, forward: Any) -> None:
    other.__signature__ = inspect.signature(forward)


def _baked_in() -> Callable[[Workload, random.Random], None]:
    def plant(workload: Workload, draw: random.Random) -> None:
        first: dict[torch.Size, torch.Tensor] = {}
        _with_inputs(lambda inputs: first.setdefault(inputs.shape, inputs))(workload, draw)

    return plant


def _other_loss(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Workload, random.Random], None]:
    def plant(workload: Workload, draw: random.Random) -> None:
        loss_fn = workload.loss_fn
        assert loss_fn is not None

        def other(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = loss_fn(output, change(target))
            return result

        object.__setattr__(workload, "loss_fn", other)

    return plant


def _smoothed(workload: Workload, draw: random.Random) -> None:
    object.__setattr__(workload, "loss_fn", nn.CrossEntropyLoss(label_smoothing=0.02))


def _padding_counts(workload: Workload, draw: random.Random) -> None:
    model = workload.model
    assert isinstance(model, Encoder)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        hidden = model.layers(model.embedding(ids) + model.place)
        return model.head(hidden.mean(1))

    model.forward = forward  # type: ignore[method-assign]


def _drops_last(workload: Workload, draw: random.Random) -> None:
    """The last of two micro-batches gives no gradient."""
    calls = [0]
    _with_inputs(lambda inputs: inputs)(workload, draw)
    forward = workload.model.forward

    def other(*inputs: Any, **named: Any) -> Any:
        calls[0] += 1
        output = forward(*inputs, **named)
        if calls[0] % 2:
            return output
        if isinstance(output, torch.Tensor):
            return output.detach() + 0 * output
        return type(output)(loss=output.loss.detach() + 0 * output.loss, logits=output.logits)

    _keep_signature(other, forward)
    workload.model.forward = other  # type: ignore[method-assign]


def _norm_in_eval(workload: Workload, draw: random.Random) -> None:
    for layer in workload.model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()


def _other_momentum(workload: Workload, draw: random.Random) -> None:
    for layer in workload.model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 0.11


class _Late(FollowingGate):
    """The rate of the step after this one."""

    def begin(self, session: Session) -> None:
        super().begin(session)
        before_step = self._rates.before_step
        self._rates.before_step = lambda step: before_step(step + 1)  # type: ignore[method-assign]


class _Stale(FollowingGate):
    """One layer computes with the weights of an earlier step."""

    def begin(self, session: Session) -> None:
        super().begin(session)
        sizes = {name: item.numel() for name, item in self._parameters.items()}
        self._stale = max(sizes, key=lambda name: sizes[name])

    def _load(self, saved: Named, seed: int | None) -> None:
        name = f"parameter {self._stale}"
        older = getattr(self, "_older", None)
        super()._load(saved if older is None else {**saved, name: older}, seed)
        self._older = saved[name].clone()


class _LostDecay(FollowingGate):
    """The optimizer leaves out one parameter's weight decay, though its groups say otherwise."""

    def begin(self, session: Session) -> None:
        super().begin(session)
        optimizer = session.step.update.optimizer
        name = max(self._parameters, key=lambda name: self._parameters[name].numel())
        parameter, step = self._parameters[name], optimizer.step

        def other(*args: Any, **options: Any) -> Any:
            before = parameter.detach().clone()
            result = step(*args, **options)
            group = next(
                group for group in optimizer.param_groups if any(item is parameter for item in group["params"])
            )
            with torch.no_grad():
                parameter.add_(before, alpha=float(group["lr"]) * group["weight_decay"])
            return result

        optimizer.step = other  # type: ignore[method-assign]
        session.step.update._on_host = None


class _OtherGroup(FollowingGate):
    """One parameter is in a group without weight decay."""

    def begin(self, session: Session) -> None:
        optimizer = session.step.update.optimizer
        group = optimizer.param_groups[0]
        moved = group["params"].pop()
        optimizer.add_param_group({**group, "params": [moved], "weight_decay": 0.0})
        super().begin(session)


class _Unclipped(FollowingGate):
    """Gradients are not clipped, though the config says so."""

    def begin(self, session: Session) -> None:
        super().begin(session)
        session.step.update._weigh_and_clip = lambda parameters, gradients, factor: torch.ones(())  # type: ignore


HALVES = {"training": {"micro_batch": 8, "accumulation": 2}}
CLASSES = ("encoder", "pictures", "tagger")
FAULTS: dict[str, Fault] = {
    "gradient x 1.02 of one layer": Fault(_scale(1.02)),
    "gradient x 1.005 of one layer": Fault(_scale(1.005)),
    "gradient x 0.98 of one layer": Fault(_scale(0.98)),
    "half of all gradients (mean over ranks twice)": Fault(_scale_all(0.5)),
    "twice all gradients (sum over ranks)": Fault(_scale_all(2.0)),
    "a layer frozen": Fault(_freeze),
    "a layer without gradient": Fault(_stop_gradient),
    "weight decay of one parameter lost": Fault(gate=_LostDecay, eager=True),
    "one parameter in a group without decay": Fault(gate=_OtherGroup),
    "rate of the next step": Fault(gate=_Late),
    "stale weights of one layer": Fault(gate=_Stale),
    "not clipped": Fault(gate=_Unclipped, eager=True),
    "clipped at another norm": Fault(settings={"training": {"clip_norm": 0.11}}),
    "another weight decay": Fault(settings={"training": {"weight_decay": 0.02}}),
    "dropout off": Fault(_no_dropout, models=RANDOM),
    "dropout a quarter": Fault(_weaker_dropout, models=RANDOM),
    "constant masks": Fault(_constant_masks, models=RANDOM),
    "the wrong batch": Fault(_with_inputs(lambda inputs: inputs.roll(1, 0))),
    "a batch baked into the graph": Fault(_baked_in()),
    "shifted labels": Fault(
        _other_loss(lambda target: target.roll(1, 0)), models=(*CLASSES, "denoiser", "recommender")
    ),
    "label smoothing": Fault(_smoothed, models=CLASSES),
    "padding counted": Fault(_padding_counts, models=("encoder",)),
    "last micro-batch dropped": Fault(_drops_last, settings=HALVES, eager=True),
    "batch norm in evaluation mode": Fault(_norm_in_eval, models=("pictures",)),
    "another momentum of batch norm": Fault(_other_momentum, models=("pictures",)),
}
