"""What kernels are for: determined by the operator that launched them, or else by their own names."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from frameworm.observe.trace.device import matmul_kind
from frameworm.observe.trace.events import OPERATOR, TraceEvents
from frameworm.observe.trace.host import Nesting
from frameworm.records.trace import ATTENTION, MATRIX_PRODUCTS, OTHER_KERNELS

_KINDS = (MATRIX_PRODUCTS, ATTENTION, OTHER_KERNELS)
_ATTENTION = re.compile(r"attention|attn|sdpa", re.I)
_PRODUCTS = re.compile(
    r"(^|::|_)(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|linear|matmul|einsum|product|feed_forward|gelu_slope)_?(\.|$)"
    r"|conv(?!ert)|rnn|lstm|gru|linear_cross_entropy|triton_tem"
)
_ATTENTION_KERNEL = re.compile(r"flash|fmha|attention|attn|sdpa", re.I)


def kind_of_operator(name: str) -> str:
    """What an operator's own kernels are for, by the operator's name."""
    if _ATTENTION.search(name):
        return ATTENTION
    return MATRIX_PRODUCTS if _PRODUCTS.search(name) else OTHER_KERNELS


def kind_of_kernel(name: str) -> str:
    """The same by the name of a kernel, for kernels without an operator, such as those of a CUDA graph."""
    if _ATTENTION_KERNEL.search(name):
        return ATTENTION
    return OTHER_KERNELS if matmul_kind(name) is None else MATRIX_PRODUCTS


def kernel_kinds(
    events: TraceEvents, nesting: Nesting, launch: npt.NDArray[np.int64]
) -> dict[str, npt.NDArray[np.bool_]]:
    """For each kind, a mask of the device events that belong to it.

    Args:
        events: The events.
        nesting: Their nesting.
        launch: For each device event the host event that launched it, or -1.
    """
    kinds, names = events.host["kind"], events.host["name"].astype(np.int64)
    by_operator = [_KINDS.index(kind_of_operator(name)) for name in events.names]
    by_kernel = [_KINDS.index(kind_of_kernel(name)) for name in events.names]
    known: dict[int, int] = {-1: -1}  # launching call -> kind, or -1 if there is no operator around it
    found = np.empty(len(launch), dtype=np.int64)
    for position, (call, name) in enumerate(zip(launch.tolist(), events.device["name"].astype(np.int64).tolist())):
        if call not in known:
            at = call
            while at >= 0 and kinds[at] != OPERATOR:
                at = int(nesting.parent[at])
            known[call] = by_operator[names[at]] if at >= 0 else -1
        found[position] = by_kernel[name] if known[call] < 0 else known[call]
    return {kind: found == index for index, kind in enumerate(_KINDS)}
