"""Checks of a machine with several GPUs, in order of importance, as far as time allows.

1. Does a captured step compute what it recorded? A training with replayed steps is compared with one that runs the
   same functions without capture: every loss and every weight must be bitwise equal, or no further apart than two
   trainings without capture are on this GPU.
2. Are failures survived? A rank that no longer responds is named and ends the others in the set time; after one was
   killed, all are restarted and capture again.
3. How fast is it, and was that predicted? For each training the step time on one GPU is measured, with the whole batch
   and with the part that a rank will have; from these and a measurement of the network the step time on all GPUs is
   predicted and written down with the time; only then is it measured.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from safetensors.torch import load_file

from frameworm import __version__
from frameworm.engine.run import export_run
from frameworm.errors import DeviceError, FramewormError, RunFolderError
from frameworm.hardware.fingerprint import environment_fingerprint
from frameworm.launch.environment import all_variables, own_command, ranks_per_gpu
from frameworm.records.atomic import make_folder_in, write_atomic
from frameworm.records.schema import RunRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import read_steps
from frameworm.scaling.fabrics import MeasuredNetwork
from frameworm.scaling.network import NetworkModel
from frameworm.scaling.predict import Predictor, Row
from frameworm.scaling.profile import load_run
from frameworm.scaling.simulate import Setting
from frameworm.tune.verify.equality import Outcome, judge_equality
from frameworm.tune.verify.processes import Ended, ranks_of, run
from frameworm.tune.verify.trainings import Training, write_trainings

SCHEMA_VERSION = 1
RESULT_NAME, PREDICTIONS_NAME, NETWORK_NAME = "verify.json", "predictions.json", "network.json"
STRATEGIES = ("ddp", "zero1")
EQUAL_STEPS = 60
ENDLESS_STEPS, STEPS_BEFORE_FAILURE, STEPS_AFTER_RESTART = 1_000_000, 400, 400
CHECKPOINT_EVERY = 100
SILENCE_S, STOP_GRACE_S = 10.0, 3.0
SILENCE_GRACE_S = 10.0  # ranks check on each other only at intervals, and write reports
_LIMIT_S = 240.0
_ENOUGH = 1.25  # another training is started if the time left is this multiple of what one like it took

Verdict = Literal["holds", "fails", "not checked"]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Claim:
    """The result of one check.

    Attributes:
        name: Its name.
        question: The question.
        verdict: The answer.
        text: What was observed.
        evidence: Further details.
    """

    name: str
    question: str
    verdict: Verdict
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Speed:
    """One training on all GPUs, captured or eager: the predicted and the measured speed.

    Attributes:
        training: Name of the training.
        mode: Captured or eager.
        data: Where its samples come from.
        world_size: Number of GPUs.
        alone_s: Seconds per step of the whole batch on one GPU.
        share_s: Seconds per step on one GPU with the samples of one rank.
        predicted_s: Prediction for all GPUs: value, low and high.
        predicted_at: When it was predicted.
        measured_s: Seconds per step on all GPUs.
        captured_steps: Steps that were replayed.
        in_interval: Whether the prediction was right; None: the ranks share a GPU, which is not predicted.
        failed: Why there is no measurement.
    """

    training: str
    mode: Literal["captured", "eager"]
    data: str
    world_size: int
    alone_s: float
    share_s: float
    predicted_s: tuple[float, float, float]
    predicted_at: float
    measured_s: float | None = None
    captured_steps: int | None = None
    in_interval: bool | None = None
    failed: str | None = None

    @property
    def speedup(self) -> float | None:
        """The speedup over one GPU."""
        return None if self.measured_s is None else self.alone_s / self.measured_s


@dataclass
class Verification:
    """All results; `to_dict` returns the content of verify.json."""

    folder: Path
    gpus: int
    shared: bool
    on_cpu: bool
    environment: Mapping[str, Any]
    checks: list[Claim] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether none of the checks failed."""
        return all(check.verdict != "fails" for check in self.checks) and not any(item.failed for item in self.speeds)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "frameworm": __version__,
            "gpus": self.gpus,
            "shared_gpu": self.shared,
            "on_cpu": self.on_cpu,
            "environment": dict(self.environment),
            "holds": self.holds,
            "checks": [asdict(item) for item in self.checks],
            "speeds": [{**asdict(item), "speedup": item.speedup} for item in self.speeds],
            "skipped": self.skipped,
            "wall_s": self.wall_s,
        }


