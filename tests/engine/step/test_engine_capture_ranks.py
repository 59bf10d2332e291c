"""Two ranks that record their steps, or do not, always together; graphs are functions that run again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_graphs import FakeRecorder
from torch.utils.data import DataLoader
from workbench import classification, mlp, parameters

from frameworm import Trainer
from frameworm.config.schema import ParallelConfig
from frameworm.data.steps import StepBatch
from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.half_weights import HalfWeights
from frameworm.engine.optim.schedule import Schedule
from frameworm.engine.optim.update import Update
from frameworm.engine.step import capture
from frameworm.engine.step.capture import EAGER_STEPS_OF_RANKS, CapturedStep
from frameworm.engine.step.joint import JointDecisions, first_reason
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.one_message import OneMessage
from frameworm.engine.step.step import TrainStep
from frameworm.errors import ModelError, StuckError
from frameworm.launch.process_group import shared_store
from frameworm.launch.stopping import StopAgreement, StopRequest
from frameworm.numerics.plain_update import PlainUpdate
from frameworm.numerics.state import StepTensors
from frameworm.observe.clocks.communication import recorded
from frameworm.observe.clocks.phases import HostClock
from frameworm.parallel.replicated import DDPStrategy

CPU = torch.device("cpu")
_numbers = itertools.count()


def _store(name: str) -> Any:
    return shared_store(f"{name}{next(_numbers)}")


class Bench:
    """A model under DDP with an eager and a captured step; on both ranks at once."""

    def __init__(
        self,
        rank: int,
        *,
        trial: bool = False,
        alike: bool = True,
        recorder: FakeRecorder | None = None,
        at_once: bool = False,
        model: Callable[[], torch.nn.Module] = mlp,
        loss_fn: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> None:
        self.model = model()
        self.strategy = DDPStrategy(CPU, rank, 2, ParallelConfig(strategy="ddp", **settings))
        wrapped = self.strategy.place(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        precision, clock = Precision("off", CPU), HostClock()
        schedule = Schedule(self.optimizer, "linear", 200, 0.0)
        update = Update(self.model.parameters(), self.optimizer, schedule, precision, 1.0, CPU, strategy=self.strategy)
        buckets = clock.record_buckets()
        self.strategy.wrap_hook(lambda hook: recorded(hook, buckets))
        loss = LossFunction(self.model, loss_fn)
        eager = TrainStep(self.model, wrapped, loss, update, self.strategy, precision, clock)
        if at_once:
            assert OneMessage.suits(self.strategy, self.model)
            eager.one_message = OneMessage(self.model.named_parameters(), self.strategy, buckets)
        self.clock = clock
        joint = JointDecisions(_store("joint"), rank, 2, limit_s=20)
        self.recorder = recorder or FakeRecorder()
        self.step = CapturedStep(eager, self.recorder, clock, trial=trial, joint=joint, alike=alike)
        agreement = StopAgreement(StopRequest(), _store("stop"), rank, 2, poll_interval_s=0.0)
        self.step.agree_by(agreement)
        self.number = 0

    def train(self, sizes: list[int], together: list[int] | None = None, arrays: Collection[int] = ()) -> None:
        """Steps of so many samples on this rank, and so many on both; in some the inputs are an array of numpy."""
        values, target = classification(64).tensors
        for place, size in enumerate(sizes):
            total = 2 * size if together is None else together[place]
            part = slice(7 * self.number % 32, 7 * self.number % 32 + size)
            inputs: Any = values[part].numpy() if self.number in arrays else values[part]
            self.step.run(self.number, StepBatch([(inputs, target[part])], [size], total))
            self.number += 1

    def result(self) -> tuple[torch.Tensor, int, str]:
        return parameters(self.model), self.step.captured_steps, self.step.note


def _trained(rank: int, sizes: list[int], **settings: Any) -> Any:
    bench = Bench(rank, **settings)
    bench.train(sizes)
    eager = Bench(rank)
    eager.step._refused = "for comparison"
    eager.train(sizes)
    return *bench.result(), parameters(eager.model)


def _same(pair: Any, *args: Any, captured: int, **settings: Any) -> list[str]:
    """Both ranks end with the parameters of eager steps; returns what they say about it."""
    found = pair.call(_call, _trained, args, settings)
    for own, steps, _, eager in found:
        torch.testing.assert_close(own, eager, rtol=1e-5, atol=1e-6)
        assert steps == captured
    assert torch.equal(found[0][0], found[1][0]), "the ranks hold the same model"
    return [note for _, _, note, _ in found]


def _call(rank: int, function: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    return function(rank, *args, **settings)


@pytest.mark.parametrize("trial", [False, True])
def test_ranks_replay_together(pair: Any, trial: bool) -> None:
    if trial:  # a fake graph is no faster than the step
        pair.call(_never_too_slow)
    _same(pair, [4] * 20, captured=20 - EAGER_STEPS_OF_RANKS - 1, trial=trial)


def _never_too_slow(rank: int) -> None:
    capture.CLEARLY_FASTER = 1e9


def test_a_short_last_step_runs_eagerly_on_all_ranks(pair: Any) -> None:
    _same(pair, [4] * 16 + [2] + [4] * 4, captured=16 - EAGER_STEPS_OF_RANKS - 1 + 4, alike=False)


def test_shapes_that_all_ranks_change_at_once_are_all_recorded(pair: Any) -> None:
    notes = _same(pair, [4, 2] * 12, captured=24 - EAGER_STEPS_OF_RANKS - 2)
    assert "2 shapes" in notes[0]


def _fails(rank: int, who: int, **settings: Any) -> Any:
    bench = Bench(rank, recorder=FakeRecorder(fails=rank == who), **settings)
    bench.train([4] * 18)
    return bench.result()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("trial", [False, True])
def test_one_rank_that_cannot_record_keeps_all_eager(pair: Any, who: int, trial: bool) -> None:
    found = pair.call(_call, _fails, (who,), {"trial": trial})
    assert torch.equal(found[0][0], found[1][0])
    for _, steps, note in found:
        assert steps == 0
        assert note == f"the step was not captured: rank {who}: RuntimeError: not while capturing"


def _waits(rank: int, who: int) -> Any:
    @contextlib.contextmanager
    def watching() -> Iterator[list[str]]:
        yield ["train.py:7"] if rank == who else []

    usual, capture.watching_for_waits = capture.watching_for_waits, watching
    try:
        bench = Bench(rank)
        bench.train([4] * 18)
    finally:
        capture.watching_for_waits = usual
    return bench.result()


def test_a_wait_for_the_device_on_one_rank_keeps_all_eager(pair: Any) -> None:
    for _, steps, note in pair.call(_waits, 1):
        assert steps == 0
        assert "rank 1: the host waits for the device inside the step (train.py:7)" in note


def _unlike(rank: int, alike: bool) -> Any:
    bench = Bench(rank, alike=alike)
    sizes = [4, 2] * 8 if rank else [4, 4, 2, 2] * 4
    bench.train(sizes, together=[6] * 16)
    return bench.result()


@pytest.mark.parametrize("alike", [False, True])
def test_ranks_whose_shapes_change_at_different_steps_stay_eager(pair: Any, alike: bool) -> None:
    found = pair.call(_call, _unlike, (alike,), {})
    assert torch.equal(found[0][0], found[1][0])
    for _, steps, note in found:
        assert steps == 0
        assert ("several shapes" if not alike else "change their shapes at different steps") in note


def _surprised(rank: int) -> Any:
    """After some replays one batch of rank 1 has another shape, of which rank 0 knows nothing."""
    bench, eager = Bench(rank, alike=False), Bench(rank)
    eager.step._refused = "for comparison"
    sizes = [4] * 16 + [3 if rank else 4] + [4] * 9
    for each in (bench, eager):
        each.train(sizes, together=[8] * len(sizes))
    return *bench.result(), parameters(eager.model)


def test_a_batch_of_unforeseen_shape_takes_all_ranks_back_to_eager_steps(pair: Any) -> None:
    found = pair.call(_surprised)
    assert torch.equal(found[0][0], found[1][0])
    for own, steps, note, eager in found:
        torch.testing.assert_close(own, eager, rtol=1e-5, atol=1e-6)
        assert 3 <= steps < 16 + 9 - EAGER_STEPS_OF_RANKS
        assert "a batch has another shape than all before it" in note


class TakesArrays(torch.nn.Module):
    """Takes arrays of numpy too, which a graph cannot be refilled from."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Any) -> Any:
        return self.inner(torch.as_tensor(inputs))


