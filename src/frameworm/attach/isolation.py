"""Isolate the rest of a process so that none of its effects remain: private writes and processes, no network.

Every writable mount gets an overlay whose upper folder is in memory: the script reads the real files, and what it
writes, renames or deletes is gone when it ends. It runs under its own init, so no daemon survives it:

    outer process (the one the caller started; waits)  ->  init (PID 1 inside)  ->  the script (returns from `isolate`)

Linux only. Writes take memory, and opening a large file for writing copies it there. Files under /dev and /sys are the
real ones. Without root it needs user namespaces and Linux 6.6 (user attributes in tmpfs). Files of other users or
groups can then be read but not changed, and existing folders cannot be renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil

from frameworm.errors import EnvironmentSetupError

# From the kernel's headers; Python defines some of them only since 3.12.
_NEW_MOUNTS, _NEW_IPC, _NEW_USERS, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _REMOUNT, _BIND, _MOVE, _RECURSIVE, _PRIVATE = 1, 32, 4096, 8192, 16384, 1 << 18
_RESTRICTIONS = 2 | 4 | 8  # no set-user-ID programs, no devices, no execution
_DETACH = 2
_PARENT_DEATH_SIGNAL = 1
_CAPABILITY_VERSION = 0x20080522
_GET_FLAGS, _SET_FLAGS, _SET_ADDRESS, _SET_MASK, _UP_AND_RUNNING = 0x8913, 0x8914, 0x8916, 0x891C, 0x41
# File systems of the kernel, which hold no user files.
_KERNEL_KINDS = (
    "|autofs|binfmt_misc|bpf|cgroup|cgroup2|configfs|debugfs|devpts|devtmpfs|efivarfs|fusectl|hugetlbfs|mqueue|nsfs|"
    "proc|pstore|rpc_pipefs|securityfs|selinuxfs|sysfs|tracefs|"
)
_KERNEL_FOLDERS = ("/dev", "/proc", "/sys")
_COPIED_BYTES = 64 * 2**20  # larger files that no overlay can cover are read-only inside
_TRY_S = 60.0
_TRY = """
import sys
sys.path.insert(0, sys.argv[1])
from frameworm.attach.isolation import isolate
from frameworm.errors import EnvironmentSetupError
try:
    isolate()
except EnvironmentSetupError as error:
    sys.exit(str(error))
"""


def isolate(shared: Sequence[Path] = (), *, network: bool = False) -> None:
    """Move this process into its own namespaces; its writes, processes and connections end with it.

    The call returns in a new process with the same working directory, environment and open files. The calling process
    remains outside and waits: it forwards signals and ends as the new one ends. Killing it, or its parent, kills
    everything inside. Sockets and FIFOs of other processes cannot be reached by path.

    Args:
        shared: Folders that remain the real ones; what is written there persists.
        network: Whether to keep the real network. Otherwise only this machine's own addresses work, among the processes
            inside.

    Raises:
        EnvironmentSetupError: If the machine does not allow it. The process is then unusable and should end.
    """
    if sys.platform != "linux":
        raise EnvironmentSetupError("isolation needs Linux")
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise EnvironmentSetupError(f"isolation must begin before other threads start; this process has {threads}")
    with _step("finding the working directory and the shared folders"):
        working_directory = str(Path.cwd())
        folders = [str(Path(folder).resolve(strict=True)) for folder in shared]
    places = _writable_places(working_directory, folders)
    own_users = _unshare(network)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    status_read, status_write = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    init = os.fork()
    if init:
        _wait_outside(init, status_read)
    os.close(status_read)
    os.setsid()  # a signal to the process group reaches only the waiter, which forwards it once
    die_with_parent(status_write)
    failure: Exception | None = None
    try:
        _build_root(working_directory, folders, places, set(places.values()) if own_users else set())
    except Exception as error:
        failure = error
    script = os.fork()
    if script:
        _wait_as_init(script, status_write)
    os.close(status_write)
    os.setsid()
    if own_users:  # drop the user namespace's capabilities, which the script does not have outside
        _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    signal.signal(signal.SIGCHLD, on_child or signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if failure is not None:
        raise failure


def why_not() -> str | None:
    """Try `isolate` in a child process; return None if it works, otherwise one line that says why not."""
    command = [sys.executable, "-c", _TRY, str(Path(__file__).resolve().parents[2])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TRY_S, check=False)
    except subprocess.TimeoutExpired:
        return f"entering namespaces took more than {_TRY_S:.0f} s"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else lines[-1] if lines else f"the try ended with exit code {done.returncode}"


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library; raise OSError if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mount(source: str, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _call("mount", *words, ctypes.c_ulong(flags), os.fsencode(options))


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Turn an OSError into an error that names the step."""
    try:
        yield
    except OSError as error:
        refused = error.errno in (errno.EPERM, errno.EACCES)
        unknown = error.errno in (errno.ENODEV, errno.ENOSYS)
        reason = "is not permitted here" if refused else "is unknown to this kernel" if unknown else f"failed: {error}"
        raise EnvironmentSetupError(f"{what} {reason}") from error


