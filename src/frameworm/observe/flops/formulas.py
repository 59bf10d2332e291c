"""The arithmetic of one operation, from its arguments.

A multiplication and an addition are two FLOPs. Matrix products, convolutions, recurrent layers and attention are
counted, forward and backward; element-wise work, norms, softmax and look-ups are not, as is usual for MFU. Attention
counts the pairs of query and key that see each other, and its backward twice its forward: scores that a kernel
recomputes are not the model's work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frameworm.torch_private.tensors import FakeTensor, sparse_count

_MASKED = -9999.0  # masked scores are below this: -inf, the lowest number, or -10,000 was added to them
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of one operation.

    Attributes:
        flops: The FLOPs.
        dtype: Type of the multiplied numbers.
        by_pairs: Whether it is attention, which grows with the square of a sequence's length.
        real: Whether padding is excluded already, because the operation was given lengths or a mask.
        product: Batch, rows, inner width and columns, if it is a matrix product.
    """

    flops: float
    dtype: str
    by_pairs: bool = False
    real: bool = False
    product: tuple[int, int, int, int] | None = None


def work_of(name: str, arguments: Mapping[str, Any], result: Any) -> Work | None:
    """What an operation computes; None if it is not counted.

    Args:
        name: The name with its namespace, such as `aten::mm`, without the overload.
        arguments: Arguments by the names of the operation's schema.
        result: The operation's result.
    """
    formula = _FORMULAS.get(name)
    if formula is not None:
        return formula(arguments, result)
    if ("attention" in name or "attn" in name) and _named(arguments, "query", "q") is not None:
        return _attention(name, arguments)
    return None


def type_name(tensor: Tensor) -> str:
    """A tensor's dtype as `hardware.devices` spells it."""
    return _TYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _named(arguments: Mapping[str, Any], *names: str) -> Any:
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def _product(left: str, right: str) -> Callable[[Mapping[str, Any], Any], Work]:
    """`left @ right`: each number on the left is multiplied with a row of the right, also in batches and groups."""

    def formula(arguments: Mapping[str, Any], result: Any) -> Work:
        one, other = arguments[left], arguments[right]
        columns = other.size(-1) if other.dim() > 1 else 1
        if one.layout != torch.strided:
            return Work(2 * sparse_count(one) * columns, type_name(one))
        if other.layout != torch.strided:
            return Work(2 * sparse_count(other) * one.numel() / max(one.size(-1), 1), type_name(one))
        inner = one.size(-1)
        plain = one.dim() == other.dim() and one.dim() in (2, 3)
        batch = one.size(0) if one.dim() == 3 else 1
        shape = (batch, one.size(-2), inner, columns) if plain else None
        return Work(2 * one.numel() * columns, type_name(one), product=shape)

    return formula


