"""`profile` and `diagnose`."""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from frameworm.cli.output import log_to_screen, say
from frameworm.config.durations import parse_duration
from frameworm.errors import EnvironmentSetupError

if TYPE_CHECKING:
    from frameworm.attach.attach import Attachment
    from frameworm.records.schema import RunRecord

CONFIG_STEPS = 60
INCONCLUSIVE = 3


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    # What follows the script belongs to the script, options included.
    app.command("profile", context_settings={"allow_interspersed_args": False})(profile)
    app.command("diagnose")(diagnose)


def profile(
    script: Optional[Path] = typer.Argument(  # noqa: UP045
        None, metavar="[SCRIPT.py]", help="Training script, run as it is.", show_default=False
    ),
    arguments: Optional[list[str]] = typer.Argument(  # noqa: UP045
        None, metavar="[ARGS]...", help="Arguments of the script.", show_default=False
    ),
    config: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--config", "-c", help="Profile a short run of this config instead of a script."
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting of the config: --set data.num_workers=2"
    ),
    out: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="Run folder; default: runs/profile-<script>-<time>."
    ),
    steps: Optional[int] = typer.Option(  # noqa: UP045
        None, min=1, help=f"Steps to observe; a script then continues unobserved, a config stops ({CONFIG_STEPS})."
    ),
    budget: str = typer.Option("30s", help="With --config: time to try what the remedies gain."),
    nvtx: bool = typer.Option(False, "--nvtx", help="Name phases for Nsight Systems, and print the command."),
    trace: bool = typer.Option(False, "--trace", help="Also record a few steps with torch.profiler."),
    trace_schedule: Optional[str] = typer.Option(  # noqa: UP045
        None,
        metavar="WAIT,WARMUP,ACTIVE[,REPEAT]",
        help="With --trace: steps to skip, warm up and record, and repetitions; default: 10,2,5,1.",
    ),
    operators: Optional[int] = typer.Option(  # noqa: UP045
        None, min=1, help="With --trace: operators per list in its summary; default: 10."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON, after the script's own output."),
) -> None:
    """Show where the time of a training script goes, without changing the script or its results.

    Example: frameworm profile examples/plain_loop.py

    On two processes: torchrun --nproc-per-node 2 --no-python frameworm profile examples/ddp_example.py
    """
    if (script is None) == (config is None):
        raise EnvironmentSetupError(
            "give a script or a config, and only one of them: `frameworm profile train.py --its-own-options`, or "
            "`frameworm profile --config F`"
        )
    if (trace_schedule is not None or operators is not None) and not trace:
        raise EnvironmentSetupError("--trace-schedule and --operators say how to trace: give --trace with them")
    schedule = _schedule(trace_schedule)
    if config is not None:
        observed = ["observe.nvtx=true"] if nvtx else []
        observed += _trace_settings(schedule, operators) if trace else []
        _profile_config(config, [*observed, *settings], out, steps or CONFIG_STEPS, parse_duration(budget), as_json)
        return
    assert script is not None
    if settings:
        raise EnvironmentSetupError("--set changes a config; give the script's own options after the script")
    from frameworm.attach.attach import Attachment

    attachment = Attachment(
        script, out=out, steps=steps, nvtx=nvtx, trace=trace, schedule=schedule, operators=operators
    )
    if nvtx and attachment.process.rank == 0:
        _print_nsys()
    # The first registered is the last called: after all that the script has left for its end.
    atexit.register(_finish, attachment, as_json)
    sys.exit(attachment.run(script, arguments or []).code)


_SCHEDULE = ("trace_wait", "trace_warmup", "trace_active", "trace_repeat")


