"""What can be set in a script from outside, and how to write it by hand. Imports no torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from frameworm.diagnose.rules.wording import TORCH, options_for, say_own
from frameworm.errors import ConfigError
from frameworm.records.observations import Framework

Precision = Literal["off", "bf16"]
Attention = Literal["any", "flash", "efficient", "cudnn", "math"]


@dataclass(frozen=True, slots=True)
class Switches:
    """Settings of a script; each is off unless it was found to help.

    Attributes:
        tf32: TensorFloat-32 for fp32 matrix products and convolutions.
        autocast: Compute the model's training passes in this precision; its outputs keep their dtype.
        fused_optimizer: Use the fused kernel of torch optimizers that have one.
        compile: Compile the model in its training passes.
        compile_blocks: Compile only the blocks that it repeats, once for equal ones.
        cuda_graphs: Compile the model, and replay its kernels as CUDA graphs.
        attention: The back end of `scaled_dot_product_attention`; any to let torch choose.
        none_gradients: `zero_grad` drops gradients where the script fills them with zeros.
        channels_last: Store convolution weights channels-last.
        cudnn_benchmark: Let cuDNN time its algorithms.
        threads: Threads of torch's CPU operators; 0 for no change.
        workers: Processes for loaders that shuffle and have none.
        whole_batches: Index a data set's tensors with a whole batch instead of sample by sample.
        pin_memory: Page-locked batches.
        non_blocking: Do not make the host wait while tensors are copied to a GPU.
        late_losses: `loss.item()` on a GPU returns the previous step's value, which has already been computed.
        trim_padding: Batches of loaders that shuffle are as wide as their longest sample, if padding can be identified.
        bucket_mib: Size of DistributedDataParallel's gradient buckets; 0 for no change.
        bucket_views: Gradients are views of the buckets instead of being copied.
        static_graph: DistributedDataParallel learns once which parameters a step uses.
        gather_once: Only the last of several accumulating passes gathers gradients.
        shard_calls: Of this many calls of `fully_shard`, only the last is made, which is for the whole model; 0 for no
            change.
        keep_gathered: Parameters sharded by `fully_shard` are not gathered again for backward; takes more memory.
    """

    tf32: bool = False
    autocast: Precision = "off"
    fused_optimizer: bool = False
    compile: bool = False
    compile_blocks: bool = False
    cuda_graphs: bool = False
    attention: Attention = "any"
    none_gradients: bool = False
    channels_last: bool = False
    cudnn_benchmark: bool = False
    threads: int = 0
    workers: int = 0
    whole_batches: bool = False
    pin_memory: bool = False
    non_blocking: bool = False
    late_losses: bool = False
    trim_padding: bool = False
    bucket_mib: int = 0
    bucket_views: bool = False
    static_graph: bool = False
    gather_once: bool = False
    shard_calls: int = 0
    keep_gathered: bool = False

    @property
    def compiles(self) -> bool:
        """Whether the model is compiled in any way."""
        return self.compile or self.compile_blocks or self.cuda_graphs

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Switches:
        """Create switches from a mapping.

        Raises:
            ConfigError: If one does not exist, or its value has the wrong type.
        """
        known = {item.name: getattr(cls(), item.name) for item in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"{name}: there is no such switch; there are {', '.join(known)}")
            if type(value) is not type(known[name]):
                raise ConfigError(f"{name}: {value!r} does not have the type of {known[name]!r}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the switches that are on."""
        usual = Switches()
        return {name: value for name, value in asdict(self).items() if value != getattr(usual, name)}

    def having(self, changes: Mapping[str, Any]) -> Switches:
        """Return a copy with changes; `compile` replaces `compile_blocks`, and `cuda_graphs` replaces both."""
        instead = {"compile_blocks": False} if changes.get("compile") or changes.get("cuda_graphs") else {}
        if changes.get("cuda_graphs"):
            instead["compile"] = False
        return replace(self, **{**changes, **instead})


