"""Every exception a user can meet.

Each message says what was wrong, where, and what to do. The command line prints the message alone and exits with
`exit_code`; a traceback is for faults of frameworm itself. `FramewormError` is the base of all errors; Ctrl-C is no
error (`TrainingInterruptedError`).
"""

from __future__ import annotations


class FramewormError(Exception):
    """Base of all errors frameworm raises on purpose."""

    exit_code = 2
    may_heal = False  # whether the same processes, started once more, may fare better


class ConfigError(FramewormError, ValueError):
    """A setting is unknown, has the wrong type or cannot be combined with another."""


class DataError(FramewormError, ValueError):
    """A data set is missing, malformed or empty."""


class EnvironmentSetupError(FramewormError, RuntimeError):
    """The machine, the variables around the process or the other processes do not fit what was asked for."""

    may_heal = True


class DeviceError(EnvironmentSetupError):
    """A device was asked for that is not there."""

    may_heal = False


class LossError(FramewormError, TypeError):
    """The loss of a batch cannot be derived from what the model and the batch give."""


class ModelError(FramewormError, ValueError):
    """The model cannot be trained in the way asked for."""


class StateError(FramewormError, RuntimeError):
    """A call came at a moment when it can no longer take effect."""


class CheckpointError(FramewormError, RuntimeError):
    """A checkpoint cannot be read, or belongs to something else."""


class NetworkModelError(FramewormError, ValueError):
    """A measured network is missing, malformed, or does not hold what is asked of it."""


class RunFolderError(FramewormError, RuntimeError):
    """A run folder is missing, unreadable, or would be written over."""


class StorageError(FramewormError, RuntimeError):
    """Object storage refuses a request, or does not answer.

    Attributes:
        unreachable: No answer: the same request may succeed later.
        missing: What was asked for does not exist.
    """

    def __init__(self, message: str, *, unreachable: bool = False, missing: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        self.missing = missing


class BaselineError(FramewormError, ValueError):
    """A baseline cannot be read, or is of other work than what is compared with it."""


class MissingPackageError(FramewormError, ImportError):
    """An optional package is needed; the message holds the install line."""


class TrainingFailedError(FramewormError, RuntimeError):
    """Training ended with an error in one of its processes."""

    exit_code = 1


class StuckError(TrainingFailedError):
    """Some ranks waited for others that did not come."""

    may_heal = True


class BadNumbersError(TrainingFailedError):
    """Losses or gradients were not finite, or far too large, for too many steps."""


class OutOfMemoryError(TrainingFailedError):
    """A step needed more memory than there is; the cause is torch's own error.

    Attributes:
        rank: Whose memory it was; None when another rank's end was seen and not its place.
        step: Number of the step.
        phase: What the step was doing.
        held: Bytes by holder: parameters, gradients, optimizer_state, rest.
        advice: Settings that would fit, cheapest first.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        phase: str | None = None,
        held: dict[str, int] | None = None,
        advice: list[str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.phase = phase
        self.held = held or {}
        self.advice = advice or []


class TrainingInterruptedError(KeyboardInterrupt):
    """Training was stopped by Ctrl-C after saving its state; `record` is the run so far.

    As every Ctrl-C it is no `Exception`: code that goes on after errors does not go on after this.
    """

    exit_code = 130
    may_heal = False

    def __init__(self, message: str, record: object = None) -> None:
        super().__init__(message)
        self.record = record


class TrainingPreemptedError(FramewormError, RuntimeError):
    """Training was told to stop by SIGTERM after saving its state; `record` is the run so far."""

    exit_code = 75

    def __init__(self, message: str, record: object = None) -> None:
        super().__init__(message)
        self.record = record


class MemoryLimitError(TrainingPreemptedError):
    """Training stopped itself after saving its state: it came to hold more than memory.max_memory_percent."""
