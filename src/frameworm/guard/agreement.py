"""Whether two ways of computing a training step agree, judged by their outputs at the same states.

The losses of two free-running trainings diverge anyway, because training amplifies rounding. So both sides are put into
the same state and given the same samples, and their outputs are compared: the loss, every gradient before clipping, and
buffers.

- **Errors.** A reference in higher precision shows how wrong each side is. The candidate's error may be about twice
  that of an eager step in its precision, and in fp32 a ten-thousandth. Where rounding decides which of two numbers is
  larger, a state is off by more; a quarter of the states may be. Outputs whose true value is smaller than their
  rounding noise, such as the gradient of a bias in front of a normalisation, are judged together.
- **Bias.** Rounding errors point in all directions; a wrong factor points along the gradient. The error's component
  along the reference gradient is averaged over the states. It must be within half a percent; if noise makes it
  uncertain, it is averaged over outputs too, and if a bias of 5% could hide in the noise, the verdict is left open.
- **Decisions.** Learning rates, weight decay, skipped steps and loss scales must be equal, and the update must be what
  torch's plain optimizer computes from the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from frameworm.records.estimate import quantile

# Half the distance between 1 and the next larger number.
ROUNDING_UNITS: dict[str, float] = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}

LEAST_STATES = 4
# The candidate's error as a multiple of that of an eager step in the same precision.
_MOST_TIMES = 2.0
# With few elements the ratio of two errors is uncertain; this many per state are enough.
_ENOUGH_ELEMENTS = 64
_UNIT = ROUNDING_UNITS["fp32"]
# Errors below this need no explanation: kernels of one precision sum in different orders, and fp32 leaves ample room.
_HARMLESS = 5e-5
# When rounding flips a choice, as in a ReLU or a maximum, a gradient changes by less than this at one state.
_FLIPPED = 0.05
# A bias along the gradient that does not matter, and how precisely it must be known to judge one output alone.
BIAS_ALLOWED = 0.005
_BIAS_KNOWN = 0.3 * BIAS_ALLOWED
# A less precisely known output is only flagged if chance is ruled out for hundreds of outputs.
_FOR_MANY = 2.6
# If noise can hide a bias of this size, or this fraction of the gradient's length, nothing is proven.
_BIAS_HIDDEN = 0.05
_LENGTH_HIDDEN = 0.1
_POOLED = "outputs below their rounding noise"


class OutputErrors(NamedTuple):
    """One output of a step at one state.

    Attributes:
        name: For example `gradient encoder.weight`.
        elements: Number of elements.
        size: Length of the reference.
        baseline: Error of the config before the change.
        expected: Error of an eager step in the candidate's precision.
        noise: How far the baseline moves under perturbations as small as its rounding.
        candidate: Error of the config after the change.
        shift: Component of the candidate's error minus the expected one, along the reference, relative to its length.
    """

    name: str
    elements: int
    size: float
    baseline: float
    expected: float
    noise: float
    candidate: float
    shift: float

    @property
    def explained(self) -> float:
        """The error that rounding explains."""
        return max(self.baseline, self.expected, self.noise)


@dataclass(frozen=True, slots=True)
class StateErrors:
    """The comparison at one state: the number of steps before it, and the errors of each output."""

    step: int
    outputs: Sequence[OutputErrors]


@dataclass(frozen=True, slots=True)
class Draws:
    """Steps from one state with random draws as in training.

    Attributes:
        count: Number of steps on each side.
        before: For the baseline: mean of the loss, its deviation, and the spread of the gradients.
        after: The same for the candidate.
        repeated: Number of the candidate's steps with identical results.
        repeated_before: The same for the baseline.
    """

    count: int
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    repeated: int = 0
    repeated_before: int = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """What was compared.

    Attributes:
        states: One entry per compared state.
        differences: Decisions that differ, in words: rates, decay, skipped steps.
        updates: For each parameter the error of its update, in multiples of what rounding explains.
        reference: What errors are measured against: `fp64`, `fp32`, `eager` (a step in the same precision, for a model
            that draws random numbers itself) or `baseline` (itself, for lack of a better one).
        unit: Unit of rounding of the coarser precision of both sides.
        changes_precision: True if the candidate computes in another precision.
        repeats: Relative distance between two runs of the baseline's step from the same state; 0 if deterministic.
        draws: Comparison with random draws; None if nothing is drawn or it was not compared.
    """

    states: Sequence[StateErrors]
    differences: Sequence[str] = ()
    updates: Mapping[str, float] = field(default_factory=dict)
    reference: str = "baseline"
    unit: float = _UNIT
    repeats: float = 0.0
    draws: Draws | None = None
    changes_precision: bool = False

    @property
    def compared(self) -> Compared:
        """The extent of the comparison, without the measurements."""
        return Compared(
            len(self.states),
            self.reference,
            self.unit,
            self.repeats,
            0 if self.draws is None else self.draws.count,
            len(self.updates),
            max(self.updates.values(), default=0.0),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `from_json` reads them back."""
        plain = asdict(self)
        plain["states"] = [{"step": item.step, "outputs": [list(row) for row in item.outputs]} for item in self.states]
        return plain

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Agreement:
        """Read what `to_json` returned."""
        draws = values.get("draws")
        states = [
            StateErrors(item["step"], [OutputErrors(*row) for row in item["outputs"]]) for item in values["states"]
        ]
        read = None
        if draws is not None:
            read = Draws(**{**draws, "before": tuple(draws["before"]), "after": tuple(draws["after"])})
        return cls(**{**values, "states": states, "draws": read})


