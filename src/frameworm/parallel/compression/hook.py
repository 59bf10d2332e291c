"""The DDP hook: a bucket of gradients in, the future of its mean over the ranks out, few bytes in between."""

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
from frameworm.parallel.compression.plain import EarlyShares, first_of, share_of
from frameworm.parallel.compression.powersgd import PowerSGD
from frameworm.parallel.compression.quantize import Quantizer
from frameworm.parallel.compression.registry import make_codec
from frameworm.parallel.compression.residuals import Named, Residuals, Scale

log = logging.getLogger("frameworm")

OFF = "off"
CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
CODECS = ("int8", "int4", "topk")
WITH_FEEDBACK = (*CODECS, "powersgd")  # rounding to 16 bits loses too little to remember
METHODS = (OFF, *CASTS, *WITH_FEEDBACK)
COMPRESSIBLE = (torch.float32, torch.bfloat16, torch.float16)


class CompressionHook:
    """Forms the mean of the gradients over the ranks with few bytes; made once per DDP model, on all ranks together.

    Gradients in fp64 or complex numbers and sparse ones are sent as they are. DDP may give it `early_shares` as state.

    Args:
        method: One of off, fp16, bf16, int8, int4, topk, powersgd.
        model: For the names of its parameters; DDP's wrapper around it will do.
        group: The group DDP uses; None is the default one.
        ratio: Of the values that topk keeps.
        rank_of_powersgd: Columns of its matrices.
        rounding: nearest or stochastic, for int8 and int4.
        feedback: Whether what a step leaves out is sent with the next.
        seed: Of stochastic rounding and PowerSGD's first matrices; the same on all ranks.
        scale: The loss scale of the gradients that come, None without one.

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
        # DDP asks every hook for these two, as functions have them.
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
        self._layout: list[tuple[str, ...]] = []  # of the last whole step
        self._coming: list[tuple[str, ...]] = []  # of this step, so far
        self._saved_layout: list[tuple[str, ...]] | None = None  # a resumed run's first step is sent in this one
        self._held: list[tuple[Job, Tensor, list[Tensor]]] | None = None
        self._said = False
        self._first_at = 0.0
        self.ready_span_s = 0.0  # of the last step: from its first bucket to its last, by the host's clock
        self._method = OFF
        self.use(method)

    @property
    def method(self) -> str:
        """What is done now."""
        return self._method

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that left this rank since the last `take_sent_bytes`, by a ring's count for an all-reduce."""
        return self._wire.sent_bytes

    def take_sent_bytes(self) -> int:
        """The bytes so far; counting starts anew."""
        return self._wire.take_sent_bytes()

    def use(self, method: str) -> None:
        """Change the method between two steps, on all ranks at once.

        What was left out goes with the next step if the new method has error feedback, else it is forgotten: sent many
        steps later it would do harm.

        Raises:
            ConfigError: There is no such method.
        """
        if method not in METHODS:
            raise ConfigError(f"compression method {method!r} is not one of {', '.join(METHODS)}")
        if method != OFF and self._wire.world_size > 1:
            self._wire.open()
        if method in CODECS and method not in self._codecs:
            self._codecs[method] = make_codec(method, ratio=self._ratio, rounding=self._rounding)
        if method != self._method:
            self._scratch.clear()
            if method not in WITH_FEEDBACK:
                self._residuals.clear()
        self._method = method

    def early_shares(self, ddp: DistributedDataParallel) -> EarlyShares:
        """What makes `off` as fast as DDP without a hook: the state to register this hook with."""
        return EarlyShares(ddp, wanted=lambda: self._method == OFF)

    def reset(self, why: str) -> None:
        """Forget what was left out so far, and say so."""
        self._forget()
        log.info("compression starts anew: %s", why)

    def _forget(self) -> None:
        self._residuals.clear()
        self._power.clear()
        self._saved_layout = None

    def close(self) -> None:
        """End the thread and leave the group."""
        self._pipeline.close()
        if self._pipeline.error is None:
            self._wire.close()

    def state_dict(self) -> dict[str, Any]:
        """What this rank must remember; to be taken between steps."""
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
        """Go on with what `state_dict` of the same rank gave; the method stays as it is.

        Returns:
            What the user should know.
        """
        self._forget()
        if state["world_size"] != self._wire.world_size:
            self._step = state["step"]
            return [
                f"error feedback starts from nothing: {state['world_size']} processes wrote the checkpoint and "
                f"{self._wire.world_size} go on"
            ]
        self._step = state["step"]
        notes = self._power.load(state["powersgd"])
        if self._feedback and self._method in WITH_FEEDBACK:
            saved = state["residuals"]
            notes = self._residuals.load(saved["values"], saved["scale"]) + notes
        # DDP has not rearranged its buckets yet, as the run that saved had: blocks would be cut elsewhere.
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
                state.undo(bucket)  # the method has changed since
            result = self._accept(bucket, values, last)
        else:
            # What DDP does without a hook, to the last bit.
            result = first_of(self._wire.all_reduce_plain(share_of(state, bucket, self._wire.world_size)))
        if last:
            if self._held is not None:
                self._release(self._held)
            elif self._coming and not compressed:
                # Those before it wait for the last one.
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
        """Send the buckets of a whole step in the arrangement that was saved."""
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
        if not fits:  # the model or its buckets are others now
            layout = [self._named.names(parameters) for _, _, parameters in held]
        for position, names in enumerate(layout):
            parts = [place[name] for name in names]
            gathered = torch.cat(parts)
            stages = _scattered(self._stages(names, gathered), parts)
            self._pipeline.submit(stages, last=position == len(layout) - 1, device=gathered.device)
        for job, _, _ in held:  # after all of the above, which the last one brings to its end
            self._pipeline.start(job)

    def _stages(self, names: tuple[str, ...], values: Tensor) -> Stages:
        """What is to be done with a bucket; runs where the pipeline runs it."""
        number = len(self._coming)
        self._coming.append(names)
        scale, self._new_scale = self._new_scale, None
        draw = partial(self._draw, values.device, self._step, number) if self._rounding == "stochastic" else None
        return self._send(exchange.Parcel(number, values, names, draw=draw or _nothing), scale)

    def _send(self, parcel: exchange.Parcel, scale: tuple[Scale] | None) -> Stages:
        method, wire, scratch = self._method, self._wire, self._scratch
        if self._feedback and method in WITH_FEEDBACK:
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
        """Random numbers that depend on nothing but where they are used, so that a resumed run draws the same."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        return generator.manual_seed(mixed(self._seed, self._wire.rank, step, number, stage))


CompressionHook.__call__.__annotations__.clear()  # DDP compares annotations with classes, which postponed ones are not


def mixed(*numbers: int) -> int:
    """One number of 63 bits from several."""
    value = 0
    for number in numbers:
        value = ((value ^ number) + 0x9E3779B97F4A7C15) & (2**64 - 1)
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        value ^= value >> 27
    return value >> 1


def _nothing(stage: int) -> None:
    return None


def _as_it_is(values: Tensor) -> Stages:
    """Nothing is left to do with it."""
    yield from ()
    return values


def _scattered(stages: Stages, parts: list[Tensor]) -> Stages:
    """Put the result of a gathered bucket where its parts came from."""
    values = yield from stages
    for part, mean in zip(parts, values.split([part.numel() for part in parts])):
        part.copy_(mean)
    return values


def _ready(values: Tensor) -> Result:
    on_gpu = values.device.type == "cuda"
    done: Result = torch.futures.Future(devices=[values.device] if on_gpu else [])
    done.set_result(values)
    return done
