"""Resolves a config for this machine."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from frameworm.config.resolve import resolve
from frameworm.config.schema import Config
from frameworm.hardware.devices import choose_device, supports_bf16


class ResolvedMachine(NamedTuple):
    """What `resolve` needs to know about the machine."""

    device: Literal["cpu", "cuda"]
    bf16: bool
    device_count: int


def resolve_machine(config: Config) -> ResolvedMachine:
    """Return the kind of device that this config will run on here.

    Raises:
        DeviceError: The config requests a GPU and there is none.
    """
    device = choose_device(config.gpu.device, 0, None)
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return ResolvedMachine(kind, supports_bf16(device), torch.cuda.device_count() if device.type == "cuda" else 0)


def resolve_here(config: Config, world_size: int, *, resized: bool = False) -> Config:
    """Return the config with every `auto` decided for this machine and number of processes.

    Args:
        config: The requested config.
        world_size: Number of processes.
        resized: The run may resume with another number of processes than before; the global batch is then kept, and
            ranks get unequal shards if it does not divide.
    """
    machine = resolve_machine(config)
    return resolve(config, world_size=world_size, device=machine.device, bf16=machine.bf16, allow_uneven=resized)
