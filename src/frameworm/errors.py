"""Every exception a user can meet.

Each message says what was wrong, where, and what to do. The command line prints only the message and exits with
`exit_code`; a traceback means a bug in frameworm. `FramewormError` is the base of all errors except Ctrl-C
(`TrainingInterruptedError`).
"""

from __future__ import annotations


class FramewormError(Exception):
    """Base of all errors frameworm raises on purpose."""

    exit_code = 2
    may_heal = False  # whether starting the same processes again may succeed


class ConfigError(FramewormError, ValueError):
    """A setting is unknown, has the wrong type or conflicts with another setting."""


class DataError(FramewormError, ValueError):
    """A data set is missing, malformed or empty."""


class EnvironmentSetupError(FramewormError, RuntimeError):
    """The machine, the environment variables or the other processes do not fit the request."""

    may_heal = True


class DeviceError(EnvironmentSetupError):
    """The requested device does not exist."""

    may_heal = False


class TorchVersionError(EnvironmentSetupError):
    """The installed torch lacks something private that frameworm uses."""

    may_heal = False


class LossError(FramewormError, TypeError):
    """No loss can be derived from the model and the batch."""


class ModelError(FramewormError, ValueError):
    """The model cannot be trained in the requested way."""


class StateError(FramewormError, RuntimeError):
    """A call was made at a time when it cannot take effect."""


class CheckpointError(FramewormError, RuntimeError):
    """A checkpoint cannot be read, or does not belong to this model or run."""


class NetworkModelError(FramewormError, ValueError):
    """A measured network is missing, malformed, or lacks what was requested."""


class RunFolderError(FramewormError, RuntimeError):
    """A run folder is missing, unreadable, or would be overwritten."""


class StorageError(FramewormError, RuntimeError):
    """Object storage refuses a request or does not answer.

    Attributes:
        unreachable: There was no answer; the same request may succeed later.
        missing: The requested object does not exist.
    """

    def __init__(self, message: str, *, unreachable: bool = False, missing: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        self.missing = missing


class BaselineError(FramewormError, ValueError):
    """A baseline cannot be read, or measures different work from the run it is compared with."""


class MissingPackageError(FramewormError, ImportError):
    """An optional package is needed; the message contains the install command."""


class TrainingFailedError(FramewormError, RuntimeError):
    """Training ended with an error in one of its processes."""

    exit_code = 1


class StuckError(TrainingFailedError):
    """Some ranks waited for others that never arrived."""

    may_heal = True


class BadNumbersError(TrainingFailedError):
    """Losses or gradients were not finite, or far too large, for too many steps."""


class OutOfMemoryError(TrainingFailedError):
    """A step needed more memory than there is; the cause is torch's own error.

    Attributes:
        rank: Rank that ran out of memory; None if it is unknown.
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
    """Training was stopped by Ctrl-C and saved its state first; `record` is the run so far.

    Like every Ctrl-C it is not an `Exception`, so code that catches errors does not swallow it.
    """

    exit_code = 130
    may_heal = False

    def __init__(self, message: str, record: object = None) -> None:
        super().__init__(message)
        self.record = record


class TrainingPreemptedError(FramewormError, RuntimeError):
    """Training was stopped by SIGTERM and saved its state first; `record` is the run so far."""

    exit_code = 75

    def __init__(self, message: str, record: object = None) -> None:
        super().__init__(message)
        self.record = record


class MemoryLimitError(TrainingPreemptedError):
    """Training saved its state and stopped because its memory grew beyond memory.max_memory_percent."""
