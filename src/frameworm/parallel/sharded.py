"""A model's state divided among the ranks: `zero1` (optimizer state), `zero2` and `zero3` (gradients, parameters too).

`zero1` is DDP with torch's `ZeroRedundancyOptimizer`. The others use torch's `fully_shard`, layer by layer: between
steps a rank holds only its shard; `zero2` gathers the parameters once per step, `zero3` a layer at a time, once in
forward and once in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from frameworm.config.schema import ParallelConfig
from frameworm.errors import EnvironmentSetupError, ModelError, StateError
from frameworm.parallel.beside import Beside, BesideGradients, send_values
from frameworm.parallel.compression.plain import gradient_bytes
from frameworm.parallel.named_state import holds_state, laid_out, names_in_groups, to_names, to_numbers
from frameworm.parallel.replicated import DDPStrategy, on_nccl
from frameworm.parallel.shards import HeldState, StoredTensor, loaded, own_part, shard_of
from frameworm.parallel.strategy import Strategy, check_trainable
from frameworm.parallel.units import check_shardable, find_units
from frameworm.parallel.zero_optimizer import ZeROStage1Optimizer, holds_divided_state, rebuild_sharded
from frameworm.torch_private.optimizers import refuse_found_inf


class ZeRO1Strategy(DDPStrategy):
    """DDP in which every rank keeps the optimizer state of some of the parameters, and updates only those."""

    name = "zero1"

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not holds_divided_state(optimizer):
            _refuse_state(optimizer, self.name)

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._given = optimizer
        return rebuild_sharded(optimizer)

    def given(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self._given

    def adopt_groups(self, optimizer: torch.optim.Optimizer) -> None:
        for group in self._given.param_groups[len(optimizer.param_groups) :]:
            optimizer.add_param_group(group)

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        self.adopt_groups(optimizer)
        return super().follow(model, optimizer)

    def owner_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int | None:
        assert isinstance(optimizer, ZeROStage1Optimizer)
        return optimizer.owner_of(parameter)

    def send_from_owners(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            owner = self.owner_of(optimizer, parameter)
            if owner is not None:
                dist.broadcast(parameter.data, src=owner)

    def held_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> HeldState:
        assert isinstance(optimizer, ZeROStage1Optimizer)
        names = names_in_groups(self.named_parameters(model), optimizer.param_groups)
        groups = [{**group, "params": list(its)} for group, its in zip(optimizer.param_groups, names, strict=True)]
        of = _names_by_parameter(optimizer, names)
        own = {of[parameter]: state for parameter, state in optimizer.optim.state.items() if state}
        return HeldState(
            {"model": model.state_dict(), "optimizer": {"param_groups": groups, "state": {}}},
            {"optimizer": {"state": own}},
        )

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        assert isinstance(optimizer, ZeROStage1Optimizer)
        names = names_in_groups(self.named_parameters(model), optimizer.param_groups)
        of = _names_by_parameter(optimizer, names)
        own = {of[parameter] for group in optimizer.optim.param_groups for parameter in group["params"]}
        state = {name: loaded(values) for name, values in saved["state"].items() if name in own}
        numbered = to_numbers({"state": state, "param_groups": loaded(saved["param_groups"])}, names)
        optimizer.load_state_dict(laid_out(numbered, optimizer))

    def communicated_bytes(self, model: nn.Module) -> int | None:
        gradients = super().communicated_bytes(model)
        return gradients + gradient_bytes(model) if gradients else gradients


class ShardedStrategy(Strategy):
    """`zero2` and `zero3`.

    Args:
        device: This rank's device.
        rank: This process.
        world_size: Number of processes.
        settings: The section `parallel`; its `strategy` says which of the two.
        dtype: Compute dtype of the layers; None: that of their parameters. Parameters are gathered in this type and
            gradients reduced in float32; everything outside of layers is left to autocast.
    """

    acts_after_steps = True
    settling_steps = 3  # the first steps set up buffers and streams
    shards_parameters = True

    def __init__(
        self,
        device: torch.device,
        rank: int,
        world_size: int,
        settings: ParallelConfig,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(device, rank, world_size)
        self.name = settings.strategy
        if not dist.is_initialized():
            raise EnvironmentSetupError(
                f"strategy {self.name} needs a process group: start with `frameworm train --distributed` or torchrun, "
                "or call setup_ddp(rank, world_size) first"
            )
        self._reshards = settings.strategy == "zero3"
        self._offloads = settings.offload_optimizer
        self._dtype = dtype
        self._root: FSDPModule | None = None
        self._before: list[tuple[str, nn.Parameter]] = []
        self._held = 0
        self._passes = 1
        self._beside_gradients = BesideGradients(self.sum_over_ranks, world_size, asks=settings.find_unused_parameters)
        self._has_buffers = False
        self._layer_bytes = self._other_bytes = 0

    @property
    def update_device(self) -> torch.device:
        return torch.device("cpu") if self._offloads else self.device

    def place_beside(self, beside: Beside) -> None:
        tied = beside.tied()
        if tied is not None:
            raise ModelError(
                f"{tied} is a parameter of the model too, and {self.name} divides it among the ranks where loss_fn "
                "cannot reach it; compute with it inside the model, or use ddp or zero1"
            )
        if beside.parameters and self._offloads:
            raise ModelError(
                "parallel.offload_optimizer keeps parameters in host memory, and loss_fn needs its own on the device; "
                "turn it off, or use zero1"
            )
        super().place_beside(beside)
        send_values([*beside.replicas(self.device).values(), *beside.buffers_on(self.device)])

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        self._beside_gradients.ask_again()
        _without_mixed_kernels(optimizer)
        return None

    def average_beside(self, parameters: list[nn.Parameter]) -> None:
        if self.world_size > 1:
            self._beside_gradients.average(parameters, self.device)
            send_values(self.beside.buffers_on(self.device))

    def place(self, model: nn.Module) -> nn.Module:
        if isinstance(model, FSDPModule):
            raise ModelError(
                "the model is sharded already, by an earlier training; build a new one and resume that run"
            )
        check_trainable(model, self.beside.parameters.values())
        check_shardable(model, self.name)
        self._before = list(model.named_parameters())
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self._offloads else OffloadPolicy()
        in_type = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        layers = MixedPrecisionPolicy() if self._dtype is None else in_type
        for unit in find_units(model):
            self._layer_bytes += self._shard(
                unit, mesh=mesh, reshard_after_forward=self._reshards, mp_policy=layers, offload_policy=offload
            )
        # Backward begins where forward ends, so parameters outside of all layers are not worth freeing in between.
        self._other_bytes = self._shard(model, mesh=mesh, reshard_after_forward=False, offload_policy=offload)
        assert isinstance(model, FSDPModule)
        self._root = model
        self._has_buffers = any(True for _ in model.buffers())
        self.sync_buffers(model)
        return model

    def _shard(self, unit: nn.Module, **how: Any) -> int:
        """Shard the parameters of a module that are still whole; returns the bytes that gathering them sends."""
        parameters = [item for item in unit.parameters() if not isinstance(item, DTensor)]
        for parameter in parameters:
            # As in DDP, all ranks start with rank 0's values. Layer by layer, so that the device need not hold them
            # all.
            parameter.data = parameter.data.to(self.device).contiguous()
            dist.broadcast(parameter.data, src=0)
        policy: MixedPrecisionPolicy = how.get("mp_policy", MixedPrecisionPolicy())
        sent = sum(
            item.numel() * (policy.param_dtype.itemsize if policy.param_dtype else item.element_size())
            for item in parameters
        )
        fully_shard(unit, **how)
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)  # the optimizer still refers to the old parameters
        return sent

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        _refuse_state(optimizer, self.name)

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        root = cast("nn.Module", self._root)
        sharded = dict(root.named_parameters())
        names = {id(parameter): name for name, parameter in self._before}
        named = [*self._before, *self.beside.parameters.items()]
        fresh = to_names(optimizer.state_dict(), names_in_groups(named, optimizer.param_groups))
        # The same optimizer object with other parameters, so that schedulers and other references stay valid.
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[id(item)]] if id(item) in names else item for item in group["params"]]
        optimizer.state.clear()
        _without_fused_sgd(optimizer)
        _without_mixed_kernels(optimizer)
        self._before = []
        if fresh["state"]:
            self.load_optimizer_state(root, optimizer, fresh)
        return optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        return self._without_reduction()

    @contextlib.contextmanager
    def _without_reduction(self) -> Iterator[None]:
        assert self._root is not None
        self._held += 1
        self._expect_reduction(False)
        try:
            yield
        finally:
            self._expect_reduction(True)

    def _expect_reduction(self, expected: bool) -> None:
        assert self._root is not None
        self._root.set_requires_gradient_sync(expected)
        self._root.set_is_last_backward(expected)
        if not self._reshards:
            self._root.set_reshard_after_backward(expected)

    def why_not_captured(self) -> str | None:
        if self._offloads:
            return "parallel.offload_optimizer updates on the host"
        if self.world_size > 1 and not on_nccl(self.device):
            return "the ranks meet by gloo, which works on the host; CUDA graphs need nccl (parallel.backend)"
        return None

    def after_step(self, model: nn.Module, step: int) -> bool:
        self._passes, self._held = self._held + 1, 0
        if self._has_buffers and self.world_size > 1:
            self.sync_buffers(model)
            return True
        return False

    def after_evaluation(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def own_gradients(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        return [own_part(item.grad) for item in parameters if item.grad is not None]

    def norm_over_ranks(
        self, parameters: list[nn.Parameter], gradients: list[torch.Tensor], norm: torch.Tensor
    ) -> torch.Tensor:
        whole = [part for item, part in zip(parameters, gradients, strict=True) if not isinstance(item, DTensor)]
        total = norm.to(self.device, torch.float64).square()
        if whole and self.rank:  # all ranks hold these, so they are counted only once
            divided = [part for item, part in zip(parameters, gradients) if isinstance(item, DTensor)]
            total = nn.utils.get_total_norm(divided).to(self.device, torch.float64).square()
        dist.all_reduce(total)
        return total.sqrt().to(norm.device, norm.dtype)

    def sum_over_ranks(self, value: torch.Tensor) -> None:
        dist.all_reduce(value)

    def sync_buffers(self, model: nn.Module) -> None:
        send_values([*model.buffers(), *self.beside.buffers_on(self.device)])

    def load_model_state(self, model: nn.Module, saved: dict[str, Any]) -> None:
        own = model.state_dict()
        model.load_state_dict(
            {
                name: shard_of(value, own[name]) if isinstance(own.get(name), DTensor) else loaded(value)
                for name, value in saved.items()
            }
        )

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        groups = optimizer.param_groups
        numbered = to_numbers(saved, names_in_groups(self.named_parameters(model), groups))
        parameters = [parameter for group in groups for parameter in group["params"]]
        state = {
            number: {key: _divided(key, value, parameters[number]) for key, value in values.items()}
            for number, values in numbered["state"].items()
        }
        optimizer.load_state_dict({"state": state, "param_groups": loaded(numbered["param_groups"])})

    def explain(self, error: RuntimeError) -> Exception:
        if "mixed torch.Tensor and DTensor" in str(error):
            return ModelError(
                f"a parameter was used while it is divided among the ranks: under {self.name} call the model, and its "
                "layers as layer(x), instead of using their parts or weights from outside; or use zero1"
            )
        return error

    def communicated_bytes(self, model: nn.Module) -> int | None:
        if self.world_size == 1:
            return 0
        gatherings = self._layer_bytes + self._other_bytes
        if self._reshards:
            gatherings = self._passes * (2 * self._layer_bytes + self._other_bytes)
        return gatherings + gradient_bytes(model)


def _refuse_state(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    if holds_state(optimizer):
        raise StateError(
            f"the optimizer has taken steps already, and strategy {strategy} divides an optimizer before its first; "
            "pass a new one (to continue a run, resume it: the checkpoint holds the optimizer's state)"
        )


def _without_fused_sgd(optimizer: torch.optim.Optimizer) -> None:
    """Turn off fused SGD, which torch cannot shard (unlike fused Adam); foreach uses a few kernels per step instead."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in [*optimizer.param_groups, optimizer.defaults]:
        if group.get("fused"):
            group["fused"], group["foreach"] = False, True
            refuse_found_inf(optimizer)


def _without_mixed_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Update groups with both sharded and whole parameters one by one: torch has no kernel for a mixture."""
    for group in optimizer.param_groups:
        if len({isinstance(item, DTensor) for item in group["params"]}) == 2:
            for name in ("foreach", "fused"):
                if name in group:
                    group[name] = False
            refuse_found_inf(optimizer)


def _divided(key: str, value: Any, parameter: nn.Parameter) -> Any:
    """This rank's part of one entry of a parameter's state."""
    if not isinstance(value, (torch.Tensor, StoredTensor)) or not value.shape or not isinstance(parameter, DTensor):
        return loaded(value)
    if value.shape != parameter.shape:
        raise ValueError(f"its {key} has shape {tuple(value.shape)}, which cannot be divided as the parameter is")
    return shard_of(value, parameter)


def _names_by_parameter(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> dict[torch.Tensor, str]:
    return {
        parameter: name
        for group, its_names in zip(optimizer.param_groups, names, strict=True)
        for parameter, name in zip(group["params"], its_names, strict=True)
    }
