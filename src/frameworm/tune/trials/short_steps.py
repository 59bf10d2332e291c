"""Steps with many accumulated passes are tried with fewer passes, so that a search's budget goes further.

A step of GPT-2 with half a million tokens takes seconds, nearly all of which is the same pass again and again. Configs
that are measured in turns or compared in learning are shortened alike. The update after the passes then has more weight
than in training, which makes a gain in the passes look slightly smaller than it is.
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
# Steps are shortened to about this duration, keeping at least two passes of the initial config.
STEP_S = 0.4
LEAST_PASSES = 2


class ShortSteps:
    """Divides the global batch of all configs of one search by the same factor, once the duration of a step is known.

    Args:
        folder: Stores the factor, because a resumed search must measure the same thing.
        resolve: Resolves a config as it would run here.
        start: The initial config of the search.
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
        """Choose the factor from the duration of one full step; None: unknown, and nothing is shortened."""
        wanted = 1.0 if step_s is None else step_s / STEP_S
        divisors = [one for one in range(1, self._passes // LEAST_PASSES + 1) if self._passes % one == 0]
        self.factor = min(divisors, key=lambda one: abs(math.log(one / max(1.0, wanted))))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, json.dumps({"factor": self.factor, "step_s": step_s}) + "\n")

    def cut(self, config: Config) -> Config:
        """A config with shorter steps; unchanged if they cannot be shortened."""
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
            return config  # its passes are so large that a shorter step cannot hold them
        return changed

    def cut_alike(self, configs: Sequence[Config]) -> list[Config]:
        """Shorten all configs or none, because compared ones must get the same samples."""
        cut = [self.cut(config) for config in configs]
        return list(configs) if any(now is before for now, before in zip(cut, configs, strict=True)) else cut
