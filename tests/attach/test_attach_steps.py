"""Loops of many kinds, watched from within: what ends up in which step and in which phase."""

from __future__ import annotations

import builtins
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from frameworm.attach.hooks import install
from frameworm.attach.watch import Watch, leading_size
from frameworm.records.schema import PHASES, StepRecord

pytestmark = pytest.mark.timing

DELAY_S = 0.03
TOLERANCE_S = 0.003  # a tenth of the delay


class Observed:
    """A watch with its hooks, and the steps it has seen."""

    def __init__(self, **options: Any) -> None:
        self.steps: list[StepRecord] = []
        self.watch = Watch(self.steps.append, **options)
        self._patches = install(self.watch)

    def end(self) -> list[StepRecord]:
        self.watch.finish()
        self.remove()
        return self.steps

    def remove(self) -> None:
        self.watch.stop()
        self._patches.remove()


@pytest.fixture
def observe() -> Iterator[Callable[..., Observed]]:
    made: list[Observed] = []

    def make(**options: Any) -> Observed:
        made.append(Observed(**options))
        return made[-1]

    yield make
    for item in made:
        item.remove()


class Sleepy(nn.Module):
    """Sleeps in forward and backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.forward_s = 0.0
        self.backward_s = 0.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        output = self.layer(batch)
        if output.requires_grad:
            output.register_hook(lambda _: time.sleep(self.backward_s))
        return output


class SleepyData(Dataset[torch.Tensor]):
    def __init__(self, delays_s: list[float]) -> None:
        self._delays_s = delays_s
        self.slept_s = 0.0  # as measured

    def __len__(self) -> int:
        return len(self._delays_s)

    def __getitem__(self, index: int) -> torch.Tensor:
        before = time.perf_counter()
        time.sleep(self._delays_s[index])
        self.slept_s += time.perf_counter() - before
        return torch.ones(4)


class SleepySGD(torch.optim.SGD):
    delay_s = 0.0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        time.sleep(self.delay_s)
        return super().step(closure)


def assert_adds_up(steps: list[StepRecord]) -> None:
    for step in steps:
        assert set(step.phases) <= set(PHASES)
        assert sum(step.phases.values()) == pytest.approx(step.step_s, rel=0.02, abs=1e-4)


@pytest.mark.parametrize("where", ["data_wait", "forward", "backward", "optimizer", "checkpoint"])
def test_delay_is_found_in_its_phase(where: str, observe: Callable[..., Observed], tmp_path: Path) -> None:
    count = 16
    slow = [DELAY_S if index % 2 else 0.0 for index in range(count)]
    model = Sleepy()
    optimizer = SleepySGD(model.parameters(), lr=0.1)
    loader = DataLoader(SleepyData(slow if where == "data_wait" else [0.0] * count), batch_size=1)
    if where == "checkpoint":
        original = torch.save

        def save(*args: Any) -> None:
            time.sleep(DELAY_S)

        torch.save = save  # type: ignore[assignment]
    try:
        observed = observe()
        optimizer = SleepySGD(model.parameters(), lr=0.1)
        for index, batch in enumerate(loader):
            model.forward_s = slow[index] if where == "forward" else 0.0
            model.backward_s = slow[index] if where == "backward" else 0.0
            SleepySGD.delay_s = slow[index] if where == "optimizer" else 0.0
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if where == "checkpoint" and slow[index]:
                torch.save({"a": 1}, tmp_path / "state.pt")
        steps = observed.end()
    finally:
        if where == "checkpoint":
            torch.save = original
    assert len(steps) == count
    assert_adds_up(steps)
    with_delay = median(step.phases.get(where, 0.0) for step in steps[1::2])
    without = median(step.phases.get(where, 0.0) for step in steps[::2])
    assert with_delay - without == pytest.approx(DELAY_S, abs=TOLERANCE_S)
    for phase in {"data_wait", "forward", "backward", "optimizer"} - {where}:
        assert median(step.phases[phase] for step in steps) < DELAY_S / 2


def test_loss_between_model_and_backward_is_forward(observe: Callable[..., Observed]) -> None:
    observed = observe()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(SleepyData([0.0] * 6), batch_size=1):
        loss = model(batch).sum()
        time.sleep(DELAY_S)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(DELAY_S)
    steps = observed.end()
    assert median(step.phases["forward"] for step in steps) == pytest.approx(DELAY_S, abs=0.008)
    # The last step ends with the last thing seen in it.
    assert median(step.phases["other"] for step in steps[:-1]) == pytest.approx(DELAY_S, abs=0.008)


def test_accumulation_is_one_step(observe: Callable[..., Observed]) -> None:
    observed = observe()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=4), start=1):
        (model(batch).sum() / 3).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    steps = observed.end()
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [step.samples for step in steps] == [12] * 4
    assert [step.metrics["backwards"] for step in steps] == [3.0] * 4
    assert [step.metrics["fetches"] for step in steps] == [3.0] * 4
    assert steps[0].lr == 0.1
    assert_adds_up(steps)


def test_two_optimizers_are_one_step(observe: Callable[..., Observed]) -> None:
    """A GAN: each batch trains one network after the other, with models called in between."""
    observed = observe()
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    first = torch.optim.Adam(critic.parameters(), lr=0.1)
    second = torch.optim.Adam(generator.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=4):
        with torch.no_grad():
            made = generator(torch.randn(4, 4))
        first.zero_grad()
        (critic(made) - critic(batch)).mean().backward()
        first.step()
        second.zero_grad()
        (-critic(generator(torch.randn(4, 4)))).mean().backward()
        second.step()
    steps = observed.end()
    assert len(steps) == 5
    assert [step.metrics["optimizer_steps"] for step in steps] == [2.0] * 5
    assert all("validation" not in step.phases for step in steps)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_loop_without_loader(optimizers: int, observe: Callable[..., Observed]) -> None:
    observed = observe()
    models = [nn.Linear(4, 2) for _ in range(optimizers)]
    updates = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(7):
        for model, update in zip(models, updates):
            update.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            update.step()
    steps = observed.end()
    assert len(steps) == 7
    assert all("data_wait" not in step.phases for step in steps)
    assert [step.metrics["optimizer_steps"] for step in steps] == [float(optimizers)] * 7
    assert steps[3].samples == 3, "the optimizers share a batch"


def test_closure_holds_forward_and_backward(observe: Callable[..., Observed]) -> None:
    """As Lightning does it: the optimizer calls back into the model."""
    observed = observe()
    model = Sleepy()
    model.forward_s = DELAY_S
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    steps = observed.end()
    assert len(steps) == 5
    assert median(step.phases["forward"] for step in steps) == pytest.approx(DELAY_S, abs=0.008)
    assert median(step.phases["optimizer"] for step in steps) < DELAY_S / 2
    assert_adds_up(steps)


def test_validation_belongs_to_the_step_before_it(observe: Callable[..., Observed]) -> None:
    observed = observe()
    model = Sleepy()
    criterion = nn.MSELoss()  # never told to be in evaluation mode
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slow = SleepyData([DELAY_S] * 2)
    train, held_out = DataLoader(SleepyData([0.0] * 4), 1), DataLoader(slow, 1)
    slept_s = []
    for _ in range(2):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            criterion(model(batch), torch.zeros(1, 2)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for batch in held_out:
                criterion(model(batch), torch.zeros(1, 2))
        slept_s.append(slow.slept_s - sum(slept_s))
    steps = observed.end()
    assert [step.step for step in steps if step.phases.get("validation", 0.0) > 0] == [4, 8]
    for number, planted_s in zip((4, 8), slept_s):
        assert planted_s >= 2 * DELAY_S
        assert steps[number - 1].phases["validation"] == pytest.approx(planted_s, abs=0.02)
    assert [step.epoch for step in steps] == [1] * 4 + [2] * 4
    assert [step.samples for step in steps] == [1] * 8
    assert_adds_up(steps)


def test_look_at_the_model_before_training_is_no_step(observe: Callable[..., Observed]) -> None:
    observed = observe()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(SleepyData([0.0] * 3), 1)
    model.eval()
    with torch.no_grad():
        for batch in loader:
            model(batch)
            time.sleep(DELAY_S)
    model.train()
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
    steps = observed.end()
    assert len(steps) == 3
    assert all("validation" not in step.phases for step in steps)
    assert steps[0].step_s < 2 * DELAY_S


@pytest.mark.parametrize("teacher_first", [True, False])
def test_teacher_is_part_of_the_step(teacher_first: bool, observe: Callable[..., Observed]) -> None:
    observed = observe()
    student, teacher = nn.Linear(4, 2), Sleepy().eval()
    teacher.forward_s = DELAY_S
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def teach(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = teacher(batch)
        return result

    for batch in DataLoader(SleepyData([0.0] * 5), 1):
        target = teach(batch) if teacher_first else None
        output = student(batch)
        loss = F.mse_loss(output, teach(batch) if target is None else target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    steps = observed.end()
    assert len(steps) == 5
    assert all("validation" not in step.phases for step in steps)
    assert median(step.phases["forward"] for step in steps) == pytest.approx(DELAY_S, abs=0.008)


def test_fetching_ahead_keeps_steps_whole(observe: Callable[..., Observed]) -> None:
    """The next batch is fetched between backward and the optimizer."""
    observed = observe()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(SleepyData([0.0] * 6), 1))
    batch: torch.Tensor | None = next(batches)
    while batch is not None:
        loss = model(batch).sum()
        loss.backward()
        batch = next(batches, None)
        optimizer.step()
        optimizer.zero_grad()
    steps = observed.end()
    assert len(steps) == 6
    assert [step.metrics["backwards"] for step in steps] == [1.0] * 6


def test_checkpointed_activations_stay_in_backward(observe: Callable[..., Observed]) -> None:
    from torch.utils.checkpoint import checkpoint

    observed = observe()
    model = Sleepy()
    model.forward_s = DELAY_S
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(SleepyData([0.0] * 4), 1):
        checkpoint(model, batch, use_reentrant=False).sum().backward()
        optimizer.step()
    steps = observed.end()
    assert len(steps) == 4
    assert median(step.phases["backward"] for step in steps) == pytest.approx(DELAY_S, abs=0.008)


def test_logging_is_counted_within_the_phases(
    observe: Callable[..., Observed], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(DELAY_S)

    log = logging.getLogger("test-attach")
    handler = Slow()
    log.addHandler(handler)
    observed = observe()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(SleepyData([0.0] * 4), 1):
        model(batch).sum().backward()
        optimizer.step()
        print("a step")
        log.warning("slow")
    steps = observed.end()
    log.removeHandler(handler)
    assert median(step.metrics["logging_s"] for step in steps) == pytest.approx(DELAY_S, abs=0.008)
    assert capsys.readouterr().out == "a step\n" * 4


def test_stops_after_so_many_steps(observe: Callable[..., Observed]) -> None:
    observed = observe(most_steps=3)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(SleepyData([0.0] * 6), 1):
        model(batch).sum().backward()
        optimizer.step()
    assert len(observed.end()) == 3
    assert "first 3 steps" in observed.watch.notes[0]


def test_an_error_of_ours_never_reaches_the_script(
    observe: Callable[..., Observed], monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = observe()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    for index, batch in enumerate(DataLoader(SleepyData([0.0] * 6), 1)):
        if index == 3:
            monkeypatch.setattr(observed.watch._finder, "open", lambda *_, **__: 1 / 0)
        model(batch).sum().backward()
        optimizer.step()
        done += 1
    steps = observed.end()
    assert done == 6
    assert 1 <= len(steps) <= 3
    assert "ZeroDivisionError" in observed.watch.notes[0]


def test_an_error_of_the_script_is_its_own(observe: Callable[..., Observed]) -> None:
    class Broken(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

    observed = observe()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(SleepyData([0.0] * 4), 1):
        with pytest.raises(ValueError, match="mine"):
            Broken()(batch)
        model(batch).sum().backward()
        optimizer.step()
    steps = observed.end()
    assert len(steps) == 4
    assert not observed.watch.notes


def test_other_threads_are_left_alone(observe: Callable[..., Observed]) -> None:
    observed = observe()
    model, other = nn.Linear(4, 2), Sleepy()
    other.forward_s = DELAY_S
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(SleepyData([0.0] * 3), 1):
        thread = threading.Thread(target=other, args=(batch,))
        thread.start()
        thread.join()
        model(batch).sum().backward()
        optimizer.step()
    steps = observed.end()
    assert len(steps) == 3
    assert median(step.phases["forward"] for step in steps) < DELAY_S / 2
    assert median(step.phases["other"] for step in steps) > DELAY_S * 0.9


def test_forked_child_reports_nothing(observe: Callable[..., Observed]) -> None:
    observed = observe()
    child = os.fork()
    if child == 0:
        os._exit(0 if not observed.watch.active else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert observed.watch.active


def test_hooks_are_taken_away_again() -> None:
    def attributes() -> list[Any]:
        return [
            builtins.print,
            torch.save,
            torch.autograd.backward,
            torch.nn.Module.__call__,
            torch.utils.data.DataLoader.__iter__,
            torch.optim.Optimizer.__init__,
            torch.optim.RMSprop.step,
            torch.distributed.all_reduce,
            torch.nn.utils.clip_grad_norm_,
            logging.Logger.handle,
            vars(torch.Tensor).get("item"),
        ]

    weights = [nn.Parameter(torch.ones(2))]
    torch.optim.RMSprop(weights, lr=0.1)
    before = attributes()
    observed = Observed()
    torch.optim.RMSprop(weights, lr=0.1)
    assert all(now is not then for now, then in zip(attributes()[:-1], before))
    observed.remove()
    assert all(now is then for now, then in zip(attributes(), before))


def test_users_own_optimizer_hooks_run_once(observe: Callable[..., Observed]) -> None:
    observe()
    calls: list[str] = []
    for _ in range(2):  # the second instance meets a class that is watched already
        optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(2))], lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        optimizer.step()
    assert calls == ["before", "after"] * 2


def test_loop_that_only_reads_needs_no_memory(observe: Callable[..., Observed]) -> None:
    observed = observe()
    loader = DataLoader(TensorDataset(torch.zeros(3000)), 1)
    for _ in loader:
        pass
    assert len(observed.watch._finder.timeline.marks) < 2100
    assert observed.end() == []


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        (torch.tensor(1.0), None),
        ({"label": 1, "input": torch.zeros(5)}, 5),
        ([("text",), [torch.zeros(2, 2)]], 2),
        ("text", None),
        ([], None),
    ],
)
def test_leading_size(batch: Any, size: int | None) -> None:
    assert leading_size(batch) == size


@pytest.mark.slow
def test_compiled_graphs_are_the_same(observe: Callable[..., Observed]) -> None:
    from torch._dynamo.utils import counters

    def run() -> tuple[list[float], dict[str, int], dict[str, int]]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for batch in DataLoader(SleepyData([0.0] * 4), 1):
            optimizer.zero_grad()
            loss = compiled(batch).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, dict(counters["stats"]), dict(counters["frames"])

    plain = run()
    observed = observe()
    assert run() == plain
    assert len(observed.end()) == 4


def _slow_start(worker: int) -> None:
    time.sleep(0.3)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_start_of_workers_is_told_apart_in_every_epoch(persistent: bool, observe: Callable[..., Observed]) -> None:
    observed = observe()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(12, 4))
    loader = DataLoader(data, 2, num_workers=1, worker_init_fn=_slow_start, persistent_workers=persistent)
    for _ in range(3):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    steps = observed.end()
    assert len(steps) == 18
    assert_adds_up(steps)
    assert sum(step.step_s for step in steps) < 0.6
    note = next(note for note in observed.watch.notes if "no step counts" in note)
    assert ("persistent_workers" in note) != persistent


def test_two_losses_of_one_batch_are_no_accumulation(observe: Callable[..., Observed]) -> None:
    observed = observe()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        output = model(torch.ones(3, 4))
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
        optimizer.step()
    steps = observed.end()
    assert [(step.samples, step.metrics["batches"]) for step in steps] == [(3, 1.0)] * 4


def test_what_cannot_be_told_from_accumulation_has_no_batch(observe: Callable[..., Observed]) -> None:
    """A real and a made batch, each with a backward pass of its own, before the first of two optimizers steps."""
    observed = observe()
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, generator)]
    for _ in range(4):
        made = generator(torch.ones(3, 4))
        critic(torch.ones(3, 4)).sum().backward()
        critic(made.detach()).sum().backward()
        optimizers[0].step()
        critic(made).sum().backward()
        optimizers[1].step()
    steps = observed.end()
    assert len(steps) == 4
    assert [step.samples for step in steps] == [0] * 4
    assert observed.watch.facts["parameters"] == 25


def test_optimizers_that_come_one_after_another_are_not_added_up(observe: Callable[..., Observed]) -> None:
    """As in a cross-validation, which trains a new model in every fold."""
    observed = observe()
    kept = []
    for _ in range(3):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept.append((model, optimizer))
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    observed.end()
    assert observed.watch.facts["parameters"] == 10


def test_a_closure_with_a_loop_of_its_own_counts_one_evaluation(observe: Callable[..., Observed]) -> None:
    observed = observe()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses = [model(torch.ones(3, 4) * part).square().mean() for part in range(1, 3)]
        for loss in losses:
            loss.backward()
        for part in range(1, 3):
            loss = model(torch.ones(3, 4) * part).square().mean()
            loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    for step in observed.end()[1:]:
        assert step.metrics["batches"] == 3
        assert step.samples == 9


def test_a_traced_or_exported_model_keeps_its_free_sizes(
    observe: Callable[..., Observed], recwarn: pytest.WarningsRecorder
) -> None:
    observed = observe()
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    traced = torch.jit.trace(model, torch.ones(3, 4))
    batch = torch.export.Dim("batch")
    exported = torch.export.export(model, (torch.ones(3, 4),), dynamic_shapes=({0: batch},), strict=False)
    observed.end()
    assert traced(torch.ones(5, 4)).shape == exported.module()(torch.ones(5, 4)).shape == (5, 2)
    assert not [item for item in recwarn if "TracerWarning" in item.category.__name__]
