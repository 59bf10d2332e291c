"""Windows of a few steps in which `torch.profiler` records everything, each written to its own file."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz", ".json", ".json.gz")  # TensorBoard's plugin finds the first two


class ProfilerWindow:
    """A context in which `step()` moves a `torch.profiler` through wait, warm-up and active steps.

    If a file cannot be written, that is a note, never an error: the training matters more than its profile.

    Args:
        path: A `.json` or `.json.gz` file, with a number added after the first window; or a folder.
        device: The device whose kernels are recorded in addition to the host's operators.
        wait: As for `torch.profiler.schedule`.
        warmup: As for `torch.profiler.schedule`.
        active: As for `torch.profiler.schedule`.
        repeat: As for `torch.profiler.schedule`.

    Attributes:
        paths: The files written.
        notes: What went wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: torch.device,
        *,
        wait: int,
        warmup: int,
        active: int,
        repeat: int,
        memory: bool = False,
        shapes: bool = False,
        stacks: bool = False,
    ) -> None:
        assert wait >= 0 and warmup >= 0 and active >= 1 and repeat >= 0, "numbers of steps"  # noqa: PT018
        self.paths: list[Path] = []
        self.notes: list[str] = []
        self._path = Path(path)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat),
            on_trace_ready=self._export,
            profile_memory=memory,
            record_shapes=shapes,
            with_stack=stacks,
        )

    def __enter__(self) -> ProfilerWindow:
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _without_advice():
            self._profile.__exit__(kind, error, trace)

    def step(self) -> None:
        """End a step."""
        with _without_advice():
            self._profile.step()

    def _export(self, profile: Any) -> None:
        path = self._next_path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):  # test whether it is writable, because the recorder fails silently
                pass
            profile.export_chrome_trace(str(path))
            if path.stat().st_size == 0:
                raise OSError("nothing was written")
        except (OSError, RuntimeError) as error:
            self.notes.append(f"the trace {path} was lost: {getattr(error, 'strerror', None) or error}")
            return
        self.paths.append(path)

    def _next_path(self) -> Path:
        number = len(self.paths) + len(self.notes) + 1
        path = self._path
        if path.is_dir() or not path.name.endswith(SUFFIXES):
            rank = f"-rank{dist.get_rank()}" if dist.is_available() and dist.is_initialized() else ""
            return path / f"trace{rank}.{number}.pt.trace.json.gz"
        if number == 1:
            return path
        suffix = next(suffix for suffix in SUFFIXES if path.name.endswith(suffix))
        between = "." if suffix.startswith(".pt") else "-"  # the plugin's naming
        return path.with_name(f"{path.name.removesuffix(suffix)}{between}{number}{suffix}")


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silence torch's advice on accumulating events over cycles: each cycle is written separately here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
