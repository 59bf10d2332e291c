"""The options of each axis: how people write outputs, batches, loaders, optimizers, schedulers, losses and layers.

An option is one small class that says how it is built and how a plain PyTorch loop would use it. Nothing here knows
frameworm. To grow the suite, add a class to the axis it belongs to.
"""

from __future__ import annotations

import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

SAMPLES = 47  # a short last batch, and a short last step on two ranks, in which no rank has fewer than two samples
VALIDATION = 11
BATCH = 6  # samples per forward pass of all ranks together
FEATURES, WIDTH, CLASSES = 8, 16, 3
Sample = tuple[torch.Tensor, torch.Tensor]


def named(options: Sequence[type[Any]]) -> dict[str, Any]:
    """The options of an axis by name."""
    return {option.name: option() for option in options}


# Data


class Samples(Dataset[Sample]):
    """Samples of eight features, the first of which is the sample's number / 64, and one of three classes."""

    def __init__(self, count: int, seed: int, *, augmented: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, FEATURES, generator=generator)
        self.targets = (self.inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(-1)
        self.inputs[:, 0] = torch.arange(count) / 64
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Sample:
        inputs = self.inputs[index]
        if self.augmented:
            inputs = inputs.clone()
            inputs[1] += torch.rand(())
        return inputs, self.targets[index]


def numbers(inputs: torch.Tensor) -> list[int]:
    """The numbers of the samples in a batch of inputs."""
    return (inputs[:, 0] * 64).round().long().tolist()


# Outputs: what a model returns


class TensorOutput:
    """The scores, or the loss of a model that computes it."""

    name = "tensor"

    def pack(self, scores: torch.Tensor, loss: torch.Tensor | None) -> Any:
        return scores if loss is None else loss

    def scores(self, output: Any) -> torch.Tensor:
        return output

    def loss(self, output: Any) -> torch.Tensor:
        return output


class TupleOutput(TensorOutput):
    """(scores, something else), or (loss, scores) as transformers' models return without `return_dict`."""

    name = "tuple"

    def pack(self, scores: torch.Tensor, loss: torch.Tensor | None) -> Any:
        return (scores, scores.detach().exp()) if loss is None else (loss, scores)

    def scores(self, output: Any) -> torch.Tensor:
        return output[0]

    def loss(self, output: Any) -> torch.Tensor:
        return output[0]


class DictOutput(TensorOutput):
    """A plain dict."""

    name = "dict"

    def pack(self, scores: torch.Tensor, loss: torch.Tensor | None) -> Any:
        return {"logits": scores} if loss is None else {"loss": loss, "logits": scores}

    def scores(self, output: Any) -> torch.Tensor:
        return output["logits"]

    def loss(self, output: Any) -> torch.Tensor:
        return output["loss"]


class ModelOutput(OrderedDict[str, Any]):
    """As the class of this name in transformers: items by name, number or attribute; what is None is left out."""

    def __init__(self, **items: Any) -> None:
        super().__init__({name: item for name, item in items.items() if item is not None})

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(name) from None


class ModelOutputOutput(TensorOutput):
    """An ordered dict with attributes."""

    name = "ModelOutput"

    def pack(self, scores: torch.Tensor, loss: torch.Tensor | None) -> Any:
        return ModelOutput(loss=loss, logits=scores)

    def scores(self, output: Any) -> torch.Tensor:
        return output.logits

    def loss(self, output: Any) -> torch.Tensor:
        return output.loss


@dataclass
class Fields:
    """What a model returns that likes dataclasses."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class DataclassOutput(ModelOutputOutput):
    """A dataclass, which no tree function of torch looks into."""

    name = "dataclass"

    def pack(self, scores: torch.Tensor, loss: torch.Tensor | None) -> Any:
        return Fields(scores, loss)


OUTPUTS = named([TensorOutput, TupleOutput, DictOutput, ModelOutputOutput, DataclassOutput])


# Layers


class Network(nn.Module):
    """From features to scores; `forward` is the batch's and calls `answer`.

    Attributes:
        seen: The numbers of the samples of every forward pass in training.
        interrupt_in: Press Ctrl-C in this forward pass in training, counted from 1.
    """

    def __init__(self, layer: Any, output: TensorOutput, *, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layer = layer.build()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.third.weight = self.second.weight
        self.seen: list[list[int]] = []
        self.interrupt_in: int | None = None
        self._use = layer.use
        self._output = output

    def answer(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        """The output for some inputs, with a loss of the model's own where there are targets."""
        if self.training:
            self.seen.append(numbers(inputs))
            if len(self.seen) == self.interrupt_in:
                os.kill(os.getpid(), signal.SIGINT)
        hidden = self._use(self.layer, inputs, torch.tanh(self.first(inputs)))
        scores = self.head(torch.tanh(self.third(torch.tanh(self.second(hidden)))))
        # Not the cross-entropy that anybody would guess.
        loss = None if targets is None else 1.5 * F.cross_entropy(scores, targets, label_smoothing=0.1)
        return self._output.pack(scores, loss)


class PlainLayer:
    """Nothing that depends on other samples or on random numbers."""

    name = "plain"

    def build(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def use(self, layer: nn.Module, inputs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return layer(hidden)


class BatchNormLayer(PlainLayer):
    """Depends on the other samples of a rank's micro-batch, and has buffers."""

    name = "BatchNorm"

    def build(self) -> nn.Module:
        return nn.BatchNorm1d(WIDTH)


class DropoutLayer(PlainLayer):
    """Draws random numbers in every step."""

    name = "dropout"

    def build(self) -> nn.Module:
        return nn.Dropout(0.25)


class SparseLayer(PlainLayer):
    """An embedding with sparse gradients."""

    name = "sparse"

    def build(self) -> nn.Module:
        return nn.Embedding(7, WIDTH, sparse=True)

    def use(self, layer: nn.Module, inputs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer((inputs[:, 1:4] * 2).long().clamp(-3, 3) + 3).mean(1)


LAYERS = named([PlainLayer, BatchNormLayer, DropoutLayer, SparseLayer])


# Batches: what a loader yields, and the forward of a model that takes it


class TupleBatch:
    """(inputs, targets)."""

    name = "tuple"
    has_target: ClassVar[bool] = True  # whether there is a target to hand to `loss_fn(output, target)`

    def collate(self, samples: list[Sample]) -> Any:
        return torch.stack([inputs for inputs, _ in samples]), torch.stack([target for _, target in samples])

    def forward(self, network: Network, inputs: torch.Tensor) -> Any:
        """`forward` of a model that returns scores."""
        return network.answer(inputs)

    def forward_with_loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """`forward` of a model that computes its own loss."""
        return network.answer(inputs, labels)

    def call(self, model: nn.Module, batch: Any) -> Any:
        """How a plain loop gets the model's scores."""
        return model(batch[0])

    def call_with_loss(self, model: nn.Module, batch: Any) -> Any:
        """How a plain loop gets the model's own loss."""
        return model(*batch)

    def target(self, batch: Any) -> Any:
        """What a plain loop hands to its loss function."""
        return batch[-1]

    def labels(self, target: Any) -> torch.Tensor:
        """The classes in a target."""
        return target


class DictBatch(TupleBatch):
    """A mapping by the names of the model's parameters."""

    name = "dict"

    def collate(self, samples: list[Sample]) -> Any:
        inputs, labels = super().collate(samples)
        return {"inputs": inputs, "labels": labels}

    def call(self, model: nn.Module, batch: Any) -> Any:
        return model(inputs=batch["inputs"])

    def call_with_loss(self, model: nn.Module, batch: Any) -> Any:
        return model(**batch)

    def target(self, batch: Any) -> Any:
        return batch["labels"]


class NestedBatch(TupleBatch):
    """((some, {more, names}), targets): the inputs are one nested object."""

    name = "nested"

    def collate(self, samples: list[Sample]) -> Any:
        inputs, targets = super().collate(samples)
        names = [f"sample {number}" for number in numbers(inputs)]
        return (inputs[:, :5], {"more": inputs[:, 5:], "names": names}), targets

    def forward(self, network: Network, pair: Any) -> Any:
        return network.answer(torch.cat([pair[0], pair[1]["more"]], dim=1))

    def forward_with_loss(self, network: Network, pair: Any, labels: torch.Tensor | None = None) -> Any:
        return network.answer(torch.cat([pair[0], pair[1]["more"]], dim=1), labels)


@dataclass
class Record:
    """A batch as a dataclass."""

    inputs: torch.Tensor
    labels: torch.Tensor


class DataclassBatch(TupleBatch):
    """An object with fields; the model that computes its own loss takes it whole."""

    name = "dataclass"
    has_target = False

    def collate(self, samples: list[Sample]) -> Any:
        return Record(*super().collate(samples))

    def forward_with_loss(self, network: Network, batch: Any) -> Any:  # type: ignore[override]
        return network.answer(batch.inputs, batch.labels)

    def call(self, model: nn.Module, batch: Any) -> Any:
        return model(batch.inputs)

    def call_with_loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch)

    def target(self, batch: Any) -> Any:
        return batch.labels


class ImagesBatch(TupleBatch):
    """([image, ...], [{"label": class}, ...]) as detection models take them: images differ in size."""

    name = "images"

    def collate(self, samples: list[Sample]) -> Any:
        images = [F.pad(inputs[None], (0, 0, 0, number % 3)) for (inputs, _), number in zip(samples, range(1, 99))]
        return images, [{"label": target} for _, target in samples]

    def forward(self, network: Network, images: list[torch.Tensor]) -> Any:  # type: ignore[override]
        return network.answer(torch.stack([image.sum(0) for image in images]))

    def forward_with_loss(self, network: Network, images: list[torch.Tensor], targets: Any = None) -> Any:  # type: ignore[override]
        return network.answer(torch.stack([image.sum(0) for image in images]), self.labels(targets))

    def labels(self, target: Any) -> torch.Tensor:
        return torch.stack([item["label"] for item in target])


class NoneBatch(TupleBatch):
    """(inputs, None, targets): an optional input that this data set does not have."""

    name = "None inside"

    def collate(self, samples: list[Sample]) -> Any:
        inputs, targets = super().collate(samples)
        return inputs, None, targets

    def forward(self, network: Network, inputs: torch.Tensor, mask: torch.Tensor | None) -> Any:  # type: ignore[override]
        return network.answer(inputs if mask is None else inputs * mask)

    def forward_with_loss(  # type: ignore[override]
        self, network: Network, inputs: torch.Tensor, mask: torch.Tensor | None, labels: torch.Tensor | None = None
    ) -> Any:
        return network.answer(inputs if mask is None else inputs * mask, labels)

    def call(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0], batch[1])


BATCHES = named([TupleBatch, DictBatch, NestedBatch, DataclassBatch, ImagesBatch, NoneBatch])


# Loaders


class MapLoader:
    """A DataLoader that shuffles with torch's global random state."""

    name = "map"
    augments: ClassVar[bool] = False
    splits_itself: ClassVar[bool] = False  # whether each rank's loader yields that rank's batches

    def build(self, samples: Samples, batch_size: int, collate: Callable[..., Any], rank: int, ranks: int) -> Any:
        return DataLoader(samples, batch_size, shuffle=True, collate_fn=collate)


class Stream(IterableDataset[Sample]):
    """Samples one after the other."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Sample]:
        return (self.samples[index] for index in range(len(self.samples)))


class IterableLoader(MapLoader):
    """A DataLoader over an iterable data set."""

    name = "iterable"

    def build(self, samples: Samples, batch_size: int, collate: Callable[..., Any], rank: int, ranks: int) -> Any:
        return DataLoader(Stream(samples), batch_size, collate_fn=collate)


class Blocks:
    """A batch sampler of one's own: neighbouring samples, in blocks whose order depends on the epoch.

    On several ranks it yields its rank's batches, as one written for DDP does.
    """

    def __init__(self, size: int, batch_size: int, rank: int, ranks: int) -> None:
        self.rank, self.num_replicas = rank, ranks
        self.epoch = 0
        self._blocks = [list(range(begin, min(begin + batch_size, size))) for begin in range(0, size, batch_size)]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._blocks[self.rank :: self.num_replicas])

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self._blocks) - 1, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        blocks = [self._blocks[place] for place in [*order, len(order)]]  # the short one comes last
        return iter(blocks[self.rank :: self.num_replicas])


class BatchSamplerLoader(MapLoader):
    """A DataLoader with a batch sampler of one's own."""

    name = "batch sampler"
    splits_itself = True

    def build(self, samples: Samples, batch_size: int, collate: Callable[..., Any], rank: int, ranks: int) -> Any:
        return DataLoader(samples, batch_sampler=Blocks(len(samples), batch_size, rank, ranks), collate_fn=collate)


class GeneratorLoader(MapLoader):
    """A DataLoader that shuffles with a generator of its own."""

    name = "generator"

    def build(self, samples: Samples, batch_size: int, collate: Callable[..., Any], rank: int, ranks: int) -> Any:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(samples, batch_size, shuffle=True, generator=generator, collate_fn=collate)


class FunctionLoader(MapLoader):
    """A generator function that yields batches."""

    name = "function"

    def build(self, samples: Samples, batch_size: int, collate: Callable[..., Any], rank: int, ranks: int) -> Any:
        def batches() -> Iterator[Any]:
            for begin in range(0, len(samples), batch_size):
                yield collate([samples[index] for index in range(begin, min(begin + batch_size, len(samples)))])

        return batches


class WorkersLoader(MapLoader):
    """A worker process that outlives the epoch and draws the augmentation."""

    name = "persistent workers"
    augments = True

    def build(self, samples: Samples, batch_size: int, collate: Callable[..., Any], rank: int, ranks: int) -> Any:
        return DataLoader(samples, batch_size, shuffle=True, num_workers=1, persistent_workers=True, collate_fn=collate)


LOADERS = named([MapLoader, IterableLoader, BatchSamplerLoader, GeneratorLoader, FunctionLoader, WorkersLoader])


# Optimizers


class MomentumOptimizer:
    """SGD with momentum."""

    name = "SGD momentum"
    ties: ClassVar[bool] = False

    def build(self, model: Network, loss_parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), *loss_parameters], lr=0.1, momentum=0.9)