def _unshare(network: bool) -> bool:
    """Enter new namespaces, except for mounts, which init changes; return True if that needed a user namespace."""
    flags = _NEW_PROCESSES | _NEW_IPC | (0 if network else _NEW_NETWORK)
    user, group = os.geteuid(), os.getegid()
    # The host name may resolve to one of these, and torchrun connects to the host name.
    interfaces = psutil.net_if_addrs().values()
    addresses = [item.address for items in interfaces for item in items if item.family == socket.AF_INET]
    own_users = False
    with _step("making namespaces"):
        try:
            _call("unshare", flags)
        except PermissionError:
            _call("unshare", flags | _NEW_USERS)
            own_users = True
    if own_users:
        with _step("mapping this user into a user namespace"):
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if not network:
        with _step("bringing up the loopback interface"):
            _bring_up_loopback([address for address in addresses if not address.startswith("127.")])
    return own_users


def _bring_up_loopback(addresses: Sequence[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for number, address in enumerate(addresses):
            for request, value in ((_SET_ADDRESS, address), (_SET_MASK, "255.255.255.255")):
                name, packed = f"lo:{number}".encode(), socket.inet_aton(value)
                fcntl.ioctl(control, request, struct.pack("16sH2x4s16x", name, socket.AF_INET, packed))
        (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _GET_FLAGS, struct.pack("16s24x", b"lo")), 16)
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH22x", b"lo", flags | _UP_AND_RUNNING))


def _close_files_except(kept: int) -> None:
    """Close inherited files, so that the other ends of pipes notice when the script closes them."""
    numbers: list[int] = []
    with contextlib.suppress(OSError):  # /proc may be missing if the new root could not be built
        numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    for number in numbers:
        with contextlib.suppress(OSError):
            if number != kept:
                os.close(number)


def die_with_parent(pipe: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies.

    Args:
        pipe: A pipe that only the parent reads, to check whether it has already died.
    """
    _call("prctl", _PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL))
    if pipe is not None:
        poll = select.poll()
        poll.register(pipe, 0)
        if poll.poll(0):  # no reader is left
            os._exit(1)


def _wait_for(child: int) -> int:
    """Wait until a child ends, forwarding signals and reaping orphans; all signals are blocked. Return its status."""
    while True:
        number = signal.sigwait(signal.valid_signals())
        if number != signal.SIGCHLD:
            with contextlib.suppress(OSError):
                os.kill(child, number)
            continue
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return ended[1]


def _wait_as_init(script: int, status_write: int) -> NoReturn:
    """Wait for the script, then end; the kernel kills everything else inside."""
    try:
        _close_files_except(status_write)
        os.write(status_write, _wait_for(script).to_bytes(4, "little"))
    finally:  # never continue with the caller's work
        os._exit(1)


def _wait_outside(init: int, status_read: int) -> NoReturn:
    """Wait for init, then end as the script ended."""
    try:
        die_with_parent()
        _close_files_except(status_read)
        status = _wait_for(init)
        told = os.read(status_read, 4)  # nothing if init was killed
        code = os.waitstatus_to_exitcode(int.from_bytes(told, "little") if told else status)
        if code >= 0:
            os._exit(code)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    finally:  # never continue with the caller's work
        os._exit(1)


class _Mount(NamedTuple):
    path: str
    kind: str
    read_only: bool
    source: str  # path of an open file: without special characters, and valid even when the mount gets covered


def _opened(path: str, stack: contextlib.ExitStack) -> str:
    """Open a path and return a name for it, relative to the real /proc, that is valid until the stack closes."""
    number = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    stack.callback(os.close, number)
    return f"self/fd/{number}"


def _visible_mounts(stack: contextlib.ExitStack) -> list[_Mount]:
    """Return mounts that are not hidden by others, parents first; the root is always included."""
    found = {"/": _Mount("/", "", False, _opened("/", stack))}
    for line in os.fsdecode(Path("self/mountinfo").read_bytes()).strip("\n").split("\n"):
        left, right = line.split(" - ", 1)
        number, _, _, _, point, options = left.split(" ")[:6]
        kind, _, options_of_all = right.split(" ")[:3]
        path = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
        if kind == "autofs":  # opening it might mount something
            continue
        with contextlib.suppress(OSError):  # hidden, or not accessible to this user
            source = _opened(path, stack)
            about = Path(source.replace("/fd/", "/fdinfo/")).read_text()
            if re.search(rf"^mnt_id:\s*{number}$", about, re.MULTILINE):
                read_only = "ro" in (*options.split(","), *options_of_all.split(","))
                found[path] = _Mount(path, kind, read_only, source)
    return sorted(found.values())


def _writable_places(working_directory: str, shared: Sequence[str]) -> dict[str, str]:
    """Return where most scripts write, each with its highest ancestor owned, like all folders below, by this user.

    An overlay copies the folders above a changed file. A user namespace cannot copy folders of others, and no longer
    shows their owners.
    """
    candidates = [Path(working_directory), Path("/tmp")]
    with contextlib.suppress(RuntimeError):  # a user without a home
        candidates.append(Path.home())
    own = (os.geteuid(), os.getegid())
    found = {}
    for place in candidates:
        if os.access(place, os.W_OK) and not _inside(str(place.resolve()), shared):
            top = folder = place.resolve()
            while (folder.stat().st_uid, folder.stat().st_gid) == own and folder != folder.parent:
                top, folder = folder, folder.parent
            found[str(place)] = str(top)
    return found


def _inside(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _build_root(working_directory: str, shared: Sequence[str], places: Iterable[str], tops: set[str]) -> None:
    """Assemble the new root from overlays, including `tops`, and make it the root of this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))  # one open file for each mount
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with _step("making a namespace for mounts"):
            _call("unshare", _NEW_MOUNTS)
        with _step("making mounts private (which needs a root that is a mount)"):
            _mount("none", "/", None, _RECURSIVE | _PRIVATE)
        with _step("mounting"):
            os.chdir("/proc")
            mounts = _visible_mounts(stack)
            kernel = {path: _opened(path, stack) for path in ("/dev", "/sys", "/dev/shm") if Path(path).is_dir()}
            further = tops - {mount.path for mount in mounts}
            mounts = sorted([*mounts, *(_Mount(path, "", False, _opened(path, stack)) for path in further)])
            real = {path: _opened(path, stack) for path in shared}
            _mount("tmpfs", "/proc", "tmpfs")  # the only folder whose content no overlay needs
        covered = [mount for mount in mounts if not _inside(mount.path, (*_KERNEL_FOLDERS, *shared))]
        tree = _Tree("/proc", [mount.path for mount in covered])
        for mount in covered:
            if f"|{mount.kind}|" not in _KERNEL_KINDS:
                with contextlib.suppress(OSError):  # broken, such as a disconnected network drive: empty inside
                    tree.place(mount)
        with _step("binding the device files and the shared folders"):
            shared_memory = kernel.pop("/dev/shm", None)
            for path, source in (*kernel.items(), *real.items()):
                _mount(source, tree.root + path, None, _BIND | _RECURSIVE)
            if shared_memory is not None:
                tree.place_shared_memory(shared_memory)
        with _step("mounting a proc file system"):
            _mount("proc", f"{tree.root}/proc", "proc", _RESTRICTIONS)
        for mount in mounts:  # mounted by containers, such as their own memory limit and GPUs
            if mount.path.startswith("/proc/"):
                with contextlib.suppress(OSError):
                    _mount(mount.source, tree.root + mount.path, None, _BIND)
        with _step("changing the root"):
            _change_root(tree.root)
    with _step(f"entering {working_directory} again"):
        os.chdir(working_directory)
    for path in places:
        with _step(f"writing in {path} through an overlay"):
            Path(tempfile.mkdtemp(dir=path)).rmdir()


