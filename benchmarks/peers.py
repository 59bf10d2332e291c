"""Who trains in peers_gpu.py: the same model on the same real texts, each the way that package is meant to be used.

`train` runs in a process of the contender's own (see live.py). All begin with the same weights, take the samples in the
same order (frameworm's packing may arrange the samples of an epoch anew), and take the same number of steps of the same
size under the same schedule, clipping and dropout.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from contenders import LossLog, hush_peers
from live import Gate
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from frameworm.config.load import load_config
from frameworm.config.schema import Config
from frameworm.data.corpora.text import TextDataset, load_text_classification
from frameworm.data.samples.sampling import StepSampler
from frameworm.engine import run as engine_run
from frameworm.engine.job import Ingredients, Job, build_job
from frameworm.hardware.resolve import resolve_here
from frameworm.models.text_classifier import TextClassifier
from frameworm.models.workloads import Workload, build_workload

WORKERS = 4
JUDGED = 2048  # validation samples that the final loss is taken over


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        config: The plain config: model, data and training of every contender.
        fast: The config of frameworm's own entry.
        overrides: Settings for both, such as data.root.
        device: cuda or cpu.
    """

    config: str
    fast: str
    overrides: tuple[str, ...]
    device: str = "cuda"

    def plain(self) -> Config:
        """The plain config with `auto` decided."""
        return resolve_here(load_config(self.config, self.overrides), 1)


@dataclass(frozen=True)
class Entry:
    """One contender.

    Attributes:
        name: As in the table; a variant of a contender is NAME/MODE/PAD.
        kind: bare, lightning, accelerate, frameworm or own (frameworm with a model it cannot pack).
        best: Fused AdamW, torch.compile, nothing that is not training.
        mode: torch.compile's mode.
        pad: longest, or max: always to max_seq_len, so that shapes do not change.
        settings: frameworm settings on top of the config.
        workers: Loader processes of the peers.
    """

    name: str
    kind: str
    best: bool = False
    mode: str | None = None
    pad: str = "longest"
    settings: tuple[str, ...] = ()
    workers: int = WORKERS

    @property
    def package(self) -> str | None:
        """What must be installed."""
        return self.kind if self.kind in ("lightning", "accelerate") else None

    @property
    def missing(self) -> bool:
        """Whether it is not."""
        return self.package is not None and find_spec(self.package) is None


PADDED = ("data.batching=padded", "data.resident=false", "gpu.compile_model=false", "gpu.capture=off")
CAPTURED = ("data.batching=padded", "data.resident=auto", "gpu.compile_model=false", "gpu.capture=step")
MODES = ("reduce-overhead", "default", "max-autotune")
PADS = ("max", "longest")
ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("frameworm", "frameworm"),
        Entry("lightning", "lightning"),
        Entry("accelerate", "accelerate"),
        Entry("lightning-best", "lightning", best=True),
        Entry("accelerate-best", "accelerate", best=True),
        Entry("bare-fp32", "bare"),
        Entry("own-captured", "own", settings=CAPTURED),
        Entry("own-plain", "own", settings=PADDED),
    )
}


def variants(entry: Entry, modes: tuple[str, ...] = MODES, pads: tuple[str, ...] = PADS) -> list[Entry]:
    """What a contender at its best could be; the others are what they are."""
    if not entry.best:
        return [entry]
    return [
        Entry(f"{entry.name}/{mode}/{pad}", entry.kind, True, mode, pad, entry.settings, entry.workers)
        for mode in modes
        for pad in pads
    ]


def train(gate: Gate, work: Work, entry: Entry) -> dict[str, Any]:
    """Train one contender to the end; what came out."""
    hush_peers()
    logging.getLogger("frameworm").setLevel(logging.INFO)
    logging.getLogger("frameworm").addHandler(logging.StreamHandler())
    with tempfile.TemporaryDirectory() as folder:
        task = Task(gate, work, entry, Path(folder))
        facts = TRAINERS[entry.kind](task)
        return {**facts, **task.judge(), **_memory(gate.device)}


