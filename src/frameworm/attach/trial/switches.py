"""What can be set in a script from outside, and how one would write it by hand. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from frameworm.diagnose.rules.wording import TORCH, say
from frameworm.errors import ConfigError
from frameworm.records.observations import Framework

Precision = Literal["off", "bf16"]


@dataclass(frozen=True, slots=True)
class Switches:
    """Settings of a script; each is off unless it was found to help.

    Attributes:
        tf32: TensorFloat-32 for fp32 matrix products and convolutions.
        autocast: Compute the model's training passes in this precision; what it returns has the type it had.
        fused_optimizer: One kernel for the whole update, for optimizers of torch that have one.
        compile: Compile the model in its training passes.
        channels_last: Weights of convolutions with their channels last.
        cudnn_benchmark: Let cuDNN time its algorithms.
        workers: Processes for loaders that shuffle and have none.
        pin_memory: Page-locked batches.
        bucket_mib: Gradients that DistributedDataParallel gathers at once; 0: as it is.
        bucket_views: Gradients lie where it gathers them, instead of being copied.
        gather_once: Of the passes whose gradients are added up, only the last gathers them.
    """

    tf32: bool = False
    autocast: Precision = "off"
    fused_optimizer: bool = False
    compile: bool = False
    channels_last: bool = False
    cudnn_benchmark: bool = False
    workers: int = 0
    pin_memory: bool = False
    bucket_mib: int = 0
    bucket_views: bool = False
    gather_once: bool = False

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
        """The same with some changed."""
        return replace(self, **changes)


# By switch: what it does in a few words, what it is called among remedies, and the line to write where no framework
# has one of its own.
WORDS: dict[str, tuple[str, str | None, str]] = {
    "tf32": ("TF32 matrix products", "gpu.tf32", 'torch.set_float32_matmul_precision("high")'),
    "autocast": (
        "bf16 autocast",
        "gpu.mixed_precision",
        "with torch.autocast(device, torch.bfloat16): around the forward pass and the loss",
    ),
    "fused_optimizer": ("fused optimizer", "gpu.fused_optimizer:AdamW", "fused=True in the optimizer's arguments"),
    "compile": ("compiled model", "gpu.compile_model", "model.compile() before the first step"),
    "channels_last": ("channels last", None, "model.to(memory_format=torch.channels_last)"),
    "cudnn_benchmark": ("cuDNN's algorithms timed", None, "torch.backends.cudnn.benchmark = True"),
    "workers": (
        "loader processes",
        "data.num_workers",
        "DataLoader(..., num_workers={value}, persistent_workers=True)",
    ),
    "pin_memory": ("page-locked batches", "data.pin_memory", "DataLoader(..., pin_memory=True)"),
    "bucket_mib": ("MiB of gradients at once", None, "DistributedDataParallel(..., bucket_cap_mb={value})"),
    "bucket_views": ("gradients in their buckets", None, "DistributedDataParallel(..., gradient_as_bucket_view=True)"),
    "gather_once": (
        "gradients gathered once per update",
        None,
        "with model.no_sync(): around all but the last forward and backward pass of an update",
    ),
}


def in_words(changes: Mapping[str, Any]) -> str:
    """Some switches as a phrase."""
    return ", ".join(
        f"{value} {WORDS[name][0]}" if type(value) is int else WORDS[name][0] for name, value in changes.items()
    )


def by_hand(changes: Mapping[str, Any], framework: Mapping[str, Any] | None = None) -> list[str]:
    """What to write into the script instead, in the words of the framework whose loop it runs.

    Args:
        changes: Switches and their values.
        framework: As `attach.framework` has found it; None: a loop of the script's own.
    """
    own = Framework(**framework) if framework is not None else None
    lines = []
    for name, value in changes.items():
        _, key, line = WORDS[name]
        said = say(own, key, value) if key is not None and own is not None and own.name != TORCH else ""
        lines.append(said or line.format(value=value))
    return lines
