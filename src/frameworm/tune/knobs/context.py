"""The context of a knob: the current config, the machine, and what the workload can do. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from frameworm.config.load import load_config_from_mapping
from frameworm.config.resolve import resolve
from frameworm.config.schema import Config
from frameworm.errors import ConfigError, DeviceError

# Says why a config cannot fit in memory; None if it can, or if that is unknown.
Planner = Callable[[Config], str | None]
Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrialMachine:
    """Facts about the machine, for one node."""

    device: Literal["cpu", "cuda"] = "cpu"
    bf16: bool = False  # in hardware; elsewhere torch emulates it, on CPUs many times slower than fp32
    capability: float | None = None  # compute capability of the GPU, such as 9.0
    gpus: int = 0
    cpus_usable: int = 1
    torch_threads: int | None = None
    memory_bytes: int | None = None  # of one device


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """Facts about the workload; None: unknown."""

    accepts_packed: bool = False
    many_widths: bool = False  # padded batches are as wide as their longest sample, and widths vary
    many_shapes: bool = False  # almost every batch has a different shape
    masks_padding: bool = False  # batches have an attention_mask
    assembles_batches: bool = False  # no Python per sample, so worker processes do not pay off
    resident_bytes: int | None = None  # size of the training set on a device
    why_not_resident: str | None = "the samples are not known to be tensors of one shape"  # unless packed; None: can be
    samples_per_epoch: int | None = None
    has_convolutions: bool = False
    has_gelu: bool = False  # as modules, not as function calls
    has_wide_head: bool = False  # a linear layer that may be a vocabulary head
    can_checkpoint: bool = True
    repeats_blocks: bool = False
    parameter_bytes: int | None = None
    has_validation: bool = False
    validation_samples: int | None = None
    padding_share: float | None = None  # fraction of a batch's tokens, if the model may be able to skip them
    automatic_workers: int | None = None  # worker processes if the config leaves them open


@dataclass(frozen=True)
class Context:
    """The current config and everything that decides how it may be changed.

    Attributes:
        config: As the user wrote it, with the changes accepted so far.
        machine: Facts about the machine.
        workload: Facts about the workload.
        world_size: Number of processes.
        planner: Says which configs cannot fit in memory.
        resolved: The config with every `auto` decided.
    """

    config: Config
    machine: TrialMachine = field(default_factory=TrialMachine)
    workload: WorkloadFacts = field(default_factory=WorkloadFacts)
    world_size: int = 1
    planner: Planner | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolved", self.resolve(self.config))

    resolved: Config = field(init=False, repr=False, compare=False)

    def resolve(self, config: Config) -> Config:
        """A config with every `auto` decided as it would be here.

        Raises:
            ConfigError: It cannot run here.
            DeviceError: It requires a GPU that does not exist.
        """
        return resolve(config, world_size=self.world_size, device=self.machine.device, bf16=self.machine.bf16)

    def having(self, config: Config) -> Context:
        """The same machine and workload with another config."""
        return replace(self, config=config)

    @property
    def on_gpu(self) -> bool:
        """Whether training runs on a GPU."""
        return self.resolved.gpu.device == "cuda"

    @property
    def global_batch(self) -> int:
        """Samples per step over all processes."""
        assert self.resolved.training.global_batch is not None
        return self.resolved.training.global_batch

    @property
    def micro_batch(self) -> int:
        """Samples per forward pass on one device."""
        assert isinstance(self.resolved.training.micro_batch, int)
        return self.resolved.training.micro_batch

    @property
    def run_samples(self) -> int | None:
        """Samples of the whole run; None: unknown."""
        training = self.config.training
        by_epochs = None
        if self.workload.samples_per_epoch is not None:
            by_epochs = training.epochs * self.workload.samples_per_epoch
        by_steps = None if training.max_steps is None else training.max_steps * self.global_batch
        known = [count for count in (by_epochs, by_steps) if count is not None]
        return min(known, default=None)

    def why_not(self, changes: Changes) -> str | None:
        """Why a config with these changes is not worth a trial; None if it may be tried."""
        try:
            changed = apply_changes(self.config, changes)
            resolved = self.resolve(changed)
        except (ConfigError, DeviceError) as error:
            return str(error).splitlines()[0]
        if resolved.training.global_batch != self.global_batch:
            return f"the global batch would be {resolved.training.global_batch} instead of {self.global_batch}"
        if resolved == self.resolved:
            return "already so"
        return self.planner(changed) if self.planner is not None else None


def setting_of(config: Config, key: str) -> Any:
    """A value by its dotted name; None if there is no such key."""
    section, _, name = key.partition(".")
    inner = getattr(config, section, None)
    return getattr(inner, name, None) if name else inner


def apply_changes(config: Config, changes: Changes) -> Config:
    """A copy of a config with values changed by their dotted names.

    Raises:
        ConfigError: A key does not exist, a value is invalid, or the resulting config is rejected.
    """
    values = config.model_dump()
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if not isinstance(values.get(section), dict) or (section != "model" and name not in values[section]):
            raise ConfigError(f"{key}: there is no such setting")
        values[section][name] = value
    return load_config_from_mapping(values, environ={})
