"""Who trains: each function trains a case's model through one loader, the way that package is meant to be used.

All train in eager fp32 with the same optimizer. The peers get what an expert would give them: Lightning once with
everything off that can be switched off, Accelerate with copies that do not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from cases import Case
from torch import nn
from torch.utils.data import DataLoader

READ_EVERY = 50  # steps between two readings of the loss on a GPU
SAVE_EVERY = 500  # frameworm's own default, given to Lightning too

Train = Callable[[Case, nn.Module, torch.optim.Optimizer, "DataLoader[Any]", Path], None]


class LossLog:
    """The loss log of a hand-written loop: every step on CPU; on a GPU a mean now and then, so that it rarely waits."""

    def __init__(self, device: torch.device) -> None:
        self.losses: list[float] = []
        self._sum = torch.zeros((), device=device) if device.type == "cuda" else None
        self._steps = 0

    def add(self, loss: torch.Tensor) -> None:
        if self._sum is None:
            self.losses.append(loss.item())
            return
        self._sum += loss.detach()
        self._steps += 1
        if self._steps % READ_EVERY == 0:
            self.losses.append(self._sum.item() / READ_EVERY)
            self._sum.zero_()


def bare_loop(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], folder: Path
) -> None:
    """The loop anyone would write, with the best plain habits: page-locked batches and copies that do not wait."""
    log = LossLog(case.device)
    model.train()
    for host_batch in loader:
        batch = case.to_device(host_batch)
        optimizer.zero_grad()
        loss = case.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        log.add(loss)


def monitored_loop(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], folder: Path
) -> None:
    """The bare loop, watched: every phase of every step timed and written down, and the machine looked at."""
    from frameworm import PerformanceMonitor
    from frameworm.observe.system.sampler import SystemSampler

    log = LossLog(case.device)
    model.train()
    monitor = PerformanceMonitor(folder / "steps.jsonl", device=case.device)
    with SystemSampler(case.device, path=folder / "system.jsonl"):
        batches = iter(loader)
        while True:
            monitor.start_step()
            with monitor.measure("data_loading_time"):
                host_batch = next(batches, None)
            if host_batch is None:
                break
            batch = case.to_device(host_batch)
            optimizer.zero_grad()
            with monitor.measure("forward_time"):
                loss = case.loss_of(model, batch)
            with monitor.measure("backward_time"):
                loss.backward()
            with monitor.measure("optimizer_time"):
                optimizer.step()
            log.add(loss)
    monitor.close()


def frameworm(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], folder: Path
) -> None:
    """The engine as it comes: steps recorded, run folder, checkpoints, progress line (plain: there is no terminal)."""
    from frameworm import GPUConfig, Trainer

    gpu = GPUConfig(device=case.device.type, mixed_precision="off", tf32=False)
    Trainer(model, optimizer, gpu=gpu, run_dir=folder / "run", progress=True, every_steps=SAVE_EVERY).train(loader)


def lightning_barebones(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], folder: Path
) -> None:
    """Lightning's own setting for measuring overhead: no logging, no bar, no checkpoints, no checks."""
    import lightning

    module = _lightning_module(case, model, optimizer, logs=False)
    trainer = lightning.Trainer(max_epochs=1, accelerator=_accelerator(case), devices=1, barebones=True)
    trainer.fit(module, loader)


def lightning_usual(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], folder: Path
) -> None:
    """Lightning as it is mostly run: loss logged and shown in the bar, CSV logger, checkpoints."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator=_accelerator(case),
        devices=1,
        default_root_dir=folder,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=SAVE_EVERY)],
    )
    trainer.fit(_lightning_module(case, model, optimizer, logs=True), loader)


def fabric(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], folder: Path
) -> None:
    """The bare loop with Lightning Fabric around model, optimizer and loader."""
    from lightning.fabric import Fabric

    made = Fabric(accelerator=_accelerator(case), devices=1)
    log = LossLog(case.device)
    wrapped, wrapped_optimizer = made.setup(model, optimizer)
    wrapped.train()
    for batch in made.setup_dataloaders(loader):
        wrapped_optimizer.zero_grad()
        loss = case.loss_of(wrapped, batch)
        made.backward(loss)
        wrapped_optimizer.step()
        log.add(loss)


def accelerate(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], folder: Path
) -> None:
    """The bare loop with Accelerate around model, optimizer and loader."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState, GradientState

    # It keeps the device of its first use for the life of the process; cases on other devices follow.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=case.device.type == "cpu",
        dataloader_config=DataLoaderConfiguration(non_blocking=case.device.type == "cuda"),
    )
    log = LossLog(case.device)
    prepared, prepared_optimizer, prepared_loader = accelerator.prepare(model, optimizer, loader)
    prepared.train()
    for batch in prepared_loader:
        prepared_optimizer.zero_grad()
        loss = case.loss_of(prepared, batch)
        accelerator.backward(loss)
        prepared_optimizer.step()
        log.add(loss)


BASELINE = "bare"
CONTENDERS: dict[str, tuple[Train, str | None]] = {
    BASELINE: (bare_loop, None),
    "frameworm": (frameworm, None),
    "monitored": (monitored_loop, None),
    "lightning": (lightning_barebones, "lightning"),
    "lightning-usual": (lightning_usual, "lightning"),
    "fabric": (fabric, "lightning"),
    "accelerate": (accelerate, "accelerate"),
}


def missing_package(name: str) -> str | None:
    """The package that this contender lacks here, if any."""
    package = CONTENDERS[name][1]
    return package if package is not None and find_spec(package) is None else None


def hush_peers() -> None:
    """Peers announce themselves through logging at every start."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _accelerator(case: Case) -> str:
    return "gpu" if case.device.type == "cuda" else "cpu"


def _lightning_module(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, *, logs: bool) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
            loss = case.loss_of(self.model, batch)
            if logs:
                self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    return Module()
