"""The verbs of the command line as functions: typed results, the same that `--json` prints."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameworm.errors import TrainingFailedError

if TYPE_CHECKING:
    from frameworm.config.schema import Config
    from frameworm.guard.comparison import Comparison
    from frameworm.records.schema import RunRecord
    from frameworm.scaling.memory import MemoryReport
    from frameworm.scaling.predict import Prediction
    from frameworm.tune.search.result import TuneResult

__all__ = ["compare", "diagnose", "plan_memory", "predict", "profile", "tune"]


def tune(
    config: Config | str | Path,
    *,
    budget: float | str = "10m",
    trials: int | None = None,
    out: str | Path | None = None,
    world_size: int = 1,
    allow_approximate: bool = False,
    max_quality_loss: str = "0.3%,0.2points",
    settings: Sequence[str] = (),
) -> TuneResult:
    """Make a config faster by trials of the real run, and prove that it learns the same; see `frameworm tune`.

    Args:
        config: A config, or its file.
        budget: Time for all trials: seconds, or a text such as 90s, 10m or 1h.
        trials: Most trials and proofs.
        out: Folder for best.yaml, tune.json and report.html; tune/<name> unless given.
        world_size: Processes of every trial, on this machine.
        allow_approximate: Keep what changes the numerics by more than rounding without a quality check.
        max_quality_loss: What a change of the numerics may cost, see `frameworm tune --help`.
        settings: Changes such as `training.epochs=10`.
    """
    from frameworm.config.durations import parse_duration
    from frameworm.guard.quality import parse_margin
    from frameworm.tune.trials.longer import Longer
    from frameworm.tune.trials.outcomes import Budget
    from frameworm.tune.tuner import tune as search

    loaded, original = _loaded(config, settings)
    time_s = parse_duration(budget) if isinstance(budget, str) else float(budget)
    return search(
        loaded,
        Path("tune") / loaded.name if out is None else out,
        budget=Budget(time_s, trials),
        world_size=world_size,
        allow_approximate=allow_approximate,
        longer=Longer(margin=parse_margin(max_quality_loss)),
        original=original,
    )


def profile(
    script: str | Path, arguments: Sequence[str] = (), *, steps: int | None = None, out: str | Path | None = None
) -> RunRecord:
    """Run a training script in a process of its own and see where its time goes; see `frameworm profile`.

    Args:
        script: Run as it is.
        arguments: Its own.
        steps: Observe so many; the script then goes on unobserved.
        out: Run folder; one that is removed afterwards unless given.

    Raises:
        TrainingFailedError: The script ended with an error.
    """
    from frameworm.launch.environment import own_command
    from frameworm.records.store import RunFolder

    with tempfile.TemporaryDirectory(prefix="frameworm-profile-") as scratch:
        folder = Path(scratch) / "run" if out is None else Path(out)
        options = ["--out", str(folder), *([] if steps is None else ["--steps", str(steps)])]
        ended = subprocess.run(own_command("profile", *options, str(script), *arguments), check=False)
        if ended.returncode != 0:
            raise TrainingFailedError(f"{script} ended with exit code {ended.returncode}; see what it printed")
        return RunFolder.open(folder).read_summary()


def diagnose(run: str | Path) -> RunRecord:
    """Judge a stored run: its record with verdict and findings; see `frameworm diagnose`."""
    from frameworm.attach.record import judged_run
    from frameworm.records.store import RunFolder

    return judged_run(RunFolder.open(run))


def compare(before: str | Path, after: str | Path) -> Comparison:
    """Say what changed between two runs; see `frameworm compare`."""
    from frameworm.guard.comparison import compare_folders

    return compare_folders(before, after)


def predict(run: str | Path, world_sizes: Sequence[int] = (1, 2, 4, 8), **options: Any) -> Prediction:
    """Predict a run on more devices; options as of `frameworm predict`, such as `bandwidth_gbps=10, latency_us=50`."""
    from frameworm.parallel.compression.codec_cost import costs_here
    from frameworm.scaling.options import make_prediction

    measured = costs_here if options.pop("measure_codecs", True) else None
    return make_prediction(world_sizes, Path(run), codec_costs=measured, **options)


def plan_memory(
    config: Config | str | Path, *, gpus: int = 1, memory_bytes: int | None = None, settings: Sequence[str] = ()
) -> MemoryReport:
    """Plan the memory of a training step; see `frameworm memory`.

    Args:
        config: A config, or its file.
        gpus: Devices to train on.
        memory_bytes: Memory of a device; that of this machine's unless given.
        settings: Changes such as `training.micro_batch=8`.
    """
    from frameworm.engine.memory.planner import MemoryPlanner

    return MemoryPlanner(_loaded(config, settings)[0], gpus).report(memory_bytes)


def _loaded(config: Config | str | Path, settings: Sequence[str]) -> tuple[Config, str | None]:
    """The config and, where it is a file, its text."""
    from frameworm.config.load import dump_config, load_config_from_text, load_runnable
    from frameworm.config.schema import Config

    if isinstance(config, Config):
        return load_config_from_text(dump_config(config), "the config given", list(settings), environ={}), None
    path = Path(config)
    return load_runnable(path, list(settings)), path.read_text(encoding="utf-8")
