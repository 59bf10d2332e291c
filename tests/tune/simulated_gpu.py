"""A GPU that is a table, for a tiny model whose step is mostly launches and for one whose passes take long.

Costs and dead ends of the former are as they are in truth, those of the latter about so. The settings are the real
ones, so that the declared gains and costs of the real knobs decide the order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulated_machine import evidence_of

from frameworm.config.load import load_config
from frameworm.config.schema import Config
from frameworm.guard.gain import Window
from frameworm.guard.proof import Proof, prove
from frameworm.tune.knobs.context import Context, TrialMachine, WorkloadFacts
from frameworm.tune.knobs.registry import all_knobs
from frameworm.tune.search.journal import Journal
from frameworm.tune.search.result import TuneResult
from frameworm.tune.search.search import Search, search_name
from frameworm.tune.trials.outcomes import Budget, Failure, ProofRequest, ProofResult, TrialRequest, TrialResult
from frameworm.tune.trials.patience import Patience

CONFIGS = Path(__file__).parents[2] / "configs"
TRIAL_S, PROOF_S = 4.0, 12.0
COMPILE_TRIAL_S, COMPILE_PROOF_S = 30.0, 25.0
CACHED = 0.3  # of what compiling takes, once the compiler has met the same graph
HANG_S = 30.0
BEST_S = 0.313e-3
H200 = TrialMachine("cuda", True, 9.0, 1, 16, 16, 140 * 2**30)

Judged = tuple[str, list[dict[str, Any]]]  # verdict and findings


def step_s(config: Config) -> float | None:
    """Seconds of a step; None: it hangs."""
    captured, compiled = config.gpu.capture == "step", config.gpu.compile_model
    packed = config.data.batching == "packed"
    if not captured:
        return 6e-3 if compiled else 8.6e-3
    if not packed:
        return None if compiled else 0.74e-3
    resident = config.data.resident is not False  # by auto, too
    if not compiled:
        return 0.95e-3 if resident else 1.0e-3
    # Putting kernels together gains the same share with and without resident data.
    return (0.36e-3 if resident else 0.48e-3) * (0.313 / 0.36 if config.gpu.combine_kernels else 1.0)


def trial_of(
    request: TrialRequest, window: Callable[[Config], float], setup_s: float, judge: Callable[[Config], Judged]
) -> TrialResult:
    """A trial of windows that are drawn, as long as it is to go on."""
    windows: list[float] = []
    for _ in range(5):
        windows.append(window(request.config))
        if len(windows) > 1 and not request.keep_going(windows):
            return TrialResult(windows, stopped_early=True)
    return TrialResult(windows, setup_s, *judge(request.config))


def proof_of(
    request: ProofRequest,
    window: Callable[[Config], float],
    precision: str = "fp32",
    frozen: str | None = None,
    goes_on: Callable[[list[Window]], bool] = lambda windows: len(windows) < 20,
) -> Proof:
    """A proof of windows that are drawn and of a real small training, in which the candidate may freeze a layer."""
    windows: list[Window] = []
    while goes_on(windows):
        windows.append(Window("before", window(request.baseline)))
        windows.append(Window("after", window(request.candidate)))
    evidence = evidence_of(None, frozen, precision)
    return prove(windows, evidence, numerics_effect=request.numerics_effect, consent=request.consent)


class Gpu:
    """Runs trials and proofs; `reached` holds the seconds and the trials and proofs until the best config was proved.

    Args:
        later: Verdict once nothing is launched any more.
        seed: Seed of the noise.
        refuses: Batches of many widths cannot be captured, and all that is compiled takes longer.
    """

    def __init__(self, later: str = "compute_bound", seed: int = 0, *, refuses: bool = False) -> None:
        self.now_s = 0.0
        self.made: list[str] = []
        self.reached: tuple[float, int] | None = None
        self._later = later
        self._refuses = refuses
        self._slow_s = 15.0 if refuses else 0.0
        self._compiled: set[tuple[Any, ...]] = set()
        self._draw = random.Random(seed)

    def clock(self) -> float:
        return self.now_s

    def run_trial(self, request: TrialRequest) -> TrialResult:
        config = request.config
        self.now_s += TRIAL_S
        self.made.append(f"trial {request.label}")
        if self._refuses and config.gpu.capture == "step" and config.data.batching != "packed":
            return TrialResult(failure=Failure("capture_refused", "too many shapes"))
        if step_s(config) is None:
            self.now_s += HANG_S - TRIAL_S
            return TrialResult(failure=Failure("hang", f"not done after {HANG_S:.0f} s"))
        self.now_s += self._compile_s(config, COMPILE_TRIAL_S + self._slow_s)
        return trial_of(request, self._window, 25.0 if config.gpu.compile_model else 1.0, self._findings)

    def prove(self, request: ProofRequest) -> ProofResult:
        both = [self._compile_s(item, COMPILE_PROOF_S + self._slow_s) for item in (request.baseline, request.candidate)]
        self.now_s += PROOF_S + max(both)
        self.made.append(f"proof {request.label}")
        proof = proof_of(request, self._window)
        best = math.isclose(step_s(request.candidate) or 0.0, BEST_S)
        if proof.verdict == "accepted" and best and self.reached is None:
            self.reached = (self.now_s, len(self.made))
        return ProofResult(proof)

    def _compile_s(self, config: Config, cold_s: float) -> float:
        """What compiling takes, if it is to be: little where the compiler's cache has it."""
        if not config.gpu.compile_model:
            return 0.0
        graph = (config.gpu.compile_mode, config.gpu.combine_kernels, config.gpu.mixed_precision, config.data.batching)
        graph = (*graph, config.training.micro_batch, config.model.model_dump_json())
        known = graph in self._compiled
        self._compiled.add(graph)
        return CACHED * cold_s if known else cold_s

    def _window(self, config: Config) -> float:
        seconds = step_s(config)
        assert seconds is not None
        return seconds / config.training.global_batch * math.exp(self._draw.gauss(0, 0.005))

    def _findings(self, config: Config) -> Judged:
        if config.gpu.capture == "step":
            share = {"code": self._later, "share": 0.4, "remedies": []}
            return self._later, [share]
        named: list[tuple[str, Any]] = [("gpu.capture", "auto"), ("training.micro_batch", 64)]
        if not config.gpu.compile_model:
            named.insert(1, ("gpu.compile_model", True))
        remedies = [{"knob": knob, "value": value, "text": ""} for knob, value in named]
        return "host_bound", [{"code": "host_bound", "share": 0.9, "remedies": remedies}]


