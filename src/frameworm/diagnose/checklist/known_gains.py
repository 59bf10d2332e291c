"""Measured gains of changes, each with its results file; a test compares the numbers with the files.

A gain without a measurement is modelled, and says how, or is unknown, and says what would measure it.
"""

from __future__ import annotations

from typing import NamedTuple

from frameworm.diagnose.rules.device import SAVED_FROM_FP32, SAVED_FROM_TF32
from frameworm.records.machine import KnownGain

RESULTS = "benchmarks/results"


class Ratio(NamedTuple):
    """Speedup factor: the median over rounds, the lowest and the highest."""

    value: float
    low: float
    high: float


# Whole-step capture with resident data against the same model without either: eager bf16, padded, one H200. Keys are
# data set and model width.
CAPTURE: dict[tuple[str, int], tuple[str, Ratio]] = {
    ("ag_news", 128): ("peers_gpu-ag_news", Ratio(20.5, 11.2, 32.3)),
    ("ag_news", 256): ("peers_gpu-ag_news_optimized-own", Ratio(5.6, 4.6, 7.7)),
    ("imdb", 256): ("peers_gpu-imdb-own", Ratio(2.1, 1.0, 2.3)),
}

# Fraction of the computed tokens that is padding, and the ratio of tokens computed by padded batches to packed and to
# bucketed ones. Keys are data set, longest text and batch.
PADDING: dict[tuple[str, int, int], tuple[float, float, float]] = {
    ("ag_news", 128, 32): (0.485, 1.94, 1.87),
    ("ag_news", 128, 128): (0.558, 2.25, 2.18),
    ("ag_news", 256, 32): (0.523, 1.98, 2.00),
    ("ag_news", 256, 128): (0.640, 2.73, 2.65),
    ("imdb", 512, 32): (0.447, 1.80, 1.74),
    ("imdb", 512, 128): (0.447, 1.80, 1.73),
}

# Step time of plain DDP over that with `parallel.compression: auto`, two hosts, 42 MB of gradients, by link rate.
COMPRESSION: dict[str, float] = {"1gbit": 1.75, "300mbit": 4.17, "100mbit": 6.49}
# The same on an unlimited link, measured on a quiet machine: `auto` chose off, and cost this factor.
COMPRESSION_COST = 1.016

# The fast GPT-2 config against a loop with torch.compile, bf16 and fused AdamW: one H200, micro-batch 128.
GPT_FAST = Ratio(1.235, 1.23, 1.24)


def capture_gain(dataset: str, width: int | None) -> KnownGain:
    """Return the measured gain of whole-step capture."""
    known = CAPTURE.get((dataset, width or 0))
    if known is None:
        least, most = min(CAPTURE.values(), key=_value), max(CAPTURE.values(), key=_value)
        text = (
            f"{least[1].value:g}x to {most[1].value:g}x on three text classifiers on an H200, with resident data: the "
            "shorter the step, the more; yours was not measured"
        )
        return KnownGain(text, "measured", f"{RESULTS}/peers_gpu-*-nvidia-h200.json")
    file, ratio = known
    text = f"{ratio.value:g}x ({ratio.low:g} to {ratio.high:g}) with resident data, a model of this size on an H200"
    return KnownGain(text, "measured", f"{RESULTS}/{file}-nvidia-h200.json", *ratio)


def batching_gain(dataset: str, longest: int, batch: int, batching: str) -> KnownGain:
    """Return how much less is computed without padding."""
    known = PADDING.get((dataset, longest, 32 if batch <= 64 else 128))
    if known is None:
        text = "as much of the step as is padding: padding_waste in a run's summary.json says how much that is"
        return KnownGain(text, "unknown", "docs/findings.md#padding_waste")
    waste, packed, bucketed = known
    ratio = packed if batching == "packed" else bucketed
    text = (
        f"up to {ratio:.2g}x: {waste:.0%} of the tokens are padding (counted), and a step is taken to "
        "last as long as its tokens"
    )
    return KnownGain(text, "modelled", f"{RESULTS}/padding_waste-cpu.json", ratio)


def precision_gain(tf32: bool) -> KnownGain:
    """Return the gain of half precision, by the same rule as the finding."""
    saved = SAVED_FROM_TF32 if tf32 else SAVED_FROM_FP32
    text = f"up to {1 / (1 - saved):.2g}x where forward and backward are all of the step; less where the GPU waits"
    return KnownGain(text, "modelled", "docs/findings.md#precision_unused", 1 / (1 - saved))


def compression_gain() -> KnownGain:
    """Return the measured gain of `auto` by link rate."""
    rates = ", ".join(f"{value:g}x at {rate[:-4]} {rate[-4].upper()}bit/s" for rate, value in COMPRESSION.items())
    text = (
        f"{rates} (two hosts, 42 MB of gradients); on a fast link auto keeps plain gradients and costs "
        f"{COMPRESSION_COST - 1:.1%}"
    )
    return KnownGain(text, "measured", f"{RESULTS}/compression_network-cpu.json")


def gpt_gain() -> KnownGain:
    """Return the measured gain of all settings of the fast GPT config together."""
    text = (
        f"{GPT_FAST.value:g}x for residual, fused attention, feed-forward and loss, and capture together, over a "
        "compiled bf16 loop (GPT-2 124M on an H200)"
    )
    return KnownGain(text, "measured", f"{RESULTS}/gpt_mfu-nvidia-h200.json", *GPT_FAST)


def unmeasured(knob: str | None, why: str = "") -> KnownGain:
    """Return an unknown gain: no one has measured this change alone, but the tuner can."""
    told = f"not measured by itself{f': {why}' if why else ''}; "
    if knob is None:
        return KnownGain(f"{told}frameworm compare shows it", "unknown", "docs/guard.md")
    return KnownGain(f"{told}frameworm tune measures it (knob {knob})", "unknown", "docs/tune.md#what-it-may-change")


def _value(item: tuple[str, Ratio]) -> float:
    return item[1].value
