"""DDP, FSDP and process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from frameworm.torch_private.lookup import attribute


def backend_name(group: Any, device: torch.device) -> str:
    """What carries collectives of a device's tensors in a group; the public name stands for all devices at once."""
    return str(attribute(group, "_get_backend")(device).name())


def collective_timeout(group: Any, device: torch.device) -> Any:
    """The longest a collective of a group may take."""
    return attribute(attribute(group, "_get_backend")(device).options, "_timeout")


def collectives_begun(group: Any) -> int:
    """How many collectives of a group this rank has come to."""
    return int(attribute(group, "_get_sequence_number_for_group")())


def default_store() -> Any:
    """The key-value store that the ranks of the default group met at."""
    return attribute(dist.distributed_c10d, "_get_default_store")()


def abort_group() -> Callable[[], None] | None:
    """Ends NCCL's default group without waiting for other ranks; None where torch has no such thing: then it waits."""
    found: Callable[[], None] | None = getattr(dist.distributed_c10d, "_abort_process_group", None)
    return found


def set_timing_rate(replica: Any, steps: int) -> None:
    """Have DDP time one of so many steps."""
    attribute(replica, "_set_ddp_runtime_logging_sample_rate")(steps)


def times_of(replica: Any) -> Mapping[str, int]:
    """What DDP noted about the last step that it timed, in nanoseconds."""
    times: Mapping[str, int] = attribute(replica.logger, "_get_ddp_logging_data")().ints_map
    return times


def has_hook(replica: Any) -> bool:
    """Whether a communication hook sends the gradients of a DDP model; False for other models."""
    return bool(getattr(replica, "_comm_hooks", None))


def end_replica(replica: Any) -> None:
    """Take DDP out of a model's backward pass."""
    attribute(replica, "_remove_autograd_hooks")()


def shard_state(part: Any) -> Any:
    """What FSDP keeps for a part of a model; parts that were divided in one call share it."""
    return attribute(part, "_get_fsdp_state")()


def shard_groups(part: nn.Module) -> list[Any]:
    """Parameters that FSDP gathers together, of a part of a model; torch has allowed several groups since 2.13.

    Where neither name is there, nothing is found, and a tuner leaves gathering as it is.
    """
    state = shard_state(part)
    several = getattr(state, "_fsdp_param_groups", None)
    found = [getattr(state, "_fsdp_param_group", None)] if several is None else several
    return [group for group in found if hasattr(group, "post_forward_mesh_info")]
