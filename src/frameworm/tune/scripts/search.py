"""Looks for the switches that make a user's script faster: what may help here is tried, timed in turns, and proved.

Trials are processes of the script. Two of them are timed window by window, the best so far and the one with a change;
they take turns over the same steps. What is faster then goes on from states of the script as it is, step for step, and
must compute the same.
"""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from frameworm.attach.trial.fingerprint import fingerprint_of
from frameworm.attach.trial.job import Role, TrialJob
from frameworm.attach.trial.switches import WORDS, Switches, through_options
from frameworm.guard.agreement import ROUNDING_UNITS, judge_agreement
from frameworm.guard.gain import Window, speedup_of
from frameworm.guard.proof import Evidence, Proof, prove
from frameworm.tune.processes.process_tree import free_port
from frameworm.tune.scripts.compare import CANDIDATE, LEADER, evidence_of
from frameworm.tune.scripts.knobs import SCRIPT_KNOBS, ScriptKnob, forget_options
from frameworm.tune.scripts.patch import NoPatchError, as_diff, patched
from frameworm.tune.scripts.process import ScriptEndedError, ScriptError, ScriptProcess
from frameworm.tune.scripts.result import ScriptAttempt, ScriptResult

_FEW_STEPS = (2, 3, 4, 5)
COMPARED_STEPS = (2, 3, 4, 6, 8, 12, 16, 24)
LEAST_STEPS = 12  # fewer cannot be timed and compared
_PAIRS, _SCREENING = 10, 4
# A smaller gain is not worth a change; one below the larger is looked for in further pairs of processes.
LEAST_GAIN, _LARGE_GAIN = 0.02, 0.06
_FURTHER_PAIRS = 2
_WINDOW_S = 0.3
_LEAD_IN = 2
_NOISE = ("noise-1", "noise-2")
_EXPECTED = "expected"
_RESTARTS = 3
_USUALLY_MUCH = 0.1
_WARM_STEPS = 4
_LOOK_S = 2.0
# Parameters, gradients and two states of an optimizer; runs that fit into so much are made beside each other.
_COPIES_BYTES, _ROOM_BYTES = 16, 2 * 2**30
# What the last trial may take beyond the budget.
_OVER = 0.1
_PORT = 29400
# A patch may be so much slower than the switches, by the upper end of what was measured.
_AS_FAST = 0.98


