"""Environment variables that should be set or unset, each with its reason.

A rule is data: the variable, when it matters, which values are wrong, and why. Sources: NCCL's user guide ("should not
be used in production nor retained in scripts" for its Debugging section), torch's ProcessGroupNCCL.hpp and
FlightRecorder.hpp, torch's notes on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from frameworm.records.machine import Check, Intent, MachineFacts, Verdict

GROUP = "environment variables"

_TRUE = {"1", "true", "yes", "on", "y"}
Applies = Callable[[MachineFacts, Intent], bool]


def _on_gpu(facts: MachineFacts, intent: Intent) -> bool:
    return bool(facts.gpus) and intent.on_gpu is not False


def _several(facts: MachineFacts, intent: Intent) -> bool:
    return intent.world_size > 1 or (len(facts.gpus) > 1 and intent.on_gpu is not False)


def _several_gpus(facts: MachineFacts, intent: Intent) -> bool:
    return _several(facts, intent) and _on_gpu(facts, intent)


def _always(facts: MachineFacts, intent: Intent) -> bool:
    return True


@dataclass(frozen=True)
class Unwanted:
    """A variable that costs time, or hides an error, if it has certain values."""

    name: str
    verdict: Verdict
    why: str
    when: Applies = _always
    values: frozenset[str] = frozenset(_TRUE)
    remedy: str = "unset it"

    def matches(self, value: str) -> bool:
        """True if this value is unwanted; if no values are listed, any value is."""
        return not self.values or value.strip().lower() in self.values


UNWANTED: tuple[Unwanted, ...] = (
    Unwanted("CUDA_LAUNCH_BLOCKING", "problem", "every kernel is waited for: nothing overlaps any more", _on_gpu),
    Unwanted(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "problem",
        "every tensor is allocated by the driver, which waits for the GPU",
        _on_gpu,
        frozenset(),  # torch only checks whether it is set
    ),
    Unwanted(
        "NCCL_P2P_DISABLE", "problem", "GPUs no longer copy to each other directly, NVLink is unused", _several_gpus
    ),
    Unwanted("NCCL_SHM_DISABLE", "problem", "ranks of one machine talk over the network instead", _several_gpus),
    Unwanted(
        "NCCL_DEBUG",
        "advice",
        "it prints a lot on every rank",
        _several_gpus,
        frozenset({"info", "trace"}),
        "NCCL_DEBUG=WARN says why something failed, and no more",
    ),
    Unwanted(
        "NCCL_ALGO",
        "advice",
        "NCCL no longer chooses by size and links; left from an experiment?",
        _several_gpus,
        frozenset(),
    ),
    Unwanted(
        "NCCL_PROTO",
        "advice",
        "NCCL no longer chooses by size and links; left from an experiment?",
        _several_gpus,
        frozenset(),
    ),
    Unwanted(
        "NCCL_MAX_NCHANNELS", "advice", "fewer channels use less of the links", _several_gpus, frozenset({"1", "2"})
    ),
    Unwanted(
        "TORCH_NCCL_BLOCKING_WAIT",
        "advice",
        "the host waits for each collective: it hides nothing behind backward",
        _several_gpus,
    ),
    Unwanted(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "problem",
        "a rank that waits for a dead one hangs forever",
        _several_gpus,
        frozenset({"0"}),
    ),
    Unwanted(
        "NCCL_ASYNC_ERROR_HANDLING",
        "advice",
        "the old name of a variable",
        _several_gpus,
        frozenset(),
        "rename it to TORCH_NCCL_ASYNC_ERROR_HANDLING, or unset it: on is the default",
    ),
    Unwanted(
        "TORCH_FR_BUFFER_SIZE",
        "advice",
        "nothing is recorded of the collectives before a time-out",
        _several_gpus,
        frozenset({"0"}),
    ),
    Unwanted(
        "TORCH_DISTRIBUTED_DEBUG",
        "advice",
        "ranks compare every collective before they run it",
        _several,
        frozenset({"detail"}),
    ),
    Unwanted("TORCH_COMPILE_DISABLE", "problem", "torch.compile does nothing", lambda facts, intent: intent.compiles),
    Unwanted("TORCHDYNAMO_DISABLE", "problem", "torch.compile does nothing", lambda facts, intent: intent.compiles),
    Unwanted(
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
        "advice",
        "every start recompiles everything",
        lambda facts, intent: intent.compiles,
    ),
    Unwanted("CUDA_CACHE_DISABLE", "advice", "kernels that the driver compiles are compiled at every start", _on_gpu),
    Unwanted(
        "TORCH_CUDNN_V8_API_ENABLED",
        "advice",
        "torch uses cuDNN's v8 API by default now, and no longer reads this",
        _on_gpu,
        frozenset(),
    ),
    Unwanted(
        "TORCH_SHOW_CPP_STACKTRACES",
        "advice",
        "every error of torch looks up its C++ frames, which can take seconds; for debugging only",
    ),
    Unwanted("PYTHONDEVMODE", "advice", "Python checks itself, which is for debugging"),
    Unwanted(
        "PYTHONTRACEMALLOC", "advice", "Python notes every allocation", values=frozenset({str(n) for n in range(1, 30)})
    ),
)


def variable_checks(facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> list[Check]:
    """Return problems with set and unset variables; a single ok line if there are none."""
    checks: list[Check | None] = [_omp(facts, variables, intent)]
    for rule in UNWANTED:
        value = variables.get(rule.name)
        if value is not None and rule.when(facts, intent) and rule.matches(value):
            checks.append(Check(rule.name, GROUP, value or "set, and empty", rule.verdict, rule.remedy, rule.why))
    checks += [
        _timeout(variables),
        _nccl_debug(facts, variables, intent),
        _elastic(variables),
        _allocator(facts, variables, intent),
        _architectures(facts, variables, intent),
    ]
    found = [check for check in checks if check is not None]
    if all(check.verdict == "ok" for check in found):
        found.append(Check("left from debugging", GROUP, "nothing", "ok", "", "such variables make every step slower"))
    return found


def _omp(facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> Check:
    name, why = "OMP_NUM_THREADS", "unset, every process takes a thread per core; bare torchrun sets 1"
    value, usable = variables.get(name), facts.cpus_usable
    share = None if usable is None else max(1, usable // intent.processes)
    if not value:
        if intent.processes > 1:
            set_it = "" if share is None else f"OMP_NUM_THREADS={share} under torchrun or srun; "
            return Check(name, GROUP, "not set", "advice", f"{set_it}frameworm's own launcher sets it", why)
        return Check(name, GROUP, "not set, which is right for one process", "ok", "", why)
    first = value.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        return Check(
            name, GROUP, value, "problem", f"set a number such as {share or 1}", "this is not a number of threads"
        )
    if usable is not None and int(first) * intent.processes > usable:
        remedy = f"OMP_NUM_THREADS={share}"
        return Check(name, GROUP, value, "advice", remedy, "threads beyond the cores take turns (cpu_oversubscribed)")
    return Check(name, GROUP, value, "ok", "", why)


def _timeout(variables: Mapping[str, str]) -> Check | None:
    value = variables.get("NCCL_TIMEOUT")
    if not value:
        return None
    why = "how long a collective may take before the run is given up; overrides parallel.timeout_s"
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 10**9:
        return Check("NCCL_TIMEOUT", GROUP, value, "problem", "set seconds, such as 600, or unset it", why)
    if seconds < 30:
        remedy = "give it a minute or more: the first step compiles, and ranks do not end that together"
        return Check("NCCL_TIMEOUT", GROUP, f"{value} s", "advice", remedy, why)
    return Check("NCCL_TIMEOUT", GROUP, f"{value} s", "ok", "", why)


def _nccl_debug(facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> Check | None:
    if not _several_gpus(facts, intent) or variables.get("NCCL_DEBUG"):
        return None
    return Check(
        "NCCL_DEBUG", GROUP, "not set", "advice", "NCCL_DEBUG=WARN", "NCCL then says why it failed; else only that"
    )


def _elastic(variables: Mapping[str, str]) -> Check | None:
    """For workers of plain torchrun; frameworm's own launcher sets it."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    restarts = variables.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not restarts.isdigit() or int(restarts) < 1 or variables.get(name) == "1":
        return None
    why = "restarted ranks may read a dead rank's address from the shared store and never meet"
    return Check(name, GROUP, "not set, and restarts are on", "advice", f"{name}=1", why)


