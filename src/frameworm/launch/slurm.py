"""Builds the text of a SLURM batch script that trains a config: a pure function of a typed request."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Literal

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.slurm_environment import DERIVED_PORTS, FIRST_DERIVED_PORT, PORTS_PER_JOB

SlurmLauncher = Literal["torchrun", "srun"]

DEFAULT_CPUS_PER_WORKER = 8
DEFAULT_SIGNAL_BEFORE_S = 120

# Between the workers' last chance to save and the job's time limit, the launchers and the script must end too.
_MARGIN_S = 20
_SHORTEST_SIGNAL_S = 30

_TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){1,2})?")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*")


class WorkersOnNodes:
    """The number of processes of a job that is requested by nodes and GPUs."""

    nodes: int
    gpus_per_node: int

    @property
    def workers_per_node(self) -> int:
        """Training processes per node."""
        return max(1, self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Training processes in total."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True)
class SlurmJob(WorkersOnNodes):
    """What a batch script should request and run.

    Attributes:
        config: Path of the config, relative to the folder in which the job is submitted.
        name: Name of the job and of its run folder; characters other than letters, digits and `._-` become `_`.
        nodes: Number of nodes.
        gpus_per_node: GPUs, and workers, per node; with 0, one worker per node runs on the CPU.
        launcher: `torchrun`: one task per node starts the node's workers. `srun`: each task is a worker.
        cpus_per_task: Processors per task; None for 8 per worker.
        time: Time limit in SLURM's format (`12:00:00`, `2-00`); None for the partition's default.
        partition: Partition; None for the cluster's default.
        account: Account to charge.
        modules: Environment modules to load, in order.
        venv: Virtual environment to activate; None for the PATH of the submitting shell.
        signal_before_s: Seconds before the time limit at which training saves and is requeued.
        settings: `--set` options of the training.
        command: The command line that wrote the script, for its first lines.
    """

    config: str
    name: str
    nodes: int = 1
    gpus_per_node: int = 0
    launcher: SlurmLauncher = "torchrun"
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    modules: tuple[str, ...] = ()
    venv: str | None = None
    signal_before_s: int = DEFAULT_SIGNAL_BEFORE_S
    settings: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def tasks_per_node(self) -> int:
        """Tasks that srun starts on each node."""
        return self.workers_per_node if self.launcher == "srun" else 1

    @property
    def safe_name(self) -> str:
        """The name, reduced to characters that have no special meaning to SLURM, a shell or a file system."""
        return re.sub(r"[^A-Za-z0-9._-]", "_", self.name).lstrip("-.") or "frameworm"


def batch_script(job: SlurmJob) -> str:
    """Return the text of the batch script.

    Args:
        job: What to request and to run.

    Returns:
        A bash script in strict mode.

    Raises:
        EnvironmentSetupError: A value is invalid or cannot be part of a script.
    """
    check(job)
    parts = [_head(job), _SETUP.replace("@NAME@", job.safe_name)]
    if job.modules:
        parts.append(_MODULES.replace("@LOAD@", "\n".join(f"module load {shlex.quote(name)}" for name in job.modules)))
    parts.append(_venv(job))
    parts.append(_threads(job))
    if job.world_size > 1:
        parts.append(_MEETING)
    parts.append(_RUN.replace("@COMMAND@", _command(job)))
    return "\n".join(parts)


def check(job: SlurmJob) -> None:
    """Refuse values that cannot be written into a script safely.

    Raises:
        EnvironmentSetupError: Names the option.
    """
    texts = [("--config", job.config), ("the config's name", job.name), ("--venv", job.venv)]
    texts += [("--module", name) for name in job.modules] + [("--set", setting) for setting in job.settings]
    for option, text in [*texts, *(("the command line", part) for part in job.command)]:
        if text is not None and not text.isprintable():
            raise EnvironmentSetupError(
                f"{option} {text!r} holds a character that cannot be printed, such as a line break; a batch script "
                "takes none"
            )
    for name in job.modules:
        if name.startswith("-") or not name:
            raise EnvironmentSetupError(f"--module {name!r} is not the name of a module")
    for option, count, least in (
        ("--nodes", job.nodes, 1),
        ("--gpus-per-node", job.gpus_per_node, 0),
        ("--cpus-per-task", job.cpus_per_task, 1),
        ("--signal-before", job.signal_before_s, _SHORTEST_SIGNAL_S),
    ):
        if count is not None and not least <= count < 2**16:
            raise EnvironmentSetupError(f"{option} must be from {least} to 65535, got {count}")
    if job.time is not None and not _TIME.fullmatch(job.time):
        raise EnvironmentSetupError(
            f"--time {job.time!r} is not a time of SLURM's: minutes, hours:minutes:seconds (12:00:00) or days-hours "
            "(2-00)"
        )
    for option, word in (("--partition", job.partition), ("--account", job.account)):
        if word is not None and not _WORD.fullmatch(word):
            raise EnvironmentSetupError(f"{option} {word!r} is not a name that SLURM takes")


def _head(job: SlurmJob) -> str:
    """The directives that sbatch reads."""
    cpus = job.cpus_per_task or DEFAULT_CPUS_PER_WORKER * job.workers_per_node // job.tasks_per_node
    directives = [
        f"job-name={job.safe_name}",
        f"nodes={job.nodes}",
        f"ntasks-per-node={job.tasks_per_node}",
        f"cpus-per-task={cpus}",
        *([f"gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *([f"time={job.time}"] if job.time else []),
        *([f"partition={job.partition}"] if job.partition else []),
        *([f"account={job.account}"] if job.account else []),
        f"signal=B:USR1@{job.signal_before_s}",
        "requeue",
        "open-mode=append",
        "output=%x-%j.out",
    ]
    lines = ["#!/bin/bash"]
    if job.command:
        lines.append(f"# Written by: {shlex.join(job.command)}")
    lines.append("# Submit it from the folder that its paths start from: sbatch THIS_FILE")
    return "\n".join([*lines, *(f"#SBATCH --{directive}" for directive in directives)]) + "\n"


def _venv(job: SlurmJob) -> str:
    if job.venv is None:
        return _ON_PATH
    folder = f"./{job.venv}" if job.venv.startswith("-") else job.venv
    return f"set +u\nsource {shlex.quote(folder.rstrip('/') + '/bin/activate')}\nset -u\n\n{_ON_PATH}"


def _threads(job: SlurmJob) -> str:
    workers_per_task = job.workers_per_node // job.tasks_per_node
    per_worker = "cpus" if workers_per_task == 1 else f"cpus / {workers_per_task}"
    return (
        'cpus="${SLURM_CPUS_PER_TASK:-1}"\n'
        f"threads=$(({per_worker}))\n"
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"\n'
    )


def _command(job: SlurmJob) -> str:
    """The srun command of the step, one option per line."""
    settings = (["gpu.device=cpu"] if job.gpus_per_node == 0 else []) + list(job.settings)
    lines = [
        f'srun --cpus-per-task="$cpus" --wait={max(60, job.signal_before_s)}',
        f"frameworm train --config {shlex.quote(job.config)}",
        *(f"--set {shlex.quote(setting)}" for setting in settings),
        '--out "$run" --resume auto --log-dir "$logs"',
    ]
    if job.world_size > 1:
        lines.append("--distributed")
        if job.launcher == "torchrun":
            grace_s = max(_SHORTEST_SIGNAL_S, job.signal_before_s) - _MARGIN_S
            lines[-1] += f" --nproc-per-node {job.workers_per_node} --stop-grace {grace_s}"
    return " \\\n  ".join(lines)


_SETUP = """\
set -euo pipefail

