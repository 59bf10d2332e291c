"""Attention of Hugging Face models without padding and without host synchronization.

transformers lets a model compute attention and masks with functions registered under a name. Ours are registered when a
run needs them; the model is switched to them for the run and back when it ends.

- A captured step must not check on the host whether a mask hides anything, as transformers does to leave masks out. Our
  mask is always created.
- `gpu.padding_free`: before the first of the blocks that a model repeats, hidden states [B, W, ...] are gathered into
  one row [1, T, ...] of real tokens (`data.batches.real_tokens`), and scattered back after the last. Everything in
  between works per token except attention, which is given the boundaries of the samples.

The first batch is computed both ways before training. A model is refused if its loss differs, or depends on what its
blocks return for padding.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.data.batches.real_tokens import MASK, PLAN, PaddingPlanner, cut_back
from frameworm.data.batches.sizes import changed_parts
from frameworm.engine.model.compilation import compiled_around
from frameworm.engine.model.modes import restore_modes, start_evaluation
from frameworm.engine.model.packed_tokens import TokenPlan, packed, unpacked
from frameworm.engine.model.precision import allow_tf32
from frameworm.errors import ConfigError
from frameworm.models.attention import varlen_attention
from frameworm.models.blocks import find_repeated_blocks
from frameworm.numerics.dropout import dropout_is_off
from frameworm.numerics.randomness import random_state, restore_random_state
from frameworm.torch_private.compiler import mark_varying
from frameworm.torch_private.modules import compiled_call, set_compiled_call

NAME = "frameworm"
_SETTING = "_attn_implementation_internal"
_UNPACKS, _INNER = "_frameworm_unpacks", "_frameworm_inner"
_PADDING_COUNTS = (
    "its loss depends on what its blocks return for padding, as with targets of padding that are not -100, or where a "
    "sample is judged by a token that is padding"
)
_NOT_OFFERED = ("softcap", "s_aux", "position_bias", "head_mask")
# Relative tolerance between losses computed in different orders.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
_COARSE_TOLERANCE = 0.02


class _RefusalError(Exception):
    """Why a model cannot go without padding."""


# Per call of a block: the block, its input tensors and its output tensors.
_Calls = list[tuple[nn.Module, list[Tensor], list[Tensor]]]


class _State:
    """What the functions that transformers calls need to know about the current batch."""

    plan: TokenPlan | None = None
    adds_mask = False  # to batches without one, or transformers looks for packed sequences in their positions
    added = False
    calls: list[nn.Module] | None = None
    seen: _Calls | None = None


_state = _State()


def take_plan(batch: Any) -> Any:
    """Remove the plan from a batch and keep it for the model's attention and blocks; return the model's input."""
    _state.plan = None
    if not isinstance(batch, Mapping):
        return batch
    plan = batch.get(PLAN)
    if plan is not None:
        _state.plan = TokenPlan(*(plan[name] for name in ("places", "back", "offsets", "length")), *batch[MASK].shape)
        return {name: item for name, item in batch.items() if name != PLAN}
    _state.added = False
    if _state.adds_mask and batch.keys().isdisjoint((MASK, "position_ids")):
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2:
            _state.added = True
            return {**batch, MASK: torch.ones_like(ids)}
    return batch


def is_planned(batch: Any) -> bool:
    """Whether a batch includes a plan of its real tokens."""
    return isinstance(batch, Mapping) and PLAN in batch


def switchable(model: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules whose attention implementation can be set."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and callable(getattr(module, "set_attn_implementation", None)):
            found.append(module)
            inside.update(module.modules())
    return found


def widest_input(model: nn.Module) -> int | None:
    """Return the most positions that a model supports per sample; None if it does not say."""
    limits = [getattr(getattr(part, "config", None), "max_position_embeddings", None) for part in switchable(model)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


class ModelAttention:
    """Context that switches a model to our attention and restores it on exit.

    Args:
        model: Placed and wrapped, but not called yet.
        planner: Plans the batches of a run without padding; None if batches stay padded.
        captured: Whether the step is captured, so that nothing may wait for the device.

    Attributes:
        note: What was changed, for the summary.
    """

    def __init__(self, model: nn.Module, planner: PaddingPlanner | None, *, captured: bool) -> None:
        self._model = model
        self._planner = planner
        self._captured = captured
        self._configs: list[tuple[Any, Any]] = []
        self._blocks: list[tuple[nn.Module, type[nn.Module], Any]] = []
        self._switched = False

    @property
    def note(self) -> str | None:
        """What was changed, for the summary."""
        if self._planner is not None:
            return self._planner.note
        if not self._switched:
            return None
        return "attention masks were made without reading values from the device, so that the step could be captured"

    def __enter__(self) -> ModelAttention:
        if self._planner is not None:
            self._switch(switchable(self._model))
        elif self._captured:
            # Implementations other than sdpa create masks without reading values, or sdpa cannot replace them.
            self._switch([part for part in switchable(self._model) if _chosen(part) == "sdpa"])
        _state.adds_mask = self._switched and self._planner is None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def check(self, batch: Any, compute: Callable[[Any], Tensor]) -> None:
        """Patch the blocks, and compare the first batch's loss with and without padding.

        Args:
            batch: The batch with its plan.
            compute: Computes the loss of a batch with the unwrapped model.

        Raises:
            ConfigError: If the model cannot run without padding; the message says why.
        """
        assert self._planner is not None
        assert self._planner.first_width is not None
        blocks = find_repeated_blocks(self._model)
        if not self._switched:
            raise ConfigError(_refused("its attention cannot be chosen as transformers' models let one do"))
        if not blocks:
            raise ConfigError(_refused("it repeats no block"))
        for block in blocks:
            self._blocks.append((block, type(block), compiled_call(block)))
            # Compile only the inner part: packing would give the first block a different graph from the others.
            vars(block)[_INNER] = compiled_around(block, MethodType(type(block).forward, block))
            set_compiled_call(block, None)
            block.__class__ = _packing(type(block))
        reason = ""
        with _as_it_is(self._model, batch[MASK].device):
            padded = cut_back(batch, self._planner.first_width)
            expected, seen = self._observe(padded, compute)
            if any(_counts_padding(expected, outputs, padded[MASK]) for _, _, outputs in seen):
                raise ConfigError(_refused(_PADDING_COUNTS))
            expected = expected.detach()
            dtypes = {expected.dtype, *(item.dtype for block in blocks for item in block.parameters())}
            tolerance = max(_TOLERANCE.get(dtype, _COARSE_TOLERANCE) for dtype in dtypes)
            for ends in (_chain_ends(seen), set(blocks)):
                for block in blocks:
                    setattr(block, _UNPACKS, block in ends)
                calls: list[nn.Module] = []
                _state.calls = calls
                try:
                    with torch.no_grad():
                        found = compute(batch)
                except Exception as error:  # any operation of the model that needs one row per sample
                    text = str(error).strip().partition("\n")[0]
                    reason = text if isinstance(error, _RefusalError) else f"{type(error).__name__}: {text}"
                    continue
                finally:
                    _state.calls = None
                if not calls:
                    reason = "its attention does not go through transformers' attention interface"
                elif torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
                    return
                else:
                    reason = f"the loss of the first batch is {float(found):.6g} instead of {float(expected):.6g}"
        raise ConfigError(_refused(reason))

    def _observe(self, batch: Any, compute: Callable[[Any], Tensor]) -> tuple[Tensor, _Calls]:
        """Return the loss of the padded batch, differentiable down to the blocks' outputs, and the blocks' calls."""
        _state.seen = []
        try:
            with torch.enable_grad():
                return compute(batch), _state.seen
        except _RefusalError as error:
            raise ConfigError(_refused(str(error))) from None
        finally:
            _state.seen = None

    def _switch(self, parts: list[nn.Module]) -> None:
        """Switch submodules to our attention functions."""
        if not parts:
            return
        _register()
        for config in _configs_of(parts):
            self._configs.append((config, vars(config)[_SETTING]))
        for part in parts:
            part.set_attn_implementation(NAME)  # type: ignore[operator]
        self._switched = all(_chosen(part) == NAME for part in parts)
        if not self._switched:
            self._restore()

    def _restore(self) -> None:
        _state.plan, _state.adds_mask, _state.seen = None, False, None
        for config, chosen in self._configs:
            setattr(config, _SETTING, chosen)
        for block, kind, compiled in self._blocks:
            block.__class__ = kind
            set_compiled_call(block, compiled)
            for name in (_UNPACKS, _INNER):
                vars(block).pop(name, None)
        self._configs, self._blocks = [], []


def _refused(reason: str) -> str:
    return f"gpu.padding_free: this model cannot leave padding out: {reason}; turn gpu.padding_free off"


def _chosen(part: nn.Module) -> Any:
    return getattr(part.config, "_attn_implementation", None)


def _configs_of(parts: list[nn.Module]) -> list[Any]:
    """Find every config object that selects an attention implementation, including nested ones."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for part in parts for module in part.modules()]
    while waiting:
        config = waiting.pop()
        if _SETTING in getattr(config, "__dict__", {}) and id(config) not in found:
            found[id(config)] = config
            waiting += vars(config).values()
    return list(found.values())


