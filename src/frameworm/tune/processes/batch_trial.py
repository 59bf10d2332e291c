"""One rank of a trial: a separate process that takes a few real steps and writes its result to a file.

The parent only reads files, so a rank that is killed or hangs cannot leave it with half a message.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from frameworm.config.schema import Config
from frameworm.engine.memory.planner import MemoryPlanner
from frameworm.engine.run import train_workload
from frameworm.errors import MemoryLimitError
from frameworm.hardware.devices import choose_device
from frameworm.hardware.host import address_space_bytes, memory_limit_bytes, usable_cpus
from frameworm.hardware.resolve import resolve_here
from frameworm.launch.environment import added_to_environment, worker_environment
from frameworm.launch.failures import is_consequence
from frameworm.launch.parent import call_after_parent
from frameworm.launch.process_group import cleanup
from frameworm.models.workloads import Workload, build_workload
from frameworm.records.atomic import open_to_append
from frameworm.records.schema import RunRecord
from frameworm.scaling.memory_model import CONTEXT_BYTES
from frameworm.torch_private.execution import cuda_lost_in_fork
from frameworm.tune.processes.batch_data import rehearsal, sample_count
from frameworm.tune.processes.forkserver import BAD_FORK

MOST_ACCUMULATION = 2  # memory only depends on whether there is any; time is proportional
_ONCE = ("optimizer", "communication_exposed")  # phases that occur once per step, whatever its number of micro-batches
_BESIDE = ("validation", "checkpoint")
_PR_SET_PDEATHSIG = 1
_NO_MEMORY = (
    "out of memory",
    "ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "bad_alloc",
    "unable to mmap",
    "can't start new thread",
    "Thread creation failed",
    "failed to map segment",
)
_OF_THE_HOST = ("DefaultCPUAllocator", "Cannot allocate memory", "bad_alloc", "unable to mmap", "thread", "Thread")

OutOf = Literal["cuda_oom", "host_oom"]


@dataclass(frozen=True)
class RankJob:
    """What the ranks of a trial should do; plain values, since it is sent to other processes.

    Attributes:
        config: The requested config, with its `auto` values unresolved.
        folder: Where each rank writes `rank-N.json` and `rank-N.log`.
        sizes: Micro-batches to run, one after another; none: only inspect the data and the machine.
        share: Samples per rank and step, kept constant by accumulation; None: the step grows with the micro-batch.
        steps: Optimizer steps for each size.
        world_size: Ranks.
        port: Port for the process group.
        payload: File with a workload; None: the config's own.
        limit_bytes: Memory a rank may use in addition to what it has mapped at its start; None: the system's limit.
        plan_bytes: Only plan, for a device on which torch may use this much memory.
    """

    config: Config
    folder: str
    sizes: tuple[int, ...] = ()
    share: int | None = None
    steps: int = 6
    world_size: int = 1
    port: int = 0
    payload: str | None = None
    limit_bytes: int | None = None
    plan_bytes: int | None = None

    def accumulation(self, size: int) -> int:
        """Micro-batches per step that keep the samples per rank constant."""
        return 1 if self.share is None else self.share // size


@dataclass(frozen=True)
class TrialMemory:
    """What a rank sees before anything is trained.

    Attributes:
        device: `cuda` or `cpu`.
        samples: Training samples; None for a stream.
        room_bytes: Memory that torch may use on this device; None for a host without a limit.
        limit_name: What sets that limit.
        shared: Whether all ranks share it.
    """

    device: Literal["cpu", "cuda"]
    samples: int | None
    room_bytes: int | None
    limit_name: str | None
    shared: bool = False


def run_rank(job: RankJob, rank: int) -> None:
    """Body of the process, which always ends here."""
    if cuda_lost_in_fork():
        os._exit(BAD_FORK)
    file = Path(job.folder) / f"rank-{rank}.json"
    done: list[dict[str, Any]] = []
    result: dict[str, Any] = {"done": done}
    code = 0
    try:
        settle_rank(job, rank)
        with added_to_environment(rank_variables(job, rank)):
            few_threads(job)
            if job.plan_bytes is not None:
                result["plan"] = _plan(job, job.plan_bytes)
            elif not job.sizes:
                result["machine"] = asdict(_look(job))
            for size in job.sizes:
                done.append({"micro_batch": size, **_train(job, size)})
                write_result(file, result)
            cleanup()
    except BaseException as error:
        code = 1
        traceback.print_exc()
        result["failure"] = describe_failure(error)
    write_result(file, result)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the regular shutdown: threads of a collective that is never answered would block it.
    os._exit(code)


def settle_rank(job: RankJob, rank: int) -> None:
    """Give the process its own session, so that all its children can be found, and redirect its output to a file."""
    os.setsid()
    # As in training; otherwise loader workers would be started by the server, outside of this session.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError):
        # If memory runs out, the kernel should kill this process and not the one that runs the search.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    # The caller of the trial may be killed. The session belongs to the trial, including loader workers.
    call_after_parent(lambda: os.killpg(0, signal.SIGKILL))
    log = open_to_append(Path(job.folder) / f"rank-{rank}.log")
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    if job.limit_bytes is not None:
        map_libraries()
        mapped, limit = address_space_bytes()
        wanted = (mapped or 0) + job.limit_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if limit is None else min(wanted, limit),) * 2)


def map_libraries() -> None:
    """Let torch map what it needs for its first operations, so that a limit can be set on top of that."""
    torch.ones(64, 64, requires_grad=True).matmul(torch.ones(64, 64)).sum().backward()


def rank_variables(job: RankJob, rank: int) -> dict[str, str]:
    """The environment variables of a launched worker."""
    if job.world_size == 1 or not job.sizes:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
    }


def few_threads(job: RankJob) -> None:
    """Use as many threads as a launched worker; the library has already read its environment variable."""
    threads = worker_environment(job.world_size, usable_cpus()).get("OMP_NUM_THREADS")
    if job.world_size > 1 and threads is not None:
        torch.set_num_threads(int(threads))


def _workload(job: RankJob, config: Config) -> Workload:
    if job.payload is None:
        return build_workload(config)
    loaded: Workload = torch.load(job.payload, map_location="cpu", weights_only=False)
    return loaded


def _look(job: RankJob) -> TrialMemory:
    config = resolve_here(job.config, job.world_size)
    samples = sample_count(_workload(job, config).train_data)
    if config.gpu.device != "cuda":
        map_libraries()
        return TrialMemory("cpu", samples, *_host_room())
    device = choose_device("cuda", 0, config.gpu.device_ids)
    torch.empty(1, device=device)  # creates the CUDA context first
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)
    allowed = int(total * config.gpu.memory_fraction)
    name = f"{config.gpu.memory_fraction:.0%} of {torch.cuda.get_device_name(device)}"
    if free < allowed:
        name = "free memory of the GPU"
    return TrialMemory("cuda", samples, min(allowed, free), name)


def _plan(job: RankJob, room_bytes: int) -> dict[str, int]:
    """The planner's estimates of the largest size and of the memory of the smallest."""
    found = resolve_here(job.config, job.world_size).gpu
    # Not the resolved config as a whole: settings that follow from the micro-batch must stay open.
    gpu = job.config.gpu.model_copy(update={"device": found.device, "mixed_precision": found.mixed_precision})
    planner = MemoryPlanner(job.config.model_copy(update={"gpu": gpu}), job.world_size)
    accumulation = 1 if job.share is None else planner.setting.accumulation
    setting = replace(planner.setting, accumulation=accumulation)
    largest = planner.largest(setting, room_bytes + CONTEXT_BYTES[planner.device], 1.0)
    return {"largest": largest, "least_bytes": planner.estimate(replace(setting, micro_batch=1)).allocated}


