"""Fused linear head and cross-entropy: the logits exist only for a chunk of tokens at a time.

Logits of 16,384 tokens over 50,304 words take 1.6 GB in bf16, more than everything else that GPT-2 keeps for backward,
and torch's own cross-entropy also holds them in fp32. Here a chunk's logits are turned into their gradient in place and
used before the next chunk is computed. So gradients are computed in forward; backward only scales them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from frameworm.errors import ModelError
from frameworm.models.kernels.cublas_lt import multiply
from frameworm.models.kernels.cublas_plan import Ending

LOGITS_BYTES = 2**30  # of one chunk: large enough for fast matrix products, small compared with the model
_FEWEST_TOKENS = 1024
_AUTOCAST = ("cpu", "cuda")  # devices with autocast; the compiler cannot trace torch's own check
_TILE = 128  # tokens; matrix units prefer multiples of it

Rows = Callable[[Tensor, Tensor, Tensor, int, bool], None]


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, chunk_tokens: int | None = None
) -> Tensor:
    """Compute the mean cross-entropy of `hidden @ weight.T` against the targets.

    Matrix products use autocast's dtype, or else that of `hidden`; softmax, loss and the sum of the weight's gradient
    are fp32. There is no second derivative.

    Args:
        hidden: [tokens, width].
        weight: [vocabulary, width]; may be shared with the embedding.
        targets: int64, [tokens].
        ignore_index: Target that does not count.
        chunk_tokens: Tokens whose logits are held at a time; None to choose by size.

    Returns:
        A scalar, fp32; 0 if no target counts.
    """
    device_type = hidden.device.type
    if device_type in _AUTOCAST and torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    count = (targets != ignore_index).sum().clamp(min=1).float()
    return summed_cross_entropy(hidden, weight, targets, ignore_index, chunk_tokens) / count


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Like `linear_cross_entropy`, but the sum over the targets, and in the dtype of `hidden` regardless of autocast.

    Args:
        bias: [vocabulary], added to the logits.
    """
    asked = torch.is_grad_enabled()
    trains_weight = asked and (weight.requires_grad or (bias is not None and bias.requires_grad))
    wanted = trains_weight or (asked and hidden.requires_grad)
    frozen = wanted and not trains_weight
    chunk = chunk_tokens or 0
    loss: Tensor = _linear_cross_entropy(hidden, weight, targets, ignore_index, chunk, wanted, bias, frozen)[0]
    return loss


def choose_chunk(tokens: int, vocabulary: int, element_bytes: int) -> int:
    """Choose tokens per chunk: equal chunks with logits within `LOGITS_BYTES`, but no tiny products."""
    most = max(_FEWEST_TOKENS, LOGITS_BYTES // (vocabulary * element_bytes))
    chunks = max(1, -(-tokens // most))
    return max(1, min(tokens, -(-tokens // (chunks * _TILE)) * _TILE))


@torch.library.custom_op(
    "frameworm::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor targets, int ignore_index, int chunk_tokens, bool with_gradients,"
    " Tensor? bias, bool frozen) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk_tokens: int,
    with_gradients: bool,
    bias: Tensor | None,
    frozen: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients (for a frozen head only the hidden state's); opaque to the compiler."""
    tokens, vocabulary = hidden.size(0), weight.size(0)
    chunk = chunk_tokens or choose_chunk(tokens, vocabulary, hidden.element_size())
    losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    grad_hidden, grad_weight, grad_bias = _gradient_buffers(hidden, weight, bias, with_gradients, frozen)
    to_rows = _rows_on(hidden.device.type)
    targets = targets.contiguous()
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, head = hidden.contiguous(), weight.to(hidden.dtype).contiguous()
        ending, added = (Ending.NONE, None) if bias is None else (Ending.SUM, bias.to(hidden.dtype))
        buffer = hidden.new_empty(min(chunk, tokens), vocabulary)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            inputs = hidden[part]
            logits = buffer[: inputs.size(0)]
            multiply(inputs, head, ending, bias=added, right_transposed=True, out=logits)
            to_rows(logits, targets[part], losses[part], ignore_index, with_gradients)
            if with_gradients:  # `logits` now holds their gradient
                multiply(logits, head, out=grad_hidden[part])
            if with_gradients and not frozen:
                multiply(logits, inputs, left_transposed=True, out=grad_weight, onto=grad_weight if start else None)
                if bias is not None:
                    grad_bias += logits.sum(0, dtype=torch.float32)
    return losses.sum(), grad_hidden, grad_weight, grad_bias


@_linear_cross_entropy.register_fake
def _shapes(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk_tokens: int,
    with_gradients: bool,
    bias: Tensor | None,
    frozen: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = torch.empty((), dtype=torch.float32, device=hidden.device)
    return loss, *_gradient_buffers(hidden, weight, bias, with_gradients, frozen)


def _gradient_buffers(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: bool, frozen: bool
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = [hidden.new_empty(0, dtype=torch.float32) for _ in range(2)]
    if not wanted:
        return hidden.new_empty(0), nothing[0], nothing[1]
    grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if frozen:
        return grad_hidden, nothing[0], nothing[1]
    # Without tokens, no product fills the weight's gradient.
    make = torch.empty if hidden.size(0) else torch.zeros
    grad_weight = make(weight.shape, dtype=torch.float32, device=weight.device)
    grad_bias = nothing[1] if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    return grad_hidden, grad_weight, grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    weight, bias = inputs[1], inputs[6]
    ctx.dtypes = (output[1].dtype, weight.dtype, None if bias is None else bias.dtype)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(other is not None for other in others):
        raise ModelError(
            "the fused loss has no second derivative, and this training asks for one; set model.fused_loss or "
            "training.fused_loss to false"
        )
    result: list[Tensor | None] = [None] * 8
    if grad_loss is None:
        return tuple(result)
    # Multiplied only here, as `grad_loss` contains the loss scale: small fp16 gradients survive.
    for place, gradient, dtype in zip((0, 1, 6), ctx.saved_tensors, ctx.dtypes):
        if ctx.needs_input_grad[place]:
            result[place] = (gradient.float() * grad_loss).to(dtype)
    return tuple(result)


_linear_cross_entropy.register_autograd(_backward, setup_context=_save)


@lru_cache
def _rows_on(device_type: str) -> Rows:
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        from frameworm.models.kernels.cross_entropy import cross_entropy_rows

        return cross_entropy_rows
    return _cross_entropy_rows


def _cross_entropy_rows(
    logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, with_gradient: bool
) -> None:
    """Do the same as the kernel `cross_entropy_rows` with torch's own operations."""
    real = targets != ignore_index
    column = targets.where(real, 0).unsqueeze(1)
    values = logits.float()
    log_total = values.logsumexp(1, keepdim=True)
    chosen = values.gather(1, column) - log_total
    losses.copy_((-chosen).squeeze(1).where(real, 0.0))
    if with_gradient:
        gradient = (values - log_total).exp_()
        gradient.scatter_(1, column, chosen.expm1())
        logits.copy_(gradient.masked_fill_(~real.unsqueeze(1), 0.0))
