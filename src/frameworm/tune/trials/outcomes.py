"""Requests to the runner of trials, and its results: plain values that a journal can hold."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal

from frameworm.config.schema import Config
from frameworm.guard.agreement import ROUNDING_UNITS
from frameworm.guard.proof import NumericsEffect, Proof
from frameworm.guard.quality import Margin, Quality
from frameworm.tune.knobs.context import Changes

FailureKind = Literal["oom", "capture_refused", "crash", "hang", "not_applicable"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trial gave no result."""

    kind: FailureKind
    reason: str


@dataclass(frozen=True)
class TrialRequest:
    """One run of a config to be measured.

    Attributes:
        id: The same for the same config; also the name of its folder.
        config: What to run.
        label: What is tried, for people.
        timeout_s: Time limit; None: the runner's own.
        keep_going: Called after each measured window with the seconds per sample of all so far; False: the candidate is
            clearly worse, and the trial ends with `stopped_early`.
        beside: The trial to compare with: if its steps take about as long, the same steps are measured.
    """

    id: str
    config: Config
    label: str
    timeout_s: float | None = None
    keep_going: Callable[[Sequence[float]], bool] = lambda windows: True
    beside: TrialResult | None = None


@dataclass(frozen=True)
class TrialResult:
    """The measurements of a trial, or why there are none.

    Attributes:
        seconds_per_sample: One value per measured window, after warm-up.
        setup_s: Start-up time that every run pays once, including compiling and capturing.
        verdict: The run's verdict.
        findings: The run's findings, as in `summary.json`.
        stopped_early: `keep_going` returned False.
        failure: Why there are no measurements.
        details: Anything JSON can hold: phases, memory, where stderr is kept.
        steps: The first step of the first window, and for each window its untimed and its timed steps; None: unknown.
        disturbed: Fraction of the windows lost to other work on the machine.
    """

    seconds_per_sample: Sequence[float] = ()
    setup_s: float | None = None
    verdict: str | None = None
    findings: Sequence[Mapping[str, Any]] = ()
    stopped_early: bool = False
    failure: Failure | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[int, int, int] | None = None
    disturbed: float = 0.0

    @property
    def sample_s(self) -> float:
        """Median seconds per sample; infinite after a failure."""
        return median(self.seconds_per_sample) if self.seconds_per_sample else math.inf

    def times_as_fast_as(self, other: TrialResult) -> float:
        """The speedup over another trial; window by window if the same steps were measured."""
        pairs = list(zip(other.seconds_per_sample, self.seconds_per_sample))
        if self.steps is None or self.steps != other.steps or not pairs:
            return other.sample_s / self.sample_s
        return median(theirs / ours for theirs, ours in pairs)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrialResult:
        """The result that `to_json` wrote."""
        failure, steps = values.get("failure"), values.get("steps")
        known = {
            **values,
            "failure": None if failure is None else Failure(**failure),
            "steps": None if steps is None else tuple(steps),
        }
        return cls(**known)


