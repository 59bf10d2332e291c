"""The verbs of the command line as functions.

They return results that show themselves in a few lines (in a notebook too) and hold with `to_dict()` what the verb
prints with `--json`. Nothing is printed, and every error is a `FramewormError`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from frameworm.errors import BaselineError, ConfigError, EnvironmentSetupError, RunFolderError

if TYPE_CHECKING:
    from frameworm.config.schema import Config
    from frameworm.diagnose.diagnosis import Diagnosis
    from frameworm.guard.comparison import Comparison
    from frameworm.records.schema import RunRecord
    from frameworm.scaling.memory import MemoryReport
    from frameworm.scaling.predict import Prediction
    from frameworm.tune.scripts.result import ScriptResult
    from frameworm.tune.search.result import Progress, TuneResult

__all__ = ["compare", "diagnose", "plan_memory", "predict", "profile", "tune"]


@overload
def tune(
    config: Config | str | Path,
    *,
    budget: float | str = ...,
    trials: int | None = ...,
    out: str | Path | None = ...,
    world_size: int = ...,
    allow_approximate: bool = ...,
    max_quality_loss: str = ...,
    settings: Sequence[str] = ...,
    tell: Callable[[str], None] | None = ...,
) -> TuneResult: ...


@overload
def tune(
    *,
    script: str | Path,
    arguments: Sequence[str] = ...,
    budget: float | str = ...,
    out: str | Path | None = ...,
    allow: Sequence[str] = ...,
    accept_side_effects: bool = ...,
    tell: Callable[[str], None] | None = ...,
) -> ScriptResult: ...


def tune(
    config: Config | str | Path | None = None,
    *,
    script: str | Path | None = None,
    arguments: Sequence[str] = (),
    budget: float | str = "10m",
    trials: int | None = None,
    out: str | Path | None = None,
    world_size: int = 1,
    allow_approximate: bool = False,
    max_quality_loss: str = "0.3%,0.2points",
    settings: Sequence[str] = (),
    allow: Sequence[str] = (),
    accept_side_effects: bool = False,
    tell: Callable[[str], None] | None = None,
) -> TuneResult | ScriptResult:
    """Make a config or a script faster by trials of the real run, and prove that it learns the same.

    Args:
        config: A config, its file, or the name of a workload (`gpt`, or `package.module:function`).
        script: A training script instead, which is run as it is; it is changed from outside.
        arguments: Of the script.
        budget: Time for all trials: seconds, or a text such as 90s, 10m or 1h.
        trials: For a config: most trials and proofs.
        out: Folder for the result and report.html; tune/<name> unless given.
        world_size: For a config: processes of every trial, on this machine.
        allow_approximate: For a config: keep what changes the numerics by more than rounding without a quality check.
        max_quality_loss: For a config: what a change of the numerics may cost, see `frameworm tune --help`.
        settings: For a config: changes such as `training.epochs=10`.
        allow: For a script: what only you can judge, of `graphs`, `late_losses` and `static_graph`.
        accept_side_effects: For a script: run it where trials cannot be kept apart, so that what they write stays.
        tell: Is told what goes on, for instance `print`.

    Returns:
        `speedup` with its interval, `changes`, every attempt with its reason, and the paths of what was written.

    Raises:
        ConfigError: The config or an option is wrong.
        EnvironmentSetupError: No process can be started, or a script's trials cannot be kept apart on this machine.
        StateError: It was called in a process that a verb has started, or lacks `if __name__ == "__main__":`.
    """
    from frameworm.launch.own_program import starting

    of_config = {
        "trials": trials is not None,
        "world_size": world_size != 1,
        "allow_approximate": allow_approximate,
        "settings": bool(settings),
    }
    of_script = {"arguments": bool(arguments), "allow": bool(allow), "accept_side_effects": accept_side_effects}
    _one_of(config, script, "tune", of_config, of_script)
    time_s = _seconds(budget)
    with starting("tune"):
        if script is not None:
            return _tune_script(Path(script), arguments, time_s, out, allow, accept_side_effects, tell)
        assert config is not None
        from frameworm.guard.quality import parse_margin
        from frameworm.tune.trials.outcomes import Budget
        from frameworm.tune.trials.quality_check import QualityChecker
        from frameworm.tune.tuner import tune as search

        loaded, original = _loaded(config, settings)

        def told(progress: Progress) -> None:
            if tell is not None:
                tell(progress.doing)

        return search(
            loaded,
            Path("tune") / loaded.name if out is None else out,
            budget=Budget(time_s, trials),
            world_size=world_size,
            allow_approximate=allow_approximate,
            longer=QualityChecker(margin=parse_margin(max_quality_loss)),
            original=original,
            tell=told,
        )


def _tune_script(
    script: Path,
    arguments: Sequence[str],
    time_s: float,
    out: str | Path | None,
    allow: Sequence[str],
    accept_side_effects: bool,
    tell: Callable[[str], None] | None,
) -> ScriptResult:
    from frameworm.attach.isolation import why_not
    from frameworm.attach.script import check_script
    from frameworm.tune.scripts.knobs import CONSENTS
    from frameworm.tune.scripts.result import write_result
    from frameworm.tune.scripts.search import ScriptSearch

    for name in allow:
        if name not in CONSENTS:
            raise ConfigError(f"allow: there is no {name!r}; there are {', '.join(CONSENTS)}")
    check_script(script)
    refused = why_not()
    if refused is not None and not accept_side_effects:
        raise EnvironmentSetupError(
            f"trials of the script cannot be kept apart on this machine: {refused}. Whatever it writes, deletes or "
            "sends would happen once in each trial; if that is all right, give accept_side_effects=True"
        )
    folder = Path("tune") / script.stem if out is None else Path(out)
    search = ScriptSearch(
        script,
        list(arguments),
        folder,
        time_s,
        isolated=refused is None,
        allowed=list(allow),
        tell=tell or (lambda text: None),
    )
    result = search.run()
    write_result(result, folder)
    return result


def profile(
    script: str | Path | None = None,
    arguments: Sequence[str] = (),
    *,
    config: Config | str | Path | None = None,
    settings: Sequence[str] = (),
    steps: int | None = None,
    budget: float | str | None = None,
    trace: bool = False,
    out: str | Path | None = None,
) -> RunRecord:
    """See where the time of a training script, or of a short run of a config, goes; in a process of its own.

    Args:
        script: Run as it is.
        arguments: Of the script.
        config: A config, its file, or the name of a workload, instead of a script.
        settings: For a config: changes such as `data.num_workers=2`.
        steps: Observe so many; a script then goes on unobserved, a config stops (60).
        budget: For a config: time for trying what its findings would gain, 30s unless given.
        trace: Record a few steps with torch.profiler too.
        out: Run folder; runs/profile-<script>-<time> unless given. What the process prints is in <folder>.log.

    Returns:
        The record of the run: `verdict`, `findings`, `phases`, and `report`, the page with all of it.

    Raises:
        TrainingFailedError: The process ended with an error; the message has its last lines.
        EnvironmentSetupError: There is no such script, or no process can be started.
        StateError: It was called in a process that a verb has started, or lacks `if __name__ == "__main__":`.
    """
    from frameworm.attach.script import check_script
    from frameworm.launch.own_program import run_own, starting
    from frameworm.records.store import RunFolder

    of_config = {"settings": bool(settings), "budget": budget is not None}
    _one_of(config, script, "profile", of_config, {"arguments": bool(arguments)})
    options = [*([] if steps is None else ["--steps", str(steps)]), *(["--trace"] if trace else [])]
    with starting("profile"), tempfile.TemporaryDirectory(prefix="frameworm-profile-") as scratch:
        if script is not None:
            if Path(script).suffix in (".yaml", ".yml"):
                raise ConfigError(f"{script} is a config, not a script: give it as config={str(script)!r}")
            check_script(Path(script))
            name, rest = Path(script).stem, [str(script), *arguments]
        else:
            assert config is not None
            from frameworm.config.load import dump_config

            loaded, _ = _loaded(config, settings)
            name, rest = loaded.name, []
            (Path(scratch) / "config.yaml").write_text(dump_config(loaded), encoding="utf-8")
            options += ["--config", str(Path(scratch) / "config.yaml")]
            options += [] if budget is None else ["--budget", f"{_seconds(budget):g}s"]
        folder = RunFolder.create(None if out is None else Path(out), f"profile-{name}").path
        try:
            run_own(["profile", "--out", str(folder), *options, *rest], folder.with_name(folder.name + ".log"))
        except BaseException:
            with contextlib.suppress(OSError):  # it is not empty: what was observed is kept
                folder.rmdir()
            raise
    return RunFolder.open(folder).read_summary()


def diagnose(run: str | Path, *, exact: bool = False) -> Diagnosis:
    """Judge a stored run: what costs most, the evidence, and what to do.

    Args:
        run: Folder or URL of a run.
        exact: Read all steps of a long run, not a sample of them.

    Returns:
        The record of the run with `verdict` and `findings` by the current rules.

    Raises:
        RunFolderError: There is no run, or it cannot be read.
    """
    from frameworm.attach.record import judged_run
    from frameworm.diagnose.diagnosis import Diagnosis
    from frameworm.records.objects.runs import local_run, shown
    from frameworm.records.store import SAMPLE_BYTES, RunFolder

    path = local_run(str(run))
    if path.is_file():
        raise RunFolderError(f"{run} is a file: `frameworm diagnose` judges traces, and this function run folders")
    folder = RunFolder.open(path)
    record = judged_run(folder, None if exact else SAMPLE_BYTES)
    record.run_dir = shown(folder)
    return Diagnosis.of(record)


def compare(before: str | Path, after: str | Path, *, exact: bool = False) -> Comparison:
    """Say what changed between two runs: settings, environment, phases, speed, memory, quality, and where they part.

    Args:
        before: Folder or URL of a run, called A in the result.
        after: The other, B.
        exact: Read all steps of long runs, not samples of them.

    Returns:
        `sentences` with the outcome, `typical` and `mean` times with intervals, `phases`, `settings` that differ.

    Raises:
        BaselineError: They cannot be compared.
        RunFolderError: There is no run, or it cannot be read.
    """
    from frameworm.guard.comparison import compare_folders
    from frameworm.records.objects.runs import local_run
    from frameworm.report.checks.guard import comparison_sentences
    from frameworm.scaling.run_points import find_all_runs

    paths = [local_run(str(run)) for run in (before, after)]
    for path in paths:
        if path.is_dir() and any(folder.path != path for folder in find_all_runs(path)):
            raise BaselineError(f"{path} is a folder of runs: `frameworm compare` compares sweeps, this function runs")
    comparison = compare_folders(*paths, exact=exact)
    comparison.sentences = comparison_sentences(comparison)
    return comparison


def predict(
    run: str | Path | None = None,
    world_sizes: Sequence[int] = (1, 2, 4, 8),
    *,
    network: str | Path | None = None,
    bandwidth_gbps: float | None = None,
    latency_us: float | None = None,
    fabric: str | None = None,
    gpus_per_node: int = 1,
    inside: str = "nvlink4",
    links_per_node: int = 1,
    scaling: Literal["strong", "weak"] = "strong",
    strategy: Literal["ddp", "zero1", "zero2", "zero3"] = "ddp",
    compression: Literal["off", "fp16", "bf16", "int8", "int4", "topk", "powersgd"] = "off",
    price_per_gpu_hour: float | None = None,
    settings: Sequence[str] = (),
    case: str | Path | None = None,
    compute_ms: float | None = None,
    gradient_mb: float | None = None,
    measure_codecs: bool = True,
) -> Prediction:
    """Predict step time, speed-up, efficiency and cost on more devices, from a run on one and a network.

    Args:
        run: Folder or URL of a run on one device; or give `case`, or `compute_ms` and `gradient_mb`.
        world_sizes: Numbers of ranks.
        network: A network.json that `frameworm network` measured.
        bandwidth_gbps: What one link carries in one direction, in Gbit/s (per node with `gpus_per_node`).
        latency_us: Of one message between neighbours.
        fabric: A preset, such as `infiniband-ndr`, `100gbe` or `10gbe`.
        gpus_per_node: Ranks of one node; they meet over `inside` first.
        inside: The preset between the GPUs of one node.
        links_per_node: Links of the fabric that one node has.
        scaling: `strong`: the global batch stays and is shared out; `weak`: the batch per device stays.
        strategy: How the model is divided.
        compression: How gradients are compressed.
        price_per_gpu_hour: For the cost of the training.
        settings: Changes of the run's config, such as `parallel.bucket_cap_mb=5`.
        case: JSON file with the figures of a step, instead of a run.
        compute_ms: Step of one device, instead of a run.
        gradient_mb: Gradients of the model, with `compute_ms`.
        measure_codecs: Time the codecs on this machine if it is the run's kind.

    Returns:
        A row for each number of ranks, with intervals, and what would help.

    Raises:
        ConfigError: Options that contradict each other, or are missing.
        RunFolderError: There is no run, or it cannot be read.
    """
    from frameworm.parallel.compression.codec_cost import costs_here
    from frameworm.records.objects.runs import local_run
    from frameworm.scaling.options import make_prediction

    def costs(source: Any, ratio: float, powersgd_rank: int) -> dict[str, float]:
        return {} if source.device is None else costs_here(source, ratio, powersgd_rank)

    return make_prediction(
        world_sizes,
        None if run is None else local_run(str(run)),
        network=None if network is None else Path(network),
        bandwidth_gbps=bandwidth_gbps,
        latency_us=latency_us,
        fabric=fabric,
        gpus_per_node=gpus_per_node,
        inside=inside,
        links_per_node=links_per_node,
        scaling=scaling,
        strategy=strategy,
        compression=compression,
        price_per_gpu_hour=price_per_gpu_hour,
        settings=settings,
        case=None if case is None else Path(case),
        compute_ms=compute_ms,
        gradient_mb=gradient_mb,
        codec_costs=costs if measure_codecs else None,
    )


def plan_memory(
    config: Config | str | Path,
    *,
    gpus: int = 1,
    memory_bytes: int | None = None,
    tokens_per_sample: float | None = None,
    settings: Sequence[str] = (),
) -> MemoryReport:
    """Plan the memory of a training step: what it takes, what fits, and what to change.

    Args:
        config: A config, its file, or the name of a workload.
        gpus: Devices to train on.
        memory_bytes: Memory of a device; that of this machine's unless given.
        tokens_per_sample: Mean length of the samples, for packed batches.
        settings: Changes such as `training.micro_batch=8`.

    Returns:
        `fits`, the plan by parts, the largest micro-batch that fits, and changes that would make it fit.

    Raises:
        ConfigError: The config is wrong.
    """
    from frameworm.engine.memory.planner import MemoryPlanner

    return MemoryPlanner(_loaded(config, settings)[0], gpus, tokens_per_sample).report(memory_bytes)


def _loaded(config: Config | str | Path, settings: Sequence[str]) -> tuple[Config, str | None]:
    """The config and, where it is a file, its text."""
    from frameworm.config.load import dump_config, load_config_from_mapping, load_config_from_text, load_runnable
    from frameworm.config.schema import MODEL_SECTIONS, Config

    if isinstance(config, Config):
        return load_config_from_text(dump_config(config), "the config given", list(settings), environ={}), None
    path = Path(config)
    if path.suffix == ".py":
        raise ConfigError(f"{path} is a script, not a config: give it as script={str(path)!r}")
    if isinstance(config, str) and (config in MODEL_SECTIONS or ":" in path.name) and not path.exists():
        return load_config_from_mapping({"workload": config}, list(settings)), None
    if isinstance(config, str) and config.isidentifier() and not path.exists():
        names = ", ".join(MODEL_SECTIONS)
        raise ConfigError(f"{config} is neither a config file nor a workload: {names}, or package.module:function")
    return load_runnable(path, list(settings)), path.read_text(encoding="utf-8")


def _one_of(config: Any, script: Any, verb: str, of_config: dict[str, bool], of_script: dict[str, bool]) -> None:
    """Refuse both or neither, and options of the other one."""
    if (config is None) == (script is None):
        raise ConfigError(f"give a config or a script, and only one of them: {verb}(config=...) or {verb}(script=...)")
    kind, wrong = ("script", of_config) if config is None else ("config", of_script)
    for name, given in wrong.items():
        if given:
            raise ConfigError(f"{verb}: {name} means nothing for a {kind}; leave it out")


def _seconds(budget: float | str) -> float:
    from frameworm.config.durations import parse_duration

    return parse_duration(budget) if isinstance(budget, str) else float(budget)
