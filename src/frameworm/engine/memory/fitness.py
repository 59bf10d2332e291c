"""Whether a config can run on this machine, for `doctor`: resolves it and plans its memory if possible."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from frameworm.config.resolve import resolve
from frameworm.config.schema import Config
from frameworm.diagnose.machine.judge import size
from frameworm.engine.memory.planner import MemoryPlanner
from frameworm.errors import ConfigError, DeviceError
from frameworm.records.machine import Check, Intent, MachineFacts, PlanFacts
from frameworm.scaling.memory_model import capacity

log = logging.getLogger("frameworm")

GROUP = "config"
_STATE_BYTES = {"adamw": 8, "sgd": 4, "muon": 8, "adamw8bit": 2, "schedulefree": 8}  # muon: 4 for its matrices
_BF16_FROM = 8.0  # compute capability
_SEVERAL = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Fitness:
    """A config as it would run here.

    Attributes:
        resolved: The config with every `auto` decided; for a GPU if it asks for one that is missing here.
        intent: What will run: processes, device, workers and so on.
        checks: How the config fits this machine.
        plan: Its memory plan; None if none could be made.
        notes: Further remarks.
    """

    resolved: Config
    intent: Intent
    checks: tuple[Check, ...]
    plan: PlanFacts | None
    notes: tuple[str, ...] = ()


def judge_fit(config: Config, facts: MachineFacts, intent: Intent) -> Fitness:
    """Compare a config with this machine.

    Args:
        config: The config.
        facts: The machine.
        intent: Processes and nodes; one process means one per GPU if the config's strategy needs several.

    Raises:
        ConfigError: If it cannot run anywhere with that many processes.
    """
    if intent.world_size == 1 and config.parallel.strategy in _SEVERAL and len(facts.gpus) > 1:
        intent = replace(intent, processes=len(facts.gpus))
    resolved, problem = _resolve(config, facts, intent.world_size)
    plan, notes = _plan(config, resolved, facts, intent.world_size)
    checks = [problem or Check("config", GROUP, "can run here", "ok")]
    if plan is not None and plan.fits is False:
        found = f"needs {size(plan.total_bytes)} of {size(plan.memory_bytes)} that training may use"
        remedy = "frameworm memory with the same config shows the cheapest changes that fit"
        checks.append(Check("memory plan", GROUP, found, "problem", remedy, "the first step would run out of memory"))
    elif plan is not None and plan.fits:
        found = f"{size(plan.total_bytes)} of {size(plan.memory_bytes)} that training may use"
        checks.append(Check("memory plan", GROUP, found, "ok", "", "planned by a dry run (frameworm memory)"))
    workers = resolved.data.num_workers
    intent = replace(
        intent,
        on_gpu=None if problem is not None else resolved.gpu.device == "cuda",
        compiles=resolved.gpu.compile_model,
        workers=workers if isinstance(workers, int) else 0,
        checkpoint_bytes=None if plan is None else plan.checkpoint_bytes,
        keep=resolved.checkpoint.keep,
    )
    return Fitness(resolved, intent, tuple(checks), plan, notes)


def _resolve(config: Config, facts: MachineFacts, world_size: int) -> tuple[Config, Check | None]:
    """Resolve the config for this machine; if impossible, for a GPU, with a check that says what is wrong."""
    if facts.gpus:
        bf16 = (facts.gpus[0].capability or _BF16_FROM) >= _BF16_FROM
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
    """Plan memory for the kind of device that training will use."""
    kind = resolved.gpu.device
    chosen = config.model_copy(update={"gpu": config.gpu.model_copy(update={"device": kind})})
    try:
        planner = MemoryPlanner(chosen, world_size)
        return _plan_facts(planner, resolved, facts), ()
    except Exception as error:  # a custom workload may need its data or read tensor values
        log.debug("no plan of the memory", exc_info=True)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return None, (f"no memory plan: {reason}",)


def _plan_facts(planner: MemoryPlanner, resolved: Config, machine: MachineFacts) -> PlanFacts:
    """Plan only what the checklist needs: each further size or mode takes a dry run of a second or two."""
    setting, fraction, training = planner.setting, planner.memory_fraction, resolved.training
    state = _STATE_BYTES[training.optimizer] if training.optimizer != "sgd" or training.momentum else 0
    parameters = planner.shapes.parameters
    total = machine.memory_bytes
    if planner.device == "cuda":
        total = machine.gpus[0].memory_bytes if machine.gpus else None
    plan = planner.plan()
    facts = PlanFacts(
        parameters=parameters,
        parameter_bytes=parameters * 4,
        checkpoint_bytes=parameters * (4 + state + (0 if training.ema is None else 4)),
        total_bytes=plan.total,
    )
    if total is None:
        return facts
    fits = plan.fits(total, fraction)
    modes = {setting.checkpointing} if fits and setting.accumulation > 1 else set()
    modes |= {"off"} if fits and setting.checkpointing != "off" else set()
    return replace(
        facts,
        memory_bytes=int(capacity(total, fraction, planner.device)),
        fits=fits,
        largest={mode: planner.largest(replace(setting, checkpointing=mode), total, fraction, 1) for mode in modes},
        ddp_fits=planner.estimate(replace(setting, strategy="ddp")).fits(total, fraction)
        if setting.strategy.startswith("zero")
        else None,
    )
