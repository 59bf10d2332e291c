"""Steps of many accumulated passes are tried with fewer of them, so that a search's budget reaches further.

A step of GPT-2 with half a million tokens takes seconds, and nearly all of it is the same pass again and again. What
takes turns with each other and what learns beside each other is cut alike. The update after the passes then weighs
more than it will, which makes a gain in the passes look a little smaller than it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from frameworm.config.schema import Config
from frameworm.errors import ConfigError
from frameworm.records.atomic import write_atomic
from frameworm.records.reading import read_json
from frameworm.tune.knobs.context import apply_changes

FILE_NAME = "short_steps.json"
# Steps are cut to about this long, and at least two passes of the config that the search began with are left.
STEP_S = 0.4
LEAST_PASSES = 2


class ShortSteps:
    """Cuts the global batch of all configs of one search by the same factor, once it is known how long a step takes.

    Args:
        folder: Where the factor is kept: a search that goes on must measure what it measured before.
        resolve: A config as it would run here.
        start: The config that the search began with.
    """

    def __init__(self, folder: Path, resolve: Callable[[Config], Config], start: Config) -> None:
        self._path = folder / FILE_NAME
        self._resolve = resolve
        accumulation = resolve(start).training.accumulation
        self._passes = accumulation if isinstance(accumulation, int) else 1
        self.factor: int | None = 1 if self._passes <= LEAST_PASSES else None
        with suppress(OSError, ValueError, KeyError, TypeError):
            self.factor = int(read_json(self._path)["factor"])

    def decide(self, step_s: float | None) -> None:
        """Choose the factor from the time of one uncut step; None: nobody knows, and nothing is cut."""
        wanted = 1.0 if step_s is None else step_s / STEP_S
        divisors = [one for one in range(1, self._passes // LEAST_PASSES + 1) if self._passes % one == 0]
        self.factor = min(divisors, key=lambda one: abs(math.log(one / max(1.0, wanted))))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, json.dumps({"factor": self.factor, "step_s": step_s}) + "\n")

    def cut(self, config: Config) -> Config:
        """A config with shorter steps; as it is where they cannot be cut."""
        if self.factor is None or self.factor == 1:
            return config
        training = self._resolve(config).training
        assert training.global_batch is not None
        changes = {
            "training.global_batch": training.global_batch // self.factor,
            "training.micro_batch": training.micro_batch,
            "training.accumulation": "auto",
            "training.batch_size": None,
        }
        try:
            changed = apply_changes(config, changes)
            self._resolve(changed)
        except ConfigError:
            return config  # its passes are so large that fewer of them do not make up a step
        return changed

    def cut_alike(self, configs: Sequence[Config]) -> list[Config]:
        """All of them cut, or none: what is compared must get the same samples."""
        cut = [self.cut(config) for config in configs]
        return list(configs) if any(now is before for now, before in zip(cut, configs, strict=True)) else cut
