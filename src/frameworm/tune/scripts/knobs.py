"""The switches that may help a script, declared as objects: what each sets, its expected gain, and when it applies."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from frameworm.attach.trial.switches import Switches, options_of, through_options
from frameworm.hardware.host import usable_cpus

Facts = Mapping[str, Any]

# If a script waits for its loader for less than this fraction of a step, the loader is fast enough.
_WAITS = 0.03
_MOST_WORKERS = 4
# Fraction of a batch's positions beyond its longest sample below which trimming is not worthwhile.
_PADDED = 0.05
_LEAST_BLOCKS = 3
_MOST_BUCKET_MIB = 200
# A model with at most this many parameters can be gathered at once without regard to memory.
_WHOLE_PARAMETERS = 250_000_000
_NOT_GATHERED = "no DistributedDataParallel gathers its gradients"


@dataclass(frozen=True)
class ScriptKnob:
    """A switch that may help.

    Attributes:
        changes: What it sets.
        gain: Expected speedup minus one; decides the order.
        why_not: Why it does not apply to a script; None if it may help.
        setup_s: Its usual start-up cost.
        consent: The option by which the user must allow it, and why; None: a proof would detect any harm.
        again: It sets the same thing as another knob to another value, so it is not reported if it does not apply.
    """

    changes: Callable[[Facts], dict[str, Any]]
    gain: Callable[[Facts], float]
    why_not: Callable[[Facts], str | None]
    setup_s: float = 0.0
    consent: tuple[str, str] | None = None
    again: bool = False


def _first(*reasons: tuple[object, str]) -> str | None:
    """The first reason that holds."""
    return next((text for holds, text in reasons if holds), None)


def _on_gpu(facts: Facts) -> bool:
    return bool(facts["device"] == "cuda")


def _with_workers(facts: Facts, workers: int) -> dict[str, Any]:
    """Set loader workers; if the model runs on the same cores, reduce its threads accordingly."""
    left = max(1, usable_cpus() - workers)
    return {"workers": workers} if _on_gpu(facts) or facts["threads"] <= left else {"workers": workers, "threads": left}


def _workers(facts: Facts) -> dict[str, Any]:
    return _with_workers(facts, max(1, min(_MOST_WORKERS, usable_cpus() - 1)))


def _fewer_threads(facts: Facts) -> dict[str, Any]:
    return {"threads": max(1, facts["threads"] // 2)}


def _why_not_fewer_threads(facts: Facts) -> str | None:
    return _first((_on_gpu(facts), "the model is on a GPU"), (facts["threads"] < 2, "there is one"))


def _why_no_workers(facts: Facts) -> str | None:
    waits = facts["data_wait_share"]
    return _first(
        (facts["workers"] is None, "no DataLoader shuffles a data set by its places"),
        (facts["workers"], f"it has {facts['workers']} loader processes"),
        (waits < _WAITS, f"it waits for batches for {waits:.1%} of a step"),
    )


def _why_not_whole(facts: Facts) -> str | None:
    waits = facts["data_wait_share"]
    return _first(
        (not facts["indexable"], "no DataLoader stacks rows of a TensorDataset"),
        (waits < _WAITS, f"it waits for batches for {waits:.1%} of a step"),
    )


def _in_waits(facts: Facts) -> float:
    """The gain if waiting for data were eliminated."""
    return float(facts["data_wait_share"] / max(0.05, 1 - facts["data_wait_share"]))


def _why_not_trimmed(facts: Facts) -> str | None:
    share = facts["padded_share"]
    return _first(
        (share is None, "it is not known what pads its batches"),
        ((share or 0.0) < _PADDED, "its batches are not padded beyond their longest sample"),
    )


def _why_no_half(facts: Facts) -> str | None:
    return _first(
        (not _on_gpu(facts), "needs a GPU"),
        (facts["half"], "computes in half precision already"),
        ((facts["capability"] or 0) < 8, "this GPU has no bf16"),
    )


def _why_not_compiled(facts: Facts) -> str | None:
    compiler = _on_gpu(facts) or any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    return _first((facts["compiled"], "the model is compiled already"), (not compiler, "there is no C++ compiler"))


def _why_no_blocks(facts: Facts) -> str | None:
    return _first((facts["blocks"] < _LEAST_BLOCKS, "the model repeats no block")) or _why_not_compiled(facts)


def _other_attention(facts: Facts) -> list[str]:
    """Attention back ends other than the current one."""
    if not _on_gpu(facts):
        return ["math"]
    known = ["cudnn", "efficient", "flash"] if (facts["capability"] or 0) >= 8 else ["efficient"]
    return [name for name in known if name != facts["attention"]]


def _why_not_attention(facts: Facts) -> str | None:
    return _first(
        (facts["attention"] is None, "no fused attention was seen"),
        (not _other_attention(facts), "there is no other one for this GPU"),
    )


def _of_images(facts: Facts) -> bool:
    return _on_gpu(facts) and bool(facts["convolutions"])


def _bucket(facts: Facts) -> dict[str, Any]:
    """One bucket for all gradients, up to a size beyond which a network is no faster."""
    gathered = facts["data_parallel"] or {"gradient_mib": 0.0}
    return {"bucket_mib": math.ceil(min(_MOST_BUCKET_MIB, max(1.0, gathered["gradient_mib"])))}


def _why_no_bucket(facts: Facts) -> str | None:
    gathered = facts["data_parallel"]
    if gathered is None:
        return _NOT_GATHERED
    return _first(
        (gathered["gradient_mib"] <= gathered["bucket_mib"], "its gradients fit into one bucket"),
        (_bucket(facts)["bucket_mib"] <= gathered["bucket_mib"], "its buckets are as large already"),
    )


def _why_no_views(facts: Facts) -> str | None:
    gathered = facts["data_parallel"]
    return _NOT_GATHERED if gathered is None else _first((gathered["bucket_views"], "already on"))


def _why_not_once(facts: Facts) -> str | None:
    gathered = facts["data_parallel"]
    if gathered is None:
        return _NOT_GATHERED
    return _first(
        (gathered["passes_per_update"] < 2, "it makes one pass per update"),
        (gathered["hooked"], "it gathers by a hook of its own"),
    )


def _why_not_static(facts: Facts) -> str | None:
    gathered = facts["data_parallel"]
    if gathered is None:
        return _NOT_GATHERED
    return _first(
        (not gathered["looks_for_unused"], "it does not look for unused parameters"),
        (gathered["passes_per_update"] != 1, "it makes several passes per update"),
    )


SCRIPT_KNOBS: tuple[ScriptKnob, ...] = (
    ScriptKnob(
        lambda facts: {"tf32": True},
        lambda facts: 0.2,
        lambda facts: _first((not _on_gpu(facts), "needs a GPU"), (facts["tf32"], "already on")),
    ),
    ScriptKnob(lambda facts: {"autocast": "bf16"}, lambda facts: 0.4, _why_no_half),
    ScriptKnob(
        lambda facts: {"fused_optimizer": True},
        lambda facts: 0.1,
        lambda facts: _first((not facts["can_fuse"], "its optimizer has no fused kernel, or says itself how it steps")),
    ),
    ScriptKnob(lambda facts: {"whole_batches": True}, _in_waits, _why_not_whole),
    ScriptKnob(_workers, _in_waits, _why_no_workers, 1.0),
    ScriptKnob(  # one worker draws what the script's own process would have drawn; several cannot
        lambda facts: _with_workers(facts, 1),
        _in_waits,
        lambda facts: _why_no_workers(facts) or _first((_workers(facts)["workers"] == 1, "that was tried")),
        1.0,
        again=True,
    ),
    ScriptKnob(_fewer_threads, lambda facts: 0.03, _why_not_fewer_threads),
    ScriptKnob(
        lambda facts: {"threads": 1},
        lambda facts: 0.02,
        lambda facts: _why_not_fewer_threads(facts) or _first((facts["threads"] < 4, "that was tried")),
        again=True,
    ),
    ScriptKnob(
        lambda facts: {"pin_memory": True},
        lambda facts: 0.02,
        lambda facts: _first((not _on_gpu(facts), "needs a GPU"), (facts["pinned"] is not False, "already on")),
    ),
    ScriptKnob(
        lambda facts: {
            "non_blocking": True,
            **({} if facts["pinned"] or facts["pinned"] is None else {"pin_memory": True}),
        },
        lambda facts: 0.03,
        lambda facts: _first(
            (not _on_gpu(facts), "needs a GPU"), (not facts["copies"], "the host does not wait for copies to the GPU")
        ),
    ),
    ScriptKnob(
        lambda facts: {"none_gradients": True},
        lambda facts: 0.05,
        lambda facts: _first((not facts["zeroes"], "it drops its gradients already")),
    ),
    ScriptKnob(
        lambda facts: {"attention": next(iter(_other_attention(facts)), "math")}, lambda facts: 0.04, _why_not_attention
    ),
    ScriptKnob(
        lambda facts: {"attention": _other_attention(facts)[-1]},
        lambda facts: 0.02,
        lambda facts: _why_not_attention(facts) or _first((len(_other_attention(facts)) < 2, "that was tried")),
        again=True,
    ),
    ScriptKnob(
        lambda facts: {"late_losses": True},
        lambda facts: 0.1,
        lambda facts: _first((not _on_gpu(facts), "needs a GPU")),
        consent=("late_losses", "loss.item() would give the loss of the step before"),
    ),
    ScriptKnob(
        lambda facts: {"cudnn_benchmark": True},
        lambda facts: 0.05,
        lambda facts: _first(
            (not _of_images(facts), "no convolutions on a GPU"), (facts["cudnn_benchmark"], "already on")
        ),
    ),
    ScriptKnob(
        lambda facts: {"channels_last": True},
        lambda facts: 0.1,
        lambda facts: _first((not facts["convolutions"], "no convolutions over images")),
    ),
    ScriptKnob(
        lambda facts: {"trim_padding": True}, lambda facts: (facts["padded_share"] or 0.0) / 2, _why_not_trimmed
    ),
    ScriptKnob(lambda facts: {"gather_once": True}, lambda facts: 0.3, _why_not_once),
    ScriptKnob(
        lambda facts: {"shard_calls": facts["shard_calls"]},
        lambda facts: 0.25,
        lambda facts: _first(
            (facts["shard_calls"] < 2, "fully_shard does not divide one model part by part"),
            (facts["parameters"] > _WHOLE_PARAMETERS, "all parameters at once would take much memory"),
        ),
    ),
    ScriptKnob(
        lambda facts: {"keep_gathered": True},
        lambda facts: 0.2,
        lambda facts: _first((not facts["gathers_twice"], "no parameters are gathered again for backward")),
    ),
    ScriptKnob(
        lambda facts: {"static_graph": True},
        lambda facts: 0.05,
        _why_not_static,
        consent=("static_graph", "each step must use the same parameters as the first, in all of the training"),
    ),
    ScriptKnob(lambda facts: {"bucket_views": True}, lambda facts: 0.05, _why_no_views),
    ScriptKnob(_bucket, lambda facts: 0.05, _why_no_bucket),
    ScriptKnob(lambda facts: {"compile_blocks": True}, lambda facts: 0.2, _why_no_blocks, 8.0),
    ScriptKnob(lambda facts: {"compile": True}, lambda facts: 0.25, _why_not_compiled, 20.0),
    ScriptKnob(
        lambda facts: {"cuda_graphs": True},
        lambda facts: 0.5,
        lambda facts: _first((not _on_gpu(facts), "needs a GPU")) or _why_not_compiled(facts),
        20.0,
        ("graphs", "what the model has returned is overwritten when it is called again"),
    ),
)

# Values of `--allow` for a script.
CONSENTS = tuple(knob.consent[0] for knob in SCRIPT_KNOBS if knob.consent is not None)


def forget_options(switches: Switches, facts: dict[str, Any], seen: Facts) -> bool:
    """Remove options of the script's framework that do not work as expected or change more; torch is set instead.

    Args:
        switches: What should be on.
        facts: Facts about the unchanged script; options are removed here.
        seen: Facts about the script with the switches.

    Returns:
        Whether there were such options.
    """
    on = switches.to_dict()
    in_torch, through = through_options(switches, facts)
    changes = {name: value for name, value in on.items() if name not in in_torch.to_dict()}
    if not through:
        return False
    if not _does_more(switches, facts, seen):
        changes = {name: value for name, value in changes.items() if _is_open(name, {**facts, **seen})}
    for options in options_of(changes, facts).values():
        for option in options:
            facts["framework"]["options"].pop(option, None)
    return bool(changes)


def _is_open(name: str, facts: Facts) -> bool:
    """Whether a switch could still be set."""
    knobs = [knob for knob in SCRIPT_KNOBS if name in knob.changes(facts)]
    return any(knob.why_not(facts) is None for knob in knobs)


def _does_more(switches: Switches, before: Facts, after: Facts) -> bool:
    """Whether a script has changed by more than the switches: in its precision, or in what it saves."""
    return bool(
        (after["tf32"] and not before["tf32"] and not switches.tf32)
        or (after["half"] and not before["half"] and switches.autocast == "off")
        or after["own_names"] != before["own_names"]
    )