@dataclass(frozen=True, slots=True)
class Compared:
    """The extent of a comparison, for reports.

    Attributes:
        states: Number of states that both sides started from.
        reference: See `Agreement`.
        unit: See `Agreement`.
        repeats: See `Agreement`.
        draws: Steps of each side with random draws as in training; 0 if not compared.
        updates: Number of parameters whose update was compared with that of torch's plain optimizer.
        worst_update: The largest error of these, in multiples of what rounding explains.
    """

    states: int
    reference: str
    unit: float
    repeats: float
    draws: int
    updates: int
    worst_update: float


class OutputAgreement(NamedTuple):
    """One output, or several that are judged together, over all states.

    Attributes:
        error: Error of the candidate, relative to the reference.
        explained: Error that rounding explains, relative to the reference.
        times: `error` as a multiple of `explained`; more than `allowed` means that the change alters the output.
        bias: Mean component of the error along the reference, relative to its length.
        bias_error: Half the width of the 95% interval of `bias`.
    """

    name: str
    error: float
    explained: float
    times: float
    allowed: float
    bias: float
    bias_error: float
    below_noise: bool = False


class AgreementVerdict(NamedTuple):
    """Whether the sides agree (None: not proven), the reason, and the outputs, worst first."""

    passed: bool | None
    detail: str
    outputs: Sequence[OutputAgreement]


def judge_agreement(measured: Agreement) -> AgreementVerdict:
    """Judge a comparison; the module docstring describes the rules."""
    outputs = agreement_per_output(measured)
    problems = [*measured.differences, *_update_problems(measured.updates)]
    off = [problem for item in outputs if (problem := output_problem(item)) is not None]
    if not problems and off and len(off) == len(outputs) and measured.reference == "eager":
        return AgreementVerdict(None, "the model draws random numbers, and the two sides draw different ones", outputs)
    problems += off
    if measured.draws is not None:
        problems += _draw_problems(measured.draws, measured.unit)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return AgreementVerdict(False, problems[0] + more, outputs)
    if len(measured.states) < LEAST_STATES:
        return AgreementVerdict(None, f"only {len(measured.states)} states could be compared", outputs)
    lost = [item for item in outputs if not math.isfinite(item.explained)]
    if lost:
        return AgreementVerdict(None, f"without the change there is no finite {lost[0].name}", outputs)
    hidden = [item for item in outputs if not abs(item.bias) + item.bias_error <= _BIAS_HIDDEN]
    judged = [item for item in outputs if not item.below_noise]
    if not judged:
        return AgreementVerdict(None, "every gradient is smaller than its rounding noise", outputs)
    if hidden:
        return AgreementVerdict(None, f"noise hides what happens to {hidden[0].name}", outputs)
    share = _share_below_noise(measured)
    if share > _LENGTH_HIDDEN:
        return AgreementVerdict(None, f"noise hides what happens to {share:.0%} of the gradient", outputs)
    return AgreementVerdict(True, _agreed(measured, judged), outputs)


