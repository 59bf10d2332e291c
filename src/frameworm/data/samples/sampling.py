"""Which samples form which step: the same ones, whatever the number of ranks, workers and micro-batches.

An epoch has one order of its samples. A step is a slice of it, a rank takes a slice of the step and cuts that into
micro-batches. So a run on four ranks sees in step s what a run on one rank sees in step s.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from frameworm.data.samples.held import Walk, read_state, reseed, write_state
from frameworm.data.samples.seeding import mix, seeded
from frameworm.errors import ConfigError, DataError

Order = npt.NDArray[Any]
Arrange = Callable[[Order, int], Order]


class StepShape(NamedTuple):
    """The size of one step, known before its batches are.

    Attributes:
        samples: This rank's samples per micro-batch; 0 for a filler, which runs but must not count.
        global_samples: Samples of the step over all ranks.
        tokens: Real tokens in this rank's samples; None if the data set does not declare them.
        padded_tokens: Tokens this rank computes on, including padding and fillers; None if unknown.
    """

    samples: list[int]
    global_samples: int
    tokens: int | None = None
    padded_tokens: int | None = None

    @property
    def local_samples(self) -> int:
        """This rank's samples in the step."""
        return sum(self.samples)


class Piece(NamedTuple):
    """One micro-batch, as positions within its step; a filler has one position and no samples."""

    start: int
    stop: int
    samples: int