class AdamWOptimizer(MomentumOptimizer):
    """AdamW. Its epsilon is not far below the gradients: it would make small rounding large otherwise."""

    name = "AdamW"

    def build(self, model: Network, loss_parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*model.parameters(), *loss_parameters], lr=0.01, eps=1e-4)


class GroupsOptimizer(MomentumOptimizer):
    """Parameter groups with rates and weight decay of their own."""

    name = "param groups"

    def build(self, model: Network, loss_parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        head = [*model.head.parameters(), *loss_parameters]
        ids = {id(item) for item in head}
        body = [item for item in model.parameters() if id(item) not in ids]
        return torch.optim.SGD([{"params": body}, {"params": head, "lr": 0.2, "weight_decay": 0.01}], lr=0.1)


class FrozenOptimizer(MomentumOptimizer):
    """A frozen layer that the optimizer does not hold."""

    name = "frozen"

    def build(self, model: Network, loss_parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        model.first.requires_grad_(False)
        trained = [item for item in model.parameters() if item.requires_grad]
        return torch.optim.SGD([*trained, *loss_parameters], lr=0.1)


class TiedOptimizer(MomentumOptimizer):
    """Two layers share their weights."""

    name = "tied"
    ties = True

    def build(self, model: Network, loss_parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), *loss_parameters], lr=0.05, momentum=0.9, nesterov=True)