@contextlib.contextmanager
def _as_it_is(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the model eagerly, in its own precision and without dropout, and leave its state unchanged."""
    # A model with mixed dtypes may only work under autocast.
    mixed = len({item.dtype for item in model.parameters() if item.is_floating_point()}) > 1
    plain = contextlib.nullcontext() if mixed else torch.autocast(device.type, enabled=False)
    modes, random = start_evaluation([model]), random_state(device)
    compiled = any(compiled_call(module) is not None or vars(module).get(_INNER) for module in model.modules())
    stance = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    try:
        with plain, allow_tf32(False), stance:
            yield
    finally:
        restore_modes(modes)
        restore_random_state(random, device)


def _counts_padding(loss: Tensor, outputs: list[Tensor], mask: Tensor) -> bool:
    """Whether the loss depends on what a block returns for padding."""
    leaves = [item for item in outputs if item.requires_grad]
    if not leaves or not loss.requires_grad:
        return False
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return any(bool(item[mask == 0].any()) for item in gradients if item is not None)


def _chain_ends(seen: _Calls) -> set[nn.Module]:
    """Find the blocks whose output does not feed the next one directly, or that are called more than once."""
    ends = set()
    called: set[nn.Module] = set()
    for place, (block, _, outputs) in enumerate(seen):
        following = seen[place + 1][1] if place + 1 < len(seen) else []
        goes_on = any(one is other for one in outputs for other in following)
        if not goes_on or block in called:
            ends.add(block)
        called.add(block)
    return ends


_made: dict[type[nn.Module], type[nn.Module]] = {}


def _packing(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a block's class that accepts padded or packed tokens and computes on packed ones."""
    if base in _made:
        return _made[base]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plan = _state.plan
        if _state.seen is not None:
            with torch.no_grad():
                result = _leaves(base.forward(self, *args, **kwargs))
            _state.seen.append((self, _tensors(args) + _tensors(kwargs), _tensors(result)))
            return result
        if plan is None:
            return base.forward(self, *args, **kwargs)
        inner = vars(self).get(_INNER)
        args, kwargs = packed(args, plan), packed(kwargs, plan)
        if inner is None:
            result = base.forward(self, *args, **kwargs)
        else:
            for item in _tensors(args) + _tensors(kwargs):
                if item.shape[:2] == (1, plan.places.shape[0]):
                    mark_varying(item, 1)  # one graph for all capacities
            result = inner(*args, **kwargs)
        return unpacked(result, plan) if getattr(self, _UNPACKS) else result

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    _made[base] = made = type(base.__name__, (base,), {**names, "forward": forward})
    return made


def _tensors(item: Any) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item]
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _leaves(item: Any) -> Any:
    """Detach a block's output and make it a leaf of a new graph."""
    if isinstance(item, Tensor):
        return item.detach().requires_grad_(item.is_floating_point())
    return changed_parts(item, _leaves)


