"""Plans of matrix products for cuBLASLt: what to multiply, and with which of the library's kernels.

The library is the one that torch has loaded; only what is needed of it is declared here. It is column-major, so it sees
our matrices as transposed, and the factors swap places.
"""

from __future__ import annotations

import ctypes
import enum
import math
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import lru_cache
from statistics import median
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float16: 2}
ALIGNMENT = 16  # bytes
_WORKSPACE_BYTES = 64 * 2**20  # twice what NVIDIA recommends for Hopper
_COMPUTE_FP32, _FP32 = 68, 0
# Attributes of a product and of the search for its kernel.
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS, _AUX, _AUX_STRIDE = 3, 4, 7, 8, 11, 12
_MAX_WORKSPACE = 1
# Proposals to time, turns, launches per turn, and the fraction of the first one's time that another must beat.
_PROPOSALS = 8
_TURNS, _LAUNCHES = 3, 3
_FASTER = 0.98


class Ending(enum.IntEnum):
    """The epilogue: what happens to the product before it is written."""

    NONE = 1
    SUM = 4  # adds a bias
    GELU_OF_SUM = 164  # adds a bias, stores the sum aside, applies tanh GELU
    GELU_SLOPE = 192  # multiplies by GELU's derivative at the stored sum


WITH_GELU = (Ending.GELU_OF_SUM, Ending.GELU_SLOPE)


class CublasError(RuntimeError):
    """A call of the library failed."""


class _Found(ctypes.Structure):
    """A kernel that the library proposes."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Sizes(NamedTuple):
    """Everything that determines the choice of a kernel."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    result: torch.dtype
    ending: Ending
    left_transposed: bool
    right_transposed: bool
    device: int | None