class OnePass:
    """Stands in for the one-pass update, and rounds in another way than the optimizer."""

    calls = 0

    def __init__(self, update: Update) -> None:
        self._update = update

    @torch.no_grad()
    def __call__(self, clip_norm: float | None, skip_bad: bool, factor: Any = None) -> tuple[Any, Any]:
        OnePass.calls += 1
        assert clip_norm is not None
        norm = torch.nn.utils.clip_grad_norm_(self._update.parameters, clip_norm)
        self._update.optimizer.step()
        for parameter in self._update.parameters:
            parameter.mul_(1 + 1e-6)
        return norm, torch.zeros(())


@contextlib.contextmanager
def _one_pass() -> Iterator[None]:
    """Updates in one pass unless the optimizer has hooks."""
    usual, OnePass.calls = Update.find_one_pass, 0

    def find(update: Update) -> Any:
        return None if update.optimizer._optimizer_step_post_hooks else OnePass(update)  # type: ignore[attr-defined]

    Update.find_one_pass = find  # type: ignore[method-assign]
    try:
        yield
    finally:
        Update.find_one_pass = usual  # type: ignore[method-assign]


def _hooked(rank: int, who: int) -> Any:
    with _one_pass():
        bench = Bench(rank)
        if rank == who:
            bench.optimizer.register_step_post_hook(lambda *_: None)
        bench.train([4] * 20)
        return *bench.result(), OnePass.calls