def _schedule(text: str | None) -> list[int]:
    """The numbers of --trace-schedule; none where it is not given."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not (3 <= len(parts) <= 4 and all(part.isdecimal() for part in parts) and all(int(part) for part in parts[2:])):
        raise EnvironmentSetupError(
            f"--trace-schedule {text} is not WAIT,WARMUP,ACTIVE[,REPEAT]; give numbers such as 10,2,5,1, the last "
            "two of them 1 or more"
        )
    return [int(part) for part in parts]


def _trace_settings(schedule: list[int], operators: int | None) -> list[str]:
    found = ["observe.trace=window", *(f"observe.{name}={value}" for name, value in zip(_SCHEDULE, schedule))]
    return found + ([] if operators is None else [f"observe.trace_operators={operators}"])


def _print_nsys() -> None:
    from frameworm.observe.clocks.nvtx import nsys_command

    say(f"frameworm: to see the ranges: {nsys_command(['frameworm', *sys.argv[1:]])}", file=sys.stderr)


def _finish(attachment: Attachment, as_json: bool) -> None:
    """Sum up and show; the exit code is the script's, whatever happens here."""
    try:
        record = attachment.finish()
        if record is not None:
            _show(record, as_json)
    except BrokenPipeError:
        return
    except Exception as error:
        say(f"frameworm: the summary could not be made: {type(error).__name__}: {error}", file=sys.stderr)


def _show(record: RunRecord, as_json: bool) -> None:
    from frameworm.launch.environment import inside_verb

    if inside_verb() == "profile":
        return  # the caller in Python reads the record; what it shows of an error is the script's own output
    from frameworm.report.run.text import render_text

    sys.stdout.flush()
    text = render_text(record)
    say(text, end="", file=sys.stderr)
    if "\nverdict" not in text:
        say(f"verdict     {record.verdict}", file=sys.stderr)
    if record.unseen:
        say(f"unseen      {', '.join(record.unseen)}", file=sys.stderr)
    sys.stderr.flush()
    if as_json:
        say(json.dumps(record.to_dict()), flush=True)


def _profile_config(
    config: Path,
    settings: list[str],
    out: Path | None,
    steps: int,
    budget_s: float,
    as_json: bool,
) -> None:
    from frameworm.config.load import load_runnable

    loaded = load_runnable(config, [f"training.max_steps={steps}", *settings])
    from frameworm.launch.environment import detect
    from frameworm.launch.failures import worker_errors
    from frameworm.launch.process_group import cleanup
    from frameworm.tune.analyzer.config_analysis import analyze_config

    log_to_screen(detect().rank == 0)
    with worker_errors():
        record = analyze_config(loaded, steps, budget_s=budget_s, out=out or "auto")
        if detect().rank == 0:
            if loaded.observe.nvtx:
                _print_nsys()
            _show(record, as_json)
        cleanup()


def diagnose(
    given: str = typer.Argument(
        ..., metavar="RUN", help="Run folder or URL, or a trace of torch.profiler (.json, .json.gz)."
    ),
    operators: Optional[int] = typer.Option(  # noqa: UP045
        None, min=1, help="For a trace: operators per list."
    ),
    exact: bool = typer.Option(False, "--exact", help="Read every step of a long run instead of a sample."),
    as_json: bool = typer.Option(False, "--json", help="Print verdict and findings as JSON."),
) -> None:
    """Diagnose a stored run: what costs most, the evidence, and what to do. Exit code 3: inconclusive.

    Example: frameworm diagnose runs/quickstart-20260101-120000
    """
    from frameworm.records.objects.runs import local_run, shown

    run = local_run(given)
    if run.is_file():
        _diagnose_trace(run, operators, as_json)
        return
    from frameworm.attach.record import judged_run
    from frameworm.diagnose.diagnosis import Diagnosis
    from frameworm.records.store import SAMPLE_BYTES, RunFolder

    folder = RunFolder.open(run)
    record = judged_run(folder, None if exact else SAMPLE_BYTES)
    record.run_dir = shown(folder)
    if as_json:
        say(json.dumps(Diagnosis.of(record).to_dict()))
    else:
        from frameworm.report.run.text import render_text

        text = render_text(record)
        say(text, end="")
        if "\nverdict" not in text:
            say(f"verdict     {record.verdict}")
    if record.verdict == "inconclusive":
        raise typer.Exit(INCONCLUSIVE)


def _diagnose_trace(path: Path, operators: int | None, as_json: bool) -> None:
    from frameworm.observe.trace.read import read_trace
    from frameworm.report.run.trace_text import SHOWN, render_trace

    summary = read_trace(path) if operators is None else read_trace(path, operators)
    say(json.dumps(summary.to_dict()) if as_json else render_trace(summary, shown=operators or SHOWN).rstrip("\n"))
