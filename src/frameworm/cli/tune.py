"""`batch-size` and `tune`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import typer

from frameworm.cli.output import say, telling
from frameworm.cli.scale import parse_size
from frameworm.cli.train import number_or_auto
from frameworm.config.durations import parse_duration
from frameworm.errors import ConfigError, EnvironmentSetupError
from frameworm.guard.quality import parse_margin

if TYPE_CHECKING:
    from frameworm.attach.ranks import RankMeeting
    from frameworm.attach.trial.tuned_run import TunedRun
    from frameworm.config.schema import Config

INCONCLUSIVE = 3


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command("batch-size")(batch_size)
    # What follows the script belongs to the script, options included.
    app.command("tune", context_settings={"allow_interspersed_args": False})(tune)
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def batch_size(
    config: Path = typer.Option(..., "--config", "-c", help="Config file (YAML)."),
    distributed: bool = typer.Option(False, "--distributed", help="Run trials with several processes on this machine."),
    nproc_per_node: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Processes on this machine: a number, or auto for one per GPU."
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting: --set memory.activation_checkpointing=full"
    ),
    most: Optional[int] = typer.Option(  # noqa: UP045
        None, "--max", min=1, help="Largest micro-batch to try; default: 512 if nothing limits memory."
    ),
    free_global_batch: bool = typer.Option(
        False, "--free-global-batch", help="Let the global batch grow; otherwise accumulation keeps it fixed."
    ),
    deadline: float = typer.Option(120.0, min=1.0, help="Seconds per trial; longer trials count as hung."),
    budget: float = typer.Option(600.0, min=1.0, help="Seconds for all trials; then report what is known."),
    limit_memory: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Memory per process beyond Python and torch, such as 2GiB (address space, for the CPU)."
    ),
    speed: bool = typer.Option(True, help="Also measure smaller micro-batches to find the fastest."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Find the largest and the fastest micro-batch by trials of the real training step.

    Trials run in separate processes, so running out of memory, a crash or a hang costs one trial. The largest size is
    verified with more steps, the longest samples and a validation. Exit code 1: nothing fits; 3: out of time before the
    largest was verified.

    Example: frameworm batch-size --config configs/quickstart.yaml

    Two ranks, global batch free: frameworm batch-size --config F --distributed --nproc-per-node 2 --free-global-batch
    """
    from frameworm.tune.processes.forkserver import warm_up

    warm_up(["frameworm.cli.main"])  # imports torch while this process does
    from frameworm.config.load import load_runnable

    loaded = load_runnable(config, settings)
    world_size = _processes_here(loaded, distributed, nproc_per_node)
    from frameworm.report.tune.batch_size import render_batch_size
    from frameworm.tune.batch_size.search import BatchSizeFinder

    with telling("batch size") as tell:
        report = BatchSizeFinder(
            loaded,
            world_size=world_size,
            most=most,
            free_global_batch=free_global_batch,
            deadline_s=deadline,
            budget_s=budget,
            limit_bytes=None if limit_memory is None else parse_size(limit_memory),
            speed=speed,
            tell=tell,
        ).run()
    say(json.dumps(report.to_dict()) if as_json else render_batch_size(report), end="\n" if as_json else "")
    if not report.verified:
        smallest_failed = any(trial.micro_batch == 1 and not trial.fits for trial in report.trials)
        raise typer.Exit(1 if smallest_failed else INCONCLUSIVE)


