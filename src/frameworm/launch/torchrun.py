"""Starts this node's workers through torch's own elastic agent, the one inside torchrun."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.environment import added_to_environment, worker_environment
from frameworm.launch.failures import FirstCause, WorkerFailure, first_cause, worker_failure
from frameworm.launch.plan import LaunchPlan
from frameworm.launch.rendezvous import make_rendezvous
from frameworm.launch.stores import first_line
from frameworm.records.printable import printable

_STOP_CODES = {signal.SIGINT: 130}  # any other signal that ends us is a preemption
_PREEMPTED = 75
_STOPPED = {130, _PREEMPTED}
_SPREAD_INTERVAL_S = 1.0
_LINGER_S = 5.0


def launch_workers(
    plan: LaunchPlan,
    command: list[str],
    usable_cpus: int | None = None,
    max_restarts: int = 0,
    join_timeout_s: float = 900.0,
    stop_grace_s: float = 30.0,
    failure_grace_s: float = 20.0,
) -> int:
    """Start this node's workers, wait for them, and report failures.

    Args:
        plan: A plan whose action is `launch`.
        command: The worker's command line, the same for each.
        usable_cpus: Cores to divide among the workers; default: this process's affinity.
        max_restarts: How often all workers are restarted after a failure.
        join_timeout_s: Longest wait for the other nodes.
        stop_grace_s: Time for the workers to save when the launcher is told to stop.
        failure_grace_s: Time for the other workers to end after one has failed.

    Returns:
        The exit code: 0, that of the worker that failed first, 130 after SIGINT or 75 after another signal. The first
        cause is the last thing printed on stderr.
    """
    assert plan.action == "launch"
    cpus = usable_cpus or len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(prefix="frameworm-launch-") as folder,
        _signals_raise(),
        _quiet_agent(),
        added_to_environment(worker_environment(plan.nproc_per_node, cpus)),
    ):
        try:
            rendezvous = make_rendezvous(plan, join_timeout_s)
            agent = _NodeAgent(
                WorkerSpec(
                    role="worker",
                    local_world_size=plan.nproc_per_node,
                    entrypoint=command[0],
                    # The agent expands templates in arguments, so a literal dollar must be doubled.
                    args=tuple(argument.replace("$", "$$") for argument in command[1:]),
                    rdzv_handler=rendezvous,
                    max_restarts=max_restarts,
                    monitor_interval=0.1,
                ),
                DefaultLogsSpecs(log_dir=folder),
                stop_grace_s=stop_grace_s,
                failure_grace_s=failure_grace_s,
            )
            result = agent.run()
            # Not after a signal: the remaining nodes of an elastic job must be able to meet again.
            rendezvous.shutdown()
        except SignalException as stop:
            _report(_what_workers_said(Path(folder)))
            return _STOP_CODES.get(stop.sigval, _PREEMPTED)
        except (DistError, RendezvousError) as error:
            raise EnvironmentSetupError(f"the launchers of the nodes lost each other: {first_line(error)}") from error
    if not result.is_failed():
        return 0
    cause = agent.cause_elsewhere or first_cause(agent.worker_failures(result))
    if cause.trace is not None:
        _report(cause.trace.rstrip())
    _report(cause.text)
    return cause.exit_code


class _NodeAgent(LocalElasticAgent):
    """torch's agent, with a bounded shutdown after failures, and failures reported between nodes."""

    def __init__(
        self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs, stop_grace_s: float, failure_grace_s: float
    ) -> None:
        super().__init__(spec, logs_specs)
        self.cause_elsewhere: FirstCause | None = None
        self._stop_grace_s = stop_grace_s
        self._failure_grace_s = failure_grace_s
        self._close_within_s = stop_grace_s
        self._stopped: set[int] = set()  # local ranks still running when this agent stopped them
        self._observed = 0.0
        self._next_look = 0.0

    def worker_failures(self, result: RunResult) -> list[WorkerFailure]:
        """Return the failed workers of the last round."""
        return [
            worker_failure(
                rank, failure.exitcode, failure.error_file_data, failure.local_rank in self._stopped, self._observed
            )
            for rank, failure in result.failures.items()
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._stopped.clear()
        context: Any = self._pcontext
        close: Callable[..., None] = context.close

        def exit_codes() -> dict[int, int | None]:
            return {local_rank: handler.proc.poll() for local_rank, handler in context.subprocess_handlers.items()}

        def close_in_time(death_sig: signal.Signals | None = None, timeout: float | None = None) -> None:
            # Called without a signal, the agent closes because a worker has failed, and would give the others 30 s.
            timeout = self._close_within_s  # torch 2.11 passes none
            if death_sig is None:
                self._observed = time.time()
                timeout = self._failure_grace_s
                deadline = time.monotonic() + self._stop_grace_s
                # Ranks that agreed to stop do not end at the same moment; the one that writes the checkpoint is the
                # last.
                while _stopping(exit_codes().values()) and time.monotonic() < deadline:
                    time.sleep(0.05)
                self._stopped |= {local_rank for local_rank, code in exit_codes().items() if code is None}
            close(death_sig, int(timeout))

        context.close = close_in_time
        return pids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        forwarded = death_sig if death_sig in (signal.SIGINT, signal.SIGUSR1) else signal.SIGTERM
        try:
            super()._shutdown(forwarded)
        except SignalException as again:
            # On a second Ctrl-C the workers get it too and stop saving.
            self._close_within_s = self._failure_grace_s
            super()._shutdown(again.sigval)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and self._remaining_restarts > 0:
            self._consider_restart(result)
        if worker_group.group_world_size == 1 or worker_group.spec.max_restarts > 0:
            return result
        if result.state == WorkerState.FAILED:
            self._tell_other_nodes(worker_group, first_cause(self.worker_failures(result)))
        elif result.state == WorkerState.HEALTHY and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _SPREAD_INTERVAL_S
            self.cause_elsewhere = self._ask_other_nodes(worker_group)
            if self.cause_elsewhere is not None:
                assert self._pcontext is not None
                self._pcontext.close()
                return RunResult(state=WorkerState.FAILED)
        return result

    def _consider_restart(self, result: RunResult) -> None:
        """Report why the workers restart, or prevent it: after a stop, or a failure that a restart would repeat."""
        failures = self.worker_failures(result)
        cause = first_cause(failures)
        if cause.exit_code in _STOPPED or any(failure.final for failure in failures):
            self._remaining_restarts = 0
            return
        left = self._remaining_restarts - 1
        _report(f"{cause.text}\nrestarting the workers from the last checkpoint ({left} more restarts allowed)")

    def _tell_other_nodes(self, worker_group: WorkerGroup, cause: FirstCause) -> None:
        """Post the cause, and keep the store open until the other nodes have read it."""
        store: Any = worker_group.store
        node_rank: Any = worker_group.group_rank
        if cause.exit_code in _STOPPED:
            return  # the ranks agreed to stop; each node's workers end by themselves
        try:
            store.compare_set("failed", "", json.dumps([cause.text, cause.exit_code]))
            store.add("told", 1)
            deadline = time.monotonic() + _LINGER_S
            while (
                node_rank == 0 and store.add("told", 0) < worker_group.group_world_size and time.monotonic() < deadline
            ):
                time.sleep(0.1)
        except DistError:
            pass  # the first node is already gone, so no one is left to tell

    def _ask_other_nodes(self, worker_group: WorkerGroup) -> FirstCause | None:
        store: Any = worker_group.store
        try:
            if not store.check(["failed"]):
                return None
            text, exit_code = json.loads(store.get("failed"))
            store.add("told", 1)
            return FirstCause(text, exit_code)
        except DistError:
            return FirstCause("the launcher of the first node is gone; see its output for the cause", 1)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Keep signals from ending the launcher with a traceback until torch's agent installs its own handlers."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"received signal {number}", signal.Signals(number))

    caught = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT]
    if threading.current_thread() is not threading.main_thread():
        caught = []
    before = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's log lines and its table of failures off the terminal."""
    logger = logging.getLogger("torch.distributed.elastic")
    propagate, silent = logger.propagate, logging.NullHandler()
    logger.propagate = False
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(silent)


def _what_workers_said(folder: Path) -> str | None:
    """Message after a stop: that of a worker that failed meanwhile, else that of the lowest rank."""
    said: list[tuple[bool, str, str]] = []
    for file in folder.glob("*/attempt_*/*/error.json"):
        try:
            message = json.loads(file.read_text(encoding="utf-8"))["message"]
            said.append((bool(message["extraInfo"].get("consequence")), file.parent.name, str(message["message"])))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return min(said)[2] if said else None


def _stopping(exit_codes: Iterable[int | None]) -> bool:
    """True if some workers have ended as requested, none in another way, and some are still running."""
    codes = set(exit_codes)
    return None in codes and bool(codes & _STOPPED) and codes <= {None, 0, *_STOPPED}


def _report(text: str | None) -> None:
    if text is not None:
        sys.stdout.flush()
        print(printable(text), file=sys.stderr, flush=True)
