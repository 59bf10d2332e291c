"""The Python names of the contract, each used as people use it, in one process on the CPU."""

from __future__ import annotations

import copy
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance_cases import classifier, data
from contract_entries import covers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import frameworm
from frameworm import GPUConfig, MemoryConfig, RunRecord, Trainer
from frameworm.distributed import (
    BottleneckAnalyzer,
    CudaDataLoader,
    DistributedTrainer,
    GradientCompressor,
    OptimizedDataLoader,
    PerformanceMonitor,
    PerformanceProfiler,
    benchmark_training_step,
    calculate_zero_savings,
    measure_optimization_effectiveness,
    profile_memory_usage,
)
from frameworm.errors import DeviceError, FramewormError, LossError, StateError

METRICS = ("data_loading_time", "forward_time", "backward_time", "optimizer_time", "communication_time", "total_time")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trainer(model: nn.Module | None = None, **settings: Any) -> Trainer:
    model = classifier() if model is None else model
    return Trainer(model, adamw(model), **{"run_dir": None, "device": "cpu", **settings})


@covers("Trainer", "Trainer.train", "RunRecord", "loss:cross-entropy")
def test_three_lines_train_a_classifier() -> None:
    result = trainer().train(DataLoader(data(), 8, shuffle=True), DataLoader(data(), 8), epochs=3)
    assert isinstance(result, RunRecord)
    assert result.status == "completed"
    assert result.quality.train_loss is not None
    assert result.quality.val_accuracy is not None
    assert result.throughput.samples_per_s
    assert result.phases
    assert isinstance(result.findings, list)


@covers("Trainer.loss_fn", "Trainer.scheduler", "Trainer.settings", "loss(output,target)")
def test_a_loss_a_scheduler_and_settings_by_name() -> None:
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    made = Trainer(
        model, optimizer, loss_fn=nn.CrossEntropyLoss(), scheduler=scheduler, clip_norm=1.0, run_dir=None, device="cpu"
    )
    assert made.config.training.clip_norm == 1.0
    assert made.train(DataLoader(data(), 8)).steps == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)


@covers("loss(model,batch)", "loss->(loss,count)")
def test_a_loss_that_calls_the_model_and_counts() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs), targets), len(inputs)

    assert trainer(loss_fn=loss_fn).train(DataLoader(data(), 8)).steps == 3


@covers("loss:model-scalar", "loss:model.loss")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_that_returns_its_loss(wrapped: bool) -> None:
    Output = namedtuple("Output", ["loss", "logits"])

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.inner(inputs)
            loss = nn.functional.cross_entropy(logits, labels)
            return Output(loss, logits) if wrapped else loss

    assert trainer(Own()).train(DataLoader(data(), 8)).steps == 3


@covers("loss:none-refused")
def test_without_any_loss_the_three_ways_are_shown() -> None:
    inputs = torch.randn(8, 6)
    with pytest.raises(LossError, match=r"loss_fn") as caught:
        trainer().train(DataLoader(TensorDataset(inputs, torch.randn(8, 3)), 4))
    assert isinstance(caught.value, FramewormError)


@covers("FramewormError")
def test_every_error_has_one_root() -> None:
    kinds = [kind for kind in vars(frameworm.errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 5
    assert all(issubclass(kind, FramewormError) for kind in kinds)


@covers("Trainer.enable_data_parallel")
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="asks for GPUs that are not there")
def test_data_parallel_asks_for_gpus_that_are_not_there() -> None:
    with pytest.raises(DeviceError, match="GPU"):
        trainer().enable_data_parallel(device_ids=[0, 1])


@covers("Trainer.enable_mixed_precision")
def test_mixed_precision_is_bf16_on_a_cpu() -> None:
    made = trainer()
    made.enable_mixed_precision()
    assert made.train(DataLoader(data(), 8)).precision == "bf16"


@pytest.mark.parametrize("name", ["use_amp", "enable_mixed_precision"])
def test_mixed_precision_by_a_keyword_of_other_trainers(name: str) -> None:
    with pytest.deprecated_call(match="enable_mixed_precision"):
        assert trainer(**{name: True}).config.gpu.mixed_precision == "bf16"
    with pytest.deprecated_call():
        assert trainer(**{name: False}).config.gpu.mixed_precision == trainer().config.gpu.mixed_precision


@pytest.mark.slow
@covers("Trainer.enable_gradient_checkpointing")
def test_gradient_checkpointing_leaves_the_numbers_as_they_are() -> None:
    class Block(nn.Sequential):
        pass

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Block(nn.Linear(6, 6), nn.ReLU()), Block(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 2))

    plain, recomputed = model(), model()
    trainer(plain).train(DataLoader(data(), 8))
    made = trainer(recomputed)
    made.enable_gradient_checkpointing()
    made.train(DataLoader(data(), 8))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True))