def tune_on(
    gpu: Gpu, *, budget_s: float = 480.0, epochs: int = 100_000, leaps: bool = True, many_widths: bool = True
) -> TuneResult:
    """The search with all knobs from the plain config; without leaps, steps have two passes."""
    settings = [f"training.epochs={epochs}", "gpu.device=cuda"]
    if not leaps:
        settings.append("training.accumulation=2")
    config = load_config(CONFIGS / "ag_news_single_gpu.yaml", settings)
    workload = WorkloadFacts(
        accepts_packed=True,
        many_widths=many_widths,
        assembles_batches=True,
        resident_bytes=50 * 2**20,
        samples_per_epoch=120_000,
    )
    return search_on(gpu, Context(config, H200, workload), budget_s)


def search_on(
    gpu: Any,
    context: Context,
    budget_s: float,
    folder: Path | None = None,
    check_quality: Callable[[Any], Any] | None = None,
) -> TuneResult:
    """The search with all knobs."""
    journal, budget = Journal(folder, search_name(context)), Budget(time_s=budget_s)
    return Search(
        all_knobs(), context, gpu.run_trial, gpu.prove, budget, journal, check_quality=check_quality, clock=gpu.clock
    ).run()


class GptGpu(Gpu):
    """GPT-2: a proof takes a large part of the budget.

    Args:
        cheats: A residual stream in half precision learns otherwise.
        slower: So many times as long takes everything.
        proof_s: What a proof takes, without compiling.
    """

    def __init__(self, cheats: bool = False, slower: float = 1.0, seed: int = 0, proof_s: float = 55.0) -> None:
        super().__init__(seed=seed)
        self._cheats = cheats
        self._slower = slower
        self._proof_s = proof_s
        self._patience = Patience(300.0)
        self.proved: list[ProofRequest] = []

    def run_trial(self, request: TrialRequest) -> TrialResult:
        config = request.config
        self.made.append(f"trial {request.label}")
        needs_s = self._trial_s(config)
        if not self._has_time(needs_s, self._patience.for_trial(config, request.timeout_s).seconds):
            return TrialResult(failure=Failure("hang", "the budget leaves it no more"))
        self._patience.learn(config, needs_s)
        return trial_of(request, self._window, self._setup_s(config), self._findings)

    def prove(self, request: ProofRequest) -> ProofResult:
        self.made.append(f"proof {request.label}")
        needs_s = self._takes_s(request)
        if not self._has_time(needs_s, self._patience.for_proof(request).seconds):
            return ProofResult(failure=Failure("hang", "the budget leaves it no more"))
        self.proved.append(request)
        frozen = "first" if self._cheats and request.candidate.model.model_dump()["residual"] == "half" else None
        return ProofResult(proof_of(request, self._window, "bf16", frozen, self._goes_on))

    def _goes_on(self, windows: list[Window]) -> bool:
        return len(windows) < 12

    def _trial_s(self, config: Config) -> float:
        return self._slower * (14.0 + self._compile_s(config, 36.0))

    def _setup_s(self, config: Config) -> float:
        return 36.0 if config.gpu.compile_model else 1.0

    def _takes_s(self, request: ProofRequest) -> float:
        return self._slower * (self._proof_s + self._compile_s(request.candidate, 35.0))

    def _findings(self, config: Config) -> Judged:
        return "compute_bound", [{"code": "compute_bound", "share": 0.95, "remedies": []}]

    def _has_time(self, needs_s: float, limit_s: float) -> bool:
        self.now_s += min(needs_s, limit_s)
        return needs_s <= limit_s

    def _window(self, config: Config) -> float:
        return gpt_sample_s(config) * math.exp(self._draw.gauss(0, 0.003))