def agreement_per_output(measured: Agreement) -> list[OutputAgreement]:
    """Return every output over all states, those below their noise together, the worst agreement first."""
    rows = _by_name(measured)
    alone = {name: items for name, items in rows.items() if not _is_noise(items)}
    below = {name: items for name, items in rows.items() if name not in alone}
    judged = [_over_states(name, items, measured.unit) for name, items in alone.items()]
    vague = {item.name for item in judged if item.bias_error > _BIAS_KNOWN}
    found = [item for item in judged if item.name not in vague]
    if vague:
        together = _over_states("", _merged([alone[name] for name in vague]), measured.unit)
        # Each keeps its own error; the bias is that of all of them together.
        for item in (item for item in judged if item.name in vague):
            stands_out = abs(item.bias) - _FOR_MANY * item.bias_error > BIAS_ALLOWED
            found.append(item if stands_out else item._replace(bias=together.bias, bias_error=together.bias_error))
    if below:
        pooled = _over_states(_POOLED, _merged(list(below.values())), measured.unit, below_noise=True)
        name = "1 output below its rounding noise" if len(below) == 1 else f"{len(below)} {_POOLED}"
        found.append(pooled._replace(name=name, bias=0.0, bias_error=0.0))
    return sorted(found, key=lambda item: -max(item.times / item.allowed, abs(item.bias) / BIAS_ALLOWED))


def _share_below_noise(measured: Agreement) -> float:
    """Length of the gradients below their noise, relative to that of all."""
    rows = {name: items for name, items in _by_name(measured).items() if name.startswith("gradient ")}
    lengths = {name: _rms(row.size for row in items) for name, items in rows.items()}
    whole = math.hypot(*lengths.values())
    return math.hypot(*(lengths[name] for name in rows if _is_noise(rows[name]))) / whole if whole else 0.0


def _by_name(measured: Agreement) -> dict[str, list[OutputErrors]]:
    rows: dict[str, list[OutputErrors]] = {}
    for state in measured.states:
        for row in state.outputs:
            rows.setdefault(row.name, []).append(row)
    return rows


def _is_noise(rows: Sequence[OutputErrors]) -> bool:
    return _rms(row.size for row in rows) <= 2 * _rms(row.explained for row in rows)


def _merged(outputs: Sequence[Sequence[OutputErrors]]) -> list[OutputErrors]:
    """Merge several outputs into one long one, state by state."""
    found = []
    for rows in zip(*outputs):
        squares = sum(row.size**2 for row in rows)
        shift = sum(row.shift * row.size**2 for row in rows) / squares if squares else 0.0
        size, baseline, expected, noise, candidate = (
            math.hypot(*values) for values in zip(*((row[2], row[3], row[4], row[5], row[6]) for row in rows))
        )
        elements = sum(row.elements for row in rows)
        found.append(OutputErrors("", elements, size, baseline, expected, noise, candidate, shift))
    return found


def _over_states(name: str, rows: Sequence[OutputErrors], unit: float, *, below_noise: bool = False) -> OutputAgreement:
    size = _rms(row.size for row in rows)
    explained = _rms(row.explained for row in rows)
    floor = max(unit, _HARMLESS) * size
    error = _rms(row.candidate for row in _without_flips(rows, unit))
    elements = len(rows) * min(rows[0].elements, _ENOUGH_ELEMENTS)
    allowed = _MOST_TIMES * (1 + 4 / math.sqrt(elements))
    times = error / (explained + floor) if explained + floor != 0 else (math.inf if error else 0.0)
    shifts = [row.shift for row in rows]
    bias = sum(shifts) / len(shifts)  # not with fsum, which raises on infinities of both signs
    scatter = math.inf
    if len(shifts) > 1:
        variance = sum((shift - bias) * (shift - bias) for shift in shifts) / (len(shifts) - 1)
        scatter = quantile(len(shifts) - 1) * math.sqrt(variance / len(shifts))
    scale = size or 1.0
    return OutputAgreement(name, error / scale, explained / scale, times, allowed, bias, scatter, below_noise)


