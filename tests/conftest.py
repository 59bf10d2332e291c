"""Fixtures shared by all tests: ranks of a process group, and the command line, each with a deadline."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import hypothesis
import psutil
import pytest

# An example has no deadline: a busy machine may keep a process from computing for longer than any that tells something.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make test-slow` run a sample of what `make campaign` runs whole."""
    text = "of tests marked slow, run at most this many cases of each function, but all where slow(cases='all') is said"
    parser.addoption("--slow-cases", type=int, metavar="N", help=text)
    text = "of the functions marked slow, run this part, such as 2/3; the parts together are all of them"
    parser.addoption("--slow-part", metavar="K/N", default="1/1", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases beyond the sample, and other parts; pytest counts them in its last line."""
    most = config.getoption("--slow-cases")
    part, _, parts = config.getoption("--slow-part").partition("/")
    kept, left, seen = [], [], Counter[str]()
    for item in items:
        if item.get_closest_marker("timing") is not None:
            item.add_marker(pytest.mark.flaky(reruns=2))  # what else the machine does may delay one try, not all three
        function = item.nodeid.partition("[")[0]
        slow = item.get_closest_marker("slow")
        seen[function] += slow is not None and slow.kwargs.get("cases") != "all"
        elsewhere = slow is not None and zlib.crc32(function.encode()) % int(parts) != int(part) - 1
        (left if elsewhere or (most is not None and seen[function] > most) else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_configure() -> None:
    """A shell that starts tests in the background has them, and all they start, ignore Ctrl-C; some tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def untouched_log() -> None:
    """The command line, called within this process, sends the log to the screen only, and may leave it so."""
    logging.disable(logging.NOTSET)
    log = logging.getLogger("frameworm")
    log.handlers.clear()
    log.setLevel(logging.NOTSET)
    log.propagate, log.disabled = True, False


@pytest.fixture(autouse=True)
def switches_as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU test that forbade waiting for the device, or whose trainer chose TF32, does not take others along."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.benchmark = False


@pytest.fixture(autouse=True)
def no_group_left_behind() -> Iterator[None]:
    """A process group that a trainer made in this process does not reach the next test."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Fail the test that left a thread of ours running, not one that comes after it."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("frameworm-") and thread not in before]
    for thread in left:
        thread.join(20.0)
    assert not [thread.name for thread in left if thread.is_alive()]


@pytest.fixture(autouse=True)
def dropout_left_on() -> Iterator[None]:
    """Fail the test that left dropout switched off, not one that comes after it."""
    yield
    dropout = sys.modules.get("frameworm.numerics.dropout")
    assert dropout is None or not dropout.dropout_is_off()


@pytest.fixture
def left_behind() -> Callable[[], list[int]]:
    """Tells which processes below this one lead a session of their own, as trials do, and began in this test.

    Servers that fixtures of the whole session keep are older.
    """

    def leaders() -> set[int]:
        found = set()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if child.status() != psutil.STATUS_ZOMBIE and os.getsid(child.pid) == child.pid:
                    found.add(child.pid)
        return found

    before = leaders()
    return lambda: sorted(leaders() - before)


def kill_tree(pid: int) -> None:
    """End a process and all that it started, also those that left its process group."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)


def _run_rank(
    function: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], environ: dict[str, str], out: str
) -> None:
    """Body of one rank; leaves (succeeded, result or traceback) in a file."""
    os.environ.clear()
    os.environ.update(environ)
    try:
        import torch

        from frameworm.launch.process_group import cleanup, setup_ddp

        torch.set_num_threads(1)
        setup_ddp(rank, world_size, backend="gloo", timeout_s=120)
        outcome = (True, function(rank, world_size, *args))
        cleanup()
    except BaseException:
        outcome = (False, traceback.format_exc())
    draft = Path(f"{out}.draft")
    draft.write_bytes(pickle.dumps(outcome))
    draft.replace(out)
    if not outcome[0]:
        # Without the regular end: threads of a collective that nobody will answer would hold the process.
        os._exit(1)


@pytest.fixture(scope="session")
def _rank_context() -> multiprocessing.context.BaseContext:
    """Ranks fork from a server that has imported torch but run nothing of it: quick to start, no threads."""
    import torch

    context = multiprocessing.get_context("forkserver")
    preloaded = ["pytest", "torch", "frameworm.launch.process_group"]
    if not torch.cuda.is_available():  # the compiler may ask for a GPU: not to be forked
        preloaded += ["frameworm.distributed", "frameworm.engine.run", "frameworm.parallel.sharded", "torch._dynamo"]
    context.set_forkserver_preload(preloaded)
    return context