step=""
told=0
# SLURM tells this script alone that the time is almost over; srun passes the signal on, and training saves and ends.
stop() {
  told=1
  echo "$(date '+%F %T') the job's time is almost over: saving"
  if [ -n "$step" ]; then kill -USR1 "$step" 2>/dev/null || true; fi
}
trap stop USR1

# One run folder per job: after a requeue the job has the same number and goes on there.
run="runs/@NAME@-$SLURM_JOB_ID"
logs="logs/@NAME@-$SLURM_JOB_ID/attempt-${SLURM_RESTART_COUNT:-0}"
mkdir -p runs "$logs"

# Left in the submitting shell, these would tell the workers of another job's ranks.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT
"""

_MODULES = """\
set +u
if ! type module >/dev/null 2>&1; then
  for file in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /usr/share/modules/init/bash; do
    if [ -r "$file" ]; then source "$file"; break; fi
  done
fi
@LOAD@
set -u
"""

_ON_PATH = """\
if ! command -v frameworm >/dev/null; then
  echo "frameworm is not on the PATH: activate its environment before sbatch, or write the script with --venv" >&2
  exit 2
fi
"""

_MEETING = f"""\
# The workers meet on the first node, at the address that SLURM itself uses for it. The port follows from the job's
# number and attempt, and moves on if something else on this node listens there.
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
address="$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')"
export MASTER_ADDR="${{address:-$first}}"
port=$(({FIRST_DERIVED_PORT} + (SLURM_JOB_ID * {PORTS_PER_JOB} + ${{SLURM_RESTART_COUNT:-0}}) % {DERIVED_PORTS}))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
export MASTER_PORT="$port"
"""

_RUN = """\
echo "$(date '+%F %T') job $SLURM_JOB_ID, attempt ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"
echo "run folder $run, logs $logs"
@COMMAND@ &
step=$!
if [ "$told" = 1 ]; then kill -USR1 "$step" 2>/dev/null || true; fi
tail -n +1 -s 0.3 -F --pid="$step" "$logs/rank-00000.log" 2>/dev/null &
shown=$!

# A signal interrupts wait, which then has to be called again for the step's own exit code.
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
code=0
wait "$step" || code=$?
while kill -0 "$shown" 2>/dev/null; do wait "$shown" || true; done

if [ "$told" = 1 ] && { [ "$code" -eq 75 ] || [ "$code" -eq 138 ]; }; then
  # 75: saved. 138: the signal came before there was anything to save.
  echo "$(date '+%F %T') stopped in time: back into the queue"
  if scontrol requeue "$SLURM_JOB_ID"; then exit 0; fi
  echo "the job cannot be requeued; continue by hand with: --out $run --resume auto" >&2
elif [ "$code" -ne 0 ]; then
  { grep -lE 'Traceback|Error|^frameworm: ' "$logs"/rank-*.log 2>/dev/null || true; } | head -n 4 |
    while IFS= read -r file; do
      if [ "$file" != "$logs/rank-00000.log" ]; then echo "last lines of $file:"; tail -n 15 "$file"; fi
    done >&2 || true
fi
exit "$code"
"""