def _without_flips(rows: Sequence[OutputErrors], unit: float) -> list[OutputErrors]:
    """The best three quarters of the states for an output, and those of the rest that are off by more than a flip."""

    def times(row: OutputErrors) -> float:
        explained = row.explained + max(unit, _HARMLESS) * row.size
        return row.candidate / explained if explained > 0 else row.candidate

    in_order, most_off = sorted(rows, key=times), len(rows) // 4
    kept, others = in_order[: len(rows) - most_off], in_order[len(rows) - most_off :]
    return kept + [row for row in others if not row.candidate < _FLIPPED * row.size]


def output_problem(item: OutputAgreement) -> str | None:
    """Describe what is wrong with one output; None if nothing is."""
    if not math.isfinite(item.error):
        return f"{item.name} is not finite"
    if item.times > item.allowed:
        return f"{item.name} is off by {item.error:.2g} of its length, {item.times:.2g} times what rounding explains"
    if item.below_noise:
        return None
    word = "long" if item.bias > 0 else "short"
    if abs(item.bias) - item.bias_error > BIAS_ALLOWED:
        return f"{item.name} is {_percent(item.bias)} too {word} on average"
    if abs(item.bias) + item.bias_error > BIAS_ALLOWED and _stands_out(item):
        return f"{item.name} may be {_percent(item.bias)} too {word}"
    return None


def _stands_out(item: OutputAgreement) -> bool:
    """True if there is evidence of a bias that has not been shown to be small enough."""
    return abs(item.bias) > item.bias_error


def _update_problems(updates: Mapping[str, float]) -> list[str]:
    wrong = sorted((name for name, times in updates.items() if not times <= 1), key=lambda name: -updates[name])
    if not wrong:
        return []
    more = f" (and {len(wrong) - 1} more parameters)" if len(wrong) > 1 else ""
    return [f"the optimizer's update of {wrong[0]}{more} is not what its settings and this gradient give"]


def _draw_problems(draws: Draws, unit: float) -> list[str]:
    """Random draws must differ from step to step, spread equally and have the same mean."""
    if draws.repeated > draws.repeated_before:
        return [f"random draws repeat: {draws.repeated} of {draws.count} steps from one state came out the same"]
    mean, deviation, spread = draws.before
    other_mean, other_deviation, other_spread = draws.after
    # Five times the standard error of a standard deviation from this many draws.
    times = 1 + 5 / math.sqrt(2 * max(draws.count - 1, 1))
    if spread > 0 and not spread / times <= other_spread <= spread * times:
        return [f"random draws move the gradient by {other_spread:.3g} where they moved it by {spread:.3g}"]
    error = math.hypot(deviation, other_deviation) / math.sqrt(draws.count)
    if abs(other_mean - mean) > 5 * error + unit * abs(mean):
        return [f"with random draws the loss is {other_mean:.6g} on average where it was {mean:.6g}"]
    return []


def _agreed(measured: Agreement, judged: Sequence[OutputAgreement]) -> str:
    worst = max(judged, key=lambda item: item.times)
    bias = max(judged, key=lambda item: abs(item.bias))
    against = {"fp64": "an fp64 reference", "fp32": "an fp32 reference", "eager": "an eager step"}.get(
        measured.reference, "the step before the change"
    )
    text = (
        f"gradients of {len(judged)} outputs agree at {len(measured.states)} states: errors against {against} at most "
        f"{worst.times:.2g} times what rounding explains, bias at most {_percent(bias.bias)}"
    )
    if measured.repeats > 0:
        text += f"; the step is not deterministic (repeats differ by {measured.repeats:.1g})"
    return text


def _percent(value: float) -> str:
    return f"{abs(value):.2%}"


def _rms(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0