def verify_gpus(
    out: Path,
    *,
    gpus: int | None = None,
    data: Path | None = None,
    budget_s: float = 600.0,
    on_cpu: bool = False,
    tell: Tell | None = None,
) -> Verification:
    """Run all checks, as far as time allows, and write `verify.json` to a folder.

    Args:
        out: A new or empty folder.
        gpus: Number of this machine's GPUs to use; None: all.
        data: Holds folders ag_news and imdb; without them texts are generated.
        budget_s: Time limit.
        on_cpu: Use CPU processes instead of GPUs, without capture, to try out the verification itself.
        tell: Called with progress messages.

    Returns:
        The results.

    Raises:
        DeviceError: There are too few GPUs.
        RunFolderError: The folder is not empty.
    """
    visible = 0 if on_cpu else torch.cuda.device_count()
    count = gpus or (2 if on_cpu else visible * ranks_per_gpu())
    if not on_cpu and count > visible * ranks_per_gpu():
        raise DeviceError(f"--gpus {count}: this machine shows {visible}; give at most that many")
    if count < 2:
        raise DeviceError(
            f"this machine shows {visible} GPU{'s' if visible != 1 else ''}, and what is verified needs 2 or more; to "
            "try the kit with two processes on one GPU set FRAMEWORM_RANKS_PER_GPU=2"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"{out} is in use; give a new or an empty folder as --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("runs", "configs"):
            make_folder_in(out, out / name)
        trainings = write_trainings(out / "configs", data, on_cpu=on_cpu)
    except OSError as error:
        raise RunFolderError(f"cannot write to {out}: {error.strerror or error}; give another --out") from error
    device = torch.device("cpu" if on_cpu else "cuda")
    found = Verification(out, count, ranks_per_gpu() > 1, on_cpu, environment_fingerprint(device))
    kit = _Kit(found, budget_s, tell or (lambda text: None))
    kit.ask(trainings)
    return found


class _Kit:
    """Runs the trainings of a verification and writes its files."""

    def __init__(self, found: Verification, budget_s: float, tell: Tell) -> None:
        self.found = found
        self.captured = "rehearse" if found.on_cpu else "step"
        self._begun = time.monotonic()
        self._until = self._begun + budget_s
        self._tell = tell
        self._took: dict[str, float] = {}  # by training, the longest run so far
        self._predictions: list[dict[str, Any]] = []
        self._environ = all_variables()
        self._environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((found.folder / "compiled").resolve()))
        self._network: NetworkModel | None = None

    def ask(self, trainings: list[Training]) -> None:
        """Run all checks."""
        first = trainings[0]
        for strategy in STRATEGIES:
            self._check(self.equal, first, strategy)
        self._check(self.silent, first)
        self._check(self.killed, first)
        self._measure_network()
        for training in trainings:
            self.scale(training)
        self._save()

    def _check(self, question: Callable[..., Claim], *arguments: Any) -> None:
        try:
            self.found.checks.append(question(*arguments))
        except FramewormError as error:
            name = question.__name__
            self.found.checks.append(Claim(name, name, "fails", str(error)))
        self._save()

    def _save(self) -> None:
        self.found.wall_s = time.monotonic() - self._begun
        text = json.dumps(self.found.to_dict(), indent=2, default=str) + "\n"
        write_atomic(self.found.folder / RESULT_NAME, text)

    def train(
        self,
        training: Training,
        name: str,
        ranks: int,
        *settings: str,
        more: tuple[str, ...] = (),
        watch: Callable[[psutil.Process], None] | None = None,
    ) -> tuple[Ended, RunFolder]:
        """Train once, with the command that a user would run."""
        folder = RunFolder(self.found.folder / "runs" / name)
        words = ["train", "--config", str(training.config), "--out", str(folder.path)]
        words += [word for setting in settings for word in ("--set", setting)]
        if ranks > 1:
            words += ["--distributed", "--nproc-per-node", str(ranks), *more]
        self._tell(name)
        log = self.found.folder / "runs" / f"{name}.log"
        ended = run(own_command(*words), log, _LIMIT_S, self._environ, watch)
        if watch is None:
            self._took[training.name] = max(self._took.get(training.name, 0.0), ended.wall_s)
        return ended, folder

    def equal(self, training: Training, strategy: str) -> Claim:
        """Compare a training of replayed steps with one that runs the same functions without capture."""
        question = f"do captured steps under {strategy} compute what the same steps compute unrecorded?"
        outcomes: list[Outcome] = []
        replayed, note = 0, ""
        for name, mode in (("captured", self.captured), ("unrecorded", "rehearse"), ("again", "rehearse")):
            settings = (f"parallel.strategy={strategy}", f"gpu.capture={mode}", f"training.max_steps={EQUAL_STEPS}")
            ended, folder = self.train(training, f"equal-{strategy}-{name}", self.found.gpus, *settings)
            if ended.code != 0:
                reason = _failure(f"equal-{strategy}-{name}", ended)
                return Claim("equal", question, "fails", reason, {"strategy": strategy})
            losses = [step.loss for step in read_steps(folder.step_files()[0])]
            outcomes.append(Outcome(losses, _weights_of(folder.path)))
            if name == "captured":
                record = folder.read_summary()
                replayed, note = record.captured_steps or 0, _note(record)
            elif outcomes[0].equals(outcomes[1]):
                break
        equal, text, evidence = judge_equality(*outcomes)
        evidence = {"strategy": strategy, "replayed_steps": replayed, **evidence}
        if not replayed:
            return Claim("equal", question, "fails", f"no step was captured: {note}", evidence)
        text = f"{replayed} of {EQUAL_STEPS} steps replayed; {text}"
        return Claim("equal", question, "holds" if equal else "fails", text, evidence)

    def silent(self, training: Training) -> Claim:
        """Stop one rank in the middle of its replays, and check how the others end."""
        rank = self.found.gpus - 1
        question = f"does a rank that no longer answers end the others within the set {SILENCE_S:.0f} s, by name?"
        stopped = _Failure(self.found.folder / "runs" / "silent", rank, signal.SIGSTOP)
        settings = (f"parallel.watchdog_s={SILENCE_S}", *self._endless())
        more = ("--stop-grace", str(STOP_GRACE_S))  # a stopped process does not react to SIGTERM
        ended, folder = self.train(training, "silent", self.found.gpus, *settings, more=more, watch=stopped)
        evidence: dict[str, Any] = {"rank": rank, "limit_s": SILENCE_S}
        if stopped.at is None:
            return Claim("silent", question, "fails", _failure("silent", ended), evidence)
        found = sorted(folder.path.glob("stuck-rank*.txt"))  # the last file that a rank writes
        accounts = [path.read_text().partition("\n")[0] for path in found]
        evidence |= {"exit_code": ended.code, "accounts": accounts}
        if ended.code is None or not accounts:
            return Claim("silent", question, "fails", f"after {ended.wall_s:.0f} s they still waited", evidence)
        evidence["after_s"] = after_s = max(path.stat().st_mtime for path in found) - stopped.at
        if not all(f"rank {rank} did not arrive" in line for line in accounts):
            return Claim("silent", question, "fails", f"ended after {after_s:.0f} s without naming the rank", evidence)
        if after_s > SILENCE_S + SILENCE_GRACE_S:
            return Claim("silent", question, "fails", f"they waited for {after_s:.0f} s", evidence)
        text = f"rank {rank} was stopped; {after_s:.0f} s later the others ended, and named it"
        return Claim("silent", question, "holds", text, evidence)

    def killed(self, training: Training) -> Claim:
        """Kill one rank in the middle of its replays, with a restart allowed."""
        rank = self.found.gpus - 1
        question = "are the ranks started again after one was killed, and do they capture again?"
        killed = _Failure(self.found.folder / "runs" / "killed", rank, signal.SIGKILL)
        settings = (*self._endless(), f"checkpoint.every_steps={CHECKPOINT_EVERY}")
        more = ("--max-restarts", "1")
        ended, folder = self.train(training, "killed", self.found.gpus, *settings, more=more, watch=killed)
        evidence: dict[str, Any] = {"rank": rank, "exit_code": ended.code}
        if not killed.went_on:
            return Claim("killed", question, "fails", _failure("killed", ended), evidence)
        record = folder.read_summary()
        captured = record.captured_steps or 0
        evidence |= {"steps": record.steps, "captured_after_restart": captured}
        if not captured:
            return Claim("killed", question, "fails", f"after the restart: {_note(record)}", evidence)
        text = f"rank {rank} was killed; the training continued to step {record.steps}, {captured} steps of it captured"
        return Claim("killed", question, "holds", text, evidence)

    def _endless(self) -> tuple[str, ...]:
        return (f"gpu.capture={self.captured}", "parallel.strategy=ddp", f"training.max_steps={ENDLESS_STEPS}")

    def _measure_network(self) -> None:
        path = self.found.folder / NETWORK_NAME
        words = ["network", "--nproc-per-node", str(self.found.gpus), "--budget", "8", "--out", str(path)]
        if self.found.on_cpu:
            words += ["--backend", "gloo"]
        self._tell("network")
        ended = run(own_command(*words), self.found.folder / "runs" / "network.log", 120.0, self._environ)
        if ended.code == 0:
            self._network = NetworkModel.load(path)
        else:
            self.found.skipped.append(f"predictions: {_failure('network', ended)}")

    def scale(self, training: Training) -> None:
        """Measure a training on one GPU, predict it on all, and measure that."""
        count = self.found.gpus
        if self._network is None or not self._time_for(training, 6):
            if self._network is not None:
                self.found.skipped.append(f"{training.name}: no time was left (--budget)")
            return
        for mode in ("captured", "eager"):
            capture = self.captured if mode == "captured" else "off"
            name = f"{training.name}-{mode}"
            steps = f"training.max_steps={training.steps}"
            sides = {}
            for side, size in (("whole", training.global_batch), ("share", training.global_batch // count)):
                settings = (f"gpu.capture={capture}", steps, f"training.global_batch={size}")
                ended, folder = self.train(training, f"{name}-{side}", 1, *settings)
                if ended.code != 0:
                    self.found.skipped.append(f"{name}: {_failure(side, ended)}")
                    break
                sides[side] = folder
            if len(sides) < 2:
                continue
            speed = self._predict(training, mode, sides, self._network)
            together = (f"gpu.capture={capture}", steps, "parallel.strategy=ddp")
            ended, folder = self.train(training, f"{name}-{count}gpus", count, *together)
            self.found.speeds.append(self._compared(speed, ended, folder))
            self._save()

    def _predict(self, training: Training, mode: Any, sides: Mapping[str, RunFolder], network: NetworkModel) -> Speed:
        source = load_run(sides["share"].path)
        predictor = Predictor(source, MeasuredNetwork(network), Setting(strategy="ddp"), scaling="weak")
        row: Row = predictor.predict([1, self.found.gpus]).rows[-1]
        at = time.time()
        speed = Speed(
            training.name,
            mode,
            training.data,
            self.found.gpus,
            _mean_step(sides["whole"].read_summary()),
            _mean_step(sides["share"].read_summary()),
            (row.step_s.value, row.step_s.low, row.step_s.high),
            at,
        )
        self._predictions.append(asdict(speed))
        text = json.dumps({"schema_version": SCHEMA_VERSION, "predictions": self._predictions}, indent=2) + "\n"
        write_atomic(self.found.folder / PREDICTIONS_NAME, text)
        return speed

    def _compared(self, speed: Speed, ended: Ended, folder: RunFolder) -> Speed:
        if ended.code != 0:
            return replace(speed, failed=_failure("all GPUs", ended))
        record = folder.read_summary()
        measured = _mean_step(record)
        _, low, high = speed.predicted_s
        inside = None if self.found.shared or self.found.on_cpu else low <= measured <= high
        return replace(speed, measured_s=measured, captured_steps=record.captured_steps, in_interval=inside)

    def _time_for(self, training: Training, runs: int) -> bool:
        """Whether `runs` runs fit; a training that has not run yet is assumed to take as long as the longest so far."""
        took = self._took.get(training.name, max(self._took.values(), default=0.0))
        return self._until - time.monotonic() > _ENOUGH * runs * took


class _Failure:
    """Sends a signal to a rank after some steps; if the ranks continue after that, ends the training.

    Attributes:
        at: When the signal was sent.
        went_on: Whether the expected number of further steps was recorded.
    """

    def __init__(self, folder: Path, rank: int, number: int) -> None:
        self.at: float | None = None
        self.went_on = False
        self._file = folder / f"steps-rank{rank}.jsonl"
        self._rank, self._number = rank, number
        self._reached = STEPS_BEFORE_FAILURE

    def __call__(self, process: psutil.Process) -> None:
        if self.went_on or not self._file.exists():
            return
        steps = self._file.read_bytes().count(b"\n")
        if steps < self._reached:
            return
        if self.at is not None:
            self.went_on = True
            process.send_signal(signal.SIGTERM)
            return
        worker = ranks_of(process).get(self._rank)
        if worker is not None:
            worker.send_signal(self._number)
            self.at = time.time()
            self._reached = self._file.read_bytes().count(b"\n") + STEPS_AFTER_RESTART


def _weights_of(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "weights.safetensors"
    export_run(folder, path)
    return load_file(path)


def _mean_step(record: RunRecord) -> float:
    found = record.throughput.step_s
    return math.nan if found is None else found.mean


def _note(record: RunRecord) -> str:
    return next((note for note in record.notes if "captured" in note), "; ".join(record.notes) or "it does not say why")


def _failure(name: str, ended: Ended) -> str:
    if ended.code is None:
        return f"{name}: not done after {ended.wall_s:.0f} s"
    return f"{name}: exit code {ended.code}: {ended.last_line}"