def _host_room() -> tuple[int | None, str | None, bool]:
    """The memory left by the host's tightest limit, the limit's name, and whether ranks share it."""
    mapped, address_space = address_space_bytes()
    rooms: list[tuple[int, str, bool]] = []
    if address_space is not None:
        rooms.append((address_space - (mapped or 0), "the address space (ulimit -v)", False))
    group = memory_limit_bytes()
    if group is not None and group < psutil.virtual_memory().total:
        rooms.append((group - psutil.Process().memory_info().rss, "the cgroup's memory", True))
    return min(rooms) if rooms else (None, None, False)


def _train(job: RankJob, size: int) -> dict[str, Any]:
    """Rehearse training with that micro-batch on the real engine."""
    accumulation = min(job.accumulation(size), MOST_ACCUMULATION)
    config = _rehearsed(job, size, accumulation)
    config = resolve_here(config, job.world_size)
    on_gpu = config.gpu.device == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
    workload = _workload(job, config)
    config, workload = rehearsal(config, workload, job.steps, job.world_size)
    if on_gpu and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    record = train_workload(config, workload, out=None)
    return _figures(record, size, accumulation)


def _rehearsed(job: RankJob, size: int, accumulation: int) -> Config:
    """The training config, except for the size of the step and everything that outlives the trial."""
    config = job.config.model_copy(deep=True)
    training = config.training
    config.training = training.model_copy(
        update={
            "micro_batch": size,
            "batch_size": None,
            "accumulation": accumulation,
            "global_batch": size * accumulation * job.world_size,
            "max_steps": job.steps,
            "early_stop": None,
        }
    )
    config.observe = config.observe.model_copy(update={"sinks": [], "loggers": [], "progress": False, "trace": "off"})
    # A trial that recovers from running out of memory would hide that the size is too large.
    config.memory = config.memory.model_copy(update={"on_oom": "stop"})
    return config


def _figures(record: RunRecord, size: int, accumulation: int) -> dict[str, Any]:
    phases = {name: phase.mean_s for name, phase in record.phases.items() if name not in _BESIDE}
    once_s = sum(phases.get(name, 0.0) for name in _ONCE)
    return {
        "steps": record.steps,
        "micro_s": (sum(phases.values()) - once_s) / accumulation if phases else None,
        "once_s": once_s,
        "peak_bytes": record.memory.peak_bytes,
        "validated": record.quality.val_loss is not None,
    }


def describe_failure(error: BaseException) -> dict[str, Any]:
    text = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return {"kind": out_of(error), "message": message[:500], "consequence": is_consequence(error)}


def out_of(error: BaseException) -> OutOf | None:
    """Which memory has run out according to an exception and its causes; None for any other error."""
    chain: list[BaseException] = [error]
    while (following := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(following)
    for link in reversed(chain):  # the first cause is the clearest
        if isinstance(link, MemoryError):
            return "host_oom"
        if isinstance(link, torch.OutOfMemoryError):
            return "cuda_oom"
        kind = out_of_in(str(link))
        if kind is not None and not is_consequence(error):
            return kind
    return "host_oom" if isinstance(error, MemoryLimitError) else None


def out_of_in(text: str) -> OutOf | None:
    """The same from text, of a message or of the end of a log."""
    if not any(sign in text for sign in _NO_MEMORY):
        return None
    return "host_oom" if any(sign in text for sign in _OF_THE_HOST) else "cuda_oom"


def write_result(file: Path, result: dict[str, Any]) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(result), encoding="utf-8")
    draft.replace(file)