def tune(
    script: Optional[Path] = typer.Argument(  # noqa: UP045
        None, metavar="[SCRIPT.py]", help="Training script, run as it is.", show_default=False
    ),
    arguments: Optional[list[str]] = typer.Argument(  # noqa: UP045
        None, metavar="[ARGS]...", help="Arguments of the script.", show_default=False
    ),
    config: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--config", "-c", help="Tune this config (YAML) instead of a script."
    ),
    module: Optional[str] = typer.Option(  # noqa: UP045
        None, "--module", "-m", help="Tune a module, as python -m runs it; its arguments follow `--`."
    ),
    accept_side_effects: bool = typer.Option(
        False,
        "--accept-side-effects",
        help="Run trials of a script even if this machine cannot isolate them: what they write and send stays.",
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be done with a script, without doing it."),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting before the search: --set training.epochs=10"
    ),
    budget: str = typer.Option("10m", help="Time for all trials, such as 90s, 10m or 1h."),
    trials: Optional[int] = typer.Option(None, min=1, help="Maximum number of trials and proofs."),  # noqa: UP045
    out: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="Folder of the search; default: tune/<name>. A stopped search of a config resumes."
    ),
    allow: Optional[str] = typer.Option(  # noqa: UP045
        None,
        help="For a config, approximate: allow changes of numerics beyond rounding without a quality check. For a "
        "script, a comma-separated list of graphs (CUDA graphs, which overwrite earlier outputs of the model), "
        "late_losses (loss.item() returns the previous step's loss), static_graph (every step uses the same "
        "parameters).",
    ),
    max_quality_loss: str = typer.Option(
        "0.3%,0.2points",
        help="How much a change of numerics may cost: rise of the final validation loss in % of its fall, points of "
        "accuracy, or both. Changes not shown to stay within it are offered as trade-offs.",
    ),
    distributed: bool = typer.Option(False, "--distributed", help="Run trials with several processes on this machine."),
    nproc_per_node: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Processes on this machine: a number, or auto for one per GPU."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Make a script or a config faster by trials of the real run, and prove that it still learns the same.

    A script runs unmodified, with settings changed from outside; whatever it writes in a trial is discarded. Writes
    tuned.yaml (for `frameworm run --with`) and tuned.patch, or best.yaml for a config, and tune.json and report.html.
    Exit code 1: the script or config itself does not run.

    Example: frameworm tune examples/plain_loop.py --epochs 30

    A config: frameworm tune --config configs/quickstart.yaml --budget 3m
    """
    if script is not None or module is not None:
        given = [*([] if script is None or module is None else [str(script)]), *(arguments or [])]
        _refuse_settings(config, settings, trials, distributed)
        _tune_script(script, module, given, out, budget, accept_side_effects, dry_run, allow, as_json)
        return
    if config is None:
        raise EnvironmentSetupError(
            "give a script or a config: `frameworm tune train.py --its-own-options`, or `frameworm tune --config F`"
        )
    if allow not in (None, "approximate"):
        raise ConfigError(f"--allow {allow}: for a config there is only --allow approximate")
    time_s, margin = parse_duration(budget), parse_margin(max_quality_loss)
    from frameworm.config.load import load_runnable

    loaded = load_runnable(config, settings)
    if ":" not in loaded.workload:  # which libraries a user's own needs is known when it was built
        from frameworm.tune.processes.forkserver import warm_up

        warm_up(["frameworm.tune.trials.live_rank", "frameworm.cli.main"])  # imports torch while this process does
    world_size = _processes_here(loaded, distributed, nproc_per_node)
    from frameworm.report.tune.progress import TuneProgress
    from frameworm.tune.search.result import Progress
    from frameworm.tune.trials.outcomes import Budget
    from frameworm.tune.trials.quality_check import QualityChecker
    from frameworm.tune.tuner import BEST_NAME
    from frameworm.tune.tuner import tune as search

    folder = out or Path("tune") / loaded.name
    with TuneProgress(time_s, trials) as shown:

        def tell(progress: Progress) -> None:
            shown.tell(progress.doing, progress.result.to_json())

        result = search(
            loaded,
            folder,
            budget=Budget(time_s, trials),
            world_size=world_size,
            allow_approximate=allow is not None,
            longer=QualityChecker(margin=margin),
            original=config.read_text(encoding="utf-8"),
            tell=tell,
        )
    if as_json:
        say((folder / "tune.json").read_text(encoding="utf-8"), end="")
    else:
        _show_tuned(result.to_json(), str(folder / BEST_NAME))
    if result.baseline.failure is not None:
        say(f"frameworm: {result.stopped}; what it said is in {result.baseline.details.get('log')}", file=sys.stderr)
        raise typer.Exit(1)


def _refuse_settings(config: Path | None, settings: list[str], trials: int | None, distributed: bool) -> None:
    """Refuse options that mean something for configs only."""
    options = {
        "--config": config is not None,
        "--set": bool(settings),
        "--trials": trials is not None,
        "--distributed": distributed,
    }
    for name, given in options.items():
        if given:
            raise EnvironmentSetupError(f"{name} is for a config; give the script's own options after the script")


def _tune_script(
    script: Path | None,
    module: str | None,
    arguments: list[str],
    out: Path | None,
    budget: str,
    accept_side_effects: bool,
    dry_run: bool,
    allow: str | None,
    as_json: bool,
) -> None:
    from frameworm.attach.isolation import why_not
    from frameworm.attach.script import check_script, find_module
    from frameworm.report.tune.text import by_hand
    from frameworm.tune.scripts.knobs import CONSENTS
    from frameworm.tune.scripts.result import PATCH_NAME, TUNED_NAME, plan_in_words, write_result
    from frameworm.tune.scripts.search import ScriptSearch

    allowed = allow.split(",") if allow else []
    for name in allowed:
        if name not in CONSENTS:
            raise ConfigError(f"--allow {name}: there is no such consent for a script; there are {', '.join(CONSENTS)}")
    path = script if module is None else find_module(module)
    assert path is not None
    check_script(path)
    time_s, folder = parse_duration(budget), out or Path("tune") / path.stem
    meeting = _meeting()
    if meeting is not None and meeting.process.rank > 0:
        sys.exit(meeting.wait())
    with _leading(meeting) as ranks:
        refused = why_not()
        if dry_run:
            say(plan_in_words(path, arguments, folder, time_s, refused))
            return
        if refused is not None and not accept_side_effects:
            raise EnvironmentSetupError(
                f"trials of the script cannot be kept apart on this machine: {refused}. Whatever it writes, deletes or "
                "sends would happen once in each trial; if that is all right, add --accept-side-effects"
            )
        with telling("tune") as shown:
            result = ScriptSearch(
                path,
                arguments,
                folder,
                time_s,
                module=module,
                isolated=refused is None,
                ranks=ranks,
                allowed=allowed,
                tell=shown or (lambda text: say(text, file=sys.stderr, flush=True)),
            ).run()
        write_result(result, folder)
        plain = result.to_dict()
        if as_json:
            say(json.dumps(plain))
        elif result.problem is None:
            _show_tuned(plain, str(folder / TUNED_NAME))
            say(by_hand(plain, str(folder / PATCH_NAME)), end="")
        if result.problem is not None:
            say(f"frameworm: {result.problem}", file=sys.stderr)
            raise typer.Exit(1)


def _meeting() -> RankMeeting | None:
    """Where the processes of a launcher meet; None: no launcher has started this one."""
    from frameworm.attach.ranks import RankMeeting, who_am_i

    process = who_am_i()[0]
    return None if process.launcher == "none" else RankMeeting(process)


@contextlib.contextmanager
def _leading(meeting: RankMeeting | None) -> Iterator[list[dict[str, str | None]]]:
    """Do what only rank 0 does, given the variables of all ranks; the others are told how it ended."""
    if meeting is None:
        yield []
        return
    code = 1
    try:
        yield meeting.variables()
        code = 0
    finally:
        meeting.tell(code)


def run(
    script: Path = typer.Argument(..., metavar="SCRIPT.py", help="Training script.", show_default=False),
    arguments: Optional[list[str]] = typer.Argument(  # noqa: UP045
        None, metavar="[ARGS]...", help="Arguments of the script.", show_default=False
    ),
    tuned: Path = typer.Option(..., "--with", help="The tuned.yaml that `frameworm tune` wrote for the script."),
    check: bool = typer.Option(True, help="First compare a few steps with and without the settings."),
    as_json: bool = typer.Option(False, "--json", help="Print the settings as JSON on stderr; stdout is the script's."),
) -> None:
    """Run a script with the settings its tuning found: all of them, or none.

    Refuses to start if the script, its arguments, its library versions or the device differ from those of the tuning,
    or if the first steps do not compute the same as without the settings.

    Example: frameworm run --with tune/plain_loop/tuned.yaml examples/plain_loop.py --epochs 30
    """
    from frameworm.attach.isolation import why_not
    from frameworm.attach.trial.tuned_run import TunedRun

    meeting = _meeting()
    prepared = TunedRun(script, arguments or [], tuned, 1 if meeting is None else meeting.process.world_size)
    if meeting is not None and meeting.process.rank > 0:
        code = meeting.wait()
        if code:
            sys.exit(code)
    else:
        with _leading(meeting) as ranks:
            if check and prepared.switches.to_dict():
                refused = why_not()
                if refused is None:
                    _check_start(prepared, ranks)
                else:
                    say(f"frameworm: the first steps were not compared: {refused}", file=sys.stderr)
            say(json.dumps(prepared.to_dict()) if as_json else prepared.in_words(), file=sys.stderr, flush=True)
    sys.exit(prepared.run().code)


def _check_start(prepared: TunedRun, ranks: list[dict[str, str | None]]) -> None:
    import tempfile

    from frameworm.tune.scripts.search import ScriptSearch

    with tempfile.TemporaryDirectory(prefix="frameworm-run-") as folder:
        search = ScriptSearch(prepared.script, prepared.arguments, Path(folder), 300.0, ranks=ranks)
        problem = search.check(prepared.switches, prepared.facts)
    if problem is not None:
        raise ConfigError(f"the first steps do not compute the same as without it: {problem}; tune the script again")


def _processes_here(config: Config, distributed: bool, nproc_per_node: str | None) -> int:
    from frameworm.hardware.resolve import resolve_machine
    from frameworm.launch.plan import plan_launch

    devices = resolve_machine(config).device_count if distributed else 0
    plan = plan_launch(distributed, number_or_auto(nproc_per_node), device_count=devices)
    if plan.action == "join" or plan.max_nodes > 1:
        raise EnvironmentSetupError(
            "trials are started by this command itself, on one machine: run it once, without torchrun or srun, with "
            "--distributed --nproc-per-node N"
        )
    return plan.nproc_per_node


def _show_tuned(result: dict[str, Any], best: str) -> None:
    from frameworm.report.tune.text import attempts_table, waterfall

    tried = attempts_table(result, without=("accepted", "skipped"))
    if tried:
        say(tried)
    say(waterfall(result, best), end="")