@pytest.fixture
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU triton's interpreter takes tensors of the CPU; see triton_here.py."""
    import torch

    from triton_here import INTERPRETED

    if INTERPRETED:
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        properties = SimpleNamespace(multi_processor_count=2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture
def run_ranks(_rank_context: Any) -> Iterator[Callable[..., list[Any]]]:
    """Run a top-level function as `function(rank, world_size, *args)` in processes that form a gloo group."""
    started: list[BaseProcess] = []

    def run(
        function: Callable[..., Any],
        world_size: int = 2,
        args: tuple[Any, ...] = (),
        timeout_s: float = 120,
        grace_s: float = 2,
    ) -> list[Any]:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"rank-{rank}" for rank in range(world_size)]
            processes = [
                _rank_context.Process(target=_run_rank, args=(function, rank, world_size, args, environ, str(file)))
                for rank, file in enumerate(files)
            ]
            started.extend(processes)
            for process in processes:
                process.start()
            _wait(processes, time.monotonic() + timeout_s, grace_s)
            late = [rank for rank, process in enumerate(processes) if process.is_alive()]
            _kill(processes)
            outcomes = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
        failed = [
            f"rank {rank} failed:\n{outcome[1]}" for rank, outcome in enumerate(outcomes) if outcome and not outcome[0]
        ]
        if failed:
            raise AssertionError("\n".join(failed))
        if late:
            raise AssertionError(f"ranks {late} were still running after {timeout_s} s")
        for rank, outcome in enumerate(outcomes):
            if outcome is None:
                raise AssertionError(f"rank {rank} ended without a result (exit code {processes[rank].exitcode})")
        return [outcome[1] for outcome in outcomes if outcome is not None]

    yield run
    _kill(started)


@pytest.fixture(scope="session")
def pair(_rank_context: Any) -> Iterator[Any]:
    """A `RankPair`: two gloo ranks that serve one call after another; they start with the first."""
    from rank_pair import RankPair

    with RankPair(_rank_context) as made:
        yield made


def _wait(processes: list[BaseProcess], deadline: float, grace_s: float) -> None:
    """Until all have ended, one has failed (the others then get a few seconds), or time is up."""
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + grace_s)
        time.sleep(0.02)


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.pid is not None and process.is_alive():
            kill_tree(process.pid)
        if process.pid is not None:
            process.join(10)


def _lab_script(name: str) -> ModuleType:
    """A lab of `scripts/` as a module; skips where it cannot be built."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    reason = module.available()
    if reason is not None:
        pytest.skip(f"no {name.replace('_', ' ')} here: {reason}")
    return module


@pytest.fixture(scope="session")
def object_storage() -> Iterator[Any]:
    """An S3 server on this machine, from benchmarks/object_server.py; also `.module`, for its proxy."""
    path = Path(__file__).parents[1] / "benchmarks" / "object_server.py"
    spec = importlib.util.spec_from_file_location("object_server", path)
    assert spec is not None
    assert spec.loader is not None
    pytest.importorskip("moto", reason="an S3 server needs moto[server]")
    pytest.importorskip("s3fs")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    with module.ObjectServer() as server:
        server.module = module
        yield server


@pytest.fixture
def s3(object_storage: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A prefix on that server for one test alone: s3://bucket/<its name>."""
    for name, value in object_storage.variables().items():
        monkeypatch.setenv(name, value)
    return f"s3://{object_storage.module.BUCKET}/{request.node.name.partition('[')[0]}-{os.getpid()}-{id(request)}"


@pytest.fixture(scope="session")
def network_lab_script() -> ModuleType:
    """`scripts/network_lab.py` as a module; skips where no lab can be built."""
    return _lab_script("network_lab")


@pytest.fixture
def network_lab(network_lab_script: ModuleType) -> Iterator[Callable[..., Any]]:
    """Build hosts with limited links: `network_lab(hosts=2, rate="100mbit")` is a lab that the test's end removes."""
    with contextlib.ExitStack() as labs:
        yield lambda *args, **settings: labs.enter_context(network_lab_script.NetworkLab(*args, **settings))


@pytest.fixture(scope="session")
def slurm_lab_script() -> ModuleType:
    """`scripts/slurm_lab.py` as a module; skips where SLURM is not installed."""
    return _lab_script("slurm_lab")


@pytest.fixture(scope="session")
def slurm_lab(slurm_lab_script: ModuleType) -> Iterator[Any]:
    """A SLURM of two nodes, n0 and n1, that runs until the session ends."""
    with slurm_lab_script.SlurmLab(nodes=2) as lab:
        yield lab


@pytest.fixture(scope="session")
def data_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token caches of this session; nothing is left in the user's cache folder."""
    return tmp_path_factory.mktemp("data-cache")


@pytest.fixture
def cli(data_cache_dir: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m frameworm ARGS...` to its end or a deadline; `env` adds variables, None as a value removes one."""

    def run(
        *args: str | Path,
        env: dict[str, str | None] | None = None,
        timeout_s: float = 120,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        environ: dict[str, str | None] = {
            **os.environ,
            "FRAMEWORM_DATA_CACHE_DIR": str(data_cache_dir),
            "TERM": "dumb",
            "COLUMNS": "120",
            **(env or {}),
        }
        command = [sys.executable, "-m", "frameworm", *(str(argument) for argument in args)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={name: value for name, value in environ.items() if value is not None},
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            stdout, stderr = process.communicate()
            raise AssertionError(
                f"{' '.join(command)} was still running after {timeout_s} s\nstdout:\n{stdout}\nstderr:\n{stderr}"
            ) from None
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    return run
