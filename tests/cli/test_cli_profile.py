"""`frameworm profile` and `diagnose` as a user meets them: scripts that know nothing of it, and what they leave."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

import frameworm
from frameworm.records.schema import StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import read_steps

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
CONFIGS = EXAMPLES.parent / "configs"

BAD = ("1,1", "1,1,0", "1,1,1,0", "1,1,x", "1,1,1,1,1", "-1,1,1")

Cli = Callable[..., subprocess.CompletedProcess[str]]
LONG_S = 140


def write(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def plainly(script: Path, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The script as Python runs it, for comparison."""
    return subprocess.run(
        [sys.executable, str(script), *args],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
    )


def assert_complete(folder: Path, ranks: int = 1) -> tuple[dict[str, Any], list[StepRecord]]:
    for name in ("summary.json", "summary.txt", "report.html"):
        assert (folder / name).stat().st_size > 0
    assert sorted(RunFolder.open(folder).step_files()) == list(range(ranks))
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["source"] == "attached"
    assert sum(phase["share"] for phase in summary["phases"].values()) == pytest.approx(1.0, abs=0.02)
    return summary, read_steps(folder / "steps-rank0.jsonl")


SURROUNDINGS = """
    import atexit, sys
    atexit.register(lambda: print("last words"))
    print(__name__, __file__, sys.argv, sys.path[0], __spec__, __package__, sys.modules["__main__"].__name__)
    print(sys.excepthook is sys.__excepthook__, "torch" in sys.modules)
    print("to stderr", file=sys.stderr)
    import beside
"""


def test_script_finds_itself_as_under_python(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "beside.py").write_text("print('imported', __name__)\n")
    script = write(folder, SURROUNDINGS)
    relative = script.relative_to(tmp_path)
    plain = plainly(relative, "--out", "x", "y", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    done = cli("profile", "--out", tmp_path / "run", relative, "--out", "x", "y", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert done.stderr.startswith("to stderr\n")
    assert "has not imported torch" in done.stderr
    assert str(tmp_path / "run") in done.stderr


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit('no data')", 1),
        ("raise ValueError('mine') from KeyError('cause')", 1),
        ("def broken(:", 1),
    ],
)
def test_exit_code_and_traceback_are_the_scripts_own(line: str, code: int, cli: Cli, tmp_path: Path) -> None:
    script = write(tmp_path, f"import sys\nprint('began')\n{line}\n")
    plain = plainly(script)
    done = cli("profile", "--out", tmp_path / "run", script)
    assert (done.returncode, done.stdout) == (code, plain.stdout)
    assert done.returncode == plain.returncode
    assert done.stderr.startswith(plain.stderr)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_interrupt_exits_with_130(tmp_path: Path) -> None:
    script = write(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "frameworm", "profile", "--out", str(tmp_path / "run"), str(script)]
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # where tests run in the background, it is ignored
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert stderr.startswith("Traceback")
    assert "frameworm/observe" not in stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give a script or a config"),
        (["--config", "a.yaml", "b.py"], "give a script or a config"),
        (["missing.py"], "missing.py does not exist"),
        (["."], "is a folder"),
        (["--set", "a=b", "missing.py"], "--set changes a config"),
    ],
)
def test_usage_errors(args: list[str], words: str, cli: Cli, tmp_path: Path) -> None:
    done = cli("profile", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_used_folder_is_refused_before_the_script_runs(cli: Cli, tmp_path: Path) -> None:
    script = write(tmp_path, "print('ran')\n")
    done = cli("profile", "--out", tmp_path, script)
    assert (done.returncode, done.stdout) == (2, "")
    assert "not empty" in done.stderr


def test_json_comes_after_the_scripts_output(cli: Cli, tmp_path: Path) -> None:
    script = write(tmp_path, "import atexit\natexit.register(lambda: print('bye'))\nprint('hello')\n")
    done = cli("profile", "--json", script, cwd=tmp_path)
    hello, bye, summary = done.stdout.splitlines()
    assert (hello, bye) == ("hello", "bye")
    record = json.loads(summary)
    assert record["verdict"] == "inconclusive"
    assert Path(record["run_dir"]).parent == tmp_path / "runs"
    assert Path(record["run_dir"]).name.startswith("profile-script-")


@pytest.mark.slow
def test_children_of_the_script_do_not_sum_up(cli: Cli, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import multiprocessing, os, sys
        def work(x):
            return x * 2
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [1, 2]))
            if os.fork() == 0:
                sys.exit(3)
            print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        """,
    )
    done = cli("profile", "--out", tmp_path / "run", script)
    assert (done.returncode, done.stdout) == (0, "[2, 4]\n3\n")
    assert done.stderr.count("verdict") == 1


# A library that asks for torch before it is imported, as many do, does not import it.
TRAINING = """
    import importlib.util, os, sys, time
    assert importlib.util.find_spec("torch") is not None
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(240, 4)), 4), start=1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        if number == 40 and sys.argv[1] == "raise":
            model(torch.ones(1, 3))
        if number == 40 and sys.argv[1] == "_exit":  # once all steps but the last few are on disk, or never will be
            ends, written = time.monotonic() + 60, 0
            while written < 35 and time.monotonic() < ends:
                time.sleep(0.05)
                written = open(sys.argv[2]).read().count("\\n") if os.path.exists(sys.argv[2]) else 0
            os._exit(9)