@pytest.mark.parametrize("who", [None, 0, 1])
def test_all_ranks_update_in_one_pass_or_none_does(pair: Any, who: int | None) -> None:
    found = pair.call(_hooked, who, deadline_s=60)
    assert torch.equal(found[0][0], found[1][0]), "the ranks hold the same model"
    for _, steps, note, calls in found:
        assert steps == 20 - EAGER_STEPS_OF_RANKS - 1, note
        assert calls == (steps + 1 if who is None else 0)


def _misfit(rank: int, at: int, kind: str) -> Any:
    """Rank 1 has one batch that cannot be recorded."""
    bench, eager = Bench(rank, alike=False, model=TakesArrays), Bench(rank, model=TakesArrays)
    eager.step._refused = "for comparison"
    sizes = [4] * 20
    if kind == "shape" and rank == 1:
        sizes[at] = 3
    for each in (bench, eager):
        each.train(sizes, together=[8] * 20, arrays=[at] if kind == "array" and rank == 1 else [])
    return *bench.result(), parameters(eager.model)


@pytest.mark.parametrize("kind", ["array", "shape"])
@pytest.mark.parametrize("step", range(EAGER_STEPS_OF_RANKS - 1, EAGER_STEPS_OF_RANKS + 2))
def test_a_batch_that_one_rank_cannot_record_before_the_first_graph_keeps_all_eager(
    pair: Any, step: int, kind: str
) -> None:
    found = pair.call(_misfit, step, kind, deadline_s=60)
    assert torch.equal(found[0][0], found[1][0])
    for own, steps, note, eager in found:
        torch.testing.assert_close(own, eager, rtol=1e-5, atol=1e-6)
        assert steps == 0
        assert note.startswith("the step was not captured: rank 1: ")
        assert ("holds a ndarray" if kind == "array" else "shape") in note


def _short_first(rank: int) -> Any:
    """The step with which recording would begin is the short last one of an epoch; later ones differ in shape."""
    bench = Bench(rank, alike=False)
    bench.train([4] * EAGER_STEPS_OF_RANKS + [2] + [4] * 4 + [1 if rank else 2] + [4] * 2)
    return bench.result()


def test_recording_may_begin_beside_a_short_step(pair: Any) -> None:
    found = pair.call(_short_first, deadline_s=60)
    assert torch.equal(found[0][0], found[1][0])
    for _, steps, note in found:
        assert steps == 3 + 2, note
        assert "1 shape of batch" in note


