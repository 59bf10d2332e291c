"""Remedies for scripts: in the framework's words, with options that its installed version has, and none of ours."""

from __future__ import annotations

import re
from typing import Any

import pytest
from planted_facts import COMPUTE, gpu_system, make_record, make_steps
from test_diagnose_rules import CASES, GPU

from frameworm.config.schema import Config
from frameworm.diagnose.rules.judge import CODES, judge
from frameworm.diagnose.rules.wording import WORDS, options_named, say
from frameworm.records.observations import Framework
from frameworm.records.schema import Finding

ARGUMENTS = {
    "transformers": "TrainingArguments",
    "trl": "SFTConfig",
    "lightning": "Trainer",
    "fabric": "Fabric",
    "accelerate": "Accelerator",
}
# A package of which nothing is known beside that its loop runs.
NAMES = ("torch", *ARGUMENTS, "fastai")


def framework(name: str, without: tuple[str, ...] = (), **options: Any) -> Framework:
    """A framework whose installed version has all options that any remedy names, but for some."""
    every = {key: options.get(key) for key in options_named(name) if key not in without}
    return Framework(name, "1.0", "Loop", ARGUMENTS.get(name), every, "AdamW")


def own_keys() -> list[str]:
    return [
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {})
    ]


def judged(code: str, name: str | None, **fields: Any) -> Finding:
    case = {**CASES[code][0], **fields}
    world_size, baseline = case.pop("world_size", 1), case.pop("baseline", None)
    steps = make_steps({**COMPUTE, **case.pop("phases", {})}, **case.pop("steps_args", {}))
    trace, _ = case.pop("trace", None), case.pop("config", None)
    case.setdefault("framework", None if name is None else framework(name))
    record = make_record(steps, case.pop("device", "cpu"), world_size, source="attached", **case)
    findings = judge(record, steps=steps, trace=trace, baseline=baseline).findings
    return next(finding for finding in findings if finding.code == code)


def told(finding: Finding) -> dict[str, str]:
    return {remedy.knob: remedy.text for remedy in finding.remedies}


def test_there_are_keys_to_look_for() -> None:
    assert {"gpu.capture", "data.num_workers", "training.micro_batch"} <= set(own_keys())


@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("code", CODES)
def test_no_script_is_told_of_our_settings(code: str, name: str | None) -> None:
    finding = judged(code, name)
    if code not in ("compute_bound", "memory_underused"):
        assert finding.remedies, "a fault that a script can do something about has a remedy in its words"
    for remedy in finding.remedies:
        assert remedy.text
        assert "{" not in remedy.text.replace('{"non_blocking": True}', "")
        assert not [key for key in own_keys() if re.search(rf"\b{re.escape(key)}\b", remedy.text)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", WORDS)
def test_all_words_can_be_said(key: str, name: str) -> None:
    text = say(framework(name), key, 4)
    assert not [own for own in own_keys() if own in text]
    if key not in ("loss_filter", "checkpoint.mode", "parallel.compression", "parallel.strategy:zero2"):
        assert text


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (None, 'torch.autocast("cuda", torch.bfloat16)'),
        ("torch", 'torch.autocast("cuda", torch.bfloat16)'),
        ("fastai", 'torch.autocast("cuda", torch.bfloat16)'),
        ("transformers", "TrainingArguments(bf16=True)"),
        ("trl", "SFTConfig(bf16=True)"),
        ("lightning", 'Trainer(precision="bf16-mixed")'),
        ("fabric", 'Fabric(precision="bf16-mixed")'),
        ("accelerate", 'Accelerator(mixed_precision="bf16")'),
    ],
)
def test_precision_in_the_words_of_each_framework(name: str | None, line: str) -> None:
    assert line in told(judged("precision_unused", name))["gpu.mixed_precision"]


@pytest.mark.parametrize(
    ("strategy", "name", "knob", "line"),
    [
        ("ddp", "torch", "parallel.compression", "register_comm_hook"),
        ("fsdp2", "torch", "parallel.compression", "reduce_dtype=torch.bfloat16"),
        ("fsdp2", "torch", "parallel.strategy", "reshard_after_forward=False"),
        ("fsdp", "torch", "parallel.strategy", "SHARD_GRAD_OP"),
        ("fsdp2", "torch", "training.global_batch", "set_requires_gradient_sync"),
        ("fsdp2", "accelerate", "parallel.compression", None),
        ("ddp", "torch", "parallel.strategy", None),
        (None, "torch", "parallel.compression", None),
        (None, "torch", "training.global_batch", None),
    ],
)
def test_communication_has_remedies_for_what_the_script_sends(
    strategy: str | None, name: str, knob: str, line: str | None
) -> None:
    found = told(judged("communication_bound", name, strategy=strategy))
    assert (knob in found) == (line is not None)
    assert line is None or line in found[knob]