def _change_root(root: str) -> None:
    os.chdir(root)
    try:
        _call("pivot_root", b".", b".")
        _call("umount2", b".", _DETACH)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _mount(".", "/", None, _MOVE)  # an initial RAM disk cannot be pivoted
        os.chroot(".")


class _Tree:
    """Builds a root in memory.

    Args:
        memory: Folder of a tmpfs.
        points: Paths of mounts; `place` is called for each.
    """

    def __init__(self, memory: str, points: Sequence[str]) -> None:
        self.root = f"{memory}/root"
        self._memory = memory
        self._points = frozenset((*points, *_KERNEL_FOLDERS))
        self._count = 0
        with _step("mounting"):
            Path(self.root).mkdir()
            _mount(self.root, self.root, None, _BIND)
        for name, options in (("trusted.overlay.try", "redirect_dir=on,metacopy=on"), ("user.try", "userxattr")):
            with contextlib.suppress(OSError):
                os.setxattr(memory, name, b"")
                self._options = options
                return
        raise EnvironmentSetupError("without root, overlays in memory need Linux 6.6 or later")

    def place(self, mount: _Mount) -> None:
        """Make a mount's files visible in the tree and protect the real ones."""
        target = self.root + mount.path
        if not stat.S_ISDIR(Path(mount.source).stat().st_mode):
            self._place_file(mount)
            return
        Path(target).mkdir(parents=True, exist_ok=True)
        if not mount.read_only:
            try:
                self._overlay(mount.source, target, self._memory)
                return
            except OSError as error:
                if mount.path == "/" and error.errno in (errno.EPERM, errno.ENODEV):
                    with _step("mounting an overlay"):
                        raise
        if _bind_read_only(mount.source, target):  # also for file systems that overlays do not accept, such as FAT
            return
        # A user namespace may not uncover what is below mounts, so folders above mounts are created by hand.
        if any(point != mount.path and _inside(point, [mount.path]) for point in self._points):
            for entry in os.scandir(mount.source):
                with contextlib.suppress(OSError):
                    self._place_entry(mount, entry)
            _look_like(mount.source, target)

    def place_shared_memory(self, source: str) -> None:
        """Mount shared memory of the real one's size; existing data in it can be read."""
        size = os.statvfs(source)
        options = f"mode=1777,size={size.f_blocks * size.f_frsize}"
        target, held = f"{self.root}/dev/shm", f"{self._memory}/shm"
        if any(Path(source).iterdir()):
            with contextlib.suppress(OSError):
                Path(held).mkdir()
                _mount("tmpfs", held, "tmpfs", 0, options)
                self._overlay(source, target, held)
                return
        _mount("tmpfs", target, "tmpfs", 0, options)

    def _overlay(self, source: str, target: str, memory: str) -> None:
        self._count += 1
        upper, work = Path(memory, f"upper{self._count}"), Path(memory, f"work{self._count}")
        upper.mkdir()
        work.mkdir()
        _look_like(source, str(upper))
        restrictions = os.statvfs(source).f_flag & _RESTRICTIONS
        options = f"lowerdir={source},upperdir={upper},workdir={work},{self._options}"
        _mount("overlay", target, "overlay", restrictions, options)

    def _place_entry(self, mount: _Mount, entry: os.DirEntry[str]) -> None:
        path = f"{mount.path.rstrip('/')}/{entry.name}"
        target = Path(self.root + path)
        if entry.is_symlink():
            target.symlink_to(Path(entry.path).readlink())
        elif path not in self._points:
            with contextlib.ExitStack() as stack:
                self.place(_Mount(path, "", mount.read_only, _opened(entry.path, stack)))
        elif entry.is_dir():
            target.mkdir()

    def _place_file(self, mount: _Mount) -> None:
        """Place a private copy of a small file of this user, a read-only view of others; skip sockets and FIFOs."""
        target, about = self.root + mount.path, Path(mount.source).stat()
        if stat.S_ISSOCK(about.st_mode) or stat.S_ISFIFO(about.st_mode):
            return
        Path(target).touch()
        small = stat.S_ISREG(about.st_mode) and about.st_size <= _COPIED_BYTES
        if small and not mount.read_only and os.access(mount.source, os.W_OK):
            shutil.copy2(mount.source, target)
            os.chown(target, about.st_uid, about.st_gid)
        else:
            _bind_read_only(mount.source, target)


def _look_like(source: str, target: str) -> None:
    """Give a replacement the owner and mode of the real folder, without write permission if that is not writable."""
    about = Path(source).stat()
    with contextlib.suppress(OSError):  # an owner unknown to this user namespace
        os.chown(target, about.st_uid, about.st_gid)
    Path(target).chmod(stat.S_IMODE(about.st_mode) & (0o7777 if os.access(source, os.W_OK) else ~0o222))


def _bind_read_only(source: str, target: str) -> bool:
    restrictions = os.statvfs(source).f_flag & _RESTRICTIONS
    try:
        _mount(source, target, None, _BIND)
    except OSError:
        return False
    try:
        _mount("none", target, None, _REMOUNT | _BIND | _READ_ONLY | restrictions)
    except OSError:
        _call("umount2", os.fsencode(target), _DETACH)
        return False
    return True
