"""Seeds, and the state of every random number generator that a run uses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_NUMPY_LIMIT = 2**32


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch; with the same seed, ranks draw different dropout masks."""
    mixed = np.random.SeedSequence([seed, rank]).generate_state(2, np.uint64)
    random.seed(int(mixed[0]))
    np.random.seed(int(mixed[0]) % _NUMPY_LIMIT)
    torch.manual_seed(int(mixed[1]) >> 1)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the generators' state as plain data and tensors, which a checkpoint can store without pickled classes."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def has_drawn(before: dict[str, Any], device: torch.device) -> bool:
    """True if a number was drawn since `random_state` returned `before`."""
    now = random_state(device)
    plain = [[state["python"], state["numpy"][0], state["numpy"][2:]] for state in (before, now)]
    tensors = [[state["numpy"][1], state["torch"], state.get("cuda")] for state in (before, now)]
    return plain[0] != plain[1] or any(one is not None and not torch.equal(one, other) for one, other in zip(*tensors))


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the generators to where `random_state` was taken."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
