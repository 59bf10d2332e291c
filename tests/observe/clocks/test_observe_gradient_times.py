"""When gradients are ready: in a few steps, in the last of several micro-batches, and not where hooks are blind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from frameworm.observe.clocks import gradient_times
from frameworm.observe.clocks.gradient_times import FIRST_STEP, LAST_STEP, GradientWatch, unseen_because, watched
from frameworm.observe.clocks.phases import BACKWARD, FORWARD

CPU = torch.device("cpu")


class _Slow(torch.autograd.Function):
    """20 ms of backward, by a clock that nothing else moves."""

    now_s = 100.0

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        _Slow.now_s += 0.02
        return gradients[0]


class Steps:
    """A model of two layers with 20 ms of backward between their gradients, and the marks of its steps."""

    def __init__(self, micro_batches: int = 1) -> None:
        self.first, self.second, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(1, 1)
        self.model = nn.ModuleList([self.first, self.second])
        self.marked: list[str] = []
        self._mark: Callable[[str], None] = self.marked.append
        self._micro_batches = micro_batches

    @contextlib.contextmanager
    def marking(self, mark: Callable[[str], None]) -> Iterator[None]:
        usual, self._mark = self._mark, mark
        try:
            yield
        finally:
            self._mark = usual

    def step(self) -> None:
        for _ in range(self._micro_batches):
            loss = self.second(_Slow.apply(self.first(torch.ones(5, 3)))).sum()
            self._mark(FORWARD)
            loss.backward()
            self._mark(BACKWARD)


def look(steps: Steps, watch: GradientWatch, count: int = LAST_STEP + 2) -> None:
    before = watched(watch, lambda number: None)
    for number in range(1, count + 1):
        before(number)
        steps.step()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_come_from_the_last_layer_to_the_first(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_times, "perf_counter", lambda: _Slow.now_s)
    steps = Steps(micro_batches)
    watch = GradientWatch(steps.model, CPU, steps.marking, steps.marked.append)
    look(steps, watch)
    found = watch.result()
    assert found.measured
    assert found.steps == LAST_STEP - FIRST_STEP
    assert [item.shape for item in found.gradients] == [(4, 3), (4,), (2, 4), (2,)]
    assert [item.size_bytes for item in found.gradients] == [48, 16, 32, 8]
    # In the last micro-batch, since the times count from the beginning of its own backward.
    assert [item.ready_s for item in found.gradients] == pytest.approx([0.02, 0.02, 0.0, 0.0])
    assert found.backward_s == pytest.approx(0.02)
    # The phases were told to whoever usually hears of them.
    assert steps.marked == [FORWARD, BACKWARD] * micro_batches * (LAST_STEP + 2)


def test_nothing_is_left_behind() -> None:
    steps = Steps()
    usual = steps._mark
    watch = GradientWatch(steps.model, CPU, steps.marking, steps.marked.append)
    look(steps, watch, FIRST_STEP + 1)
    assert steps.first.weight._post_accumulate_grad_hooks
    watch.stop()
    assert not steps.first.weight._post_accumulate_grad_hooks
    assert steps._mark == usual


def test_what_was_not_seen_is_said() -> None:
    steps = Steps()
    watch = GradientWatch(steps.model, CPU, steps.marking, steps.marked.append)
    look(steps, watch, 2)
    found = watch.result()
    assert not found.measured
    assert "no step" in (found.note or "")
    steps.model.append(steps.unused)
    watch = GradientWatch(steps.model, CPU, steps.marking, steps.marked.append)
    look(steps, watch)
    assert watch.result().note == "some parameters had no gradient"
    blind = GradientWatch(steps.model, CPU, unseen=unseen_because(True, 1, False))
    before = len
    assert watched(blind, before) is before  # type: ignore[comparison-overlap,arg-type]
    assert "CUDA graphs" in (blind.result().note or "")
    assert unseen_because(False, 2, False) == "not a run on one device"
    assert unseen_because(False, 1, False) is None