@pytest.mark.parametrize(
    ("strategy", "name", "line"),
    [
        ("fsdp", "torch", "FullyShardedDataParallel(..., mixed_precision="),
        ("fsdp2", "torch", "fully_shard(..., mp_policy="),
        ("ddp", "torch", "torch.autocast("),
        ("fsdp2", "accelerate", "Accelerator(mixed_precision="),
    ],
)
def test_a_sharded_model_has_a_precision_of_its_own(strategy: str, name: str, line: str) -> None:
    assert line in told(judged("precision_unused", name, strategy=strategy))["gpu.mixed_precision"]


def test_workers_launches_and_the_optimizer_in_a_plain_script_and_under_trainer() -> None:
    waiting = {"phases": {"data_wait": 0.06}}
    assert "DataLoader(..., num_workers=4)" in told(judged("input_bound", "torch", **waiting))["data.num_workers"]
    assert (
        told(judged("input_bound", "transformers", **waiting))["data.num_workers"]
        == "TrainingArguments(dataloader_num_workers=4)"
    )
    plain, trainer = told(judged("host_bound", "torch")), told(judged("host_bound", "transformers"))
    assert 'torch.compile(model, mode="reduce-overhead")' in plain["gpu.capture"]
    assert "AdamW(..., fused=True)" in plain["gpu.fused_optimizer"]
    assert 'torch_compile=True, torch_compile_mode="reduce-overhead"' in trainer["gpu.capture"]
    assert 'TrainingArguments(optim="adamw_torch_fused")' in trainer["gpu.fused_optimizer"]


def test_another_optimizer_is_not_swapped_for_adamw() -> None:
    found = framework("transformers")
    found.unfused_optimizer = "SGD"
    assert told(judged("host_bound", None, framework=found))["gpu.fused_optimizer"].startswith("SGD(..., fused=True)")


@pytest.mark.parametrize(
    ("without", "line"),
    [
        ((), 'TrainingArguments(train_sampling_strategy="group_by_length")'),
        (("train_sampling_strategy",), "TrainingArguments(group_by_length=True)"),
        (("train_sampling_strategy", "group_by_length"), "DataLoader(..., batch_sampler="),
    ],
)
def test_only_options_of_the_installed_version_are_named(without: tuple[str, ...], line: str) -> None:
    assert line in say(framework("transformers", without), "data.batching", "bucketed")


def test_what_is_set_already_is_not_advised() -> None:
    assert say(framework("transformers", bf16=True), "gpu.mixed_precision", "bf16") == ""
    assert say(framework("transformers", bf16=False), "gpu.mixed_precision", "bf16") != ""
    half = framework("transformers", torch_compile=True)  # but in another mode
    assert say(half, "gpu.capture", "auto") != ""
    assert say(half, "gpu.compile_model", True) == ""


def test_accumulation_doubles_from_what_it_is() -> None:
    text = say(framework("transformers"), "training.global_batch", 64, accumulation=3)
    assert "gradient_accumulation_steps=6" in text


def test_a_mangled_record_is_no_call() -> None:
    strange = Framework("transformers", arguments="x y", options={"bf16": None})
    assert "autocast" in say(strange, "gpu.mixed_precision", "bf16")


def padded(name: str, beyond: float, device: str = "cpu") -> list[str]:
    """What is said of batches that are half padding, of which a part lies beyond their longest sample."""
    metrics = {"padding_tokens": 500.0, "padding_beyond_longest": beyond * 500.0}
    finding = judged(
        "padding_waste", name, device=device, system=gpu_system(), steps_args={"metrics": metrics}, padding_waste=0.5
    )
    assert finding.evidence["padding_beyond_longest_share"] == pytest.approx(0.5 * beyond)
    return [remedy.text for remedy in finding.remedies]


def test_padding_by_what_causes_it() -> None:
    unlike = padded("transformers", 0.0)
    assert len(unlike) == 1
    assert "group_by_length" in unlike[0]
    to_one_length = padded("transformers", 0.9)
    assert "DataCollatorWithPadding" in to_one_length[0]
    both = padded("torch", 0.2)
    assert "batch_sampler" in both[0]
    assert "longest" in both[1]


def test_packing_is_advised_on_a_gpu_in_the_words_of_trl() -> None:
    assert "SFTConfig(packing=True)" in padded("trl", 0.0, GPU)[1]
    assert "packing" not in " ".join(padded("trl", 0.0))
    assert "DataCollatorWithFlattening" in padded("transformers", 0.0, GPU)[1]
