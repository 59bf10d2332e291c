"""Judges whether a machine is fit to train on: pure functions from facts to checks.

Each check says what was found, whether it is right, what to do and why. What could not be determined is `unknown`,
never ok.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from frameworm.diagnose.machine.gpu import gpu_checks
from frameworm.diagnose.machine.network import network_checks
from frameworm.diagnose.machine.variables import variable_checks
from frameworm.diagnose.rules.machine import CROWDED
from frameworm.records.machine import Check, Intent, MachineFacts, StorageFacts, Verdict

GROUP = "processors and memory"

# Docker's default is 64 MiB of shared memory, less than a few batches of a few workers need.
SHM_TOO_SMALL_BYTES, SHM_SMALL_BYTES = 128 * 2**20, 2**30
FEWEST_FILES, ENOUGH_FILES = 1024, 4096
BUSY_WITH_OTHERS = 0.5  # runnable programs per core
THROTTLED_OFTEN = 0.05
LITTLE_MEMORY = 0.1
SLOW_STORAGE_BYTES_PER_S = 100e6
LITTLE_STORAGE_BYTES = 2**30
LONG_SAVE_S = 30.0
NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"}
MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}


def judge_machine(
    facts: MachineFacts,
    variables: Mapping[str, str],
    intent: Intent | None = None,
    contradictions: Sequence[str] = (),
) -> list[Check]:
    """Judge a machine and the environment variables of a process.

    Args:
        facts: What was found.
        variables: Environment variables.
        intent: What is about to run.
        contradictions: Contradictions between the launch variables, one sentence each.
    """
    intent = intent or Intent()
    return [
        *gpu_checks(facts, variables, intent),
        *host_checks(facts, variables, intent),
        *network_checks(facts, variables, intent, contradictions),
        *variable_checks(facts, variables, intent),
    ]


def host_checks(facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> list[Check]:
    """Return the checks of processors, memory, limits and storage."""
    ranks = ranks_on_these_cores(facts, variables, intent)
    found: list[Check | None] = [
        _cores(facts, ranks),
        _affinity(facts),
        _quota(facts),
        _threads(facts, variables, intent, ranks),
        _governor(facts),
    ]
    found += [_load(facts), _memory(facts), _shared_memory(facts, intent), _open_files(facts), _compiler(facts, intent)]
    found.append(_storage(facts.storage, intent))
    return [check for check in found if check is not None]


def _cores(facts: MachineFacts, ranks: int) -> Check:
    why = "each rank needs a core for its loop, and loader processes need their own"
    usable = facts.cpus_usable
    if usable is None:
        return Check("cores", GROUP, "not known", "unknown", "", why)
    found = f"{usable} usable" + (f" of {facts.cpus_total}" if facts.cpus_total else "")
    if ranks > 1:
        found += f" for {ranks} ranks"
    per_rank = usable / ranks
    if per_rank < 1:
        remedy = f"start at most {usable} ranks here, or ask for {ranks} cores (SLURM: --cpus-per-task)"
        return Check("cores", GROUP, found, "problem", remedy, why)
    if facts.gpus and per_rank < 2:
        remedy = "ask for 2 cores or more per GPU (SLURM: --cpus-per-task, Docker: --cpus)"
        return Check(
            "cores", GROUP, found, "advice", remedy, why + "; with one core each they take turns (input_bound)"
        )
    return Check("cores", GROUP, found, "ok", "", why)


def _affinity(facts: MachineFacts) -> Check:
    why = "a process bound to a few cores uses only those, however many the machine has"
    bound, total = facts.cpus_bound, facts.cpus_total
    if bound is None or not total:
        return Check("cpu affinity", GROUP, "not known", "unknown", "", why)
    if len(bound) >= total:
        return Check("cpu affinity", GROUP, f"all {total} cores", "ok", "", why)
    found = f"bound to {len(bound)} of {total} cores ({_ranges(bound)})"
    far = [gpu.name for gpu in facts.gpus if gpu.local_cpus and not (gpu.local_cpus & bound)]
    if far:
        near = _ranges(facts.gpus[0].local_cpus or frozenset())
        remedy = f"bind to cores next to the GPU ({near}): taskset, numactl, or SLURM's --gpu-bind=closest"
        return Check(
            "cpu affinity",
            GROUP,
            found,
            "advice",
            remedy,
            "copies to a GPU on the other side of the machine are slower",
        )
    if len(bound) == 1 and total > 1:
        remedy = (
            "if this is not intended, look for taskset, OMP_PROC_BIND, --cpu-bind, or an import that binds the process"
        )
        return Check("cpu affinity", GROUP, found, "advice", remedy, why)
    return Check("cpu affinity", GROUP, found, "ok", "", why)


def _quota(facts: MachineFacts) -> Check:
    why = "above its quota a cgroup is stopped for the rest of each period: steps become uneven"
    if facts.cpu_quota is None:
        return Check("cpu quota", GROUP, "none", "ok", "", why)
    found = f"{facts.cpu_quota:g} cores"
    share = facts.quota_throttled_share
    if share is not None:
        found += f", throttled in {share:.0%} of periods so far"
    if facts.cpu_quota < 1:
        return Check("cpu quota", GROUP, found, "problem", "raise the quota to one core or more (Docker: --cpus)", why)
    if share is not None and share > THROTTLED_OFTEN:
        remedy = "raise the quota, or lower data.num_workers and OMP_NUM_THREADS until their sum fits in it"
        return Check("cpu quota", GROUP, found, "advice", remedy, why)
    return Check("cpu quota", GROUP, found, "ok", "", why)


def _threads(facts: MachineFacts, variables: Mapping[str, str], intent: Intent, ranks: int) -> Check:
    why = f"beyond {CROWDED:g} computing threads per core they hinder each other (cpu_oversubscribed)"
    threads, usable = facts.torch_threads, facts.cpus_usable
    if threads is None or not usable:
        return Check("threads", GROUP, "not known", "unknown", "", why)
    share = max(1, usable // ranks)
    is_rank = bool(variables.get("LOCAL_RANK") or variables.get("SLURM_PROCID"))
    if ranks > 1 and not is_rank and not variables.get("OMP_NUM_THREADS"):
        found = f"{share} for each of {ranks} ranks, if frameworm starts them"
        return Check("threads", GROUP, found, "ok", "", why)
    found = f"{threads} per process" + (f" x {ranks} ranks" if ranks > 1 else "") + f" on {_cores_text(usable)}"
    if facts.torch_interop_threads is not None:
        found += f"; {facts.torch_interop_threads} for forked operations (training.cpu_interop_threads)"
    if threads * ranks > CROWDED * usable:
        return Check("threads", GROUP, found, "problem", f"OMP_NUM_THREADS={share}", why)
    on_cpu = intent.on_gpu is False or (intent.on_gpu is None and not facts.gpus)
    if on_cpu and threads < share:
        remedy = f"OMP_NUM_THREADS={share}, or training.cpu_threads: {share}, if no other program needs the cores"
        return Check("threads", GROUP, found, "advice", remedy, "on a CPU, matrix products should use all cores")
    return Check("threads", GROUP, found, "ok", "", why)


def _governor(facts: MachineFacts) -> Check | None:
    if facts.governor is None:
        return None  # virtual machines have none, and there nothing can be done about it
    why = "short steps end before an idle core has reached full speed"
    if facts.governor == "powersave":
        remedy = "cpupower frequency-set -g performance (needs root)"
        return Check("cpu governor", GROUP, facts.governor, "advice", remedy, why)
    return Check("cpu governor", GROUP, facts.governor, "ok", "", why)


def _load(facts: MachineFacts) -> Check:
    why = "steps share the cores with everything else that runs, which makes measurements unreliable"
    if facts.load is None or not facts.cpus_total:
        return Check("other load", GROUP, "not known", "unknown", "", why)
    found = f"load {facts.load:.1f} on {_cores_text(facts.cpus_total)}"
    if facts.load > BUSY_WITH_OTHERS * facts.cpus_total:
        return Check(
            "other load", GROUP, found, "advice", "see which programs run (top), and measure on a quiet machine", why
        )
    return Check("other load", GROUP, found, "ok", "", why)


def _memory(facts: MachineFacts) -> Check:
    why = "beyond it the kernel kills the run (SIGKILL, no traceback)"
    total, free = facts.memory_bytes, facts.memory_available_bytes
    if total is None:
        return Check("memory", GROUP, "not known", "unknown", "", why)
    found = size(total) + ("" if free is None else f", {size(free)} free")
    if free is not None and free < LITTLE_MEMORY * total:
        return Check("memory", GROUP, found, "advice", "end what holds it, or ask for more (SLURM: --mem)", why)
    return Check("memory", GROUP, found, "ok", "", why)


def _shared_memory(facts: MachineFacts, intent: Intent) -> Check:
    why = "loader processes hand batches over in /dev/shm; full, they die with a bus error"
    total, free = facts.shared_memory_bytes, facts.shared_memory_free_bytes
    if total is None or free is None:
        return Check("shared memory", GROUP, "no /dev/shm", "unknown", "data.num_workers: 0 needs none", why)
    found = f"{size(total)}, {size(free)} free"
    remedy = "docker run --shm-size=8g (Kubernetes: an emptyDir with medium Memory at /dev/shm), or data.num_workers: 0"
    if free < SHM_TOO_SMALL_BYTES:
        return Check("shared memory", GROUP, found, "problem", remedy, why)
    if free < SHM_SMALL_BYTES * max(1, intent.processes):
        return Check("shared memory", GROUP, found, "advice", remedy, why)
    return Check("shared memory", GROUP, found, "ok", "", why)


def _open_files(facts: MachineFacts) -> Check:
    why = "workers, sockets of every rank and memory-mapped shards are open files"
    if facts.open_files is None:
        return Check("open files", GROUP, "not known", "unknown", "", why)
    soft, hard = facts.open_files
    found = "no limit" if soft < 0 else f"limit {soft:,}"
    if 0 <= soft < FEWEST_FILES or (0 <= soft < ENOUGH_FILES and (hard < 0 or hard > soft)):
        limit = "unlimited" if hard < 0 else str(hard)
        raised = f"ulimit -n {limit if hard < 0 or hard > soft else 'higher, by an administrator (limits.conf)'}"
        return Check("open files", GROUP, found, "problem" if soft < FEWEST_FILES else "advice", raised, why)
    return Check("open files", GROUP, found, "ok", "", why)


def _compiler(facts: MachineFacts, intent: Intent) -> Check:
    why = "torch.compile and triton build small C programs"
    if facts.compiler is not None:
        return Check("C compiler", GROUP, facts.compiler, "ok", "", why)
    remedy = "install gcc and g++ (apt-get install build-essential, or module load gcc)"
    verdict: Verdict = "problem" if intent.compiles else "advice"
    return Check("C compiler", GROUP, "none found", verdict, remedy, why)


def _storage(storage: StorageFacts | None, intent: Intent) -> Check:
    name, why = "run folder", "checkpoints are written and synced here; training waits when the next one comes too soon"
    if storage is None or storage.writable is None:
        return Check(name, GROUP, "not checked", "unknown", "", why)
    if not storage.writable:
        found = f"{storage.path}: {storage.error or 'cannot be written'}"
        return Check(name, GROUP, found, "problem", "choose another with --out, or fix its permissions or quota", why)
    kind = storage.filesystem
    found = storage.path + (f" ({kind})" if kind else "")
    rate, free = storage.write_bytes_per_s, storage.free_bytes
    if rate is not None:
        found += f", writes {rate / 1e6:,.0f} MB/s"
    if free is not None:
        found += f", {size(free)} free"
    needed = LITTLE_STORAGE_BYTES
    if intent.checkpoint_bytes is not None:
        # The newest checkpoint is written before an old one is removed.
        needed = max(needed, intent.checkpoint_bytes * (intent.keep + 1))
    if free is not None and free < needed:
        remedy = f"free {size(needed - free)}, lower checkpoint.keep, or choose another folder with --out"
        return Check(name, GROUP, found, "problem", remedy, why)
    if kind in MEMORY_FILESYSTEMS:
        remedy = "choose a disk with --out: files in memory are lost at a restart, and use up memory"
        return Check(name, GROUP, found, "advice", remedy, why)
    if rate is None:
        return Check(name, GROUP, found, "unknown", "", why)
    save_s = None if intent.checkpoint_bytes is None else intent.checkpoint_bytes / rate
    if save_s is not None:
        found += f": a checkpoint of {size(intent.checkpoint_bytes)} takes {save_s:,.1f} s"
    if rate < SLOW_STORAGE_BYTES_PER_S or (save_s is not None and save_s > LONG_SAVE_S):
        remedy = (
            "choose a faster disk with --out, save less often (checkpoint.every_steps), keep checkpoint.mode: async"
        )
        if kind in NETWORK_FILESYSTEMS:
            remedy += "; several machines need one that all of them see"
        return Check(name, GROUP, found, "advice", remedy, why + " (checkpoint_stall)")
    return Check(name, GROUP, found, "ok", "", why)


def ranks_on_these_cores(facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> int:
    """Number of ranks that share this process's cores; srun binds each task to its own cores."""
    bound, total = facts.cpus_bound, facts.cpus_total
    own = variables.get("SLURM_CPUS_PER_TASK", "")
    if bound and total and len(bound) < total and own == str(len(bound)):
        return 1
    return intent.processes


def _cores_text(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def size(value: float | None) -> str:
    """Format bytes for people."""
    if value is None:
        return "unknown"
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 999.5 * scale else f"{value / scale:.0f} {unit}"
    return f"{value / 1024:.0f} KiB"


def _ranges(cores: frozenset[int]) -> str:
    """Format core numbers: 0-3,8 for {0, 1, 2, 3, 8}."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
