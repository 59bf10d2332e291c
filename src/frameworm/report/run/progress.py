"""Progress of a run: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from time import monotonic
from typing import ClassVar, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from frameworm.records.events import Listener
from frameworm.records.printable import printable
from frameworm.records.schema import PHASES, EpochRecord, RunRecord, StepRecord
from frameworm.report.kit.tables import number, plain, seconds

REDRAW_S = 0.2
PLAIN_EVERY_S = 10.0
_SMOOTHING = 0.98
_SHORT_LABELS = {"data_wait": "data", "communication_exposed": "network"}
_SMALLEST_SHARE = 0.005
_BAR_WIDTH = 24
_NARROW_BAR_WIDTH = 8
_TIME_LEFT_WIDTH = 7


# Computes the MFU of steps from their samples, tokens, squared tokens and seconds.
Mfu = Callable[[float, float | None, float | None, float], float | None]


def in_notebook(stream: TextIO) -> bool:
    """Whether the stream becomes the output of a notebook cell."""
    return type(stream).__module__.startswith("ipykernel.")


def somebody_watches() -> bool:
    """Whether to show progress by default: on a terminal and in a notebook, not in a log file."""
    return sys.stderr.isatty() or in_notebook(sys.stdout)


class ProgressLine(Listener):
    """Loss, samples/s, MFU if known, and time left.

    On a terminal it also shows the fractions of all phases, elsewhere only that of the data wait.

    Args:
        total_steps: Steps of the whole run; None if unknown.
        epochs: Epochs of the whole run.
        world_size: Number of ranks, assumed to do the same work as this one.
        stream: Where to write; a terminal gets the live line. None: stderr, or stdout in a notebook, where stderr is
            shown as an error.
        mfu: Computes the MFU of this rank's steps.
    """

    must_not_break_training: ClassVar[bool] = True

    def __init__(
        self,
        total_steps: int | None,
        epochs: int,
        world_size: int,
        stream: TextIO | None = None,
        mfu: Mfu | None = None,
    ) -> None:
        self._stream = stream or (sys.stdout if in_notebook(sys.stdout) else sys.stderr)
        self._total = total_steps
        self._epochs = epochs
        self._world_size = world_size
        draws = self._stream.isatty() and not in_notebook(self._stream)
        self._live = Live(total_steps, self._stream) if draws else None
        self._every_s = REDRAW_S if self._live else PLAIN_EVERY_S
        self._loss: float | None = None
        self._mfu = mfu
        self._samples = self._tokens = 0
        self._squared_tokens = 0.0
        self._time_s = self._divided_s = 0.0
        self._phases: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        self._next = 0.0
        self._began = 0.0

    def on_run_start(self, record: RunRecord) -> None:
        """Start drawing."""
        self._began = monotonic()
        self._next = self._began + self._every_s
        if self._live is not None:
            self._live.start()

    def on_step(self, step: StepRecord) -> None:
        """Add the step, and redraw at intervals."""
        loss = step.loss
        if loss is not None:
            self._loss = loss if self._loss is None else _SMOOTHING * self._loss + (1 - _SMOOTHING) * loss
        self._samples += step.samples
        if step.tokens is not None:
            self._tokens += step.tokens
            self._squared_tokens += step.tokens**2 / max(step.samples, 1)
        self._time_s += step.step_s
        if step.phases:  # not all short steps on a GPU are divided
            self._divided_s += step.step_s
            phases = self._phases
            for name, phase_s in step.phases.items():
                phases[name] = phases.get(name, 0.0) + phase_s
        now = monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            self._draw(step.step, step.epoch)

    def on_epoch(self, epoch: EpochRecord) -> None:
        """Print one plain line per epoch, also on terminals."""
        parts = [f"epoch {epoch.epoch}/{self._epochs}", f"loss {number(epoch.train_loss)}"]
        if epoch.val_loss is not None:
            parts.append(f"val loss {number(epoch.val_loss)}")
        if epoch.val_accuracy is not None:
            parts.append(f"accuracy {epoch.val_accuracy:.2%}")
        parts += [f"{plain(name.removeprefix('val_'))} {number(value)}" for name, value in epoch.metrics.items()]
        if epoch.samples_per_s is not None:
            parts.append(f"{epoch.samples_per_s:,.0f} samples/s")
        parts.append(seconds(epoch.epoch_time_s))
        self._say("  ".join(parts))

    def on_run_end(self, record: RunRecord) -> None:
        """Stop drawing."""
        if self._live is not None:
            self._live.stop()

    def _draw(self, step: int, epoch: int) -> None:
        rate = self._samples * self._world_size / self._time_s if self._time_s > 0 else 0.0
        if self._divided_s > 0:  # otherwise the previous ones are kept
            self._shares = {name: phase_s / self._divided_s for name, phase_s in self._phases.items()}
        tokens, squared = (self._tokens, self._squared_tokens) if self._tokens else (None, None)
        mfu = None if self._mfu is None else self._mfu(self._samples, tokens, squared, self._time_s)
        self._samples = self._tokens = 0
        self._squared_tokens = 0.0
        self._time_s = self._divided_s = 0.0
        self._phases.clear()
        loss = "unknown" if self._loss is None or not math.isfinite(self._loss) else f"{self._loss:.4f}"
        text = f"loss {loss}  {rate:,.0f} samples/s" + ("" if mfu is None else f"  MFU {mfu:.0%}")
        if self._live is not None:
            self._live.update(step, f"epoch {epoch}/{self._epochs}", text, self._shares)
            return
        if self._shares:
            text += f"  {self._shares.get('data_wait', 0.0):.0%} waiting for data"
        left = ""
        if self._total is not None and step:
            left = f"  about {seconds((monotonic() - self._began) / step * (self._total - step))} left"
        of = "" if self._total is None else f"/{self._total}"
        self._say(f"epoch {epoch}/{self._epochs}  step {step}{of}  {text}{left}")

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._live.say(text)
        else:
            print(printable(text), file=self._stream, flush=True)


class Live:
    """The live line, drawn by rich; it is redrawn only on a change, so that no thread competes with training."""

    def __init__(self, total: int | None, stream: TextIO) -> None:
        self._total = total
        self._bar = BarColumn(bar_width=_BAR_WIDTH)
        self._progress = Progress(
            TextColumn("{task.fields[epoch]}"),
            self._bar,
            TextColumn("{task.completed}/{task.total}" if total else "{task.completed} steps"),
            TextColumn("{task.fields[text]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=Console(file=stream),
            auto_refresh=False,
            transient=True,
        )
        self._drawn: tuple[object, ...] | None = None
        self._task: TaskID = self._progress.add_task("train", total=total, epoch="", text="starting")

    def start(self) -> None:
        """Show the line."""
        self._progress.start()

    def update(self, step: int, epoch: str, text: str, shares: Mapping[str, float]) -> None:
        """Redraw it if it has changed, with as many phases as fit on the terminal."""
        steps = f"{step}/{self._total}" if self._total else f"{step} steps"
        # One space between each two of the five columns.
        room = self._progress.console.width - len(epoch) - len(steps) - len(text) - _TIME_LEFT_WIDTH - 4
        all_phases = phase_shares_text(shares, sys.maxsize)
        self._bar.bar_width = _BAR_WIDTH if len(all_phases) + 2 + _BAR_WIDTH <= room else _NARROW_BAR_WIDTH
        phases = phase_shares_text(shares, room - self._bar.bar_width - 2)
        if phases:
            text = f"{text}  {phases}"
        drawn = (step, epoch, text, self._progress.console.width)
        if drawn != self._drawn:
            self._drawn = drawn
            self._progress.update(self._task, completed=step, epoch=epoch, text=text, refresh=True)

    def say(self, text: str) -> None:
        """Print a line above it."""
        self._progress.console.print(printable(text), highlight=False, markup=False)

    def stop(self) -> None:
        """Remove it."""
        self._progress.stop()


def phase_shares_text(shares: Mapping[str, float], width: int) -> str:
    """The phases in the order of a step, as `data 3% · forward 31%`; only the largest if not all fit in `width`.

    Args:
        shares: Fraction of the step time of each phase, 0 to 1; those that round to zero are omitted.
        width: Most characters to use.
    """
    order = [*(name for name in PHASES if name in shares), *(name for name in shares if name not in PHASES)]
    shown = [name for name in order if math.isfinite(shares[name]) and shares[name] >= _SMALLEST_SHARE]
    while shown:
        text = " · ".join(f"{_SHORT_LABELS.get(name, plain(name))} {shares[name]:.0%}" for name in shown)
        if len(text) <= width:
            return text
        shown.remove(min(shown, key=lambda name: shares[name]))
    return ""
