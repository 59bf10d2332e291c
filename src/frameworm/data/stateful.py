"""Loaders that can save and restore their position, so that a resumed run need not read up to it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from frameworm.data.adopt import RankBatches
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.samples.held import Held, process_generators
from frameworm.data.samples.reader import has_state, is_plain, keeps_its_place
from frameworm.data.samples.streams import AHEAD, is_stream


class PlacedLoader:
    """A loader with `state_dict` and `load_state_dict`, wrapped so that its state after each batch is known.

    Args:
        loader: The loader, or `RankBatches` of it.

    Attributes:
        copied: Set by a consumer that reads batches before they are trained on; the latest states are then kept.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.copied = False
        self._holder = loader.source if isinstance(loader, RankBatches) else loader
        self._number = 0
        self._begun: Mapping[str, Any] | None = None
        self._known: deque[tuple[int, Any]] = deque(maxlen=AHEAD)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        self._number = 0
        self._known.clear()
        if begun is not None:
            self._holder.load_state_dict(copy.deepcopy(begun["loader"]))
            self._number = begun["batches"]
            if isinstance(self.loader, RankBatches):
                self.loader.after_own(begun.get("random"))
        return self._read(iter(self.loader))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._number += 1
            if self.copied:
                self._known.append((self._number, self._state()))
            yield batch
        self._number = 0  # between epochs there is no position, and some loaders would start workers to tell it

    def _state(self) -> dict[str, Any]:
        random = self.loader.random if isinstance(self.loader, RankBatches) else None
        return {"loader": copy.deepcopy(self._holder.state_dict()), "random": random}

    def place(self, batches: int) -> dict[str, Any] | None:
        """The loader's position after `batches` batches of the current epoch, for `go_on`; None if unknown."""
        if not self._number:
            return None
        known = dict(self._known)
        if batches not in known and batches != self._number:
            return None
        state = known[batches] if batches in known else self._state()
        return {"batches": batches, **state} if is_plain(state) else None

    def go_on(self, saved: Mapping[str, Any]) -> bool:
        """Start the next iteration, and only that one, at a `place`; False if it is of another kind of loader."""
        if "loader" not in saved:
            return False
        self._begun = saved
        return True


def placed(loader: Any, seed: int = 0) -> PlacedLoader | None:
    """Wrap a user's own loader that can restore its position exactly; None if it cannot.

    A loader over an iterable data set whose state does not bring back the same samples cannot do so either.
    """
    holder = loader.source if isinstance(loader, RankBatches) else loader
    if isinstance(holder, OptimizedDataLoader) or not has_state(holder):
        return None
    if not isinstance(holder, DataLoader):
        return PlacedLoader(loader) if keeps_its_place(holder, seed) else None
    dataset = holder.dataset
    exact = not is_stream(dataset) or not has_state(dataset)
    return PlacedLoader(loader) if exact else None


class Place:
    """The position of a source of steps in its epoch, as its loader describes it; part of a checkpoint."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._saved: dict[str, Any] | None = None
        self.batches = 0
        """Batches in the steps of the current epoch so far."""

    def capture(self) -> dict[str, Any] | None:
        """The position as plain data; None if the loader cannot tell."""
        place: dict[str, Any] | None = None if self._loader is None else self._loader.place(self.batches)
        return place

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Set the position at which the next partly read epoch begins."""
        self._saved = saved

    def go_on(self) -> bool:
        """Restore the loader's position, before its iterator is made; False if that is not possible."""
        saved, self._saved = self._saved, None
        self.batches = 0
        if saved is None or self._loader is None or not self._loader.go_on(saved):
            return False
        self.batches = saved["batches"]
        return True


class Untouched:
    """Restores the process's random state after a `with` block."""

    def __enter__(self) -> None:
        self._held = Held(process_generators())
        self._before = self._held.capture()

    def __exit__(self, *raised: object) -> None:
        self._held.restore(self._before)