def _allocator(facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> Check | None:
    value = variables.get("PYTORCH_ALLOC_CONF") or variables.get("PYTORCH_CUDA_ALLOC_CONF")
    if not value or not _on_gpu(facts, intent):
        return None
    why = "settings of torch's GPU allocator"
    for part in value.split(","):
        key, _, number = part.partition(":")
        if key.strip() == "max_split_size_mb" and number.strip().isdigit() and int(number) < 64:
            remedy = "raise it to 128 or more, or try expandable_segments:True against fragmentation"
            return Check(
                "PYTORCH_ALLOC_CONF", GROUP, value, "advice", remedy, "blocks this small are reallocated often"
            )
    return Check("PYTORCH_ALLOC_CONF", GROUP, value, "ok", "", why)


def _architectures(facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> Check | None:
    name = "TORCH_CUDA_ARCH_LIST"
    value = variables.get(name)
    if not value or not _on_gpu(facts, intent):
        return None
    why = "extensions that are compiled here run only on the GPUs it names"
    named = _compute_capabilities(value)
    present = sorted({gpu.capability for gpu in facts.gpus if gpu.capability is not None})
    if named is None or not present:
        return Check(name, GROUP, value, "unknown", "", why)
    missing = [f"{capability:g}" for capability in present if not _runs(capability, named)]
    if missing:
        remedy = f'unset it, or {name}="{";".join(f"{capability:.1f}" for capability in present)}"'
        return Check(name, GROUP, f"{value}, without {', '.join(missing)}", "problem", remedy, why)
    return Check(name, GROUP, value, "ok", "", why)


def _compute_capabilities(value: str) -> list[tuple[float, bool]] | None:
    """Parse a list such as `8.0;9.0+PTX` to capabilities and whether each has PTX; None if it contains names."""
    found = []
    for word in value.replace(";", " ").replace(",", " ").split():
        number, _, more = word.partition("+")
        try:
            found.append((float(number.rstrip("af")), more.upper() == "PTX"))
        except ValueError:
            return None
    return found


def _runs(capability: float, named: list[tuple[float, bool]]) -> bool:
    """True if the GPU can run it: binaries need the same major and at least that minor version, PTX any later GPU."""
    return any(built <= capability and (ptx or int(built) == int(capability)) for built, ptx in named)