"""


@pytest.mark.slow
def test_crash_leaves_the_records_up_to_then(cli: Cli, tmp_path: Path) -> None:
    script = write(tmp_path, TRAINING)
    plain = plainly(script, "raise")
    done = cli("profile", "--out", tmp_path / "run", script, "raise", timeout_s=LONG_S)
    assert done.returncode == plain.returncode == 1
    assert done.stderr.startswith(plain.stderr)  # no frame of ours in the traceback
    summary, steps = assert_complete(tmp_path / "run")
    assert summary["status"] == "failed"
    assert summary["steps"] == len(steps) == 40
    assert summary["batch"] == {"micro": 4, "accumulation": 1, "world_size": 1, "global": 4}


@pytest.mark.slow
def test_steps_of_a_process_that_was_ended_can_be_judged(cli: Cli, tmp_path: Path) -> None:
    steps, script = tmp_path / "run" / "steps-rank0.jsonl", write(tmp_path, TRAINING)
    done = cli("profile", "--out", tmp_path / "run", script, "_exit", steps, timeout_s=LONG_S)
    assert done.returncode == 9
    assert len(read_steps(steps)) >= 35
    judged = cli("diagnose", tmp_path / "run", "--json")
    answer = json.loads(judged.stdout)
    assert judged.returncode == (3 if answer["verdict"] == "inconclusive" else 0)
    assert "no summary" in answer["notes"][0]
    assert answer["steps"] >= 35


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "package", "steps", "accumulation", "checkpoints"),
    [
        ("plain_loop", "torch", 120, 1, 3),
        ("accumulation_loop", "torch", 40, 4, 0),
        ("lightning_example", "lightning", 60, 1, 2),
        ("accelerate_example", "accelerate", 80, 2, 0),
        ("trainer_example", "transformers", 80, 1, 0),
        ("trainer_example --accumulation 4 --save", "transformers", 20, 4, 2),
    ],
)
def test_examples_give_the_same_results(
    command: str, package: str, steps: int, accumulation: int, checkpoints: int, cli: Cli, tmp_path: Path
) -> None:
    for needed in (package, "accelerate") if package == "transformers" else (package,):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    name, *args = command.split()
    script = EXAMPLES / f"{name}.py"
    assert "import frameworm" not in script.read_text()
    plain = plainly(script, *args, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    done = cli("profile", "--out", tmp_path / "run", script, *args, timeout_s=LONG_S, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert done.stderr.startswith(plain.stderr)
    for word in ("mean step, by phase", "forward", "verdict", str(tmp_path / "run")):
        assert word in done.stderr
    summary, records = assert_complete(tmp_path / "run")
    assert summary["steps"] == len(records) == steps
    assert summary["batch"]["accumulation"] == accumulation
    assert summary["unseen"] == []
    assert {"data_wait", "forward", "backward", "optimizer"} <= set(summary["phases"])
    assert ("validation" in summary["phases"]) == (name in ("plain_loop", "lightning_example", "trainer_example"))
    assert summary["framework"]["name"] == package
    assert summary["checkpoint"]["count"] == checkpoints
    assert ("checkpoint" in summary["phases"]) == (checkpoints > 0)


BETWEEN = """
    import os, sys, threading, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    out, into = os.pipe()
    file = os.fdopen(into, "w")
    def read_slowly():
        while data := os.read(out, 4096):
            time.sleep(len(data) / 200e3)
    threading.Thread(target=read_slowly, daemon=True).start()
    class Slow(nn.Linear):
        def forward(self, inputs):
            time.sleep(0.02)
            return super().forward(inputs)
    def write(number):
        file.write("-" * 10000)
        file.flush()
    def compute(number):
        end = time.perf_counter() + 0.04
        while time.perf_counter() < end:
            torch.histc(model.weight.detach(), 100)
    def wait(number):
        time.sleep(0.04)
    work = {"write": write, "compute": compute, "wait": wait, "nothing": lambda number: None}[sys.argv[1]]
    torch.manual_seed(0)
    model = Slow(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(240, 4)), 4), start=1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        work(number)
    print(model.weight.tolist())
