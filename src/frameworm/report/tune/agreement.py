"""How well both sides of a proof agree, as rows: the kind of change, what was compared, and each layer's errors.

Read from `tune.json` as plain values, like `tables`. Proofs of older versions have no outputs and give no rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frameworm.guard.agreement import BIAS_ALLOWED, ROUNDING_UNITS, OutputAgreement, output_problem
from frameworm.report.kit import tables
from frameworm.report.tune.tables import figure, mapping, sequence

CHANGES = {
    "rounding": "should compute the same in the same precision, by other kernels or in another order",
    "precision": "should compute the same, in another precision",
    "approximation": "computes other gradients, so a quality check decides and not a comparison step by step",
}
TOP_LEVEL = "(top level)"
_REFERENCES = {
    "fp64": "errors measured against the same step in fp64",
    "fp32": "errors measured against the same step in fp32, eager and without TF32",
    "eager": "errors measured against an eager step in the same precision, as the model draws random numbers itself",
    "baseline": "errors measured against the step before the change",
}
_KINDS = {"gradient of ": "gradient of", "change of ": "buffer"}
# As percentages, smaller ones would have more zeros than digits.
_LEAST_PERCENT = 1e-4


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One output of a step.

    Attributes:
        name: Its name within its layer, such as `gradient of weight`.
        error: Error of the changed side, relative to the norm of the output.
        explained: The error that rounding explains.
        limit: The largest error that is accepted.
        bias: Mean error along the output with its 95% interval.
        used: The error as a fraction of its limit, for drawing; at most 1.
        expected: The error that rounding explains as a fraction of the limit.
        problem: Why the output is not accepted; empty if it is.
    """

    name: str
    error: str
    explained: str
    limit: str
    bias: str
    used: float
    expected: float
    problem: str

    @property
    def too_far(self) -> bool:
        """Whether its problem is the size of its error; the only other problem is a bias."""
        return bool(self.problem) and self.used >= 1


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A module and its outputs, sorted by how close they are to their limits, closest first."""

    layer: str
    outputs: tuple[OutputRow, ...]

    @property
    def worst(self) -> OutputRow:
        """The output that is closest to its limits, or furthest beyond them."""
        return self.outputs[0]


def change_text(proof: Mapping[str, Any]) -> str:
    """The class of the change and its meaning; empty if the proof does not say."""
    name = tables.plain(proof.get("change") or "")
    return f"{name}: {CHANGES[name]}" if name in CHANGES else name


def compared_text(proof: Mapping[str, Any]) -> str:
    """What both sides were compared on; empty for a proof without a comparison from the same states."""
    given = mapping(proof.get("compared"))
    states = figure(given.get("states"))
    if states is None:
        return ""
    parts = [f"{states:.0f} states with the same samples", "dropout off"]
    reference = tables.plain(given.get("reference") or "")
    parts.append(_REFERENCES.get(reference, f"errors measured against {reference or tables.UNKNOWN}"))
    unit = figure(given.get("unit"))
    names = [name.replace("tf32", "TF32") for name, value in ROUNDING_UNITS.items() if value == unit]
    if unit is not None and names:
        parts.append(f"coarsest precision {' or '.join(names)}, which rounds by up to {relative(unit)}")
    updates, worst = figure(given.get("updates")), figure(given.get("worst_update"))
    if updates:
        most = "" if worst is None else f", errors at most {worst:.2g} times what rounding explains"
        parts.append(f"updates of {updates:.0f} parameters compared with those of torch's plain optimizer{most}")
    draws = figure(given.get("draws"))
    if draws:
        parts.append(f"{draws:.0f} steps of each side with dropout and other random draws as in training")
    repeats = figure(given.get("repeats"))
    if repeats:
        parts.append(f"the step is not deterministic: repeats differ by {relative(repeats)}")
    return "; ".join(parts)


def layer_rows(proof: Mapping[str, Any]) -> list[LayerRow]:
    """Outputs grouped by their module, with the layer closest to its limits first."""
    layers: dict[str, list[tuple[float, OutputRow]]] = {}
    for item in sequence(proof.get("outputs")):
        output = _output(item)
        if output is not None:
            layer, name = _place(output.name)
            layers.setdefault(layer, []).append((_badness(output), _row(name, output)))
    found = []
    for layer, rows in layers.items():
        rows.sort(key=lambda pair: -pair[0])
        found.append((rows[0][0], LayerRow(layer, tuple(row for _, row in rows))))
    found.sort(key=lambda pair: -pair[0])
    return [row for _, row in found]


def relative(value: float) -> str:
    """A relative error in readable form: percent, or a power of ten if that would have many zeros."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    if abs(value) < _LEAST_PERCENT:
        return f"{value:.1e}"
    return f"{100 * value:.2g}%" if abs(value) < 1 else f"{value:.0%}" if abs(value) < 10 else f"{value:.2g} times"