def _register() -> None:
    """Register our functions with transformers, which the model's own code has already imported."""
    from transformers import AttentionInterface  # type: ignore[import-not-found, import-untyped, unused-ignore]

    AttentionInterface.register(NAME, attend)
    masks = sys.modules.get("transformers.masking_utils")
    if masks is not None:
        masks.AttentionMaskInterface.register(NAME, make_mask)


def make_mask(*args: Any, **given: Any) -> Any:
    """Create a batch's mask as for torch's attention, but without reading values; None if no mask is needed.

    Args:
        *args: Passed by transformers.
        **given: Passed by transformers.
    """
    from transformers import masking_utils  # type: ignore[import-not-found, import-untyped, unused-ignore]

    plan = _state.plan
    if plan is not None:
        window = given.get("local_size")
        if given.get("use_vmap"):
            raise _RefusalError("it uses an attention mask of its own")
        if window is not None and window < plan.width and window != getattr(given["config"], "sliding_window", None):
            raise _RefusalError("its attention is local, but not by a sliding window")
        return None
    if _state.added:
        given[MASK] = None
    # transformers decides differently while a model is compiled or captured: flash kernels would be lost, or compiled
    # code would not fit.
    if given.get(MASK) is None and _is_plain(masking_utils, given):
        return None
    given.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **given)


