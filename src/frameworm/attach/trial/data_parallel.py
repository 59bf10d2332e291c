"""Switches for models trained by several processes: how and how often gradients and parameters are gathered.

A loop that accumulates gradients over several passes needs their average over the processes only once, before the
update. Loops that do not use `no_sync` gather after every pass.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from frameworm.attach.patches import Patches
from frameworm.attach.script import AfterImport
from frameworm.attach.trial.switches import Switches
from frameworm.torch_private.compiler import keep_compiler_out
from frameworm.torch_private.distributed import has_hook, shard_groups, shard_state

_Function = Callable[..., Any]
_BYTES_PER_MIB = 2**20
_FSDP = "torch.distributed.fsdp"


def intercept_data_parallel(switches: Switches, patches: Patches) -> None:
    """Set the switches of DistributedDataParallel and fully_shard."""
    if switches.bucket_mib or switches.bucket_views or switches.static_graph:
        patches.set(DistributedDataParallel, "__init__", functools.partial(_with_buckets, switches))
    if switches.gather_once:
        GatherOnce().install(patches)
    if switches.shard_calls:
        around = functools.partial(_only_last, switches.shard_calls)
        AfterImport(_FSDP, lambda: patches.set(sys.modules[_FSDP], "fully_shard", around)).arm()


def _only_last(calls: int, original: _Function) -> _Function:
    """Wrap `fully_shard` so that only the last of `calls` takes effect, which is for the whole model."""
    made = 0

    @functools.wraps(original)
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        return module if made < calls else original(module, *args, **kwargs)

    return fully_shard


def _with_buckets(switches: Switches, original: _Function) -> _Function:
    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        if switches.bucket_mib and kwargs.get("bucket_cap_mb") is None:
            kwargs["bucket_cap_mb"] = switches.bucket_mib
        if switches.bucket_views:
            kwargs.setdefault("gradient_as_bucket_view", True)
        if switches.static_graph:
            kwargs.setdefault("static_graph", True)
        original(self, *args, **kwargs)

    return initialise


@dataclass
class _Accumulation:
    """State of a model's gradient accumulation.

    Attributes:
        model: The model.
        passes: Passes since the last update.
        before: Passes of the previous update.
        expected: Passes per update; 0 if unknown.
        owed: Whether gradients were accumulated and not gathered.
    """

    model: DistributedDataParallel
    passes: int = 0
    before: int = 0
    expected: int = 0
    owed: bool = False


class GatherOnce:
    """Makes only the last pass before an update gather gradients, once two successive updates took equally many.

    If an update comes after fewer passes, or not all parameters are used in all passes, gradients are averaged right
    before the update, so the result is always the same.
    """

    def __init__(self) -> None:
        self._followed: list[_Accumulation] = []

    def install(self, patches: Patches) -> None:
        """Watch passes, and calls that need gathered gradients."""
        patches.set(DistributedDataParallel, "forward", self._passing)
        for owner in (nn.utils, nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm"):
                patches.set(owner, name, self._needing)
        patches.set(torch.amp.GradScaler, "unscale_", self._needing)
        before = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._settle())
        after = register_optimizer_step_post_hook(self._updated)
        for hook in (before, after):
            patches.undo_by(hook.remove)

    def _of(self, model: DistributedDataParallel) -> _Accumulation:
        for known in self._followed:
            if known.model is model:
                return known
        self._followed.append(_Accumulation(model))
        return self._followed[-1]

    def _passing(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not torch.is_grad_enabled():
                return original(model, *args, **kwargs)
            known = self._of(model)
            known.passes += 1
            if not model.require_backward_grad_sync:  # the loop uses no_sync itself
                return original(model, *args, **kwargs)
            # The last pass would miss parameters that only earlier passes have used.
            looks_for_unused = model.find_unused_parameters and not model.static_graph
            known.owed = known.passes < known.expected or (known.expected > 0 and looks_for_unused)
            if not known.owed:
                return original(model, *args, **kwargs)
            with model.no_sync():
                result = original(model, *args, **kwargs)
            model.require_forward_param_sync = True  # buffers are synchronized before each pass, as without this
            return result

        return keep_compiler_out(forward)

    def _needing(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def use_gradients(*args: Any, **kwargs: Any) -> Any:
            self._settle()
            return original(*args, **kwargs)

        return use_gradients

    @torch.no_grad()
    def _settle(self) -> None:
        """Average gradients that no pass has gathered; all processes get here at the same point of the loop."""
        for known in self._followed:
            if known.owed:
                known.owed = False
                if known.passes < known.expected:
                    known.expected = 0  # the loop's pattern has changed: learn it again
                _average_gradients(known.model)

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        updated = {item for group in optimizer.param_groups for item in group["params"]}
        for known in self._followed:
            if known.passes and any(item in updated for item in known.model.parameters()):
                known.expected = known.passes if known.passes == known.before else known.expected
                known.before, known.passes = known.passes, 0


def _average_gradients(model: DistributedDataParallel) -> None:
    """Average gradients as DistributedDataParallel does, with one collective per dtype."""
    group, world_size = model.process_group, dist.get_world_size(model.process_group)
    parameters = [item for item in model.module.parameters() if item.requires_grad]
    used = torch.tensor([item.grad is not None for item in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for item, anywhere in zip(parameters, used.tolist()):
        if anywhere:
            item.grad = torch.zeros_like(item) if item.grad is None else item.grad
            kinds.setdefault(item.dtype, []).append(item.grad)
    for gradients in kinds.values():
        together = torch.cat([item.reshape(-1) for item in gradients]) / world_size
        dist.all_reduce(together, group=group)
        for item, part in zip(gradients, together.split([item.numel() for item in gradients])):
            item.copy_(part.view_as(item))


def facts_of_data_parallel(models: list[nn.Module], passes_per_update: float) -> dict[str, Any] | None:
    """Return what decides which of these switches apply; None if no model uses DistributedDataParallel.

    Args:
        models: The trained models.
        passes_per_update: Mean number of backward passes over the first updates.
    """
    found = [item for item in models if isinstance(item, DistributedDataParallel)]
    if not found:
        return None
    model = found[0]
    size = sum(item.numel() * item.element_size() for item in model.parameters() if item.requires_grad)
    return {
        "gradient_mib": size / _BYTES_PER_MIB,
        "bucket_mib": model.bucket_bytes_cap / _BYTES_PER_MIB,
        "bucket_views": bool(model.gradient_as_bucket_view),
        "looks_for_unused": bool(model.find_unused_parameters and not model.static_graph),
        "passes_per_update": passes_per_update,
        "hooked": has_hook(model),
    }


def gathers_twice(models: Sequence[nn.Module]) -> bool:
    """Whether a `fully_shard` model drops parameters after forward and gathers them again for backward."""
    return any(
        group.post_forward_mesh_info is not None
        for model in models
        for part in _sharded_parts(model)
        for group in shard_groups(part)
    )


def shard_calls(models: Sequence[nn.Module]) -> int:
    """Return how often `fully_shard` was called for the only sharded model and its parts; 0 if this does not apply."""
    found = [parts for model in models if (parts := _sharded_parts(model))]
    if len(found) != 1 or found[0][0] not in models:
        return 0
    return len({id(shard_state(part)) for part in found[0]})


def keep_gathered(model: nn.Module) -> None:
    """Keep the parameters gathered in forward until backward is done."""
    for part in _sharded_parts(model):
        part.set_reshard_after_forward(False, recurse=False)


def _sharded_parts(model: nn.Module) -> list[Any]:
    kind = getattr(sys.modules.get(_FSDP), "FSDPModule", None)
    return [] if kind is None else [part for part in model.modules() if isinstance(part, kind)]