"""


@pytest.mark.slow
@pytest.mark.timing  # what others take of the cores can cost more than what is planted
@pytest.mark.parametrize(
    ("work", "verdict", "lines"),
    [
        ("write", "logging_stall", (17, 18)),
        ("compute", "logging_stall", (21, 22)),
        ("wait", "inconclusive", (24, 24)),
        ("nothing", "healthy", None),
    ],
)
def test_own_code_between_steps_is_named(
    work: str,
    verdict: str,
    lines: tuple[int, int] | None,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = write(tmp_path, BETWEEN)
    for number in range(3):
        run = tmp_path / f"run-{number}"
        done = cli("profile", "--out", run, script, work, timeout_s=LONG_S)
        assert done.returncode == 0, done.stderr
        summary, _ = assert_complete(run)
        if not any("vary too much" in note for note in summary["notes"]):  # a stall is no fault of the script
            break
    if work == "compute":  # with the script's own result, which no such work changes
        monkeypatch.setattr(sys, "argv", [str(script), "nothing"])
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        runpy.run_path(str(script), run_name="__main__")
        assert done.stdout == capsys.readouterr().out
    assert summary["verdict"] == verdict, done.stderr
    if lines is None:
        return
    place = summary["other_time"]["places"][0]
    assert (place["file"], place["function"]) == ("script.py", work)
    assert lines[0] <= place["line"] <= lines[1]
    assert place["share"] > 0.3
    said = f"script.py:{place['line']} in {work}"
    assert said in " ".join(done.stderr.split())
    assert said in (run / "report.html").read_text()
    if verdict == "logging_stall":
        assert summary["findings"][0]["evidence"]["place"] == said
        assert summary["findings"][0]["evidence"]["work"] == {"write": "writing", "compute": "computing"}[work]
    judged = cli("diagnose", run, "--json")
    assert json.loads(judged.stdout)["verdict"] == verdict


def torchrun(script: Path, folder: Path, *args: str, profile: bool = True) -> subprocess.CompletedProcess[str]:
    """Two ranks to their end, or to a deadline; nothing of them is left behind."""
    from conftest import kill_tree

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "frameworm", "profile", "--out", str(folder)] if profile else []
    process = subprocess.Popen(
        [*command, str(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + LONG_S
        while process.poll() is None and len(family) < 2 and time.monotonic() < deadline:
            family = psutil.Process(process.pid).children()
            time.sleep(0.1)
        stdout, stderr = process.communicate(timeout=LONG_S)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        raise
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_of_torchrun_share_a_folder(tmp_path: Path) -> None:
    script = EXAMPLES / "ddp_example.py"
    plain = torchrun(script, tmp_path / "none", profile=False)
    assert plain.returncode == 0, plain.stderr
    done = torchrun(script, tmp_path / "run", "--slow-rank", "1", "--delay-s", "0.2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert done.stderr.count("mean step, by phase") == 1
    summary, first = assert_complete(tmp_path / "run", ranks=2)
    second = read_steps(tmp_path / "run" / "steps-rank1.jsonl")
    assert len(first) == len(second) == 40
    assert summary["batch"] == {"micro": 32, "accumulation": 1, "world_size": 2, "global": 64}
    assert summary["strategy"] == "ddp"
    # Rank 0 waits for the gradients of rank 1, which sleeps 200 ms before its forward.
    exposed = median(step.phases["communication_exposed"] for step in first[5:-1])
    assert exposed > 0.1
    assert median(step.phases["other"] for step in second) > 0.19
    assert summary["communication"]["slowest_rank"] == 1
    assert summary["communication"]["rank_wait_s"] > 0.1
    assert summary["verdict"] == "straggler"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_failure_of_one_rank_is_torchruns_failure(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, sys
        import torch
        if os.environ["RANK"] == "1":
            sys.exit(5)
        """,
    )
    done = torchrun(script, tmp_path / "run")
    assert done.returncode == 1
    assert "exitcode  : 5" in done.stderr


