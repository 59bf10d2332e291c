"""Dry runs against the real thing: what a step on the CPU really keeps and holds at its peak."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from frameworm.config.schema import Config
from frameworm.engine.memory import dry_device
from frameworm.engine.memory.dry_device import attention_kernel
from frameworm.engine.memory.dry_run import DryRun, layers_of, shapes_of
from frameworm.engine.memory.dry_workload import dry_workload
from frameworm.engine.memory.planner import MemoryPlanner, detect_memory
from frameworm.engine.model import activations
from frameworm.engine.step.loss import LossFunction
from frameworm.errors import ConfigError, ModelError
from frameworm.models import attention
from frameworm.models.gpt import GPT
from frameworm.models.text_classifier import TextClassifier
from frameworm.parallel.units import find_units
from frameworm.scaling.memory_model import StepMemory

Make = Callable[[int], dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU packed attention looks at the lengths and computes less than is planned."""
    monkeypatch.setattr(attention, "_may_look", lambda offsets: False)


def gpt() -> tuple[nn.Module, Make]:
    model = GPT(512, 64, 4, 4, 64, dropout=0.1, fused_loss=False)

    def batch(samples: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(samples, 64).long(), "targets": torch.zeros(samples, 64).long()}

    return model, batch


def fused_gpt() -> tuple[nn.Module, Make]:
    model = GPT(4096, 64, 4, 2, 64, dropout=0.0, fused_loss=True)
    return model, gpt()[1]


def classifier() -> tuple[nn.Module, Make]:
    model = TextClassifier(1000, 4, 64, 4, 3, 128, 64)

    def batch(samples: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.zeros(samples, 64).long(),
            "lengths": torch.full((samples,), 64),
            "labels": torch.zeros(samples).long(),
        }

    return model, batch


def packed_classifier() -> tuple[nn.Module, Make]:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        tokens = 64 * samples
        borders = torch.arange(samples + 1) * 64
        return {
            "labels": torch.zeros(samples).long(),
            "input_ids": torch.zeros(tokens).long(),
            "positions": torch.arange(tokens) % 64,
            "offsets": torch.cat([borders, borders[-1:].expand(samples)]).int(),
        }

    return classifier()[0], batch


class Own(nn.Module):
    """A user's model, with a frozen part and a buffer, that says nothing of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.frozen = nn.Linear(8 * 14 * 14, 32).requires_grad_(False)
        self.last = nn.Linear(32, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(inputs).flatten(1)).relu())  # type: ignore[no-any-return]


def own() -> tuple[nn.Module, Callable[[int], Any]]:
    return Own(), lambda samples: (torch.zeros(samples, 3, 16, 16), torch.zeros(samples).long())


WORKLOADS: list[Callable[[], tuple[nn.Module, Any]]] = [gpt, fused_gpt, classifier, packed_classifier, own]


def really_kept(model: nn.Module, loss_of: Callable[[], torch.Tensor], batch: Any) -> int:
    """Bytes of the storages that a real forward pass saves for backward."""
    tensors = batch.values() if isinstance(batch, dict) else batch
    outside = {item.untyped_storage().data_ptr() for item in (*model.parameters(), *model.buffers(), *tensors)}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of()
    return sum(kept.values())


def really_held(work: Callable[[], Any]) -> int:
    """The most that a piece of work holds at a time, from the allocator's own events."""
    work()  # what is made once
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    found: list[tuple[int, int]] = []

    def walk(events: Any) -> None:
        for event in events:
            if event.tag.name == "Allocation":
                found.append((event.start_time_ns, event.extra_fields.alloc_size))
            walk(event.children)

    walk(profiler.profiler.kineto_results.experimental_event_tree())
    held = most = 0
    for _, size in sorted(found, key=lambda item: item[0]):
        held += size
        most = max(most, held)
    return most


