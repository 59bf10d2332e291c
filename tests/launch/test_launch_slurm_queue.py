"""Submitting and following, with answers as SLURM 22.05 gives them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from frameworm.launch.slurm_queue import JobLostError, JobState, QueueError, ask_slurm, follow, parse_job, submit

SHOWN = """\
JobId=7 JobName=quick start
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901758 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}
   NodeList=n[0-1]
   StdErr={log}
   StdOut={log}
   Power=
"""


def shown(state: str, log: Path, reason: str = "None", restarts: int = 0, code: str = "0:0") -> str:
    return SHOWN.format(state=state, reason=reason, restarts=restarts, code=code, log=log)


def answer(stdout: str = "", stderr: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, stdout, stderr)


def test_submit_returns_the_number_or_sbatchs_own_words() -> None:
    asked: list[tuple[list[str], str]] = []

    def ask(command: list[str], text: str) -> subprocess.CompletedProcess[str]:
        asked.append((command, text))
        return answer("17;lab\n")

    assert submit("#!/bin/bash\n", ask) == 17
    assert asked == [(["sbatch", "--parsable"], "#!/bin/bash\n")]
    with pytest.raises(QueueError, match="invalid partition"):
        submit("", lambda command, text: answer("", "sbatch: error: invalid partition", 1))


def test_without_slurm_it_says_where_to_go() -> None:
    with pytest.raises(QueueError, match="login node"):
        ask_slurm(["sbatch-that-does-not-exist"])


def test_states_and_log_until_the_end(tmp_path: Path) -> None:
    log = tmp_path / "quick start-7.out"
    written = ["", "one\n", "two\n", "three\n", "four\n"]
    states = [
        shown("PENDING", log, "Resources"),
        shown("RUNNING", log),
        shown("PENDING", log, "BeginTime", restarts=1),
        shown("RUNNING", log, restarts=1),
        shown("FAILED", log, "NonZeroExitCode", restarts=1, code="3:0"),
    ]
    states_told: list[str] = []
    texts: list[str] = []

    def ask(command: list[str], text: str) -> subprocess.CompletedProcess[str]:
        assert command == ["scontrol", "show", "job", "7"]
        with log.open("a") as file:
            file.write(written.pop(0))
        return answer(states.pop(0))

    end = follow(7, lambda state: states_told.append(str(state)), texts.append, ask, poll_s=0)
    assert states_told == [
        "pending (Resources)",
        "running (n[0-1])",
        "pending, attempt 1 (BeginTime)",
        "running, attempt 1 (n[0-1])",
        "failed, attempt 1 (NonZeroExitCode)",
    ]
    assert "".join(texts) == "one\ntwo\nthree\nfour\n"
    assert (end.exit_code, end.restarts, end.log) == (3, 1, log)


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "75:0", 75),
        ("CANCELLED", "0:15", 143),
        ("CANCELLED", "0:0", 1),
        ("TIMEOUT", "0:0", 1),
        ("NODE_FAIL", "0:0", 1),
    ],
)
def test_exit_codes(state: str, code: str, expected: int) -> None:
    job = parse_job(shown(state, Path("x"), code=code), 7)
    assert (job.ended, job.exit_code) == (True, expected)


def test_patterns_that_newer_versions_leave_in_the_name_of_the_log() -> None:
    assert parse_job(shown("RUNNING", Path("/w/%x-%j.out")), 7).log == Path("/w/quick start-7.out")


def test_a_silent_controller_is_waited_for_and_a_forgotten_job_is_not(tmp_path: Path) -> None:
    answers = [
        answer("", "slurm_load_jobs error: Unable to contact slurm controller", 1),
        answer(shown("COMPLETED", tmp_path / "none")),
    ]
    end = follow(7, lambda state: None, print, lambda command, text: answers.pop(0), poll_s=0)
    assert isinstance(end, JobState)
    with pytest.raises(JobLostError, match="sacct -j 7") as error:
        follow(7, lambda state: None, print, lambda *_: answer("", "Invalid job id specified", 1), poll_s=0)
    assert error.value.exit_code == 3
