"""`frameworm profile --config`: a short run of a config, then experiments that measure the gain of its findings."""

from __future__ import annotations

import logging
from pathlib import Path

from frameworm.config.load import dump_config
from frameworm.config.schema import Config
from frameworm.diagnose.rules.judge import apply_judgement, judge
from frameworm.engine.optim.optimizers import build_optimizer
from frameworm.engine.run import run
from frameworm.errors import FramewormError
from frameworm.hardware.devices import choose_device
from frameworm.hardware.resolve import resolve_here
from frameworm.launch.environment import detect
from frameworm.launch.process_group import is_distributed, setup_ddp
from frameworm.models.loaders import build_loader
from frameworm.models.workloads import TokenisingNotice, build_workload
from frameworm.numerics.randomness import random_state, restore_random_state
from frameworm.records.account import StepAccount
from frameworm.records.events import Listener
from frameworm.records.schema import RunRecord, StepRecord
from frameworm.records.statistics import StepAggregate
from frameworm.records.store import RunFolder
from frameworm.report.run.html import render_html
from frameworm.report.run.text import render_text
from frameworm.tune.analyzer.analysis import Analysis
from frameworm.tune.analyzer.analyzer import BottleneckAnalyzer
from frameworm.tune.analyzer.settle import settle

log = logging.getLogger("frameworm")
STEPS = 100


class _Account(Listener):
    """Keeps what the rules and the report need from each step."""

    def __init__(self) -> None:
        self.account = StepAccount()
        self.aggregate = StepAggregate()

    def on_step(self, step: StepRecord) -> None:
        self.account.add(step)
        self.aggregate.add(step)


def analyze_config(
    config: Config, steps: int = STEPS, *, budget_s: float = 30.0, out: str | Path | None = None
) -> RunRecord:
    """Train a few steps with a config, then measure what its findings would gain.

    Args:
        config: A loaded config; it is not changed. In a process group every rank calls this.
        steps: Steps of the run, unless its epochs end earlier.
        budget_s: Time for the experiments after it.
        out: Run folder to write, as for `run`; its summary and report hold the measured findings. None: no folder.

    Returns:
        The run's record. Findings that an experiment could test have a measured speedup.
    """
    short = config.model_copy(deep=True)
    short.training.max_steps = min(steps, short.training.max_steps or steps)
    short.observe.loggers = []  # it is not one of the user's experiments
    # A profile of a few steps says nothing about checkpoints except the last one in its own folder.
    kept = _Account()
    record = run(short, out=out, callbacks=[kept])
    log.info("trying what remedies would gain, for about %.0f s", budget_s)
    analysis = _experiments(short, budget_s)
    if isinstance(analysis, str):
        record.notes.append(analysis)
        return _written(record, kept, short)
    process = setup_ddp() if is_distributed() else detect()
    judgement = judge(record, steps=kept.account, config=resolve_here(short, process.world_size))
    apply_judgement(record, settle(judgement, analysis.gains))
    record.notes += [note for note in analysis.record.notes if note not in record.notes]
    record.notes += [f"not tried: {name} ({why})" for name, why in analysis.measured.skipped.items()]
    return _written(record, kept, short)


def _experiments(config: Config, budget_s: float) -> Analysis | str:
    """Run the experiments on a separate model and loader; returns a sentence if there can be none."""
    process = setup_ddp() if is_distributed() else detect()
    config = resolve_here(config, process.world_size)
    if config.data.batching == "packed":
        return "no experiments: packed batches are put together on their way, and cannot be tried apart"
    import torch

    device = choose_device(config.gpu.device, process.device_index(torch.cuda.device_count()), config.gpu.device_ids)
    before = random_state(device)
    try:
        workload = build_workload(config, TokenisingNotice())
        model = workload.model.to(device)
        loader = build_loader(config, workload, workload.train_data, evaluation=False)
        optimizer = build_optimizer(model, config)
        analyzer = BottleneckAnalyzer(
            model, loader, device, optimizer=optimizer, loss_fn=workload.loss_fn, config=config, budget_s=budget_s
        )
        return analyzer.run()
    except FramewormError as error:
        log.warning("the experiments failed: %s", error)
        return f"no experiments: {error}"
    finally:
        restore_random_state(before, device)


def _written(record: RunRecord, kept: _Account, config: Config) -> RunRecord:
    """Rewrite summary and report if the run left a folder."""
    process = setup_ddp() if is_distributed() else detect()
    if record.run_dir is not None and process.rank == 0:
        folder = RunFolder.open(record.run_dir)
        folder.write_report(render_html(record, kept.aggregate.series(), dump_config(config)))
        folder.write_summary(record, render_text(record))
    return record
