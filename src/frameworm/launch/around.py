"""What the environment variables say about the job of a process, for `doctor`: contradictions are not errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.environment import ProcessInfo, all_variables, detect
from frameworm.launch.plan import DEFAULT_PORT
from frameworm.launch.slurm_environment import contradictions


@dataclass(frozen=True)
class Around:
    """What is known about the job, and what is wrong with the variables."""

    variables: dict[str, str]
    processes: int = 1  # on this machine
    nodes: int = 1
    master_address: str | None = None
    port: int = DEFAULT_PORT
    port_asked: bool = False
    contradictions: tuple[str, ...] = ()


def find_launcher(environ: Mapping[str, str] | None = None) -> Around:
    """Read the variables; those that contradict each other are reported and then ignored.

    Args:
        environ: The variables; default: those of the process.
    """
    variables = all_variables(environ)
    found = [item.text for item in contradictions(variables)]
    info = ProcessInfo()
    try:
        info = detect(variables)
    except EnvironmentSetupError as error:
        found += [line for line in str(error).splitlines() if line not in found]
    port = info.master_port
    if port is None and variables.get("MASTER_PORT", "").isdigit():
        port = int(variables["MASTER_PORT"])
    return Around(
        variables=variables,
        processes=info.local_world_size,
        nodes=info.num_nodes,
        master_address=info.master_address or variables.get("MASTER_ADDR") or None,
        port=port or DEFAULT_PORT,
        port_asked=bool(variables.get("MASTER_PORT")),
        contradictions=tuple(found),
    )