@dataclass(frozen=True)
class ProofRequest:
    """Two configs to be measured in turns and whose learning is compared.

    Attributes:
        id: The same for the same two configs.
        baseline: The side before the change; its windows are `before`.
        candidate: The side after it.
        learning_baseline: The baseline's config for comparing learning: without dropout, whose masks differ between
            kernels, and with the same samples per step as the candidate.
        learning_candidate: The same for the candidate.
        drawing_baseline: The learning baseline with dropout as in training, to compare random draws.
        drawing_candidate: The same for the candidate.
        numerics_effect: How the change can affect numerics.
        units: Rounding units of the baseline and of the candidate.
        consent: The user allows changes of numerics.
        label: What is proved, for people.
        timeout_s: Time limit; None: the runner's own.
        last: It may use all of that time, because nothing follows it.
        expected_s: Its expected duration; 0: unknown.
    """

    id: str
    baseline: Config
    candidate: Config
    learning_baseline: Config
    learning_candidate: Config
    drawing_baseline: Config
    drawing_candidate: Config
    numerics_effect: NumericsEffect
    units: tuple[float, float]
    consent: bool
    label: str
    timeout_s: float | None = None
    last: bool = False
    expected_s: float = 0.0

    @property
    def configs(self) -> tuple[Config, ...]:
        """All configs, alternating between baselines and candidates."""
        learning = (self.learning_baseline, self.learning_candidate)
        return (self.baseline, self.candidate, *learning, self.drawing_baseline, self.drawing_candidate)

    def having(self, configs: Sequence[Config]) -> ProofRequest:
        """The same request with other configs, in the order of `configs`."""
        baseline, candidate, learning_baseline, learning_candidate, drawing_baseline, drawing_candidate = configs
        return replace(
            self,
            baseline=baseline,
            candidate=candidate,
            learning_baseline=learning_baseline,
            learning_candidate=learning_candidate,
            drawing_baseline=drawing_baseline,
            drawing_candidate=drawing_candidate,
        )


@dataclass(frozen=True)
class ProofResult:
    """The proof, or why there is none; `details` as for a trial."""

    proof: Proof | None = None
    failure: Failure | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ProofResult:
        """The result that `to_json` wrote."""
        proof, failure = values.get("proof"), values.get("failure")
        return cls(
            None if proof is None else Proof.from_json(proof),
            None if failure is None else Failure(**failure),
            values.get("details") or {},
        )


@dataclass(frozen=True)
class QualityCheckRequest:
    """Two configs to be trained for longer, with validation, from several seeds.

    Attributes:
        id: The same for the same two configs.
        baseline: The side before the change.
        candidate: The side after it.
        steps: Steps of each training.
        looks: Numbers of seeds after which it is judged; the first clear answer ends it.
        expected_s: Expected duration until the second judgement.
        label: What is checked, for people.
        timeout_s: Time limit, if it is shorter than a multiple of the expected duration.
        margin: How much quality the candidate may cost.
    """

    id: str
    baseline: Config
    candidate: Config
    steps: int
    looks: Sequence[int]
    expected_s: float
    label: str
    timeout_s: float | None = None
    margin: Margin = Margin()  # noqa: RUF009


@dataclass(frozen=True)
class QualityCheckResult:
    """The results of both sides, or why there are none; `details` as for a trial."""

    quality: Quality | None = None
    failure: Failure | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> QualityCheckResult:
        """The result that `to_json` wrote."""
        quality, failure = values.get("quality"), values.get("failure")
        return cls(
            None if quality is None else Quality.from_json(quality),
            None if failure is None else Failure(**failure),
            values.get("details") or {},
        )


RunTrial = Callable[[TrialRequest], TrialResult]
Prove = Callable[[ProofRequest], ProofResult]
CheckLonger = Callable[[QualityCheckRequest], QualityCheckResult]


@dataclass(frozen=True)
class Budget:
    """The budget of a search; None: no limit. Trials, proofs and quality checks count alike."""

    time_s: float | None = None
    trials: int | None = None


def digest_of(*configs: Config) -> str:
    """A short name shared only by equal configs."""
    text = json.dumps([config.model_dump(mode="json") for config in configs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounding_unit(*resolved: Config) -> float:
    """Rounding unit of the coarsest number format that resolved configs compute or communicate with."""
    units = [ROUNDING_UNITS["fp32"]]
    for config in resolved:
        if config.gpu.device == "cuda" and config.gpu.tf32:
            units.append(ROUNDING_UNITS["tf32"])
        units += [ROUNDING_UNITS[word] for word in _words(config) if word in ROUNDING_UNITS]
    return max(units)


def _words(config: Config) -> tuple[str, ...]:
    return (config.gpu.mixed_precision, config.parallel.compression)


def without_dropout(config: Config) -> Changes:
    """Changes that turn off dropout in a built-in model."""
    return {"model.dropout": 0.0} if getattr(config.model, "dropout", 0.0) else {}
