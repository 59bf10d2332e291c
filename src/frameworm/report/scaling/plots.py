"""The plots of a scaling report as PNG files for a paper's column: 3.3 inches wide, eight-point type."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameworm.errors import RunFolderError
from frameworm.records.atomic import replacing
from frameworm.records.estimate import OpenInterval
from frameworm.report.scaling.plot_style import (
    COLOURS,
    DASHES,
    INK,
    LONGEST_LABEL,
    SOFT,
    STYLE,
    WIDTH_IN,
    bar_ends,
    from_zero,
    look_of,
    plain_number,
    require_matplotlib,
    say,
    short,
)
from frameworm.report.scaling.table import Configuration, DatasetTable, EpochCurve, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES: dict[str, Callable[[DatasetTable], Figure]] = {}


def figure_paths(table: DatasetTable, out: Path) -> list[Path]:
    """The paths of a data set's plots, in the order of `FIGURES`."""
    return [out / f"{table.stem}_{name}.png" for name in FIGURES]


def draw_figures(table: DatasetTable, out: Path) -> list[Path]:
    """Draw the four plots of one data set into an existing folder, and return their paths.

    Args:
        table: The data set.
        out: The folder.

    Raises:
        MissingPackageError: matplotlib is not installed.
        RunFolderError: A file cannot be written.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    paths = figure_paths(table, out)
    for path, draw in zip(paths, FIGURES.values()):
        # Drawing must neither depend on the process's matplotlib settings nor change them.
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            settings: Any = matplotlib.rcParams
            settings.update(STYLE)
            picture = io.BytesIO()
            canvas: Any = FigureCanvasAgg(draw(table))
            canvas.print_png(picture)
        try:
            with replacing(path) as file:
                file.write(picture.getvalue())
        except OSError as error:
            raise RunFolderError(f"cannot write {path}: {error.strerror or error}") from error
    return paths


def _figure(table: DatasetTable, title: str, panels: int, entries: int) -> tuple[Figure, list[Axes]]:
    """An empty figure with space for its legend below; legend entries share lines only if all are short."""
    from matplotlib.figure import Figure

    legend = 0.17 * math.ceil(entries / _columns(table)) if entries > 1 else 0.0
    figure = Figure(figsize=(WIDTH_IN, 0.35 + 1.75 * panels + legend), layout="constrained")
    figure.suptitle(f"{short(table.name, 26)}: {title}", x=0.01, ha="left", fontsize=9, fontweight="bold")
    axes = figure.subplots(panels, 1, squeeze=False)
    return figure, [row[0] for row in axes]


def _columns(table: DatasetTable) -> int:
    longest = max((len(item.label) for item in table.configurations), default=0)
    return 2 if longest <= 18 else 1


def _legend(figure: Figure, axes: Axes, table: DatasetTable) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        names = [short(label, LONGEST_LABEL) for label in labels]
        figure.legend(handles, names, loc="outside lower left", ncols=_columns(table), handlelength=2.4)


def _world_axis(axes: Axes, table: DatasetTable) -> None:
    """Ticks at the measured world sizes, on a logarithmic axis if they span a wide range."""
    sizes = table.world_sizes
    if sizes[-1] >= 8 * sizes[0]:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    apart = [size for index, size in enumerate(sizes) if index in (0, len(sizes) - 1) or len(sizes) <= 9 or index % 2]
    axes.set_xticks(apart, [str(size) for size in apart])
    axes.set_xlabel(f"world size ({table.units})")
    if len(sizes) == 1:
        axes.set_xlim(sizes[0] - 1, sizes[0] + 1)


def _curve(axes: Axes, index: int, label: str, rows: Sequence[Row], pick: Callable[[Row], OpenInterval | None]) -> None:
    """One configuration over world sizes, with its intervals."""
    points = [(row.world_size, value) for row in rows if (value := pick(row)) is not None]
    if not points:
        return
    axes.errorbar(
        [size for size, _ in points],
        [value.value for _, value in points],
        yerr=bar_ends([value for _, value in points]),
        label=label,
        **look_of(index),
        capsize=2.5,
        elinewidth=1.0,
    )


def _epoch_time(table: DatasetTable) -> Figure:
    figure, (bars, curves) = _figure(table, "epoch time", 2, _epoch_entries(table))
    sizes = table.world_sizes
    width = 0.8 / max(len(table.configurations), 1)
    for index, item in enumerate(table.configurations):
        shift = (index - (len(table.configurations) - 1) / 2) * width
        for row in item.rows:
            place = sizes.index(row.world_size) + shift
            mean = row.epoch_time_s
            if mean is None:
                continue
            colour = COLOURS[index % len(COLOURS)]
            bars.bar(place, mean.value, width * 0.9, color=colour, alpha=0.45, edgecolor=colour, linewidth=0.8)
            bars.errorbar(place, mean.value, yerr=bar_ends([mean]), color=INK, capsize=2.5, elinewidth=1.0)
            spread = [place + width * 0.3 * _aside(number) for number in range(len(row.epoch_times_s))]
            bars.plot(spread, row.epoch_times_s, ".", color=INK, markersize=1.4)
    bars.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    bars.set_xlim(-0.6, len(sizes) - 0.4)
    bars.grid(axis="x", visible=False)
    from_zero(
        bars,
        [row.epoch_time_s for row in table.rows],
        max((max(row.epoch_times_s, default=0.0) for row in table.rows), default=0.0),
    )
    bars.set_xlabel(f"world size ({table.units})")
    bars.set_ylabel("time of an epoch (s)")
    bars.set_title("mean, 95% interval, each epoch")
    _draw_epochs(curves, table, lambda curve: curve.epoch_time_s)
    curves.set_ylim(0, 1.08 * curves.dataLim.ymax)  # do not cut off markers at the top
    curves.set_ylabel("time (s)")
    title = "over the run"
    if table.warmup:
        last = min(table.warmup, max(len(curve.epochs) for curve in table.curves)) + 0.5
        curves.axvspan(0.5, last, color="#eeeeee", zorder=0)
        title += " (grey: warm-up, not measured)"
    curves.set_title(title)
    _legend(figure, curves, table)
    return figure


def _aside(number: int) -> float:
    """Offset of a bar's n-th dot, so that equal values do not hide each other: 0, 1/2, -1/2, 1, -1, ..."""
    return (0.0, 0.5, -0.5, 1.0, -1.0)[number % 5]


