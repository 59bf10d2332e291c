"""Top-k: send one value of every group, with its place in the group.

Groups are strided over the whole tensor: with `columns` groups, group j holds the values j, j + columns, j + 2 columns
and so on. Large gradients come in runs (the rows of an embedding that were used, one layer of many); in groups of
neighbours a run would compete for few places while quiet groups send noise. One value per group can be found in a
single pass.

Payload: `columns` bf16 values, `columns` places (one byte each, two if a group has more than 256 values), zeros up to a
multiple of 4. bf16, because gradients range from 1e-38 to 3e38 (loss scaling moves them) and the residual keeps its
rounding error. A NaN value marks a group that held a NaN or an infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameworm.errors import ConfigError
from frameworm.parallel.compression.codecs import CHUNK_VALUES, Codec, aligned, kernels_take, sum_into

_LARGEST_VALUE = torch.finfo(torch.bfloat16).max
_MAGNITUDE_BITS = 0x7FFFFFFF
_LARGEST_GROUP = 65536
_LARGEST_GROUP_OF_A_KERNEL = 512  # a larger one does not fit into a program's registers


class TopK(Codec):
    """One value of every group of about `1 / ratio`, in 3 bytes (4 if `ratio` is below 1/256).

    Args:
        ratio: Fraction of the values to keep, 1/65536 to 1; rounded to the nearest `1 / integer`.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01) -> None:
        super().__init__()
        if not 1 / _LARGEST_GROUP <= ratio <= 1:
            raise ConfigError(f"top-k can keep a share from 1/{_LARGEST_GROUP} to 1 of the values, not {ratio}")
        self.ratio = ratio
        self.granularity = min(round(1 / ratio), _LARGEST_GROUP)
        self.place_bytes = 1 if self.granularity <= 256 else 2

    def columns(self, count: int) -> int:
        """Number of groups, which is the number of values kept; odd, so that no group is a column of a matrix."""
        return min(count, -(-count // self.granularity) | 1)

    def encoded_bytes(self, count: int) -> int:
        """Size of the payload of `count` values."""
        return -(-self.columns(count) * (2 + self.place_bytes) // 4) * 4

    def encode(
        self,
        values: Tensor,
        payload: Tensor,
        residual: Tensor | None = None,
        draw: torch.Generator | None = None,
    ) -> None:
        """Write the largest of each group of `values + residual` into `payload`; see `Codec.encode`."""
        if self._by_kernel(payload, values.numel()):
            from frameworm.parallel.compression import kernels_sparse

            kernels_sparse.encode(values, payload, residual, self.granularity, self.columns(values.numel()))
            return
        count = values.numel()
        written = aligned(payload)
        kept, places = self._parts(written, count)
        written[self.columns(count) * (2 + self.place_bytes) :].zero_()
        old = None if residual is None else _Grid(residual, self.columns(count))
        grid = _Grid(values, self.columns(count))
        wide = self.columns(count) if values.is_cuda else max(16, CHUNK_VALUES // max(1, grid.rows))
        for start in range(0, self.columns(count), max(1, wide)):
            stop = min(start + wide, self.columns(count))
            shape = (grid.rows, stop - start)
            total = self._scratch("total", grid.rows * (stop - start), values, torch.float32).view(shape)
            for number, part in enumerate(grid.parts(start, stop)):
                before = None if old is None else old.parts(start, stop)[number]
                sum_into(_same_place(total, grid, number, part), part, before)
            place = self._largest(total, grid.rest_in(start, stop))
            largest = total.gather(0, place[None])
            bad = ~torch.isfinite(largest)
            # Clamped first: a large finite number must not round to infinity in bf16.
            sent = largest.clamp(-_LARGEST_VALUE, _LARGEST_VALUE).masked_fill_(bad, torch.nan).to(torch.bfloat16)
            kept[start:stop] = sent[0]
            places[start:stop] = place
            if old is None:
                continue
            total.scatter_(0, place[None], largest - sent)
            spoiled = total.is_cuda or bool(bad.any())
            for number, before in enumerate(old.parts(start, stop)):
                lost = _same_place(total, old, number, before)
                before.copy_(torch.where(bad[:, : before.size(1)], before, lost) if spoiled else lost)
        if written is not payload:
            payload.copy_(written)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Overwrite `out` with the kept values at their places and zeros elsewhere."""
        if self._by_kernel(payload, out.numel()):
            from frameworm.parallel.compression import kernels_sparse

            kernels_sparse.decode(payload, out, self.granularity, self.columns(out.numel()))
            return
        kept, targets = self._decoded(payload, out)
        out.zero_().scatter_(0, targets, kept.to(out.dtype))
        self._mark_bad(kept, out)

    def decode_add(self, payload: Tensor, total: Tensor) -> None:
        """Add the kept values to `total`."""
        if self._by_kernel(payload, total.numel()):
            from frameworm.parallel.compression import kernels_sparse

            kernels_sparse.decode(payload, total, self.granularity, self.columns(total.numel()), add=True)
            return
        kept, targets = self._decoded(payload, total)
        # No place occurs twice, so the result does not depend on the order of additions.
        total.scatter_add_(0, targets, kept.to(total.dtype))
        self._mark_bad(kept, total)

    def _by_kernel(self, payload: Tensor, count: int) -> bool:
        """Whether a kernel is used."""
        assert payload.dtype == torch.uint8, payload.dtype
        assert payload.numel() == self.encoded_bytes(count), (payload.numel(), self.encoded_bytes(count))
        return self.granularity <= _LARGEST_GROUP_OF_A_KERNEL and kernels_take(payload)

    def _largest(self, total: Tensor, rest: int | None) -> Tensor:
        """Row of the largest magnitude per column, the last on ties. `rest`: values in the last row, if short."""
        place_mask = (1 << (8 * self.place_bytes)) - 1
        keys = self._scratch("keys", total.numel(), total, torch.int32).view_as(total)
        # As integers, magnitudes keep their order; the lowest bits are replaced by the row, so that a single maximum
        # finds both. NaN and infinity are larger than everything else.
        torch.bitwise_and(total.view(torch.int32), _MAGNITUDE_BITS & ~place_mask, out=keys)
        keys.bitwise_or_(torch.arange(total.size(0), dtype=torch.int32, device=total.device)[:, None])
        if rest is not None:
            keys[-1, rest:] = -1
        return keys.amax(0).bitwise_and_(place_mask).long()

    def _decoded(self, payload: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The kept values and their places."""
        columns = self.columns(like.numel())
        kept, places = self._parts(aligned(payload), like.numel())
        targets = places.to(torch.int32) if self.place_bytes == 2 else places
        targets = targets.long() * columns
        return kept, targets.add_(torch.arange(columns, device=like.device))

    def _mark_bad(self, kept: Tensor, out: Tensor) -> None:
        """Fill the groups whose value is NaN."""
        bad = torch.isnan(kept)
        if not out.is_cuda and not bool(bad.any()):
            return
        for part in _Grid(out, self.columns(out.numel())).parts(0, self.columns(out.numel())):
            part.masked_fill_(bad[: part.size(1)], torch.nan)

    def _parts(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Views of the values and of the places."""
        columns = self.columns(count)
        assert payload.dtype == torch.uint8, payload.dtype
        assert payload.numel() == self.encoded_bytes(count), (payload.numel(), self.encoded_bytes(count))
        places = payload[columns * 2 : columns * (2 + self.place_bytes)]
        if self.place_bytes == 2:
            places = places.view(torch.uint16)
        return payload[: columns * 2].view(torch.bfloat16), places


class _Grid:
    """A flat tensor as rows of `columns` values; the last row may be short."""

    def __init__(self, flat: Tensor, columns: int) -> None:
        self.full_rows = flat.numel() // columns if columns else 0
        whole = self.full_rows * columns
        self._matrix = flat[:whole].view(self.full_rows, columns)
        self._rest = flat[whole:].view(1, -1)
        self.rows = self.full_rows + bool(self._rest.numel())

    def rest_in(self, start: int, stop: int) -> int | None:
        """How many of the columns have a value in the short row; None if there is no short row."""
        if self.rows == self.full_rows:
            return None
        return max(0, min(stop, self._rest.numel()) - start)

    def parts(self, start: int, stop: int) -> list[Tensor]:
        """Views of the columns: the full rows, and the short one if there is one."""
        if self.rows == self.full_rows:
            return [self._matrix[:, start:stop]]
        return [self._matrix[:, start:stop], self._rest[:, start:stop]]


def _same_place(total: Tensor, grid: _Grid, number: int, part: Tensor) -> Tensor:
    """The part of `total`, which has all rows, that corresponds to a part of the grid."""
    rows = total[grid.full_rows :] if number else total[: grid.full_rows]
    return rows[:, : part.size(1)]