OPTIMIZERS = named([GroupsOptimizer, FrozenOptimizer, TiedOptimizer, MomentumOptimizer, AdamWOptimizer])


# Schedulers


class NoScheduler:
    """The rates stay."""

    name = "none"
    per: ClassVar[str] = "step"  # step, epoch or metric: when a plain loop steps it, and with what

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return None


class LambdaScheduler(NoScheduler):
    """A function of the step, stepped once per step."""

    name = "LambdaLR"

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.97**step)


class OneCycleScheduler(NoScheduler):
    """Sets momentum too, and knows how many steps there will be."""

    name = "OneCycleLR"

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return OneCycleLR(optimizer, max_lr=[group["lr"] for group in optimizer.param_groups], total_steps=total_steps)


class StepScheduler(NoScheduler):
    """Stepped once per epoch."""

    name = "StepLR"
    per = "epoch"

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return StepLR(optimizer, 1, gamma=0.5)


class PlateauScheduler(NoScheduler):
    """Stepped once per epoch with the validation loss; no epoch is good enough for this one."""

    name = "ReduceLROnPlateau"
    per = "metric"

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)


SCHEDULERS = named([NoScheduler, LambdaScheduler, OneCycleScheduler, StepScheduler, PlateauScheduler])


# Losses


class FunctionLoss:
    """A function of the model's output and the target."""

    name = "function"
    of_model: ClassVar[bool] = False  # whether the model computes it
    given: ClassVar[bool] = True  # whether there is a loss function at all

    def module(self) -> nn.Module | None:
        """What holds the loss's own parameters."""
        return None

    def compute(self, module: nn.Module | None, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, labels, label_smoothing=0.2)

    def count(self, labels: torch.Tensor) -> float:
        """What the loss is the mean over."""
        return float(len(labels))

    def result(self, loss: torch.Tensor, labels: torch.Tensor) -> Any:
        """What the user's function returns."""
        return loss


