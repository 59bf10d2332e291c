"""The result of the batch-size finder as plain text."""

from __future__ import annotations

from frameworm.report.kit.tables import plain
from frameworm.scaling.batch_search import BatchSizeReport, BatchTrial

_OUTCOMES = {
    "fits": "fits",
    "cuda_oom": "out of GPU memory",
    "host_oom": "out of host memory",
    "killed": "killed",
    "hang": "hung",
    "error": "failed",
}
_COLUMNS = ("micro-batch", "trial", "outcome", "samples/s", "step", "peak", "took")


def render_batch_size(report: BatchSizeReport) -> str:
    """Every trial, then what to put into the config."""
    ranks = "1 rank" if report.world_size == 1 else f"{report.world_size} ranks"
    title = f"batch size · {plain(report.name)} · {report.device} · {ranks}"
    lines = [title, "─" * len(title)]
    if report.limit_bytes is not None:
        lines.append(f"  limit: {_gib(report.limit_bytes)} per rank, {plain(report.limit_name or 'unknown')}")
    if report.guess is not None:
        lines.append(f"  planned largest: {min(report.guess, report.upper_end):,}")
    lines += ["", *_table(report.trials), ""]
    if report.largest is None:
        lines.append("nothing fits, not even the smallest micro-batch: see frameworm memory --config for what would")
    else:
        lines.append(f"largest   {_setting(report, report.largest)}{_why_not_larger(report)}")
    if report.fastest is not None:
        rate = next(
            trial.samples_per_s
            for trial in reversed(report.trials)
            if trial.micro_batch == report.fastest and trial.samples_per_s is not None
        )
        lines.append(f"fastest   {_setting(report, report.fastest)}, {rate:,.0f} samples/s on this mix of lengths")
    lines += [f"note: {plain(note)}" for note in report.notes]
    trials = "1 trial" if report.search_trials == 1 else f"{report.search_trials} trials"
    lines.append(f"{trials} to find the largest, {report.seconds:.0f} s in all")
    return "\n".join(lines) + "\n"


def _setting(report: BatchSizeReport, size: int) -> str:
    accumulation = report.accumulation(size)
    total = size * accumulation * report.world_size
    return (
        f"training.micro_batch: {size}  (accumulation {accumulation} x world size {report.world_size} = "
        f"global batch {total:,})"
    )


def _why_not_larger(report: BatchSizeReport) -> str:
    known = ", verified" if report.verified else ", NOT verified"
    if report.ends_below is not None:
        return f"{known}; {report.ends_below:,} does not fit"
    if report.global_batch is not None and report.largest == report.global_batch // report.world_size:
        return f"{known}; the whole global batch fits (--free-global-batch tries larger ones)"
    return f"{known}; no larger than {report.upper_end:,} was looked for"


def _table(trials: list[BatchTrial]) -> list[str]:
    rows = [_COLUMNS, *(_row(trial) for trial in trials)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for place, trial in enumerate(trials, 1):
        if trial.message is not None:
            where = "" if trial.rank is None else f"rank {trial.rank}: "
            lines[place] += f"  {where}{plain(trial.message)[:100]}"
    return lines


def _row(trial: BatchTrial) -> tuple[str, ...]:
    return (
        f"{trial.micro_batch:,}",
        trial.purpose,
        _OUTCOMES[trial.outcome],
        "" if trial.samples_per_s is None else f"{trial.samples_per_s:,.0f}",
        "" if trial.step_s is None else f"{trial.step_s * 1e3:,.1f} ms",
        "" if trial.peak_bytes is None else _gib(trial.peak_bytes),
        "" if trial.took_s is None else f"{trial.took_s:.1f} s",
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