@dataclass
class Task:
    """What a contender needs to train."""

    gate: Gate
    work: Work
    entry: Entry
    folder: Path
    config: Config = field(init=False)
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.config = self.work.plain()
        training = self.config.training
        assert isinstance(training.micro_batch, int)
        assert training.accumulation == 1
        self.batch_size = training.micro_batch
        self.total = self.gate.plan.total
        self._judge: nn.Module | None = None

    def begin(self, model: nn.Module) -> nn.Module:
        """Take note of the model before its first step."""
        self.model = model
        self._judge = copy.deepcopy(model)
        # A sum in float64 tells two initialisations apart.
        weights = sum(float(item.detach().double().abs().sum()) for item in model.parameters())
        self.gate.facts["weights"] = weights
        return model

    def prepare(self) -> tuple[nn.Module, DataLoader[Any]]:
        """For the peers: the model on the device and an ordinary loader."""
        workload = build_workload(self.config)
        texts = workload.train_data
        assert isinstance(texts, TextDataset)
        on_gpu = self.gate.device.type == "cuda"
        loader: DataLoader[Any] = DataLoader(
            Samples(texts),
            batch_size=self.batch_size,
            sampler=SameOrder(len(texts), self.batch_size, self.config.seed),
            num_workers=self.entry.workers,
            persistent_workers=self.entry.workers > 0,
            pin_memory=on_gpu,
            drop_last=True,
            collate_fn=Collate(texts.pad_id, texts.max_seq_len if self.entry.pad == "max" else None),
        )
        model = self.begin(workload.model).to(self.gate.device)
        torch.manual_seed(self.config.seed)
        return model, loader

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """AdamW and its schedule, stepped once per step."""
        training = self.config.training
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=training.lr,
            betas=training.betas,
            weight_decay=training.weight_decay,
            fused=True if self.entry.best else None,
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=training.lr, total_steps=self.total + 1, cycle_momentum=False
        )
        return optimizer, scheduler

    def judge(self) -> dict[str, Any]:
        """Loss and accuracy of the trained weights on validation samples, in fp32 and without dropout."""
        model = self._judge
        assert model is not None
        model.load_state_dict(self.model.state_dict())
        model.to(self.gate.device).eval()
        length = self.config.model.model_dump()["max_seq_len"]
        texts = load_text_classification(self.config.data, max_seq_len=length, seed=self.config.seed).val
        assert texts is not None
        count = min(JUDGED, len(texts))
        # From all over the set: files may be sorted by class.
        chosen = torch.linspace(0, len(texts) - 1, count).long().tolist()
        loss_sum, right = 0.0, 0
        with torch.no_grad():
            for begin in range(0, count, 128):
                batch = {
                    name: tensor.to(self.gate.device)
                    for name, tensor in texts.__getitems__(chosen[begin : begin + 128]).items()
                }
                logits = model(batch["input_ids"], batch["lengths"])
                loss_sum += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
                right += int((logits.argmax(1) == batch["labels"]).sum())
        return {"val_loss": loss_sum / count, "val_accuracy": right / count, "val_samples": count}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The objective of every peer."""
    return F.cross_entropy(model(batch["input_ids"], batch["lengths"]), batch["labels"])


def bare(task: Task) -> dict[str, Any]:
    """The loop anyone would write, eager and in fp32."""
    model, loader = task.prepare()
    optimizer, scheduler = task.optimizer(model)
    clip = task.config.training.clip_norm or float("inf")
    device = task.gate.device
    log = LossLog(device)
    model.train()
    while task.gate.open:
        for host_batch in task.gate.batches(loader):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in host_batch.items()}
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            log.add(loss)
    return {"settings": f"fp32, eager, AdamW, padded to {task.entry.pad}, {task.entry.workers} workers, pinned"}


def accelerate(task: Task) -> dict[str, Any]:
    """The same loop with Accelerate around model, optimizer, loader and schedule."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import TorchDynamoPlugin

    entry = task.entry
    model, loader = task.prepare()
    optimizer, scheduler = task.optimizer(model)
    more: dict[str, Any] = {}
    if entry.mode is not None:
        torch.set_float32_matmul_precision("high")
        more["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", mode=entry.mode)
    accelerator = Accelerator(
        cpu=task.gate.device.type == "cpu",
        mixed_precision="bf16",
        dataloader_config=DataLoaderConfiguration(non_blocking=task.gate.device.type == "cuda"),
        **more,
    )
    prepared, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    clip = task.config.training.clip_norm
    log = LossLog(task.gate.device)
    prepared.train()
    while task.gate.open:
        for batch in task.gate.batches(batches):
            optimizer.zero_grad()
            loss = loss_of(prepared, batch)
            accelerator.backward(loss)
            if clip is not None:
                accelerator.clip_grad_norm_(prepared.parameters(), clip)
            optimizer.step()
            scheduler.step()
            log.add(loss)
    return {"settings": _peer_settings(entry)}


