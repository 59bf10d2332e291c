"""What can be set in a script from outside, and how one would write it by hand. No torch here."""

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
        autocast: Compute the model's training passes in this precision; what it returns has the type it had.
        fused_optimizer: One kernel for the whole update, for optimizers of torch that have one.
        compile: Compile the model in its training passes.
        compile_blocks: Compile only the blocks that it repeats, once for all that are alike.
        cuda_graphs: Compile the model, and replay its kernels as CUDA graphs.
        attention: The back end of `scaled_dot_product_attention`; any: torch chooses.
        none_gradients: `zero_grad` drops gradients where the script has them filled with zeros.
        channels_last: Weights of convolutions with their channels last.
        cudnn_benchmark: Let cuDNN time its algorithms.
        threads: Of torch's operators on a CPU; 0: as it is.
        workers: Processes for loaders that shuffle and have none.
        whole_batches: Samples are taken out of the tensors of a data set at once instead of one by one.
        pin_memory: Page-locked batches.
        non_blocking: The host does not wait while tensors are copied to a GPU.
        late_losses: `loss.item()` of a loss on a GPU gives the value from the step before, which has been computed.
        trim_padding: Batches of loaders that shuffle are as wide as their longest sample, where it is told.
        bucket_mib: Gradients that DistributedDataParallel gathers at once; 0: as it is.
        bucket_views: Gradients lie where it gathers them, instead of being copied.
        static_graph: DistributedDataParallel learns once which parameters a step uses.
        gather_once: Of the passes whose gradients are added up, only the last gathers them.
        shard_calls: Of so many calls of `fully_shard` only the last is made, which is around them all; 0: as it is.
        keep_gathered: Parameters that `fully_shard` divides are not gathered again for backward; takes more memory.
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
        """Whether the model is compiled, in whatever way."""
        return self.compile or self.compile_blocks or self.cuda_graphs

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Switches:
        """The switches that are named.

        Raises:
            ConfigError: One does not exist, or its value is of another kind.
        """
        known = {item.name: getattr(cls(), item.name) for item in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"{name}: there is no such switch; there are {', '.join(known)}")
            if type(value) is not type(known[name]):
                raise ConfigError(f"{name}: {value!r} is not of the kind of {known[name]!r}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Those that are on."""
        usual = Switches()
        return {name: value for name, value in asdict(self).items() if value != getattr(usual, name)}

    def having(self, changes: Mapping[str, Any]) -> Switches:
        """The same with some changed; the whole model is compiled instead of its blocks, and in one way."""
        instead = {"compile_blocks": False} if changes.get("compile") or changes.get("cuda_graphs") else {}
        if changes.get("cuda_graphs"):
            instead["compile"] = False
        return replace(self, **{**changes, **instead})


# By switch: what it does in a few words, what it is called among remedies, and the line to write where no framework
# has one of its own.
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

# Set in torch even where the framework has an option: then what loader processes draw is known.
_IN_TORCH = ("workers",)
# What a switch is set in; where the script makes that itself, an option of its framework is for nothing.
_BELONGS_TO = {"fused_optimizer": "optimizer", "workers": "loader", "pin_memory": "loader"}


def in_words(changes: Mapping[str, Any]) -> str:
    """Some switches as a phrase."""
    said_with_value = (int, str)
    return ", ".join(
        f"{WORDS[name][0]}: {value}" if type(value) in said_with_value and name != "autocast" else WORDS[name][0]
        for name, value in changes.items()
    )


def by_hand(changes: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> list[str]:
    """What to write into the script instead, in the words of the framework whose loop it runs.

    Args:
        changes: Switches and their values.
        facts: What is known about the script; None: nothing, which is told torch's words.
    """
    lines = []
    for name, value in changes.items():
        own, key = _wanted(name, facts or {})
        said = say_own(own, key, value) if own is not None and key is not None else ""
        lines.append(said or WORDS[name][2].format(value=value))
    return lines


def options_of(changes: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Options of the framework whose loop the script runs, for the switches that it has options for.

    Args:
        changes: Switches and their values.
        facts: What is known about the script.

    Returns:
        By switch, options of the installed version with their values as code.
    """
    found = {}
    for name, value in changes.items():
        own, key = _wanted(name, facts)
        options = options_for(own, key, value) if own is not None and key is not None else {}
        if options:
            found[name] = options
    return found


def through_options(switches: Switches, facts: Mapping[str, Any]) -> tuple[Switches, dict[str, dict[str, Any]]]:
    """Divide switches between torch and the options of the script's framework; what the script gives itself stays.

    Args:
        switches: What is to be on.
        facts: What is known about the script; empty: nothing yet.

    Returns:
        The switches to set in torch, and by class the options that its objects get.
    """
    given = facts.get("options_given") or ()
    usual, left, options = asdict(Switches()), switches, {}
    for name, wanted in options_of(switches.to_dict(), facts).items():
        if name not in _IN_TORCH and not wanted.keys() & set(given):
            left = left.having({name: usual[name]})
            options.update({key: ast.literal_eval(text) for key, text in wanted.items()})
    return left, {str(facts["framework"]["arguments"]): options} if options else {}


def _wanted(name: str, facts: Mapping[str, Any]) -> tuple[Framework | None, str | None]:
    """The framework, unless this is the script's own affair, and what a switch is called among remedies."""
    own = Framework(**facts["framework"]) if facts.get("framework") else None
    key = WORDS[name][1]
    made_by_script = {place[0] for place in facts.get("places") or ()}
    if own is None or own.name == TORCH or _BELONGS_TO.get(name) in made_by_script:
        return None, key
    # An option names an optimizer, and another one must not be swapped for it.
    return own, f"{key}:{own.unfused_optimizer}" if name == "fused_optimizer" else key
