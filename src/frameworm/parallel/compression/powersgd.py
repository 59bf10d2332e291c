"""PowerSGD (Vogels et al. 2019): each gradient matrix M is sent as two thin ones, P = MQ and Q = MᵀP, both averaged.

A step is one power iteration from the last step's Q, and the residual keeps the error of PQᵀ. Torch's own hook chains
futures, which issue their collectives in an order that differs between ranks; here `pipeline` issues them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frameworm.parallel.compression.exchange import Parcel, Scratch
from frameworm.parallel.compression.pipeline import Stages, Wire
from frameworm.parallel.compression.residuals import Named

WORTH_FACTOR = 2  # a matrix is compressed if that makes it smaller by at least this factor
DEPENDENT = 1e-5  # if less than this fraction of a column remains after orthogonalisation, it is rounding error


@dataclass(frozen=True)
class _Plan:
    """How one bucket is sent.

    Attributes:
        matrices: For each compressed matrix: name, slice of the bucket, rows, columns.
        plain: The slices that are sent uncompressed.
    """

    matrices: list[tuple[str, slice, int, int]]
    plain: list[slice]


class PowerSGD:
    """Keeps each matrix's Q from step to step.

    Args:
        named: The model's parameters.
        rank: Columns of P and Q.
        seed: Seed of the first Q, which must be the same on all ranks.
    """

    def __init__(self, named: Named, rank: int, seed: int) -> None:
        self.rank = rank
        self._named = named
        self._seed = seed
        self._right: dict[str, Tensor] = {}
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def stages(self, parcel: Parcel, wire: Wire, scratch: Scratch) -> Stages:
        """Compute the approximate mean of a bucket."""
        values, residual, device = parcel.values, parcel.residual, parcel.values.device
        plan = self._plan(parcel.names)
        in_place = values.dtype == torch.float32
        wanted = values if in_place else values.float()
        if residual is not None:
            wanted.add_(residual)
        matrices = [wanted[span].view(rows, columns) for _, span, rows, columns in plan.matrices]

        lefts_count = sum(rows * self.rank for _, _, rows, _ in plan.matrices)
        plain_count = sum(span.stop - span.start for span in plan.plain)
        first = scratch.take("first", parcel.number, lefts_count + plain_count, torch.float32, device)
        lefts = list(_split(first, [(rows, self.rank) for _, _, rows, _ in plan.matrices]))
        plain = list(_split(first[lefts_count:], [(span.stop - span.start,) for span in plan.plain]))
        old_rights = [self._starting(name, columns, device) for name, _, _, columns in plan.matrices]
        for matrix, left, right in zip(matrices, lefts, old_rights):
            torch.mm(matrix, right, out=left)
        for span, place in zip(plan.plain, plain):
            torch.mul(wanted[span], 1 / wire.world_size, out=place)
        yield wire.all_reduce(first)

        good = torch.isfinite(first).all()
        if matrices:
            second_count = sum(columns * self.rank for *_, columns in plan.matrices)
            second = scratch.take("second", parcel.number, second_count, torch.float32, device)
            rights = list(_split(second, [(columns, self.rank) for *_, columns in plan.matrices]))
            for matrix, left, right in zip(matrices, lefts, rights):
                orthogonalize(left)
                torch.mm(matrix.t(), left, out=right)
            second.mul_(1 / wire.world_size)
            yield wire.all_reduce(second)

            good &= torch.isfinite(second).all()
            for (name, *_), right, old in zip(plan.matrices, rights, old_rights):
                self._right[name].copy_(_next_right(right, old, good))  # in place, for CUDA graphs
            self._finish_matrices(plan, matrices, list(zip(lefts, rights)), residual, good)
        for span, place in zip(plan.plain, plain):
            wanted[span].copy_(place)
            if residual is not None:  # left over from another method, and sent now
                _keep_unless(good, residual[span], torch.zeros_like(place))
        return values if in_place else values.copy_(wanted)

    def state_dict(self) -> dict[str, Tensor]:
        """Q by parameter name, on the CPU."""
        return {name: right.detach().cpu().clone() for name, right in self._right.items()}

    def load(self, saved: dict[str, Tensor]) -> list[str]:
        """Restore saved matrices; returns notes about those that do not fit."""
        self._right.clear()
        misfits = []
        for name, right in saved.items():
            parameter = self._named.parameters.get(name)
            shape = None if parameter is None else _matrix_shape(parameter.shape)
            if parameter is None or shape is None or right.shape != (shape[1], self.rank):
                misfits.append(name)
            else:
                self._right[name] = right.to(parameter.device, copy=True)
        if not misfits:
            return []
        what = f"{len(misfits)} parameters that had another shape or rank ({misfits[0]})"
        return [f"PowerSGD starts from random matrices for {what}"]

    def clear(self) -> None:
        """Start again from random matrices."""
        self._right.clear()

    def _plan(self, names: tuple[str, ...]) -> _Plan:
        plan = self._plans.get(names)
        if plan is None:
            plan = self._plans[names] = _Plan([], [])
            begin = 0
            for name in names:
                parameter = self._named.parameters[name]
                span = slice(begin, begin + parameter.numel())
                begin = span.stop
                shape = _matrix_shape(parameter.shape)
                if shape is not None and WORTH_FACTOR * self.rank * sum(shape) < math.prod(shape):
                    plan.matrices.append((name, span, *shape))
                else:
                    plan.plain.append(span)
        return plan

    def _starting(self, name: str, columns: int, device: torch.device) -> Tensor:
        """The Q to start from, with orthonormal columns."""
        right = self._right.get(name)
        if right is None:
            draw = torch.Generator().manual_seed(self._seed * 1_000_003 + self._named.position(name))
            right = torch.randn(columns, self.rank, generator=draw).to(device)
            self._right[name] = right
        right = right.clone()
        orthogonalize(right)
        return right

    def _finish_matrices(
        self,
        plan: _Plan,
        matrices: Sequence[Tensor],
        factors: Sequence[tuple[Tensor, Tensor]],
        residual: Tensor | None,
        good: Tensor,
    ) -> None:
        """Write PQᵀ over M and its error into the residual; a non-finite step becomes NaN and leaves no error."""
        # On the CPU the check costs nothing and saves a pass over the bucket.
        known_good = good.device.type == "cpu" and bool(good)
        for (_, span, rows, columns), matrix, (left, right) in zip(plan.matrices, matrices, factors):
            if residual is not None:
                place = residual[span].view(rows, columns)
                if known_good:
                    torch.addmm(matrix, left, right.t(), alpha=-1, out=place)
                else:
                    _keep_unless(good, place, torch.addmm(matrix, left, right.t(), alpha=-1))
            torch.mm(left, right.t(), out=matrix)
            if not known_good:
                matrix.masked_fill_(~good, math.nan)


def orthogonalize(columns: Tensor) -> None:
    """Make the columns orthonormal in place; one that is zero, or depends on those before it, becomes zero."""
    tiny = torch.finfo(columns.dtype).tiny
    for index in range(columns.shape[1]):
        column, before = columns[:, index : index + 1], columns[:, :index]
        # Scale first, so that the square neither vanishes nor overflows.
        column.div_(column.abs().amax().clamp_min(tiny))
        whole = torch.linalg.vector_norm(column)
        for _ in range(2 if index else 0):  # a single pass leaves rounding errors if little remains
            column.sub_(before @ (before.t() @ column))
        rest = torch.linalg.vector_norm(column)
        # Normalised to length one, such a remainder would add the gradient of its direction a second time.
        column.mul_(torch.where(rest <= DEPENDENT * whole, 0.0, 1.0 / rest.clamp_min(tiny)))


def _next_right(right: Tensor, old: Tensor, good: Tensor) -> Tensor:
    """Q for the next step; a column without gradient keeps its direction, since it could not recover from zero."""
    alive = right.abs().amax(0, keepdim=True) > 0
    return torch.where(alive & good, right, old)


def _keep_unless(good: Tensor, place: Tensor, new: Tensor) -> None:
    place.copy_(torch.where(good, new, place))


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    return shape[0], math.prod(shape[1:])


def _split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
    """Consecutive views of these shapes."""
    begin = 0
    for shape in shapes:
        count = math.prod(shape)
        yield flat[begin : begin + count].view(shape)
        begin += count