@pytest.mark.slow
@covers("Trainer.enable_compile")
def test_compiled_training_trains() -> None:
    made = trainer()
    made.enable_compile()
    result = made.train(DataLoader(data(), 8, drop_last=True))
    assert result.steps == 3


@covers("GPUConfig", "MemoryConfig")
def test_older_spellings_of_the_sections() -> None:
    gpu = GPUConfig(
        device_ids=[0, 1],
        memory_fraction=0.9,
        mixed_precision=True,
        compile_model=True,
        use_flash_attention=True,
        benchmark=True,
        deterministic=False,
    )
    memory = MemoryConfig(
        max_memory_percent=85.0,
        gc_threshold=70.0,
        monitoring_interval=30.0,
        enable_automatic_gc=True,
        cache_size_limit=2**30,
    )
    assert gpu.memory_fraction == 0.9
    made = trainer(memory=memory, gpu=GPUConfig(device="cpu", deterministic=False))
    assert made.train(DataLoader(data(), 8)).status == "completed"


@covers(
    "DistributedTrainer",
    "DistributedTrainer.backend",
    "DistributedTrainer.use_amp",
    "DistributedTrainer.gradient_accumulation_steps",
    "DistributedTrainer.find_unused_parameters",
    "global-batch",
)
def test_a_distributed_trainer_works_alone() -> None:
    model = classifier()
    made = DistributedTrainer(
        model,
        adamw(model),
        backend="auto",
        use_amp=True,
        gradient_accumulation_steps=2,
        find_unused_parameters=True,
        run_dir=None,
        device="cpu",
    )
    result = made.train(DataLoader(data(32), 8))
    assert result.precision == "bf16"
    batch = result.batch
    assert (batch.micro, batch.accumulation, batch.world_size, batch.global_) == (8, 2, 1, 16)


@covers("accumulation-equals-large-batch")
def test_accumulation_equals_one_large_batch_also_when_the_last_is_short() -> None:
    whole, parts = classifier(), classifier()
    Trainer(whole, torch.optim.SGD(whole.parameters(), lr=0.1), run_dir=None, device="cpu").train(
        DataLoader(data(22), 12)
    )
    made = Trainer(parts, torch.optim.SGD(parts.parameters(), lr=0.1), accumulation=3, run_dir=None, device="cpu")
    made.train(DataLoader(data(22), 4))
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@covers(
    "OptimizedDataLoader.create",
    "OptimizedDataLoader.num_workers",
    "OptimizedDataLoader.pin_memory",
    "OptimizedDataLoader.prefetch_factor",
    "OptimizedDataLoader.persistent_workers",
    "OptimizedDataLoader.drop_last",
    "OptimizedDataLoader.distributed",
    "OptimizedDataLoader.create_dataloader",
)
@pytest.mark.parametrize("make", [OptimizedDataLoader.create, OptimizedDataLoader.create_dataloader])
def test_a_loader_made_in_one_call(make: Any) -> None:
    loader = make(
        data(22),
        8,
        num_workers="auto",
        pin_memory="auto",
        prefetch_factor=2,
        persistent_workers="auto",
        drop_last=True,
        distributed="auto",
    )
    assert [len(inputs) for inputs, _ in loader] == [8, 8]
    measured = make(data(22), 8, num_workers="measure")
    assert sum(len(inputs) for inputs, _ in measured) == 22
    assert measured.measured


@covers("CudaDataLoader")
def test_nested_batches_pass_through_on_a_cpu() -> None:
    batches = [{"ids": torch.ones(2), "more": (torch.zeros(1), [torch.ones(3)])}]
    (found,) = CudaDataLoader(batches, torch.device("cpu"))
    assert torch.equal(found["more"][1][0], torch.ones(3))


