"""What torch.compile did in this process, from its own log."""

from __future__ import annotations

from frameworm.records.schema import Compilation
from frameworm.torch_private.compiler import compilations

# torch keeps the last 64 entries, too few for a model with several graphs per block.
_MOST_ENTRIES = 100_000


def compilations_so_far() -> int:
    """Number of entries in the log, which keeps all entries from here on; imports the compiler."""
    return len(compilations(keep=_MOST_ENTRIES))


def compilation_since(earlier: int = 0) -> Compilation:
    """Time, number of graphs, and reasons for recompilation.

    Args:
        earlier: Number of entries at the start of the log to ignore.
    """
    events = compilations()[earlier:]
    again = [event for event in events if event.recompile_reason]
    return Compilation(
        time_s=sum((event.duration_us or 0) for event in events) * 1e-6,
        graphs=sum(bool(event.is_forward) for event in events),
        recompilations=len(again),
        reasons=[str(event.recompile_reason).splitlines()[0] for event in again[:3]],
    )