def _draw_epochs(axes: Axes, table: DatasetTable, pick: Callable[[EpochCurve], Sequence[float | None]]) -> bool:
    """Draw one curve per configuration and world size; returns whether there was anything to draw.

    The first curve has larger markers, so that it stays visible behind others with the same values.
    """
    from matplotlib.ticker import MaxNLocator

    drawn = False
    sizes = table.world_sizes
    for index, curve in enumerate(table.curves):
        values = [math.nan if value is None else value for value in pick(curve)]
        if not any(math.isfinite(value) for value in values):
            continue
        drawn = True
        look = look_of(sizes.index(curve.world_size))
        look["linestyle"] = DASHES[curve.configuration % len(DASHES)]
        axes.plot(curve.epochs, values, **look, markersize=5.0 if index == 0 else 3.0)
    if drawn:
        _explain_epochs(axes, table)
        axes.set_xlim(0.5, max(curve.epochs[-1] for curve in table.curves if curve.epochs) + 0.3)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    return drawn


def _explain_epochs(axes: Axes, table: DatasetTable) -> None:
    """Legend entries: colours for world sizes, and dashes for configurations if there are several."""
    for index, size in enumerate(table.world_sizes):
        axes.plot([], [], label=table.size_label(size), **{**look_of(index), "linestyle": "-"}, markersize=3.0)
    if len(table.configurations) > 1:
        for index, item in enumerate(table.configurations):
            axes.plot([], [], label=item.label, color=SOFT, linestyle=DASHES[index % len(DASHES)])


def _epoch_entries(table: DatasetTable) -> int:
    several = len(table.configurations)
    return len(table.world_sizes) + (several if several > 1 else 0)