@covers(
    "PerformanceProfiler.profile",
    "PerformanceProfiler.record_gpu_memory",
    "PerformanceProfiler.print_summary",
    "PerformanceProfiler.summary",
)
def test_named_scopes_nest(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = PerformanceProfiler()
    for _ in range(3):
        with profiler.profile("step"), profiler.profile("forward"):
            torch.ones(4).sum()
    profiler.record_gpu_memory()
    profiler.print_summary()
    assert "forward" in capsys.readouterr().out
    assert profiler.summary()


@covers(
    "PerformanceMonitor.start_step",
    "PerformanceMonitor.record_metric",
    "PerformanceMonitor.get_statistics",
    "PerformanceMonitor.print_summary",
    "PerformanceMonitor.metrics",
    "PerformanceMonitor.step_start_time",
)
def test_the_monitoring_loop_that_people_copy(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = PerformanceMonitor()
    for number in range(1, 5):
        monitor.start_step()
        for name in METRICS:
            monitor.record_metric(name, number / 100)
        assert monitor.step_start_time is not None
    statistics = monitor.get_statistics()
    assert set(METRICS) <= set(statistics)
    assert set(statistics["forward_time"]) == {"mean", "std", "min", "max", "p50", "p95", "p99"}
    assert len(monitor.metrics["forward_time"]) == 4
    monitor.print_summary()
    assert "forward" in capsys.readouterr().out


@pytest.mark.slow
@covers("BottleneckAnalyzer.analyze", "BottleneckAnalyzer:untouched")
def test_the_analyzer_tells_where_time_goes_and_touches_nothing() -> None:
    model = classifier()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    found = BottleneckAnalyzer(model, DataLoader(data(), 8), torch.device("cpu")).analyze()
    assert {"compute", "communication", "data_loading", "memory", "findings"} <= set(found)
    assert {"time_ms", "throughput"} <= set(found["compute"])
    assert {"time_ms", "bandwidth_gbps", "param_size_mb"} <= set(found["communication"])
    assert {"allocated_gb", "reserved_gb", "peak_gb", "total_gb", "usage_pct"} <= set(found["memory"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@covers(
    "GradientCompressor.compress_topk",
    "GradientCompressor.decompress_topk",
    "GradientCompressor.compress_quantize",
    "GradientCompressor.decompress_quantize",
)
def test_gradients_are_compressed_and_restored() -> None:
    compressor = GradientCompressor(compression_ratio=0.1)
    gradient = torch.randn(20, 10)
    packed = compressor.compress_topk(gradient)
    assert {"values", "indices", "shape", "compression_ratio"} <= set(packed)
    assert int((compressor.decompress_topk(packed) != 0).sum()) == 20
    for bits, tolerance in ((8, 0.05), (4, 0.6)):
        coded = compressor.compress_quantize(gradient, num_bits=bits)
        assert {"quantized", "min_val", "max_val", "scale", "shape"} <= set(coded)
        torch.testing.assert_close(compressor.decompress_quantize(coded), gradient, atol=tolerance, rtol=0)
    four = compressor.compress_quantize(gradient, num_bits=4)["quantized"]
    assert four.numel() * four.element_size() == 100


@covers("calculate_zero_savings")
def test_the_published_savings_of_zero() -> None:
    text = repr(calculate_zero_savings(175e9, 64))
    for figure in ("2800", "1421.875", "732.8125", "43.75"):
        assert figure in text or figure.replace(".", "") in text.replace(".", "")


@covers("benchmark_training_step", "profile_memory_usage", "measure_optimization_effectiveness")
def test_the_small_helpers(tmp_path: Path) -> None:
    model = classifier()
    assert benchmark_training_step(model, next(iter(DataLoader(data(), 8))))
    assert profile_memory_usage(model, next(iter(DataLoader(data(), 8))))
    assert callable(measure_optimization_effectiveness)


@covers("zero:state-refused")
def test_an_optimizer_that_holds_state_is_refused_under_zero() -> None:
    model = classifier()
    optimizer = adamw(model)
    Trainer(model, optimizer, run_dir=None, device="cpu").train(DataLoader(data(), 8))
    with pytest.raises(StateError, match="new one"):
        Trainer(model, optimizer, strategy="zero1", run_dir=None, device="cpu").train(DataLoader(data(), 8))