# Two ranks in one process group; rank 1 sleeps, which rank 0 waits for. Clipping is bound by name when the child
# imports the script, before the child gets its work.
OWN_RANKS = """
    import sys, time
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.nn.utils import clip_grad_norm_
    from torch.utils.data import DataLoader, TensorDataset


    def work(rank, meeting):
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + meeting)
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (inputs,) in DataLoader(TensorDataset(torch.ones(80, 8)), 4):
            time.sleep(0.2 * rank)
            optimizer.zero_grad()
            model(inputs).sum().backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        dist.destroy_process_group()


    if __name__ == "__main__":
        method, meeting = sys.argv[1:]
        if method == "torch":
            mp.spawn(work, (meeting,), nprocs=2)
        else:
            ranks = [mp.get_context(method).Process(target=work, args=(rank, meeting)) for rank in range(2)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
        print("trained")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["torch", "fork", "forkserver"])  # torch's own spawns
def test_ranks_that_the_script_starts_share_a_folder(method: str, cli: Cli, tmp_path: Path) -> None:
    script = write(tmp_path, OWN_RANKS)
    done = cli("profile", "--out", tmp_path / "run", script, method, tmp_path / "meeting", timeout_s=LONG_S)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    summary, first = assert_complete(tmp_path / "run", ranks=2)
    second = read_steps(tmp_path / "run" / "steps-rank1.jsonl")
    assert len(first) == len(second) == summary["steps"] == 20
    assert summary["status"] == "completed"
    assert summary["strategy"] == "ddp"
    assert summary["parameters"] == 18
    assert summary["batch"] == {"micro": 4, "accumulation": 1, "world_size": 2, "global": 8}
    assert summary["communication"]["bytes_per_step"] == 72
    assert summary["communication"]["slowest_rank"] == 1
    assert summary["unseen"] == []
    assert summary["environment"]["torch"]
    assert summary["wall_s"] > sum(step.step_s for step in second) > 19 * 0.2


@pytest.mark.slow
def test_processes_that_train_apart_are_counted(cli: Cli, tmp_path: Path) -> None:
    """Without a process group, as in Hogwild training, the first process to train is the one observed."""
    script = write(
        tmp_path,
        """
        import torch
        import torch.multiprocessing as mp
        from torch import nn


        def work(steps):
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
            if steps == 13:
                raise ValueError("mine")


        if __name__ == "__main__":
            for steps in (12, 13):
                process = mp.get_context("spawn").Process(target=work, args=(steps,))
                process.start()
                process.join()
        """,
    )
    done = cli("profile", "--out", tmp_path / "run", script, timeout_s=LONG_S)
    assert done.returncode == 0
    traceback = done.stderr.partition("ValueError: mine")[0]  # the child's, none of our frames in it
    assert f'File "{script}", line 14, in work' in traceback
    assert str(Path(frameworm.__file__).parent) not in traceback
    summary, steps = assert_complete(tmp_path / "run")
    assert len(steps) == summary["steps"] == 12
    assert summary["batch"]["world_size"] == 1
    assert any(note.startswith("1 more process trained") for note in summary["notes"])


def test_ranks_that_cannot_be_followed_are_for_torchrun(cli: Cli, tmp_path: Path) -> None:
    script = write(tmp_path, "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'pass'], check=True)\n")
    done = cli("profile", "--out", tmp_path / "run", script, "--lr", "a b")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    notes = " ".join(summary["notes"])
    assert f"torchrun --nproc-per-node N --no-python frameworm profile {script} --lr 'a b'" in notes
    assert "train longer" not in notes
    assert "train longer" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [("--trace-schedule", "1,1,1"), ("--operators", "3"), *(("--trace", "--trace-schedule", bad) for bad in BAD)],
)
def test_a_schedule_that_is_none(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli("profile", *words, EXAMPLES / "plain_loop.py")
    assert done.returncode == 2
    assert "--trace" in done.stderr


@pytest.mark.slow
def test_options_of_a_script_run(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "profile",
        *("--trace", "--trace-schedule", "10,2,5", "--operators", "3"),
        *("--nvtx", "--steps", "30", "--out", tmp_path / "run"),
        EXAMPLES / "plain_loop.py",
        *("--workers", "1", "--epochs", "1"),
        timeout_s=LONG_S,
    )
    assert done.returncode == 0, done.stderr
    assert "nsys profile" in done.stderr
    summary, steps = assert_complete(tmp_path / "run")
    assert summary["steps"] == 30
    assert [step.step for step in steps] == [*range(1, 11), *range(18, 31)]  # without those that were traced
    assert (tmp_path / "run" / "trace-rank0.pt.trace.json.gz").exists()
    assert any("first 30 steps" in note for note in summary["notes"])
    assert summary["environment"]["num_workers"] == 1
    trace = cli("diagnose", tmp_path / "run" / "trace-rank0.pt.trace.json.gz")
    assert trace.returncode == 0
    assert "operators by host time" in trace.stdout
    stored = json.loads((tmp_path / "run" / "trace-rank0-summary.json").read_text())
    assert len(stored["operators_by_cpu"]) == 3


@pytest.mark.slow
def test_profile_of_a_config_and_its_diagnosis(cli: Cli, tmp_path: Path) -> None:
    small = ("model.d_model=16", "model.dim_feedforward=32", "data.limit=1600")
    done = cli(
        "profile",
        *("--config", CONFIGS / "quickstart.yaml", "--steps", "25", "--budget", "6s"),
        *(part for setting in small for part in ("--set", setting)),
        *("--out", tmp_path / "run", "--json"),
        timeout_s=LONG_S,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 25
    assert summary["source"] == "engine"
    assert "mean step, by phase" in done.stderr
    judged = cli("diagnose", tmp_path / "run", "--json")
    answer = json.loads(judged.stdout)
    assert answer["verdict"] == summary["verdict"]
    for finding in answer["findings"]:
        assert {"code", "severity", "share", "evidence", "remedies", "expected_speedup"} <= set(finding)
    assert judged.returncode == (3 if answer["verdict"] == "inconclusive" else 0)


def test_diagnose_refuses_what_is_no_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    refused = {tmp_path / "missing": "does not exist", tmp_path: "is not a run", tmp_path / "no.json": "no.json"}
    for path, word in refused.items():
        done = cli("diagnose", path)
        assert done.returncode == 2
        assert word in done.stderr
        assert "Traceback" not in done.stderr
