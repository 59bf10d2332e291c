"""What a script's thread is doing, by its frames: the innermost line of the script's own files, and a kind of work.

Only names and numbers are kept from a frame, since keeping a frame keeps everything that its function holds.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
import sysconfig
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

WRITING, COMPUTING, WAITING = "writing", "computing", "waiting"
DEVICE, LIBRARY = "device", "library"

MOST_FRAMES = 200
# Packages and modules by top-level name, or by path if only a part of them counts.
_WRITERS = {
    *("logging", "csv", "pprint", "_pyio", "json/encoder.py", "torch/utils/tensorboard", "tensorboard", "tensorboardX"),
    *("wandb", "mlflow", "tqdm", "rich", "comet_ml", "neptune", "aim", "clearml", "swanlab", "loguru", "structlog"),
    *("lightning/pytorch/loggers", "lightning/fabric/loggers", "pytorch_lightning/loggers"),
}
_WAITERS = {"threading", "queue", "selectors", "subprocess", "asyncio", "multiprocessing", "concurrent", "socket"}
# Training libraries: their work between steps is part of training, and the script's line is the call into them.
_LOOPS = {
    *("lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate", "trl", "fastai", "ignite"),
    *("composer", "torchtune", "deepspeed", "keras", "catalyst"),
    *("torch/optim", "torch/amp", "torch/distributed", "torch/_dynamo", "torch/_inductor"),
}
# Functions with these names run in C and leave no frame.
_WRITES = {
    *("write", "writelines", "writerow", "writerows", "flush", "close", "fsync", "fdatasync", "print"),
    *("dump", "dumps", "tofile", "send", "sendall", "sendto"),
}
_WAITS = {"sleep", "acquire", "poll", "select", "recv", "input", "wait", "waitpid", "sigwait"}
_CALL = re.compile(r"([A-Za-z_]\w*)\s*\(")

_PACKAGES = ("/site-packages/", "/dist-packages/")
_OWN, _OURS, _PLAIN = "own", "ours", "plain"


class Spot(NamedTuple):
    """A line of the script.

    Attributes:
        work: Kind of work by the library frames below it; None if only the line itself can tell.
        extent: Last line, first and last column (in bytes) of the call in progress, if Python reports it.
    """

    file: str
    line: int
    function: str
    work: str | None
    extent: tuple[int, int, int] | None = None


class FrameReader:
    """Distinguishes a script's own files from those of libraries.

    Args:
        script: The script, which counts as its own wherever it is.
    """

    def __init__(self, script: str) -> None:
        self._kinds: dict[str, str] = {script: _OWN}
        self._extents: dict[tuple[str, int, str, int], tuple[int, int, int] | None] = {}
        self._package = f"{Path(__file__).parent.parent}{os.sep}"
        self._standard = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")}

    def read(self, frame: FrameType | None) -> Spot | None:
        """Return where a thread is; None if nothing of the script is on its stack."""
        found: tuple[CodeType, int, int] | None = None
        works: set[str] = set()
        for _ in range(MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            kind = self._kinds.get(code.co_filename) or self._learn(code.co_filename)
            if kind == _OWN:
                if found is None:
                    found = code, frame.f_lineno, frame.f_lasti
            elif kind == _OURS:
                if code.co_name == "write_out":
                    # The script may replace sys.stdout by its own object; the call of print is the place.
                    works.add(WRITING)
                    found = None
                elif code.co_name == "_waiting" and found is None:
                    works.add(DEVICE)
            elif kind != _PLAIN and found is None:
                works.add(kind)
            frame = frame.f_back
        if found is None:
            return None
        code, line, instruction = found
        work = next((item for item in (WRITING, DEVICE, WAITING, LIBRARY) if item in works), None)
        extent = self._extent(code, instruction) if work is None else None
        return Spot(code.co_filename, line, code.co_name, work, extent)

    def library_around(self, frame: FrameType | None) -> str | None:
        """Return the package of the outermost frame below the script's own code; None if the script calls torch itself.

        Frames that wrap an optimizer's step in their own `step` do not count.
        """
        found = None
        while frame is not None:
            code = frame.f_code
            if (self._kinds.get(code.co_filename) or self._learn(code.co_filename)) == _OWN:
                break
            path = code.co_filename.replace(os.sep, "/")
            package = next((path.rpartition(name)[2] for name in _PACKAGES if name in path), "").partition("/")[0]
            if package not in ("", "torch") and code.co_name != "step":
                found = package.removesuffix(".py")
            frame = frame.f_back
        return found

    def _learn(self, file: str) -> str:
        kind = self._kinds[file] = self._kind(file)
        return kind

    def _kind(self, file: str) -> str:
        if file.startswith("<"):
            return _PLAIN
        if file.startswith(self._package):
            return _OURS
        name = self._name_in_library(file)
        if name is None:
            return _OWN
        parts = name.removesuffix(".py").split("/")
        names = {"/".join(parts[: count + 1]) for count in range(len(parts))} | {name}
        return next((kind for kind, known in _KINDS if names & known), _PLAIN)

    def _name_in_library(self, file: str) -> str | None:
        """Return the path of a file relative to the folder of installed packages; None if it is in none."""
        path = file.replace(os.sep, "/")
        for folder in _PACKAGES:
            if folder in path:
                return path.rpartition(folder)[2]
        roots = {*self._standard}
        torch_file = getattr(sys.modules.get("torch"), "__file__", None)
        if torch_file and file.startswith(f"{Path(torch_file).parent}{os.sep}"):  # built from a checkout
            roots.add(f"{Path(torch_file).parent.parent}{os.sep}")
        return next((path[len(root) :] for root in roots if file.startswith(root)), None)

    def _extent(self, code: CodeType, instruction: int) -> tuple[int, int, int] | None:
        key = (code.co_filename, code.co_firstlineno, code.co_name, instruction)
        if key not in self._extents:
            self._extents[key] = _position(code, instruction)
        return self._extents[key]


_KINDS = ((WRITING, _WRITERS), (WAITING, _WAITERS), (LIBRARY, _LOOPS))


def _position(code: CodeType, instruction: int) -> tuple[int, int, int] | None:
    positions = getattr(code, "co_positions", None)  # from Python 3.11 on
    if positions is None or instruction < 0:
        return None
    _, end_line, column, end_column = next(islice(positions(), instruction // 2, None), (None, None, None, None))
    return None if end_line is None or column is None or end_column is None else (end_line, column, end_column)


def work_at(spot: Spot) -> str:
    """Return the kind of work at a spot; reads source files, so call it after the script has ended."""
    if spot.work is not None:
        return spot.work
    names = called_names(_source(spot))
    return WRITING if names & _WRITES else WAITING if names & _WAITS else COMPUTING


def called_names(text: str) -> set[str]:
    """Return the name that a call expression calls; for other text, all names called in it."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return set(_CALL.findall(text))
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            return {node.func.attr}
        if isinstance(node.func, ast.Name):
            return {node.func.id}
    return set(_CALL.findall(text))


def _source(spot: Spot) -> str:
    if spot.extent is None:
        return linecache.getline(spot.file, spot.line)
    end_line, column, end_column = spot.extent
    lines = [linecache.getline(spot.file, line).encode() for line in range(spot.line, end_line + 1)]
    if not lines:
        return ""
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    return b"".join(lines).decode(errors="replace")
