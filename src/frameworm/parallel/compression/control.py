"""Compression in a training run: one hook for DDP, the method it uses, and its part of the summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import ParallelConfig
from frameworm.parallel.compression.auto import MethodChoice
from frameworm.parallel.compression.hook import CompressionHook
from frameworm.parallel.compression.outlook import outlook_of
from frameworm.parallel.compression.plain import gradient_bytes
from frameworm.records.observations import Compression


def why_not_captured(settings: ParallelConfig) -> str | None:
    """Why steps with this compression cannot be captured as CUDA graphs; None if they can."""
    if settings.rounding == "stochastic" and settings.compression in ("int8", "int4", "auto"):
        return "parallel.rounding: stochastic draws its numbers from the number of the step; use nearest"
    return None


class CompressionControl:
    """Owns the hook of one training run.

    Args:
        settings: The section `parallel`, with compression not off.
        device: The device of the gradients.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(self, settings: ParallelConfig, device: torch.device, rank: int, world_size: int) -> None:
        self.scale: Callable[[], Any] | None = None
        self._settings = settings
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._hook: CompressionHook | None = None
        self._choice: MethodChoice | None = None
        self._choice_is_over = False
        self._steps = 0
        self._sent_bytes = 0
        self._plain_bytes = 0

    @property
    def hook(self) -> CompressionHook:
        """The communication hook for DDP."""
        assert self._hook is not None
        return self._hook

    @property
    def bytes_per_step(self) -> int | None:
        """Bytes that this rank sent in the last step; None before the first."""
        return self._sent_bytes if self._steps else None

    def begin(self, model: nn.Module) -> None:
        """Create the hook of a model; all ranks call this at the same time."""
        settings = self._settings
        # Counted as the hook counts an all-reduce: what a ring sends.
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
                lambda: outlook_of(
                    model, self._device, hook.ready_span_s, settings.compression_ratio, settings.powersgd_rank
                ),
                allow_approximate=settings.allow_approximate,
            )

    @property
    def is_settled(self) -> bool:
        """Whether the method will not change for a while."""
        return self._choice is None or self._choice.chosen is not None

    def freeze(self) -> None:
        """Never change the method again."""
        self._choice_is_over = True

    def after_step(self) -> bool:
        """Count the bytes; `auto` may change the method. Returns whether the ranks communicated."""
        self._steps += 1
        # A replayed graph sends what the last real step sent.
        self._sent_bytes = self.hook.take_sent_bytes() or self._sent_bytes
        return self._choice is not None and not self._choice_is_over and self._choice.after_step()

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank must save."""
        return {"method": self.hook.method, "hook": self.hook.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None, saved_world_size: int) -> list[str]:
        """Restore a state from `state_dict`; returns notes for the user."""
        if state is None:
            return ["the checkpoint was written without compression: error feedback starts from nothing"]
        if saved_world_size != self._world_size:
            why = f"{saved_world_size} processes wrote the checkpoint and {self._world_size} resume it"
            self.hook.reset(why)
            return [f"error feedback starts from nothing: {why}"]
        if self._choice is not None and self._choice.adopt(state["method"]):
            self.hook.use(state["method"])
        return self.hook.load_state_dict(state["hook"])

    def describe(self) -> Compression:
        """The compression part of the summary."""
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
        """Stop the hook's thread."""
        if self._hook is not None:
            self._hook.close()

    def _loss_scale(self) -> Any:
        return None if self.scale is None else self.scale()
