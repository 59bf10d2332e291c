"""How one model runs on many devices: a small base class, and one file per family of strategies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from frameworm.errors import ModelError
from frameworm.parallel.beside import Beside
from frameworm.parallel.named_state import laid_out, names_in_groups, to_names, to_numbers
from frameworm.parallel.shards import HeldState, loaded
from frameworm.records.observations import Compression

# A communication hook of DDP: takes a state and a gradient bucket, returns the future of the reduced bucket.
Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class Strategy:
    """One way to run a model. This base class is the strategy `single`: one process, one device."""

    name = "single"
    acts_after_steps = False  # whether `after_step` does anything
    keeps_own_copy = False  # whether model and optimizer differ between ranks between synchronisations
    settling_steps = 0  # first steps of a run in which the strategy does extra work
    shards_parameters = False  # whether a rank holds shards of parameters, so that calling the model is a collective

    def __init__(self, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.beside = Beside()

    def place_beside(self, beside: Beside) -> None:
        """Train these modules beside the model, starting from rank 0's values; called once, before `place`."""
        self.beside = beside
        beside.place(self.device)

    def place(self, model: nn.Module) -> nn.Module:
        """Put the model on the device and return the module to call; raises if it cannot be trained this way."""
        check_trainable(model, self.beside.parameters.values())
        return model.to(self.device)

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        """Called between two steps, on all ranks, when parameters were frozen, unfrozen or added to the optimizer.

        Returns:
            The module that the step calls from now on; None: the same as before.
        """
        return None

    def average_beside(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients of parameters beside the model over the ranks; called after backward."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if this strategy cannot use the optimizer, before anything has moved."""

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer to use; called once, after `place` and before anything reads its parameters."""
        return optimizer

    def given(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The user's own optimizer, to which parameter groups may be added."""
        return optimizer

    def adopt_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over groups that were added to the user's optimizer."""

    def owner_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int | None:
        """The one rank that updates a parameter; None: every rank updates it, or its part of it."""
        return None

    def send_from_owners(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Broadcast these parameters from the ranks that update them."""

    @property
    def update_device(self) -> torch.device:
        """The device on which parameters are updated."""
        return self.device

    @property
    def note(self) -> str | None:
        """A remark about this way of training for the summary, if any."""
        return None

    @property
    def gradient_ranks(self) -> int:
        """The number of ranks whose gradients are averaged in every step."""
        return self.world_size

    def no_sync(self) -> AbstractContextManager[None]:
        """Do not synchronise the gradients of backward passes in this context."""
        return contextlib.nullcontext()

    @property
    def hides_little(self) -> bool:
        """Whether backward can hide so little of the gradient exchange that it may as well run afterwards."""
        return False

    def unsent(self) -> AbstractContextManager[None]:
        """Do not send the gradients of passes in this context; buffers are sent as usual."""
        return self.no_sync()

    def wrap_hook(self, wrap: Callable[[Hook], Hook]) -> bool:
        """Send gradients through `wrap(hook)`, where `hook` is the current one; returns False if there is no hook.

        Call it once, between `place` and the first step.
        """
        return False

    def why_not_captured(self) -> str | None:
        """Why a step cannot be captured as a CUDA graph; None if it can."""
        return None

    @property
    def is_settled(self) -> bool:
        """Whether the next steps communicate in the same way as the last one; the same on all ranks."""
        return True

    def freeze(self) -> None:
        """Do not change the way of communicating any more, because graphs have captured it."""

    def after_step(self, model: nn.Module, step: int) -> bool:
        """Called on all ranks after each attempted step, with its number, if `acts_after_steps` is set.

        Returns:
            Whether the ranks communicated.
        """
        return False

    def scale_losses_by(self, scale: Callable[[], Any]) -> None:
        """Called once, before the first step: `scale()` returns the loss scale, or None without one."""

    def rank_state(self) -> dict[str, Any] | None:
        """State besides model and optimizer that this rank needs to resume exactly."""
        return None

    def load_rank_state(self, state: dict[str, Any] | None, saved_world_size: int) -> list[str]:
        """Restore a state from `rank_state`, None if none was saved; returns notes for the user."""
        return []

    def describe_compression(self) -> Compression | None:
        """What compression has done so far; None without compression."""
        return None

    def close(self) -> None:
        """Clean up at the end of training."""

    def held_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> HeldState:
        """The part of `model` and `optimizer` that this rank holds; together the ranks hold everything."""
        names = names_in_groups(self.named_parameters(model), optimizer.param_groups)
        return HeldState({"model": model.state_dict(), "optimizer": to_names(optimizer.state_dict(), names)})

    def load_model_state(self, model: nn.Module, saved: dict[str, Any]) -> None:
        """Load the model of a checkpoint; its tensors have not been read yet."""
        model.load_state_dict(loaded(saved))

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Load the optimizer of a checkpoint; its tensors have not been read yet.

        Raises:
            ValueError: It belongs to another optimizer.
        """
        names = names_in_groups(self.named_parameters(model), optimizer.param_groups)
        optimizer.load_state_dict(laid_out(to_numbers(loaded(saved), names), optimizer))

    def named_parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the model and those beside it."""
        yield from model.named_parameters()
        yield from self.beside.parameters.items()

    def own_gradients(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        """This rank's parts of the existing gradients, sharing their memory."""
        return [item.grad for item in parameters if item.grad is not None]

    def norm_over_ranks(
        self, parameters: list[nn.Parameter], gradients: list[torch.Tensor], norm: torch.Tensor
    ) -> torch.Tensor:
        """The norm of the whole gradients.

        Args:
            parameters: The parameters.
            gradients: This rank's parts of their gradients.
            norm: Norm of those parts.
        """
        return norm

    def after_evaluation(self, model: nn.Module) -> None:
        """Called after forward passes without backward."""

    def sum_over_ranks(self, value: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks, on the device, without making the host wait for a GPU."""

    def sync_buffers(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers, so that validation and checkpoints see one model."""

    def explain(self, error: RuntimeError) -> Exception:
        """Turn an error into one that the user can understand; by default, return it unchanged."""
        return error

    def check_gradients(self, model: nn.Module) -> None:
        """Called once after the first backward pass; raises if this strategy would train the model wrongly."""

    def communicated_bytes(self, model: nn.Module) -> int | None:
        """Bytes that each rank passes to collectives in a step, for gradients or what replaces them."""
        return 0


def check_trainable(model: nn.Module, beside: Iterable[torch.Tensor] = ()) -> None:
    """Reject models that no strategy can train, before anything has moved.

    Args:
        model: The model.
        beside: Parameters that train beside it.

    Raises:
        ModelError: There is nothing to train, a parameter is not initialised, or parameters are on several devices.
    """
    devices: dict[torch.device, str] = {}
    trainable = any(item.requires_grad for item in beside)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name} is not initialised yet (a lazy layer): run one batch through the model before "
                "handing it to the trainer"
            )
        devices.setdefault(parameter.device, name)
        trainable = trainable or parameter.requires_grad
    if not trainable:
        raise ModelError("the model has no parameter that requires a gradient, so there is nothing to train")
    if any(device.type == "meta" for device in devices):
        name = next(name for device, name in devices.items() if device.type == "meta")
        raise ModelError(f"parameter {name} is on the meta device and has no values: materialise the model first")
    if len(devices) > 1:
        (first, first_name), (second, second_name) = list(devices.items())[:2]
        raise ModelError(
            f"the model lies on several devices ({first_name} on {first}, {second_name} on {second}); "
            "put it on one device and choose a strategy (parallel.strategy) to spread it"
        )
