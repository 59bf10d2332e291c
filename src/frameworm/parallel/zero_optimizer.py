"""ZeRO stage 1: every rank keeps only a part of the optimizer's state."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from frameworm.errors import EnvironmentSetupError, ModelError, StateError
from frameworm.torch_private.optimizers import accepts_found_inf, mark_stepped

with warnings.catch_warnings():
    # Importing this makes torch warn about its own code.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

_SCALER_FLAGS = ("grad_scale", "found_inf")


_DIVIDED = "_frameworm_divided"


class ZeROStage1Optimizer(ZeroRedundancyOptimizer):
    """An optimizer whose state is divided among the ranks, parameter by parameter.

    Each rank updates its parameters and sends them to the others. It extends torch's `ZeroRedundancyOptimizer`: it
    skips steps with bad gradients on the device if the inner optimizer supports that, and loads states to the device
    that the inner optimizer expects.

    Args:
        params: Parameters, or groups of them; the same on every rank, in the same order.
        optimizer_class: Class of the inner optimizer.
        parameters_as_bucket_view: Keep each rank's parameters in one block of memory, which is sent at once.
        **settings: Arguments of the inner optimizer, such as `lr`.

    Raises:
        EnvironmentSetupError: There is no process group.

    Examples:
        >>> optimizer = ZeROStage1Optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
        parameters_as_bucket_view: bool = False,
        **settings: Any,
    ) -> None:
        if not dist.is_initialized():
            raise EnvironmentSetupError(
                "ZeROStage1Optimizer divides its state among the ranks of a process group, and there is none: call "
                "setup_ddp() first under torchrun, or setup_ddp(rank, world_size); one process alone needs "
                f"{optimizer_class.__name__} only"
            )
        super().__init__(params, optimizer_class, parameters_as_bucket_view=parameters_as_bucket_view, **settings)
        self._given: torch.optim.Optimizer | None = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch's loss scaler and by the engine."""
        return accepts_found_inf(self.optim)

    def step(self, closure: Callable[[], float] | None = None, **more: Any) -> float | None:  # type: ignore[override]
        """Update this rank's parameters, then exchange the updated ones."""
        given = [name for name in _SCALER_FLAGS if hasattr(self, name)]
        for name in given:
            setattr(self.optim, name, getattr(self, name))
        try:
            result: float | None = super().step(closure, **more)
            return result
        finally:
            for name in given:
                delattr(self.optim, name)

    def owner_of(self, parameter: torch.Tensor) -> int | None:
        """The rank that updates a parameter; None if the parameter is not in this optimizer."""
        owners: dict[torch.Tensor, int] = self._param_to_rank  # type: ignore[attr-defined]
        return owners.get(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state, as `state_dict` returns it after `consolidate_state_dict`."""
        # torch would put step counts on the host, where fused optimizers do not look for them, and replace the groups'
        # dicts, to which schedulers hold references.
        numbers: dict[torch.Tensor, int] = {}
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            numbers.update(zip(group["params"], saved["params"], strict=True))
            group.update({name: value for name, value in saved.items() if name != "params"})
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for own, group in zip(self.optim.param_groups, self.param_groups, strict=True):
            places = list(range(count, count + len(own["params"])))
            count += len(places)
            for place, parameter in zip(places, own["params"]):
                if numbers[parameter] in state_dict["state"]:
                    state[place] = state_dict["state"][numbers[parameter]]
            groups.append({**group, "params": places})
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        if self._given is not None:
            self._given.state = self.optim.state

    def take_over(self, given: torch.optim.Optimizer) -> None:
        """Continue with this rank's part of a state, and keep that part in the given optimizer for later training.

        All ranks must call it.

        Args:
            given: The user's optimizer.

        Raises:
            StateError: It holds other parts of the state, from a training run that divided the parameters differently.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        own = {parameter for group in self.optim.param_groups for parameter in group["params"]}
        held = {number for number, parameter in enumerate(parameters) if given.state.get(parameter)}
        held_by_ranks: list[set[int]] = [held] * dist.get_world_size()
        dist.all_gather_object(held_by_ranks, held)
        missing = {number for number in set().union(*held_by_ranks) - held if parameters[number] in own}
        lacking: list[bool] = [False] * len(held_by_ranks)
        dist.all_gather_object(lacking, bool(missing))
        if any(lacking):
            raise StateError(
                "strategy zero1: the optimizer's parameters were divided otherwise among the ranks in the last "
                "train(), so a part of its state lies on other ranks; pass a new optimizer, or resume the run from its "
                "checkpoint"
            )
        self.optim.state.update({parameter: state for parameter, state in given.state.items() if parameter in own})
        self._given = given
        given.state = self.optim.state
        given.__dict__[_DIVIDED] = True


def holds_divided_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer holds this rank's part of a state, from earlier training under zero1."""
    return _DIVIDED in vars(optimizer)


def rebuild_sharded(optimizer: torch.optim.Optimizer) -> ZeROStage1Optimizer:
    """An optimizer of the same class over the same groups, with its state divided among the ranks.

    The groups are shared, so that a learning rate set in the given optimizer also applies here; so is the state.

    Raises:
        ModelError: The parameters have several dtypes.
        StateError: The given optimizer holds another rank's part of the state.
    """
    kind = type(optimizer)
    names = inspect.signature(kind.__init__).parameters
    open_ended = any(item.kind is item.VAR_KEYWORD for item in names.values())
    settings = {name: value for name, value in optimizer.defaults.items() if open_ended or name in names}
    groups = optimizer.param_groups
    # torch concatenates the parameters, which would lose any memory layout that is not contiguous.
    as_views = all(parameter.is_contiguous() for group in groups for parameter in group["params"])
    try:
        rebuilt = ZeROStage1Optimizer(groups, kind, parameters_as_bucket_view=as_views, **settings)
    except ValueError as error:
        raise ModelError(f"strategy zero1 cannot divide this optimizer's state: {error}; use ddp") from None
    rebuilt.take_over(optimizer)
    # torch's schedulers watch the given optimizer, whose step() is never called.
    mark_stepped(optimizer)
    return rebuilt
