"""A tuner that is killed leaves no trial behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from frameworm.attach.isolation import why_not
from frameworm.attach.trial.job import ScriptJob
from frameworm.tune.scripts.process import ScriptError, ScriptProcess

DEADLINE_S = 120.0
TUNER = """
import sys, time
from pathlib import Path
from frameworm.attach.trial.job import ScriptJob
from frameworm.tune.scripts.process import ScriptProcess

folder, isolated, ranks = Path(sys.argv[1]), sys.argv[2] == "True", int(sys.argv[3])
job = ScriptJob(str(folder / "script.py"), [], folder=str(folder), name="x", isolated=isolated, ranks=[{}] * ranks)
ScriptProcess(job, folder / "processes", time.monotonic() + 600)
time.sleep(600)
"""


def trials_of(folder: Path) -> list[psutil.Process]:
    path = str(folder / "processes" / "x.json")
    return [item for item in psutil.process_iter(["cmdline"]) if path in (item.info["cmdline"] or [])]


def wait_for(folder: Path, least: int, most: int) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not least <= len(trials_of(folder)) <= most:
        assert time.monotonic() < ends, trials_of(folder)
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("isolated", "ranks", "processes"), [(True, 0, 3), (False, 0, 1), (False, 2, 3)])
def test_trials_die_with_a_tuner_that_is_killed(tmp_path: Path, isolated: bool, ranks: int, processes: int) -> None:
    if isolated and (reason := why_not()) is not None:
        pytest.skip(reason)
    (tmp_path / "script.py").write_text("import time\ntime.sleep(600)\n")
    for rank in range(ranks):
        (tmp_path / f"rank{rank}").mkdir()
    with subprocess.Popen([sys.executable, "-c", TUNER, str(tmp_path), str(isolated), str(ranks)]) as tuner:
        try:
            wait_for(tmp_path, processes, processes)
        finally:
            tuner.kill()
    wait_for(tmp_path, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [True, False])
def test_a_script_that_waits_for_a_program_that_trains_is_told_at_once(tmp_path: Path, isolated: bool) -> None:
    if isolated and (reason := why_not()) is not None:
        pytest.skip(reason)
    (tmp_path / "worker.py").write_text("import torch\nwhile True:\n    torch.ones(64, 64) @ torch.ones(64, 64)\n")
    (tmp_path / "script.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'worker.py'], cwd=sys.path[0], check=True)\n"
    )
    job = ScriptJob(str(tmp_path / "script.py"), [], folder=str(tmp_path), isolated=isolated)
    told = pytest.raises(ScriptError, match=r"waits for a program that it has started, .* worker\.py; tune that one")
    with ScriptProcess(job, tmp_path / "processes", time.monotonic() + 2 * DEADLINE_S) as process, told:
        process.stand()
