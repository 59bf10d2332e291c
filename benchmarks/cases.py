"""What is trained: the same model, weights and batches for every contender."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameworm.models.text_classifier import TextClassifier

CLASSES = 4
SEED = 20
POOL = 64  # distinct batches; runs go through them again and again
JUDGED = 8  # batches the final loss is taken over


@dataclass
class Case:
    """One workload on one device.

    Attributes:
        steps: Steps of a block unless asked otherwise.
        goal: What the engine must reach against the bare loop, in words.
        goal_us: Most microseconds per step over the bare loop, if that is the goal.
        goal_ratio: Most times the bare loop's step, if that is the goal.
    """

    name: str
    device: torch.device
    steps: int
    batch_size: int
    learning_rate: float
    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Any]
    loss_of: Callable[[nn.Module, Any], Tensor]
    goal_us: float | None = None
    goal_ratio: float | None = None

    @cached_property
    def batches(self) -> list[Any]:
        """The pool of batches in host memory, page-locked where a GPU reads them."""
        generator = torch.Generator().manual_seed(SEED)
        made = [self.make_batch(generator) for _ in range(POOL)]
        return [_map(batch, Tensor.pin_memory) for batch in made] if self.device.type == "cuda" else made

    @cached_property
    def tokens_per_step(self) -> float | None:
        """Real tokens, without padding, of a batch on average."""
        if not isinstance(self.batches[0], dict):
            return None
        return sum(int(batch["lengths"].sum()) for batch in self.batches) / POOL

    @cached_property
    def _initial(self) -> nn.Module:
        torch.manual_seed(SEED)
        return self.build()

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model with its initial weights and a new optimizer; random numbers start anew, so dropout is the same."""
        model = copy.deepcopy(self._initial).to(self.device)
        torch.manual_seed(SEED + 1)
        return model, torch.optim.AdamW(model.parameters(), lr=self.learning_rate)

    def final_loss(self, model: nn.Module) -> float:
        """Mean loss of a trained model over the first batches, without dropout."""
        model.to(self.device).eval()  # some put it back on the CPU when they are done
        with torch.no_grad():
            losses = [self.loss_of(model, self.to_device(batch)) for batch in self.batches[:JUDGED]]
        return float(torch.stack(losses).mean())

    def to_device(self, batch: Any) -> Any:
        """The batch on the device, without waiting where it is page-locked."""
        if self.device.type == "cpu":
            return batch
        return _map(batch, lambda tensor: tensor.to(self.device, non_blocking=True))


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, dict):
        return {name: change(value) for name, value in batch.items()}
    return tuple(change(value) for value in batch)


def _pair_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, target = batch
    return F.cross_entropy(model(inputs), target)


def _text_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"], batch["lengths"]), batch["labels"])


def _mlp_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(32, 32, generator=generator)
    return inputs, inputs[:, :10].argmax(1)


def _text_batch(batch_size: int, longest: int, vocabulary: int) -> Callable[[torch.Generator], dict[str, Tensor]]:
    """Random tokens in as many as AG News has: about 52 per text, padded to the longest of the batch.

    Each class has a quarter of the vocabulary for every second token, so that there is something to learn.
    """

    def make(generator: torch.Generator) -> dict[str, Tensor]:
        lengths = (52 + 18 * torch.randn(batch_size, generator=generator)).round().long().clamp(8, longest)
        labels = torch.randint(0, CLASSES, (batch_size,), generator=generator)
        width = int(lengths.max())
        tokens = torch.randint(1, vocabulary, (batch_size, width), generator=generator)
        own = tokens % (vocabulary // CLASSES - 1) + 1 + labels[:, None] * (vocabulary // CLASSES)
        tokens = torch.where(torch.arange(width) % 2 == 0, own, tokens)
        tokens[torch.arange(width) >= lengths[:, None]] = 0
        return {"input_ids": tokens, "lengths": lengths, "labels": labels}

    return make


def _mlp_case(name: str, steps: int, widths: tuple[int, ...], **goals: float) -> Case:
    def build() -> nn.Module:
        layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return Case(
        name=name,
        device=torch.device("cpu"),
        steps=steps,
        batch_size=32,
        learning_rate=1e-3,
        build=build,
        make_batch=_mlp_batch,
        loss_of=_pair_loss,
        **goals,
    )


def _text_case(
    name: str,
    device: str,
    steps: int,
    batch_size: int,
    *,
    vocabulary: int,
    longest: int,
    goal_ratio: float | None = None,
    **sizes: Any,
) -> Case:
    return Case(
        name=name,
        device=torch.device(device),
        steps=steps,
        batch_size=batch_size,
        learning_rate=3e-4,
        build=lambda: TextClassifier(vocabulary, CLASSES, max_seq_len=longest, **sizes),
        make_batch=_text_batch(batch_size, longest, vocabulary),
        loss_of=_text_loss,
        goal_ratio=goal_ratio,
    )


def make_case(name: str) -> Case:
    """A case by name."""
    if name == "mlp":
        return _mlp_case(name, 600, (32, 64, 10), goal_us=120.0)
    if name == "mlp-wide":
        return _mlp_case(name, 300, (32, 512, 512, 10), goal_ratio=1.01)
    if name == "text-cpu":
        sizes = {"d_model": 64, "n_heads": 4, "num_layers": 2, "dim_feedforward": 128, "dropout": 0.0}
        return _text_case(name, "cpu", 30, 64, vocabulary=2048, longest=64, **sizes)
    if name == "ag_news":
        sizes = {"d_model": 128, "n_heads": 4, "num_layers": 2, "dim_feedforward": 256, "dropout": 0.1}
        return _text_case(name, "cuda", 300, 32, vocabulary=8192, longest=128, goal_ratio=1.01, **sizes)
    assert name == "ag_news_optimized"
    sizes = {"d_model": 256, "n_heads": 8, "num_layers": 4, "dim_feedforward": 1024, "dropout": 0.1}
    return _text_case(name, "cuda", 200, 128, vocabulary=8192, longest=256, goal_ratio=1.01, **sizes)


CPU_CASES = ("mlp", "mlp-wide", "text-cpu")
GPU_CASES = ("ag_news", "ag_news_optimized")
