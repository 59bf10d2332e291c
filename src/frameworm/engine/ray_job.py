"""A run as a Ray Train job: Ray starts and restarts the workers, and the engine trains in each."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from frameworm.config.load import dump_config, load_config_from_text
from frameworm.config.resolve import resolve
from frameworm.config.schema import Config
from frameworm.engine.ray_reports import RayReports, ray_module
from frameworm.engine.run import run
from frameworm.engine.run_output import choose_folder
from frameworm.engine.summary import why_failed
from frameworm.errors import (
    DeviceError,
    EnvironmentSetupError,
    FramewormError,
    RunFolderError,
    TrainingFailedError,
    TrainingInterruptedError,
)
from frameworm.launch.environment import collective_timeout_s, prepare_for_ray
from frameworm.launch.failures import is_consequence
from frameworm.launch.process_group import DEFAULT_TIMEOUT_S
from frameworm.records.objects.place import is_url
from frameworm.records.store import RunFolder

log = logging.getLogger("frameworm")
_CONNECT_S = 5.0
_LEAST_WAIT_S = 5.0  # Ray needs a moment to reserve free resources
_NAME = "ray"  # name of the folder inside the run folder where Ray keeps its own files


@dataclass(frozen=True)
class RayJob:
    """What to request from Ray.

    Attributes:
        workers: Minimum and maximum number; the same number twice for a fixed group.
        use_gpu: Whether each worker gets a GPU; None to decide by the config and the cluster.
        resources: What a worker needs, by Ray's names; defaults to one CPU, plus a GPU if used.
        max_failures: How often Ray restarts the workers after one has failed; -1 for no limit.
        wait_s: How long to wait for resources that are missing or busy.
        address: The cluster, HOST:PORT; None for this machine's cluster, `local` for a new one here for this job.
        working_dir: A folder that is copied to the workers and in which they start; None for this process's folder.
        storage: Where Ray keeps the checkpoints reported to it; None for the run folder.
    """

    workers: tuple[int, int]
    use_gpu: bool | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    max_failures: int = 3
    wait_s: float = 30.0
    address: str | None = None
    working_dir: str | None = None
    storage: str | None = None


@dataclass(frozen=True)
class RayResult:
    """The result of a job; `result` is Ray's own."""

    folder: RunFolder
    result: Any


def train_on_ray(
    config: Config,
    job: RayJob,
    *,
    out: str | Path = "auto",
    resume: str | Path | None = None,
    on_worker: Callable[[bool], None] | None = None,
) -> RayResult:
    """Train what a config describes on the workers of a Ray cluster.

    Args:
        config: Checked but not resolved, since that depends on the cluster.
        job: What to request from Ray.
        out: The run folder, on storage that all nodes share; `auto` for runs/<name>-<time>.
        resume: As for `Trainer.train`.
        on_worker: Called first in each worker, with whether it is rank 0.

    Raises:
        MissingPackageError: If Ray Train is not installed.
        ConfigError: If settings do not fit together or do not fit the number of workers.
        EnvironmentSetupError: If the cluster cannot be reached or has no room for the workers.
        TrainingFailedError: If workers fail more often than `max_failures` allows, or in a way that would recur.
        TrainingInterruptedError: On Ctrl-C; what was saved before is in the run folder.
    """
    for given in (out, resume):
        if is_url(given):
            raise EnvironmentSetupError(
                f"a Ray job trains in a folder that all its nodes share, and {given} is not: give --out a folder, and "
                "storage.url the place for its copy"
            )
    prepare_for_ray()
    ray, train = ray_module("ray"), ray_module("ray.train")
    # A first check before contacting the cluster, whose resources decide the rest.
    _check(config, job, config.gpu.device != "cpu" if job.use_gpu is None else job.use_gpu, resume is not None)
    with _connected(ray, job):
        on_gpu = _on_gpu(ray, config, job)
        config = _check(config, job, on_gpu, resume is not None)
        need = {"CPU": 1.0, **({"GPU": 1.0} if on_gpu else {}), **job.resources}
        _check_room(ray, job, need)
        chosen, resumed = choose_folder(config, out, resume)
        assert chosen is not None, "there is none only where none is asked for"
        folder = RunFolder(chosen.path.resolve())
        if not resumed:
            folder.write_config(dump_config(config))
        log.info("run folder %s, %s", folder.path, _words(job, need))
        try:
            return RayResult(folder, _fit(train, config, job, need, folder, on_worker))
        finally:
            if not resumed:
                _take_back(folder)


