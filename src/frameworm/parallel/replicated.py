"""The whole model on every device: `ddp` (one process per device) and `dp` (one process, many GPUs)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from frameworm.config.schema import ParallelConfig
from frameworm.errors import DeviceError, EnvironmentSetupError, ModelError
from frameworm.parallel.beside import Beside, BesideGradients, send_values
from frameworm.parallel.compression.control import CompressionControl, why_not_captured
from frameworm.parallel.compression.plain import EarlyShares, gradient_bytes, mean_of_gradients
from frameworm.parallel.replicas import check_replicas
from frameworm.parallel.strategy import Hook, Strategy
from frameworm.records.observations import Compression
from frameworm.torch_private.distributed import backend_name, end_replica, set_timing_rate

_MANY = 5
_LITTLE = 0.25  # fraction of the gradients' bytes
_NEVER = 2**30


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MANY]) + (f" and {len(names) - _MANY} more" if len(names) > _MANY else "")


class DDPStrategy(Strategy):
    """DDP: gradients are averaged over the ranks during backward."""

    name = "ddp"
    settling_steps = 12  # DDP rebuilds its buckets after the first step, and times the first ten

    def __init__(self, device: torch.device, rank: int, world_size: int, settings: ParallelConfig) -> None:
        super().__init__(device, rank, world_size)
        if not dist.is_initialized():
            raise EnvironmentSetupError(
                f"strategy {self.name} needs a process group: start with `frameworm train --distributed` or torchrun, "
                "or call setup_ddp(rank, world_size) first"
            )
        self._settings = settings
        self._wrapped: DistributedDataParallel | None = None
        self._hook: Hook | None = None
        self._beside_gradients = BesideGradients(self.sum_over_ranks, world_size, asks=settings.find_unused_parameters)
        self._compression: CompressionControl | None = None
        if settings.compression != "off" and world_size > 1:
            self._compression = CompressionControl(settings, device, rank, world_size)
        self.acts_after_steps = self._compression is not None or settings.check_replicas is not None

    def place_beside(self, beside: Beside) -> None:
        super().place_beside(beside)
        send_values([*beside.replicas(self.device).values(), *beside.buffers_on(self.device)])

    def place(self, model: nn.Module) -> nn.Module:
        model = super().place(model)
        wrapped = self._wrap(model)
        if self._compression is not None:
            self._compression.begin(model)
        return wrapped

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the currently trainable parameters in DDP; return the model itself if there are none."""
        settings = self._settings
        if not any(item.requires_grad for item in model.parameters()):
            send_values([*model.parameters(), *model.buffers()])
            return model
        with _bucket_sizes(settings) as sizes:
            self._wrapped = DistributedDataParallel(
                model,
                device_ids=[self.device.index] if self.device.type == "cuda" else None,
                find_unused_parameters=settings.find_unused_parameters,
                static_graph=settings.static_graph is True,
                gradient_as_bucket_view=settings.gradient_as_bucket_view,
                **sizes,
            )
        # Occasionally DDP times a step with its own events, which must not be captured in a CUDA graph.
        set_timing_rate(self._wrapped, _NEVER)
        return self._wrapped

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        """Wrap the model again, because DDP only knows the parameters it started with."""
        self._beside_gradients.ask_again()
        if self._wrapped is not None:
            end_replica(self._wrapped)
            self._wrapped = None
        wrapped = self._wrap(model)
        self._register_hook()
        return wrapped

    def average_beside(self, parameters: list[nn.Parameter]) -> None:
        if self.world_size > 1:
            self._beside_gradients.average(parameters, self.device)
            send_values(self.beside.buffers_on(self.device))

    def scale_losses_by(self, scale: Callable[[], Any]) -> None:
        if self._compression is not None:
            self._compression.scale = scale

    def wrap_hook(self, wrap: Callable[[Hook], Hook]) -> bool:
        if self.world_size == 1:
            return False
        self._hook = wrap(mean_of_gradients if self._compression is None else self._compression.hook)
        self._register_hook()
        return True

    def _register_hook(self) -> None:
        wrapped = self._wrapped
        if self._hook is None or wrapped is None:
            return
        early = EarlyShares(wrapped) if self._compression is None else self._compression.hook.early_shares(wrapped)
        wrapped.register_comm_hook(early, self._hook)

    def why_not_captured(self) -> str | None:
        if self._settings.find_unused_parameters:
            return "parallel.find_unused_parameters has DDP ask the device in every step which parameters were used"
        if self.world_size > 1 and not on_nccl(self.device):
            return "the ranks meet by gloo, which works on the host; CUDA graphs need nccl (parallel.backend)"
        return None if self._compression is None else why_not_captured(self._settings)

    @property
    def is_settled(self) -> bool:
        return self._compression is None or self._compression.is_settled

    def freeze(self) -> None:
        if self._compression is not None:
            self._compression.freeze()

    def after_step(self, model: nn.Module, step: int) -> bool:
        met = self._compression is not None and self._compression.after_step()
        every = self._settings.check_replicas
        if every is not None and step % every == 0:
            check_replicas(model, step, beside=self.beside.replicas(self.device))
            met = True
        return met

    def rank_state(self) -> dict[str, Any] | None:
        return None if self._compression is None else self._compression.state_dict()

    def load_rank_state(self, state: dict[str, Any] | None, saved_world_size: int) -> list[str]:
        if self._compression is None:
            return ["what compression still owed was dropped: compression is off now"] if state is not None else []
        return self._compression.load_state_dict(state, saved_world_size)

    def describe_compression(self) -> Compression | None:
        return None if self._compression is None else self._compression.describe()

    def close(self) -> None:
        self._wrapped = None  # releases its gradient buckets
        if self._compression is not None:
            self._compression.close()

    def no_sync(self) -> AbstractContextManager[None]:
        if self._wrapped is None:
            return contextlib.nullcontext()
        return cast("AbstractContextManager[None]", self._wrapped.no_sync())

    @property
    def hides_little(self) -> bool:
        if self._wrapped is None or self._compression is not None or self._settings.static_graph is True:
            return False
        if self._settings.find_unused_parameters:
            return False  # the whole of the message must be sent, so every parameter needs a gradient
        trained = [item for item in self._wrapped.module.parameters() if item.requires_grad]
        sizes = [item.numel() * item.element_size() for item in trained]
        most = self._settings.bucket_cap_mb * 2**20
        # As DDP fills its buckets: from the last parameters to the first. Only the last bucket cannot be sent early.
        early, filling, cap = 0, 0, min(self._settings.first_bucket_mb * 2**20, most)
        for size in reversed(sizes):
            if filling >= cap:
                early, filling, cap = early + filling, 0, most
            filling += size
        return bool(early <= _LITTLE * sum(sizes))

    @contextlib.contextmanager
    def unsent(self) -> Iterator[None]:
        with self.no_sync():
            if self._wrapped is not None:
                # DDP sends buffers in the first forward pass after it has sent gradients, which it does not do here.
                self._wrapped.require_forward_param_sync = True
            yield

    def sum_over_ranks(self, value: torch.Tensor) -> None:
        dist.all_reduce(value)

    def sync_buffers(self, model: nn.Module) -> None:
        send_values([*model.buffers(), *self.beside.buffers_on(self.device)])

    def explain(self, error: RuntimeError) -> Exception:
        text = str(error)
        if "Expected to have finished reduction in the prior iteration" in text:
            return ModelError(
                "a step did not use all parameters of the model, so their gradients were never synchronised; set "
                "parallel.find_unused_parameters=true (or find_unused_parameters=True), or remove the unused ones"
            )
        if "marked as ready twice" in text or "Expected to mark a variable ready only once" in text:
            return ModelError(
                "a parameter received its gradient twice in one backward pass (a module called repeatedly under "
                "reentrant checkpointing?); use non-reentrant checkpointing or set parallel.static_graph=true"
            )
        return error

    def check_gradients(self, model: nn.Module) -> None:
        if self._settings.find_unused_parameters or self._settings.static_graph is True:
            return
        unused = [name for name, item in model.named_parameters() if item.requires_grad and item.grad is None]
        if unused:
            raise ModelError(
                f"the first step did not use these parameters: {_some(unused)}; set "
                "parallel.find_unused_parameters=true (or find_unused_parameters=True) to train the model as it is"
            )

    def communicated_bytes(self, model: nn.Module) -> int | None:
        if self.world_size == 1:
            return 0
        sent = None if self._compression is None else self._compression.bytes_per_step
        return gradient_bytes(model) if sent is None else sent


