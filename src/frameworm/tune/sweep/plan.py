"""What a sweep runs: one training per world size and repeat, in which order and with which batch."""

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
    """A requested sweep; `config` includes the overrides."""

    config: Config
    world_sizes: tuple[int, ...]  # ascending
    mode: Mode = "strong"
    repeats: int = 3
    overrides: tuple[str, ...] = ()  # as given, because environment variables are applied after the file

    @property
    def fingerprint(self) -> str:
        """Identifies the workload: sweeps with the same one may share a folder, with any world sizes and repeats."""
        config = dump_config(self.config, without={"observe": LOGGER_SETTINGS, "storage": None})
        text = config + self.mode + str(self.world_sizes[0])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def runs(self) -> list[tuple[int, int]]:
        """(world size, repeat) in order: each round visits all sizes, in descending order every other round.

        Slow changes of the machine then affect all sizes alike.
        """
        order: list[tuple[int, int]] = []
        for repeat in range(1, self.repeats + 1):
            sizes = self.world_sizes if repeat % 2 else tuple(reversed(self.world_sizes))
            order += [(size, repeat) for size in sizes]
        return order

    def settings(self, world_size: int) -> list[str]:
        """Overrides that set the batch of a world size.

        Strong scaling: the global batch of the smallest world, divided among the ranks; a given micro-batch remains the
        upper limit. Weak scaling: as many samples per device as in the smallest world.

        Raises:
            ConfigError: The batch does not divide evenly.
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
        if world_size == 1 and parallel.compression != "off":  # a single process sends nothing
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
    """Parse world sizes such as `1,2,4` into ascending unique numbers.

    Raises:
        ConfigError: They are not numbers of processes.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and 0 < int(part) <= MOST_PROCESSES for part in parts):
        raise ConfigError(f"--world-sizes {text} is not a list of numbers of processes; give one such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def shell_settings(settings: Sequence[str]) -> list[str]:
    """The settings as arguments of `frameworm train`."""
    return [argument for setting in settings for argument in ("--set", setting)]
