"""The checklist of configs on fake machines, and its figures against the files they are from."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frameworm.config.load import load_config_from_mapping
from frameworm.config.resolve import resolve
from frameworm.diagnose.checklist import device as checklist_device
from frameworm.diagnose.checklist import known_gains
from frameworm.diagnose.checklist.checklist import Subject, check_config
from frameworm.diagnose.rules.judge import CODES
from frameworm.models.causal_attention import fits_causal_kernels
from frameworm.records.machine import ChecklistItem, GpuFacts, Intent, MachineFacts, PlanFacts, StorageFacts

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
GPU = GpuFacts("NVIDIA H200", memory_bytes=140 * 2**30, capability=9.0, nvlinks=18)
MACHINE = MachineFacts(gpus=(GPU,), cpus_usable=16, torch_threads=16)
TEXT = {"data": {"dataset": "ag_news", "root": "x"}}
GPT = {"workload": "gpt", "data": {"dataset": "text", "root": "x"}}
OWN = {"workload": "package.module:function"}
PLAN = PlanFacts(1_000_000, 4_000_000, 12_000_000, 2**30, 2**37, True)


def checked(
    values: dict[str, Any],
    settings: tuple[str, ...] = (),
    facts: MachineFacts = MACHINE,
    world_size: int = 1,
    plan: PlanFacts | None = PLAN,
    nodes: int = 1,
) -> dict[str, ChecklistItem]:
    config = load_config_from_mapping(values, settings, environ={})
    device = "cuda" if facts.gpus else "cpu"
    resolved = resolve(config, world_size=world_size, device=device, bf16=True)
    intent = Intent(processes=world_size // nodes, nodes=nodes, on_gpu=resolved.gpu.device == "cuda")
    items = check_config(Subject(config, resolved, facts, intent, plan))
    found = {item.name: item for item in items}
    assert len(found) == len(items)
    for item in items:
        assert item.reason
        assert (item.gain is None) == (item.state != "not done"), item
    return found


CPU = replace(MACHINE, gpus=())
OLD = replace(MACHINE, gpus=(replace(GPU, capability=7.5),))
LINKED = replace(MACHINE, gpus=(GPU, GPU, GPU, GPU))
SLOW = replace(MACHINE, gpus=(replace(GPU, nvlinks=0),) * 4)

# item, values, settings, state, words of the reason or of what to set, further arguments
CASES: list[tuple[str, dict[str, Any], tuple[str, ...], str, str, dict[str, Any]]] = [
    ("deterministic mode off", TEXT, (), "done", "off", {}),
    ("deterministic mode off", TEXT, ("gpu.deterministic=true",), "not done", "gpu.deterministic=false", {}),
    ("nothing left from debugging", TEXT, (), "done", "no trace", {}),
    ("nothing left from debugging", TEXT, ("observe.trace=window",), "not done", "observe.trace=off", {}),
    ("nothing left from debugging", TEXT, ("observe.nvtx=true",), "not done", "observe.nvtx=false", {}),
    ("nothing left from debugging", TEXT, ("parallel.check_replicas=9",), "not done", "check_replicas=off", {}),
    ("nothing left from debugging", TEXT, ("data.limit=100",), "not done", "data.limit=off", {}),
    ("no padding", TEXT, ("data.shuffle=false",), "does not apply", "shuffle", {}),
    ("no padding", TEXT, (), "not done", "data.batching=packed", {}),
    ("no padding", TEXT, (), "not done", "data.batching=bucketed", {"facts": CPU}),
    ("no padding", TEXT, ("data.batching=packed",), "done", "packed", {}),
    ("no padding", GPT, (), "does not apply", "fills the context", {}),
    ("no padding", OWN, (), "does not apply", "of your own", {}),
    ("data kept on the GPU", TEXT, (), "does not apply", "packed", {}),
    ("data kept on the GPU", TEXT, ("data.batching=packed",), "done", "auto", {}),
    ("data kept on the GPU", TEXT, ("data.batching=packed", "data.resident=false"), "not done", "resident=auto", {}),
    ("data kept on the GPU", TEXT, ("data.batching=packed",), "does not apply", "no GPU", {"facts": CPU}),
    ("loader processes", TEXT, (), "done", "auto", {}),
    ("loader processes", TEXT, ("data.num_workers=64",), "not done", "data.num_workers=15", {}),
    ("loader processes", OWN, ("data.num_workers=0",), "not done", "measure", {}),
    ("loader processes", TEXT, ("data.num_workers=0",), "done", "without them", {}),
    ("pinned batches", TEXT, (), "done", "fetches", {}),
    ("pinned batches", TEXT, ("data.pin_memory=false",), "not done", "data.pin_memory=auto", {}),
    ("pinned batches", TEXT, (), "does not apply", "CPU", {"facts": CPU}),
    ("mixed precision", TEXT, (), "done", "bf16", {}),
    ("mixed precision", TEXT, ("gpu.mixed_precision=off",), "not done", "gpu.mixed_precision=auto", {}),
    ("mixed precision", TEXT, (), "does not apply", "CPU", {"facts": CPU}),
    ("TF32 for what is left in fp32", TEXT, (), "done", "on", {}),
    ("TF32 for what is left in fp32", TEXT, ("gpu.tf32=false",), "not done", "gpu.tf32=true", {}),
    ("TF32 for what is left in fp32", TEXT, (), "does not apply", "only GPUs", {"facts": CPU}),
    ("TF32 for what is left in fp32", TEXT, (), "does not apply", "7.5", {"facts": OLD}),
    ("TF32 for what is left in fp32", TEXT, ("gpu.deterministic=true",), "does not apply", "wins over", {}),
    ("attention kernels", TEXT, (), "does not apply", "of a GPU", {"facts": CPU}),
    ("attention kernels", OWN, (), "done", "scaled_dot_product_attention", {}),
    ("fused loss", GPT, (), "does not apply", "on a GPU", {"facts": CPU}),
    ("whole step as one CUDA graph", TEXT, ("gpu.deterministic=true",), "does not apply", "by the clock", {}),
    (
        "as many threads as cores",
        TEXT,
        (),
        "does not apply",
        "not known",
        {"facts": replace(MACHINE, cpus_usable=None)},
    ),
    ("attention kernels", GPT, (), "done", "our own", {}),
    ("attention kernels", GPT, ("model.n_heads=6",), "not done", "gpu.use_flash_attention=cudnn", {}),
    (
        "attention kernels",
        GPT,
        ("model.max_seq_len=1000",),
        "done",
        "9",
        {"facts": replace(MACHINE, gpus=(replace(GPU, capability=8.0),))},
    ),
    ("attention kernels", TEXT, (), "done", "auto", {}),
    ("attention kernels", TEXT, ("gpu.use_flash_attention=false",), "not done", "attention=auto", {}),
    ("fused loss", GPT, ("model.fused_loss=false",), "not done", "model.fused_loss=auto", {}),
    ("fused loss", GPT, ("model.vocab_size=50304",), "done", "auto", {}),
    ("fused loss", GPT, ("model.vocab_size=256",), "does not apply", "256 words", {}),
    ("half-precision residual stream", GPT, (), "not done", "model.residual=half", {}),
    ("half-precision residual stream", GPT, ("model.residual=half",), "done", "half", {}),
    ("half-precision residual stream", GPT, ("gpu.mixed_precision=off",), "does not apply", "no half", {}),
    ("compiled model", TEXT, (), "not done", "gpu.compile_model=true", {}),
    ("compiled model", TEXT, ("gpu.compile_model=true",), "done", "default", {}),
    ("compiled model", GPT, ("parallel.strategy=zero3",), "does not apply", "zero3", {"world_size": 4}),
    ("whole step as one CUDA graph", TEXT, (), "not done", "gpu.capture=auto", {}),
    ("whole step as one CUDA graph", TEXT, ("gpu.capture=step",), "done", "step", {}),
    ("whole step as one CUDA graph", TEXT, (), "does not apply", "between processes", {"world_size": 4}),
    ("whole step as one CUDA graph", TEXT, (), "does not apply", "no GPU", {"facts": CPU}),
    ("fused optimizer", TEXT, (), "done", "one kernel", {}),
    ("fused optimizer", TEXT, ("gpu.fused_optimizer=false",), "not done", "fused_optimizer=auto", {}),
    ("micro-batch against the memory plan", TEXT, (), "done", "one pass", {}),
    ("micro-batch against the memory plan", TEXT, (), "does not apply", "no plan", {"plan": None}),
    ("micro-batch against the memory plan", TEXT, (), "not done", "do not fit", {"plan": replace(PLAN, fits=False)}),
    (
        "micro-batch against the memory plan",
        TEXT,
        ("training.global_batch=64", "training.micro_batch=4"),
        "not done",
        "training.micro_batch=32",
        {"plan": replace(PLAN, largest={"off": 40})},
    ),
    (
        "micro-batch against the memory plan",
        TEXT,
        ("training.global_batch=64", "training.micro_batch=4"),
        "done",
        "16 passes of 4",
        {"plan": replace(PLAN, largest={"off": 7})},
    ),
    (
        "no needless recomputing",
        TEXT,
        ("memory.activation_checkpointing=full",),
        "not done",
        "memory.activation_checkpointing=off",
        {"plan": replace(PLAN, largest={"off": 32})},
    ),
    (
        "no needless recomputing",
        TEXT,
        ("memory.activation_checkpointing=full",),
        "done",
        "only 31 samples",
        {"plan": replace(PLAN, largest={"off": 31})},
    ),
    ("enough work per rank", TEXT, (), "not done", "training.global_batch=128", {"world_size": 4}),
    ("enough work per rank", TEXT, ("training.global_batch=1024",), "done", "256 samples", {"world_size": 4}),
    ("enough work per rank", TEXT, (), "does not apply", "one process", {}),
    ("no more divided than needed", GPT, (), "done", "ddp", {"world_size": 4}),
    (
        "no more divided than needed",
        GPT,
        ("parallel.strategy=zero3",),
        "not done",
        "parallel.strategy=ddp",
        {"world_size": 4, "plan": replace(PLAN, ddp_fits=True)},
    ),
    (
        "no more divided than needed",
        GPT,
        ("parallel.strategy=zero3",),
        "done",
        "does not fit",
        {"world_size": 4, "plan": replace(PLAN, ddp_fits=False)},
    ),
    (
        "buckets that overlap with backward",
        TEXT,
        (),
        "not done",
        "parallel.bucket_cap_mb=5",
        {"world_size": 4, "plan": replace(PLAN, parameter_bytes=40 * 2**20)},
    ),
    (
        "buckets that overlap with backward",
        TEXT,
        (),
        "done",
        "400.0 MiB",
        {"world_size": 4, "plan": replace(PLAN, parameter_bytes=400 * 2**20)},
    ),
    (
        "buckets that overlap with backward",
        GPT,
        ("parallel.strategy=zero2",),
        "does not apply",
        "zero2",
        {"world_size": 4},
    ),
    ("compressed gradients", GPT, ("parallel.strategy=zero3",), "does not apply", "zero3", {"world_size": 4}),
    ("compressed gradients", TEXT, ("parallel.sync_every=4",), "does not apply", "averaged", {"world_size": 4}),
    ("no more divided than needed", GPT, ("parallel.strategy=zero3",), "done", "not known", {"world_size": 4}),
    ("buckets that overlap with backward", TEXT, (), "done", "not known", {"world_size": 4, "plan": None}),
    (
        "buckets that overlap with backward",
        TEXT,
        ("parallel.bucket_cap_mb=1",),
        "done",
        "3.0 MiB",
        {"world_size": 4, "plan": replace(PLAN, parameter_bytes=3 * 2**20)},
    ),
    (
        "buckets that overlap with backward",
        TEXT,
        (),
        "done",
        "125.0 MiB",
        {"world_size": 4, "plan": replace(PLAN, parameter_bytes=125 * 2**20)},
    ),
    ("no needless recomputing", TEXT, ("memory.activation_checkpointing=full",), "done", "not known", {}),
    ("compressed gradients", TEXT, (), "does not apply", "NVLink", {"world_size": 4, "facts": LINKED}),
    ("compressed gradients", TEXT, (), "not done", "parallel.compression=auto", {"world_size": 4, "facts": SLOW}),
    ("compressed gradients", TEXT, (), "not done", "=auto", {"world_size": 8, "nodes": 2, "facts": LINKED}),
    ("compressed gradients", TEXT, ("parallel.compression=int8",), "done", "int8", {"world_size": 4}),
    ("no search for unused parameters", TEXT, (), "done", "off", {"world_size": 4}),
    (
        "no search for unused parameters",
        TEXT,
        ("parallel.find_unused_parameters=true",),
        "not done",
        "parallel.find_unused_parameters=false",
        {"world_size": 4},
    ),
    ("checkpoints beside training", TEXT, (), "done", "async", {}),
    ("checkpoints beside training", TEXT, ("checkpoint.mode=sync",), "not done", "checkpoint.mode=async", {}),
    ("as many threads as cores", TEXT, (), "done", "auto", {}),
    ("as many threads as cores", TEXT, ("training.cpu_threads=9",), "not done", "cpu_threads=4", {"world_size": 4}),
    ("as many threads as cores", TEXT, (), "not done", "cpu_threads=2", {"facts": replace(MACHINE, cpus_usable=2)}),
    ("garbage collected between steps", TEXT, (), "done", "enable_automatic_gc", {}),
    ("garbage collected between steps", TEXT, ("memory.enable_automatic_gc=false",), "not done", "gc=true", {}),
]


@pytest.mark.parametrize(
    ("name", "values", "settings", "state", "words", "more"),
    CASES,
    ids=[f"{i}-{c[0]}-{c[3]}" for i, c in enumerate(CASES)],
)
def test_items(
    name: str, values: dict[str, Any], settings: tuple[str, ...], state: str, words: str, more: dict[str, Any]
) -> None:
    item = checked(values, settings, **more)[name]
    assert item.state == state, item
    assert words in (" ".join(item.settings) if item.settings else item.reason), item


def test_every_item_is_seen_done_and_not_done() -> None:
    names = set(checked(TEXT))
    for state in ("done", "not done"):
        assert {case[0] for case in CASES if case[3] == state} == names


def test_what_to_set_is_accepted_and_then_done() -> None:
    """Following the advice makes the item done, and no advice is refused by the config."""
    for name, values, settings, state, _, more in CASES:
        if state != "not done":
            continue
        item = checked(values, settings, **more)[name]
        if not item.settings:
            continue
        after = checked(values, (*settings, *item.settings), **more)[name]
        if name == "enough work per rank":  # one step of several
            continue
        assert after.state != "not done", (name, item.settings, after)


def test_knobs_findings_and_sources_exist() -> None:
    from frameworm.tune.knobs.registry import all_knobs

    knobs = {knob.name for knob in all_knobs()}
    for name, values, settings, _, _, more in CASES:
        item = checked(values, settings, **more)[name]
        assert item.knob is None or item.knob in knobs, item
        assert item.finding is None or item.finding in CODES, item
        if item.gain is not None:
            path = item.gain.source.partition("#")[0]
            assert list(ROOT.glob(path)), item.gain
            assert item.gain.basis != "measured" or path.startswith("benchmarks/results/"), item.gain


def test_checkpoint_stall_is_modelled_from_the_measured_disk() -> None:
    facts = replace(MACHINE, storage=StorageFacts("runs", True, write_bytes_per_s=1e6))
    gain = checked(TEXT, ("checkpoint.mode=sync",), facts)["checkpoints beside training"].gain
    assert gain is not None
    assert gain.basis == "modelled"
    assert "12 s per checkpoint" in gain.text


def test_gains_are_of_the_case_at_hand() -> None:
    recomputed = {"plan": replace(PLAN, largest={"off": 32})}
    name = "no needless recomputing"
    full = checked(TEXT, ("memory.activation_checkpointing=full",), **recomputed)[name].gain
    selective = checked(TEXT, ("memory.activation_checkpointing=selective",), **recomputed)[name].gain
    assert full is not None
    assert selective is not None
    assert (full.basis, selective.basis) == ("modelled", "unknown")
    capture = "whole step as one CUDA graph"
    by_workload = [checked(values)[capture].gain for values in (TEXT, GPT, OWN)]
    assert [gain and gain.value for gain in by_workload] == [20.5, known_gains.GPT_FAST.value, None]
    assert "tune also tries packed" in checked(TEXT, facts=CPU)["no padding"].reason
    assert "tune also tries packed" not in checked(TEXT)["no padding"].reason


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


@pytest.mark.parametrize(("file", "ratio"), known_gains.CAPTURE.values(), ids=lambda value: str(value))
def test_capture_gains_are_those_of_the_files(file: str, ratio: known_gains.Ratio) -> None:
    (case,) = results(f"{file}-nvidia-h200").values()
    found = case["contenders"]
    plain, captured = (found[name]["rounds"] for name in ("own-plain", "own-captured"))
    ratios = [one["step_s"] / other["step_s"] for one, other in zip(plain, captured)]
    assert tuple(ratio) == pytest.approx((statistics.median(ratios), min(ratios), max(ratios)), abs=0.06)


@pytest.mark.parametrize("key", known_gains.PADDING)
def test_padding_is_that_of_the_file(key: tuple[str, int, int]) -> None:
    dataset, longest, batch = key
    found = results("padding_waste-cpu")["ag_news_optimized" if (dataset, longest) == ("ag_news", 256) else dataset]
    padded, packed, bucketed = (found[f"{kind}, batch {batch}"] for kind in ("padded", "packed", "bucketed"))
    expected = (
        padded["waste"],
        padded["computed_tokens"] / packed["computed_tokens"],
        padded["computed_tokens"] / bucketed["computed_tokens"],
    )
    assert known_gains.PADDING[key] == pytest.approx(expected, abs=0.006)


def test_gpt_has_kernels_of_its_own_for_these_sizes() -> None:
    for width in (16, 32, 48, 64, 128):
        for length in (64, 128, 1000, 1024):
            listed = width in checklist_device.OWN_WIDTHS and length % checklist_device.OWN_LENGTHS == 0
            assert listed == fits_causal_kernels(width, length)


def test_other_gains_are_those_of_the_files() -> None:
    rates = results("compression_network-cpu")["rates"]
    for rate, gain in known_gains.COMPRESSION.items():
        methods = rates[rate]["methods"]
        assert gain == pytest.approx(methods["off"]["step_s"]["value"] / methods["auto"]["step_s"]["value"], abs=0.006)
    fast = results("gpt_mfu-nvidia-h200")["micro_batches"]["128"]["contenders"]["frameworm"]["times_as_fast_as_plain"]
    assert tuple(known_gains.GPT_FAST) == pytest.approx((fast["value"], fast["low"], fast["high"]), abs=0.006)
    kept = results("gc_jitter-cpu")["records kept"]
    gain = checked(TEXT, ("memory.enable_automatic_gc=false",))["garbage collected between steps"].gain
    assert gain is not None
    for way in ("python's own way", "heap set aside"):
        assert f"{int(kept[way]['thread']['max_ms'])} ms" in gain.text
    unlimited = results("compression_network-unlimited-cpu")["rates"]["unlimited"]["methods"]
    ratios = [a / b for a, b in zip(unlimited["auto"]["rounds"], unlimited["off"]["rounds"])]
    assert statistics.median(ratios) == pytest.approx(known_gains.COMPRESSION_COST, abs=0.002)


def test_a_model_that_was_not_measured_gets_no_figure_of_its_own() -> None:
    gain = checked({"data": {"dataset": "generated"}})["whole step as one CUDA graph"].gain
    assert gain is not None
    assert gain.value is None
    assert "yours was not measured" in gain.text
    assert checked({"data": {"dataset": "generated"}})["no padding"].gain.basis == "unknown"  # type: ignore[union-attr]
