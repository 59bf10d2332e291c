"""The DDP communication hook: takes a bucket of gradients, returns the future of its mean, sends few bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.errors import ConfigError
from frameworm.parallel.compression import exchange
from frameworm.parallel.compression.codecs import Codec
from frameworm.parallel.compression.pipeline import Job, Pipeline, Result, Stages, Wire
from frameworm.parallel.compression.plain import EarlyShares, first_of, weighted_part
from frameworm.parallel.compression.powersgd import PowerSGD
from frameworm.parallel.compression.quantize import Quantizer
from frameworm.parallel.compression.registry import CODECS, make_codec, registered_codecs
from frameworm.parallel.compression.residuals import Named, Residuals, Scale

log = logging.getLogger("frameworm")

OFF = "off"
CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
WITH_FEEDBACK = (*CODECS, "powersgd")  # the error of rounding to 16 bits is too small to keep
METHODS = (OFF, *CASTS, *WITH_FEEDBACK)
COMPRESSIBLE = (torch.float32, torch.bfloat16, torch.float16)


class CompressionHook:
    """Computes the mean of gradients over the ranks with few bytes; create one per DDP model, on all ranks together.

    Gradients that are sparse, complex or fp64 are sent uncompressed. It may be registered with `early_shares` as state.

    Args:
        method: One of off, fp16, bf16, int8, int4, topk, powersgd.
        model: The model, or DDP's wrapper around it; gives the parameter names.
        group: The group that DDP uses; None: the default one.
        ratio: Fraction of the values that topk keeps.
        rank_of_powersgd: Columns of powersgd's matrices.
        rounding: nearest or stochastic, for int8 and int4.
        feedback: Whether the error of a step is added to the next.
        seed: Seed of stochastic rounding and PowerSGD's first matrices; the same on all ranks.
        scale: Returns the loss scale of the coming gradients, or None without one.

    Raises:
        ConfigError: There is no such method.
    """

    def __init__(
        self,
        method: str,
        *,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        ratio: float = 0.01,
        rank_of_powersgd: int = 1,
        rounding: str = "nearest",
        feedback: bool = True,
        seed: int = 0,
        scale: Callable[[], Scale] | None = None,
    ) -> None:
        # DDP reads these two attributes of every hook, as functions have them.
        self.__name__ = self.__qualname__ = "frameworm_compression"
        self._ratio = ratio
        self._rounding = rounding
        self._feedback = feedback
        self._seed = seed
        self._read_scale = scale
        self._named = Named(model)
        self._residuals = Residuals(self._named)
        self._power = PowerSGD(self._named, rank_of_powersgd, seed)
        self._codecs: dict[str, Codec] = {}
        self._scratch = exchange.Scratch()
        self._wire = Wire(group)
        self._pipeline = Pipeline(self._wire)
        self._generators: dict[torch.device, torch.Generator] = {}
        self._step = 0
        self._new_scale: tuple[Scale] | None = None  # to be applied before the first bucket of this step
        self._layout: list[tuple[str, ...]] = []  # of the last complete step
        self._coming: list[tuple[str, ...]] = []  # of this step so far
        self._saved_layout: list[tuple[str, ...]] | None = None  # layout for the first step of a resumed run
        self._held: list[tuple[Job, Tensor, list[Tensor]]] | None = None
        self._said = False
        self._first_at = 0.0
        self.ready_span_s = 0.0  # of the last step: from its first bucket to its last, on the host's clock
        self._method = OFF
        self.use(method)

    @property
    def method(self) -> str:
        """The current method."""
        return self._method

    @property
    def sent_bytes(self) -> int:
        """Payload bytes sent by this rank since the last `take_sent_bytes`; an all-reduce counts as a ring."""
        return self._wire.sent_bytes

    def take_sent_bytes(self) -> int:
        """Return the bytes sent so far and reset the count."""
        return self._wire.take_sent_bytes()

    def use(self, method: str) -> None:
        """Change the method between two steps, on all ranks at once.

        Residuals are sent with the next step if the new method has error feedback; otherwise they are dropped, because
        sending them many steps later would do harm.

        Args:
            method: The new method.

        Raises:
            ConfigError: There is no such method.
        """
        known = (*METHODS, *registered_codecs())
        if method not in known:
            raise ConfigError(f"compression method {method!r} is not one of {', '.join(known)}")
        if method != OFF and self._wire.world_size > 1:
            self._wire.open()
        if method in (*CODECS, *registered_codecs()) and method not in self._codecs:
            self._codecs[method] = make_codec(method, ratio=self._ratio, rounding=self._rounding)
        if method != self._method:
            self._scratch.clear()
            if not _keeps_error(method):
                self._residuals.clear()
        self._method = method

    def early_shares(self, ddp: DistributedDataParallel) -> EarlyShares:
        """State to register this hook with; it makes `off` as fast as DDP without a hook."""
        return EarlyShares(ddp, wanted=lambda: self._method == OFF)

    def reset(self, why: str) -> None:
        """Drop all residuals and log why."""
        self._forget()
        log.info("error feedback starts from nothing: %s", why)

    def _forget(self) -> None:
        self._residuals.clear()
        self._power.clear()
        self._saved_layout = None

    def close(self) -> None:
        """Stop the thread and leave the group."""
        self._pipeline.close()
        if self._pipeline.error is None:
            self._wire.close()

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank must save, taken between steps."""
        return {
            "version": 1,
            "method": self._method,
            "world_size": self._wire.world_size,
            "step": self._step,
            "layout": [list(names) for names in self._saved_layout or self._layout],
            "residuals": self._residuals.state_dict(),
            "powersgd": self._power.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore a state from `state_dict` of the same rank; the method is not changed.

        Args:
            state: The saved state.

        Returns:
            Notes for the user.
        """
        self._forget()
        if state["world_size"] != self._wire.world_size:
            self._step = state["step"]
            return [
                f"error feedback starts from nothing: {state['world_size']} processes wrote the checkpoint and "
                f"{self._wire.world_size} resume it"
            ]
        self._step = state["step"]
        notes = self._power.load(state["powersgd"])
        if self._feedback and _keeps_error(self._method):
            saved = state["residuals"]
            notes = self._residuals.load(saved["values"], saved["scale"]) + notes
        # DDP has not rearranged its buckets yet, unlike in the saved run: blocks would be cut at other places.
        self._saved_layout = [tuple(names) for names in state["layout"]] or None
        return notes

    def __call__(self, state: Any, bucket: Any) -> Result:
        values: Tensor = bucket.buffer()
        if self._wire.world_size == 1:
            return _ready(values)
        if bucket.index() == 0:
            self._begin_step()
        last: bool = bucket.is_last()
        if last:
            self.ready_span_s = perf_counter() - self._first_at
        compressed = self._method != OFF and self._compressible(values)
        if compressed:
            if isinstance(state, EarlyShares):
                state.undo(bucket)  # the method has changed since the gradients were scaled
            result = self._accept(bucket, values, last)
        else:
            # Bitwise the same as DDP without a hook.
            result = first_of(self._wire.all_reduce_plain(weighted_part(state, bucket, self._wire.world_size)))
        if last:
            if self._held is not None:
                self._release(self._held)
            elif self._coming and not compressed:
                # Earlier buckets wait for the last one.
                self._pipeline.submit(_as_it_is(values), last=True, device=values.device)
            self._layout = self._coming
            self._held = self._saved_layout = None
        return result

    def _begin_step(self) -> None:
        self._step += 1
        self._first_at = perf_counter()
        scale = None if self._read_scale is None else self._read_scale()
        self._new_scale = (scale.detach().clone() if isinstance(scale, Tensor) else scale,)
        self._coming = []
        self._held = None if self._saved_layout is None else []

    def _compressible(self, values: Tensor) -> bool:
        if not values.is_sparse and values.dtype in COMPRESSIBLE:
            return True
        if not self._said:
            self._said = True
            what = (
                "sparse gradients" if values.is_sparse else f"gradients in {str(values.dtype).removeprefix('torch.')}"
            )
            log.info("compression %s: %s are sent as they are", self._method, what)
        return False

    def _accept(self, bucket: Any, values: Tensor, last: bool) -> Result:
        if self._held is None:
            names = self._named.names(bucket.parameters())
            return self._pipeline.submit(self._stages(names, values), last=last, device=values.device)
        job, result = self._pipeline.prepare(_as_it_is(values), last=True, device=values.device)
        self._held.append((job, values, bucket.parameters()))
        return result

    def _release(self, held: list[tuple[Job, Tensor, list[Tensor]]]) -> None:
        """Send the buckets of a whole step in the saved layout."""
        if not held:
            return
        place: dict[str, Tensor] = {}
        for _, values, parameters in held:
            parts = values.split([item.numel() for item in parameters])
            place.update(zip(self._named.names(parameters), parts))
        layout = self._saved_layout or []
        kinds = [{(place[name].dtype, place[name].device) for name in names if name in place} for names in layout]
        fits = sorted(place) == sorted(name for names in layout for name in names) and all(
            len(kind) == 1 for kind in kinds
        )
        if not fits:  # the model or its buckets have changed
            layout = [self._named.names(parameters) for _, _, parameters in held]
        for position, names in enumerate(layout):
            parts = [place[name] for name in names]
            gathered = torch.cat(parts)
            stages = _scattered(self._stages(names, gathered), parts)
            self._pipeline.submit(stages, last=position == len(layout) - 1, device=gathered.device)
        for job, _, _ in held:  # after all of the above, which the last one completes
            self._pipeline.start(job)

    def _stages(self, names: tuple[str, ...], values: Tensor) -> Stages:
        """The stages of a bucket, for the pipeline to run."""
        number = len(self._coming)
        self._coming.append(names)
        scale, self._new_scale = self._new_scale, None
        draw = partial(self._draw, values.device, self._step, number) if self._rounding == "stochastic" else None
        return self._send(exchange.Parcel(number, values, names, draw=draw or _nothing), scale)

    def _send(self, parcel: exchange.Parcel, scale: tuple[Scale] | None) -> Stages:
        method, wire, scratch = self._method, self._wire, self._scratch
        if self._feedback and _keeps_error(method):
            if scale is not None:
                self._residuals.rescale(scale[0])
            parcel.residual = self._residuals.of(parcel.names, parcel.values.device)
        if method in CASTS:
            return (yield from exchange.cast(parcel, wire, scratch, CASTS[method]))
        if method == "powersgd":
            return (yield from self._power.stages(parcel, wire, scratch))
        codec = self._codecs[method]
        if isinstance(codec, Quantizer):
            return (yield from exchange.quantized(parcel, wire, scratch, codec))
        return (yield from exchange.sparse(parcel, wire, scratch, codec))

    def _draw(self, device: torch.device, step: int, number: int, stage: int) -> torch.Generator:
        """A generator seeded only by where it is used, so that a resumed run draws the same numbers."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        return generator.manual_seed(mixed(self._seed, self._wire.rank, step, number, stage))


CompressionHook.__call__.__annotations__.clear()  # DDP compares annotations with classes; postponed ones are strings


def mixed(*numbers: int) -> int:
    """Mix several numbers into one of 63 bits."""
    value = 0
    for number in numbers:
        value = ((value ^ number) + 0x9E3779B97F4A7C15) & (2**64 - 1)
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        value ^= value >> 27
    return value >> 1


def _keeps_error(method: str) -> bool:
    return method in WITH_FEEDBACK or method in registered_codecs()


def _nothing(stage: int) -> None:
    return None


def _as_it_is(values: Tensor) -> Stages:
    """Stages of a bucket that needs no more work."""
    yield from ()
    return values


def _scattered(stages: Stages, parts: list[Tensor]) -> Stages:
    """Copy the result of a gathered bucket back to its parts."""
    values = yield from stages
    for part, mean in zip(parts, values.split([part.numel() for part in parts])):
        part.copy_(mean)
    return values


def _ready(values: Tensor) -> Result:
    on_gpu = values.device.type == "cuda"
    done: Result = torch.futures.Future(devices=[values.device] if on_gpu else [])
    done.set_result(values)
    return done
