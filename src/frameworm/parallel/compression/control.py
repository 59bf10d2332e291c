"""Compression in a training: one hook for DDP, the method it uses, and what the summary says about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import ParallelConfig
from frameworm.parallel.compression.auto import MethodChoice
from frameworm.parallel.compression.hook import CompressionHook
from frameworm.parallel.compression.outlook import look_around
from frameworm.parallel.compression.plain import gradient_bytes
from frameworm.records.observations import Compression


class CompressionControl:
    """Owns the hook of one training.

    Args:
        settings: Of the `parallel` section; compression is not off.
        device: Where the gradients are.
    """

    def __init__(self, settings: ParallelConfig, device: torch.device, rank: int, world_size: int) -> None:
        self.scale: Callable[[], Any] | None = None
        self._settings = settings
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._hook: CompressionHook | None = None
        self._choice: MethodChoice | None = None
        self._steps = 0
        self._sent_bytes = 0
        self._plain_bytes = 0

    @property
    def hook(self) -> CompressionHook:
        """What DDP calls with each bucket."""
        assert self._hook is not None
        return self._hook

    @property
    def bytes_per_step(self) -> int | None:
        """What this rank handed to the network in the last step; None before the first."""
        return self._sent_bytes if self._steps else None

    def begin(self, model: nn.Module) -> None:
        """Make the hook of a model; all ranks do so at the same time."""
        settings = self._settings
        # As the hook counts an all-reduce: by what a ring sends.
        self._plain_bytes = 2 * (self._world_size - 1) * gradient_bytes(model) // self._world_size
        chosen = settings.compression
        self._hook = hook = CompressionHook(
            "off" if chosen == "auto" else chosen,
            model=model,
            ratio=settings.compression_ratio,
            rank_of_powersgd=settings.powersgd_rank,
            rounding=settings.rounding,
            feedback=settings.error_feedback,
            scale=self._loss_scale,
        )
        if chosen == "auto":
            self._choice = MethodChoice(
                hook,
                self._device,
                lambda: look_around(
                    model, self._device, hook.ready_span_s, settings.compression_ratio, settings.powersgd_rank
                ),
                allow_approximate=settings.allow_approximate,
            )

    def after_step(self) -> bool:
        """Count the bytes; `auto` may change the method. Returns whether the ranks met."""
        self._steps += 1
        self._sent_bytes = self.hook.take_sent_bytes()
        return self._choice is not None and self._choice.after_step()

    def state_dict(self) -> dict[str, Any]:
        """What this rank must remember."""
        return {"method": self.hook.method, "hook": self.hook.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None, saved_world_size: int) -> list[str]:
        """Go on with what `state_dict` gave; returns notes."""
        if state is None:
            return ["the checkpoint was written without compression: error feedback starts from nothing"]
        if saved_world_size != self._world_size:
            why = f"{saved_world_size} processes wrote the checkpoint and {self._world_size} go on"
            self.hook.reset(why)
            return [f"error feedback starts from nothing: {why}"]
        if self._choice is not None and self._choice.adopt(state["method"]):
            self.hook.use(state["method"])
        return self.hook.load_state_dict(state["hook"])

    def describe(self) -> Compression:
        """For the summary."""
        choice = self._choice
        return Compression(
            method=self.hook.method,
            chosen_by="user" if choice is None else "auto",
            bytes_per_step=self.bytes_per_step,
            plain_bytes_per_step=self._plain_bytes,
            candidates=[] if choice is None else choice.candidates(),
            bandwidth_gbps=None if choice is None else choice.bandwidth_gbps,
            latency_us=None if choice is None else choice.latency_us,
        )

    def close(self) -> None:
        """End the hook's thread."""
        if self._hook is not None:
            self._hook.close()

    def _loss_scale(self) -> Any:
        return None if self.scale is None else self.scale()
