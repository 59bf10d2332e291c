"""Matrix products by cuBLASLt with a fused epilogue (called ending here), using the kernel measured as fastest.

torch offers neither. An ending is a bias, a bias and GELU, or GELU's derivative. Of the kernels that the library
proposes, the first, which torch uses, is often not the fastest. So for each new problem size the proposals are timed in
turns, if algorithms may be timed (gpu.benchmark); see cublas_plan.py. The gain for a whole step is smaller than for one
product if the power limit throttles the clock.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from frameworm.models.kernels.cublas_plan import ALIGNMENT, DTYPES, WITH_GELU, Ending, Sizes, fits, library, plan_for

# Smaller products are left to torch, which launches them faster. Chosen, not measured.
LARGE = 2**32  # multiplications


def multiply(
    left: Tensor,
    right: Tensor,
    ending: Ending = Ending.NONE,
    aside: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    left_transposed: bool = False,
    right_transposed: bool = False,
    out: Tensor | None = None,
    onto: Tensor | None = None,
) -> Tensor:
    """Compute `left @ right` with an ending, using torch's own operations if the library does not fit.

    Args:
        left: [m, k], or [k, m] if `left_transposed`; contiguous.
        right: [k, n], or [n, k] if `right_transposed`; contiguous, and of the same dtype.
        ending: Endings with GELU require half precision on a GPU with the library.
        aside: [m, n]: written by GELU_OF_SUM, read by GELU_SLOPE.
        bias: [n], for SUM and GELU_OF_SUM.
        left_transposed: Whether `left` is stored transposed.
        right_transposed: Whether `right` is stored transposed.
        out: [m, n], contiguous: receives the result; may be fp32 with half-precision factors.
        onto: [m, n], of the result's dtype: added to the product; may be `out` itself. Only with NONE and SUM.
    """
    m, k = reversed(left.shape) if left_transposed else left.shape
    n = right.size(0) if right_transposed else right.size(1)
    result = left.new_empty(m, n) if out is None else out
    sizes = Sizes(m, n, k, left.dtype, result.dtype, ending, left_transposed, right_transposed, left.device.index)
    if not _suits(sizes, left, right, result, *(() if onto is None else (onto,))):
        return _in_steps(left, right, sizes, aside, bias, result, onto)
    with torch.cuda.device(left.device):
        plan = plan_for(sizes)
        if plan is None:
            return _in_steps(left, right, sizes, aside, bias, result, onto)
        plan.run(left, right, aside, bias, result, onto)
    return result


def _suits(sizes: Sizes, left: Tensor, right: Tensor, *others: Tensor) -> bool:
    if not left.is_cuda or library() is None or left.dtype == torch.float32 or left.dtype not in DTYPES:
        return False
    m, n, k = sizes[:3]
    if not (m and n and k) or (sizes.ending not in WITH_GELU and m * n * k < LARGE):
        return False
    starts = (item.data_ptr() % ALIGNMENT == 0 for item in (left, right, *others))
    return fits(n, left.size(1), right.size(1)) and all(starts)


def _in_steps(
    left: Tensor,
    right: Tensor,
    sizes: Sizes,
    aside: Tensor | None,
    bias: Tensor | None,
    result: Tensor,
    onto: Tensor | None,
) -> Tensor:
    """Do the same with torch's own operations."""
    left, right = (left.t() if sizes.left_transposed else left), (right.t() if sizes.right_transposed else right)
    if sizes.ending is Ending.NONE:
        _multiply_into(result, left, right, onto)
        return result
    if sizes.ending is Ending.SUM:
        assert bias is not None
        if onto is None:
            return torch.addmm(bias, left, right, out=result)
        _multiply_into(result, left, right, onto)
        return result.add_(bias)
    assert aside is not None
    product = left @ right
    if sizes.ending is Ending.GELU_SLOPE:
        return torch.ops.aten.gelu_backward(product, aside, approximate="tanh")  # type: ignore[no-any-return]
    assert bias is not None
    torch.add(product, bias, out=aside)
    return F.gelu(aside, approximate="tanh")


def _multiply_into(result: Tensor, left: Tensor, right: Tensor, onto: Tensor | None) -> None:
    """Compute `result = left @ right`, plus `onto` if given; an fp32 result is accumulated in fp32 for any factors."""
    start, beta = (result, 0) if onto is None else (onto, 1)
    if left.dtype == result.dtype or not left.is_cuda:
        torch.addmm(start, left.to(result.dtype), right.to(result.dtype), beta=beta, out=result)
        return
    try:
        torch.addmm(start, left, right, out_dtype=result.dtype, beta=beta, out=result)
    except RuntimeError:  # a torch whose addmm cannot add fp32 to a product of half-precision factors
        product = torch.mm(left, right, out_dtype=result.dtype)
        result.copy_(product) if onto is None else torch.add(onto, product, out=result)
