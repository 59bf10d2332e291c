"""Whether a config can run on this machine, for `doctor`: resolved for it, and planned where it can be."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from frameworm.config.resolve import resolve
from frameworm.config.schema import Config
from frameworm.diagnose.machine import size
from frameworm.engine.memory_planner import MemoryPlanner
from frameworm.errors import ConfigError, DeviceError
from frameworm.hardware.devices import choose_device, supports_bf16
from frameworm.records.machine import Check, Intent, MachineFacts, PlanFacts
from frameworm.scaling.memory import MemoryReport
from frameworm.scaling.memory_model import capacity

log = logging.getLogger("frameworm")

GROUP = "config"
_STATE_BYTES = {"adamw": 8, "sgd": 4}
_SEVERAL = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Fitness:
    """A config as it would run here.

    Attributes:
        resolved: With every `auto` decided; for a GPU where it asks for one that is not here.
        intent: What it will run.
        checks: What of it does not fit this machine.
        plan: Its memory; None where nobody could plan it.
        notes: What else to know.
    """

    resolved: Config
    intent: Intent
    checks: tuple[Check, ...]
    plan: PlanFacts | None
    notes: tuple[str, ...] = ()


def judge_fit(config: Config, facts: MachineFacts, intent: Intent) -> Fitness:
    """Hold a config against this machine.

    Args:
        config: The config.
        facts: The machine.
        intent: Processes and nodes; one process means one per GPU where the config asks for several.

    Raises:
        ConfigError: It cannot run anywhere with that many processes.
    """
    if intent.world_size == 1 and config.parallel.strategy in _SEVERAL and len(facts.gpus) > 1:
        intent = replace(intent, processes=len(facts.gpus))
    resolved, problem = _resolve(config, facts, intent.world_size)
    plan, notes = _plan(config, resolved, facts, intent.world_size)
    checks = [problem or Check("config", GROUP, "can run here", "ok")]
    if plan is not None and plan.fits is False:
        found = f"needs {size(plan.total_bytes)} of {size(plan.memory_bytes)} that training may use"
        remedy = "frameworm memory --config F shows the cheapest change"
        if plan.changes:
            remedy = " ".join(f"--set {item}" for item in plan.changes) + "; " + remedy
        checks.append(Check("memory plan", GROUP, found, "problem", remedy, "the first step would run out of memory"))
    elif plan is not None and plan.fits:
        found = f"{size(plan.total_bytes)} of {size(plan.memory_bytes)} that training may use"
        checks.append(Check("memory plan", GROUP, found, "ok", "", "planned by a dry run (frameworm memory)"))
    workers = resolved.data.num_workers
    intent = replace(
        intent,
        on_gpu=resolved.gpu.device == "cuda",
        compiles=resolved.gpu.compile_model,
        workers=workers if isinstance(workers, int) else 0,
        checkpoint_bytes=None if plan is None else plan.checkpoint_bytes,
        keep=resolved.checkpoint.keep,
    )
    return Fitness(resolved, intent, tuple(checks), plan, notes)


def _resolve(config: Config, facts: MachineFacts, world_size: int) -> tuple[Config, Check | None]:
    """The config for this machine, or else for a GPU that is not here, and then what is wrong."""
    if facts.gpus:
        bf16 = supports_bf16(choose_device("cuda"))
        return resolve(config, world_size=world_size, device="cuda", bf16=bf16), None
    try:
        return resolve(config, world_size=world_size, device="cpu", bf16=True), None
    except (ConfigError, DeviceError) as error:
        resolved = resolve(config, world_size=world_size, device="cuda", bf16=True)
        found = "; ".join(str(error).splitlines())
        remedy = "run it where there is a GPU; the checklist below is for one"
        return resolved, Check("config", GROUP, found, "problem", remedy, "it cannot start on this machine")


def _plan(
    config: Config, resolved: Config, facts: MachineFacts, world_size: int
) -> tuple[PlanFacts | None, tuple[str, ...]]:
    """The memory plan for the kind of device that training will use."""
    kind = resolved.gpu.device
    chosen = config.model_copy(update={"gpu": config.gpu.model_copy(update={"device": kind})})
    try:
        planner = MemoryPlanner(chosen, world_size)
        report = planner.report()
    except Exception as error:  # an own workload may need its data, or ask tensors for values
        log.debug("no plan of the memory", exc_info=True)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return None, (f"no memory plan: {reason}",)
    return plan_facts(report, resolved), ()


def plan_facts(report: MemoryReport, resolved: Config) -> PlanFacts:
    """What the checklist needs of a memory report."""
    usable = None
    if report.memory_bytes is not None:
        usable = int(capacity(report.memory_bytes, report.memory_fraction, report.plan.setting.device))
    training = resolved.training
    state = _STATE_BYTES[training.optimizer] if training.optimizer == "adamw" or training.momentum else 0
    whole = [plan for plan in report.strategies if plan.setting.strategy == "ddp"]
    ddp_fits = None
    if whole and report.memory_bytes is not None:
        ddp_fits = whole[0].fits(report.memory_bytes, report.memory_fraction)
    return PlanFacts(
        parameters=report.parameters,
        parameter_bytes=report.parameters * 4,
        checkpoint_bytes=report.parameters * (4 + state),
        total_bytes=report.plan.total,
        memory_bytes=usable,
        fits=report.fits,
        largest=dict(report.largest_by),
        ddp_fits=ddp_fits,
        changes=tuple(report.changes[0].overrides) if report.changes else (),
    )