def _linear(inputs: str, *weights: str, times: int = 1) -> Callable[[Mapping[str, Any], Any], Work]:
    """Every row of the inputs is multiplied with all weights."""

    def formula(arguments: Mapping[str, Any], result: Any) -> Work:
        one, sizes = arguments[inputs], [arguments[name] for name in weights]
        rows = one.numel() // max(one.size(-1), 1)
        shape = (1, rows, one.size(-1), sizes[0].numel() // max(one.size(-1), 1))
        flops = 2 * rows * sum(item.numel() for item in sizes) * times
        return Work(flops, type_name(one), product=shape)

    return formula


def _linear_cross_entropy(arguments: Mapping[str, Any], result: Any) -> Work:
    """The output layer and its gradients, which are computed in forward."""
    times = 1 + (2 - bool(arguments["frozen"])) * bool(arguments["with_gradients"])
    return _linear("hidden", "weight", times=times)(arguments, result)


def _convolution(arguments: Mapping[str, Any], result: Any) -> Work:
    """Each number of the output (for a transposed convolution, of the input) is multiplied with a filter."""
    spread = arguments["input"] if arguments.get("transposed") else result
    return _filtered(spread, arguments, 1)


def _convolution_backward(arguments: Mapping[str, Any], result: Any) -> Work:
    """As much as forward for each requested gradient."""
    spread = arguments["input"] if arguments["transposed"] else arguments["grad_output"]
    return _filtered(spread, arguments, sum(bool(wanted) for wanted in arguments["output_mask"][:2]))


def _filtered(spread: Tensor, arguments: Mapping[str, Any], times: int) -> Work:
    weight = arguments["weight"]
    filters, inner = weight.size(0), weight.numel() // max(weight.size(0), 1)
    shape = None
    if not arguments.get("transposed") and arguments.get("groups", 1) == 1:
        shape = (1, spread.numel() // max(filters, 1), inner, filters)
    return Work(2 * spread.numel() * inner * times, type_name(weight), product=shape)


def _recurrent(*weights: str, times: int = 1) -> Callable[[Mapping[str, Any], Any], Work]:
    """Every token is multiplied once with every matrix of the layers."""

    def formula(arguments: Mapping[str, Any], result: Any) -> Work:
        inputs = arguments["input"]
        given = [arguments[name] for name in weights]
        found = [item for one in given for item in (one if isinstance(one, (list, tuple)) else [one])]
        tokens = inputs.numel() // max(inputs.size(-1), 1)
        flops = 2 * tokens * sum(item.numel() for item in found if item.dim() == 2) * times
        return Work(flops, type_name(inputs))

    return formula


def _attention(name: str, arguments: Mapping[str, Any]) -> Work:
    """Any kernel with queries, keys and values; torch's wrappers have heads before tokens, others tokens first."""
    query, key, value = (_named(arguments, word, word[0]) for word in ("query", "key", "value"))
    heads_first = "scaled_dot_product" in name or "flex" in name
    heads, width = query.size(-3 if heads_first else -2), query.size(-1) + value.size(-1)
    causal = bool(_named(arguments, "is_causal", "causal")) or arguments.get("custom_mask_type") in (1, 2)
    left = _named(arguments, "window_size_left")
    right = 0 if causal else _named(arguments, "window_size_right")
    window = _named(arguments, "window_size")
    if isinstance(window, (list, tuple)):
        left, right = window[0], 0 if causal else window[1]
    times = 2 if "backward" in name else 1
    borders = next((arguments[item] for item in arguments if item.startswith("cu") and item.endswith("q")), None)
    if isinstance(borders, Tensor) and not heads_first:
        longest = next((arguments[item] for item in arguments if item.startswith("max") and item.endswith("q")), 0)
        total = query.numel() // max(heads * query.size(-1), 1)
        pairs, real = _packed_pairs(borders, total, int(longest or 0), left, right)
        return Work(2 * pairs * heads * width * times, type_name(query), True, real)
    tokens = -2 if heads_first else -3
    length, seen = query.size(tokens), key.size(tokens)
    batch = query.numel() // max(length * heads * query.size(-1), 1)
    mask = _named(arguments, "attn_mask", "attn_bias", "bias")
    if isinstance(mask, Tensor) and mask.dim() >= 2 and has_values(mask):
        pairs = _masked_pairs(mask, batch, heads, length, seen)
        return Work(2 * pairs * width * times, type_name(query), True, True)
    pairs = batch * heads * _pairs(length, seen, left, right)
    return Work(2 * pairs * width * times, type_name(query), True)


def _causal_attention(times: int) -> Callable[[Mapping[str, Any], Any], Work]:
    def formula(arguments: Mapping[str, Any], result: Any) -> Work:
        sequences, length, _, heads, width = arguments["heads"].shape
        pairs = sequences * _pairs(length, length, None, 0)
        return Work(4 * pairs * heads * width * times, type_name(arguments["heads"]), True)

    return formula


def _short_attention(times: int) -> Callable[[Mapping[str, Any], Any], Work]:
    def formula(arguments: Mapping[str, Any], result: Any) -> Work:
        tokens, _, heads, width = arguments["heads"].shape
        right = 0 if arguments["causal"] else None
        pairs, real = _packed_pairs(arguments["offsets"], tokens, arguments["max_length"], None, right)
        return Work(4 * pairs * heads * width * times, type_name(arguments["heads"]), True, real)

    return formula


def has_values(tensor: Tensor) -> bool:
    """Whether values can be read now: not for fake or meta tensors, nor while a graph is captured."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _packed_pairs(
    borders: Tensor, tokens: int, longest: int, left: int | None, right: int | None
) -> tuple[float, bool]:
    """Pairs of packed sequences, and whether their lengths were known; if not, equal lengths are assumed."""
    if has_values(borders):
        return sum(_pairs(length, length, left, right) for length in borders.diff().tolist()), True
    sequences = max(borders.numel() - 1, 1)
    length = min(max(tokens // sequences, 1), longest or tokens)
    return tokens / max(length, 1) * _pairs(length, length, left, right), False


@functools.lru_cache(maxsize=4096)
def _pairs(length: int, seen: int, left: int | None, right: int | None) -> float:
    """Pairs of query and key; a query sees `left` keys before it and `right` after it; None or negative: all."""
    if left is not None and left < 0:
        left = None
    if right is not None and right < 0:
        right = None
    if left is None and right is None:
        return length * seen
    if left is None and right == 0 and length == seen:
        return length * (length + 1) / 2
    last = seen - 1
    first = (0 if left is None else max(place - left, 0) for place in range(length))
    after = (last if right is None else min(place + right, last) for place in range(length))
    return sum(max(end - begin + 1, 0) for begin, end in zip(first, after))


def _masked_pairs(mask: Tensor, batch: int, heads: int, length: int, seen: int) -> float:
    """Pairs that a mask allows, over batch and heads; a token that cannot see itself is padding."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape) if mask.dim() < 4 else mask
    wanted = (batch, heads, length, seen)
    copies = 1
    for dimension, size in enumerate(wanted):
        if dimension < 3 and (mask.size(dimension) == 1 or mask.stride(dimension) == 0):
            mask = mask.narrow(dimension, 0, 1)
            copies *= size if dimension < 2 else 1
    return copies * pairs_of(mask.expand(*mask.shape[:3], seen), length)


def pairs_of(scores: Tensor, length: int | None = None) -> float:
    """Pairs that a mask, or masked scores, allow; a token that cannot see itself is padding.

    Args:
        scores: [..., queries, keys]; one row may stand for all queries.
        length: Number of queries; None: the number of rows.
    """
    allowed = scores if scores.dtype == torch.bool else scores > _MASKED
    rows, seen = allowed.shape[-2:]
    length = rows if length is None else length
    keys = allowed.sum(-1)
    if length != seen:
        return float(keys.sum()) * length / rows
    itself = allowed[..., 0, :] if rows == 1 else allowed.diagonal(dim1=-2, dim2=-1)
    return float((keys * itself).sum())


_Formula = Callable[[Mapping[str, Any], Any], Work]
_FORMULAS: dict[str, _Formula] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_int_mm", "aten::_scaled_mm"), _product("self", "mat2")),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), _product("self", "mat2")),
    **dict.fromkeys(
        ("aten::addmm", "aten::addmm_", "aten::_addmm_activation", "aten::_sparse_addmm"), _product("mat1", "mat2")
    ),
    **dict.fromkeys(("aten::baddbmm", "aten::baddbmm_", "aten::addbmm"), _product("batch1", "batch2")),
    "aten::mv": _product("self", "vec"),
    "aten::addmv": _product("mat", "vec"),
    "aten::linear": _linear("input", "weight"),
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"), _convolution),
    **dict.fromkeys(("aten::cudnn_convolution", "aten::_slow_conv2d_forward"), _convolution),
    "aten::convolution_backward": _convolution_backward,
    "aten::_cudnn_rnn": _recurrent("weight"),
    "aten::_cudnn_rnn_backward": _recurrent("weight", times=2),
    "aten::mkldnn_rnn_layer": _recurrent("weight0", "weight1"),
    "aten::mkldnn_rnn_layer_backward": _recurrent("weight1", "weight2", times=2),
    # Ours. See models/products.py, feed_forward.py, linear_loss.py, causal_attention.py and short_attention.py.
    "frameworm::product": _product("left", "right"),
    "frameworm::linear": _linear("inputs", "weight"),
    "frameworm::feed_forward": _linear("inputs", "expand", "contract"),
    "frameworm::gelu_slope": _linear("gradient", "contract"),
    "frameworm::linear_cross_entropy": _linear_cross_entropy,
    "frameworm::causal_attention": _causal_attention(1),
    "frameworm::causal_attention_backward": _causal_attention(2),
    "frameworm::short_attention": _short_attention(1),
    "frameworm::short_attention_backward": _short_attention(2),
}