def _speedup_efficiency(table: DatasetTable) -> Figure:
    figure, (speedup, efficiency) = _figure(table, "scaling", 2, len(table.configurations) + 1)
    sizes = table.world_sizes
    bases = sorted({item.base.world_size for item in table.configurations if len(item.rows) > 1})
    for base in bases[:1]:
        ends = [base, max(sizes[-1], base + 1)]
        speedup.plot(ends, [size / base for size in ends], color=SOFT, linestyle=(0, (1, 1.5)), label="ideal")
    for index, item in enumerate(table.configurations):
        _curve(speedup, index, item.label, item.rows, lambda row: row.speedup)
        _curve(efficiency, index, item.label, item.rows, lambda row: row.efficiency)
    speedup.axhline(1.0, color=SOFT, linewidth=0.7)
    speedup.set_ylabel("speedup")
    if sizes[-1] >= 16 * sizes[0]:
        speedup.set_yscale("log", base=2)
        speedup.minorticks_off()
        speedup.yaxis.set_major_formatter(plain_number)
    else:
        from_zero(speedup, [row.speedup for row in table.rows], least=sizes[-1] / min([*bases, sizes[-1]]))
    for limit, word in ((0.85, "excellent"), (0.7, "good"), (0.5, "fair")):
        efficiency.axhline(limit, color=SOFT, linewidth=0.6, linestyle=(0, (4, 3)))
        efficiency.annotate(
            word, (0.0, limit), xycoords=("axes fraction", "data"), xytext=(2, 1), textcoords="offset points",
            ha="left", va="bottom", fontsize=6.0, color=SOFT,
        )  # fmt: skip
    from_zero(efficiency, [row.efficiency for row in table.rows], least=1.0)
    efficiency.set_ylabel("efficiency")
    for axes in (speedup, efficiency):
        _world_axis(axes, table)
    if not bases:
        say(speedup, "no base to compare with")
    _legend(figure, speedup, table)
    return figure


def _throughput(table: DatasetTable) -> Figure:
    figure, (axes,) = _figure(table, "throughput", 1, len(table.configurations))
    for index, item in enumerate(table.configurations):
        _curve(axes, index, item.label, item.rows, lambda row: row.samples_per_s)
        _ideal(axes, index, item)
    _world_axis(axes, table)
    if table.world_sizes[-1] >= 16 * table.world_sizes[0]:
        axes.set_yscale("log")
        axes.minorticks_off()
    else:
        ideal = [item.base.samples_per_s.value * item.rows[-1].world_size / item.base.world_size
                 for item in table.configurations if item.base.samples_per_s is not None]  # fmt: skip
        from_zero(axes, [row.samples_per_s for row in table.rows], least=max(ideal, default=0.0))
    axes.yaxis.set_major_formatter(plain_number)
    axes.set_ylabel("samples/s")
    axes.set_title("mean, 95% interval; dotted: ideal")
    _legend(figure, axes, table)
    return figure


def _ideal(axes: Axes, index: int, item: Configuration) -> None:
    base = item.base
    if base.samples_per_s is None or len(item.rows) < 2:
        return
    sizes = [row.world_size for row in item.rows]
    heights = [base.samples_per_s.value * size / base.world_size for size in sizes]
    axes.plot(sizes, heights, color=COLOURS[index % len(COLOURS)], linestyle=(0, (1, 1.5)), linewidth=0.9)


def _accuracy(table: DatasetTable) -> Figure:
    """Accuracy over the epochs; without one the validation loss, or else the training loss."""
    figure, (axes,) = _figure(table, "accuracy", 1, _epoch_entries(table))
    name = "validation accuracy"
    if not _draw_epochs(axes, table, lambda curve: curve.val_accuracy):
        name = "validation loss"
        if not _draw_epochs(axes, table, lambda curve: curve.val_loss):
            name = "training loss"
            if not _draw_epochs(axes, table, lambda curve: curve.train_loss):
                say(axes, "no run recorded an accuracy or a loss")
    axes.set_ylabel(name)
    axes.set_title("mean of the runs after each epoch")
    _legend(figure, axes, table)
    return figure


FIGURES.update(
    epoch_time_detailed=_epoch_time,
    speedup_efficiency=_speedup_efficiency,
    throughput=_throughput,
    accuracy=_accuracy,
)
