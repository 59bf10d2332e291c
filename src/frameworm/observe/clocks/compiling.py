"""What torch.compile did in this process, from its own log."""

from __future__ import annotations

from frameworm.records.schema import Compilation

# torch keeps the last 64, which a model with a few graphs for each of its blocks exceeds.
_MOST_ENTRIES = 100_000


def compilations_so_far() -> int:
    """Entries in the log, which keeps all from here on; imports the compiler."""
    from torch._dynamo.utils import get_compilation_metrics, set_compilation_metrics_limit

    set_compilation_metrics_limit(_MOST_ENTRIES)
    return len(get_compilation_metrics())


def compilation_since(earlier: int = 0) -> Compilation:
    """Time, graphs and reasons to compile again.

    Args:
        earlier: Entries in the log that do not count.
    """
    from torch._dynamo.utils import get_compilation_metrics

    events = get_compilation_metrics()[earlier:]
    again = [event for event in events if event.recompile_reason]
    return Compilation(
        time_s=sum((event.duration_us or 0) for event in events) * 1e-6,
        graphs=sum(bool(event.is_forward) for event in events),
        recompilations=len(again),
        reasons=[str(event.recompile_reason).splitlines()[0] for event in again[:3]],
    )