def _is_plain(masking_utils: Any, given: Mapping[str, Any]) -> bool:
    """Whether the mask would only say that attention is causal, or would hide nothing."""
    function, window = given.get("mask_function"), given.get("local_size")
    length, seen = given.get("q_length"), given.get("kv_length")
    if length is None or seen is None or (window is not None and seen >= window):
        return False
    if given.get("allow_is_causal_skip") and length == seen:
        return window is not None or function is getattr(masking_utils, "causal_mask_function", None)
    if given.get("allow_is_bidirectional_skip"):
        return window is not None or function is getattr(masking_utils, "bidirectional_mask_function", None)
    return False


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute a transformers layer's attention: per sample for packed tokens, else with torch's attention.

    Args:
        module: The layer.
        query: [samples, heads, tokens, head width].
        key: As `query`, possibly with fewer heads.
        value: As `key`.
        attention_mask: The mask from `make_mask`.
        dropout: Probability of dropping an attention weight.
        scaling: Factor on the scores.
        is_causal: Overrides the layer's own setting.
        sliding_window: How many tokens to one side a token can see.
        **more: Further arguments of some models.
    """
    plan = _state.plan
    unusual = next((name for name in _NOT_OFFERED if more.get(name) is not None), None)
    if unusual is not None and (plan is not None or _state.seen is not None):
        raise _RefusalError(f"its attention has a {unusual}")
    if plan is None:
        from transformers.integrations.sdpa_attention import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
            sdpa_attention_forward,
        )

        more.update(dropout=dropout, scaling=scaling, is_causal=is_causal, sliding_window=sliding_window)
        result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        return result
    if not torch.compiler.is_compiling():  # by then the first batch was checked, and sizes would become guards
        tokens = plan.places.shape[0]
        if query.shape[0] != 1 or query.shape[2] != tokens or key.shape[2] != tokens:
            raise _RefusalError(
                "it has attention outside of the blocks that it repeats, or to other tokens than its own"
            )
        if _state.calls is not None:
            _state.calls.append(module)
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype  # like torch's own
    query, key, value = (item.squeeze(0).transpose(0, 1).to(dtype).contiguous() for item in (query, key, value))
    mixed = varlen_attention(
        query,
        key,
        value,
        plan.offsets,
        plan.length,
        causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        dropout=0.0 if dropout_is_off() else dropout,
        scale=scaling,
        window=sliding_window if sliding_window is not None and sliding_window < plan.length else None,
    )
    return mixed.unsqueeze(0), None