def _new_momentum(rank: int) -> Any:
    """A setting that is baked into graphs changes on both ranks, just when rank 1 has a batch that none can hold."""
    bench = Bench(rank, alike=False, model=TakesArrays)
    for steps in ([4] * 16, [4] * 6):
        bench.train(steps, arrays=[16] if rank == 1 else [])
        bench.optimizer.param_groups[0]["momentum"] = 0.8
    return *bench.result(), len(bench.recorder.graphs)


def test_a_batch_that_one_rank_cannot_record_while_all_warm_up_again_ends_the_replays(pair: Any) -> None:
    found = pair.call(_new_momentum, deadline_s=60)
    assert torch.equal(found[0][0], found[1][0])
    for _, steps, note, graphs in found:
        assert steps == 16 - EAGER_STEPS_OF_RANKS - 1
        assert graphs == 1, "none for nothing"
        assert "until rank 1: the batch holds a ndarray" in note


def _array_later(rank: int) -> Any:
    with _one_pass():
        bench = Bench(rank, alike=False, model=TakesArrays)
        bench.train([4] * 26, arrays=[16] if rank == 1 else [])
        return bench.result()


def test_a_batch_that_cannot_be_recorded_meets_replays_bit_for_bit(pair: Any) -> None:
    found = pair.call(_array_later, deadline_s=60)
    assert torch.equal(found[0][0], found[1][0])
    for _, steps, note in found:
        assert 3 <= steps < 26 - EAGER_STEPS_OF_RANKS
        assert "holds a ndarray" in note


@contextlib.contextmanager
def _no_memory(holder: Any, name: str, at: int = 1) -> Iterator[None]:
    """Has a function run out of memory the `at`-th time it is called."""
    usual, calls = getattr(holder, name), itertools.count(1)

    def function(*given: Any, **named: Any) -> Any:
        if next(calls) == at:
            raise torch.OutOfMemoryError(f"no memory left in {name}")
        return usual(*given, **named)

    setattr(holder, name, function)
    try:
        yield
    finally:
        setattr(holder, name, usual)


# What needs memory in the trial, and how often it was called before.
TRIED: dict[str, tuple[Any, int]] = {
    "forward": (TakesArrays, EAGER_STEPS_OF_RANKS + 1),
    "copy": (StepTensors, 0),
    "errors": (PlainUpdate, 0),
}


def _runs_out(rank: int, what: str, who: int, at_once: bool) -> Any:
    holder, before = TRIED[what]
    with _no_memory(holder, what, before + 1) if rank == who else contextlib.nullcontext():
        bench = Bench(rank, trial=True, model=TakesArrays, at_once=at_once)
        bench.train([4] * 18)
    eager = Bench(rank, model=TakesArrays)
    eager.step._refused = "for comparison"
    eager.train([4] * 18)
    return *bench.result(), parameters(eager.model)


@pytest.mark.parametrize("what", TRIED)
@pytest.mark.parametrize(("who", "at_once"), [(0, False), (1, True)])
def test_no_memory_to_compare_on_one_rank_keeps_all_eager(pair: Any, what: str, who: int, at_once: bool) -> None:
    found = pair.call(_runs_out, what, who, at_once, deadline_s=60)
    assert torch.equal(found[0][0], found[1][0])
    for own, steps, note, eager in found:
        torch.testing.assert_close(own, eager, rtol=1e-5, atol=1e-6)
        assert steps == 0
        assert f"rank {who}: there is not enough memory to compare both ways" in note


def _counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return torch.nn.functional.cross_entropy(output, target), len(target)


def _alone(rank: int, at_once: bool) -> Any:
    """Rank 0 computes gradients that rank 1 knows nothing of."""
    bench = Bench(rank, at_once=at_once, model=_normed, loss_fn=_counted)
    bench.train([4] * 3)
    found = None
    if rank == 0:
        eager, (inputs, target) = bench.step.eager, classification(12).tensors
        with eager.alone():
            eager.gradients(StepBatch([(inputs[:6], target[:6]), (inputs[6:], target[6:])], [6, 6], 24))
        found = [item.grad is not None for item in bench.model.parameters()]
        eager.update.clear()
    bench.train([4] * 3)
    return parameters(bench.model), found


@pytest.mark.parametrize("at_once", [False, True])
def test_a_rank_may_compute_gradients_alone(pair: Any, at_once: bool) -> None:
    (first, found), (second, _) = pair.call(_alone, at_once, deadline_s=60)
    assert found == [True] * 6
    assert torch.equal(first, second)


