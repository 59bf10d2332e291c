"""A simulated GPU for dry runs on fake tensors, which have shapes but no values.

A torch build without CUDA cannot even simulate gradients of GPU tensors. So the fake tensors are CPU tensors, and this
module adds the differences: they claim to be on a GPU, attention uses the kernels that a GPU would choose, dropout
keeps its mask as on a GPU, and autocast leaves the same operations in fp32. A dry run then finds the same on every
machine. The simulation applies to the whole process while the context is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from frameworm.models import attention, causal_attention, products
from frameworm.models.linear_loss import choose_chunk
from frameworm.torch_private.execution import names_of_functions
from frameworm.torch_private.operators import efficient_attention, flash_attention, log_softmax_to, softmax_to

_HALF = (torch.float16, torch.bfloat16)
_WIDEST_FLASH_HEAD = 256


def _callables(names: str) -> frozenset[Any]:
    """Look up functions of torch and torch.nn.functional, and tensor methods, by name."""
    return names_of_functions(names, (torch, F, Tensor, torch.special))


# Computed in fp32 under a GPU's autocast but not under the CPU's.
_IN_FP32 = _callables(
    "layer_norm native_layer_norm group_norm exp expm1 log log10 log2 log1p reciprocal rsqrt pow __pow__ __rpow__ sum "
    "cumsum cumprod norm softplus logsumexp cosine_similarity mse_loss l1_loss smooth_l1_loss nll_loss kl_div "
    "binary_cross_entropy_with_logits"
)
_SOFTMAX = _callables("softmax")
_LOG_SOFTMAX = _callables("log_softmax")
_DROPOUT = _callables("dropout")
_CROSS_ENTROPY = _callables("cross_entropy cross_entropy_loss")
_ON_GPU = frozenset({Tensor.is_cuda.__get__})  # type: ignore[attr-defined]


@contextlib.contextmanager
def pretended_device(device: str) -> Iterator[None]:
    """Make fake CPU tensors behave as on that kind of device, and leave random states alone."""
    with contextlib.ExitStack() as stack:
        state = torch.get_rng_state()
        for owner in (torch, torch.random):
            stack.enter_context(replaced(owner, "get_rng_state", lambda: state))
            stack.enter_context(replaced(owner, "set_rng_state", lambda _state: None))
        if device == "cuda":
            stack.enter_context(replaced(products, "_HAS_LIBRARY", True))
            stack.enter_context(replaced(causal_attention, "_HAS_TRITON", True))
            stack.enter_context(replaced(attention, "flash_allowed", torch.backends.cuda.flash_sdp_enabled))
            stack.enter_context(PretendedGPU())
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Temporarily replace an attribute."""
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, usual)


class PretendedGPU(TorchFunctionMode):
    """Makes functions keep the same tensors as on a GPU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _ON_GPU:
            return True
        if function is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if function in _DROPOUT:
            return _drop(function, *args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if function in _IN_FP32:
                args = tuple(_in_fp32(item) for item in args)
            elif function in _CROSS_ENTROPY:
                return _cross_entropy(function, *args, **kwargs)
            elif function in _SOFTMAX and "dtype" not in kwargs and args[0].dtype in _HALF:
                return softmax_to(args[0], _dimension(args, kwargs), True)
            elif function in _LOG_SOFTMAX and "dtype" not in kwargs and args[0].dtype in _HALF:
                return log_softmax_to(args[0], _dimension(args, kwargs), True)
        return function(*args, **kwargs)


def _in_fp32(item: Any) -> Any:
    return item.float() if isinstance(item, Tensor) and item.dtype in _HALF else item


def _dimension(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    chosen = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return -1 if chosen is None else int(chosen)


def _drop(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Apply dropout as a GPU does, which keeps a mask of one byte per element."""
    inputs = args[0] if args else kwargs["input"]
    share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    if not training or not 0 < share < 1:
        return function(*args, **kwargs)
    return torch.native_dropout(inputs, share, True)[0]


def _cross_entropy(function: Callable[..., Any], scores: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute cross-entropy as a GPU does, whose softmax reads half precision and writes fp32 without a copy."""
    plain = not args and not (kwargs.keys() - {"ignore_index", "reduction"})
    if not plain or scores.dtype not in _HALF or target.is_floating_point():
        return function(_in_fp32(scores), target, *args, **kwargs)
    return F.nll_loss(log_softmax_to(scores, 1 if scores.dim() > 1 else 0, True), target, **kwargs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    kind = attention_kernel(query, attn_mask is not None)
    if enable_gqa and kind != "flash":
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if query.dim() != 4 or kind == "math":
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal)
    if kind == "flash":
        mixed = flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return mixed[0]  # type: ignore[no-any-return]
    bias = None
    if attn_mask is not None:
        bias = attn_mask if attn_mask.is_floating_point() else torch.zeros_like(attn_mask, dtype=query.dtype)
        bias = bias.to(query.dtype).expand(*query.shape[:3], key.size(2))
    wanted = torch.is_grad_enabled()
    mixed = efficient_attention(query, key, value, bias, wanted, dropout_p, is_causal, scale=scale)
    return mixed[0]  # type: ignore[no-any-return]


def attention_kernel(query: Tensor, masked: bool) -> str:
    """Return which of flash, efficient and math a current GPU would run."""
    width = query.size(-1)
    if query.dtype in _HALF and not masked and width <= _WIDEST_FLASH_HEAD and torch.backends.cuda.flash_sdp_enabled():
        return "flash"
    aligned = width % (8 if query.dtype in _HALF else 4) == 0
    if aligned and torch.backends.cuda.mem_efficient_sdp_enabled():
        return "efficient"
    return "math"


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool
) -> Tensor:
    """Compute attention with full scores and weights, like torch's own fallback."""
    scores = query @ key.transpose(-2, -1)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    return torch.dropout(weights, dropout, True) @ value if dropout else weights @ value


def hidden_workspace(name: str, args: tuple[Any, ...], device: str) -> int:
    """Return the bytes that a kernel allocates and frees internally, for kernels where this is large."""
    if name == "frameworm::linear_cross_entropy":
        hidden, weight, _, _, chunk_tokens = args[:5]
        tokens, element = hidden.size(0), hidden.element_size()
        chunk = min(tokens, chunk_tokens or choose_chunk(tokens, weight.size(0), element))
        head = 0 if weight.dtype == hidden.dtype else weight.numel() * element
        rows = 0
        if device == "cpu":  # torch's own operations: the gradient of the logits, and the logits themselves in fp32
            rows = chunk * weight.size(0) * (4 if element == 4 else 8)
        return int(chunk * weight.size(0) * element + head + rows)
    if name in _ATTENTION_BACKWARD:
        query = args[1]
        if device == "cuda" and query.dtype in _HALF:  # the gradient of the queries is summed in fp32
            return int(query.numel() * 4)
    return 0


_ATTENTION_BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_flash_attention_backward",
    "aten::_efficient_attention_backward",
    "torch_attn::_varlen_attn_backward",
}
