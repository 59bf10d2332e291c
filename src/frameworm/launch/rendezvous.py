"""How the launchers of a job's nodes meet before they start their workers."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import time
from datetime import timedelta

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.environment import RUN_ID_PREFIX, collective_timeout_s
from frameworm.launch.plan import LaunchPlan
from frameworm.launch.stores import PrefixStore, Store, TCPStore, first_line, host_store, join_store

_STORE_TIMEOUT = timedelta(seconds=60)
_SAY_AFTER_S = 15.0
_LAST_CALL_S = 10  # how long a job that could start waits for further nodes
_KEEP_ALIVE_S = 2  # a node that is silent for three of these is gone


def make_rendezvous(plan: LaunchPlan, join_timeout_s: float) -> RendezvousHandler:
    """Return the rendezvous handler that torch's agent uses for this plan."""
    if plan.rendezvous == "c10d":
        return _elastic_rendezvous(plan, join_timeout_s)
    return FixedRendezvous(plan, join_timeout_s)


def _longest_wait_for_an_answer(join_timeout_s: float) -> float:
    return min(join_timeout_s, collective_timeout_s(_STORE_TIMEOUT.total_seconds()))


def new_run_id(plan: LaunchPlan) -> str:
    """Return an id that no other launch has."""
    return f"{RUN_ID_PREFIX}{plan.run_id}-{secrets.token_hex(8)}"


def _common_run_id(store: Store, plan: LaunchPlan) -> str:
    """The id that the first launcher at this store gave the job; it differs from that of an earlier job."""
    return store.compare_set(f"run-id-{plan.run_id}", "", new_run_id(plan)).decode()


class FixedRendezvous(RendezvousHandler):
    """A fixed number of nodes with known ranks; the first node's launcher hosts the store for all workers.

    On one node, each round gets a new store on a port that the system picks: nothing can collide, and restarted workers
    do not see values of dead ones. On several nodes the port is fixed in advance, and rounds differ by prefix.
    """

    def __init__(self, plan: LaunchPlan, join_timeout_s: float) -> None:
        assert plan.node_rank is not None
        self._plan = plan
        self._node_rank: int = plan.node_rank
        self._run_id = new_run_id(plan)
        self._join_timeout_s = join_timeout_s
        self._answer_s = _longest_wait_for_an_answer(join_timeout_s)
        self._store: TCPStore | None = None
        self._round = 0

    def get_backend(self) -> str:
        """Name of the rendezvous backend."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """True: the workers are clients of the launcher's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes."""
        plan, store = self._plan, self._store
        if plan.max_nodes == 1:
            store = host_store(plan.master_address, 0, _STORE_TIMEOUT)
        elif store is None:
            store = self._open_store()
            self._run_id = _common_run_id(store, plan)
        self._store = store
        prefixed = PrefixStore(f"launch-{self._round}", store)
        self._round += 1
        if plan.max_nodes > 1:
            self._meet(prefixed)
        return RendezvousInfo(
            prefixed, self._node_rank, plan.max_nodes, RendezvousStoreInfo(plan.master_address, store.port)
        )

    def _open_store(self) -> TCPStore:
        address, port = self._plan.master_address, self._plan.master_port
        is_master = self._node_rank == 0
        if not is_master:
            self._wait_for_listener(address, port)
        try:
            if is_master:
                return host_store(address, port, _STORE_TIMEOUT)
            return join_store(address, port, self._answer_s)
        except (DistError, OSError) as error:
            if is_master:
                raise EnvironmentSetupError(
                    f"cannot listen on {address}:{port} (MASTER_ADDR, MASTER_PORT): {first_line(error)}. On the first "
                    "node, MASTER_ADDR must be its own name or address, and the port must be free."
                ) from error
            raise EnvironmentSetupError(
                f"cannot join the first node at {address}:{port}: {first_line(error)}"
            ) from error

    def _wait_for_listener(self, address: str, port: int) -> None:
        """Retry until the first node answers; in Python, so that Ctrl-C works meanwhile."""
        wait = _Wait(self._join_timeout_s, f"the first node to listen on {address}:{port}")
        while True:
            try:
                socket.create_connection((address, port), timeout=5).close()
                return
            except OSError as error:
                if not wait.goes_on():
                    raise EnvironmentSetupError(
                        f"nothing answered at {address}:{port} (MASTER_ADDR, MASTER_PORT) within "
                        f"{self._join_timeout_s:.0f} s: {error}. Start the job on the node with RANK 0, or correct the "
                        "address."
                    ) from error
                time.sleep(0.3)

    def _meet(self, store: Store) -> None:
        """Wait until every node has arrived, and check that all expect the same job."""
        plan = self._plan
        if store.add(f"claimed-{self._node_rank}", 1) > 1:
            raise EnvironmentSetupError(
                f"two launchers claim to be node {self._node_rank} of {plan.max_nodes} at {plan.master_address}:"
                f"{plan.master_port}; each node needs its own RANK or --node-rank, each job its own MASTER_PORT"
            )
        store.add("come", 1)
        shape = f"{plan.max_nodes} nodes with {plan.nproc_per_node} workers each"
        store.set(f"shape-{self._node_rank}", shape)
        wait = _Wait(self._join_timeout_s, f"the other launchers of {plan.max_nodes} nodes")
        missing = [node for node in range(plan.max_nodes) if node != self._node_rank]
        while missing:
            if store.check([f"shape-{missing[0]}"]):
                other = store.get(f"shape-{missing[0]}").decode()
                if other != shape:
                    raise EnvironmentSetupError(
                        f"node {self._node_rank} expects {shape}, node {missing[0]} expects {other}: start every node "
                        "with the same WORLD_SIZE and --nproc-per-node"
                    )
                missing.pop(0)
            elif self._store is not None and self._store.check(["closed"]):
                raise EnvironmentSetupError("another node has given up; see its output for the cause")
            elif wait.goes_on():
                time.sleep(0.1)
            else:
                raise EnvironmentSetupError(
                    f"node {missing[0]} of {plan.max_nodes} did not come to {plan.master_address}:{plan.master_port} "
                    f"within {self._join_timeout_s:.0f} s"
                )

    def is_closed(self) -> bool:
        """Return False: a fixed rendezvous stays open."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait in the next round: their workers have failed, and ours would wait in vain."""
        if self._plan.max_nodes == 1 or self._store is None:
            return 0
        try:
            return PrefixStore(f"launch-{self._round}", self._store).add("come", 0)
        except DistError:
            return 0  # the first node is gone; this node's workers will notice soon

    def get_run_id(self) -> str:
        """Return the id of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Tell the other nodes not to wait for this one any longer."""
        if self._plan.max_nodes > 1 and self._store is not None:
            with contextlib.suppress(DistError):
                self._store.set("closed", "1")
        return True


