"""What runs after `isolate` sees the real machine and leaves nothing behind: no file, no process, no connection."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from frameworm.attach.isolation import why_not

SOURCE = Path(__file__).resolve().parents[2] / "src"
DEADLINE_S = 120.0
NOBODY = 65534
REFUSED = why_not()
pytestmark = pytest.mark.skipif(REFUSED is not None, reason=f"isolation does not work here: {REFUSED}")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")

START = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {source!r})
from frameworm.attach.isolation import isolate

{script}

if __name__ == "__main__":
    isolate([Path(path) for path in {shared!r}], network={network})
    main()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="isolation-"))
    path.chmod(0o755)
    yield path
    mounts = Path("/proc/self/mountinfo").read_text()
    shutil.rmtree(path)
    assert str(path) not in mounts


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a script, in a process group of its own, whose `main` runs isolated; kills what is left of it."""
    begun = []

    def begin(script: str, *, shared: tuple[Path, ...] = (), network: bool = False, **rest: Any) -> Any:
        path = folder / f"script-{len(begun)}.py"
        paths = [str(item) for item in shared]
        text = textwrap.dedent(script).strip()
        path.write_text(START.format(source=str(SOURCE), script=text, shared=paths, network=network))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        command = [rest.pop("python", sys.executable), "-B", str(path)]
        begun.append(subprocess.Popen(command, **{"cwd": folder, **pipes, **rest}))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def run(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., str]:
    """Runs a script to its end and returns what it printed."""

    def finish(script: str, **rest: Any) -> str:
        process = start(script, **rest)
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
        return output

    return finish


@contextlib.contextmanager
def mounted(path: Path, *options: str) -> Iterator[None]:
    command = ["mount", *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not possible here: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], timeout=DEADLINE_S, check=True)


def fill(folder: Path) -> None:
    """Make a tree with something of every kind."""
    (folder / "kept" / "deep").mkdir(parents=True)
    (folder / "runs").mkdir()
    for name in ("kept/deep/data", "overwritten", "appended", "deleted", "renamed", "chmodded", "touched", "runs/old"):
        (folder / name).write_text(f"real {name}")
    (folder / "link").symlink_to("kept")
    (folder / "private").mkdir(mode=0o700)


CHANGES = """
def change(folder):
    import shutil
    (folder / "new").write_text("x" * 100_000)
    assert (folder / "overwritten").read_text() == "real overwritten"
    (folder / "overwritten").write_text("changed")
    with open(folder / "appended", "a") as file:
        file.write(" and more")
    (folder / "deleted").unlink()
    (folder / "renamed").rename(folder / "other name")
    (folder / "new").replace(folder / "link.tmp")
    (folder / "chmodded").chmod(0o600)
    os.utime(folder / "touched", (1, 1))
    (folder / "shortcut").symlink_to("kept/deep")
    os.link(folder / "kept/deep/data", folder / "hard")
    (folder / "link" / "through the link").write_text("x")
    shutil.rmtree(folder / "runs")
    (folder / "runs" / "again").mkdir(parents=True)  # hides what the real folder holds
    os.chmod(folder / "private", 0o755)

    assert (folder / "appended").read_text() == "real appended and more"
    assert (folder / "overwritten").read_text() == "changed"
    assert (folder / "other name").read_text() == "real renamed"
    assert not (folder / "deleted").exists() and not (folder / "renamed").exists()
    assert (folder / "chmodded").stat().st_mode & 0o777 == 0o600
    assert (folder / "kept" / "through the link").exists()
    assert [path.name for path in (folder / "runs").iterdir()] == ["again"]
"""


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """All that can be known of a tree; the change time tells even of what was put back."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        about = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else None
        if stat.S_ISREG(about.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        facts = (about.st_mode, about.st_uid, about.st_gid, about.st_ino, about.st_nlink, about.st_size)
        found[str(path)] = (*facts, about.st_mtime_ns, about.st_ctime_ns, content)
    return found


def test_files_are_as_before(folder: Path, run: Callable[..., str]) -> None:
    here = folder / "working directory"
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        trees = [here, temporary / "tree"]
        if os.access(Path.home(), os.W_OK):
            trees.append(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.home()))) / "tree")
        for tree in trees:
            tree.mkdir()
            fill(tree)
        before = [snapshot(tree) for tree in trees]
        script = f"""
def main():
    assert os.getcwd() == {str(here)!r}
    for tree in {[str(tree) for tree in trees]!r}:
        change(Path(tree))
    Path("relative").write_text("x")
    Path("/tmp/{folder.name}-stray").write_text("x")
"""
        run(CHANGES + script, cwd=here)
        assert [snapshot(tree) for tree in trees] == before
        assert not Path(f"/tmp/{folder.name}-stray").exists()


@needs_root
@pytest.mark.parametrize("name", ["plain", "a b,c:d\\e\tf'\"", "ünïcödé"])
def test_mounts_are_as_before(folder: Path, run: Callable[..., str], name: str) -> None:
    point = folder / name
    point.mkdir()
    with mounted(point, "-t", "tmpfs", "-o", "mode=750,noexec", "tmpfs"):
        fill(point)
        below = point / "below"
        below.mkdir()
        with mounted(below, "-t", "tmpfs", "tmpfs"):
            fill(below)
            before = snapshot(point)
            script = f"""