def gpt_sample_s(config: Config) -> float:
    """Seconds per text of 1,024 tokens."""
    model = config.model.model_dump()
    micro = config.training.micro_batch
    assert isinstance(micro, int)
    passes = {8: 1.06, 16: 1.0, 32: 0.95, 64: 0.92, 128: 0.93}.get(micro, 1.0)
    compiled = 0.86 if config.gpu.compile_model else 1.0
    stream = 0.96 if model["residual"] == "half" else 1.0
    loss = 1.1 if model["fused_loss"] is False else 1.0
    graph = 0.996 if config.gpu.capture == "step" else 1.0
    numbers = 2.2 if config.gpu.mixed_precision == "off" else 1.0
    return 2.45e-3 * passes * compiled * stream * loss * graph * numbers


def tune_gpt_on(gpu: GptGpu, *more: str, budget_s: float = 480.0, folder: Path | None = None) -> TuneResult:
    """The search with all knobs from the plain config of GPT-2, with more settings."""
    config = load_config(CONFIGS / "gpt2_124m.yaml", ["training.epochs=10000", "gpu.device=cuda", *more])
    workload = WorkloadFacts(assembles_batches=True, resident_bytes=100 * 2**20, samples_per_epoch=90_000)
    return search_on(gpu, Context(config, H200, workload, planner=_too_large), budget_s, folder)


def _too_large(config: Config) -> str | None:
    micro = config.training.micro_batch
    return "does not fit" if isinstance(micro, int) and micro > 128 else None