class _Wait:
    """A deadline that prints a message to stderr if waiting takes long."""

    def __init__(self, timeout_s: float, what: str) -> None:
        self._start = time.monotonic()
        self._timeout_s = timeout_s
        self._what = what
        self._said = False

    def goes_on(self) -> bool:
        waited_s = time.monotonic() - self._start
        if waited_s > _SAY_AFTER_S and not self._said:
            self._said = True
            print(f"still waiting for {self._what}", file=sys.stderr, flush=True)
        return waited_s < self._timeout_s


def _elastic_rendezvous(plan: LaunchPlan, join_timeout_s: float) -> RendezvousHandler:
    """torch's own rendezvous for nodes that come and go.

    If the endpoint is an IP address, torch would not let any node host the store, and workers would look for each other
    by host name. So both are decided here.
    """
    address, port = plan.master_address, plan.master_port
    answer_s = _longest_wait_for_an_answer(join_timeout_s)
    local_address = address_towards(address)
    store: TCPStore | None = None
    if plan.node_rank == 0 if plan.node_rank is not None else is_own_address(address):
        # If several launchers run on one machine, the second finds the port taken by the first and joins it.
        with contextlib.suppress(OSError):
            store = host_store(address, port, _STORE_TIMEOUT)
    if store is None:
        try:
            store = join_store(address, port, answer_s)
        except OSError as error:
            raise EnvironmentSetupError(
                f"cannot reach the rendezvous at {address}:{port} (--rdzv-endpoint): {first_line(error)}"
            ) from error
    run_id = _common_run_id(store, plan)
    return create_handler(
        store,
        C10dRendezvousBackend(store, run_id),
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{address}:{port}",
            run_id=run_id,
            min_nodes=plan.min_nodes,
            max_nodes=plan.max_nodes,
            local_addr=local_address,
            join_timeout=int(join_timeout_s),
            last_call_timeout=_LAST_CALL_S,
            keep_alive_interval=_KEEP_ALIVE_S,
        ),
    )


def is_own_address(host: str) -> bool:
    """True if a host name or address is this machine."""
    try:
        wanted = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise EnvironmentSetupError(f"the host {host} cannot be resolved: {error}") from error
    return not wanted.isdisjoint(entry.address for entries in psutil.net_if_addrs().values() for entry in entries)


def address_towards(host: str) -> str:
    """Return this machine's address on the route to a host; no packet is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EnvironmentSetupError(f"the host {host} cannot be reached: {error}") from error
