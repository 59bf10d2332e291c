"""`find_optimal_batch_size`: the batch-size finder for a live model."""

from __future__ import annotations

import ast
import copy
import inspect
import math
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from frameworm.config.schema import Config
from frameworm.engine.settings import api_defaults, apply_settings
from frameworm.errors import ConfigError, FramewormError, TrainingFailedError
from frameworm.launch.process_group import broadcast_object, is_distributed, setup_ddp
from frameworm.models.workloads import Workload
from frameworm.scaling.batch_search import BatchSizeReport
from frameworm.tune.batch_size.search import BUDGET_S, DEADLINE_S, BatchSizeFinder
from frameworm.tune.processes.forkserver import refers_to_main

_HOW = "give data= (a data set), sample= (one sample of it) or input_shape= (of one input, without the batch dimension)"


class BatchSize(int):
    """The largest micro-batch that fits, verified; an int, with the whole search in `report`."""

    report: BatchSizeReport

    @property
    def fastest(self) -> int | None:
        """The smallest micro-batch within 2% of the best throughput."""
        return self.report.fastest


class RepeatedSample(Dataset[Any]):
    """A data set that repeats one sample."""

    def __init__(self, sample: Any, count: int) -> None:
        self.sample = sample
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        """The sample."""
        return self.sample


