"""Submits a batch script and follows the job: its states, its log, its end."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from frameworm.errors import EnvironmentSetupError

Ask = Callable[[list[str], str], "subprocess.CompletedProcess[str]"]

POLL_S = 1.0
_COMMAND_LIMIT_S = 60.0
# A restarting controller does not answer for a while; that does not affect the job.
_SILENCE_LIMIT_S = 120.0
_LAST_READ_S = 1.0

_ENDED = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)


class JobState(NamedTuple):
    """What the controller knows about a job."""

    state: str
    reason: str
    nodes: str
    exit_status: int  # as returned by the script
    signal: int  # that ended the script; 0: none
    restarts: int
    log: Path | None

    @property
    def ended(self) -> bool:
        """True if the job is over."""
        return self.state in _ENDED

    @property
    def exit_code(self) -> int:
        """The job's exit code as a shell would report it; never 0 unless the job completed."""
        if self.exit_status:
            return self.exit_status
        if self.signal:
            return 128 + self.signal
        return 0 if self.state == "COMPLETED" else 1

    def __str__(self) -> str:
        """Describe the state in a few words."""
        details = self.nodes if self.state == "RUNNING" else self.reason
        restarts = f", attempt {self.restarts}" if self.restarts else ""
        return f"{self.state.lower()}{restarts}" + (f" ({details})" if details not in ("", "None", "(null)") else "")


class QueueError(EnvironmentSetupError):
    """SLURM's commands are missing or refuse the request."""


class JobLostError(EnvironmentSetupError):
    """The controller no longer knows the job, so its outcome is unknown."""

    exit_code = 3


def ask_slurm(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands; the default of `Ask`."""
    try:
        # In its own session, so that Ctrl-C reaches only us and not a command half-way through.
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, start_new_session=True
        )
    except FileNotFoundError:
        raise QueueError(
            f"{command[0]} is not here: run this where SLURM's commands are, such as a login node"
        ) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {_COMMAND_LIMIT_S:.0f} s")


def submit(script: str, ask: Ask = ask_slurm) -> int:
    """Submit a batch script from the current folder.

    Args:
        script: The script's text.
        ask: Runs a SLURM command with a text on its standard input.

    Returns:
        The job's number.

    Raises:
        QueueError: sbatch is missing or refuses; the message contains its output.
    """
    answer = ask(["sbatch", "--parsable"], script)
    number = re.match(r"\d+", answer.stdout)
    if answer.returncode != 0 or number is None:
        said = (answer.stderr or answer.stdout).strip()
        raise QueueError(f"sbatch refused the job: {said}")
    return int(number.group())


def parse_job(text: str, job_id: int) -> JobState:
    """Parse the output of `scontrol show job`."""

    def find(pattern: str) -> str:
        match = re.search(pattern, text, re.MULTILINE)
        return match.group(1) if match else ""

    log = find(r"^\s*StdOut=(.*)$").replace("%x", find(r"\bJobName=(.*)$")).replace("%j", str(job_id))
    status, _, signal = (find(r"\bExitCode=(\d+:\d+)") or "0:0").partition(":")
    return JobState(
        state=find(r"\bJobState=(\w+)"),
        reason=find(r"\bReason=(.*?)(?: Dependency=|$)"),
        nodes=find(r"^\s*NodeList=(.*)$"),
        exit_status=int(status),
        signal=int(signal),
        restarts=int(find(r"\bRestarts=(\d+)") or 0),
        log=Path(log) if log else None,
    )


def follow(
    job_id: int,
    on_state: Callable[[JobState], None],
    on_text: Callable[[str], None],
    ask: Ask = ask_slurm,
    poll_s: float = POLL_S,
) -> JobState:
    """Report a job's states and its log until it ends; being requeued does not end it.

    Args:
        job_id: The job.
        on_state: Called with each new state.
        on_text: Called with each addition to the job's log.
        ask: Runs a SLURM command.
        poll_s: Seconds between polls.

    Returns:
        The last state.

    Raises:
        JobLostError: The controller does not know the job, or has been silent for too long.
    """
    told = ""
    position = 0
    heard = time.monotonic()
    while True:
        answer = ask(["scontrol", "show", "job", str(job_id)], "")
        if answer.returncode != 0:
            if "Invalid job id" in answer.stderr or time.monotonic() - heard > _SILENCE_LIMIT_S:
                raise JobLostError(
                    f"job {job_id}: the controller says {answer.stderr.strip() or 'nothing'}; how it ended is unknown, "
                    f"see its log, or ask with: sacct -j {job_id}"
                )
            time.sleep(poll_s)
            continue
        heard = time.monotonic()
        job = parse_job(answer.stdout, job_id)
        if str(job) != told:
            told = str(job)
            on_state(job)
        if job.ended:
            time.sleep(min(poll_s, _LAST_READ_S))  # the last lines may still be on their way from another machine
        position = _read_on(job.log, position, on_text)
        if job.ended:
            return job
        time.sleep(poll_s)


def _read_on(log: Path | None, position: int, on_text: Callable[[str], None]) -> int:
    """Pass on what was added to a log; one that does not exist, or not on this machine, counts as empty."""
    if log is None:
        return position
    try:
        with log.open("rb") as file:
            file.seek(position)
            added = file.read()
    except OSError:
        return position
    if added:
        on_text(added.decode("utf-8", errors="replace"))
    return position + len(added)