def main():
    assert Path.cwd() == Path({str(point / "kept")!r})
    point = Path({str(point)!r})
    assert point.stat().st_mode & 0o777 == 0o750
    assert os.statvfs(point).f_flag & os.ST_NOEXEC
    change(point)
    change(point / "below")
    Path("relative").write_text("x")
"""
            run(CHANGES + script, cwd=point / "kept")
            assert snapshot(point) == before


@needs_root
def test_mounted_files_and_read_only_mounts(folder: Path, run: Callable[..., str]) -> None:
    real, point, fixed = folder / "real", folder / "point", folder / "fixed"
    real.write_text("real")
    point.write_text("under the mount")
    fixed.mkdir()
    with mounted(point, "--bind", str(real)), mounted(fixed, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        before = snapshot(folder)
        run("""
            def main():
                assert Path("point").read_text() == "real"
                Path("point").write_text("changed")
                assert Path("point").read_text() == "changed"
                try:
                    Path("fixed/file").write_text("x")
                except OSError as error:
                    assert error.errno == 30, error  # read-only outside, so read-only inside
                else:
                    raise AssertionError
        """)
        after = snapshot(folder)
        assert {path: after[path] for path in before if path != str(folder)} == {
            path: facts for path, facts in before.items() if path != str(folder)
        }


def test_shared_folders_are_the_real_ones(folder: Path, run: Callable[..., str]) -> None:
    shared, linked = folder / "for both, really", folder / "linked"
    shared.mkdir()
    linked.symlink_to(shared)
    run(
        f"""
        def main():
            Path({str(shared / "inside")!r}).write_text("kept")
            Path({str(linked / "through")!r}).write_text("kept")
            Path({str(folder / "beside")!r}).write_text("lost")
        """,
        shared=(linked,),
    )
    assert sorted(path.name for path in shared.iterdir()) == ["inside", "through"]
    assert not (folder / "beside").exists()


def running(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if marker in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("end", ["waiter killed", "group killed", "script ends"])
def test_no_process_survives(start: Callable[..., subprocess.Popen[str]], end: str) -> None:
    marker = str(uuid.uuid4())
    process = start(
        f"""
        def main():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    code = "import time; print(flush=True); time.sleep(600)"
                    os.execv(sys.executable, [sys.executable, "-c", code, {marker!r}])
                os._exit(0)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {marker!r}])
            sys.stdin.readline()
    """,
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    wait_until(lambda: len(running(marker)) == 2)
    if end == "waiter killed":
        process.kill()
    elif end == "group killed":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.stdin.write("\n")
        process.stdin.flush()
    process.wait(timeout=DEADLINE_S)
    wait_until(lambda: not running(marker))
    assert process.returncode == (0 if end == "script ends" else -signal.SIGKILL)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("os._exit(255)", 255),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.abort()", -signal.SIGABRT),
    ],
)
def test_exit_codes_pass_through(start: Callable[..., subprocess.Popen[str]], line: str, code: int) -> None:
    process = start(f"def main():\n    {line}")
    assert process.wait(timeout=DEADLINE_S) == code


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 9), (signal.SIGUSR1, 1)]
)
def test_signals_pass_through(start: Callable[..., subprocess.Popen[str]], number: int, code: int) -> None:
    process = start("""
        def main():
            heard = []
            signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
            try:
                print("ready", flush=True)
                while not heard:
                    time.sleep(0.01)
            except KeyboardInterrupt:
                sys.exit(9)
            time.sleep(0.2)
            sys.exit(len(heard))
    """)
    assert process.stdout is not None
    process.stdout.readline()
    os.killpg(process.pid, number)  # reaches the script once
    assert process.wait(timeout=DEADLINE_S) == code


def test_orphans_are_reaped(run: Callable[..., str]) -> None:
    run("""
        def main():
            assert os.getpid() != 1
            reader, writer = os.pipe()
            if os.fork() == 0:
                orphan = os.fork()
                if orphan:
                    os.write(writer, str(orphan).encode())
                os._exit(0)
            os.wait()
            orphan = Path("/proc", os.read(reader, 20).decode())
            deadline = time.monotonic() + 50
            while orphan.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
    """)


def test_network_ends_at_this_machine(run: Callable[..., str]) -> None:
    own = [item.address for items in psutil.net_if_addrs().values() for item in items if item.family == socket.AF_INET]
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = f"""
            def reaches(address, port):
                with socket.socket() as client:
                    client.settimeout(20)
                    return client.connect_ex((address, port)) == 0

            def main():
                for address in {own!r}:
                    with socket.create_server((address, 0)) as inner:
                        assert reaches(address, inner.getsockname()[1]), address
                print(reaches("127.0.0.1", {server.getsockname()[1]}))
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
                    print(datagrams.connect_ex(("203.0.113.1", 9)))
        """
        inside, unreachable = run(script).split()
        assert inside == "False"
        assert int(unreachable) != 0
        assert run(script, network=True).split()[0] == "True"


def test_inherited_pipes_and_sockets(start: Callable[..., subprocess.Popen[str]]) -> None:
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(reader):
        process = start(
            f"""
            def main():
                os.write({writer}, b"by the pipe")
                os.close({writer})
                with socket.socket(fileno={theirs.fileno()}) as connection:
                    connection.sendall(connection.recv(100).upper())
        """,
            pass_fds=(writer, theirs.fileno()),
        )
        os.close(writer)
        ours.settimeout(DEADLINE_S)
        heard = b""
        while select.select([reader], [], [], DEADLINE_S)[0] and (part := os.read(reader, 100)):
            heard += part
        assert select.select([reader], [], [], 0)[0]  # ended, although the script still runs
        assert heard == b"by the pipe"
        assert process.poll() is None
        ours.sendall(b"by the socket")
        assert ours.recv(100) == b"BY THE SOCKET"
        assert process.wait(timeout=DEADLINE_S) == 0


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(run: Callable[..., str], method: str, staged: bool) -> None:
    data = Path("/dev/shm", f"isolation-{uuid.uuid4()}")
    with contextlib.ExitStack() as stack:
        if staged:
            data.write_text("staged")
            stack.callback(data.unlink)
        run(f"""
            import multiprocessing
            from multiprocessing import shared_memory

            def work(lock, queue, name, number):
                memory = shared_memory.SharedMemory(name)
                with lock:
                    memory.buf[number] = number
                queue.put((os.getpid(), bytes(1_000_000)))
                memory.close()

            def main():
                context = multiprocessing.get_context({method!r})
                memory = shared_memory.SharedMemory(create=True, size=1_000_000)
                lock, queue = context.Lock(), context.Queue()
                workers = [context.Process(target=work, args=(lock, queue, memory.name, n)) for n in range(1, 4)]
                for worker in workers:
                    worker.start()
                assert {{queue.get(timeout=50)[0] for _ in workers}} == {{worker.pid for worker in workers}}
                for worker in workers:
                    worker.join(50)
                    assert worker.exitcode == 0
                assert bytes(memory.buf[:4]) == bytes(range(4))
                memory.close()
                memory.unlink()
                data = Path({str(data)!r})
                assert not {staged} or data.read_text() == "staged"
                data.write_text("changed")
                data.with_suffix(".left").write_text("x")
        """)
        assert [path.name for path in Path("/dev/shm").glob(f"{data.name}*")] == [data.name] * staged
        assert not staged or data.read_text() == "staged"


def python_for_others() -> dict[str, Any]:
    """A Python that other users may run, with the packages of this one."""
    environment = {**os.environ, "PYTHONPATH": str(Path(psutil.__file__).parents[1])}
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-c", "import psutil"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run(command, user=NOBODY, env=environment, timeout=DEADLINE_S, check=True)
            return {"python": python, "env": environment}
    pytest.skip("other users cannot run a Python here")


@needs_root
def test_another_user(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    python = python_for_others()
    tree, shared = folder / "tree", folder / "shared"
    for path in (tree, shared):
        path.mkdir()
    fill(tree)
    for path in (shared, tree, *tree.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    before = snapshot(tree)
    script = f"""