def range_of_rank(samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """The contiguous part of a step that a rank takes, as positions within the step.

    Rounded up, so that rank 0, whose buffers (batch norm) the other ranks copy, always has samples.
    """
    return -(-samples * rank // world_size), -(-samples * (rank + 1) // world_size)


def cut(share: int, micro_batch: int, pieces: int) -> list[int]:
    """Split `share` samples into `pieces` micro-batches, large ones first, empty ones only if there are too few."""
    sizes = []
    for following in range(pieces - 1, -1, -1):
        size = min(micro_batch, max(share - following, min(share, 1)))
        sizes.append(size)
        share -= size
    assert share == 0, "the pieces hold fewer samples than the share"
    return sizes


class MicroBatch(list[int]):
    """The sample indices of a micro-batch.

    Attributes:
        longest: Tokens of the longest text among these and those that the other ranks compute at the same time.
    """

    def __init__(self, indices: Iterable[int] = (), longest: int = 0) -> None:
        super().__init__(indices)
        self.longest = longest


class StepSampler(Sampler[list[int]]):
    """Batch sampler that yields the micro-batches of one rank, step by step.

    With `fill_empty` all ranks run the same number of micro-batches in a step, as strategies that communicate in every
    forward pass need: a rank without samples left gets a filler of one sample (the step's first), counted as 0.

    Args:
        size: Number of samples in the data set.
        global_batch: Samples per step over all ranks.
        micro_batch: Most samples per forward pass on one rank.
        rank: This process.
        world_size: Number of processes.
        shuffle: Draw a new order in every epoch; otherwise use the order of the data set.
        seed: Seed of the order; must be the same on all ranks.
        drop_last: Drop the last step if it is short.
        fill_empty: Give ranks without samples a filler; False for evaluation, where a rank may run fewer batches.
        arrange: Rearranges an epoch's order, given the order and the epoch's number.

    Attributes:
        lengths: Tokens of each sample. If set, each `MicroBatch` holds the longest text of all ranks.

    Raises:
        DataError: There are no samples, or too few for one step with `drop_last`.
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        size: int,
        global_batch: int,
        micro_batch: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        fill_empty: bool = True,
        arrange: Arrange | None = None,
    ) -> None:
        for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("world_size", world_size)):
            if value < 1:
                raise ConfigError(f"{name}: {value} must be 1 or more")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank: {rank} is not one of the {world_size} ranks 0 to {world_size - 1}")
        if seed < 0:
            raise ConfigError(f"seed: {seed} must be 0 or more")
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.fill_empty = fill_empty
        self.kept_orders = 1
        self._arrange = arrange
        self._size = size
        self._epoch = 0
        self._start = 0
        self._skipped: tuple[int, int, Arrange | None] | None = None
        self._orders: dict[int, Order] = {}
        self.lengths: npt.NDArray[Any] | None = None
        self._plans: dict[int, list[Piece]] = {}
        self._besides: dict[int, list[list[Piece]]] = {}
        self._check_size(size)

    @property
    def size(self) -> int:
        """Samples in the epoch, including those that `drop_last` drops."""
        return self._size - self._skipped_in(self._epoch)

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps in the epoch, the same on all ranks."""
        return self.size // self.global_batch if self.drop_last else -(-self.size // self.global_batch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which decides the order."""
        if epoch < 0:
            raise ConfigError(f"epoch: {epoch} must be 0 or more")
        self._epoch = epoch

    def seek(self, step: int) -> None:
        """Start the next iteration, and only that one, at a step of the epoch."""
        if not 0 <= step <= self.steps_per_epoch:
            raise ConfigError(f"step: {step} is not within the epoch's {self.steps_per_epoch} steps")
        self._start = step

    def skip(self, epoch: int, samples: int, arrange: Arrange | None = None) -> None:
        """Skip the first samples of an epoch, and plan and count its steps from the rest.

        Args:
            epoch: The epoch; all others stay complete.
            samples: Number of samples to skip.
            arrange: Used for that epoch instead of the sampler's own, to reproduce the order of the skipped samples.
        """
        self._skipped = (epoch, samples, arrange)
        self._orders.pop(epoch, None)

    def describe(self) -> str:
        """The order of an epoch as text; two samplers with the same text draw the same order."""
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in the order of the data set"
        return f"{self._size} samples {order}{'' if self._arrange is None else ', arranged by length'}"

    def shape(self, step: int) -> StepShape:
        """How many samples each micro-batch of a step holds."""
        samples = self._samples_in(step)
        return StepShape([piece.samples for piece in self._plan(samples)], samples)

    def pieces(self, step: int) -> list[Piece]:
        """Where this rank's micro-batches lie within a step; the step itself begins at step x global_batch."""
        return self._plan(self._samples_in(step))

    def pieces_for(self, samples: int) -> list[Piece]:
        """This rank's micro-batches of a step of `samples` samples, in any epoch."""
        return self._plan(samples)

    def indices(self, step: int) -> list[Order]:
        """The samples of each of this rank's micro-batches of a step in this epoch, including fillers."""
        begin = step * self.global_batch
        order = self.order()
        return [order[begin + piece.start : begin + piece.stop] for piece in self.pieces(step)]

    def order(self) -> Order:
        """All samples of the epoch in the order in which steps take them."""
        return self.order_of(self._epoch)

    def order_of(self, epoch: int) -> Order:
        """The order of any epoch. The last `kept_orders` results are cached; a thread may call this."""
        order = self._orders.get(epoch)
        if order is None:
            order = self._draw(epoch)[self._skipped_in(epoch) :]
            while len(self._orders) >= self.kept_orders:
                self._orders.pop(next(iter(self._orders)), None)
            self._orders[epoch] = order
        return order

    def has_order(self, epoch: int) -> bool:
        """Whether an epoch's order is cached."""
        return epoch in self._orders

    def take_start(self) -> int:
        """The step at which the iteration that starts now begins; resets the seek."""
        start, self._start = self._start, 0
        return start

    def pieces_of_all(self, samples: int) -> list[Piece]:
        """Every rank's micro-batches of a step of `samples` samples, without fillers."""
        found: list[Piece] = []
        for rank in range(self.world_size):
            begin, end = range_of_rank(samples, rank, self.world_size)
            for size in cut(end - begin, self.micro_batch, -(-(end - begin) // self.micro_batch)):
                found.append(Piece(begin, begin + size, size))
                begin += size
        return found

    def beside(self, samples: int) -> list[list[Piece]]:
        """For each of this rank's micro-batches of a step, the pieces that all ranks compute at the same time."""
        found = self._besides.get(samples)
        if found is not None:
            return found
        found = self._besides[samples] = [[] for _ in self._plan(samples)]
        for rank in range(self.world_size):
            begin, end = range_of_rank(samples, rank, self.world_size)
            for place, size in enumerate(cut(end - begin, self.micro_batch, len(found))):
                found[place].append(Piece(begin, begin + size, size) if size else Piece(0, 1, 0))
                begin += size
        return found

    def _longest_beside(self, samples: int, lengths: npt.NDArray[Any]) -> list[int]:
        """For each of this rank's micro-batches of a step, the longest text of all ranks, given the step's lengths."""
        together = self.beside(samples)
        return [max(int(lengths[piece.start : piece.stop].max()) for piece in pieces) for pieces in together]

    def __iter__(self) -> Iterator[list[int]]:
        # The order and the first step are fixed here rather than at the first batch, since workers run ahead of the
        # loop.
        return self._batches(self.order(), self._start)

    def __len__(self) -> int:
        """This rank's micro-batches in a whole epoch."""
        full, rest = divmod(self.size, self.global_batch)
        short = len(self._plan(rest)) if rest and not self.drop_last else 0
        return full * len(self._plan(self.global_batch)) + short

    def _draw(self, epoch: int) -> Order:
        if self.shuffle:
            order = np.random.default_rng(np.random.SeedSequence([self.seed, epoch])).permutation(self._size)
        else:
            order = np.arange(self._size)
        arrange = self._arrange
        if self._skipped is not None and self._skipped[0] == epoch:
            arrange = self._skipped[2] or arrange
        return order if arrange is None else arrange(order, epoch)

    def _skipped_in(self, epoch: int) -> int:
        return self._skipped[1] if self._skipped is not None and self._skipped[0] == epoch else 0

    def _batches(self, order: Order, start: int) -> Iterator[list[int]]:
        # The seek is reset only here: torch's loader makes two iterators at first and draws from the second.
        self._start = 0
        global_batch = self.global_batch
        for begin in range(start * global_batch, len(order), global_batch):
            samples = min(global_batch, len(order) - begin)
            if samples < global_batch and self.drop_last:
                return
            pieces = [order[begin + piece.start : begin + piece.stop].tolist() for piece in self._plan(samples)]
            if self.lengths is not None:
                longest = self._longest_beside(samples, self.lengths[order[begin : begin + samples]])
                pieces = [MicroBatch(piece, of_all) for piece, of_all in zip(pieces, longest)]
            yield from pieces

    def _samples_in(self, step: int) -> int:
        """Samples of a step over all ranks."""
        samples = min(self.global_batch, self.size - step * self.global_batch)
        if step < 0 or samples < (self.global_batch if self.drop_last else 1):
            raise ConfigError(f"step: {step} is not within the epoch's {self.steps_per_epoch} steps")
        return samples

    def _plan(self, samples: int) -> list[Piece]:
        """This rank's micro-batches of a step of `samples` samples; an epoch has at most two such sizes."""
        plan = self._plans.get(samples)
        if plan is None:
            begin, end = range_of_rank(samples, self.rank, self.world_size)
            # The largest part is the mean, rounded up.
            pieces = -(-(-(-samples // self.world_size) if self.fill_empty else end - begin) // self.micro_batch)
            plan = []
            for size in cut(end - begin, self.micro_batch, pieces):
                plan.append(Piece(begin, begin + size, size) if size else Piece(0, 1, 0))
                begin += size
            self._plans[samples] = plan
        return plan

    def _check_size(self, size: int) -> None:
        if size < 1:
            raise DataError("the data set has no samples")
        if self.drop_last and size < self.global_batch:
            raise DataError(
                f"the data set has {size} samples, fewer than the global batch of {self.global_batch}, and drop_last "
                "leaves out short steps: nothing would remain; lower the batch or turn drop_last off"
            )


class OrderedSplitSampler(StepSampler):
    """Splits the indices that a user's own sampler draws in the same way.

    All ranks draw the whole sequence under a random state that depends only on seed and epoch, so they draw the same.
    The process's own random state is left unchanged. The sampler's `set_epoch`, if any, is called.

    Args:
        sampler: Yields sample indices, such as `WeightedRandomSampler`.
        global_batch: Samples per step over all ranks.
        micro_batch: Most samples per forward pass on one rank.
        rank: This process.
        world_size: Number of processes.
        seed: Seed of the sampler's draws.
        drop_last: Drop the last step if it is short.
        fill_empty: Give ranks without samples a filler.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        global_batch: int,
        micro_batch: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        fill_empty: bool = True,
    ) -> None:
        super().__init__(
            global_batch,  # placeholder until the first draw
            global_batch,
            micro_batch,
            rank=rank,
            world_size=world_size,
            seed=seed,
            drop_last=drop_last,
            fill_empty=fill_empty,
        )
        self.sampler = sampler

    @property
    def size(self) -> int:
        return len(self.order())

    def describe(self) -> str:
        return f"samples in the order that {type(self.sampler).__name__} draws from seed {self.seed}"

    def _draw(self, epoch: int) -> Order:
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        own = Walk({"sampler": self.sampler}).generators.values()
        kept = [read_state(generator) for generator in own]
        with seeded(self.seed, epoch):
            try:
                for generator in own:
                    reseed(generator, mix(self.seed, epoch))
                drawn = list(self.sampler)
            finally:
                for generator, state in zip(own, kept):
                    write_state(generator, state)
        self._check_size(len(drawn))
        return _as_order(drawn)


def _as_order(drawn: list[Any]) -> Order:
    """Indices as an array: of integers if they are, otherwise of the keys that the data set takes."""
    try:
        return np.array([operator.index(index) for index in drawn], dtype=np.int64)
    except TypeError:
        order = np.empty(len(drawn), dtype=object)
        order[:] = drawn
        return order
