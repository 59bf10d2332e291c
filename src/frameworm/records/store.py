"""The folder of a run: one property per file, written so that a crash never leaves half a file."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path

import yaml

from frameworm.errors import RunFolderError
from frameworm.records.atomic import refuse_link, replacing, write_atomic
from frameworm.records.launches import is_before_a_run
from frameworm.records.reading import MOST_BYTES, MOST_CONFIG_BYTES, parse_json, read_lines, read_text
from frameworm.records.schema import EpochRecord, RunRecord
from frameworm.records.writer import StepReader, parse_step

EPOCH_COLUMNS = tuple(item.name for item in dataclasses.fields(EpochRecord) if item.name != "metrics")

_STEPS_NAME = re.compile(r"steps-rank(\d+)\.jsonl")
_FOLDER_NAME = re.compile(r"(?P<name>.+)-\d{8}-\d{6}(-\d+)?")
_WRITTEN_NAME = re.compile(
    r"config\.yaml|begun\.json|summary\..*|epochs\.csv|report\.html|gradients\.json|checkpoints|tensorboard|wandb|"
    r"loggers\.json|metrics\.csv|train\.log|(steps|system|trace)-.*"
)
_FOLDER_MODE = 0o755
# What can be read in about half a second from all steps files of a run; larger files are sampled.
SAMPLE_BYTES = 8 * 2**20
_FEWEST_BYTES = 2**15  # per rank


class RunFolder:
    """The files of one run.

    Args:
        path: The folder; it is neither created nor checked here, see `create` and `open`.
        read: Reads the text of a file of at most the given size; for callers that must not follow links out of a
            folder.
    """

    def __init__(self, path: str | os.PathLike[str], read: Callable[[Path, int], str] = read_text) -> None:
        self.path = Path(path)
        self._read_text = read

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFolder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @classmethod
    def create(cls, out: Path | None, name: str, root: Path = Path("runs")) -> RunFolder:
        """Create the folder of a new run. Nothing that exists is ever overwritten.

        Args:
            out: The folder to use; None picks `<root>/<name>-<YYYYmmdd-HHMMSS>`.
            name: Name of the run.
            root: Parent of the folder if `out` is None.

        Raises:
            RunFolderError: `out` is not empty, or the folder cannot be created or written to.
        """
        if out is not None:
            return cls._create_at(Path(out))
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise RunFolderError(f"run name {name!r} cannot be part of a folder's name; use letters, digits, '_', '-'")
        root = Path(root)
        stamp = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        try:
            _make_folders(root)
            for attempt in range(1, 10_000):
                path = root / (stamp if attempt == 1 else f"{stamp}-{attempt}")
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=_FOLDER_MODE)
                    return cls(path)
        except OSError as error:
            raise _unwritable(root, error) from error
        raise RunFolderError(f"{root} holds too many runs named {stamp}; give another place with --out")

    @classmethod
    def _create_at(cls, path: Path) -> RunFolder:
        try:
            if path.is_dir():
                _refuse_unless_empty(cls(path))
                _probe(path)
            else:
                _make_folders(path.parent)
                path.mkdir(mode=_FOLDER_MODE)
        except FileExistsError as error:
            raise RunFolderError(f"{path} is in the way of the run folder; give another --out") from error
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Open the folder of an existing run.

        Raises:
            RunFolderError: There is no such folder, or it contains no run.
        """
        folder = cls(path)
        if not folder.path.is_dir():
            what = "is not a folder" if folder.path.exists() else "does not exist"
            raise RunFolderError(f"{folder.path} {what}; give the folder of a run (`frameworm runs` lists them)")
        if not folder.holds_run():
            raise RunFolderError(
                f"{folder.path} is not a run: it has no config.yaml, summary.json, steps-rank*.jsonl or checkpoints/; "
                "`frameworm runs` lists the runs there are"
            )
        return folder

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    def steps(self, rank: int) -> Path:
        """The steps of one rank."""
        return self.path / f"steps-rank{rank}.jsonl"

    def system(self, rank: int) -> Path:
        """System samples of one rank."""
        return self.path / f"system-rank{rank}.jsonl"

    @property
    def epochs_csv(self) -> Path:
        """One row per epoch."""
        return self.path / "epochs.csv"

    @property
    def begun_json(self) -> Path:
        """What is known about a run before it ends."""
        return self.path / "begun.json"

    @property
    def train_log(self) -> Path:
        """The engine's log, with timestamps."""
        return self.path / "train.log"

    @property
    def summary_json(self) -> Path:
        """The run record."""
        return self.path / "summary.json"

    @property
    def summary_txt(self) -> Path:
        """The run summary as text, for one screen."""
        return self.path / "summary.txt"

    @property
    def report_html(self) -> Path:
        """The run report as HTML."""
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def step_files(self) -> dict[int, Path]:
        """Return the existing steps files by rank; after a resume on fewer ranks, all earlier ranks are included."""
        matches = ((_STEPS_NAME.fullmatch(path.name), path) for path in _entries(self.path))
        return dict(sorted((int(match[1]), path) for match, path in matches if match))

    def step_readers(self, most_bytes: int | None = SAMPLE_BYTES) -> dict[int, StepReader]:
        """Return readers of the steps files by rank.

        Args:
            most_bytes: If all files together are larger, each reader samples its file. The first rank gets half of the
                bytes, because its phases represent the run; of the others only waits matter. None: always read all.
        """
        files = self.step_files()
        sizes = 0
        for path in files.values():
            with contextlib.suppress(OSError):
                sizes += path.stat().st_size
        if most_bytes is None or sizes <= most_bytes:
            return {rank: StepReader(path) for rank, path in files.items()}
        first, *others = files
        if not others:
            return {first: StepReader(files[first], most_bytes)}
        each = max(most_bytes // 2 // len(others), _FEWEST_BYTES)
        return {rank: StepReader(path, most_bytes // 2 if rank == first else each) for rank, path in files.items()}

    def holds_run(self) -> bool:
        """True if the folder contains any file of a run."""
        here = (self.config, self.summary_json, self.checkpoints)
        return any(path.exists() for path in here) or bool(self.step_files())

    def has_checkpoint(self) -> bool:
        """True if there is a durable checkpoint to resume from."""
        # Not `latest`: a run may have been killed between writing its first checkpoint and setting `latest`.
        return any(self.checkpoints.glob("step-*/manifest.json"))

    def refuse_links(self) -> None:
        """Refuse to continue a run if one of the names it writes to is a symbolic link.

        Raises:
            RunFolderError: Names the link.
        """
        for path in _entries(self.path):
            if _WRITTEN_NAME.fullmatch(path.name):
                refuse_link(path)
        for path in self.checkpoints.glob(".step-*.tmp"):
            refuse_link(path)

    def run_name(self) -> str | None:
        """Return the run's name from its config, or else from the folder name."""
        with contextlib.suppress(RunFolderError, ValueError, RecursionError, yaml.YAMLError):
            # Composed only, not constructed: aliases could expand to millions of values.
            config = yaml.compose(self.read_config(), yaml.SafeLoader)
            for key, value in config.value if isinstance(config, yaml.MappingNode) else ():
                if key.value == "name" and value.tag == "tag:yaml.org,2002:str":
                    return str(value.value)
        match = _FOLDER_NAME.fullmatch(self.path.name)
        return match["name"] if match else None

    def status(self) -> str | None:
        """Return the status in the summary; None without a readable summary, for instance while the run is going on."""
        try:
            return self.read_summary().status
        except RunFolderError:
            return None

    def read_config(self) -> str:
        """Return the text of the resolved config.

        Raises:
            RunFolderError: The file does not exist or cannot be read.
        """
        return self._read(self.config, MOST_CONFIG_BYTES)

    def write_config(self, text: str) -> None:
        """Write the resolved config."""
        write_atomic(self.config, text)

    def write_report(self, text: str) -> None:
        """Write the HTML report."""
        write_atomic(self.report_html, text)

    def write_summary(self, record: RunRecord, text: str | None = None) -> None:
        """Write the run record, and next to it `text`, the readable form, if it is given."""
        if text is not None:
            write_atomic(self.summary_txt, text)
        _write_record(self.summary_json, record)

    def read_summary(self) -> RunRecord:
        """Read the run record.

        Raises:
            RunFolderError: The file does not exist or is not a run record.
        """
        return self._read_record(self.summary_json)

    def write_begun(self, record: RunRecord) -> None:
        """Write what is known while a run is going on: where it runs, and the model's FLOPs once they are counted."""
        _write_record(self.begun_json, record)

    def read_begun(self) -> RunRecord:
        """Read what was known about the run when it began or was last resumed.

        Raises:
            RunFolderError: The file does not exist or is not a run record.
        """
        return self._read_record(self.begun_json)

    def write_epochs(self, epochs: Iterable[EpochRecord]) -> None:
        """Write the table of epochs; a missing value is an empty cell. Metrics follow in their own columns."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        epochs = list(epochs)
        metrics = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
        table.writerow([*EPOCH_COLUMNS, *metrics])
        for epoch in epochs:
            values = [*(getattr(epoch, name) for name in EPOCH_COLUMNS), *(epoch.metrics.get(name) for name in metrics)]
            table.writerow(["" if value is None else value for value in values])
        write_atomic(self.epochs_csv, text.getvalue())

    def read_epochs(self) -> list[EpochRecord]:
        """Read the table of epochs.

        Raises:
            RunFolderError: The file does not exist or is not such a table.
        """
        rows = csv.DictReader(io.StringIO(self._read(self.epochs_csv)))
        try:
            missing = [name for name in EPOCH_COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                expected = ",".join(EPOCH_COLUMNS)
                raise RunFolderError(f"{self.epochs_csv} has no column {missing[0]}; expected {expected}")
            return [
                EpochRecord(
                    epoch=int(row["epoch"]),
                    epoch_time_s=float(row["epoch_time_s"]),
                    train_loss=_cell(row["train_loss"]),
                    val_loss=_cell(row["val_loss"]),
                    val_accuracy=_cell(row["val_accuracy"]),
                    samples_per_s=_cell(row["samples_per_s"]),
                    metrics={
                        name: value
                        for name, text in row.items()
                        if name is not None and name not in EPOCH_COLUMNS and (value := _cell(text)) is not None
                    },
                )
                for row in rows
            ]
        except (ValueError, TypeError, csv.Error) as error:
            raise RunFolderError(f"{self.epochs_csv}, line {rows.line_num}: {error}") from error

    def _read_record(self, path: Path) -> RunRecord:
        text = self._read(path)
        try:
            return RunRecord.from_dict(parse_json(text))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise RunFolderError(f"{path} is damaged or no summary of frameworm: {error}") from error

    def _read(self, path: Path, most_bytes: int = MOST_BYTES) -> str:
        try:
            return self._read_text(path, most_bytes)
        except FileNotFoundError as error:
            raise RunFolderError(f"{path} does not exist; the run has not come that far, or is not a run") from error
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot read {path}: {error}") from error

    def truncate_steps(self, rank: int, last_step: int) -> int:
        """Drop broken lines and all steps after `last_step`, so that a resumed run writes no step twice.

        Call it only while no writer has the file open.

        Returns:
            Number of lines dropped.
        """
        path = self.steps(rank)
        if not path.exists():
            return 0
        dropped = 0
        try:
            with replacing(path) as kept:
                for line in read_lines(path):
                    step = parse_step(line)
                    if step is None or step.step > last_step:
                        dropped += 1
                    else:
                        kept.write(line if line.endswith(b"\n") else line + b"\n")
        except OSError as error:
            raise RunFolderError(f"cannot shorten {path}: {error.strerror or error}") from error
        return dropped


def find_runs(root: str | os.PathLike[str]) -> list[RunFolder]:
    """Return the runs directly under `root`, newest first; empty if `root` does not exist."""
    folders = (RunFolder(path) for path in _entries(Path(root)) if path.is_dir())
    return sorted((folder for folder in folders if folder.holds_run()), key=_age, reverse=True)


def unfinished_runs(root: str | os.PathLike[str], name: str) -> Iterator[RunFolder]:
    """Yield the runs of that name that are not completed and have a checkpoint to resume from, newest first."""
    for folder in find_runs(root):
        if folder.has_checkpoint() and folder.run_name() == name and folder.status() != "completed":
            yield folder


def _write_record(path: Path, record: RunRecord) -> None:
    write_atomic(path, json.dumps(record.to_dict(), indent=2, allow_nan=False) + "\n")


def _cell(text: str) -> float | None:
    return float(text) if text else None


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _age(folder: RunFolder) -> tuple[float, str]:
    """When the run began: the config is written then, whereas the folder's own time changes with every file."""
    for path in (folder.config, folder.path):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime, folder.path.name
    return 0.0, folder.path.name


def _make_folders(path: Path) -> None:
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=_FOLDER_MODE)


def _refuse_unless_empty(folder: RunFolder) -> None:
    if folder.holds_run():
        raise RunFolderError(
            f"{folder.path} already holds a run; give another --out (`frameworm train --resume auto` continues it)"
        )
    entry = next((entry for entry in folder.path.iterdir() if not is_before_a_run(entry.name)), None)
    if entry is not None:
        raise RunFolderError(
            f"{folder.path} is not empty (it has {entry.name}); give an empty or a new folder as --out"
        )


def _probe(path: Path) -> None:
    """Raise now the error that the first write would raise later."""
    with tempfile.NamedTemporaryFile(prefix=".", suffix=".tmp", dir=path):
        pass


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    reason = error.strerror or str(error)
    return RunFolderError(f"cannot make a run folder at {path}: {reason}; give a writable place with --out")
