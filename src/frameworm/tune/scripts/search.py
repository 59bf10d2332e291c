"""Searches for the switches that make a user's script faster: each is tried, timed in turns, and proved.

Trials are processes of the script. Two of them are timed window by window, the best so far and the one with a change,
taking turns over the same steps. A change that is faster is then run from states of the unchanged script, step by step,
and must compute the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from frameworm.attach.trial.fingerprint import fingerprint_of
from frameworm.attach.trial.switches import Switches
from frameworm.guard.agreement import judge_agreement
from frameworm.guard.gain import Side, Window, speedup_of
from frameworm.guard.proof import Evidence, Proof, prove
from frameworm.tune.processes.neighbours import Neighbours
from frameworm.tune.scripts.comparing import NOT_REPEATABLE, Comparing
from frameworm.tune.scripts.knobs import SCRIPT_KNOBS, ScriptKnob, forget_options
from frameworm.tune.scripts.patch import Written, write_changes
from frameworm.tune.scripts.process import ScriptEndedError, ScriptError, ScriptProcess, TrainsElsewhereError
from frameworm.tune.scripts.result import ScriptAttempt, ScriptResult
from frameworm.tune.scripts.source import as_diff
from frameworm.tune.scripts.trials import ScriptTrials

_FEW_STEPS = (2, 3, 4, 5)
LEAST_STEPS = 12  # fewer steps cannot be timed and compared
_PAIRS, _SCREENING = 10, 4
# A gain below the first is not worth a change; one below the second must be confirmed in further pairs of processes.
LEAST_GAIN, _LARGE_GAIN = 0.02, 0.06
_FURTHER_PAIRS = 2
_WINDOW_S = 0.3
_LEAD_IN = 2
_RESTARTS = 3
_WAYS_TO_COMPILE = ("cuda_graphs", "compile_blocks", "compile")  # by preference; blocks compile faster than all
_STARTS_COMPILED = 1.5  # the first start compiles, later ones find it cached
_MOST_AT_ONCE = 7  # two that are timed, and five that are compared
_USUALLY_MUCH = 0.1
_WARM_STEPS = 4
_LOOK_S = 2.0
# Fraction of the budget by which the last trial may exceed it.
_OVER = 0.1
# The patch may be slower than the switches by this factor, at the upper end of the interval.
_AS_FAST = 0.98


class ScriptSearch:
    """Tunes one script.

    Args:
        script: The Python file.
        arguments: The script's arguments.
        folder: Folder for trials and results.
        budget_s: Time limit of the whole search.
        module: Module name, if it runs as with `python -m`.
        isolated: Keep trials from writing anything permanent.
        ranks: For a script of several processes, the environment variables of each that differ from this process's.
        knobs: What to try.
        allowed: Names of `CONSENTS`, for knobs that only the user can judge.
        tell: Called with progress messages.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        folder: Path,
        budget_s: float,
        *,
        module: str | None = None,
        isolated: bool = True,
        ranks: Sequence[dict[str, str | None]] = (),
        knobs: Sequence[ScriptKnob] = SCRIPT_KNOBS,
        allowed: Sequence[str] = (),
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._script, self._all_knobs, self._allowed = script, knobs, allowed
        self._tell_plainly, self._began = tell, time.monotonic()
        self._budget_s, self._ends = budget_s, self._began + budget_s
        self._trial_s = 0.0  # duration of a start
        self._step_s = 0.1
        self._setup_s = 0.0
        self._module = module
        fingerprint = fingerprint_of(script, arguments, max(1, len(ranks)))
        self.result = ScriptResult(
            [str(script if module is None else _from_here(script)), *arguments], fingerprint, isolated
        )
        hung = self._ends + _OVER * budget_s
        place = folder / "trials"
        self._trials = ScriptTrials(script, arguments, place, hung, self.result, module=module, ranks=ranks)
        self._comparing = Comparing(self._trials)

    def run(self) -> ScriptResult:
        """Search until nothing is left to try, or the time is up."""
        result = self.result
        try:
            self._tell("running the script as it is")
            knobs = self._look()
        except ScriptError as error:
            result.problem, result.stopped = str(error), "the script cannot be tuned"
            result.spent_s = time.monotonic() - self._began
            return result
        result.stopped = "everything was tried"
        leap = _leap(knobs, result.facts)
        if leap is not None and self._has_time(leap):
            self._try(leap)
            if result.accepted:
                parts = leap.changes(result.facts)
                knobs = [knob for knob in knobs if not knob.changes(result.facts).keys() <= parts.keys()]
        for knob in knobs:
            if any(item.reason == NOT_REPEATABLE for item in result.attempts):
                result.stopped = NOT_REPEATABLE
                break
            if result.switches.cuda_graphs and knob.changes(result.facts).keys() & set(_WAYS_TO_COMPILE):
                continue  # it is already compiled
            if knob.changes(result.facts).keys() <= result.changes.keys():
                continue  # another value was accepted
            if not self._has_time(knob):
                result.stopped = f"the rest of the budget of {self._budget_s:.0f} s is too short for more"
                result.attempts.append(ScriptAttempt(knob.changes(result.facts), "skipped", result.stopped))
                continue
            self._try(knob)
        for knob in self._undecided(knobs):
            if self._has_time(knob):  # on a busy machine more windows may decide it
                self._try(knob, 2 * _PAIRS)
        if len(result.accepted) > 1:
            self._prove_whole(result.accepted[-1].proof)
        if result.changes:
            self._write_patch()
        self._trials.remove()
        result.total_steps = self._trials.total
        result.spent_s = time.monotonic() - self._began
        return result

    def check(self, switches: Switches, facts: Mapping[str, Any]) -> str | None:
        """Compare a few of the script's first steps with and without switches; returns what differs, or None.

        Args:
            switches: The switches that were found.
            facts: What was known about the script then.
        """
        self.result.facts = dict(facts)
        self._trials.run_as_module(facts.get("module"))
        if facts.get("spawned"):
            self._trials.follow_spawned(facts["spawned"])
        try:
            agreement = self._compare(switches, wanted=_FEW_STEPS, draws=False).agreement
        except ScriptError as error:
            return str(error)
        judged = None if agreement is None else judge_agreement(agreement)
        return judged.detail if judged is not None and judged.passed is False else None

    def _tell(self, text: str) -> None:
        self._tell_plainly(f"[{time.monotonic() - self._began:.0f} of {self._budget_s:.0f} s] {text}")

    # Inspecting the script

    def _look(self) -> list[ScriptKnob]:
        try:
            facts = self._seen_alone()
        except TrainsElsewhereError as found:
            # Side by side they would use the same port that the script sets, unless each has its own network.
            if not (found.world_size and self.result.isolated):
                raise
            self._tell(f"it trains in {found.world_size} processes that it starts itself; running it again with them")
            self._trials.follow_spawned(found.world_size)
            facts = {**self._seen_alone(), "spawned": found.world_size}
        if self._module is not None:
            facts = {**facts, "module": self._module}
        self.result.facts = facts
        self.result.fingerprint["device"] = facts["device_name"]
        return self._knobs()

    def _seen_alone(self) -> dict[str, Any]:
        """Facts about the script, from a run of it unchanged."""
        began = time.monotonic()
        with self._trials.start(Switches(), "first") as process:
            stand = self._stands(process)
            self._trial_s = time.monotonic() - began
            facts = stand.facts
            neighbours = Neighbours(process.numbers())
            try:
                timed = process.go(LEAST_STEPS - stand.done)
            except ScriptEndedError as ended:
                raise _too_short(ended.steps) from None
            assert timed.seconds is not None
            self._step_s = timed.seconds / (LEAST_STEPS - stand.done)
            share = timed.wait_s / timed.seconds
            try:  # find out if the script ends soon
                process.go(math.ceil(_LOOK_S / self._step_s))
            except ScriptEndedError as ended:
                self._trials.total = ended.steps
            self.result.disturbed = neighbours.disturbance()
        self.result.setup_s, self.result.step_s = stand.age_s, self._step_s
        self.result.sample_s = timed.seconds / timed.samples if timed.samples else None
        return {**facts, "data_wait_share": share}

    def _stands(self, process: ScriptProcess) -> Any:
        try:
            return process.stand()
        except ScriptEndedError as ended:
            raise (_too_short(ended.steps) if ended.steps else ended) from None

    def _knobs(self) -> list[ScriptKnob]:
        """The knobs that may help this script, most promising first; the others are recorded with the reason."""
        facts, found = self.result.facts, []
        for knob in self._all_knobs:
            why_not = knob.why_not(facts)
            if why_not is None and knob.consent is not None and knob.consent[0] not in self._allowed:
                why_not = f"{knob.consent[1]}; if that is all right, add --allow {knob.consent[0]}"
            if why_not is None:
                found.append(knob)
            elif not knob.again:
                self.result.attempts.append(ScriptAttempt(knob.changes(facts), "skipped", why_not))
        return sorted(found, key=lambda knob: -knob.gain(facts) / (1 + knob.setup_s))

    # One change

    def _undecided(self, knobs: Sequence[ScriptKnob]) -> list[ScriptKnob]:
        """Knobs that may be faster, as far as the noise allows to say."""
        result = self.result
        if result.stopped == NOT_REPEATABLE:
            return []
        open_changes = [
            item.changes
            for item in result.attempts
            if item.status == "inconclusive"
            and item.proof is not None
            and item.proof.speedup is not None
            and item.proof.speedup.value >= 1 + LEAST_GAIN
        ]
        return [knob for knob in knobs if knob.changes(result.facts) in open_changes]

    def _try(self, knob: ScriptKnob, pairs: int = _PAIRS) -> None:
        result = self.result
        changes = knob.changes(result.facts)
        candidate = result.switches.having(changes)
        attempt = ScriptAttempt(changes, "inconclusive", "")
        result.attempts.append(attempt)
        self._tell(f"trying {attempt.label}")
        self._setup_s = 0.0
        try:
            likely = len(changes) > 1
            with self._comparing.beside(2, candidate, likely=likely) as finish:
                windows = self._time_well(result.switches, candidate, finish, pairs)
            gain = prove(windows, None, minimum_gain=LEAST_GAIN)
            if gain.checks[0].passed is not True:  # then it does not matter what it computes
                attempt.proof, attempt.reason = gain, gain.checks[0].detail
                attempt.status = "inconclusive" if gain.checks[0].passed is None else "rejected"
            else:
                self._tell(f"proving {attempt.label}")
                attempt.proof = prove(windows, self._compare(candidate), minimum_gain=LEAST_GAIN)
                attempt.status, attempt.reason = attempt.proof.verdict, attempt.proof.reason
        except ScriptError as error:
            attempt.status, attempt.reason = "failed", str(error)
        if attempt.status == "accepted":
            result.switches, attempt.setup_s = candidate, self._setup_s
        self._tell(f"{attempt.label}: {attempt.status}, {attempt.reason}")

    def _prove_whole(self, last: Proof | None) -> None:
        """Time all accepted changes against the unchanged script; the last proof showed that they compute the same."""
        self._tell("timing all changes together")
        try:
            windows = self._time_both(Switches(), self.result.switches, screening=False)
        except ScriptError as error:
            self._tell(f"all changes together: {error}")
            return
        timed = prove(windows, None)
        if last is None or timed.speedup is None or timed.checks[0].passed is not True:
            self._tell(f"all changes together: {timed.checks[0].detail}")
            return
        self.result.total = replace(last, speedup=timed.speedup, checks=timed.checks[:1] + last.checks[1:])

    def _write_patch(self) -> None:
        """Write the changes as a diff of the script, or those that can be written, if that is proved."""
        result, text = self.result, self._script.read_bytes().decode("utf-8")
        whole = write_changes(text, result.changes, result.facts)
        ways = [whole]
        if "workers" in whole.changes and len(whole.changes) > 1:
            # Loader processes added in the script may draw other samples than one that continues its random numbers.
            fewer = {name: value for name, value in whole.changes.items() if name != "workers"}
            ways.append(write_changes(text, fewer, result.facts))
        left = whole.left
        for written in ways:
            why_not = self._why_not_offered(written, is_whole=written.changes == result.changes)
            if why_not is None:
                result.patch = as_diff(text, written.text, _relative(self._script))
                result.patch_without, result.no_patch = left, None
                return
            left = {**left, "workers": why_not}
            result.no_patch = result.no_patch or why_not

    def _why_not_offered(self, written: Written, *, is_whole: bool) -> str | None:
        """Run a patched script; returns None if the patch may be offered.

        With all changes it must be as fast as the switches set from outside. With some of them it must be proved faster
        than the unchanged script.
        """
        if not written.changes:
            return "; ".join(f"{name}: {reason}" for name, reason in written.left.items())
        if time.monotonic() + self._patch_s() > self._ends:
            return "there was no time left to try one; give a longer --budget"
        self._tell("trying the changes as a patch" if is_whole else "trying some of the changes as a patch")
        before = self.result.switches if is_whole else Switches()
        as_before = Switches(autocast=written.changes.get("autocast", "off"))
        try:
            with self._comparing.beside(2, as_before, written.text, likely=True) as finish:
                windows = self._time_both(before, Switches(), screening=False, source=written.text, starting=finish)
            gain = speedup_of(windows)
            least = _AS_FAST if is_whole else 1 + LEAST_GAIN
            if gain is None or (gain.high if is_whole else gain.low) < least:
                told = (
                    "it could not be timed" if gain is None else f"{gain.value:.2f} x ({gain.low:.2f}..{gain.high:.2f})"
                )
                return f"written into the script they are not {'as fast' if is_whole else 'proved faster'}: {told}"
            agreement = self._compare(as_before, source=written.text).agreement
        except ScriptError as error:
            return f"written into the script they fail: {error}"
        judged = None if agreement is None else judge_agreement(agreement)
        if judged is None or judged.passed is not True:
            return f"written into the script they do not compute the same: {judged and judged.detail}"
        self.result.patch_speedup = None if is_whole else gain
        return None

    def _time_well(self, before: Switches, after: Switches, starting: Callable[[], None], pairs: int) -> list[Window]:
        """Windows of one pair of processes, and of further pairs if the first shows a small gain.

        Two identical processes may differ by a percent or two throughout their lives.
        """
        windows = self._time_both(before, after, starting=starting, pairs=pairs)
        for _ in range(_FURTHER_PAIRS):
            gain = prove(windows, None, minimum_gain=LEAST_GAIN)
            if gain.checks[0].passed is not True or (gain.speedup is not None and gain.speedup.low > 1 + _LARGE_GAIN):
                break
            if time.monotonic() + self._trial_s + 2 * _SCREENING * _WINDOW_S > self._ends:
                return []  # it cannot be decided whether it was the process or the change
            again = self._time_both(before, after, pairs=_SCREENING)
            further = speedup_of(again)
            if further is None or further.value < 1 + LEAST_GAIN:
                return again  # it was the process, not the change
            windows += again
        return windows

    def _time_both(
        self,
        before: Switches,
        after: Switches,
        *,
        screening: bool = True,
        source: str | None = None,
        pairs: int = _PAIRS,
        starting: Callable[[], None] = lambda: None,
    ) -> list[Window]:
        """Windows of both sides in turns; only a few if they show already that nothing is gained.

        Args:
            before: Switches of one side.
            after: Switches of the other.
            screening: End early if nothing is gained.
            source: Source that the other side runs in place of the script.
            pairs: Number of windows per side.
            starting: Waits for other processes that are starting, before anything is timed.
        """
        if not self._trials.fit_together(2):
            return self._time_apart(before, after, source, pairs)
        windows: list[Window] = []
        restarts = 0
        while len(windows) < 2 * pairs and restarts < _RESTARTS:
            restarts += 1
            with ExitStack() as both:
                sides = [
                    ("before", both.enter_context(self._trials.start(before, "before"))),
                    ("after", both.enter_context(self._trials.start(after, "after", source=source))),
                ]
                try:
                    stands = [process.stand() for _, process in sides]
                    self._setup_s = max(self._setup_s, stands[1].age_s)  # later starts use the compile cache
                    if source is None and forget_options(after, self.result.facts, stands[1].facts):
                        restarts -= 1
                        continue
                    starting()
                    lead_in = _LEAD_IN + 2 * max(before.workers, after.workers)
                    steps = self._window_steps(lead_in)
                    for _, process in sides:
                        process.go(_WARM_STEPS)
                    while len(windows) < 2 * pairs:
                        pair = []
                        for side, process in sides if len(windows) % 4 == 0 else reversed(sides):
                            process.go(lead_in)
                            stand = process.go(steps)
                            assert stand.seconds is not None
                            pair.append(Window("before" if side == "before" else "after", stand.seconds / steps))
                        windows += pair
                        if screening and len(windows) == 2 * _SCREENING and _is_hopeless(windows):
                            return windows
                        if time.monotonic() > self._ends and len(windows) >= 2 * _SCREENING:
                            return windows
                except ScriptEndedError as ended:
                    self._trials.total = ended.steps
        return windows

    def _time_apart(self, before: Switches, after: Switches, source: str | None, pairs: int) -> list[Window]:
        """Windows of both sides, one process after the other, if the machine has no room for two."""
        windows: list[Window] = []
        lead_in = _LEAD_IN + 2 * max(before.workers, after.workers)
        for turn in range(2):
            taken: dict[Side, list[Window]] = {"before": [], "after": []}
            for side in reversed(taken) if turn else taken:
                is_after = side == "after"
                started = self._trials.start(after if is_after else before, side, source=source if is_after else None)
                with started as process, suppress(ScriptEndedError):
                    stand = process.stand()
                    self._setup_s = max(self._setup_s, stand.age_s if is_after else 0.0)
                    if is_after and source is None and forget_options(after, self.result.facts, stand.facts):
                        return self._time_apart(before, after, source, pairs)
                    steps = self._window_steps(lead_in)
                    process.go(_WARM_STEPS)
                    while len(taken[side]) < max(2, pairs // 2):
                        process.go(lead_in)
                        taken[side].append(Window(side, (process.go(steps).seconds or 0.0) / steps))
            windows += [window for pair in zip(*taken.values()) for window in pair]
        return windows

    def _window_steps(self, lead_in: int) -> int:
        wanted = max(4, math.ceil(_WINDOW_S / self._step_s))
        if self._trials.total is None:
            return wanted
        # A script that ends soon is started again; one start should yield half of the pairs.
        return max(2, min(wanted, 2 * (self._trials.total - LEAST_STEPS) // _PAIRS - lead_in))

    def _compare(self, candidate: Switches, **how: Any) -> Evidence:
        return self._comparing.compare(candidate, **how)

    def _patch_s(self) -> float:
        """Time needed to try a patch."""
        starts = 2 if self._trials.can_overlap(_MOST_AT_ONCE) else 3
        return starts * self._trial_s + 2 * _PAIRS * _WINDOW_S

    def _has_time(self, knob: ScriptKnob) -> bool:
        """Whether a trial and its proof should end in time."""
        starts = 2 if self._comparing.has_led or self._trials.can_overlap(_MOST_AT_ONCE) else 5
        starts += self._trials.draws_differently(Switches().having(knob.changes(self.result.facts)))
        needs_s = starts * self._trial_s + _STARTS_COMPILED * knob.setup_s + 2 * _PAIRS * _WINDOW_S
        if self.result.accepted:  # keep time for the patch
            needs_s += self._patch_s()
        return time.monotonic() + needs_s < self._ends


def _leap(knobs: Sequence[ScriptKnob], facts: Mapping[str, Any]) -> ScriptKnob | None:
    """On a GPU, combine all changes with a large usual gain into one, which needs only one trial and one proof."""
    usual = [knob for knob in knobs if knob.gain(facts) >= _USUALLY_MUCH]
    ways = [name for name in _WAYS_TO_COMPILE if any(name in knob.changes(facts) for knob in usual)]
    usual = [knob for knob in usual if not knob.changes(facts).keys() & set(ways[1:])]
    if facts["device"] != "cuda" or len(usual) < 2:
        return None
    changes = {key: value for knob in usual for key, value in knob.changes(facts).items()}
    return ScriptKnob(lambda _: changes, lambda _: 1.0, lambda _: None, max(knob.setup_s for knob in usual))


def _too_short(steps: int) -> ScriptError:
    return ScriptError(f"the script ended after {steps} steps; give it arguments that train for {LEAST_STEPS} or more")


def _relative(script: Path) -> str:
    """The script's path as typed, relative to the working directory."""
    path = _from_here(script)
    return script.name if path.is_absolute() else path.as_posix()


def _from_here(script: Path) -> Path:
    """Its path relative to the working directory, if it is below it."""
    try:
        return script.absolute().relative_to(Path.cwd())
    except ValueError:
        return script.absolute()


def _is_hopeless(windows: Sequence[Window]) -> bool:
    gain = speedup_of(windows)
    return gain is not None and gain.high < 1 + LEAST_GAIN
