"""A model with everything that is awkward to divide, and its training under any strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from workbench import Sequences, Steps, classification

from frameworm import Trainer
from frameworm.config.schema import Config, TrainingConfig
from frameworm.distributed import OptimizedDataLoader
from frameworm.engine.optim.optimizers import build_optimizer
from frameworm.models.gpt import GPT
from frameworm.records.schema import RunRecord

WORLD = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.contract(torch.tanh(self.expand(self.norm(hidden))))
        return result


class Net(nn.Module):
    """Layers, odd sizes, a parameter with a single row, and buffers if asked for."""

    def __init__(self, buffers: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8) if buffers else nn.Identity()
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        result: torch.Tensor = self.head(self.norm(hidden) * self.scale)
        return result


class Tied(nn.Module):
    """Scores tokens with the weights that embed them; one class per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        result: torch.Tensor = self.head(hidden)
        return result


def make(kind: str) -> tuple[nn.Module, Any]:
    """A model of a kind, and the data for it."""
    torch.manual_seed(3)
    if kind == "gpt":
        return GPT(11, d_model=8, n_heads=2, num_layers=2, max_seq_len=8), Sequences(52)
    if kind == "tied":
        return Tied(), Sequences(52)  # the loss counts tokens, of which the ranks have unequal numbers
    return Net(buffers=kind == "buffers"), classification(52)


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [item for item in model.parameters() if item.ndim > 1]
    vectors = [item for item in model.parameters() if item.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if kind in ("sgd", "fused_sgd"):
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=kind == "fused_sgd")
    if kind == "muon":
        training = TrainingConfig(optimizer="muon", lr=0.01, weight_decay=0.1)
        return build_optimizer(model, Config(training=training))
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.05)
    return torch.optim.AdamW(groups, lr=0.01, fused=kind == "fused")


def _whole(item: DTensor) -> torch.Tensor:
    part = item.to_local().to(item.device_mesh.device_type)  # parts that wait in host memory cannot be sent from there
    shape, stride = item.shape, item.stride()
    return DTensor.from_local(part, item.device_mesh, item.placements, shape=shape, stride=stride).full_tensor()


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything the model holds, whole; all ranks must call it."""

    def full(item: torch.Tensor) -> torch.Tensor:
        # Shards that wait in host memory are sent from the device that the ranks meet on.
        return _whole(item) if isinstance(item, DTensor) else item

    return {name: full(item).detach().clone() for name, item in model.state_dict().items()}


def train(
    strategy: str,
    *,
    kind: str = "plain",
    optimizer: str = "adamw",
    world_size: int = WORLD,
    accumulation: int = 1,
    max_steps: int = 10,
    folder: Path | None = None,
    resume: bool = False,
    validation: Any = None,
    scheduler: bool = False,
    **settings: Any,
) -> tuple[dict[str, torch.Tensor], RunRecord, list[float | None]]:
    """Train; returns the whole model, the record and the losses of this rank's steps."""
    model, data = make(kind)
    chosen = make_optimizer(optimizer, model)
    steps = Steps()
    rates = torch.optim.lr_scheduler.StepLR(chosen, 3, 0.5) if scheduler else None
    trainer = Trainer(
        model,
        chosen,
        scheduler=rates,
        strategy=strategy,
        accumulation=accumulation,
        max_steps=max_steps,
        run_dir=folder,
        device="cpu",
        progress=False,
        callbacks=[steps],
        **settings,
    )
    loader = OptimizedDataLoader.create(data, 8 // (world_size * accumulation), seed=2)
    record = trainer.train(loader, validation, epochs=3, resume="auto" if resume else None)
    return whole_values(model), record, [step.loss for step in steps.records]


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def apart(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """How far two trainings are apart, as a share of the way they went; and where most, in words."""
    assert first.keys() == second.keys() == start.keys()
    differences = {name: (first[name] - second[name]).double() for name in start}
    way = sum(float((second[name] - start[name]).double().square().sum()) for name in start) ** 0.5
    between = sum(float(item.square().sum()) for item in differences.values()) ** 0.5
    largest = sorted(((float(item.abs().max()), name) for name, item in differences.items()), reverse=True)[:3]
    return between / way, ", ".join(f"{name} by {size:.2g}" for size, name in largest)


def perplexing(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss whose gradients are bad in one step, on one rank only."""
    inputs, target = batch
    loss = F.cross_entropy(model(inputs), target)
    if bool((inputs[:, 0] > 1e3).any()):
        loss = loss * float("inf")
    return loss
