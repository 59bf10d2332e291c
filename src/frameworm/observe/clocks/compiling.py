"""What torch.compile did in this process, from its own log."""

from __future__ import annotations

from frameworm.records.schema import Compilation


def compilations_so_far() -> int:
    """Entries in the log; imports the compiler."""
    from torch._dynamo.utils import get_compilation_metrics

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
