"""How remedies are worded for a script: frameworm's settings in the terms of the framework that runs the loop.

`WORDS` is the only place that knows these terms. A call is offered only if the installed version accepts its options,
which the observation has stored in the record, and only if they are not already set that way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from frameworm.records.observations import Framework

TORCH, FSDP, FSDP2 = "torch", "fsdp", "fsdp2"
SHARDED = (FSDP, FSDP2)
TRANSFORMERS, TRL, LIGHTNING, FABRIC, ACCELERATE = "transformers", "trl", "lightning", "fabric", "accelerate"
# Fallbacks after a framework's own terms; a plain or unknown loop gets torch's.
_AFTER: dict[str, tuple[str, ...]] = {TRL: (TRANSFORMERS, TORCH), TORCH: ()}
# These frameworks make the loader and place the model themselves, so torch's lines for that do not apply.
_OWN_TERMS = (TRANSFORMERS, TRL, LIGHTNING, FABRIC, ACCELERATE)
_CHECKED = "{arguments}("  # starts a call whose options are checked


class Call(NamedTuple):
    """A line to write, and its effect if the line does not show it; `{arguments}` is the class of the options."""

    code: str
    why: str = ""


Words = str | Call | tuple[Call, ...]  # of several calls, the first that the installed version supports

_LARGER = "more work per launch; change lr to match"
_HALVED = "the same step in half the activations"
_GRAPHS = "replays the model's kernels as CUDA graphs, without launching each"
_KERNELS = "fewer, larger kernels"
_GATHERED_ONCE = "parameters are not gathered again in backward, which takes more memory"
_LIKE = "batches of samples of like length"

# Keys are a knob, or a knob with its value or variant.
WORDS: dict[str, dict[str, Words]] = {
    "gpu.capture": {
        TORCH: Call('model = torch.compile(model, mode="reduce-overhead")', _GRAPHS),
        TRANSFORMERS: Call('{arguments}(torch_compile=True, torch_compile_mode="reduce-overhead")', _GRAPHS),
        LIGHTNING: Call('model = torch.compile(model, mode="reduce-overhead") before trainer.fit(model)', _GRAPHS),
        FABRIC: Call('model = torch.compile(model, mode="reduce-overhead") before fabric.setup(model)', _GRAPHS),
        ACCELERATE: Call(
            '{arguments}(dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode="reduce-overhead"))', _GRAPHS
        ),
    },
    "gpu.compile_model:True": {
        TORCH: Call("model = torch.compile(model)", _KERNELS),
        TRANSFORMERS: Call("{arguments}(torch_compile=True)", _KERNELS),
        LIGHTNING: Call("model = torch.compile(model) before trainer.fit(model)", _KERNELS),
        FABRIC: Call("model = torch.compile(model) before fabric.setup(model)", _KERNELS),
        # dynamo_backend="inductor" wraps the model, which changes the names in what the script saves.
        ACCELERATE: Call("model.compile() before accelerator.prepare(model)", _KERNELS),
    },
    "gpu.compile_model:False": {TORCH: "leave torch.compile out"},
    "gpu.fused_optimizer": {TORCH: Call("{optimizer}(..., fused=True)", "one kernel for the whole update")},
    "gpu.fused_optimizer:AdamW": {
        TORCH: Call("{optimizer}(..., fused=True)", "one kernel for the whole update"),
        TRANSFORMERS: Call('{arguments}(optim="adamw_torch_fused")', "one kernel for the whole update"),
    },
    "gpu.mixed_precision:bf16": {
        TORCH: 'with torch.autocast("cuda", torch.bfloat16): around the forward pass and the loss',
        FSDP: Call("FullyShardedDataParallel(..., mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))"),
        FSDP2: Call("fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"),
        TRANSFORMERS: Call("{arguments}(bf16=True)"),
        LIGHTNING: Call('{arguments}(precision="bf16-mixed")'),
        FABRIC: Call('{arguments}(precision="bf16-mixed")'),
        ACCELERATE: Call('{arguments}(mixed_precision="bf16")'),
    },
    "gpu.mixed_precision:fp16": {
        TORCH: 'with torch.autocast("cuda", torch.float16): around the forward pass and the loss, with a GradScaler',
        FSDP: Call("FullyShardedDataParallel(..., mixed_precision=MixedPrecision(param_dtype=torch.float16))"),
        FSDP2: Call("fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))"),
        TRANSFORMERS: Call("{arguments}(fp16=True)"),
        LIGHTNING: Call('{arguments}(precision="16-mixed")'),
        FABRIC: Call('{arguments}(precision="16-mixed")'),
        ACCELERATE: Call('{arguments}(mixed_precision="fp16")'),
    },
    "gpu.tf32": {
        TORCH: Call('torch.set_float32_matmul_precision("high")', "TensorFloat-32 for matrix products"),
        TRANSFORMERS: Call("{arguments}(tf32=True)", "TensorFloat-32 for matrix products"),
    },
    "training.micro_batch": {
        TORCH: "batch_size={value}: " + _LARGER,
        TRANSFORMERS: Call("{arguments}(per_device_train_batch_size={value})", _LARGER),
    },
    "training.micro_batch:None": {TORCH: "a larger batch per step, if memory is left"},
    "training.micro_batch:smaller": {
        TORCH: "batch_size={value}, and step the optimizer after every {twice} batches: " + _HALVED,
        TRANSFORMERS: Call(
            "{arguments}(per_device_train_batch_size={value}, gradient_accumulation_steps={twice})", _HALVED
        ),
        LIGHTNING: Call("{arguments}(accumulate_grad_batches={twice})", "with batch_size={value}, " + _HALVED),
        ACCELERATE: Call("{arguments}(gradient_accumulation_steps={twice})", "with batch_size={value}, " + _HALVED),
    },
    "training.global_batch": {
        TORCH: "step the optimizer after every {twice} batches, with no_sync() in all but the last; change lr to match",
        FSDP2: "step the optimizer after every {twice} batches, with model.set_requires_gradient_sync(False) in all "
        "but the last; change lr to match",
        TRANSFORMERS: Call("{arguments}(gradient_accumulation_steps={twice})", "half the synchronisations"),
        LIGHTNING: Call("{arguments}(accumulate_grad_batches={twice})", "half the synchronisations"),
        ACCELERATE: Call(
            "{arguments}(gradient_accumulation_steps={twice})",
            "half the synchronisations, with the step inside accelerator.accumulate(model)",
        ),
    },
    "training.global_batch:grown": {TORCH: "{value} samples per step over all ranks, with lr to match"},
    "data.num_workers": {
        TORCH: Call("DataLoader(..., num_workers={value})"),
        TRANSFORMERS: Call("{arguments}(dataloader_num_workers={value})"),
    },
    "data.num_workers:0": {
        TORCH: Call("DataLoader(..., num_workers=0)", "loader processes compete with training for the cores"),
        TRANSFORMERS: Call("{arguments}(dataloader_num_workers=0)", "loader processes compete for the cores"),
    },
    "data.pin_memory": {
        TORCH: "DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True), or wrap the loader in "
        "frameworm's CudaDataLoader",
        TRANSFORMERS: Call('{arguments}(dataloader_pin_memory=True, accelerator_config={{"non_blocking": True}})'),
        LIGHTNING: Call("DataLoader(..., pin_memory=True)", "Lightning then copies batches beside computing"),
        FABRIC: Call("DataLoader(..., pin_memory=True)", "Fabric then copies batches beside computing"),
        ACCELERATE: Call(
            "{arguments}(dataloader_config=DataLoaderConfiguration(non_blocking=True))",
            "with DataLoader(..., pin_memory=True), copies batches beside computing",
        ),
    },
    "data.drop_last": {
        TORCH: Call("DataLoader(..., drop_last=True)"),
        TRANSFORMERS: Call("{arguments}(dataloader_drop_last=True)"),
    },
    "data.batching:bucketed": {
        TORCH: _LIKE + ": DataLoader(..., batch_sampler=...) that shuffles, then sorts by length in chunks of some "
        "100 batches",
        TRANSFORMERS: (
            Call('{arguments}(train_sampling_strategy="group_by_length")', _LIKE),
            Call("{arguments}(group_by_length=True)", _LIKE),
        ),
    },
    "data.batching:packed": {
        TORCH: "pack samples end to end, with attention inside each: flex_attention with a document mask, or a kernel "
        "for sequences of varying length",
        TRANSFORMERS: "DataCollatorWithFlattening() as data_collator, for a model loaded with "
        'attn_implementation="flash_attention_2": samples end to end, without padding',
        TRL: Call("{arguments}(packing=True)", "samples end to end, without padding"),
    },
    "data.pad_to:longest": {
        TORCH: "pad to the longest sample of each batch (in collate_fn), not to one length for all",
        TRANSFORMERS: "DataCollatorWithPadding(tokenizer) as data_collator (for labels of tokens "
        "DataCollatorForTokenClassification), and no padding by the tokenizer: pads to the longest sample of each "
        "batch, not to one length for all",
    },
    "data.pad_to:max": {
        TORCH: "pad batches to a few fixed lengths",
        TRANSFORMERS: "pad_to_multiple_of=64 in the data collator: a few fixed lengths",
    },
    "memory.activation_checkpointing": {
        TORCH: "torch.utils.checkpoint.checkpoint(layer, ..., use_reentrant=False) around the repeated layers",
        TRANSFORMERS: (
            Call("{arguments}(activation_checkpointing=True)", "layers are computed again in backward"),
            Call("{arguments}(gradient_checkpointing=True)", "layers are computed again in backward"),
        ),
    },
    "parallel.compression": {
        TORCH: "ddp_model.register_comm_hook(None, bf16_compress_hook), from "
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        FSDP: Call(
            "FullyShardedDataParallel(..., mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, "
            "reduce_dtype=torch.bfloat16))",
            "half the bytes, unless it is so already",
        ),
        FSDP2: Call(
            "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))",
            "half the bytes, unless it is so already",
        ),
        LIGHTNING: Call("{arguments}(strategy=DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook))"),
        ACCELERATE: Call(
            "{arguments}(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)])"
        ),
    },
    "parallel.strategy:zero2": {
        FSDP: Call("FullyShardedDataParallel(..., sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)", _GATHERED_ONCE),
        FSDP2: Call("fully_shard(..., reshard_after_forward=False)", _GATHERED_ONCE),
    },
    "parallel.bucket_cap_mb": {
        TORCH: Call("DistributedDataParallel(..., bucket_cap_mb={value})", "sending begins earlier in backward"),
        TRANSFORMERS: Call("{arguments}(ddp_bucket_cap_mb={whole})", "sending begins earlier in backward"),
        LIGHTNING: Call("{arguments}(strategy=DDPStrategy(bucket_cap_mb={value}))"),
        ACCELERATE: Call("{arguments}(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb={whole})])"),
    },
    "checkpoint.mode": {TORCH: "save a copy of the state beside training: torch.distributed.checkpoint.async_save"},
    "checkpoint.every_steps": {
        TORCH: "save more rarely",
        TRANSFORMERS: Call('{arguments}(save_strategy="steps", save_steps=...)', "save more rarely"),
        LIGHTNING: Call("ModelCheckpoint(every_n_train_steps=...)", "save more rarely"),
    },
    "logging": {
        TORCH: "write output every 50 steps or so instead of in each",
        TRANSFORMERS: Call("{arguments}(logging_steps=...)", "write output in fewer steps"),
        LIGHTNING: Call("{arguments}(log_every_n_steps=...)", "write output in fewer steps"),
    },
    "loss_filter": {
        TRANSFORMERS: Call("{arguments}(logging_nan_inf_filter=False)", "the filter reads the loss in each step"),
    },
}
# Lines of torch that a framework's own loop has no place for.
_NO_PLACE = {"checkpoint.mode": _OWN_TERMS, "parallel.compression": (TRANSFORMERS, TRL)}


def say(framework: Framework | None, key: str, value: Any, strategy: str | None = None, accumulation: int = 1) -> str:
    """Return the wording of a remedy for a script; empty if there is nothing the script could write.

    Args:
        framework: The library that runs the loop; None: unknown, so torch's terms are used.
        key: The knob, alone or with a variant.
        value: The value for the knob.
        strategy: How the script shards the model over ranks.
        accumulation: Micro-batches per step.
    """
    _, code, why = _said(framework or Framework(TORCH), key, value, strategy, accumulation)
    return f"{code}: {why}" if why else code


def say_own(framework: Framework, key: str, value: Any) -> str:
    """Like `say`, but empty if the framework has no terms of its own for the remedy."""
    dialect, *_ = _said(framework, key, value)
    return "" if dialect == TORCH else say(framework, key, value)


def options_for(framework: Framework, key: str, value: Any) -> dict[str, str]:
    """Return the options of the framework's arguments that apply a remedy, with their values as code.

    Empty if the installed version has none, if they are already set that way, or if a value is not a literal.
    """
    _, code, _ = _said(framework, key, value)
    if not framework.arguments or not code.startswith(f"{framework.arguments}("):
        return {}
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call), code
    try:
        for item in call.keywords:
            ast.literal_eval(item.value)
    except ValueError:
        return {}
    return {str(item.arg): ast.get_source_segment(code, item.value) or "" for item in call.keywords}


def _said(
    framework: Framework, key: str, value: Any, strategy: str | None = None, accumulation: int = 1
) -> tuple[str, str, str]:
    """Return the framework whose terms are used, the line, and its effect."""
    nothing = TORCH, "", ""
    knob = key.partition(":")[0]
    known = next((WORDS[name] for name in (f"{key}:{value}", key, knob) if name in WORDS), {})
    if framework.name in _NO_PLACE.get(knob, ()):
        return nothing
    if knob == "parallel.compression" and strategy in SHARDED and framework.name in _OWN_TERMS:
        return nothing  # their terms are for DDP
    fields = {
        "value": value,
        "whole": max(1, round(value)) if isinstance(value, float) else value,
        "twice": 2 * accumulation,
        "arguments": framework.arguments or "",
        "optimizer": framework.unfused_optimizer or "optimizer",
    }
    for dialect in _dialects(framework, strategy):
        for words in _alternatives(known.get(dialect)):
            if isinstance(words, str):
                return dialect, words.format_map(fields), ""
            checked = words.code.startswith(_CHECKED)
            if checked and not fields["arguments"].isidentifier():
                continue
            code = words.code.format_map(fields)
            if checked:
                wanted = _keywords(code)
                if not wanted.keys() <= framework.options.keys():
                    continue
                if all(framework.options[name] == item for name, item in wanted.items()):
                    return nothing
            return dialect, code, words.why.format_map(fields)
    return nothing


def options_named(name: str) -> set[str]:
    """Return the options of a framework's arguments that any remedy names."""
    found: set[str] = set()
    for known in WORDS.values():
        for dialect in (name, *_AFTER.get(name, ())):
            for words in _alternatives(known.get(dialect)):
                if isinstance(words, Call) and words.code.startswith(_CHECKED):
                    found |= _keywords(words.code.format_map(_Blank())).keys()
    return found


def _dialects(framework: Framework, strategy: str | None) -> Iterator[str]:
    """Yield the frameworks whose terms to look up, in order."""
    if strategy is not None and framework.name not in _OWN_TERMS:
        yield strategy
    yield framework.name
    yield from _AFTER.get(framework.name, (TORCH,))


def _alternatives(words: Words | None) -> tuple[str | Call, ...]:
    if words is None:
        return ()
    return (words,) if isinstance(words, (str, Call)) else words


def _keywords(code: str) -> dict[str, Any]:
    """Keywords of a call and their values; non-literal values as source code."""
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call), code
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        assert keyword.arg is not None, code
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            found[keyword.arg] = ast.unparse(keyword.value)
    return found


class _Blank(Mapping[str, str]):
    """Maps every template field to its own name, which can be parsed."""

    def __getitem__(self, name: str) -> str:
        return name

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
