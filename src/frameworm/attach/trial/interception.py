"""Set switches from outside in an unmodified script, at the places in torch that it calls.

Each is set before the script can see another value, and explicit settings of the script win. `Patches.remove` restores
everything except changes to the script's own objects.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from frameworm.attach.patches import Patches
from frameworm.attach.trial.data_parallel import intercept_data_parallel, keep_gathered
from frameworm.attach.trial.host_waits import intercept_host_waits
from frameworm.attach.trial.loading import intercept_loading
from frameworm.attach.trial.switches import Switches
from frameworm.data.prefetch import map_tensors
from frameworm.models.blocks import alike, find_block_classes
from frameworm.torch_private.compiler import allow_graphs_of_alike_modules
from frameworm.torch_private.modules import compiled_call, plain_call, set_compiled_call

_Function = Callable[..., Any]
_HALF = (torch.bfloat16, torch.float16)
# Functions that query and allow each attention back end, keyed by its name in backward nodes.
_ALLOWS = {
    "flash": ("flash_sdp_enabled", "enable_flash_sdp"),
    "efficient": ("mem_efficient_sdp_enabled", "enable_mem_efficient_sdp"),
    "cudnn": ("cudnn_sdp_enabled", "enable_cudnn_sdp"),
}
_ATTENTION = "ScaledDotProduct"


def intercept(switches: Switches, patches: Patches) -> ModelSwitches:
    """Set the switches right after torch was imported.

    Returns:
        Sets the switches of models; call its `found` for each model that the script trains.
    """
    if switches.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if switches.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if switches.fused_optimizer:
        patches.set(torch.optim.Optimizer, "__init__", _fused)
    if switches.threads:
        torch.set_num_threads(switches.threads)
    if switches.attention != "any":
        _attend_by(switches.attention, patches)
    if switches.none_gradients:
        for owner in (torch.optim.Optimizer, nn.Module):
            patches.set(owner, "zero_grad", _dropping)
    intercept_host_waits(switches, patches)
    intercept_loading(switches, patches)
    intercept_data_parallel(switches, patches)
    return ModelSwitches(switches)


def _attend_by(wanted: str, patches: Patches) -> None:
    """Allow only one attention back end, besides the plain fallback.

    This holds for the whole process: activations recomputed in backward must use the same one.
    """
    for name, (is_allowed, allow) in _ALLOWS.items():
        allowing, before = getattr(torch.backends.cuda, allow), getattr(torch.backends.cuda, is_allowed)()
        patches.undo_by(functools.partial(allowing, before))
        allowing(name == wanted)


def attention_of(loss: torch.Tensor) -> str | None:
    """Return the attention back end used to compute a loss; None for none, or the plain one, which leaves no trace."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith(_ATTENTION):
            kind = node.name().removeprefix(_ATTENTION).lower()
            return next((name for name in _ALLOWS if kind.startswith(name)), None)
        waiting += [following for following, _ in node.next_functions]
    return None


def _dropping(original: _Function) -> _Function:
    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        original(self, True)

    return zero_grad


class ModelSwitches:
    """Sets the switches of a model when it is first trained."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches

    def found(self, module: nn.Module) -> None:
        """Set the switches of an outermost module before its first call in training."""
        switches = self._switches
        if switches.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if switches.keep_gathered:
            keep_gathered(module)
        if switches.compile_blocks:
            _compile_blocks(module)
        compiles = switches.compile or switches.cuda_graphs
        if not (compiles or switches.autocast != "off") or compiled_call(module) is not None:
            return
        trained = plain = plain_call(module)
        if compiles:
            mode = "reduce-overhead" if switches.cuda_graphs else None
            trained = functools.partial(_compiled(type(module).__name__, mode), plain)
        if switches.autocast != "off":
            trained = functools.partial(_in_half, trained)
        set_compiled_call(module, functools.partial(_called, module, plain, trained))


def _compile_blocks(model: nn.Module) -> None:
    """Compile the blocks that the model repeats; its own forward runs eagerly."""
    groups = [group for kind in find_block_classes(model) for group in alike(kind)]
    for group in groups:
        compiled = _compiled(type(group[0]).__name__)
        for block in group:
            if compiled_call(block) is None:
                plain = plain_call(block)
                set_compiled_call(block, functools.partial(_called, block, plain, functools.partial(compiled, plain)))
    if groups:
        allow_graphs_of_alike_modules(max(map(len, groups)))


def _called(module: nn.Module, plain: _Function, trained: _Function, *inputs: Any, **named: Any) -> Any:
    """Run evaluation eagerly, as its shapes and modes would need separate compilations."""
    call = trained if module.training and torch.is_grad_enabled() else plain
    return call(*inputs, **named)


def _in_half(call: _Function, *inputs: Any, **named: Any) -> Any:
    """Call in half precision and convert the result back to full precision."""
    kind = next((item.device.type for item in (*inputs, *named.values()) if isinstance(item, torch.Tensor)), "cpu")
    if torch.is_autocast_enabled(kind):
        return call(*inputs, **named)
    with torch.autocast(kind, torch.bfloat16):
        return map_tensors(call(*inputs, **named), _in_full)


def _in_full(item: torch.Tensor) -> torch.Tensor:
    return item.float() if item.dtype in _HALF else item


def _compiled(name: str, mode: str | None = None) -> _Function:
    """Return a compiled function that makes a call, in a frame of ours, as the compiler skips torch's own files."""
    own = types.FunctionType(_through.__code__.replace(co_name=f"{name}_training"), globals())
    return torch.compile(own, mode=mode)


def _through(call: _Function, *inputs: Any, **named: Any) -> Any:
    return call(*inputs, **named)


def _fused(original: _Function) -> _Function:
    @functools.wraps(original)
    def initialise(self: Any, params: Any, defaults: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        original(self, params, defaults, *args, **kwargs)
        if can_fuse(self):
            for settings in (self.defaults, *self.param_groups):  # groups added later take the defaults
                settings["fused"] = True
            self._step_supports_amp_scaling = True

    return initialise


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch has a fused kernel for the update, and the script has not chosen an implementation."""
    groups = optimizer.param_groups
    if not all("fused" in group and group["fused"] is None and group.get("foreach") is None for group in groups):
        return False
    if any(group.get(name) for group in groups for name in ("differentiable", "capturable")):
        return False
    parameters = [item for group in groups for item in group["params"]]
    return all(item.is_floating_point() and item.device.type in ("cpu", "cuda") for item in parameters)