class DefaultLoss(FunctionLoss):
    """None is given: cross-entropy of class scores and integer targets."""

    name = "none given"
    given = False

    def compute(self, module: nn.Module | None, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, labels)


class Criterion(nn.Module):
    """A loss with parameters: a temperature and a bias for each class, and a buffer that follows the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.full((1,), 1.3))
        self.bias = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))

    def score(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores * self.temperature + self.bias, labels)


class ModuleLoss(FunctionLoss):
    """A module whose own parameters are trained too."""

    name = "module with parameters"

    def module(self) -> nn.Module | None:
        return Criterion()

    def compute(self, module: Any, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return module.score(scores, labels)


class OwnLoss(FunctionLoss):
    """The model returns its loss."""

    name = "model's own"
    of_model = True
    given = False


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


class WeightedLoss(FunctionLoss):
    """Returns (loss, count), the count being the sum of the samples' weights, which are whole numbers."""

    name = "weighted"

    def compute(self, module: nn.Module | None, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, labels, weight=CLASS_WEIGHTS)

    def count(self, labels: torch.Tensor) -> float:
        return float(CLASS_WEIGHTS[labels].sum())

    def result(self, loss: torch.Tensor, labels: torch.Tensor) -> Any:
        return loss, CLASS_WEIGHTS[labels].sum()


LOSSES = named([FunctionLoss, DefaultLoss, ModuleLoss, OwnLoss, WeightedLoss])