def sum_of_outputs(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss for inputs without targets, in which all outputs of the model take part."""
    output = model(batch)
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        parts = output.values() if hasattr(output, "values") else output
        found = sum(part.float().mean() for part in parts if isinstance(part, Tensor) and part.is_floating_point())
    assert isinstance(found, Tensor), "the model returns no tensor of floating point"
    return found.float().mean()


def input_shape_of(model: nn.Module) -> tuple[int, ...] | None:
    """Shape of one input of a model that begins with a Linear layer; None for any other model."""
    layers = (part for part in model.modules() if any(True for _ in part.parameters(recurse=False)))
    first = next(layers, None)
    return (first.in_features,) if isinstance(first, nn.Linear) else None


def find_optimal_batch_size(
    model: nn.Module,
    max_batch_size: int = 512,
    *,
    data: Any = None,
    val_data: Any = None,
    sample: Any = None,
    input_shape: Sequence[int] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    nproc_per_node: int = 1,
    deadline_s: float = DEADLINE_S,
    budget_s: float = BUDGET_S,
    limit_bytes: int | None = None,
    speed: bool = False,
    config: Config | None = None,
    **settings: Any,
) -> BatchSize:
    """Find the largest micro-batch with which a model can train, by trials of the real step in separate processes.

    The model is not changed: the trials work on copies. Classes and functions must be defined at the top level of a
    module; if that is the script itself, its own work must be under `if __name__ == "__main__":`, because the trials
    import it. In a process group every rank calls this and gets the same answer; rank 0 starts the trials, with as many
    ranks as there are on this machine.

    Args:
        model: The model.
        max_batch_size: Largest size to try.
        data: The training data; its longest samples are tried. One of `data`, `sample` and `input_shape` is needed,
            except for a model that begins with a Linear layer.
        val_data: A batch of it is validated in every trial.
        sample: One sample, as a data set would return it: `(input, target)`, a dict, or an input alone.
        input_shape: Shape of one input; inputs are random, and the sum of the outputs is the loss.
        loss_fn: As for `Trainer`.
        collate_fn: Makes a batch of samples; None: torch's own.
        nproc_per_node: Ranks of each trial.
        deadline_s: Time limit of one trial.
        budget_s: Time limit of all trials.
        limit_bytes: Memory that each process may use in addition to Python and torch (CPU).
        speed: Also measure smaller sizes; see `BatchSize.fastest`.
        config: All settings; keywords override it.
        **settings: As for `Trainer`, e.g. `mixed_precision="bf16"`, `optimizer="sgd"`, `strategy="zero3"`.

    Returns:
        The size; `.report` holds every trial, `.fastest` the fastest size.

    Raises:
        ConfigError: There is no input for the model, or something cannot be sent to another process.
        TrainingFailedError: A trial failed for another reason than memory, or not even one sample fits.
    """
    if max_batch_size < 1:
        raise ConfigError(f"max_batch_size: {max_batch_size} must be 1 or more")
    chosen = apply_settings(api_defaults() if config is None else config, settings)

    def search(world_size: int) -> BatchSize:
        workload = _workload(
            model, max_batch_size * world_size, data, val_data, sample, input_shape, loss_fn, collate_fn
        )
        with tempfile.TemporaryDirectory(prefix="frameworm-workload-") as folder:
            file = Path(folder) / "workload.pt"
            _save(workload, file)
            if refers_to_main(file):
                _check_script()
            finder = BatchSizeFinder(
                _free(chosen),
                world_size=world_size,
                most=max_batch_size,
                free_global_batch=True,
                deadline_s=deadline_s,
                budget_s=budget_s,
                limit_bytes=limit_bytes,
                payload=str(file),
                speed=speed,
            )
            return _answer(finder.run())

    if not is_distributed():
        return search(nproc_per_node)
    return _for_all_ranks(search)


def _for_all_ranks(search: Callable[[int], BatchSize]) -> BatchSize:
    """Rank 0 runs the search and broadcasts its result, or its error, to all ranks."""
    process = setup_ddp()
    if process.num_nodes > 1:
        raise ConfigError("find_optimal_batch_size starts its trials on one machine; call it on one, without a group")
    said: tuple[int, BatchSizeReport] | str | None = None
    if process.rank == 0:
        try:
            found = search(process.world_size)
            said = (int(found), found.report)
        except FramewormError as error:
            said = str(error)
    said = broadcast_object(said)
    if isinstance(said, str):
        raise TrainingFailedError(said)
    assert said is not None
    answer = BatchSize(said[0])
    answer.report = said[1]
    return answer


def _answer(report: BatchSizeReport) -> BatchSize:
    if report.largest is None:
        why = next((trial.message for trial in reversed(report.trials) if trial.message), None) or report.notes[-1:]
        raise TrainingFailedError(f"no batch size fits, not even the smallest that was tried: {why}")
    answer = BatchSize(report.largest)
    answer.report = report
    return answer


def _free(config: Config) -> Config:
    """Remove all batch settings, since the micro-batch is what is searched for."""
    config = config.model_copy(deep=True)
    words = {"micro_batch": "auto", "batch_size": None, "accumulation": "auto", "global_batch": None}
    config.training = config.training.model_copy(update=words)
    config.data = config.data.model_copy(update={"num_workers": 0})
    return config


def _workload(
    model: nn.Module,
    count: int,
    data: Any,
    val_data: Any,
    sample: Any,
    input_shape: Sequence[int] | None,
    loss_fn: Callable[..., Any] | None,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Workload:
    if data is None and sample is None:
        if input_shape is None:
            input_shape = input_shape_of(model)
            if input_shape is None:
                raise ConfigError(f"there is nothing to feed the model with: {_HOW}")
        shape = tuple(input_shape)
        sample = torch.randn(shape) if math.prod(shape) else torch.zeros(shape)
        loss_fn = loss_fn or sum_of_outputs
    elif data is None and isinstance(sample, Tensor):
        loss_fn = loss_fn or sum_of_outputs
    train = RepeatedSample(sample, count) if data is None else data
    return Workload(model, train, val_data, loss_fn, collate_fn)


def _check_script() -> None:
    """Raise if the trials cannot import the script: they need its classes, and must not repeat the call."""
    script = sys.modules["__main__"]
    file = getattr(script, "__file__", None)
    if file is None or not Path(file).is_file():
        raise ConfigError(
            "the trials run in other processes, which cannot import what a notebook or console defines: write the "
            "model's and data set's classes to a module (a .py file) and import them from there"
        )
    lines = [
        item.lineno
        for item in inspect.stack(context=0)
        if item.frame.f_globals is vars(script) and item.function == "<module>"
    ]
    if not lines or not file.endswith(".py"):
        return
    running = [
        item
        for item in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if item.lineno <= lines[-1] <= (item.end_lineno or item.lineno)
    ]
    guarded = any(isinstance(item, ast.If) and "'__name__'" in ast.dump(item.test) for item in running)
    if running and not guarded:
        raise ConfigError(
            f"find_optimal_batch_size starts processes that import {Path(file).name} for its classes, and line "
            f'{lines[-1]} would run again in each: put it under `if __name__ == "__main__":`'
        )


def _save(workload: Workload, file: Path) -> None:
    """Save the workload for other processes, with its model on the CPU."""
    on_cpu = all(item.device.type == "cpu" for item in workload.model.state_dict().values())
    model = workload.model if on_cpu else copy.deepcopy(workload.model).cpu()
    sent = Workload(model, workload.train_data, workload.val_data, workload.loss_fn, workload.collate_fn)
    try:
        torch.save(sent, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the trials run in other processes, and this cannot be sent there: {error}; define models, data sets and "
            "functions at the top of a module, not inside of functions or as lambdas"
        ) from None
