"""Trials and proofs of a search, using live runs of the engine; see `outcomes` for requests and results."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from frameworm.config.schema import Config
from frameworm.engine.lockstep import Plan
from frameworm.engine.step.capture import steps_before_replay
from frameworm.guard.agreement import Agreement, judge_agreement
from frameworm.guard.gain import Window
from frameworm.guard.proof import Evidence, Learning, Proof, StepEvidence, prove
from frameworm.hardware.resolve import resolve_machine
from frameworm.numerics.sample_hash import add_hashes
from frameworm.records.atomic import make_folder_in
from frameworm.tune.trials.live import Live, LiveError
from frameworm.tune.trials.live_rank import Lockstep
from frameworm.tune.trials.outcomes import (
    Failure,
    ProofRequest,
    ProofResult,
    QualityCheckRequest,
    QualityCheckResult,
    TrialRequest,
    TrialResult,
)
from frameworm.tune.trials.patience import Patience, prepares
from frameworm.tune.trials.quality_check import train_both
from frameworm.tune.trials.short_steps import ShortSteps
from frameworm.tune.trials.windows import (
    DISTURBED,
    CalmWindow,
    Effort,
    go_beside,
    measure_calm,
    take_turns,
    warm_up,
    window_of,
)

_NOT_CAPTURED = "the step was not captured"
# Early steps may be slower than later ones, but not all of them by this factor if nothing is compiled.
_SLOW_START = 3.0
_FIRST_LOOKS = 3
# Start-up time of a run without compilation, and the safety factor for the duration of learning.
_START_S = 1.0
_MARGIN = 1.3
# Steps after which a captured step is replayed, and batches on which states are compared again later.
_WARM_STEPS = 5
_EARLY = (1, 3)
# Extra steps that the leading side computes at a compared state: repeated, perturbed, in other precisions.
_STEPS_PER_STATE = 8
_PLENTY_BYTES = 16 * 2**30
# How long a trial waits in total for undisturbed windows: as a fraction of its time, and at most.
_MOST_TO_REST, _MOST_RESTS_S = 0.2, 5.0
# Both sides of two comparisons, each with states to compare, may use this fraction of the device's memory.
_RUNS, _ROOMY = 4, 0.5


class TrialRunner:
    """Runs the trials and proofs of a search.

    Args:
        folder: Folder for the output of trials and proofs, in a subfolder for each.
        world_size: Processes of every run.
        effort: How much to measure.
        limit_bytes: Memory each process may use in addition to Python and torch; None: the system's limit.
        short_steps: Shortens long steps; None: steps are not changed.
        device_bytes: Memory of the GPU; None: there is none.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        world_size: int = 1,
        effort: Effort | None = None,
        limit_bytes: int | None = None,
        short_steps: ShortSteps | None = None,
        device_bytes: int | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._world_size = world_size
        self._effort = effort or Effort()
        self._limit_bytes = limit_bytes
        self._short_steps = short_steps
        self._patience = Patience(self._effort.limit_s)
        self._starts_s = 2 * _START_S  # of both sides, when learning is compared
        self._device_bytes, self._peak_bytes = device_bytes, 0
        self._draws = device_bytes is not None  # whether the workload draws random numbers, as far as known
        # The compiler unpickles files from its cache. The search's folder may come from anywhere, so the cache is a
        # private folder that starts empty and is deleted with this object.
        self.compiled = Path(tempfile.mkdtemp(prefix="frameworm-compiled-"))
        self._remove_compiled = weakref.finalize(self, shutil.rmtree, self.compiled, ignore_errors=True)

    def close(self) -> None:
        """Delete the compiler cache; no trial may follow."""
        self._remove_compiled()

    def forget_compiled(self, since: float) -> None:
        """Delete what the compiler has written since a time, because a trial was killed while it may have been writing.

        Args:
            since: Time of `time.time`.
        """
        for path in self.compiled.rglob("*"):
            with suppress(OSError):
                if path.is_file() and path.stat().st_mtime >= since:
                    path.unlink()

    def run_trial(self, request: TrialRequest) -> TrialResult:
        """Measure one config alone."""
        folder = self._folder / "trials" / request.id
        details: dict[str, Any] = {"log": str(folder)}
        began, since = time.monotonic(), time.time()
        limit_s, by_budget = self._patience.for_trial(request.config, request.timeout_s)
        deadline = began + limit_s
        measured: list[CalmWindow] = []
        stopped_early = False
        try:
            (config,) = self._cut(folder, deadline, request.config)
            with self._live(config, folder, deadline) as live:
                live.stand()
                if (slow := self._slow_start(live, request)) is not None:
                    return TrialResult((slow,), stopped_early=True, details=details)
                step_s, warm = warm_up(live, self._effort, deadline, self._first_replay(config))
                steps = go_beside(live, warm.done, step_s, window_of(step_s, self._effort, config), request.beside)
                last_call = time.monotonic() + min(_MOST_RESTS_S, _MOST_TO_REST * (deadline - time.monotonic()))
                for count in range(1, self._effort.windows + 1):
                    measured.append(measure_calm(live, steps.size, last_call))
                    # Other work on the machine may have disturbed one window, or all.
                    disturbed = fmean(window.disturbed for window in measured)
                    windows = [window.sample_s for window in measured]
                    if count > 1 and disturbed <= DISTURBED and not request.keep_going(windows):
                        stopped_early = True
                        break
                told = live.finish()[0]
        except LiveError as error:
            self.forget_compiled(since)
            return TrialResult(failure=_told(error.failure, by_budget), details=details)
        self._patience.learn(request.config, time.monotonic() - began)
        self._peak_bytes = max(self._peak_bytes, told["peak_bytes"] or 0)
        # The time its start took beyond the usual duration of its steps when warm.
        step_s = median(windows) * warm.samples / len(warm.notes)
        setup_s = max(0.0, warm.age_s - warm.done * step_s)
        factor = 1 if self._short_steps is None else self._short_steps.factor
        details.update(
            step_s=step_s, steps_cut_by=factor, **{key: told[key] for key in told if key not in ("verdict", "findings")}
        )
        refused = [note for note in told["notes"] if note.startswith(_NOT_CAPTURED)]
        if request.config.gpu.capture == "step" and refused:
            return TrialResult(failure=Failure("capture_refused", refused[0]), details=details)
        return TrialResult(
            tuple(windows),
            setup_s,
            told["verdict"],
            tuple(told["findings"]),
            stopped_early,
            details=details,
            # Repeated windows hold later steps than those of the other trial.
            steps=None if any(window.repeated for window in measured) else (steps.first, *steps.size),
            disturbed=disturbed,
        )

    def prove(self, request: ProofRequest) -> ProofResult:
        """Measure two configs in turns, and compare their learning if the gain is confirmed."""
        folder = self._folder / "proofs" / request.id
        details: dict[str, Any] = {"log": str(folder)}
        since = time.time()
        limit_s, by_budget = self._patience.for_proof(request)
        deadline = time.monotonic() + limit_s
        try:
            cut = self._cut(folder, deadline, *request.configs)
            request = request.having(cut)
            windows, step_s = self._take_turns(request, folder, deadline)
            details["windows"] = [list(window) for window in windows]
            proof = self._judge(request, windows, None)
            if proof.checks[0].passed:
                evidence = self._compare(request, folder, deadline, step_s)
                proof = self._judge(request, windows, evidence)
            else:  # learning was not compared
                proof = replace(proof, reason=proof.checks[0].detail, checks=proof.checks[:1])
        except LiveError as error:
            self.forget_compiled(since)
            return ProofResult(failure=_told(error.failure, by_budget), details=details)
        return ProofResult(proof, details=details)

    def check_quality(self, request: QualityCheckRequest) -> QualityCheckResult:
        """Train two configs for longer from several seeds; see `longer`."""
        folder = self._folder / "checks" / request.id

        def start(config: Config, side: str, seeds: tuple[int, ...], deadline: float) -> Live:
            return self._live(config, folder / side, deadline, request.steps, seeds=seeds)

        since = time.time()
        # As in `_learn`: on a GPU both sides train at once.
        result = train_both(request, start, together=resolve_machine(request.baseline).device == "cuda")
        if result.failure is not None:
            self.forget_compiled(since)
        return replace(result, details={"log": str(folder), **result.details})

    def _cut(self, folder: Path, deadline: float, *configs: Config) -> list[Config]:
        """The configs with shorter steps, all or none; the first call measures how long the steps are."""
        short = self._short_steps
        if short is None:
            return list(configs)
        if short.factor is None:
            with self._live(configs[0], folder, deadline) as live:
                live.stand()
                live.go(0, 1)  # the first step takes longer than all others
                short.decide(live.go(0, 1).seconds)
        return short.cut_alike(configs)

    def _judge(self, request: ProofRequest, windows: Sequence[Window], evidence: Evidence | None) -> Proof:
        return prove(windows, evidence, numerics_effect=request.numerics_effect, consent=request.consent)

    def _take_turns(self, request: ProofRequest, folder: Path, deadline: float) -> tuple[list[Window], float]:
        """Windows of both sides in turns, and the slower side's seconds per step."""
        with (
            self._live(request.baseline, folder / "before", deadline) as before,
            self._live(request.candidate, folder / "after", deadline) as after,
        ):
            began = time.monotonic()
            before.stand()
            after.stand()
            # As in `_learn`: on a GPU both start at once, otherwise one after the other.
            starts = 1 if resolve_machine(request.baseline).device == "cuda" else 2
            self._starts_s = starts * max(_START_S, time.monotonic() - began)
            sides = ((before, request.baseline), (after, request.candidate))
            replayed = max(map(self._first_replay, request.configs))
            return take_turns(sides, self._effort, deadline, self._learning_s, replayed)

    def _first_replay(self, config: Config) -> int:
        return steps_before_replay(config, self._world_size)

    def _learn_steps(self, step_s: float) -> int:
        fewest, most = self._effort.learn_steps
        return max(fewest, min(most, round(self._effort.learn_s / step_s)))

    def _learning_s(self, before_s: float, after_s: float) -> float:
        """Time to reserve for comparing learning when the last window ends."""
        steps, states = self._learn_steps(max(before_s, after_s)), self._effort.states
        led_s = (steps + states * _STEPS_PER_STATE) * before_s
        return self._starts_s + _MARGIN * (led_s + (steps + 2 * states) * after_s)

    def _compare(self, request: ProofRequest, folder: Path, deadline: float, step_s: float) -> Evidence:
        """Compare both sides from the same states with the same samples, or their learning if that is impossible."""
        if request.numerics_effect == "more":
            return self._learn(request, folder, deadline, step_s)
        replayed = max(map(self._first_replay, (request.learning_baseline, request.learning_candidate)))
        steps = compared_steps(self._learn_steps(step_s), self._effort.states, replayed)
        gpu = request.learning_candidate.gpu
        plan = Plan(
            "",
            steps,
            _EARLY,
            (len(_EARLY), len(steps) - 1),
            gpu.mixed_precision,
            bool(gpu.tf32),
            wait_s=max(1.0, deadline - time.monotonic()),
        )
        sides = (request.learning_baseline, request.learning_candidate)
        shipped = (request.drawing_baseline, request.drawing_candidate)
        drawing = replace(plan, steps=steps[:1], early=(), updates=(), draws=self._effort.draws)
        may_draw = request.numerics_effect == "rounding"
        with ExitStack() as stack:

            def begin(sides: tuple[Config, Config], name: str, plan: Plan) -> Callable[[], tuple[list[Any], list[Any]]]:
                return stack.enter_context(self._in_lockstep(request, sides, folder / name, plan, deadline))

            compared = begin(sides, "lockstep", plan)
            # Starting takes longer than the comparison itself, so start this meanwhile if it may be needed.
            drawn = begin(shipped, "draws", drawing) if may_draw and self._draws and self._has_room() else None
            before, after = compared()
            self._draws = any(told["random"] for told in before) or sides[0] != request.drawing_baseline
            agreements = [Agreement.from_json(told["agreement"]) for told in after]
            if may_draw and self._draws:
                draw = drawn or begin(shipped, "draws", drawing)
                draws = [Agreement.from_json(told["agreement"]).draws for told in draw()[1]]
                agreements = [replace(agreement, draws=of_rank) for agreement, of_rank in zip(agreements, draws)]
        agreement = least_alike(agreements)
        agreement = replace(agreement, changes_precision=request.units[0] != request.units[1])
        return Evidence(merged(before), merged(after), agreement)

    def _has_room(self) -> bool:
        """Whether the device has memory for two more runs besides two."""
        return self._device_bytes is not None and _RUNS * self._peak_bytes < _ROOMY * self._device_bytes

    @contextmanager
    def _in_lockstep(
        self, request: ProofRequest, sides: tuple[Config, Config], folder: Path, plan: Plan, deadline: float
    ) -> Iterator[Callable[[], tuple[list[Any], list[Any]]]]:
        """Start a leading and a following run; yields a function that waits for them and returns their results."""
        plans = [replace(plan, unit=unit) for unit in (request.units[0], max(request.units))]
        with state_folder() as states, ExitStack() as stack:

            def begin(side: int) -> Live:
                lockstep = Lockstep(replace(plans[side], folder=str(states)), leads=side == 0)
                place = folder / ("leading", "following")[side]
                return stack.enter_context(self._live(sides[side], place, deadline, lockstep=lockstep))

            # Nothing is timed here. On a GPU their starts and compilations overlap; on a CPU they would only slow each
            # other down.
            together = resolve_machine(request.baseline).device == "cuda"
            lives = [begin(0), begin(1)] if together else []

            def finish() -> tuple[list[Any], list[Any]]:
                led = (lives[0] if lives else begin(0)).finish()
                return led, (lives[1] if lives else begin(1)).finish()

            yield finish

    def _learn(self, request: ProofRequest, folder: Path, deadline: float, step_s: float) -> Evidence:
        """Compare both sides from the same weights, each with the samples of its own steps."""
        steps = self._learn_steps(step_s)
        asked = [
            (request.learning_candidate, folder / "learning-after"),
            (request.learning_baseline, folder / "learning-before"),
        ]
        told: list[Learning] = []
        with ExitStack() as stack:
            together = resolve_machine(request.baseline).device == "cuda"
            lives: list[Live] = []
            for config, place in asked:
                lives.append(stack.enter_context(self._live(config, place, deadline, steps, whole_epoch=True)))
                if not together:
                    told.append(merged(lives.pop().finish()))
            told += [merged(live.finish()) for live in lives]
        candidate, baseline = told
        return Evidence(baseline, candidate)

    def _live(
        self,
        config: Config,
        folder: Path,
        deadline: float,
        learn_steps: int | None = None,
        lockstep: Lockstep | None = None,
        whole_epoch: bool = False,
        seeds: tuple[int, ...] = (),
    ) -> Live:
        make_folder_in(self._folder, folder)
        return Live(
            config,
            folder,
            deadline,
            world_size=self._world_size,
            limit_bytes=self._limit_bytes,
            learn_steps=learn_steps,
            lockstep=lockstep,
            compiled=self.compiled,
            whole_epoch=whole_epoch,
            seeds=seeds,
        )

    def _slow_start(self, live: Live, request: TrialRequest) -> float | None:
        """The lowest seconds per sample of a few first steps, if all are so slow that the trial may end; else None."""
        figures = []
        for _ in range(_FIRST_LOOKS):
            stand = live.go(0, 1, watched=True)
            # It may compile or capture, its shapes are new, or other work uses the cores.
            if prepares(request.config) or not stand.notes[0].visits or stand.disturbed > DISTURBED:
                return None
            assert stand.seconds is not None
            figures.append(stand.seconds / max(1, stand.samples))
            if request.keep_going([figures[-1] / _SLOW_START]):
                return None
        return min(figures)


