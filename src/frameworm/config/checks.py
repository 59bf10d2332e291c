"""Checks for settings that are valid alone but impossible together, or not available in this version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from frameworm.config.checkpoint_section import USUAL_METRICS
from frameworm.config.describe import nearest, show, suggest
from frameworm.config.keys import KeyPath
from frameworm.config.model_sections import MODEL_SECTIONS, PythonModelConfig
from frameworm.config.problems import Problem, make_error
from frameworm.config.schema import Config, ParallelConfig
from frameworm.errors import ConfigError


class NotYet(NamedTuple):
    """Values of a setting that the file format defines but this version does not support."""

    values: tuple[str, ...]
    instead: str


NOT_YET: dict[str, NotYet] = {}

DATASETS = ("generated", "ag_news", "imdb", "text")
HUB_PREFIX = "hf:"
WHERE_DATA = {"ag_news": "the AG News csv files", "imdb": "the IMDB csv files or aclImdb", "text": "UTF-8 text files"}
NO_COMPRESSION = ("single", "dp", "zero2", "zero3")
NO_BUCKETS = ("dp", "zero2", "zero3")
SHARDED = ("zero2", "zero3")
BUCKET_SETTINGS = ("bucket_cap_mb", "first_bucket_mb", "gradient_as_bucket_view", "static_graph")


def key(name: str) -> KeyPath:
    """Split a dotted name into a key path."""
    return tuple(name.split("."))


def check(config: Config) -> None:
    """Refuse a config that cannot run, before any process starts.

    Args:
        config: A config whose individual values are valid.

    Raises:
        ConfigError: One line per problem.
    """
    problems = find_problems(config)
    if problems:
        raise make_error(problems, config._origins)


def check_parallel(config: Config) -> None:
    """Like `check`, but only for conflicts with the strategy; used by the Python API."""
    problems = [*_parallel(config), *_sharding(config)]
    if problems:
        raise make_error(problems, config._origins)


def find_problems(config: Config) -> list[Problem]:
    """Find all impossible combinations and unavailable values, at most one problem per key."""
    found: dict[KeyPath, Problem] = {}
    for problem in (
        *_data(config),
        *_batching(config),
        *_device(config),
        *_parallel(config),
        *_sharding(config),
        *_memory(config),
        *_optimizer(config),
        *_spikes(config),
        *_fused_loss(config),
        *_metrics(config),
        *_not_yet(config),
    ):
        found.setdefault(problem.keys[0], problem)
    return list(found.values())


def _data(config: Config) -> Iterator[Problem]:
    # A custom workload brings its own data and gives `dataset` its own meaning.
    if config.workload not in MODEL_SECTIONS:
        return
    dataset = config.data.dataset
    if dataset.startswith(HUB_PREFIX):
        if not dataset.removeprefix(HUB_PREFIX):
            yield Problem((key("data.dataset"),), "hf: must be followed by the name of a data set on the hub")
        return
    if dataset not in DATASETS:
        name, alike = nearest(dataset, DATASETS)
        words = ", ".join(DATASETS)
        text = f"expected one of {words} or hf:NAME, got {show(dataset)}{suggest(name, alike)}"
        yield Problem((key("data.dataset"),), text)
        return
    if config.workload == "gpt" and dataset != "text":
        text = f"the gpt workload reads text files, not {dataset}; set data.dataset: text and data.root"
        yield Problem((key("data.dataset"),), text, at=(key("workload"),))
    elif config.workload == "text_classifier" and dataset == "text":
        text = "text has no classes to learn; use ag_news, imdb, generated or hf:NAME, or set workload: gpt"
        yield Problem((key("data.dataset"),), text)
    elif dataset in WHERE_DATA and not config.data.root:
        text = f"{dataset} needs the folder with {WHERE_DATA[dataset]}; set data.root"
        yield Problem((key("data.root"),), text, at=(key("data.dataset"),))


def _fused_loss(config: Config) -> Iterator[Problem]:
    if config.training.fused_loss and config.workload == "gpt":
        text = "gpt computes its loss in parts by a setting of its own; set model.fused_loss: true instead"
        yield Problem((key("training.fused_loss"), key("workload")), text)


def _metrics(config: Config) -> Iterator[Problem]:
    if config.workload not in MODEL_SECTIONS:
        return
    early_stop = config.training.early_stop
    watched = {
        "checkpoint.metric": config.checkpoint.metric,
        "training.early_stop.metric": None if early_stop is None else early_stop.metric,
        "training.schedule_metric": config.training.schedule_metric,
    }
    for name, metric in watched.items():
        if metric is not None and metric not in USUAL_METRICS:
            found, alike = nearest(metric, USUAL_METRICS)
            words = f"expected one of {', '.join(USUAL_METRICS)}, got {show(metric)}{suggest(found, alike)}"
            yield Problem((key(name),), f"{words}; other metrics are given to Trainer in Python")


def _spikes(config: Config) -> Iterator[Problem]:
    if config.training.on_spike != "rollback":
        return
    if config.gpu.capture != "off":
        text = "rollback replaces the tensors that a captured step was recorded with; use warn"
        yield Problem((key("training.on_spike"), key("gpu.capture")), text)
    if config.parallel.sync_every > 1:
        text = "rollback needs one model, but with sync_every above 1 every rank has its own; use warn"
        yield Problem((key("training.on_spike"), key("parallel.sync_every")), text)


def _batching(config: Config) -> Iterator[Problem]:
    data, batching = config.data, config.data.batching
    if not data.shuffle and (batching == "bucketed" or data.balance is True):
        name = "batching" if batching == "bucketed" else "balance"
        text = f"{show(getattr(data, name))} reorders the samples, but shuffle is off; turn it on"
        yield Problem((key(f"data.{name}"), key("data.shuffle")), text)
    if batching == "bucketed" and data.balance is True:
        text = "bucketed steps differ in length on purpose; leave balance off, or use packed"
        yield Problem((key("data.balance"), key("data.batching")), text)
    if data.resident is True and batching == "packed" and config.gpu.device == "cpu":
        text = "true puts packed batches together on a GPU and gpu.device is cpu; use auto"
        yield Problem((key("data.resident"), key("gpu.device")), text)
    if batching == "packed" and config.parallel.strategy == "dp":
        text = "dp cuts batches apart by samples, which packed batches do not allow; use ddp, or bucketed"
        yield Problem((key("data.batching"), key("parallel.strategy")), text)


def _device(config: Config) -> Iterator[Problem]:
    if config.gpu.padding_free and config.data.batching == "packed":
        text = "packed batches have no padding to leave out; turn one of them off"
        yield Problem((key("gpu.padding_free"), key("data.batching")), text)
    if config.gpu.padding_free and config.parallel.strategy == "dp":
        text = "dp cuts batches apart by samples, which batches without padding do not allow; use ddp"
        yield Problem((key("gpu.padding_free"), key("parallel.strategy")), text)
    if config.gpu.device == "cpu":
        if config.parallel.strategy == "dp":
            text = "dp spreads one process over GPUs and gpu.device is cpu; use single or ddp"
            yield Problem((key("parallel.strategy"), key("gpu.device")), text)
        if config.parallel.backend == "nccl":
            text = "nccl talks between GPUs and gpu.device is cpu; use gloo or auto"
            yield Problem((key("parallel.backend"), key("gpu.device")), text)
        if config.gpu.device_ids is not None:
            text = "device_ids names GPUs and gpu.device is cpu; leave one of them out"
            yield Problem((key("gpu.device_ids"), key("gpu.device")), text)
        if config.gpu.capture == "step":
            text = "step records CUDA graphs and gpu.device is cpu; use off or auto"
            yield Problem((key("gpu.capture"), key("gpu.device")), text)
    ids = config.gpu.device_ids
    if ids is not None and (not ids or len(set(ids)) != len(ids)):
        yield Problem((key("gpu.device_ids"),), f"expected each GPU once and at least one, got {ids}")


def _parallel(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    strategy, compression = parallel.strategy, parallel.compression
    if compression != "off" and strategy in NO_COMPRESSION:
        text = f"compression {compression} cannot be combined with strategy {strategy}; use ddp, or compression: off"
        yield Problem((key("parallel.compression"), key("parallel.strategy")), text)
    if strategy in NO_BUCKETS:
        for name in BUCKET_SETTINGS:
            # `resolve` writes false for auto, so false does not mean that the user set it.
            value = "auto" if parallel.static_graph is False and name == "static_graph" else getattr(parallel, name)
            if value != ParallelConfig.model_fields[name].default:
                text = (
                    f"{name} is about DDP's buckets, which strategy {strategy} does not have; leave it out, or use ddp"
                )
                yield Problem((key(f"parallel.{name}"), key("parallel.strategy")), text)
    if config.training.fused_loss and strategy in NO_BUCKETS:
        text = f"true needs the last layer's weight whole and in one place, which strategy {strategy} does not keep; "
        text += "leave it out, or use ddp or zero1"
        yield Problem((key("training.fused_loss"), key("parallel.strategy")), text)
    if parallel.sync_every > 1:
        if strategy not in ("auto", "ddp"):
            text = f"sync_every averages whole models, which strategy {strategy} does not do; use ddp, or sync_every: 1"
            yield Problem((key("parallel.sync_every"), key("parallel.strategy")), text)
        if compression != "off":
            text = f"with sync_every above 1 no gradients are sent for {compression} to make smaller; use one of them"
            yield Problem((key("parallel.sync_every"), key("parallel.compression")), text)
        if config.training.ema is not None:
            text = "with sync_every above 1 every rank has weights of its own to average; use one of them"
            yield Problem((key("training.ema"), key("parallel.sync_every")), text)
        if parallel.check_replicas is not None and parallel.check_replicas % parallel.sync_every:
            text = f"models agree only every {parallel.sync_every} steps (sync_every); use a multiple of that"
            yield Problem((key("parallel.check_replicas"), key("parallel.sync_every")), text)


def _captured(config: Config) -> Iterator[Problem]:
    """Parallel settings that a captured step cannot record; `auto` runs without capture instead."""
    parallel, capture = config.parallel, key("gpu.capture")
    if config.gpu.capture not in ("step", "rehearse"):
        return
    if parallel.strategy == "dp":
        text = "step records the work of one device and strategy dp works on several; use ddp, or capture: off"
        yield Problem((capture, key("parallel.strategy")), text)
    if parallel.offload_optimizer:
        text = "step records what a GPU does and offload_optimizer updates on the host; use off or auto"
        yield Problem((capture, key("parallel.offload_optimizer")), text)
    if parallel.find_unused_parameters:
        text = "find_unused_parameters asks the GPU in every step, which step cannot record; use off or auto"
        yield Problem((capture, key("parallel.find_unused_parameters")), text)
    if parallel.rounding == "stochastic" and parallel.compression in ("int8", "int4", "auto"):
        text = "stochastic rounding draws by the number of the step, which step would record; use rounding: nearest"
        yield Problem((capture, key("parallel.rounding")), text)


def _sharding(config: Config) -> Iterator[Problem]:
    parallel, gpu, strategy = config.parallel, config.gpu, config.parallel.strategy
    where = key("parallel.strategy")
    if parallel.offload_optimizer and strategy not in SHARDED:
        text = f"true keeps what zero2 and zero3 divide in host memory and strategy is {strategy}; use zero2 or zero3"
        yield Problem((key("parallel.offload_optimizer"), where), text)
    elif parallel.offload_optimizer and gpu.device == "cpu":
        text = "true frees a GPU's memory and gpu.device is cpu; leave it out"
        yield Problem((key("parallel.offload_optimizer"), key("gpu.device")), text)
    elif parallel.offload_optimizer and config.training.optimizer == "muon":
        text = "muon gathers whole matrices between GPUs and true keeps them in host memory; leave it out, or use adamw"
        yield Problem((key("parallel.offload_optimizer"), key("training.optimizer")), text)
    elif parallel.offload_optimizer and gpu.mixed_precision == "fp16":
        text = "the loss scale of fp16 lives on the GPU and gradients would not; use bf16"
        yield Problem((key("parallel.offload_optimizer"), key("gpu.mixed_precision")), text)
    yield from _captured(config)
    if config.memory.on_oom == "halve_micro_batch" and (strategy in SHARDED or parallel.compression != "off"):
        with_what, instead = (
            (f"strategy {strategy}", "zero1") if strategy in SHARDED else ("compression", "compression: off")
        )
        text = f"a step under {with_what} cannot be taken back on all ranks; use stop, or {instead}"
        yield Problem((key("memory.on_oom"), where if strategy in SHARDED else key("parallel.compression")), text)
    if strategy not in SHARDED:
        return
    if gpu.compile_model:
        text = f"a compiled model cannot be divided by strategy {strategy}; leave it out, or use zero1"
        yield Problem((key("gpu.compile_model"), where), text)
    if gpu.channels_last is True:
        text = f"strategy {strategy} lays parameters out by itself; leave it out, or use zero1"
        yield Problem((key("gpu.channels_last"), where), text)
    if parallel.check_replicas is not None:
        text = f"under strategy {strategy} no two ranks hold the same; leave it out"
        yield Problem((key("parallel.check_replicas"), where), text)


def _optimizer(config: Config) -> Iterator[Problem]:
    training, name = config.training, config.training.optimizer
    where = key("training.optimizer")
    if name == "adamw8bit" and config.parallel.strategy in SHARDED:
        text = f"adamw8bit stores its state in blocks, which strategy {config.parallel.strategy} cannot divide; use "
        yield Problem((where, key("parallel.strategy")), f"{text}zero1, or adamw")
    if name in ("adamw8bit", "schedulefree") and config.gpu.capture != "off":
        text = f"{name} counts its steps on the host, and a captured step would always count the same; use adamw"
        yield Problem((where, key("gpu.capture")), text)
    if name == "schedulefree" and training.schedule != "constant":
        text = f"schedulefree stands in for a schedule, and {training.schedule} is one; set training.schedule: constant"
        yield Problem((key("training.schedule"), where), text)
    if name == "schedulefree" and training.ema is not None:
        text = "schedulefree averages the weights itself; leave ema out"
        yield Problem((key("training.ema"), where), text)
    if name == "schedulefree" and config.parallel.sync_every > 1:
        text = "with sync_every above 1 every rank has weights of its own to average; use one of them"
        yield Problem((where, key("parallel.sync_every")), text)


def _memory(config: Config) -> Iterator[Problem]:
    if config.memory.checkpoint_modules and config.memory.activation_checkpointing == "off":
        text = (
            "checkpoint_modules names modules to recompute and activation_checkpointing is off; set full or selective"
        )
        yield Problem((key("memory.checkpoint_modules"),), text)


def _not_yet(config: Config) -> Iterator[Problem]:
    for name, (values, instead) in NOT_YET.items():
        section, setting = name.split(".")
        given = getattr(getattr(config, section), setting)
        if given in values:
            yield Problem((key(name),), f"{given} is not in this version yet; use {instead}")


def check_buildable(config: Config, where: str) -> None:
    """Refuse to build a model that only a script can build.

    Raises:
        ConfigError: The config comes from a run of the Python API.
    """
    if isinstance(config.model, PythonModelConfig):
        script, name = config.model.script, config.model.class_name
        what = f"a run of the Python API{f', with the model {name}' if name else ''}"
        remedy = f"run its script instead: {script}" if script else "run the script or notebook that made it instead"
        raise ConfigError(f"{where}: workload python is {what}, and nothing can be built from it; {remedy}")


def workload_name(config: Config) -> str:
    """Return a short name of the workload; for the Python API, with the script and the class of the model."""
    model = config.model
    if not isinstance(model, PythonModelConfig):
        return config.workload
    script = "" if model.script is None else PurePath(model.script).name
    return " ".join(part for part in (config.workload, script, model.class_name.rpartition(".")[2]) if part)