def main():
    assert os.getuid() == {NOBODY}
    assert "CapEff:\\t0000000000000000" in Path("/proc/self/status").read_text()
    change(Path.cwd())
    Path("/tmp/{folder.name}-stray").write_text("x")
    Path("../shared/kept").write_text("x")
    print("worked")
"""
    process = start(CHANGES + script, cwd=tree, user=NOBODY, group=NOBODY, extra_groups=[], shared=(shared,), **python)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert snapshot(tree) == before
    assert not Path(f"/tmp/{folder.name}-stray").exists()
    if process.returncode:
        assert "EnvironmentSetupError: " in errors.splitlines()[-1], errors
        pytest.skip(errors.splitlines()[-1])
    assert output == "worked\n"
    assert (shared / "kept").exists()


def test_refusals_say_why(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    scripts = {
        "threads": "import threading\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "through an overlay failed": "def main():\n    for _ in range(3):\n        isolate()",  # overlays nest twice
    }
    for reason, script in scripts.items():
        process = start(script)
        errors = process.communicate(timeout=DEADLINE_S)[1]
        assert process.returncode == 1
        last = errors.splitlines()[-1]
        assert last.startswith("frameworm.errors.EnvironmentSetupError: ")
        assert reason in last
    process = start("", shared=(folder / "missing",))
    assert "missing" in process.communicate(timeout=DEADLINE_S)[1].splitlines()[-1]


def test_why_not_names_the_step() -> None:
    lines = ("import sys", f"sys.path.insert(0, {str(SOURCE)!r})", "from frameworm.attach import isolation")
    code = "; ".join([*lines, "print(isolation.why_not())"])
    forbid = 'echo 0 > /proc/sys/user/max_mnt_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"namespaces cannot be forbidden here: {error}")
    assert done.stdout.startswith("making a namespace for mounts failed: ")
