"""How near to fp32 results in half precision must be."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def assert_as_near(ours: Sequence[Tensor], usual: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """As near as torch's own kernels in bf16 are, with room for another order of rounding."""
    for mine, theirs, right in zip(ours, usual, reference, strict=True):
        scale = right.abs().max()
        assert mine.dtype == right.dtype
        assert (mine - right).abs().max() / scale < 1.5 * (theirs - right).abs().max() / scale + 4e-3
