"""The entries of the contract: every name, keyword, command, key and file that users and checks rely on.

A test says with `covers` which entries it uses; `test_conformance_count.py` checks that none is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def _words(text: str) -> list[str]:
    return text.split()


PYTHON = _words("""
Trainer GPUConfig MemoryConfig Trainer.loss_fn Trainer.scheduler Trainer.settings Trainer.enable_data_parallel
Trainer.enable_mixed_precision Trainer.enable_gradient_checkpointing Trainer.enable_compile Trainer.train RunRecord
loss(output,target) loss(model,batch) loss->(loss,count) loss:model-scalar loss:model.loss loss:cross-entropy
loss:none-refused
DistributedTrainer DistributedTrainer.backend DistributedTrainer.use_amp
DistributedTrainer.gradient_accumulation_steps DistributedTrainer.find_unused_parameters
DDPTrainer DDPTrainer.train DDPTrainer.cleanup setup_ddp cleanup plain-loader-is-split global-batch
accumulation-equals-large-batch
OptimizedDataLoader.create OptimizedDataLoader.num_workers OptimizedDataLoader.pin_memory
OptimizedDataLoader.prefetch_factor OptimizedDataLoader.persistent_workers OptimizedDataLoader.drop_last
OptimizedDataLoader.distributed OptimizedDataLoader.create_dataloader CudaDataLoader
PerformanceProfiler.profile PerformanceProfiler.record_gpu_memory PerformanceProfiler.print_summary
PerformanceProfiler.summary
PerformanceMonitor.start_step PerformanceMonitor.record_metric PerformanceMonitor.get_statistics
PerformanceMonitor.print_summary PerformanceMonitor.metrics PerformanceMonitor.step_start_time
BottleneckAnalyzer.analyze BottleneckAnalyzer:untouched
GradientCompressor.compress_topk GradientCompressor.decompress_topk GradientCompressor.compress_quantize
GradientCompressor.decompress_quantize enable_gradient_compression CompressedDDP
CompressedDDP.backward_with_compression ZeROStage1Optimizer zero1 zero2 zero3 zero:state-refused
calculate_zero_savings find_optimal_batch_size benchmark_training_step profile_memory_usage
measure_optimization_effectiveness FramewormError
api.tune api.profile api.diagnose api.compare api.predict api.plan_memory
""")

COMMANDS = _words("""
train profile diagnose tune batch-size scale predict network memory slurm report compare guard doctor runs evaluate
export watch exit-0 exit-1 exit-2 exit-3 --json --help --set --out --resume
""")

CONFIG_KEYS = _words("""
name seed workload model.d_model model.n_heads model.num_layers model.dim_feedforward model.max_seq_len model.dropout
model.init_from data.dataset data.root data.num_workers data.batching data.tokenizer training.epochs
training.global_batch training.micro_batch training.batch_size training.optimizer training.lr training.schedule
training.clip_norm training.lr_scaling training.early_stop gpu.mixed_precision gpu.compile_model
gpu.use_flash_attention gpu.benchmark gpu.deterministic gpu.memory_fraction gpu.capture gpu.tf32
memory.activation_checkpointing memory.max_memory_percent memory.gc_threshold memory.monitoring_interval
memory.enable_automatic_gc memory.cache_size_limit parallel.strategy parallel.backend parallel.compression
parallel.bucket_cap_mb parallel.static_graph checkpoint.every_steps checkpoint.keep checkpoint.mode observe.sinks
observe.trace FRAMEWORM_* unknown-key wrong-type impossible-combination
""")

RUN_FILES = _words("""
config.yaml steps-rank0.jsonl epochs.csv summary.json summary.txt report.html checkpoints checkpoints/latest
summary.schema_version summary.status summary.environment summary.batch summary.throughput summary.phases
summary.communication summary.memory summary.mfu summary.padding_waste summary.quality summary.checkpoint
summary.verdict summary.findings phases-add-up finding-fields
{dataset}_epoch_time_detailed.png {dataset}_speedup_efficiency.png {dataset}_throughput.png {dataset}_accuracy.png
comprehensive_summary.csv summary_table.tex performance_report.txt scaling/report.html
plot_comprehensive_analysis.py
""")

ENTRIES = frozenset([*PYTHON, *COMMANDS, *CONFIG_KEYS, *RUN_FILES])


def covers(*entries: str) -> Callable[[Function], Function]:
    """Mark a test with the entries of the contract that it uses."""
    unknown = [entry for entry in entries if entry not in ENTRIES]
    if unknown:
        raise ValueError(f"not in the contract: {', '.join(unknown)}")

    def mark(function: Function) -> Function:
        function.__dict__["covered"] = frozenset(entries)
        return function

    return mark