def simulated(workload: Callable[[], Any], samples: int = 6, **settings: Any) -> StepMemory:
    torch.manual_seed(0)
    model, batch = workload()
    return DryRun(model, batch, device="cpu", **settings).step(samples)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("precision", ["off", "bf16"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_is_kept_for_backward(workload: Callable[[], tuple[nn.Module, Any]], precision: str) -> None:
    model, make = workload()
    batch = make(6)
    loss_function = LossFunction(model)
    model.train()

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return loss_function(model, batch).loss

    assert simulated(workload, precision=precision).kept == pytest.approx(really_kept(model, loss, batch), rel=0.03)


@pytest.mark.parametrize("mode", ["off", "selective", "full"])
@pytest.mark.parametrize("workload", [gpt, fused_gpt, classifier, packed_classifier])
def test_the_peak_of_a_step(workload: Callable[[], tuple[nn.Module, Any]], mode: Any) -> None:
    model, make = workload()
    batch = make(6)
    activations.apply(model, mode)
    loss_function = LossFunction(model)
    model.train()

    def work() -> None:
        loss_function(model, batch).loss.backward()
        model.zero_grad()

    found = simulated(workload, checkpointing=mode)
    assert found.fresh.total == pytest.approx(really_held(work), rel=0.05)


def test_gradients_that_are_there_beforehand() -> None:
    model, make = gpt()
    batch = make(6)
    loss_function = LossFunction(model)
    loss_function(model, batch).loss.backward()
    assert simulated(gpt).repeat.total == pytest.approx(
        really_held(lambda: loss_function(model, batch).loss.backward()), rel=0.05
    )


@pytest.mark.slow
def test_memory_grows_linearly_with_the_batch() -> None:
    model, make = gpt()
    run = DryRun(model, make, device="cpu")
    two, four, eight = (run.step(size).kept for size in (2, 4, 8))
    assert eight - four == pytest.approx(2 * (four - two), rel=0.01)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_checkpointing_keeps_less(device: str) -> None:
    kept = []
    for mode in ("off", "selective", "full"):
        model, make = gpt()
        kept.append(DryRun(model, make, device=device, precision="bf16", checkpointing=mode).step(4).kept)  # type: ignore[arg-type]
    assert kept[0] > 1.2 * kept[1] > 1.2 * 1.5 * kept[2]


def test_a_gpus_layer_keeps_what_is_known_of_it() -> None:
    """Counted by hand for one token of a GPT layer under bf16 autocast, in multiples of the width."""
    tokens, width, samples = 64, 64, 8
    kept = []
    for layers in (2, 4):
        model = GPT(512, width, 4, layers, tokens, dropout=0.0)
        kept.append(DryRun(model, gpt()[1], precision="bf16").step(samples).kept)
    layer = (kept[1] - kept[0]) / 2
    matrices = 2 * (12 * width * width)  # their bf16 copies
    # Stream, norm in bf16; query, key, value; result of attention; stream, norm in bf16; product; activation.
    by_hand = (4 + 2) + 6 + 2 + (4 + 2) + 8 + 8
    assert layer == pytest.approx(matrices + samples * tokens * width * by_hand, rel=0.05)


def test_dropout_keeps_a_byte_on_a_gpu() -> None:
    plain, dropped = (
        DryRun(GPT(512, 64, 4, 2, 64, dropout=share), gpt()[1], device="cuda").step(8).kept for share in (0.0, 0.1)
    )
    assert dropped - plain == pytest.approx(8 * 64 * 64 * 5, rel=0.01)


def test_the_fused_loss_never_holds_all_logits() -> None:
    model, make = GPT(16_384, 32, 4, 1, 64), gpt()[1]
    whole = GPT(16_384, 32, 4, 1, 64, fused_loss=False)
    fused, unfused = (DryRun(item, make, device="cuda").step(64).fresh for item in (model, whole))
    assert unfused.total > 2 * 64 * 64 * 16_384 * 4
    assert fused.total < 1.3 * 64 * 64 * 16_384 * 4
    assert fused.loss + fused.workspace > 64 * 64 * 16_384 * 4, "one chunk holds all here"


def test_attention_is_chosen_as_a_gpu_would(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16)
    assert attention_kernel(half, False) == "flash"
    assert attention_kernel(half, True) == "efficient"
    assert attention_kernel(half.float(), False) == "efficient"
    assert attention_kernel(half[..., :7], True) == "math"
    assert attention_kernel(torch.empty(1, 1, 4, 320, dtype=torch.bfloat16), False) == "efficient"


def test_plain_attention_holds_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    model, make = gpt()
    flash = DryRun(model, make, precision="bf16").step(4).kept
    monkeypatch.setattr(dry_device, "attention_kernel", lambda *_: "math")
    assert DryRun(model, make, precision="bf16").step(4).kept > flash + 0.9 * 4 * 4 * 4 * 64 * 64 * 2


def test_compiled_models_keep_less() -> None:
    model, make = gpt()
    eager, compiled = (DryRun(model, make, precision="bf16", compiled=item).step(4).kept for item in (False, True))
    assert 0.4 * eager < compiled < 0.9 * eager


def test_the_model_stays_as_it_was() -> None:
    model, make = gpt()
    before = {name: item.clone() for name, item in model.state_dict().items()}
    random = torch.get_rng_state()
    DryRun(model, make, checkpointing="full", precision="bf16").step(2, 2)
    assert all(torch.equal(before[name], item) for name, item in model.state_dict().items())
    assert all(item.grad is None for item in model.parameters())
    assert type(model.layers[0]).__mro__[1] is nn.Module  # type: ignore[index]
    assert torch.equal(random, torch.get_rng_state())
    assert not torch.ones(1).is_cuda


def test_validation_counts_a_forward_pass_alone() -> None:
    model, make = gpt()
    run = DryRun(model, make, device="cpu")
    assert run.step(4).validation == 0
    assert 0 < run.step(4, 4).validation < run.step(4).fresh.total / 2


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(inputs)
        return hidden * 2 if hidden.sum() > 0 else hidden  # type: ignore[no-any-return]


def test_a_model_that_looks_at_values_is_refused() -> None:
    run = DryRun(Looks(), lambda samples: (torch.zeros(samples, 4), torch.zeros(samples).long()))
    with pytest.raises(ModelError, match="Looks decides by values"):
        run.step(2)


def test_shapes_by_layer() -> None:
    model, _ = gpt()
    shapes = shapes_of(model)
    assert shapes.parameters == sum(item.numel() for item in model.parameters())
    assert len(shapes.units) == 5
    assert layers_of(model) == list(model.layers)  # type: ignore[arg-type]
    frozen = shapes_of(Own())
    assert len(frozen.units) == 1
    assert frozen.fixed_bytes == 4 * (8 * 14 * 14 * 32 + 32) + 4 * 16 + 8


def test_layers_in_half_precision_need_no_copies_of_their_weights() -> None:
    model, make = gpt()
    by_autocast, half = (
        DryRun(model, make, device="cuda", precision="bf16", half_layers=item).step(8) for item in (False, True)
    )
    matrices = 2 * sum(item.numel() for layer in layers_of(model) for item in layer.parameters() if item.ndim == 2)
    saved = by_autocast.repeat.weight_copies - half.repeat.weight_copies
    assert matrices <= saved < 1.05 * matrices
    assert half.repeat.weight_copies > 0, "the head, outside of all layers, is left to autocast"
    assert half.kept - by_autocast.kept < -0.9 * saved, "the stream between layers is no larger than before"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_half_layers_are_as_fully_shard_calls_them() -> None:
    """What sharded layers keep for backward, held against real tensors in the same types."""
    model, make = gpt()
    planned = DryRun(model, make, device="cpu", precision="bf16", half_layers=True).step(6)
    for unit in find_units(model):
        unit.to(torch.bfloat16)
        unit.register_forward_pre_hook(lambda _, args: tuple(item.to(torch.bfloat16) for item in args))
    batch, loss_function = make(6), LossFunction(model)
    model.train()

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_function(model, batch).loss

    assert planned.kept == pytest.approx(really_kept(model, loss, batch), rel=0.03)


@pytest.mark.slow
def test_planner_runs_sharded_strategies_with_half_layers() -> None:
    told: list[str] = []
    settings = config(gpu={"mixed_precision": "bf16"}, training={"micro_batch": 64, "global_batch": 256})
    planner = MemoryPlanner(settings, world_size=4, tell=told.append)
    plans = {plan.setting.strategy: plan for plan in planner.report().strategies}
    steps = [planner.profile(plans[name].setting).at(64) for name in ("ddp", "zero1", "zero2", "zero3")]
    assert [step == steps[0] for step in steps] == [True, True, False, False]
    assert steps[2].kept < steps[0].kept
    assert sum("half precision" in text for text in told) == 2, "two points of a line, for both strategies"


def config(**settings: Any) -> Config:
    sizes = {"d_model": 32, "n_heads": 4, "num_layers": 2, "max_seq_len": 32}
    return Config.model_validate({"model": sizes, **settings})


@pytest.mark.slow
def test_planner_finds_the_largest_micro_batch() -> None:
    planner = MemoryPlanner(config(training={"micro_batch": 4, "global_batch": 16}))
    report = planner.report(2**31, "a device")
    assert report.largest == report.largest_by["off"]
    assert report.largest_by["off"] < report.largest_by["selective"] < report.largest_by["full"]
    assert report.largest is not None
    setting = planner.setting.__class__(**{**vars(planner.setting), "micro_batch": report.largest})
    assert planner.plan(setting).fits(2**31, 0.9)
    larger = planner.setting.__class__(**{**vars(planner.setting), "micro_batch": round(report.largest * 1.02) + 1})
    assert not planner.plan(larger).fits(2**31, 0.9)
    assert report.fits is True
    assert report.changes == ()
    assert [plan.setting.strategy for plan in report.strategies] == ["single"]


@pytest.mark.slow
@pytest.mark.long
def test_planner_says_how_to_fit() -> None:
    settings = {"micro_batch": 8192, "global_batch": 32768}
    report = MemoryPlanner(config(training=settings), world_size=4).report(2**30)
    assert report.fits is False
    assert report.changes[0].overrides[0].startswith("training.micro_batch=")
    assert all(change.plan.fits(2**30, 0.9) for change in report.changes)
    assert [plan.setting.strategy for plan in report.strategies] == ["ddp", "zero1", "zero2", "zero3"]


@pytest.mark.slow
def test_packed_batches_are_planned_by_their_tokens() -> None:
    settings = config(data={"batching": "packed"}, training={"micro_batch": 2048, "global_batch": 2048})
    full = MemoryPlanner(settings).plan()
    half = MemoryPlanner(settings, tokens_per_sample=16).plan()
    assert half.activations < 0.6 * full.activations


def test_own_workload(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "planned_workload.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\n"
        "def build(config):\n"
        "    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 3))\n"
        "    data = TensorDataset(torch.randn(64, 16), torch.randint(3, (64,)))\n"
        "    return model, data, None\n"
    )
    settings = Config.model_validate(
        {"workload": "planned_workload:build", "training": {"global_batch": 8}, "gpu": {"device": "cpu"}}
    )
    planner = MemoryPlanner(settings)
    assert planner.checkpointing == ("off",)
    per_sample = planner.profile(planner.setting).per_sample_bytes
    assert per_sample == pytest.approx(256 * 4 + 3 * 4, rel=0.2)
    assert planner.plan().parameters == 4 * (17 * 256 + 257 * 3)
    assert dry_workload(planner.config).make_batch(5)[0].shape == (5, 16)


def test_dp_is_not_planned() -> None:
    with pytest.raises(ConfigError, match="dp is not planned"):
        MemoryPlanner(config(parallel={"strategy": "dp"}))


def test_memory_here() -> None:
    size, name = detect_memory("cpu")
    assert size is not None
    assert size > 2**20
    assert name
