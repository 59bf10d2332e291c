"""A GPU that is a table, for the shipped classifiers, on which starting, warming up, compiling and the runner's own
limits take as long as they do.

Times of steps are those of an H200; those of starts are varied, for they differ from machine to machine.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from simulated_gpu import CONFIGS, H200, Judged, proof_of, search_on, trial_of

from frameworm.config.load import load_config
from frameworm.config.schema import Config
from frameworm.tune.knobs.context import Context, WorkloadFacts
from frameworm.tune.search.result import TuneResult
from frameworm.tune.trials.outcomes import Failure, ProofRequest, ProofResult, TrialRequest, TrialResult
from frameworm.tune.trials.patience import Patience


@dataclass(frozen=True)
class Classifier:
    """Milliseconds of a step: eager, captured, captured and packed, then compiled too, then with combined kernels."""

    config: str
    eager: float
    captured: float
    packed: float
    compiled: float
    combined: float
    samples: int
    widths_warm_s: float  # what batches of many widths take to warm up

    def step_s(self, config: Config) -> float:
        """Seconds of a step."""
        packed, compiled = config.data.batching == "packed", config.gpu.compile_model
        if config.gpu.capture != "step":
            return 1e-3 * self.eager * (0.85 if compiled else 1.0)
        assert packed or not compiled
        found = self.captured if not packed else self.packed if not compiled else self.compiled
        if packed and compiled and config.gpu.combine_kernels:
            found = self.combined
        micro = config.training.micro_batch
        return 1e-3 * found * (1.3 if isinstance(micro, int) and micro < config.training.global_batch else 1.0)


CLASSIFIERS = {
    "ag_news": Classifier("ag_news_single_gpu", 13.0, 0.74, 1.0, 0.36, 0.313, 41_990, 12.0),
    "ag_news_optimized": Classifier("ag_news_single_gpu_optimized", 41.0, 6.7, 2.4, 1.25, 1.155, 41_990, 12.0),
    "imdb": Classifier("imdb_single_gpu", 10.5, 5.0, 2.9, 1.6, 1.5, 25_000, 4.0),
}


class ClassifierGpu:
    """Runs trials and proofs of one of them.

    Args:
        model: Which.
        start_s: Start of a process until its first step.
        compile_s: Compiling for the first time; a third of that from the compiler's cache.
        seed: Seed of the noise.
    """

    def __init__(self, model: Classifier, start_s: float, compile_s: float, seed: int = 0) -> None:
        self.now_s = 0.0
        self.log: list[str] = []
        self._model = model
        self._start_s = start_s
        self._compile_s = compile_s
        self._compiled: set[str] = set()
        self._patience = Patience(300.0)
        self._draw = random.Random(seed)

    def clock(self) -> float:
        return self.now_s

    def run_trial(self, request: TrialRequest) -> TrialResult:
        config = request.config
        needs_s, limit = self._ready_s(config) + 3.0, self._patience.for_trial(config, request.timeout_s)
        if not self._pass(f"trial {request.label}", needs_s, limit.seconds, config):
            return TrialResult(failure=Failure("hang", "not done in time"))
        self._patience.learn(config, needs_s)
        return trial_of(request, self._window, needs_s - 3.0, self._findings)

    def prove(self, request: ProofRequest) -> ProofResult:
        before_s, after_s = self._ready_s(request.baseline), self._ready_s(request.candidate)
        # Both start at once and warm up one after the other; then they learn, both at once again.
        needs_s = max(before_s, self._start_s) + 0.7 * (after_s - self._start_s) + 10.0 + self._start_s + 12.0
        limit = self._patience.for_proof(request)
        if not self._pass(f"proof {request.label}", needs_s, limit.seconds, request.baseline, request.candidate):
            return ProofResult(failure=Failure("hang", "not done in time"))
        return ProofResult(proof_of(request, self._window, precision="bf16"))

    def _pass(self, label: str, needs_s: float, limit_s: float, *configs: Config) -> bool:
        """Let the time pass, and say whether it was enough."""
        self.now_s += min(needs_s, limit_s)
        enough = needs_s <= limit_s
        self.log.append(f"{self.now_s:4.0f} {label}{'' if enough else f': {limit_s:.0f} s of {needs_s:.0f}'}")
        if enough:
            self._compiled |= {_program(config) for config in configs if config.gpu.compile_model}
        return enough

    def _ready_s(self, config: Config) -> float:
        """Seconds until a run is warm."""
        packed = config.data.batching == "packed"
        seconds = self._start_s + (3.0 if packed else self._model.widths_warm_s)
        if config.gpu.use_flash_attention == "cudnn" and not packed:
            seconds += 8.0
        if config.gpu.compile_model:
            times = 1.0 if config.gpu.compile_mode == "default" else 4.0
            times = 1 / 3 if _program(config) in self._compiled else times
            seconds += times * self._compile_s + (40.0 if not packed else 0.0)
        return seconds

    def _window(self, config: Config) -> float:
        return self._model.step_s(config) / config.training.global_batch * math.exp(self._draw.gauss(0, 0.01))

    def _findings(self, config: Config) -> Judged:
        computes = {"code": "compute_bound", "share": 0.95, "remedies": []}
        padding = _finding("padding_waste", 1.9 if config.gpu.capture == "step" else 1.16, ("data.batching", "packed"))
        if config.gpu.capture == "step":
            padded = config.data.batching == "padded"
            return ("padding_waste", [padding, computes]) if padded else ("healthy", [computes])
        named: list[tuple[str, Any]] = [("gpu.capture", "auto"), ("training.micro_batch", 64)]
        if not config.gpu.compile_model:
            named.insert(1, ("gpu.compile_model", True))
        launches = _finding("host_bound", 3.3, *named)
        return "host_bound", [launches, padding] if config.data.batching == "padded" else [launches]


def _finding(code: str, speedup: float, *remedies: tuple[str, Any]) -> dict[str, Any]:
    told = [{"knob": knob, "value": value, "text": ""} for knob, value in remedies]
    return {"code": code, "share": 1 - 1 / speedup, "expected_speedup": {"value": speedup}, "remedies": told}


def _program(config: Config) -> str:
    """What the compiler makes is kept by."""
    gpu = config.gpu
    return f"{config.data.batching} {config.model.model_dump()} {gpu.compile_mode} {gpu.combine_kernels} {gpu.capture}"


def tune_classifier(gpu: ClassifierGpu, model: Classifier, budget_s: float) -> TuneResult:
    """The search with all knobs from the plain config of a long run."""
    config = load_config(CONFIGS / f"{model.config}.yaml", ["training.epochs=10000", "gpu.device=cuda"])
    workload = WorkloadFacts(
        accepts_packed=True,
        many_widths=True,
        assembles_batches=True,
        resident_bytes=50 * 2**20,
        samples_per_epoch=model.samples,
        has_validation=True,
        validation_samples=7600,
        automatic_workers=0,
    )

    def never(request: Any) -> Any:
        raise AssertionError("a quality check of so long a run does not fit any budget")

    return search_on(gpu, Context(config, H200, workload), budget_s, check_quality=never)


def beside_fast(model: Classifier, result: TuneResult) -> float:
    """How many times as fast as the hand-made config the result is."""
    fast = load_config(CONFIGS / f"{model.config}_fast.yaml", ["gpu.device=cuda"])
    return model.step_s(fast) / model.step_s(result.best)