def _no_room(rank: int) -> Any:
    with _no_memory(capture, "own_copy") if rank == 1 else contextlib.nullcontext():
        bench = Bench(rank)
        bench.train([4] * 18)
    return bench.result()


def test_no_memory_for_what_a_graph_reads_on_one_rank_keeps_all_eager(pair: Any) -> None:
    found = pair.call(_no_room, deadline_s=60)
    assert torch.equal(found[0][0], found[1][0])
    for _, steps, note in found:
        assert steps == 0
        assert "rank 1: no memory left in own_copy" in note


def _with_state() -> torch.nn.Module:
    return torch.nn.Sequential(_normed(), torch.nn.Dropout(0.2))


def _tried(rank: int) -> Any:
    """The same training with a trial and without; dropout and buffers show what the trial leaves behind."""
    _never_too_slow(rank)
    found = []
    for trial in (True, False):
        bench = Bench(rank, trial=trial, model=_with_state)
        torch.manual_seed(rank)
        bench.train([4] * 18)
        found.append((_state(bench), bench.step.captured_steps))
    return found


def test_a_trial_of_ranks_leaves_no_trace(pair: Any) -> None:
    for (own, captured), (plain, steps) in pair.call(_tried, deadline_s=60):
        assert captured == steps == 18 - EAGER_STEPS_OF_RANKS - 1
        for one, other in zip(own, plain, strict=True):
            assert torch.equal(one, other)


def _compressed(rank: int, method: str) -> Any:
    bench = Bench(rank, compression=method)
    sent = []
    for _ in range(18):
        bench.train([4])
        sent.append(bench.strategy.communicated_bytes(bench.model))
    return *bench.result(), sent


def test_a_replay_counts_the_bytes_of_the_step_it_holds(pair: Any) -> None:
    for _, steps, note, sent in pair.call(_compressed, "int8"):
        assert steps > 0, note
        assert len(set(sent)) == 1
        assert sent[0] > 0


class Memory:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)


def test_each_exchange_is_one_of_its_own() -> None:
    store = Memory()
    first = JointDecisions(store, 0, 2, limit_s=0.05)
    store.set("1/1", '{"a": 1}')
    assert first.exchange([1, None]) == [[1, None], {"a": 1}]
    with pytest.raises(StuckError, match=r"rank 1 did not say within 0 s .*gpu.capture: off"):
        first.exchange("next")


def test_reasons_name_the_rank_unless_all_say_the_same() -> None:
    assert first_reason([None, None]) is None
    assert first_reason(["a", "a"]) == "a"
    assert first_reason([None, "a"]) == "rank 1: a"
    assert first_reason(["b", "a"]) == "rank 0: b"
    assert JointDecisions().any_reason("alone") == "alone"


def test_what_gloo_sends_is_not_recorded(pair: Any) -> None:
    assert all("gloo" in str(reason) for reason in pair.call(_why_not, {}))
    assert all("find_unused" in str(reason) for reason in pair.call(_why_not, {"find_unused_parameters": True}))


def _why_not(rank: int, settings: dict[str, Any]) -> str | None:
    assert dist.get_backend() == "gloo"
    return DDPStrategy(CPU, rank, 2, ParallelConfig(strategy="ddp", **settings)).why_not_captured()