def lightning(task: Task) -> dict[str, Any]:
    """Lightning: with loss log, CSV logger and checkpoints, or at its best with nothing but training (barebones)."""
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    entry, training = task.entry, task.config.training
    model, loader = task.prepare()
    on_gpu = task.gate.device.type == "cuda"
    if entry.mode is not None:
        torch.set_float32_matmul_precision("high")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model if entry.mode is None else torch.compile(model, mode=entry.mode)

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            loss = loss_of(self.model, batch)
            if not entry.best:
                self.log("train_loss", loss)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if entry.best and training.clip_norm is not None:  # its own clipping refuses fused optimizers
                torch.nn.utils.clip_grad_norm_(self.parameters(), training.clip_norm)

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = task.optimizer(model)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    more: dict[str, Any] = {"barebones": True}
    if not entry.best:
        every = task.config.checkpoint.every_steps
        more = {
            "logger": CSVLogger(task.folder),
            "callbacks": [ModelCheckpoint(dirpath=task.folder / "checkpoints", every_n_train_steps=every)],
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
    trainer = pl.Trainer(
        max_steps=task.total,
        max_epochs=-1,
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        precision="bf16-mixed",
        gradient_clip_val=None if entry.best else training.clip_norm,
        default_root_dir=task.folder,
        **more,
    )
    # Its loop ends by steps or by this word; an epoch without batches would not end it.
    task.gate.on_early_end = lambda: setattr(trainer, "should_stop", True)
    trainer.fit(Module(), task.gate.loader(loader))
    return {"settings": _peer_settings(entry)}


def frameworm(task: Task) -> dict[str, Any]:
    """The engine from the fast config, as `frameworm train` runs it: records, run folder, checkpoints, progress."""
    config = load_config(task.work.fast, [*task.work.overrides, *task.entry.settings])
    return run_config(task.gate, task.folder, config, task.begin)


def own(task: Task) -> dict[str, Any]:
    """The engine with a model of the user's own that knows nothing of packing."""
    settings = [f"workload={__name__}:own_workload", f"data.pad_to={task.entry.pad}", *task.entry.settings]
    config = load_config(task.work.config, [*task.work.overrides, *settings])
    return run_config(task.gate, task.folder, config, task.begin)


def run_config(gate: Gate, folder: Path, config: Config, begin: Callable[[nn.Module], object]) -> dict[str, Any]:
    """`engine.run.run` with the gate in front of its steps and without validation, which no peer has.

    Args:
        gate: Where its steps wait.
        folder: The run folder is made in it.
        config: What is run.
        begin: Is shown the model before the first step.
    """
    config = config.model_copy(deep=True)
    config.observe.progress = True

    def gated(settled: Config, given: Ingredients) -> Job:
        begin(given.model)
        job = build_job(settled, replace(given, val_loader=None))
        job.train = GatedSource(gate, job.train)  # type: ignore[assignment]
        return job

    with mock.patch.object(engine_run, "build_job", gated):
        record = engine_run.run(config, out=folder / "run")
    return {
        "settings": ", ".join(
            [
                str(record.precision),
                f"batching {config.data.batching}",
                f"compile {config.gpu.compile_model}",
                f"capture {config.gpu.capture}",
            ]
        ),
        "notes": record.notes,
        "phases": {name: phase.share for name, phase in record.phases.items()},
        "padding_waste": record.padding_waste,
        "skipped_steps": record.skipped_steps,
        "captured_steps": record.captured_steps,
        "compilation": None if record.compilation is None else asdict(record.compilation),
    }


class GatedSource:
    """The engine's steps behind the gate."""

    def __init__(self, gate: Gate, source: Any) -> None:
        self._gate = gate
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def epoch(self, *which: Any) -> Iterator[Any]:
        """The steps of an epoch."""
        return self._gate.batches(self._source.epoch(*which))


TRAINERS = {"bare": bare, "accelerate": accelerate, "lightning": lightning, "frameworm": frameworm, "own": own}


class OwnClassifier(nn.Module):
    """A user's model: it takes padded batches and says nothing about packed ones."""

    def __init__(self, inner: TextClassifier) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits of a padded batch."""
        logits: Tensor = self.inner(input_ids, lengths)
        return logits


def own_workload(config: Config) -> Workload:
    """What a user's `workload: module:function` returns; the weights are those of the built-in workload."""
    sizes = dict(config.model.model_dump())
    sizes.pop("init_from", None)
    data = load_text_classification(config.data, max_seq_len=sizes["max_seq_len"], seed=config.seed)
    torch.manual_seed(config.seed)
    model = TextClassifier(vocab_size=data.vocab_size, num_classes=data.num_classes, pad_id=data.pad_id, **sizes)
    return Workload(OwnClassifier(model), data.train)


class Samples(Dataset[dict[str, Tensor]]):
    """Texts one by one, as a data set is usually written."""

    def __init__(self, texts: TextDataset) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._texts[index]


class Collate:
    """Pads a list of texts to the longest, or to a given width."""

    def __init__(self, pad_id: int, width: int | None) -> None:
        self._pad_id = pad_id
        self._width = width

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        tokens = [sample["input_ids"] for sample in samples]
        input_ids = pad_sequence(tokens, batch_first=True, padding_value=self._pad_id)
        if self._width is not None:
            input_ids = F.pad(input_ids, (0, self._width - input_ids.size(1)), value=self._pad_id)
        return {
            "input_ids": input_ids,
            "lengths": torch.stack([sample["lengths"] for sample in samples]),
            "labels": torch.stack([sample["labels"] for sample in samples]),
        }


class SameOrder(Sampler[int]):
    """The order in which frameworm takes padded samples, epoch by epoch."""

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        self._plan = StepSampler(size, batch_size, batch_size, shuffle=True, seed=seed)
        self._epoch = 0

    def __len__(self) -> int:
        return self._plan.size

    def __iter__(self) -> Iterator[int]:
        self._plan.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self._plan.order().tolist())


def _peer_settings(entry: Entry) -> str:
    kind = f"fused AdamW, torch.compile {entry.mode}" if entry.best else "AdamW"
    return f"bf16, {kind}, padded to {entry.pad}, {entry.workers} workers, pinned"


def _memory(device: torch.device) -> dict[str, Any]:
    return {"peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None}
