"""A real SLURM on one machine: munged, slurmctld and one slurmd per node, started here and gone afterwards.

    python scripts/slurm_lab.py --nodes 2 -- sbatch --wait job.sh
    python scripts/slurm_lab.py --nodes 2 -- bash          a shell in which sinfo, sbatch and srun work
    python scripts/slurm_lab.py --sweep                    end what labs of processes that are gone have left behind

The nodes n0, n1, ... share this machine's cores, and each claims to have GPUs that do not exist, so that a job script
for GPUs is accepted as it is; what it runs has to be told to use the CPU (FRAMEWORM_GPU_DEVICE=cpu). Ports, key,
sockets and spool folders are the lab's own, so that it disturbs no SLURM beside it. Needs root, and Debian's slurm-wlm
and munge.

In Python (load this file by its path, it is not part of the package):

    with SlurmLab(nodes=2) as lab:
        subprocess.run(["sbatch", "--wait", "job.sh"], env=lab.environment(), check=True)
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

PREFIX = "fwslurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
START_LIMIT_S = 120.0
STOP_LIMIT_S = 15.0
COMMAND_LIMIT_S = 80.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# Shared memory and processor accounting by cgroups need a machine of one's own; plain process tracking does not.
_CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=30
KillWait=5
MinJobAge=600
GresTypes=gpu
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def available() -> str | None:
    """Why there can be no lab here; None where there can."""
    if sys.platform != "linux":
        return "SLURM's daemons need Linux"
    missing = [name for name in PROGRAMS if _which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; install slurm-wlm and munge"
    if os.geteuid() != 0:
        return "the daemons need root"
    return None


class SlurmLab:
    """A SLURM cluster of this process; a context manager.

    Args:
        nodes: Number of nodes.
        cpus: Processors that each node claims to have.
        gpus: GPUs that each node claims to have.
    """

    def __init__(self, nodes: int = 2, cpus: int = 64, gpus: int = 4) -> None:
        self.nodes = [f"n{index}" for index in range(nodes)]
        self._cpus, self._gpus = cpus, gpus
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.folder = Path()

    def __enter__(self) -> SlurmLab:
        """Start the daemons and wait until all nodes take jobs."""
        reason = available()
        if reason is not None:
            raise RuntimeError(f"no SLURM lab here: {reason}")
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{os.getpid()}-"))
        try:
            # SLURM's step daemons leave their parents; where process 1 does not bury the dead, they would stay.
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._configure()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        self.close()

    def environment(self, **added: str) -> dict[str, str]:
        """Variables under which sbatch, srun and the like talk to this cluster; none of another SLURM's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf"), **added}

    def ask(self, *command: str, check: bool = True) -> str:
        """Output of one of SLURM's commands."""
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """Cancel all jobs, end the daemons and whatever runs under them, and remove the folder."""
        if not self.folder.name:
            return
        if len(self._daemons) > 1:
            try:
                self.ask("scancel", "--full", "--signal=KILL", "--partition=lab", check=False)
                _wait(lambda: not self.ask("squeue", "--noheader", "--states=R,CG", check=False).strip(), STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                pass  # the controller is gone; the processes are ended below all the same
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        _kill_all_of(self.folder)
        _wait(_steps_buried, STOP_LIMIT_S)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = Path()

    def _configure(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        for index in range(self._gpus):
            (self.folder / f"gpu{index}").touch()  # in the place of a device
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(64))
        host = socket.gethostname().split(".")[0]
        controller_port, *node_ports = _free_ports(1 + len(self.nodes))
        gpus = f" Gres=gpu:{self._gpus}" if self._gpus else ""
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} "
            f"RealMemory=64000{gpus} State=UNKNOWN"
            for name, port in zip(self.nodes, node_ports)
        )
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(host=host, folder=self.folder, controller_port=controller_port, nodes=nodes)
        )
        (self.folder / "gres.conf").write_text(
            f"Name=gpu File={self.folder}/gpu[0-{self._gpus - 1}]\n" if self._gpus else ""
        )

    def _start(self) -> None:
        folder = self.folder
        munge_files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
        socket_file = folder / "munge.socket"
        self._spawn("munged", "--foreground", "--force", f"--socket={socket_file}", *munge_files)
        if not _wait(socket_file.exists, START_LIMIT_S):
            raise RuntimeError(self._why("munged did not start"))
        configuration = str(folder / "slurm.conf")
        self._spawn("slurmctld", "-D", "-f", configuration)
        for name in self.nodes:
            self._spawn("slurmd", "-D", "-N", name, "-f", configuration)

        def idle() -> bool:
            if any(daemon.poll() is not None for daemon in self._daemons):
                raise RuntimeError(self._why("a daemon ended"))
            states = self.ask("sinfo", "--noheader", "--Node", "--format=%T", check=False).split()
            return len(states) == len(self.nodes) and set(states) == {"idle"}

        if not _wait(idle, START_LIMIT_S):
            raise RuntimeError(self._why("the nodes did not come up"))

    def _spawn(self, name: str, *arguments: str) -> None:
        program = _which(name)
        assert program is not None
        with (self.folder / f"{name}.stderr").open("ab") as errors:
            self._daemons.append(
                subprocess.Popen(
                    [program, *arguments],
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    cwd=self.folder,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            )

    def _why(self, what: str) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.stderr")]
        tails = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join([f"SLURM lab: {what}", *tails])


def sweep() -> None:
    """End what labs left behind whose process was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*-*"):
        match = re.match(rf"{PREFIX}-(\d+)-", folder.name)
        if match is not None and not Path(f"/proc/{match.group(1)}").exists():
            _kill_all_of(folder)
            shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path) -> list[int]:
    """Processes that run under the cluster of this folder: daemons, steps, and all that jobs have started."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark in variables:
                found.append(int(entry.name))
    return found


def _kill_all_of(folder: Path) -> None:
    def killed() -> bool:
        left = processes_of(folder)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not left

    _wait(killed, STOP_LIMIT_S)


def _steps_buried() -> bool:
    """Collect the exit codes of step daemons, now children of this process; False while some have not ended yet."""
    ended = True
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = re.match(r"\d+ \((.*)\) \S (\d+)", (entry / "stat").read_text())
                if status is not None and status[1].startswith("slurmstepd") and int(status[2]) == os.getpid():
                    ended &= os.waitpid(int(entry.name), os.WNOHANG) != (0, 0)
            except OSError:
                continue
    return ended


def _free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


def _wait(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _which(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _end_with_parent() -> None:
    """Have the kernel end a daemon when this process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command in a lab."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (2)")
    parser.add_argument("--cpus", type=int, default=64, help="processors that each node claims to have (64)")
    parser.add_argument("--gpus", type=int, default=4, help="GPUs that each node claims to have (4)")
    parser.add_argument("--sweep", action="store_true", help="end what killed labs have left behind")
    parser.add_argument("command", nargs="*", help="after --: what to run")
    options = parser.parse_args(arguments)
    if options.sweep:
        sweep()
        return 0
    if not options.command:
        parser.error("nothing to run; give a command after --")
    reason = available()
    if reason is not None:
        print(f"slurm_lab: no SLURM lab here: {reason}", file=sys.stderr)
        return 2
    with SlurmLab(options.nodes, options.cpus, options.gpus) as lab:
        return _run(options.command, lab.environment())


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the command has got it too


if __name__ == "__main__":
    sys.exit(main())
