"""Matrix products whose ending is part of them, by cuBLASLt: a bias and a GELU forward, GELU's derivative backward.

torch has no way to ask for these. The library is the one that torch itself has loaded; only what is needed of it is
declared here. It counts columns first, so a matrix of ours is its transpose to it, and the factors change places.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import lru_cache
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor

_WORKSPACE_BYTES = 32 * 2**20  # what NVIDIA advises for Hopper
_COMPUTE_FP32, _FP32 = 68, 0
_DTYPES = {torch.bfloat16: 14, torch.float16: 2}
# Attributes of a product and of the search for its kernel.
_TRANSPOSE_A, _EPILOGUE, _BIAS, _AUX, _AUX_STRIDE = 3, 7, 8, 11, 12
_MAX_WORKSPACE = 1
_ALIGNMENT = 16  # bytes


class Ending(enum.IntEnum):
    """What happens to the product before it is written."""

    GELU_OF_SUM = 164  # adds a bias, keeps the sum aside, applies GELU in its tanh form
    GELU_SLOPE = 192  # multiplies by GELU's derivative at what was kept aside


class _CublasError(RuntimeError):
    """The library cannot do it."""


class _Found(ctypes.Structure):
    """A kernel that the library proposes."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def multiply(
    left: Tensor, right: Tensor, ending: Ending, aside: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """`left @ right`, or `left @ right.T` where `transposed`, with an ending.

    Args:
        left: [m, k], contiguous, bf16 or fp16; all others alike.
        right: [k, n], or [n, k] where `transposed`; contiguous.
        aside: [m, n]: written by GELU_OF_SUM, read by GELU_SLOPE.
        bias: [n], for GELU_OF_SUM.
    """
    m, k = left.shape
    n = right.size(0) if transposed else right.size(1)
    result = left.new_empty(m, n)
    if not result.numel():
        return result
    with torch.cuda.device(left.device):
        plan = _plan(m, n, k, left.dtype, ending, transposed, left.device.index)
        if plan is None:
            return multiply_in_steps(left, right, ending, aside, bias, transposed)
        plan.run(left, right, aside, bias, result)
    return result


def multiply_in_steps(
    left: Tensor, right: Tensor, ending: Ending, aside: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """The same by torch's own operations."""
    product = left @ (right.t() if transposed else right)
    if ending is Ending.GELU_SLOPE:
        return torch.ops.aten.gelu_backward(product, aside, approximate="tanh")  # type: ignore[no-any-return]
    assert bias is not None
    torch.add(product, bias, out=aside)
    return F.gelu(aside, approximate="tanh")


@lru_cache
def library() -> ctypes.CDLL | None:
    """cuBLASLt of this torch; None where there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


def fits(*sizes: int) -> bool:
    """Whether rows of these lengths lie as the kernels want them."""
    return all(size > 0 and size * 2 % _ALIGNMENT == 0 for size in sizes)


class _Plan:
    """One product's sizes, and the kernel for them."""

    def __init__(self, m: int, n: int, k: int, dtype: torch.dtype, ending: Ending, transposed: bool) -> None:
        found = library()
        assert found is not None
        self._library = found
        self._lock = Lock()  # the pointers of one product are set before it is launched
        self._handle = _handle(torch.cuda.current_device())
        self._product = c_void_p()
        self._call("MatmulDescCreate", byref(self._product), c_int(_COMPUTE_FP32), c_int(_FP32))
        self._set(_TRANSPOSE_A, c_int(1 if transposed else 0))
        self._set(_EPILOGUE, c_int(ending))
        self._set(_AUX_STRIDE, c_int64(n))
        self._right = self._layout(k, n, dtype) if transposed else self._layout(n, k, dtype)
        self._left, self._result = self._layout(k, m, dtype), self._layout(n, m, dtype)
        preference, proposals, count = c_void_p(), (_Found * 1)(), c_int()
        self._call("MatmulPreferenceCreate", byref(preference))
        most = c_uint64(_WORKSPACE_BYTES)
        self._call("MatmulPreferenceSetAttribute", preference, c_int(_MAX_WORKSPACE), byref(most), c_size_t(8))
        layouts = (self._right, self._left, self._result, self._result)
        self._call(
            "MatmulAlgoGetHeuristic",
            self._handle,
            self._product,
            *layouts,
            preference,
            c_int(1),
            proposals,
            byref(count),
        )
        self._call("MatmulPreferenceDestroy", preference)
        if not count.value:
            raise _CublasError("no kernel for these sizes")
        self._algorithm = proposals[0].algorithm

    def run(self, left: Tensor, right: Tensor, aside: Tensor, bias: Tensor | None, result: Tensor) -> None:
        one, zero = c_float(1), c_float(0)
        stream = torch.cuda.current_stream().cuda_stream
        workspace = _workspace(torch.cuda.current_device(), stream)
        target = c_void_p(result.data_ptr())
        with self._lock:
            self._set(_AUX, c_void_p(aside.data_ptr()))
            if bias is not None:
                self._set(_BIAS, c_void_p(bias.data_ptr()))
            self._call(
                "Matmul",
                self._handle,
                self._product,
                byref(one),
                c_void_p(right.data_ptr()),
                self._right,
                c_void_p(left.data_ptr()),
                self._left,
                byref(zero),
                target,
                self._result,
                target,
                self._result,
                byref(self._algorithm),
                c_void_p(workspace.data_ptr()),
                c_size_t(_WORKSPACE_BYTES),
                c_void_p(stream),
            )

    def _layout(self, rows: int, columns: int, dtype: torch.dtype) -> c_void_p:
        layout = c_void_p()
        self._call(
            "MatrixLayoutCreate", byref(layout), c_int(_DTYPES[dtype]), c_uint64(rows), c_uint64(columns), c_int64(rows)
        )
        return layout

    def _set(self, attribute: int, value: c_int | c_int64 | c_void_p) -> None:
        self._call(
            "MatmulDescSetAttribute", self._product, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value))
        )

    def _call(self, name: str, *arguments: object) -> None:
        _checked(self._library, name, *arguments)


def _checked(found: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(found, f"cublasLt{name}")(*arguments)
    if status:
        raise _CublasError(f"cublasLt{name} failed with status {status}")


@lru_cache(maxsize=256)
def _plan(
    m: int, n: int, k: int, dtype: torch.dtype, ending: Ending, transposed: bool, device: int | None
) -> _Plan | None:
    """The plan for these sizes; None where the library has no kernel for them."""
    try:
        return _Plan(m, n, k, dtype, ending, transposed)
    except _CublasError:
        return None


@lru_cache
def _handle(device: int) -> c_void_p:
    """The library's own state, which belongs to one device."""
    found, handle = library(), c_void_p()
    assert found is not None
    _checked(found, "Create", byref(handle))
    return handle


@lru_cache
def _workspace(device: int, stream: int) -> Tensor:
    """Memory that a product may use; products of two streams run side by side."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))
