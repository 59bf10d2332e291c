"""`BottleneckAnalyzer`: short experiments with the real step, diagnosed by the same rules as any run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from time import perf_counter, time
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import Config
from frameworm.data.adopt import adopt_loader
from frameworm.data.steps import StepBatch
from frameworm.diagnose.rules.cost import GAINS
from frameworm.diagnose.rules.judge import Diagnosis, apply_judgement, judge
from frameworm.engine.settings import api_defaults, apply_settings
from frameworm.engine.summary import count_parameters, describe_device, measure_memory
from frameworm.errors import DataError, DeviceError
from frameworm.hardware.devices import choose_device
from frameworm.hardware.fingerprint import environment_fingerprint
from frameworm.launch.environment import detect
from frameworm.launch.process_group import is_distributed, setup_ddp
from frameworm.observe.clocks.phases import Timed
from frameworm.records.account import StepAccount
from frameworm.records.schema import Batch, Communication, Remedy, RunRecord, StepRecord
from frameworm.records.statistics import StepAggregate
from frameworm.report.kit.printed import Printed
from frameworm.report.tune.analysis import render_figures
from frameworm.tune.analyzer.analysis import Analysis, describe
from frameworm.tune.analyzer.bench import Bench, Feed, Replicas, has_hook
from frameworm.tune.analyzer.experiments import (
    ALL_VARIANTS,
    AS_IS,
    AUTOCAST,
    DOUBLE_BATCH,
    NO_SYNC,
    SAME_BATCH,
    SLOWEST,
    WARM_UP_STEPS,
    WORKERS,
    Measured,
    Variant,
    loader_rate,
    run_rounds,
    standard_variants,
)
from frameworm.tune.analyzer.loader_copy import copy_loader, other_workers, workers_of
from frameworm.tune.analyzer.settle import ExperimentResult, settle
from frameworm.tune.analyzer.untouched import untouched

WORTH_TRYING_WORKERS = 1.05
LOADER_SHARE = 0.05  # fraction of the time budget for the loader alone
CLOCK_STEPS = 10  # steps timed by a model's own DDP
COMPRESS = Remedy(
    "parallel.compression", "auto", "send less: enable_gradient_compression(ddp_model) in a loop of your own"
)
ACCUMULATE = Remedy("", None, "average gradients less often: accumulate over more micro-batches, with lr to match")
LATE_RANK = Remedy("", None, "look at that rank's machine: other work on it, its clocks, its share of the data")
CHEAPER_SAMPLES = Remedy(
    "", None, "make a sample cheaper: do once before training what the data set does on every access"
)


class BottleneckAnalyzer:
    """Finds what limits the speed of a training by experiment.

    The real step runs in variants that differ in one respect: the same batch again (no waiting for data), `no_sync` (no
    communication), half and twice the batch, autocast on or off, and another number of loader workers. Afterwards
    model, optimizer, random generators and loader are restored bitwise.

    Args:
        model: The model, on `device`; it may be wrapped in DDP. In a process group every rank must make the same call.
        train_loader: As for `Trainer.train`.
        device: The model's device; None: that of its parameters.
        optimizer: The optimizer; without one the experiments use an AdamW of their own.
        loss_fn: As for `Trainer`.
        config: All settings; the keywords below override it.
        budget_s: Time for the experiments; slow steps may exceed it, because at least three rounds are run.
        **settings: Fields of the config by name, as for `Trainer`.

    Examples:
        >>> analysis = BottleneckAnalyzer(model, loader, "cuda").analyze()
        >>> analysis["findings"][0]["code"]
    """

    def __init__(
        self,
        model: nn.Module,
        train_loader: Any,
        device: torch.device | str | int | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: Callable[..., Any] | None = None,
        config: Config | None = None,
        budget_s: float = 30.0,
        **settings: Any,
    ) -> None:
        self._model = model
        self._loader = train_loader
        self._device = device_of(model, device)
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._config = apply_settings(api_defaults() if config is None else config, settings)
        self._budget_s = budget_s
        self._last: Printed | None = None

    def analyze(self) -> Printed:
        """Run the experiments.

        Returns:
            `compute` {time_ms, throughput}, `communication` {time_ms, bandwidth_gbps, param_size_mb}, `data_loading`
            {time_ms, throughput, wait_ms, num_workers, tried_workers}, `memory` {allocated_gb, reserved_gb, peak_gb,
            total_gb, usage_pct}, `per_epoch` {steps, communications, sent_gb}, `batch`, `verdict` and `findings` as in
            a run's summary, `experiments` with every variant's step time and what was skipped, and the `units` of all
            numbers. Unknown values are None. Times are per step on this rank; throughputs are over all ranks, that of
            data loading without a model to wait for. `print(result)` shows it as text.
        """
        analysis = self.run()
        apply_judgement(analysis.record, self.judge(analysis))
        self._last = describe(analysis, self._model, self._device)
        return self._last

    def analyze_compute(self) -> Printed:
        """The part `compute` of an analysis, from the experiment that it needs."""
        return self._part("compute", SAME_BATCH)

    def analyze_communication(self) -> Printed:
        """The part `communication` of an analysis, from the experiments that it needs."""
        return self._part("communication", SAME_BATCH, NO_SYNC)

    def analyze_data_loading(self) -> Printed:
        """The part `data_loading` of an analysis, from the experiments that it needs."""
        return self._part("data_loading", AS_IS, SAME_BATCH)

    def analyze_memory(self) -> Printed:
        """The part `memory` of an analysis, after a few steps."""
        return self._part("memory", SAME_BATCH)

    def print_summary(self) -> None:
        """Print the last analysis; if there is none, run one first."""
        print(self._last or self.analyze())

    def _part(self, name: str, *variants: str) -> Printed:
        return Printed(describe(self.run(variants), self._model, self._device)[name], render_figures)

    def run(self, only: Sequence[str] = ALL_VARIANTS) -> Analysis:
        """Run the experiments and return records; `only` names the variants, which include the same batch again."""
        began = perf_counter()
        optimizer = self._optimizer
        notes = []
        if optimizer is None:
            optimizer = torch.optim.AdamW([item for item in self._model.parameters() if item.requires_grad])
            notes.append("no optimizer was given: the experiments used AdamW")
        if self._config.gpu.capture != "off":
            notes.append("the experiments ran the step uncaptured (gpu.capture)")
        if has_hook(self._model):
            notes.append(
                "gradients go through a communication hook: how many bytes it sends is not known here, and what it "
                "remembers between steps (error feedback) is left as the last experiment had it"
            )
        dataset = getattr(self._loader, "dataset", None)
        with untouched(self._model, optimizer, self._device, dataset), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about variants that the user never asked for
            analysis = self._experiment(optimizer, began, only)
        analysis.record.notes += notes
        return analysis

    def _experiment(self, optimizer: torch.optim.Optimizer, began: float, only: Sequence[str]) -> Analysis:
        config, device = self._config, self._device
        bench = Bench(self._model, optimizer, self._loss_fn, device, config)
        feeds: list[Feed] = []
        try:
            feed = self._feed(bench, None)
            feeds.append(feed)
            first = _first(feed)
            bench.block(lambda: first, WARM_UP_STEPS)
            measured = Measured()
            variants = standard_variants(bench, feed, first, measured, compiled=config.gpu.compile_model)
            variants = {name: variant for name, variant in variants.items() if name in only}
            other = other_workers(self._loader, _local_world_size())

            def more(times: dict[str, float]) -> dict[str, Variant]:
                if (
                    other is None
                    or AS_IS not in times
                    or bench.agreed(times[AS_IS] / times[SAME_BATCH]) < WORTH_TRYING_WORKERS
                ):
                    return {}
                trial = self._feed(bench, other)
                feeds.append(trial)
                return {WORKERS: Variant(trial, drop=trial.ahead + 1)}

            budget_s = self._budget_s * len(only) / len(ALL_VARIANTS)
            left_s = budget_s - bench.agreed(perf_counter() - began)
            longest = AS_IS if AS_IS in variants else SAME_BATCH
            run_rounds(bench, variants, measured, budget_s=left_s, more=more, longest=longest)
            if AS_IS in variants:
                measured.loader_samples_per_s = loader_rate(bench, feed, LOADER_SHARE * budget_s)
            measured.compare_ranks(bench)
            measured.communication_s = bench.communication_s(first, CLOCK_STEPS)
        finally:
            for item in feeds:
                item.close()
        workers = workers_of(self._loader)
        tried = other if WORKERS in variants else None
        gains = measured_gains(measured, bench, first, workers, tried, has_hook(self._model))
        record = self._record(bench, measured, first, workers, perf_counter() - began)
        return Analysis(
            record,
            measured,
            gains,
            first.global_samples,
            workers,
            tried,
            perf_counter() - began,
            feed.steps_per_epoch,
            1 if isinstance(bench.strategy, Replicas) else config.parallel.sync_every,
        )

    def _feed(self, bench: Bench, num_workers: int | None) -> Feed:
        strategy, training = bench.strategy, self._config.training
        accumulation = training.accumulation if isinstance(training.accumulation, int) else 1
        loader, _ = adopt_loader(
            copy_loader(self._loader, num_workers),
            rank=strategy.rank,
            world_size=strategy.world_size,
            accumulation=accumulation,
            seed=self._config.seed,
            local_world_size=_local_world_size(),
        )
        return Feed(loader, bench.device, strategy, accumulation)

    def _record(
        self, bench: Bench, measured: Measured, first: StepBatch, workers: int | None, wall_s: float
    ) -> RunRecord:
        """The unchanged steps, as a run's record."""
        steps = [_step_record(number, timed) for number, timed in enumerate(measured.as_is, start=1)]
        aggregate = StepAggregate(warmup=0)
        for step in steps:
            aggregate.add(step)
        device, strategy = bench.device, bench.strategy
        exposed = aggregate.phases().get("communication_exposed")
        total_s = measured.communication_s or aggregate.communication_s()
        accumulation = len(first.batches)
        micro = max(first.samples, default=0) or None
        several = strategy.world_size > 1
        return RunRecord(
            name=self._config.name,
            status="completed",
            environment={**environment_fingerprint(device), "num_workers": workers},
            batch=Batch(micro, accumulation, strategy.world_size, first.global_samples),
            wall_s=wall_s,
            steps=len(steps),
            device=describe_device(device),
            strategy=strategy.name,
            precision={"off": "fp32"}.get(bench.precision.name, bench.precision.name),
            parameters=count_parameters(bench.model),
            throughput=aggregate.throughput(strategy.world_size),
            phases=aggregate.phases(),
            communication=Communication(
                total_s=total_s if several else 0.0,
                exposed_s=(None if exposed is None else exposed.mean_s) if several else 0.0,
                bytes_per_step=strategy.communicated_bytes(bench.model),
            ),
            memory=measure_memory(device),
            padding_waste=aggregate.padding_waste(),
            slow_steps=aggregate.slow_steps(),
        )

    def judge(self, analysis: Analysis) -> Diagnosis:
        """Diagnose the unchanged steps, using what the experiments measured."""
        account = StepAccount(warmup=0).extend(
            _step_record(number, timed) for number, timed in enumerate(analysis.measured.as_is, start=1)
        )
        return settle(judge(analysis.record, steps=account, config=self._config), analysis.gains)


