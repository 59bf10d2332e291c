"""The style of plots for a paper's column: sizes, fonts, and colours that are safe for colour-blind readers.

Colours are those of Okabe and Ito; markers and dashes differ too, for print without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from frameworm.errors import MissingPackageError
from frameworm.records.estimate import OpenInterval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN = 3.3
DPI = 300
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
INK, SOFT = "#222222", "#777777"
LONGEST_LABEL = 44
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "axes.labelsize": 8.0,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.0,
    "legend.fontsize": 7.0,
    "legend.frameon": False,
    "text.parse_math": False,
    "text.usetex": False,
    "figure.dpi": DPI,
}


def require_matplotlib() -> None:
    """Raise early if matplotlib is missing, before anything is drawn.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "the PNG figures of a scaling report need matplotlib: pip install 'frameworm[plots]'"
        ) from None


def look_of(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the n-th curve."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        # After the last colour the markers are shifted, so that no two of 49 curves look alike.
        "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def bar_ends(values: Sequence[OpenInterval]) -> list[list[float]]:
    """Distances from each mean to its interval's ends; 0 if the interval is unknown."""
    below = [0.0 if value.low is None else max(value.value - value.low, 0.0) for value in values]
    above = [0.0 if value.high is None else max(value.high - value.value, 0.0) for value in values]
    return [below, above]


def from_zero(axes: Axes, measures: Sequence[OpenInterval | None], least: float = 0.0) -> None:
    """Scale the y axis to the means; a very wide interval, as of two values, is cut off."""
    found = [measure for measure in measures if measure is not None]
    means = max([least, *(measure.value for measure in found)])
    ends = max([means, *(measure.high for measure in found if measure.high is not None)])
    if means > 0:
        axes.set_ylim(0, 1.05 * min(ends, 1.4 * means))


def say(axes: Axes, text: str) -> None:
    """Write a message in the middle of otherwise empty axes."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=SOFT)


def plain_number(value: float, _: Any = None) -> str:
    """Format a tick without exponents."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:g}"


def short(text: str, most: int) -> str:
    """Shorten text to `most` characters, and escape dollar signs, which would start a formula."""
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")
