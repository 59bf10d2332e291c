from __future__ import annotations

import pytest
import torch.distributed as dist

from frameworm.errors import DataError, TrainingFailedError, TrainingPreemptedError
from frameworm.launch.failures import WorkerFailure, first_cause, is_consequence, worker_errors, worker_failure

LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:38805."


@pytest.mark.parametrize(
    ("failures", "text", "code"),
    [
        # The earlier of two, to the fraction of a second.
        (
            [
                WorkerFailure(0, 1, 10.9, message="ValueError: b", time=10.6),
                WorkerFailure(1, 2, 10.9, message="a", time=10.5),
            ],
            "rank 1: a",
            2,
        ),
        # A lost connection is written down before the rank that caused it gets to its own note.
        (
            [
                WorkerFailure(0, 1, 10.9, message="RuntimeError: lost", time=10.4, consequence=True),
                WorkerFailure(1, 1, 10.9, message="ValueError: b", time=10.5),
            ],
            "rank 1: ValueError: b",
            1,
        ),
        # A sudden death is seen late, and leaves no note.
        (
            [
                WorkerFailure(0, 1, 10.9, message="RuntimeError: odd", time=10.8),
                WorkerFailure(1, -11, 10.9),
            ],
            "rank 1: killed by SIGSEGV",
            1,
        ),
        # Those whom the launcher killed itself are never the cause.
        (
            [
                WorkerFailure(0, -9, 10.9, stopped_by_launcher=True),
                WorkerFailure(1, 75, 10.9, message="stopped", time=11, stopped_by_launcher=True, consequence=True),
                WorkerFailure(2, 3, 10.9),
            ],
            "rank 2: ended with exit code 3",
            3,
        ),
        # A peer that fell over the broken connection ended first, and the launcher stopped the cause on its way out.
        (
            [
                WorkerFailure(0, 1, 10.9, message="RuntimeError: lost", time=10.4, consequence=True),
                WorkerFailure(1, -15, 10.9, message="no data", meant_to_exit=2, time=10.5, stopped_by_launcher=True),
            ],
            "rank 1: no data",
            2,
        ),
        # All were told to stop and saved: the message and code of that.
        ([WorkerFailure(0, 75, 10.9), WorkerFailure(1, 75, 10.9)], None, 75),
        ([WorkerFailure(0, 75, 10.9, message="saved", time=11, consequence=True)], "rank 0: saved", 75),
    ],
)
def test_the_first_cause_is_told_from_what_followed(failures: list[WorkerFailure], text: str | None, code: int) -> None:
    for order in (failures, failures[::-1]):
        cause = first_cause(order)
        assert (cause.text, cause.exit_code) == (text, code)


def test_what_another_rank_causes_is_recognised() -> None:
    assert is_consequence(RuntimeError(LOST))
    assert is_consequence(dist.DistBackendError("NCCL error"))
    assert is_consequence(TrainingPreemptedError("saved"))
    assert not is_consequence(RuntimeError("shape mismatch"))
    assert not is_consequence(DataError(LOST))
    wrapped = TrainingFailedError("training failed")
    wrapped.__cause__ = RuntimeError(LOST)
    assert is_consequence(wrapped)


def test_notes_of_bare_torch_workers_are_understood() -> None:
    note = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "...", "timestamp": "12"}}}
    failure = worker_failure(1, 1, note, stopped_by_launcher=False, observed=13.0)
    assert (failure.message, failure.time, failure.consequence) == ("ValueError: x", 12.0, False)
    silent = worker_failure(1, -9, {"message": "<NONE>"}, stopped_by_launcher=False, observed=13.0)
    assert (silent.message, silent.time) == (None, None)


def test_without_a_launcher_errors_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(DataError, match="gone"), worker_errors():
        raise DataError("gone")
