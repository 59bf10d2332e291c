"""Checks of what processes need to find each other: ports, names, network cards, launch variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from frameworm.records.machine import Check, Intent, MachineFacts, Verdict

GROUP = "processes and network"
LITTLE_LOCKED_BYTES = 2**30


def network_checks(
    facts: MachineFacts, variables: Mapping[str, str], intent: Intent, contradictions: Sequence[str]
) -> list[Check]:
    """Return the checks of ports, names, interfaces and launch variables."""
    checks: list[Check | None] = [
        _port(facts),
        _host_name(facts, variables, intent),
        _launch(variables, contradictions),
    ]
    checks += [_interface(name, facts, variables, intent) for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    checks += [_infiniband(facts, variables), _locked_memory(facts)]
    return [check for check in checks if check is not None]


def _port(facts: MachineFacts) -> Check:
    why = "ranks meet at one port of the first machine"
    port = facts.port
    if port is not None and port.own_address is False:
        return Check("rendezvous port", GROUP, f"{port.port} is on another machine", "ok", "", why)
    if port is None or port.free is None:
        return Check("rendezvous port", GROUP, "not tried", "unknown", "", why)
    asked = "MASTER_PORT" if port.asked else "the usual port"
    if port.free:
        return Check("rendezvous port", GROUP, f"{port.port} ({asked}) is free", "ok", "", why)
    found = f"{port.port} ({asked}) cannot be bound: {port.error or 'taken'}"
    remedy = "choose another MASTER_PORT or --master-port from 1024 to 32767, or end the job that holds it (ss -ltnp)"
    if port.asked:
        return Check("rendezvous port", GROUP, found, "problem", remedy, why)
    remedy += "; on one machine frameworm finds a free one itself"
    return Check("rendezvous port", GROUP, found, "advice", remedy, why)


def _host_name(facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> Check:
    why = "gloo and torchrun tell other machines this machine's name"
    if facts.host_resolves is None:
        return Check("host name", GROUP, "not known", "unknown", "", why)
    if variables.get("GLOO_SOCKET_IFNAME"):
        return Check("host name", GROUP, "not needed: GLOO_SOCKET_IFNAME names the interface", "ok", "", why)
    if not facts.host_resolves:
        remedy = "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to the network's interface"
        verdict: Verdict = "problem" if intent.nodes > 1 else "advice"
        return Check("host name", GROUP, "cannot be resolved", verdict, remedy, why)
    if facts.host_is_loopback and intent.nodes > 1:
        remedy = "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network's interface, or fix /etc/hosts"
        return Check("host name", GROUP, "leads to a loopback address", "problem", remedy, why)
    found = "leads to a loopback address, which is enough for one machine" if facts.host_is_loopback else "resolves"
    return Check("host name", GROUP, found, "ok", "", why)


def _launch(variables: Mapping[str, str], contradictions: Sequence[str]) -> Check:
    why = "ranks that disagree on who they are wait for each other until the time-out"
    if contradictions:
        found = contradictions[0]
        if len(contradictions) > 1:
            found = " ".join(f"({number}) {text}." for number, text in enumerate(contradictions, 1))
        return Check("launch variables", GROUP, found, "problem", "unset or correct the variable that is named", why)
    kinds = [
        word
        for word, name in (("torchrun", "LOCAL_RANK"), ("SLURM", "SLURM_JOB_ID"), ("by hand", "RANK"))
        if variables.get(name)
    ]
    found = f"{kinds[0]}, and they agree" if kinds else "none set: this process is alone"
    return Check("launch variables", GROUP, found, "ok", "", why)


def _interface(name: str, facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> Check | None:
    value = variables.get(name)
    outside = [card for card in facts.interfaces if card != "lo"]
    why = "on the wrong interface, ranks cannot reach each other or are slow"
    if not value:
        if intent.nodes > 1 and len(outside) > 1 and name == "GLOO_SOCKET_IFNAME":
            remedy = f"set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the fast one of {', '.join(outside)}"
            return Check("interface", GROUP, f"{len(outside)} to choose from", "advice", remedy, why)
        return None
    if value.startswith("^") or not facts.interfaces:
        return Check(name, GROUP, value, "ok" if facts.interfaces else "unknown", "", why)
    # NCCL accepts prefixes, and exact names after an equals sign; gloo accepts exact names.
    wanted = [part for part in value.lstrip("=").split(",") if part]
    exact = value.startswith("=") or name.startswith("GLOO")
    there = [
        card
        for card in facts.interfaces
        if any(card == part or (not exact and card.startswith(part)) for part in wanted)
    ]
    if not there:
        remedy = f"name one of {', '.join(facts.interfaces)}, or unset it"
        return Check(name, GROUP, f"{value}: no such interface is up", "problem", remedy, why)
    if set(there) == {"lo"} and intent.nodes > 1:
        return Check(name, GROUP, value, "problem", "loopback reaches no other machine; name a network interface", why)
    return Check(name, GROUP, f"{value} is up", "ok", "", why)


def _infiniband(facts: MachineFacts, variables: Mapping[str, str]) -> Check | None:
    if not facts.infiniband:
        return None
    why = "without it NCCL falls back to TCP, many times slower between machines"
    cards = ", ".join(facts.infiniband)
    if variables.get("NCCL_IB_DISABLE") == "1":
        found = f"{cards}, switched off by NCCL_IB_DISABLE=1"
        return Check("InfiniBand", GROUP, found, "problem", "unset NCCL_IB_DISABLE", why)
    return Check("InfiniBand", GROUP, cards, "ok", "", why)


def _locked_memory(facts: MachineFacts) -> Check | None:
    if not facts.infiniband or facts.locked_memory_bytes is None:
        return None
    why = "InfiniBand sends from memory that is locked"
    limit = facts.locked_memory_bytes
    if 0 <= limit < LITTLE_LOCKED_BYTES:
        remedy = "ulimit -l unlimited (Docker: --ulimit memlock=-1; SLURM: PropagateResourceLimitsExcept=MEMLOCK)"
        return Check("locked memory", GROUP, f"limit {limit / 2**20:.3g} MiB", "problem", remedy, why)
    return Check("locked memory", GROUP, "no limit" if limit < 0 else "enough", "ok", "", why)
