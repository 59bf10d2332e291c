"""The engine's view of a run's output: one folder shared by all ranks, or none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from frameworm.config.schema import Config
from frameworm.engine.upload.places import begin_at, folder_for, go_on_at, go_on_in, run_at, unfinished_at
from frameworm.engine.upload.run_uploads import NoUploads, RunUploads
from frameworm.engine.upload.uploader import Ownership
from frameworm.errors import FramewormError, RunFolderError
from frameworm.launch.environment import launch_id
from frameworm.launch.process_group import broadcast_object
from frameworm.observe.loggers.named import make_loggers
from frameworm.observe.loggers.points import StepPoints
from frameworm.observe.loggers.protocol import LoggedRun, Logger
from frameworm.observe.loggers.run_loggers import NamedLogger, RunIds, RunLoggers
from frameworm.records.events import Listener
from frameworm.records.experiments import read_experiment, write_experiment
from frameworm.records.gradients import GradientTimes
from frameworm.records.launches import begun_by, take_back, write_launch
from frameworm.records.objects.place import check_url, is_url
from frameworm.records.schema import EpochRecord, RunRecord, StepRecord, json_ready
from frameworm.records.series import SeriesPoint
from frameworm.records.store import RunFolder, unfinished_runs
from frameworm.records.writer import JsonLinesWriter, StepReader
from frameworm.report.run.html import render_html
from frameworm.report.run.log import RunLog
from frameworm.report.run.page import samples_of
from frameworm.report.run.progress import Mfu, ProgressLine
from frameworm.report.run.text import render_text

log = logging.getLogger("frameworm")
RUNS = Path("runs")


class RunOutput:
    """The run folder, the writers into it and the progress line.

    Args:
        config: The config.
        folder: The run folder, or None for no output.
        resumed: Whether the folder holds a run to resume.
        show_progress: Whether to print a progress line.
        rank: This rank.
        world_size: Number of ranks.
        experiment: What to store for a later `resume="auto"`, if anything.
        loggers: Trackers that receive the run, on rank 0.
        uploads: Copies the folder to object storage, on rank 0; None for no uploads.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder | None,
        *,
        resumed: bool,
        show_progress: bool,
        rank: int,
        world_size: int,
        experiment: dict[str, str] | None = None,
        loggers: Sequence[NamedLogger] = (),
        uploads: RunUploads | NoUploads | None = None,
    ) -> None:
        self.folder = folder
        self.uploads = uploads or NoUploads()
        self.resumed = resumed
        self._config = config
        self._show_progress = show_progress
        self._rank = rank
        self._world_size = world_size
        self._experiment = experiment
        self._writer: JsonLinesWriter | None = None
        self._named_loggers = loggers
        self._loggers: RunLoggers | None = None
        self._log: RunLog | None = None
        self._earlier_steps = self._seen_steps = 0

    def listeners(
        self,
        rank: int,
        total_steps: int | None,
        mfu: Mfu | None = None,
        memory: Callable[[], int | None] | None = None,
    ) -> list[Listener]:
        """Create this rank's listeners: the step writer, the loggers, the progress line."""
        found: list[Listener] = []
        sinks = self._config.observe.sinks
        if self.folder is not None and "jsonl" in sinks:
            self._writer = JsonLinesWriter(self.folder.steps(rank))
            found.append(self._writer)
        if self.folder is not None and rank == 0:
            found.append(EpochTable(self.folder))
            epochs = self._config.training.epochs
            self._log = RunLog(self.folder.train_log, total_steps, epochs, self._world_size, mfu)
            found.append(self._log)
            if self.resumed:
                self._begin_log()
        if self._named_loggers and rank == 0:
            points = StepPoints(self._config.observe.log_interval_s, self._world_size, mfu, memory)
            ids = None if self.folder is None else RunIds(self.folder.path)
            self._loggers = RunLoggers(self._named_loggers, points, self._describe, ids)
            found.append(self._loggers)
        if self._show_progress and rank == 0:
            found.append(ProgressLine(total_steps, self._config.training.epochs, self._world_size, mfu=mfu))
        return found

    def _describe(self, known: str | None) -> LoggedRun:
        folder = None if self.folder is None else self.folder.path
        return LoggedRun(
            name=self._config.name if folder is None else folder.resolve().name,
            config=json_ready(self._config.model_dump()),
            folder=folder,
            id=known,
            step=self._earlier_steps,
            seen_step=self._seen_steps,
            close_s=self._config.observe.log_close_s,
        )

    def system_path(self, rank: int) -> Path | None:
        """File for this rank's system samples, if any."""
        return None if self.folder is None or "jsonl" not in self._config.observe.sinks else self.folder.system(rank)

    def write_config(self, text: str) -> None:
        """Write the resolved config, which makes the folder a run folder."""
        if self.folder is not None and self._rank == 0:
            self.folder.write_config(text)
            if self._experiment is not None:
                write_experiment(self.folder.path, self._experiment)
            self._begin_log()
            self.uploads.start(self._config)

    def _begin_log(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # writers of more important files report a failing disk
                self._log.begin()

    def write_begun(self, record: RunRecord) -> None:
        """Write what is known of the run so far, for those who watch it; a failing disk does not stop it."""
        if self.folder is not None and self._rank == 0:
            with contextlib.suppress(RunFolderError):
                self.folder.write_begun(record)

    def abandon(self) -> None:
        """Remove the folder of a run that could not begin, unless it contains anything."""
        self.close()
        self.close_log()
        if self.folder is not None and self._rank == 0 and not self.resumed:
            take_back(self.folder.path)

    def flush_steps(self) -> None:
        """Flush step records to the file before a checkpoint refers to them."""
        if self._writer is not None:
            self._writer.flush()

    def forget_steps_after(self, rank: int, step: int) -> None:
        """Drop records of steps that will be repeated; rank 0 also drops those of ranks that no longer exist."""
        if self.folder is None:
            return
        self._earlier_steps = step
        self._seen_steps = step + self.folder.truncate_steps(rank, step)
        for former in self.folder.step_files() if rank == 0 else ():
            if former >= self._world_size:
                self.folder.truncate_steps(former, step)

    def earlier_steps(self, rank: int) -> Iterator[StepRecord]:
        """Iterate over the records that a resumed run already has."""
        path = None if self.folder is None else self.folder.steps(rank)
        return iter(StepReader(path)) if path is not None and path.exists() else iter(())

    def close_log(self) -> None:
        """Close the log, the last file that a run writes."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def close(self) -> list[str]:
        """Finish writing steps; return notes on what was lost, including by loggers."""
        notes = [] if self._loggers is None else self._loggers.notes
        if self._writer is None:
            return notes
        self._writer.close()
        if not self._writer.lost:
            return notes
        return [
            *notes,
            f"{self._writer.lost} step records of rank {self._rank} were lost: {self._writer.problem or 'queue full'}",
        ]

    def write_gradients(self, gradients: GradientTimes) -> None:
        """Write what predictions need to know about gradients; a resumed run that measured none keeps its file."""
        if self.folder is None or (self.resumed and not gradients.measured):
            return
        with contextlib.suppress(RunFolderError):  # later writes report a full disk
            gradients.save(self.folder.path)

    def write_results(self, record: RunRecord, series: Sequence[SeriesPoint], config_text: str) -> None:
        """Write summary and report; a failing disk does not undo the training."""
        if self.folder is None:
            return
        try:
            self.folder.write_epochs(record.epochs)
            # Write the data before the report: a launcher that stops a failed run does not wait forever.
            self.folder.write_summary(record, render_text(record))
            self.folder.write_report(render_html(record, series, config_text, samples_of(self.folder)))
        except RunFolderError as error:
            record.notes.append(str(error))
            log.warning("%s", error)

    def rewrite_summary(self, record: RunRecord) -> None:
        """Write the summary again, with what became known since."""
        if self.folder is not None:
            with contextlib.suppress(RunFolderError):  # reported when it was first written
                self.folder.write_summary(record, render_text(record))


class EpochTable(Listener):
    """Keeps epochs.csv up to date during the run."""

    must_not_break_training = True

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._epochs = folder.read_epochs() if folder.epochs_csv.exists() else []

    def on_epoch(self, epoch: EpochRecord) -> None:
        """Add the epoch and rewrite the table."""
        self._epochs = [item for item in self._epochs if item.epoch < epoch.epoch] + [epoch]
        self._folder.write_epochs(self._epochs)


def open_output(
    config: Config,
    *,
    run_dir: str | Path | None,
    resume: str | Path | None,
    show_progress: bool,
    rank: int,
    world_size: int,
    experiment: dict[str, str] | None = None,
    loggers: Sequence[Logger] = (),
) -> RunOutput:
    """Find or create the run folder on rank 0 and broadcast it.

    Args:
        config: The config.
        run_dir: A folder, `auto` for runs/<name>-<time>, None for no folder, or a URL: the folder is then runs/<last
            part of the URL>, and is uploaded to it.
        resume: None for a new run; `auto` for the run in `run_dir`, else the newest unfinished one of that name; or a
            run.
        show_progress: Whether to print a progress line.
        rank: This rank.
        world_size: Number of ranks.
        experiment: Identifies a run without a name; None if its name is enough.
        loggers: The caller's trackers, besides those that the config names.

    Raises:
        RunFolderError: If the folder is taken, missing or cannot be written.
        MissingPackageError: If a logger's package is not installed.
        ConfigError: If a logger needs a folder and there is none.
    """
    named: list[NamedLogger] = []
    choice: tuple[str | None, bool] | Exception = (None, False)
    uploads: RunUploads | None = None
    if rank == 0:
        try:
            named = make_loggers(config.observe, loggers, has_folder=run_dir is not None or resume is not None)
            folder, resumed, ownership = _choose(config, run_dir, resume, experiment)
            if folder is not None and resumed:
                folder.refuse_links()
            if folder is not None and ownership is not None:
                uploads = RunUploads(folder, ownership)
            choice = (None if folder is None else str(folder.path), resumed)
        except FramewormError as error:
            choice = error
    choice = broadcast_object(choice)
    if isinstance(choice, Exception):
        raise choice
    path, resumed = choice
    folder = None if path is None else RunFolder(path)
    return RunOutput(
        config,
        folder,
        resumed=resumed,
        show_progress=show_progress,
        rank=rank,
        world_size=world_size,
        experiment=experiment,
        loggers=named,
        uploads=uploads,
    )


def _choose(
    config: Config, run_dir: str | Path | None, resume: str | Path | None, experiment: dict[str, str] | None
) -> tuple[RunFolder | None, bool, Ownership | None]:
    """Choose the run folder; return whether it holds a run to resume, and the place of its copy in object storage."""
    out = None if run_dir is None or str(run_dir) == "auto" else run_dir
    launch = launch_id()
    if launch is not None and run_dir is not None:
        begun = _begun_by(launch, out, resume)
        if begun is not None:
            return begun, True, _still_copied_to(config, begun, out if resume is None else resume)
    url = _url_to_go_on_with(config, out, run_dir, resume, named=experiment is None)
    ownership: Ownership | None
    if url is not None:
        folder, ownership = go_on_at(url, RUNS)
        found: tuple[RunFolder | None, bool, Ownership | None] = (folder, True, ownership)
    elif is_url(out):
        if resume is not None:
            log.info("no run at %s to resume: starting afresh", out)
        ownership = begin_at(str(out))
        folder = RunFolder.create(folder_for(ownership.url, RUNS), config.name)
        ownership.write(folder.path)
        found = (folder, False, ownership)
    else:
        chosen, resumed = choose_folder(config, run_dir, resume, experiment)
        found = (chosen, resumed, None if chosen is None else _copied_to(config, chosen, resumed=resumed))
    if found[0] is not None and found[2] is not None:
        log.info("%s is uploaded to %s", found[0].path, found[2].url)
    if launch is not None and found[0] is not None:
        write_launch(found[0].path, launch)
    return found


def _url_to_go_on_with(
    config: Config, out: str | Path | None, run_dir: str | Path | None, resume: str | Path | None, *, named: bool
) -> str | None:
    """Return the URL of the run to resume if it is in object storage; without a URL, search by the run's name."""
    if is_url(resume):
        if out is not None and str(out).rstrip("/") != str(resume).rstrip("/"):
            raise RunFolderError(f"a run continues in its own place, which is {resume}, not {out}; leave --out out")
        return str(resume)
    if resume is None or str(resume) != "auto":
        return None
    if is_url(out):
        return str(out) if run_at(str(out), RUNS) else None
    root = config.storage.url
    if root is None or not named or run_dir is None or out is not None or any(unfinished_runs(RUNS, config.name)):
        return None
    return next(unfinished_at(root, config.name), None)


def _copied_to(config: Config, folder: RunFolder, *, resumed: bool) -> Ownership | None:
    """Return where the config uploads a local folder; the folder itself is untrusted and decides nothing."""
    noted = go_on_in(folder.path) if resumed else None
    root = config.storage.url
    if root is None:
        if noted is not None:
            log.warning(
                "%s was uploaded to %s; this training is not, unless you resume it by that URL", folder.path, noted.url
            )
        return None
    if noted is None or not noted.url.startswith(f"{root.rstrip('/')}/"):
        try:
            noted = begin_at(f"{root.rstrip('/')}/{folder.path.resolve().name}")
        except BaseException:
            if not resumed:
                take_back(folder.path)
            raise
    noted.write(folder.path)
    return noted


def _still_copied_to(config: Config, folder: RunFolder, given: str | Path | None) -> Ownership | None:
    """Like `_copied_to`, for a run whose workers were restarted."""
    noted = go_on_in(folder.path)
    if noted is not None and is_url(given) and noted.url == check_url(str(given)):
        return noted
    return _copied_to(config, folder, resumed=True)


def _begun_by(launch: str, out: str | Path | None, resume: str | Path | None) -> RunFolder | None:
    """Return the run that this launch began before its workers were restarted."""
    wanted = out if resume is None or str(resume) == "auto" else resume
    given = None if wanted is None else folder_for(str(wanted), RUNS) if is_url(wanted) else Path(wanted)
    begun = begun_by(launch, (RUNS.iterdir() if RUNS.is_dir() else ()) if given is None else [given])
    return None if begun is None else RunFolder(begun)


def _named(run_dir: str | Path | None) -> Path | None:
    """Return the folder that the user named, if any."""
    return None if run_dir is None or str(run_dir) == "auto" else Path(run_dir)


def choose_folder(
    config: Config,
    run_dir: str | Path | None,
    resume: str | Path | None,
    experiment: dict[str, str] | None = None,
) -> tuple[RunFolder | None, bool]:
    """Return the run folder and whether it holds a run to resume, creating it if not; arguments as for `open_output`.

    Raises:
        RunFolderError: If the folder is taken, missing or cannot be written.
    """
    out = _named(run_dir)
    if resume is not None and str(resume) != "auto":
        if out is not None and out.resolve() != Path(resume).resolve():
            raise RunFolderError(f"a run continues in its own folder, which is {resume}, not {out}; leave --out out")
        return RunFolder.open(resume), True
    if resume is not None:
        if out is not None and RunFolder(out).holds_run():
            return RunFolder.open(out), True
        if out is None:
            for unfinished in unfinished_runs(RUNS, config.name):
                other = None if experiment is None else _other_experiment(unfinished, experiment)
                if other is None:
                    return unfinished, True
                log.warning("%s is unfinished but not resumed, because %s", unfinished.path, other)
        log.info("no unfinished run of %s to resume: starting afresh", config.name)
    if run_dir is None:
        return None, False
    return RunFolder.create(out, config.name, RUNS), False


def _other_experiment(folder: RunFolder, experiment: dict[str, str]) -> str | None:
    """Return why a run is not of this experiment; None if it is."""
    advice = f"to continue it all the same, give its folder (resume {folder.path}); to tell runs apart, name them"
    found = read_experiment(folder.path)
    if found is None:
        return f"it does not say which model, data and script it is of; {advice}"
    for part, here in experiment.items():
        if found.get(part) != here:
            return f"its {part} is {found.get(part)}, and this one's is {here}; {advice}"
    return None