def on_nccl(device: torch.device) -> bool:
    """Whether the default group communicates on the device itself."""
    return device.type == "cuda" and backend_name(dist.group.WORLD, device) == "nccl"


@contextlib.contextmanager
def _bucket_sizes(settings: ParallelConfig) -> Iterator[dict[str, Any]]:
    """DDP's arguments for its bucket sizes.

    torch uses a smaller first bucket only if no size is given, and accepts a list of sizes from 2.13 on.
    """
    first, others = settings.first_bucket_mb, settings.bucket_cap_mb
    if first >= others:
        yield {"bucket_cap_mb": others}
    elif "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters:
        yield {"bucket_cap_mb_list": [first, others]}
    elif others == ParallelConfig.model_fields["bucket_cap_mb"].default:
        name = "_DEFAULT_FIRST_BUCKET_BYTES"
        usual = getattr(dist, name)
        setattr(dist, name, int(first * 2**20))
        try:
            yield {}
        finally:
            setattr(dist, name, usual)
    else:
        yield {"bucket_cap_mb": others}


class DataParallelStrategy(Strategy):
    """One process drives several GPUs; kept for older scripts. DDP is faster."""

    name = "dp"

    def why_not_captured(self) -> str | None:
        return "strategy dp runs the model in several threads, on several devices; ddp can be captured"

    def __init__(self, device: torch.device, device_ids: list[int] | None) -> None:
        super().__init__(device)
        available = torch.cuda.device_count()
        self._device_ids = list(range(available)) if device_ids is None else list(device_ids)
        missing = [index for index in self._device_ids if index >= available or index < 0]
        if device.type != "cuda" or not self._device_ids or missing:
            wanted = ", ".join(map(str, missing or self._device_ids)) or "any"
            raise DeviceError(
                f"data parallel asks for GPU {wanted}, but torch sees {available} here, numbered from 0"
                if available
                else "data parallel needs GPUs, and torch sees none here; use strategy single, or ddp for several "
                "CPU processes"
            )

    def place(self, model: nn.Module) -> nn.Module:
        model = super().place(model)
        return cast("nn.Module", DataParallel(model, device_ids=self._device_ids))
