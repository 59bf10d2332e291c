"""How fast something grows, whatever single values do."""

from __future__ import annotations

from collections.abc import Sequence

from frameworm.records.statistics import percentile

FEWEST_POINTS = 6


def robust_slope(points: Sequence[tuple[float, float]], most_points: int = 200) -> float | None:
    """The median of the slopes between all pairs of points (Theil and Sen): up to 29% of wild points do not move it.

    Args:
        points: Pairs of time and value, in order of time.
        most_points: Beyond this number evenly spread points stand for all.

    Returns:
        Growth per unit of time, or None with fewer than six points or no time between them.
    """
    if len(points) < FEWEST_POINTS:
        return None
    if len(points) > most_points:
        step = (len(points) - 1) / (most_points - 1)
        points = [points[round(index * step)] for index in range(most_points)]
    slopes = sorted(
        (later - value) / (moment - at)
        for index, (at, value) in enumerate(points)
        for moment, later in points[index + 1 :]
        if moment > at
    )
    return percentile(slopes, 0.5) if slopes else None