@pytest.fixture
def single_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _normed() -> torch.nn.Module:
    """With buffers, which DDP sends from rank 0 in every step."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def _state(bench: Bench) -> list[torch.Tensor]:
    return [item.detach().clone() for item in bench.model.state_dict().values()]


def _at_once(rank: int, name: str, micro_batches: int) -> Any:
    """The same steps with one message and with DDP's buckets; what each holds on this rank, and its exchanges."""
    made = {"mlp": mlp, "normed": _normed}[name]
    benches = Bench(rank, at_once=True, model=made), Bench(rank, model=made)
    inputs, target = classification(64).tensors
    sent = []
    for number in range(18):
        begin = (7 * number + 3 * rank) % 32
        parts = [slice(begin + 4 * index, begin + 4 * index + 4) for index in range(micro_batches)]
        for bench in benches:
            batches = [(inputs[part], target[part]) for part in parts]
            bench.step.run(number, StepBatch(batches, [4] * micro_batches, 8 * micro_batches))
        timed = [item for bench in benches for item in bench.clock.end_step(None, ())]
        if number < EAGER_STEPS_OF_RANKS:
            sent.append([sum(one.bytes for one in item.communication.buckets) for item in timed])
    return [_state(bench) for bench in benches], benches[0].step.captured_steps, sent


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", ["mlp", "normed"])
def test_gradients_in_one_message_are_those_of_ddp(pair: Any, name: str, micro_batches: int) -> None:
    found = pair.call(_at_once, name, micro_batches)
    for (own, theirs), captured, _ in found:
        assert captured == 18 - EAGER_STEPS_OF_RANKS - 1
        for one, other in zip(own, theirs, strict=True):
            assert torch.equal(one, other)
    for one, other in zip(*(item[0][0][:4] for item in found)):  # behind them are buffers of this rank's last batch
        assert torch.equal(one, other), "the ranks hold the same model"


def test_one_message_is_timed_as_what_the_ranks_exchange(pair: Any) -> None:
    for _, _, sent in pair.call(_at_once, "mlp", 1):
        for own, theirs in sent:
            assert own == 4 * 4 * 128, "each of four gradients begins at a border"
            assert theirs == sum(4 * item.numel() for item in mlp().parameters())


def test_a_message_takes_gradients_of_cast_weights_and_sparse_ones(single_rank_group: None) -> None:
    embedding, linear = torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 3)
    model = torch.nn.Sequential(embedding, linear)
    message = OneMessage(model.named_parameters(), DDPStrategy(CPU, 0, 1, ParallelConfig(strategy="ddp")), None)
    halves = HalfWeights([(linear, "weight")], torch.bfloat16)
    model(torch.tensor([1, 3, 3])).sum().backward()
    expected = [embedding.weight.grad.to_dense(), linear.weight.grad, linear.bias.grad]  # type: ignore[union-attr]
    expected = [item.clone() for item in expected if item is not None]
    (half,) = halves.tensors
    half.grad = torch.full_like(half, 0.5)
    message.send(halves)
    expected[1] += 0.5
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    assert half.grad is None
    linear.weight.grad, half.grad = None, torch.full_like(half, 0.25)
    message.send(halves)
    assert torch.equal(linear.weight.grad, torch.full_like(linear.weight, 0.25))  # type: ignore[arg-type]
    embedding.weight.grad = None
    with pytest.raises(ModelError, match=r"did not use parameter 0\.weight.*find_unused_parameters"):
        message.send(None)


@pytest.mark.parametrize("capture", ["rehearse", "off"])
def test_graphs_end_at_buckets_only_where_these_are_sent(single_rank_group: None, capture: str) -> None:
    """torch's compiler splits a graph at every bucket of DDP, so that it is sent while the next graph runs."""
    splits = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        splits.append(torch._dynamo.config.optimize_ddp)
        return torch.nn.functional.cross_entropy(output, target)

    model = mlp()
    settings = {"strategy": "ddp", "compile_model": True, "capture": capture, "device": "cpu", "run_dir": None}
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=loss, max_steps=2, **settings)
    trainer.train(DataLoader(classification(16), 4))
    assert [bool(item) for item in splits[-2:]] == [capture == "off"] * 2
    assert torch._dynamo.config.optimize_ddp, "as it was before"


def test_ddp_keeps_its_buckets_where_they_hide_something(single_rank_group: None) -> None:
    def hides_little(*widths: int, **settings: Any) -> bool:
        model = torch.nn.Sequential(*(torch.nn.Linear(one, other) for one, other in itertools.pairwise(widths)))
        strategy = DDPStrategy(CPU, 0, 1, ParallelConfig(strategy="ddp", **settings))
        strategy.place(model)
        return strategy.hides_little

    assert hides_little(64, 64, 64)
    assert not hides_little(64, 64, 64, 64, bucket_cap_mb=0.01)
    assert hides_little(4096, 512, 64), "the large gradient is the last, and waits for nothing"
    assert not hides_little(64, 512, 4096), "the large gradient is the first, and the rest of backward hides it"
    assert not hides_little(64, 64, static_graph=True)
    assert not hides_little(64, 64, find_unused_parameters=True)