def _told(failure: Failure, by_budget: bool) -> Failure:
    """A failure for the search: a run cut short by the budget has not necessarily hung."""
    if failure.kind != "hang" or not by_budget:
        return failure
    return replace(failure, reason=f"{failure.reason}, and the budget leaves it no more")


def merged(parts: Sequence[dict[str, Any]]) -> Learning:
    """The learning of a run, merged from its ranks' reports."""
    steps = []
    for step in range(min(len(part["losses"]) for part in parts)):
        losses = [(loss, count) for loss, count in (part["losses"][step] for part in parts) if loss is not None]
        total = math.fsum(count for _, count in losses)
        loss = math.fsum(loss * count for loss, count in losses) / total if total else math.nan
        tokens = [part["real_tokens"][step] for part in parts]
        samples = add_hashes([part["samples"][step] for part in parts])
        steps.append(StepEvidence(loss, samples, None if None in tokens else sum(tokens)))
    moved = parts[0].get("moved")
    return Learning(steps, None if moved is None else frozenset(moved))


def least_alike(agreements: Sequence[Agreement]) -> Agreement:
    """The comparison of the rank that agrees least, because one wrong rank is enough."""
    order = (False, None, True)
    return min(agreements, key=lambda agreement: order.index(judge_agreement(agreement).passed))


def compared_steps(steps: int, states: int, replayed: int = 0) -> tuple[int, ...]:
    """The steps at which states are compared: some in a row, then further and further apart.

    Args:
        steps: Cover at least this many steps.
        states: Number of states.
        replayed: Steps before the first that is replayed as a CUDA graph.
    """
    first = max(_WARM_STEPS, replayed) + 1
    last = max(steps, first + states - 1)
    row = min(states, len(_EARLY) + 1)
    far = [
        first + row - 1 + round((last - first - row + 1) * place / (states - row))
        for place in range(1, states - row + 1)
    ]
    return (*range(first, first + row), *far)


@contextmanager
def state_folder() -> Iterator[Path]:
    """A private folder for states, in memory if there is plenty, else where temporary files go."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > _PLENTY_BYTES
    with tempfile.TemporaryDirectory(prefix="frameworm-states-", dir=memory if roomy else None) as folder:
        yield Path(folder)