def _check(config: Config, job: RayJob, on_gpu: bool, resumes: bool) -> Config:
    """Return the config for this kind of device; fails here if it could not train on that many workers."""
    if on_gpu and config.gpu.device == "cpu":
        raise EnvironmentSetupError(
            "gpu.device: cpu, so a GPU for each worker would be idle; leave the GPUs out, or --set gpu.device=auto"
        )
    config = config.model_copy(deep=True)
    if not on_gpu and config.gpu.device == "auto":
        config.gpu.device = "cpu"
    least, most = job.workers
    device: Literal["cpu", "cuda"] = "cuda" if on_gpu else "cpu"
    resolve(config, world_size=most, device=device, bf16=True, allow_uneven=resumes or least != most)
    return config


def _on_gpu(ray: Any, config: Config, job: RayJob) -> bool:
    gpus = ray.cluster_resources().get("GPU", 0)
    asked = job.use_gpu
    if asked is None and "GPU" in job.resources:
        asked = job.resources["GPU"] > 0
    if asked is None:
        asked = config.gpu.device == "cuda" or (config.gpu.device == "auto" and gpus > 0)
    if asked and not gpus and not job.wait_s:
        raise DeviceError("GPUs are asked for, and no node of the Ray cluster has one")
    return asked


@contextlib.contextmanager
def _connected(ray: Any, job: RayJob) -> Iterator[None]:
    """Connect to the cluster for the duration; an existing connection is used and kept."""
    if ray.is_initialized():
        yield
        return
    settings: dict[str, Any] = {"logging_level": "warning"}
    if job.working_dir is not None:
        settings["runtime_env"] = {"working_dir": job.working_dir}
    address = job.address or "auto"
    if address.startswith("ray://"):
        raise EnvironmentSetupError(
            f"--address {address} is of Ray Client, which cannot start such a job; submit it to the cluster: ray job "
            "submit --address http://HOST:8265 --working-dir . -- frameworm ray ..."
        )
    if address not in ("auto", "local"):
        _check_reachable(address)
    try:
        ray.init(address=address, **settings)
    except ConnectionError as error:
        raise EnvironmentSetupError(
            "there is no Ray cluster here to join: start one with ray start --head, name one with --address HOST:PORT, "
            f"or have one for this job alone with --address local ({_first_line(error)})"
        ) from None
    except (RuntimeError, ValueError, OSError) as error:
        raise EnvironmentSetupError(f"cannot join the Ray cluster at {address}: {_first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Fail fast if nothing answers at the address; Ray itself would retry for a long time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise EnvironmentSetupError(f"--address {address} is not HOST:PORT (6379 is Ray's usual port), auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise EnvironmentSetupError(
            f"no Ray cluster answers at {address} ({error}); `ray status` on one of its nodes says whether it runs"
        ) from None


def _check_room(ray: Any, job: RayJob, need: dict[str, float]) -> None:
    """Check for room by reserving what the smallest group of workers needs; Ray itself would wait forever.

    Raises:
        EnvironmentSetupError: If resources are missing; the message says which.
    """
    groups = ray_module("ray.util.placement_group")
    workers = job.workers[0]
    group = groups.placement_group([need] * workers, strategy="PACK")
    try:
        if group.wait(max(job.wait_s, _LEAST_WAIT_S)):
            return
    finally:
        groups.remove_placement_group(group)
    total, free = ray.cluster_resources(), ray.available_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    has = ", ".join(f"{_number(total.get(name, 0))} {name} ({_number(free.get(name, 0))} free)" for name in need)
    raise EnvironmentSetupError(
        f"the Ray cluster has no room for {workers} worker{'s' * (workers > 1)} with {_amounts(need)} each: it has "
        f"{has} on {nodes} node{'s' * (nodes > 1)}. Start fewer workers (--num-workers), ask for less "
        "(--resources-per-worker), add nodes, or wait longer for them (--wait)"
    )


def _amounts(need: Mapping[str, float]) -> str:
    return ", ".join(f"{_number(value)} {name}" for name, value in need.items())


def _number(value: float) -> str:
    return f"{value:.12g}"


def _words(job: RayJob, need: Mapping[str, float]) -> str:
    least, most = job.workers
    count = f"{most} worker{'s' * (most > 1)}" if least == most else f"{least} to {most} workers"
    return f"{count} with {_amounts(need)} each"


def _fit(
    train: Any,
    config: Config,
    job: RayJob,
    need: dict[str, float],
    folder: RunFolder,
    on_worker: Callable[[bool], None] | None,
) -> Any:
    """Run the workers with Ray Train until they finish."""
    torch_train = ray_module("ray.train.torch")
    least, most = job.workers
    on_gpu = need.get("GPU", 0) > 0
    backend = config.parallel.backend
    timeout_s = DEFAULT_TIMEOUT_S if config.parallel.timeout_s is None else config.parallel.timeout_s
    trainer = torch_train.TorchTrainer(
        train_worker,
        train_loop_config={
            "config": dump_config(config),
            "folder": str(folder.path),
            "start_in": None if job.working_dir else str(Path.cwd()),
            "on_worker": on_worker,
        },
        torch_config=torch_train.TorchConfig(
            backend=("nccl" if on_gpu else "gloo") if backend == "auto" else backend,
            timeout_s=int(collective_timeout_s(timeout_s)),
        ),
        scaling_config=train.ScalingConfig(
            num_workers=most if least == most else (least, most), use_gpu=on_gpu, resources_per_worker=need
        ),
        run_config=train.RunConfig(
            name=_NAME if job.storage is None else folder.path.name,
            storage_path=str(folder.path) if job.storage is None else job.storage,
            failure_config=train.FailureConfig(max_failures=job.max_failures),
            checkpoint_config=train.CheckpointConfig(num_to_keep=config.checkpoint.keep),
            callbacks=[_failure_callback(train, job.max_failures)],
            logging_config=train.LoggingConfig(log_level="WARNING"),
        ),
    )
    return _in_thread(trainer.fit, train.TrainingFailedError, folder)


def train_worker(order: dict[str, Any]) -> None:
    """Train in a Ray worker, in the process group that Ray has created."""
    train = ray_module("ray.train")
    context = train.get_context()
    folder = RunFolder(order["folder"])
    logging.getLogger().setLevel(logging.WARNING)  # Ray logs every report, once per worker
    if order["on_worker"] is not None:
        order["on_worker"](context.get_world_rank() == 0)
    if order["start_in"] is not None and Path(order["start_in"]).is_dir():
        os.chdir(order["start_in"])
    if not folder.config.is_file():
        raise RunFolderError(
            f"worker {context.get_world_rank()} on {socket.gethostname()} does not see the run folder {folder.path}; "
            "put it on storage that all nodes share (--out)"
        )
    config = load_config_from_text(order["config"], "config", environ={})
    if config.observe.progress == "auto":
        config.observe.progress = True
    record = run(config, resume=folder.path, callbacks=[RayReports()])
    if record.status != "completed":
        raise TrainingFailedError(why_failed(record))


def _failure_callback(train: Any, max_failures: int) -> Any:
    """Create a callback that says why workers restart, and ends the job if a restart would fail the same way."""

    class Failures(train.UserCallback):  # type: ignore[misc]
        """Runs in Ray's controller."""

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            """Called once the first worker has failed."""
            rank, error = first_failure(worker_exceptions)
            if isinstance(error, FramewormError) and not error.may_heal:
                raise error
            if max_failures:
                print(f"frameworm: {in_words(rank, error)}; the workers start again from the newest checkpoint")

    return Failures()


def first_failure(failures: Mapping[int, BaseException]) -> tuple[int, BaseException]:
    """Pick the failure that most likely caused the others."""

    def order(item: tuple[int, BaseException]) -> int:
        error = item[1]
        return 2 if is_consequence(error) else 1 if _died(error) else 0

    return min(sorted(failures.items()), key=order)


def _died(error: BaseException) -> bool:
    """Whether the error is Ray's report that a worker died, not an error that the worker raised."""
    return type(error).__module__.partition(".")[0] == "ray"


def in_words(rank: int, error: BaseException) -> str:
    """Describe a failed worker in one line."""
    if _died(error):
        cause = getattr(error, "health_check_failure", error)
        if any(kind.__name__ == "RayActorError" for kind in type(cause).__mro__):
            return (
                f"worker {rank} is gone: its process was killed (out of memory, perhaps), or crashed, or its node did"
            )
        error = cause
    text = _first_line(error)
    return f"worker {rank} failed: {text if isinstance(error, FramewormError) else f'{type(error).__name__}: {text}'}"


def _in_thread(fit: Callable[[], Any], failed: type[Exception], folder: RunFolder) -> Any:
    """Run Ray in a thread: in the main thread it would catch Ctrl-C and report success."""
    ended: list[Any] = []

    def call() -> None:
        try:
            ended.append((fit(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=call, name="ray-train", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt:
        kept = (
            f"the newest checkpoint is in {folder.checkpoints}" if folder.has_checkpoint() else "nothing was saved yet"
        )
        raise TrainingInterruptedError(f"interrupted; {kept}", folder.path) from None
    result, error = ended[0]
    if error is None:
        return result
    if not isinstance(error, failed):
        raise error
    raise _cause(error) from error


def _cause(error: Any) -> FramewormError:
    """Convert a failed job's error to ours."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, first = first_failure(failures)
        if isinstance(first, FramewormError):
            return first
        log.error("%s", error)
        return TrainingFailedError(in_words(rank, first))
    first = getattr(error, "controller_failure", error)
    if isinstance(first, FramewormError):
        return first
    return TrainingFailedError("".join(traceback.format_exception_only(first)).strip())


def _take_back(folder: RunFolder) -> None:
    """Remove the folder of a run that never began."""
    if {path.name for path in folder.path.iterdir()} <= {folder.config.name, _NAME}:
        shutil.rmtree(folder.path)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