class ScriptSearch:
    """Tunes one script.

    Args:
        script: The Python file.
        arguments: What follows it.
        folder: Where trials and results go.
        budget_s: What all of it may take.
        module: Its name where it runs as with `python -m`.
        isolated: Trials write nothing that stays.
        ranks: Of a script of several processes the variables of each, where they differ from this process's.
        knobs: What is tried.
        tell: Is told what goes on.
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
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._script, self._arguments, self._module = script, list(arguments), module
        self._place = folder / "trials"
        shutil.rmtree(self._place, ignore_errors=True)
        self._ranks, self._all_knobs = list(ranks), knobs
        self._folders = [self._place / f"rank{rank}" for rank in range(len(ranks))] or [self._place]
        for path in self._folders:
            path.mkdir(parents=True)
        self._ends = time.monotonic() + budget_s
        self._budget_s = budget_s
        self._tell = tell
        self._trial_s = 0.0  # what a start takes
        self._step_s = 0.1
        self._total: int | None = None  # steps of the script, once it has come to its end
        self._led = False
        self._expects = False
        self._setup_s: float | None = None
        shown = ["-m", module] if module else [str(script)]
        self.result = ScriptResult(
            [*shown, *arguments], fingerprint_of(script, arguments, max(1, len(ranks))), isolated
        )

    def run(self) -> ScriptResult:
        """Search until nothing is left to try, or the time is over."""
        result, began = self.result, time.monotonic()
        try:
            self._tell("running the script as it is")
            knobs = self._look()
        except ScriptError as error:
            result.problem, result.stopped = str(error), "the script cannot be tuned"
            result.spent_s = time.monotonic() - began
            return result
        result.stopped = "everything was tried"
        leap = _leap(knobs, result.facts)
        if leap is not None and self._has_time(leap):
            self._try(leap)
            if result.accepted:
                parts = leap.changes(result.facts)
                knobs = [knob for knob in knobs if not knob.changes(result.facts).keys() <= parts.keys()]
        for knob in knobs:
            if not self._has_time(knob):
                result.stopped = f"the rest of the budget of {self._budget_s:.0f} s is too short for more"
                result.attempts.append(ScriptAttempt(knob.changes(result.facts), "skipped", result.stopped))
                continue
            self._try(knob)
        if len(result.accepted) > 1:
            self._prove_whole(result.accepted[-1].proof)
        if result.changes:
            self._write_patch()
        shutil.rmtree(self._place, ignore_errors=True)
        result.spent_s = time.monotonic() - began
        return result

    def check(self, switches: Switches, facts: Mapping[str, Any]) -> str | None:
        """Compare a few of the script's first steps with and without switches; what differs, or None.

        Args:
            switches: What was found.
            facts: What was known about the script then.
        """
        self.result.facts = dict(facts)
        try:
            agreement = self._compare(switches, _FEW_STEPS).agreement
        except ScriptError as error:
            return str(error)
        judged = None if agreement is None else judge_agreement(agreement)
        return judged.detail if judged is not None and judged.passed is False else None

    # What the script is

    def _look(self) -> list[ScriptKnob]:
        began = time.monotonic()
        with self._start(Switches(), "first") as process:
            stand = self._stands(process)
            self._trial_s = time.monotonic() - began
            facts = stand.facts
            try:
                timed = process.go(LEAST_STEPS - stand.done)
            except ScriptEndedError as ended:
                raise _too_short(ended.steps) from None
            assert timed.seconds is not None
            self._step_s = timed.seconds / (LEAST_STEPS - stand.done)
            share = timed.wait_s / timed.seconds
            try:  # a script that is over soon should be known as such
                process.go(math.ceil(_LOOK_S / self._step_s))
            except ScriptEndedError as ended:
                self._total = ended.steps
        self.result.facts = {**facts, "data_wait_share": share}
        self.result.fingerprint["device"] = facts["device_name"]
        self.result.setup_s = stand.age_s
        self.result.sample_s = timed.seconds / timed.samples if timed.samples else None
        return self._knobs()

    def _stands(self, process: ScriptProcess) -> Any:
        try:
            return process.stand()
        except ScriptEndedError as ended:
            raise (_too_short(ended.steps) if ended.steps else ended) from None

    def _knobs(self) -> list[ScriptKnob]:
        """What may help this script, the most promising first; what cannot is written down with its reason."""
        facts, found = self.result.facts, []
        for knob in self._all_knobs:
            why_not = knob.why_not(facts)
            if why_not is None:
                found.append(knob)
            else:
                self.result.attempts.append(ScriptAttempt(knob.changes(facts), "skipped", why_not))
        return sorted(found, key=lambda knob: -knob.gain(facts) / (1 + knob.setup_s))

    # One change

    def _try(self, knob: ScriptKnob) -> None:
        result = self.result
        changes = knob.changes(result.facts)
        candidate = result.switches.having(changes)
        attempt = ScriptAttempt(changes, "inconclusive", "")
        result.attempts.append(attempt)
        self._tell(f"trying {attempt.label}")
        try:
            windows = self._time_well(result.switches, candidate)
            gain = prove(windows, None, minimum_gain=LEAST_GAIN)
            if gain.checks[0].passed is not True:  # whatever it computes
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
        """All that was accepted beside the script as it is; that it computes the same was shown with the last."""
        self._tell("timing all changes together")
        try:
            windows = self._time_both(Switches(), self.result.switches, screening=False)
        except ScriptError as error:
            self._tell(f"all changes together: {error}")
            return
        gain = speedup_of(windows)
        if gain is not None and last is not None:
            self.result.total = replace(last, speedup=gain, checks=prove(windows, None).checks[:1] + last.checks[1:])

    def _write_patch(self) -> None:
        """The changes as a diff of the script, if that runs as fast and computes the same."""
        result, source = self.result, self._script.read_text(encoding="utf-8")
        try:
            written = patched(source, result.changes, result.facts)
            if time.monotonic() + self._patch_s() > self._ends:
                raise NoPatchError("there was no time left to try one")
            self._tell("trying the changes as a patch")
            windows = self._time_both(result.switches, Switches(), screening=False, source=written)
            slower = speedup_of(windows)
            if slower is None or slower.high < _AS_FAST:
                told = (
                    "it could not be timed"
                    if slower is None
                    else f"{slower.value:.2f} x ({slower.low:.2f}..{slower.high:.2f})"
                )
                raise NoPatchError(f"written into the script they are not as fast: {told}")
            agreement = self._compare(Switches(autocast=result.switches.autocast), source=written).agreement
            judged = None if agreement is None else judge_agreement(agreement)
            if judged is None or judged.passed is not True:
                raise NoPatchError(f"written into the script they do not compute the same: {judged and judged.detail}")
        except (NoPatchError, ScriptError) as error:
            result.no_patch = str(error)
            return
        result.patch = as_diff(source, written, _relative(self._script))

    def _time_well(self, before: Switches, after: Switches) -> list[Window]:
        """Windows of one pair of processes, and of further pairs where one shows a small gain.

        Two processes that do the same may differ by a percent or two for as long as they live.
        """
        windows = self._time_both(before, after)
        for _ in range(_FURTHER_PAIRS):
            gain = prove(windows, None, minimum_gain=LEAST_GAIN)
            if gain.checks[0].passed is not True or (gain.speedup is not None and gain.speedup.low > 1 + _LARGE_GAIN):
                break
            if time.monotonic() + self._trial_s + 2 * _SCREENING * _WINDOW_S > self._ends:
                return []  # nobody can tell whether it was the process or the change
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
    ) -> list[Window]:
        """Windows of both in turns; few where they show already that nothing is gained.

        Args:
            before: Of one side.
            after: Of the other.
            screening: End early where nothing is gained.
            source: What the other side runs in place of the script.
            pairs: Of windows.
        """
        windows: list[Window] = []
        restarts = 0
        while len(windows) < 2 * pairs and restarts < _RESTARTS:
            restarts += 1
            with ExitStack() as both:
                sides = [
                    ("before", both.enter_context(self._start(before, "before"))),
                    ("after", both.enter_context(self._start(after, "after", source=source))),
                ]
                try:
                    stands = [process.stand() for _, process in sides]
                    self._setup_s = stands[1].age_s
                    if source is None and forget_options(after, self.result.facts, stands[1].facts):
                        restarts -= 1
                        continue
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
                    self._total = ended.steps
        return windows

    def _window_steps(self, lead_in: int) -> int:
        wanted = max(4, math.ceil(_WINDOW_S / self._step_s))
        if self._total is None:
            return wanted
        # A script that is over soon is started again; a start should give half of the pairs.
        return max(2, min(wanted, 2 * (self._total - LEAST_STEPS) // _PAIRS - lead_in))

    # The proof

    def _compare(
        self, candidate: Switches, wanted: Sequence[int] = COMPARED_STEPS, source: str | None = None
    ) -> Evidence:
        """What the candidate, or another source, computes from states of the script as it is."""
        steps = [step for step in wanted if self._total is None or step < self._total]
        runs: list[tuple[str, Switches, int]] = []
        if not self._led:
            runs += [(LEADER, Switches(), 0), *((name, Switches(), place) for place, name in enumerate(_NOISE, 1))]
        expected = LEADER
        if candidate.autocast != "off":
            expected = _EXPECTED
            if not self._expects:
                runs.append((_EXPECTED, Switches(autocast=candidate.autocast), 0))
        runs.append((CANDIDATE, candidate, 0))
        small = _COPIES_BYTES * self.result.facts["parameters"] * len(runs) * len(self._folders) < _ROOM_BYTES
        for together in [runs] if small else [[run] for run in runs]:
            self._note(together, steps, source)
        self._led, self._expects = True, self._expects or expected == _EXPECTED
        unit = ROUNDING_UNITS["bf16"] if candidate.autocast != "off" else self._unit(candidate)
        return evidence_of(self._folders, steps, _NOISE, CANDIDATE, unit, expected)

    def _unit(self, switches: Switches) -> float:
        facts = self.result.facts
        if facts["half"]:
            return ROUNDING_UNITS["bf16"]
        return ROUNDING_UNITS["tf32" if facts["device"] == "cuda" and (facts["tf32"] or switches.tf32) else "fp32"]

    def _note(self, runs: Sequence[tuple[str, Switches, int]], steps: list[int], source: str | None) -> None:
        """Let runs note what their steps give, beside each other: who follows waits for the states."""
        with ExitStack() as all_of_them:
            processes = []
            for name, switches, perturbed in runs:
                for folder in self._folders:
                    for path in folder.glob(f"{name}-*.pt"):
                        path.unlink()
                role: Role = "lead" if name == LEADER else "follow"
                text = source if name == CANDIDATE else None
                started = self._start(switches, name, role, steps, perturbed, text)
                processes.append(all_of_them.enter_context(started))
            for process in processes:
                try:
                    process.hear("compared")
                except ScriptEndedError as ended:
                    self._total = ended.steps  # what it has noted until then counts

    def _start(
        self,
        switches: Switches,
        name: str,
        role: Role = "time",
        steps: list[int] | None = None,
        perturbed: int = 0,
        source: str | None = None,
    ) -> ScriptProcess:
        self.result.trials += 1
        in_torch, options = through_options(switches, self.result.facts)
        job = TrialJob(
            str(self._script.absolute()),
            self._arguments,
            module=self._module,
            source=source,
            switches=in_torch.to_dict(),
            options=options,
            role=role,
            folder=str(self._place.absolute()),
            name=name,
            steps=steps or [],
            perturbed=perturbed,
            unit=self._unit(Switches()) if self.result.facts else ROUNDING_UNITS["fp32"],
            isolated=self.result.isolated,
            ranks=self._ranks,
            # Where trials have a network of their own, every port of it is free.
            port=(_PORT if self.result.isolated else free_port()) if self._ranks else 0,
        )
        return ScriptProcess(job, self._place / "processes", self._ends + _OVER * self._budget_s)

    def _patch_s(self) -> float:
        """What it takes to try a patch."""
        return 3 * self._trial_s + 2 * _PAIRS * _WINDOW_S

    def _has_time(self, knob: ScriptKnob) -> bool:
        """Whether a trial and its proof end in time, as far as is known."""
        starts = 2 if self._led else 5
        needs_s = starts * self._trial_s + 3 * knob.setup_s + 2 * _PAIRS * _WINDOW_S
        if self.result.accepted:  # what was found is to become a patch
            needs_s += self._patch_s()
        return time.monotonic() + needs_s < self._ends


def _leap(knobs: Sequence[ScriptKnob], facts: Mapping[str, Any]) -> ScriptKnob | None:
    """On a GPU all that usually brings much as one change: one trial and one proof instead of one each."""
    usual = [knob for knob in knobs if knob.gain(facts) >= _USUALLY_MUCH]
    if any("compile_blocks" in knob.changes(facts) for knob in usual):  # the same, and started sooner
        usual = [knob for knob in usual if "compile" not in knob.changes(facts)]
    if facts["device"] != "cuda" or len(usual) < 2:
        return None
    changes = {key: value for knob in usual for key, value in knob.changes(facts).items()}
    return ScriptKnob(lambda _: changes, lambda _: 1.0, lambda _: None, max(knob.setup_s for knob in usual))


def _too_short(steps: int) -> ScriptError:
    if not steps:
        return ScriptError("no optimizer of torch has stepped: there is no training to tune in this process")
    return ScriptError(f"the script ended after {steps} steps; give it arguments that train for {LEAST_STEPS} or more")


def _relative(script: Path) -> str:
    """As it is called from where the command was typed."""
    try:
        return script.absolute().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return script.name


def _is_hopeless(windows: Sequence[Window]) -> bool:
    gain = speedup_of(windows)
    return gain is not None and gain.high < 1 + LEAST_GAIN


def plan_in_words(script: Path, arguments: Sequence[str], folder: Path, budget_s: float, refused: str | None) -> str:
    """What a search would do, without doing it."""
    apart = (
        "Each trial runs in namespaces of its own: what it writes or deletes is gone at its end, and it has no network."
        if refused is None
        else f"This machine cannot keep trials apart ({refused}): what they write and send would stay."
    )
    names = ", ".join(WORDS[name][0] for name in asdict(Switches()))
    return (
        f"would run {shlex.join([str(script), *arguments])} some ten times, each for as many steps as it takes to time "
        f"and to compare, within {budget_s:.0f} s, and kill it then. {apart}\n"
        f"would try, where it may help: {names}.\n"
        f"would write into {folder}: tuned.yaml, tune.json, report.html.\n"
    )