@lru_cache
def library() -> ctypes.CDLL | None:
    """Return the cuBLASLt of this torch; None if there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


def fits(*sizes: int) -> bool:
    """Whether rows of these lengths are aligned as the kernels require."""
    return all(size > 0 and size * 2 % ALIGNMENT == 0 for size in sizes)


class Plan:
    """The kernels for a product of one size."""

    def __init__(self, sizes: Sizes) -> None:
        found = library()
        assert found is not None
        self._library = found
        self._lock = Lock()  # setting a product's pointers and launching it must not interleave with another thread
        self._handle = _handle(torch.cuda.current_device())
        self._product = c_void_p()
        self._call("MatmulDescCreate", byref(self._product), c_int(_COMPUTE_FP32), c_int(_FP32))
        self._set(_TRANSPOSE_A, c_int(sizes.right_transposed))
        self._set(_TRANSPOSE_B, c_int(sizes.left_transposed))
        self._set(_EPILOGUE, c_int(sizes.ending))
        if sizes.ending in WITH_GELU:
            self._set(_AUX_STRIDE, c_int64(sizes.n))
        m, n, k = sizes[:3]
        self._right = self._layout(*((k, n) if sizes.right_transposed else (n, k)), sizes.dtype)
        self._left = self._layout(*((m, k) if sizes.left_transposed else (k, m)), sizes.dtype)
        self._result = self._layout(n, m, sizes.result)
        self._proposals = self._propose()
        self._fastest: int | None = None

    def run(
        self,
        left: Tensor,
        right: Tensor,
        aside: Tensor | None,
        bias: Tensor | None,
        result: Tensor,
        onto: Tensor | None,
    ) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        workspace = _workspace(torch.cuda.current_device(), stream)

        def launch(number: int, target: Tensor = result) -> None:
            self._launch(number, left, right, target, onto, workspace, stream)

        with self._lock:
            if aside is not None:
                self._set(_AUX, c_void_p(aside.data_ptr()))
            if bias is not None:
                self._set(_BIAS, c_void_p(bias.data_ptr()))
            launch(self._choose(launch, result, onto))

    def _launch(
        self,
        number: int,
        left: Tensor,
        right: Tensor,
        result: Tensor,
        onto: Tensor | None,
        workspace: Tensor,
        stream: int,
    ) -> None:
        one, beta = c_float(1), c_float(0 if onto is None else 1)
        self._call(
            "Matmul",
            self._handle,
            self._product,
            byref(one),
            c_void_p(right.data_ptr()),
            self._right,
            c_void_p(left.data_ptr()),
            self._left,
            byref(beta),
            c_void_p((result if onto is None else onto).data_ptr()),
            self._result,
            c_void_p(result.data_ptr()),
            self._result,
            byref(self._proposals[number]),
            c_void_p(workspace.data_ptr()),
            c_size_t(_WORKSPACE_BYTES),
            c_void_p(stream),
        )

    def _choose(self, launch: Callable[[int, Tensor], None], result: Tensor, onto: Tensor | None) -> int:
        """Choose a proposal: the fastest if algorithms may be timed and nothing is being captured, else the first."""
        if not torch.backends.cudnn.benchmark or len(self._proposals) == 1:
            return 0
        if self._fastest is None:
            if torch.cuda.is_current_stream_capturing():
                return 0
            try:
                # A scratch target, if repeated launches would add to `onto` again and again.
                self._fastest = self._race(launch, torch.empty_like(result) if onto is result else result)
            except torch.cuda.OutOfMemoryError:
                return 0
        return self._fastest

    def _race(self, launch: Callable[[int, Tensor], None], target: Tensor) -> int:
        """Time the proposals in turns; return the fastest, or the first if none is clearly faster."""
        taken_s: list[list[float]] = [[] for _ in self._proposals]
        for _ in range(_TURNS):
            for number, figures in enumerate(taken_s):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                try:
                    launch(number, target)
                    begin.record()
                    for _ in range(_LAUNCHES):
                        launch(number, target)
                    end.record()
                except CublasError:  # proposed, but not valid for these addresses
                    figures.append(math.inf)
                    continue
                end.synchronize()
                figures.append(begin.elapsed_time(end))
        medians = [median(figures) for figures in taken_s]
        fastest = min(range(len(medians)), key=medians.__getitem__)
        return fastest if medians[fastest] < _FASTER * medians[0] else 0

    def _propose(self) -> list[ctypes.Array[c_uint64]]:
        preference, found, count = c_void_p(), (_Found * _PROPOSALS)(), c_int()
        self._call("MatmulPreferenceCreate", byref(preference))
        most = c_uint64(_WORKSPACE_BYTES)
        self._call("MatmulPreferenceSetAttribute", preference, c_int(_MAX_WORKSPACE), byref(most), c_size_t(8))
        self._call(
            "MatmulAlgoGetHeuristic",
            self._handle,
            self._product,
            *(self._right, self._left, self._result, self._result),
            preference,
            c_int(_PROPOSALS),
            found,
            byref(count),
        )
        self._call("MatmulPreferenceDestroy", preference)
        if not count.value:
            raise CublasError("no kernel for these sizes")
        return [item.algorithm for item in found[: count.value]]

    def _layout(self, rows: int, columns: int, dtype: torch.dtype) -> c_void_p:
        layout = c_void_p()
        self._call(
            "MatrixLayoutCreate", byref(layout), c_int(DTYPES[dtype]), c_uint64(rows), c_uint64(columns), c_int64(rows)
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
        raise CublasError(f"cublasLt{name} failed with status {status}")


@lru_cache(maxsize=256)
def plan_for(sizes: Sizes) -> Plan | None:
    """Return the plan for these sizes; None if the library has no kernel for them."""
    try:
        return Plan(sizes)
    except CublasError:
        return None


@lru_cache
def _handle(device: int) -> c_void_p:
    """Return the library's handle for one device."""
    found, handle = library(), c_void_p()
    assert found is not None
    _checked(found, "Create", byref(handle))
    return handle


@lru_cache
def _workspace(device: int, stream: int) -> Tensor:
    """Return workspace memory; one per stream, as products on two streams run concurrently."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))