def measured_gains(
    measured: Measured,
    bench: Bench,
    first: StepBatch,
    workers: int | None,
    tried: int | None,
    hooked: bool = False,
) -> dict[str, ExperimentResult]:
    """The measured gain of removing each cause, by code."""
    found: dict[str, ExperimentResult] = {}
    without_data = measured.gain(AS_IS, SAME_BATCH)
    if without_data is not None:
        other = measured.gain(AS_IS, WORKERS)
        if other is not None and other.low > 1.0:
            remedy = Remedy("data.num_workers", tried, f"{tried} loader processes: measured here")
            words = f"{tried} loader processes instead of {workers}"
            found["input_bound"] = ExperimentResult(other, words, remedy, cost=without_data)
        else:
            figures = {} if other is None else {"tried_workers": tried, "tried_workers_speedup": other.value}
            found["input_bound"] = ExperimentResult(
                without_data,
                "the same batch again, without the loader",
                figures=figures,
                refuted=None if other is None else "data.num_workers",
                instead=CHEAPER_SAMPLES,
            )
    without_ranks = measured.gain(SAME_BATCH, SLOWEST)
    if without_ranks is not None:
        remedy = ACCUMULATE if hooked else COMPRESS
        found["communication_bound"] = ExperimentResult(without_ranks, "no_sync: no gradients are sent", instead=remedy)
    without_waiting = measured.gain_without_waiting()
    if without_waiting is not None and without_waiting.low >= GAINS["warning"]:  # compares computation only
        words, figures = "no_sync on each rank: one computes longer", {"slowest_rank": measured.slowest_rank}
        found["straggler"] = ExperimentResult(without_waiting, words, figures=figures, instead=LATE_RANK)
    cast = measured.gain(SAME_BATCH, AUTOCAST)
    if cast is not None and bench.precision.name == "off":
        word = bench.other_precision.name
        remedy = Remedy("gpu.mixed_precision", word, f"compute in {word}, keep weights in fp32: measured here")
        found["precision_unused"] = ExperimentResult(cast, f"forward and backward in {word}", remedy)
    double = measured.gain(SAME_BATCH, DOUBLE_BATCH)
    if double is not None:
        micro = max(first.samples)
        remedy = Remedy("training.micro_batch", 2 * micro, f"micro-batches of {2 * micro} samples, with lr to match")
        found["small_batch"] = ExperimentResult(
            double.scaled(2.0), "twice the batch, per sample", remedy, {"micro_batch": micro}
        )
    return found


def _step_record(number: int, timed: Timed) -> StepRecord:
    _, (samples, tokens, padded) = timed.payload
    total_s = None if timed.communication is None else timed.communication.total_s
    return StepRecord(
        number, 1, time(), timed.step_s, timed.values[0], None, samples, samples, tokens, padded,
        phases=timed.phases, communication_s=total_s,
    )  # fmt: skip


def _first(feed: Feed) -> StepBatch:
    try:
        return feed()
    except StopIteration:
        raise DataError("the loader yields no batch, so that there is nothing to analyze") from None


def _local_world_size() -> int:
    return (setup_ddp() if is_distributed() else detect()).local_world_size


def device_of(model: nn.Module, device: torch.device | str | int | None) -> torch.device:
    """The requested device, which must be the model's."""
    found = next((item.device for item in model.parameters()), None)
    if device is None:
        return choose_device() if found is None else found
    asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found is not None and (found.type != asked.type or asked.index not in (None, found.index)):
        raise DeviceError(f"the model is on {found}, not on {asked}: move it there first, model.to({str(asked)!r})")
    return asked if found is None else found
