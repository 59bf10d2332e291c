"""A config resolved for this machine."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from frameworm.config.resolve import resolve
from frameworm.config.schema import Config
from frameworm.hardware.devices import choose_device, supports_bf16


class Machine(NamedTuple):
    """What `resolve` needs to know about the machine."""

    device: Literal["cpu", "cuda"]
    bf16: bool
    device_count: int


def look_at_machine(config: Config) -> Machine:
    """The kind of device this config will run on here.

    Raises:
        DeviceError: The config asks for a GPU and there is none.
    """
    device = choose_device(config.gpu.device, 0, None)
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return Machine(kind, supports_bf16(device), torch.cuda.device_count() if device.type == "cuda" else 0)


def resolve_here(config: Config, world_size: int, *, resized: bool = False) -> Config:
    """The config with every `auto` decided for this machine and that many processes.

    Args:
        resized: The run may go on with another number of processes than it began with; the global batch then stays,
            and ranks take unequal shares if it does not divide.
    """
    machine = look_at_machine(config)
    return resolve(config, world_size=world_size, device=machine.device, bf16=machine.bf16, allow_uneven=resized)