# By switch: a short description, its name among remedies, and the line to write if the framework has no option for it.
WORDS: dict[str, tuple[str, str | None, str]] = {
    "tf32": ("TF32 matrix products", "gpu.tf32", 'torch.set_float32_matmul_precision("high")'),
    "autocast": (
        "bf16 autocast",
        "gpu.mixed_precision",
        "with torch.autocast(device, torch.bfloat16): around the forward pass and the loss",
    ),
    "fused_optimizer": ("fused optimizer", "gpu.fused_optimizer", "fused=True in the optimizer's arguments"),
    "compile": ("compiled model", "gpu.compile_model", "model.compile() before the first step"),
    "compile_blocks": ("compiled blocks", None, "block.compile() for each block that the model repeats"),
    "cuda_graphs": ("CUDA graphs", "gpu.capture", 'model.compile(mode="reduce-overhead") before the first step'),
    "attention": (
        "attention back end",
        None,
        "torch.backends.cuda.enable_..._sdp(False) for the back ends to leave out",
    ),
    "none_gradients": ("gradients dropped instead of zeroed", None, "optimizer.zero_grad() without set_to_none=False"),
    "channels_last": ("channels last", None, "model.to(memory_format=torch.channels_last)"),
    "cudnn_benchmark": ("cuDNN's algorithms timed", None, "torch.backends.cudnn.benchmark = True"),
    "threads": ("threads", None, "torch.set_num_threads({value})"),
    "workers": ("loader processes", "data.num_workers", "DataLoader(..., num_workers={value})"),
    "whole_batches": (
        "batches indexed at once",
        None,
        "DataLoader(data, sampler=BatchSampler(RandomSampler(data), BATCH, False), batch_size=None)",
    ),
    "pin_memory": ("page-locked batches", "data.pin_memory", "DataLoader(..., pin_memory=True)"),
    "non_blocking": ("copies that the host does not wait for", None, "batch.to(device, non_blocking=True)"),
    "late_losses": (
        "losses read one step late",
        None,
        "keep loss.detach() and call .item() on it a step later, or every 50 steps",
    ),
    "trim_padding": (
        "batches as wide as their longest sample",
        "data.pad_to:longest",
        "pad to the longest sample of each batch (in collate_fn), not to one length for all",
    ),
    "bucket_mib": ("MiB of gradients at once", None, "DistributedDataParallel(..., bucket_cap_mb={value})"),
    "bucket_views": ("gradients in their buckets", None, "DistributedDataParallel(..., gradient_as_bucket_view=True)"),
    "static_graph": ("static graph", None, "DistributedDataParallel(..., static_graph=True)"),
    "gather_once": (
        "gradients gathered once per update",
        None,
        "with model.no_sync(): around all but the last forward and backward pass of an update",
    ),
    "shard_calls": (
        "one fully_shard around all, instead of",
        None,
        "fully_shard(model) alone or around a few large parts, which takes more memory",
    ),
    "keep_gathered": (
        "parameters kept for backward",
        None,
        "fully_shard(..., reshard_after_forward=False), which takes more memory",
    ),
}

# Set in torch even if the framework has an option, so that the random draws of loader processes are known.
_IN_TORCH = ("workers",)
# The object that a switch belongs to; if the script creates it itself, an option of its framework has no effect.
_BELONGS_TO = {"fused_optimizer": "optimizer", "workers": "loader", "pin_memory": "loader"}


def in_words(changes: Mapping[str, Any]) -> str:
    """Describe some switches in a phrase."""
    said_with_value = (int, str)
    return ", ".join(
        f"{WORDS[name][0]}: {value}" if type(value) in said_with_value and name != "autocast" else WORDS[name][0]
        for name, value in changes.items()
    )


def by_hand(changes: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> list[str]:
    """Return what to write into the script instead, in terms of the framework whose loop it runs.

    Args:
        changes: Switches and their values.
        facts: What is known about the script; None if nothing, which gives torch's terms.
    """
    lines = []
    for name, value in changes.items():
        own, key = _wanted(name, facts or {})
        said = say_own(own, key, value) if own is not None and key is not None else ""
        lines.append(said or WORDS[name][2].format(value=value))
    return lines


def options_of(changes: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return options of the framework whose loop the script runs, for switches that it has options for.

    Args:
        changes: Switches and their values.
        facts: What is known about the script.

    Returns:
        Options of the installed version by switch, with their values as code.
    """
    found = {}
    for name, value in changes.items():
        own, key = _wanted(name, facts)
        options = options_for(own, key, value) if own is not None and key is not None else {}
        if options:
            found[name] = options
    return found


def through_options(switches: Switches, facts: Mapping[str, Any]) -> tuple[Switches, dict[str, dict[str, Any]]]:
    """Split switches between torch and options of the script's framework, keeping options that the script sets itself.

    Args:
        switches: The switches to turn on.
        facts: What is known about the script; empty if nothing is known yet.

    Returns:
        The switches to set in torch, and the options to set by class.
    """
    given = facts.get("options_given") or ()
    usual, left, options = asdict(Switches()), switches, {}
    for name, wanted in options_of(switches.to_dict(), facts).items():
        if name not in _IN_TORCH and not wanted.keys() & set(given):
            left = left.having({name: usual[name]})
            options.update({key: ast.literal_eval(text) for key, text in wanted.items()})
    return left, {str(facts["framework"]["arguments"]): options} if options else {}


def _wanted(name: str, facts: Mapping[str, Any]) -> tuple[Framework | None, str | None]:
    """Return the framework, unless the script handles this itself, and the switch's name among remedies."""
    own = Framework(**facts["framework"]) if facts.get("framework") else None
    key = WORDS[name][1]
    made_by_script = {place[0] for place in facts.get("places") or ()}
    if own is None or own.name == TORCH or _BELONGS_TO.get(name) in made_by_script:
        return None, key
    # The option names an optimizer, which must not replace a different one.
    return own, f"{key}:{own.unfused_optimizer}" if name == "fused_optimizer" else key
