"""Where the real tokens of a padded batch are, found on the host before the batch is copied.

A model that skips padding needs to know the number of real tokens before it is called, and asking the device would
make the host wait. So each batch carries a plan under the key `PLAN`:

- `places` int64 [T]: places of the real tokens in the batch flattened to B x W tokens; unused slots of the capacity T
  hold B x W.
- `back` int64 [B x W]: where in the T tokens each place of the batch went; T for padding.
- `offsets` int32 [S + 1]: the borders of the samples among the T tokens; unused capacity follows, cut into sequences
  of at most W. S depends only on B and W.
- `length` int: an upper bound of the sequence lengths, which is W.

There are few capacities and widths, so that a graph can be captured for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from frameworm.data.batches.packed import IGNORED_LABEL, spare_sequences
from frameworm.data.batches.sizes import TARGET_KEYS
from frameworm.errors import ConfigError

PLAN = "frameworm_real_tokens"
MASK = "attention_mask"
_CAPACITIES = 32  # capacities are multiples of this fraction of a full batch
_UNIT = 64  # tokens; suits matrix units
_SMALLEST_WIDTH_STEP = 8
_NEAR = 1.25  # a batch is widened by at most this factor to reach a width that was used before


class PaddingPlanner:
    """Adds to every batch a plan of where its real tokens are.

    Args:
        widen: Pad batches to one of a few widths if their parts allow it.
        widest: Largest width to pad to; None: no limit.
        pin: Put the plan in page-locked memory.

    Attributes:
        first_width: Width of the first batch before widening.
    """

    def __init__(self, *, widen: bool, widest: int | None = None, pin: bool = False) -> None:
        self._widths = FewWidths(widest, pin=pin) if widen else None
        self._pin = pin
        self.first_width: int | None = None
        self._batches = self._planned = self._tokens = self._computed = 0

    @property
    def note(self) -> str | None:
        """How much padding was skipped, for the summary."""
        if not self._planned:
            return None
        left_out = 1 - self._computed / self._tokens
        text = f"gpu.padding_free: {left_out:.0%} of the tokens were padding and were left out"
        rest = self._batches - self._planned
        return f"{text}; {rest} of {self._batches} batches ran padded" if rest else text

    def __call__(self, batch: Any) -> Any:
        """Add the plan to a batch; a batch whose mask has gaps is returned unchanged.

        Raises:
            ConfigError: The first batch has no mask that says what is padding.
        """
        problem = why_unsuitable(batch)
        self._batches += 1
        if problem is not None:
            if self._batches == 1:
                raise ConfigError(f"gpu.padding_free: {problem}")
            return batch
        mask = batch[MASK]
        real = mask.cpu().numpy() != 0
        rows, width = real.shape
        self.first_width = self.first_width or width
        self._tokens += rows * width
        if self._widths is not None:
            batch = self._widths(batch)
            width = batch[MASK].shape[1]
        plan = make_plan(real, width, pin=self._pin)
        self._planned += 1
        self._computed += len(plan["places"])
        return {**batch, PLAN: plan}


class FewWidths:
    """Pads batches to one of a few widths if their parts allow it.

    Args:
        widest: Largest width to pad to; None: no limit.
        pin: Put the padded tensors in page-locked memory.
    """

    def __init__(self, widest: int | None = None, *, pin: bool = False) -> None:
        self._widest = widest
        self._pin = pin
        self._known: list[int] = []
        self._batches = self._left = 0

    @property
    def note(self) -> str:
        """Which widths batches were padded to, for the summary."""
        widths = ", ".join(map(str, sorted(self._known)))
        text = f"data.pad_to: batches were padded on to the widths {widths}"
        return f"{text}; {self._left} of {self._batches} could not be" if self._left else text

    def __call__(self, batch: Any) -> Any:
        """Pad the batch; it is returned unchanged if padding would change its meaning.

        Raises:
            ConfigError: The first batch has no mask that says what is padding.
        """
        self._batches += 1
        mask = batch.get(MASK) if isinstance(batch, Mapping) else None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            if self._batches == 1:
                raise ConfigError(
                    f"data.pad_to: few needs batches that are dicts with a tensor {MASK} of [samples, tokens], which "
                    "says what is padding; leave it at longest"
                )
            self._left += 1
            return batch
        wider = widened(batch, self._usual(few_widths(mask.shape[1], self._widest)))
        if wider is None:
            self._left += 1
            return batch
        if self._pin:
            return {name: item if item is batch[name] else item.pin_memory() for name, item in wider.items()}
        return wider

    def _usual(self, width: int) -> int:
        """A width used before if it is hardly wider: every new width must be compiled and captured."""
        near = [known for known in self._known if width <= known <= _NEAR * width]
        if not near:
            self._known.append(width)
        return min(near, default=width)


def why_unsuitable(batch: Any) -> str | None:
    """Why the padding of a batch cannot be skipped; None if it can."""
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor):
        return f"batches must be dicts with a tensor {MASK} that says which tokens are padding"
    if mask.dim() != 2 or mask.is_floating_point() or mask.is_complex() or not mask.numel():
        kind = str(mask.dtype).removeprefix("torch.")
        return f"{MASK} is a {kind} tensor of shape {tuple(mask.shape)}; it must be [samples, tokens] of 1 and 0"
    values = mask.cpu().numpy()
    if mask.dtype != torch.bool and (values.min() < 0 or values.max() > 1):
        return f"{MASK} holds other numbers than 1 and 0"
    # More than one run of real tokens in a sample: a sliding attention window would have counted the gap.
    begins = np.count_nonzero(np.diff(values.astype(np.int8), axis=1, prepend=0) == 1, axis=1)
    return f"{MASK} has padding between the tokens of a sample" if begins.max() > 1 else None


def few_widths(longest: int, widest: int | None = None) -> int:
    """Round up to one of four widths per power of two, but not beyond `widest` unless the batch is wider itself."""
    step = max(_SMALLEST_WIDTH_STEP, 1 << max(0, (longest - 1).bit_length() - 3))
    wider = -(-longest // step) * step
    return wider if widest is None else max(longest, min(wider, widest))


def widened(batch: Mapping[str, Any], width: int) -> dict[str, Any] | None:
    """The batch padded to a width; None if one of its parts cannot be.

    Parts of shape [samples, tokens, ...] are padded with zeros, targets with the label that losses ignore. Targets
    are only padded if their existing padding already holds that label.
    """
    mask: torch.Tensor = batch[MASK]
    rows, present = mask.shape
    found = dict(batch)
    for name, item in batch.items():
        if not isinstance(item, torch.Tensor) or item.dim() < 2:
            continue
        if present in item.shape[2:]:
            return None
        if item.shape[:2] != (rows, present) or width == present:
            continue
        fill = 0
        if name in TARGET_KEYS:
            ignored = item[mask == 0] == IGNORED_LABEL
            if item.is_floating_point() or not ignored.numel() or not bool(ignored.all()):
                return None
            fill = IGNORED_LABEL
        found[name] = F.pad(item, (0, 0) * (item.dim() - 2) + (0, width - present), value=fill)
    return found


def cut_back(batch: Mapping[str, Any], width: int) -> dict[str, Any]:
    """A batch without its plan, cut back to its width before widening."""
    shape = batch[MASK].shape
    return {
        name: item[:, :width].contiguous() if isinstance(item, torch.Tensor) and item.shape[:2] == shape else item
        for name, item in batch.items()
        if name != PLAN
    }


def make_plan(real: NDArray[np.bool_], width: int, *, pin: bool = False) -> dict[str, Any]:
    """Build the plan from the mask of real tokens; `width` is the width of the batch, which may have been widened."""
    rows, columns = np.nonzero(real)
    samples, tokens = len(real), len(rows)
    places = rows * width + columns
    everything = samples * width
    unit = -(-everything // (_CAPACITIES * _UNIT)) * _UNIT
    capacity = max(1, -(-tokens // unit)) * unit
    if capacity == width:
        capacity += unit  # otherwise a row of tokens would look like a batch of one sample
    spare = spare_sequences(2 * unit, width)
    plan = {
        "places": torch.full((capacity,), everything, pin_memory=pin),
        "back": torch.full((everything,), capacity, pin_memory=pin),
        "offsets": torch.zeros(samples + spare + 1, dtype=torch.int32, pin_memory=pin),
    }
    plan["places"].numpy()[:tokens] = places
    plan["back"].numpy()[places] = np.arange(tokens)
    offsets = plan["offsets"].numpy()
    np.cumsum(np.count_nonzero(real, axis=1), out=offsets[1 : samples + 1])
    offsets[samples + 1 :] = np.minimum(tokens + np.arange(1, spare + 1) * width, capacity)
    return {**plan, "length": width}