def _output(item: Any) -> OutputAgreement | None:
    """A row as `tune.json` holds it, where non-finite numbers are null."""
    values = list(sequence(item))
    if len(values) < 7 or not isinstance(values[0], str):
        return None
    error, explained, times, allowed, bias, bias_error = (figure(value) for value in values[1:7])
    if explained is None or allowed is None or allowed <= 0:
        return None
    return OutputAgreement(
        tables.plain(values[0]),
        math.nan if error is None else error,
        explained,
        math.inf if times is None else times,
        allowed,
        math.nan if bias is None else bias,
        math.inf if bias_error is None else bias_error,
        len(values) > 7 and values[7] is True,
    )


def _place(name: str) -> tuple[str, str]:
    """The layer of an output, and the output's name within it."""
    for begin, kind in _KINDS.items():
        if name.startswith(begin):
            layer, _, own = name.removeprefix(begin).rpartition(".")
            return layer or TOP_LEVEL, f"{kind} {own}"
    return name, ""  # the loss, or outputs that are judged together


def _badness(output: OutputAgreement) -> float:
    """How close an output is to its limits; above 1 it is beyond one of them."""
    if output_problem(output) is not None:
        return math.inf
    bias = 0.0 if output.below_noise or not math.isfinite(output.bias) else abs(output.bias) / BIAS_ALLOWED
    return max(output.times / output.allowed, bias)


def _row(name: str, output: OutputAgreement) -> OutputRow:
    if output.below_noise:
        # Errors relative to almost nothing are huge; only their ratio to rounding is meaningful.
        figures = f"{output.times:.2g}x rounding", "", f"{output.allowed:.2g}x rounding"
        used, expected = output.times / output.allowed, 1 / output.allowed
        return OutputRow(name, *figures, "not judged", min(1.0, used), min(1.0, expected), output_problem(output) or "")
    # The limit also allows for differences in the last digit, which `times` counts and `explained` does not.
    known = math.isfinite(output.error) and math.isfinite(output.times) and output.times > 0
    base = output.error / output.times if known else output.explained
    limit = output.allowed * base
    return OutputRow(
        name,
        relative(output.error),
        relative(output.explained),
        relative(limit),
        _bias(output),
        min(1.0, output.error / limit) if limit > 0 and math.isfinite(output.error) else 1.0 * (output.error != 0),
        min(1.0, output.explained / limit) if limit > 0 else 0.0,
        output_problem(output) or "",
    )


def _bias(output: OutputAgreement) -> str:
    if not math.isfinite(output.bias):
        return tables.UNKNOWN
    if not math.isfinite(output.bias_error):
        return f"{output.bias:+.2%} ± {tables.UNKNOWN}"
    if not output.bias and not output.bias_error:
        return "0"
    if abs(output.bias) + output.bias_error < _LEAST_PERCENT:
        return f"{output.bias:+.0e} ± {output.bias_error:.0e}"
    return f"{output.bias:+.2%} ± {output.bias_error:.2%}"
