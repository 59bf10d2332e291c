"""Sample what a script does on its own, in the time that belongs to no phase.

A thread reads the position of the training thread: rarely while all time is in phases, up to a hundred times a second
once there is time to explain, until there are enough samples. A sample makes the script wait for the GIL, so none is
taken needlessly. Which samples fell into `other` is known when a step is over and its stretches have their final
labels.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from frameworm.attach.frames import COMPUTING, DEVICE, FrameReader, Spot, work_at
from frameworm.attach.timeline import START, Stretches
from frameworm.observe.clocks.phases import DATA_WAIT, OPTIMIZER, OTHER, TRANSFER
from frameworm.records.observations import OtherTime, Place

INTERVAL_S, IDLE_INTERVAL_S = 0.01, 0.2
# Below this fraction of the step in no phase, nobody asks where the time went.
WORTH_A_LOOK = 0.04
ENOUGH_LOOKS = 400
# Decay per step of the time totals, so that rare, long work is sampled the next time.
MEMORY = 0.98
# Largest fraction of one core; the longer a sample takes, the fewer are taken.
MOST_COST_SHARE = 0.002
# Spreads samples, so that steps of equal length are not always sampled at the same moment.
_GOLDEN = 0.618034
MOST_SAMPLES = 50_000
MOST_PLACES = 5
SAME_PLACE_LINES = 3
PREPARING = "preparing"


class StackSamples:
    """Samples of one thread.

    Args:
        script: The script; files beside it are shown relative to its folder.
        active: Whether to go on sampling.
        between: Whether the script is in no phase right now.
        frames: Returns the frames of all threads.
        clock: The clock of the marks.

    Attributes:
        watched: The sampled thread: the one that created this object, unless set.
    """

    def __init__(
        self,
        script: str,
        active: Callable[[], bool],
        between: Callable[[], bool],
        frames: Callable[[], Mapping[int, FrameType]] = sys._current_frames,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder = f"{Path(script).parent}{os.sep}"
        self._active = active
        self._between = between
        self._frames = frames
        self._clock = clock
        self._reader = FrameReader(script)
        self.watched = threading.get_ident()
        self._samples: deque[tuple[float, Spot]] = deque(maxlen=MOST_SAMPLES)
        self._counts: Counter[tuple[Spot, bool]] = Counter()
        self._counted = 0
        self._steps_s = self._other_s = 0.0
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start sampling."""
        self._thread = threading.Thread(target=self._run, name="frameworm-looks", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Stop sampling."""
        self._ended = True
        if self._thread is not None:
            self._thread.join(timeout_s)

    def look(self) -> None:
        """Record the thread's current position."""
        # Read the clock first: meanwhile the thread advances by a few lines at most.
        now_s = self._clock()
        spot = self._reader.read(self._frames().get(self.watched))
        if spot is not None:
            self._samples.append((now_s, spot))

    @property
    def interval_s(self) -> float:
        """Time between two samples, not limited by their cost."""
        needed = self._other_s > WORTH_A_LOOK * self._steps_s and self._counted < ENOUGH_LOOKS
        return INTERVAL_S if needed else IDLE_INTERVAL_S

    def credit(self, step: Stretches, step_s: float, other_s: float | None, *, counts: bool = True) -> None:
        """Count the samples that fell into a finished step's time in no phase.

        Args:
            step: The step.
            step_s: Duration of the step.
            other_s: Time in no phase, if known; on a GPU only what the device did not hide.
            counts: Whether the step is part of the statistics.
        """
        if other_s is not None:
            self._steps_s = MEMORY * self._steps_s + step_s
            self._other_s = MEMORY * self._other_s + other_s
        begin_s, marks = step.begin.host_s, step.marks
        samples, end_s = self._samples, marks[-1].host_s
        index = 0
        while samples and samples[0][0] <= end_s:
            look_s, spot = samples.popleft()
            if look_s < begin_s or not counts:
                continue
            while marks[index].host_s < look_s:
                index += 1
            if marks[index].label == OTHER:
                self._counts[spot, _is_before_the_model(step, index)] += 1
                self._counted += 1

    def summary(self) -> OtherTime | None:
        """Return the places sampled most; None if there are none."""
        lines: defaultdict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
        for (spot, before), count in self._counts.items():
            work = work_at(spot)
            if work == DEVICE:  # measured separately
                continue
            if before and work == COMPUTING:
                work = PREPARING
            lines[spot.file, spot.function, work][spot.line] += count
        places = [
            Place(self._short(file), block.most_common(1)[0][0], function, work, block.total())
            for (file, function, work), found in lines.items()
            for block in _blocks(found)
        ]
        if not places:
            return None
        places.sort(key=lambda place: -place.samples)
        works: Counter[str] = Counter()
        for place in places:
            works[place.work] += place.samples
        return OtherTime(works.total(), dict(works), places[:MOST_PLACES])

    def _short(self, file: str) -> str:
        return file.removeprefix(self._folder)

    def _run(self) -> None:
        fraction, looks = 0.5, 0
        began_s = time.thread_time()
        try:
            while not self._ended and self._active():
                cost_s = (time.thread_time() - began_s) / max(looks, 1)
                interval_s = max(self.interval_s, cost_s / MOST_COST_SHARE)
                fraction = (fraction + _GOLDEN) % 1.0
                time.sleep(interval_s * (0.5 + fraction))
                looks += 1
                if self._between():
                    self.look()
        except Exception:
            # Errors here must not affect the script: just stop sampling.
            return


def _is_before_the_model(step: Stretches, index: int) -> bool:
    """Whether a stretch lies between the fetch of a batch and its first use."""
    for mark in reversed(step.marks[:index]):
        if mark.label in (DATA_WAIT, START, TRANSFER):
            return True
        if mark.label not in (OTHER, OPTIMIZER):
            return False
    return False


def _blocks(lines: Counter[int]) -> list[Counter[int]]:
    """Group a function's sampled lines into blocks of neighbours."""
    blocks: list[Counter[int]] = []
    last = None
    for line in sorted(lines):
        if last is None or line - last > SAME_PLACE_LINES:
            blocks.append(Counter())
        blocks[-1][line] = lines[line]
        last = line
    return blocks
