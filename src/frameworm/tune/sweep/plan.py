"""What a sweep runs: one training per world size and repeat, in which order, with which batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from frameworm.config.load import dump_config
from frameworm.config.observe_section import LOGGER_SETTINGS
from frameworm.config.resolve import BatchError, batch_of
from frameworm.config.schema import Config
from frameworm.errors import ConfigError
from frameworm.scaling.points import Mode

MOST_PROCESSES = 100_000


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep as asked for; `config` has the overrides in it."""

    config: Config
    world_sizes: tuple[int, ...]  # smallest first
    mode: Mode = "strong"
    repeats: int = 3
    overrides: tuple[str, ...] = ()  # as given, for the variables of the environment come after the file

    @property
    def fingerprint(self) -> str:
        """Names the work: sweeps with the same one may share a folder, whatever their world sizes and repeats."""
        config = dump_config(self.config, without={"observe": LOGGER_SETTINGS, "storage": None})
        text = config + self.mode + str(self.world_sizes[0])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def runs(self) -> list[tuple[int, int]]:
        """(world size, repeat) in order: every round visits all sizes, every other round from the largest down.

        What changes slowly on the machine then falls on all sizes alike.
        """
        order: list[tuple[int, int]] = []
        for repeat in range(1, self.repeats + 1):
            sizes = self.world_sizes if repeat % 2 else tuple(reversed(self.world_sizes))
            order += [(size, repeat) for size in sizes]
        return order

    def settings(self, world_size: int) -> list[str]:
        """Overrides that give a world size its batch.

        Strong: the global batch of the smallest world, shared out; a micro-batch that is set stays the largest there
        may be. Weak: as many samples on each device as in the smallest world.

        Raises:
            ConfigError: The batch does not divide.
        """
        training = self.config.training
        least = self.world_sizes[0]
        try:
            first = batch_of(training, least)
        except BatchError as error:
            raise ConfigError(f"training.global_batch: {error}") from None
        found = []
        parallel = self.config.parallel
        if world_size == 1 and parallel.strategy == "ddp":
            found.append("parallel.strategy=single")
        if world_size == 1 and parallel.compression != "off":  # alone there is nothing to send
            found.append("parallel.compression=off")
        if self.mode == "weak":
            total = first.global_batch // least * world_size
            found.append(f"training.global_batch={total}")
            return found
        total = first.global_batch
        if total % world_size:
            raise ConfigError(
                f"training.global_batch: {total} does not divide among {world_size} processes; set one that every "
                f"world size of {', '.join(str(size) for size in self.world_sizes)} divides, or use --weak"
            )
        found.append(f"training.global_batch={total}")
        if training.micro_batch != "auto" or training.batch_size is not None or training.accumulation != "auto":
            share = total // world_size
            micro = max(size for size in range(1, min(first.micro_batch, share) + 1) if share % size == 0)
            found += ["training.batch_size=off", f"training.micro_batch={micro}", "training.accumulation=auto"]
        return found


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """World sizes from `1,2,4`: each once, smallest first.

    Raises:
        ConfigError: They are none.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and 0 < int(part) <= MOST_PROCESSES for part in parts):
        raise ConfigError(f"--world-sizes {text} is no list of numbers of processes; give one such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def shell_settings(settings: Sequence[str]) -> list[str]:
    """The settings as arguments of `frameworm train`."""
    return [argument for setting in settings for argument in ("--set", setting)]
