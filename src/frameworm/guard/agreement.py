"""Whether two ways of computing a training step agree, from what both gave at the same states.

Free-running losses part by themselves, because training amplifies rounding. So the two sides are put into the same
state, given the same samples, and their outputs are compared: the loss, every gradient before clipping, and buffers.

- **Errors.** A reference of higher precision says how wrong each side is. The candidate may be about twice as wrong as
  an eager step in its precision, and in fp32 by a ten-thousandth. Where rounding decides which of two numbers is the
  larger, a state is off by more; a quarter of the states may be. Outputs whose true value is smaller than their
  rounding noise, such as the gradient of a bias in front of a normalisation, are judged together.
- **Bias.** Rounding errors point in all directions; a wrong factor points along the gradient. The error's component
  along the reference gradient is averaged over the states. It must lie within half a percent; where noise makes it
  uncertain, the outputs are averaged too, and a bias of 5% that could hide in the noise leaves the verdict open.
- **Decisions.** Learning rates, weight decay, skipped steps and loss scales must be equal, and the update must be what
  torch's plain optimizer makes of the same gradient.
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
# Few elements make a ratio of two errors uncertain; so many at each state make it certain enough.
_ENOUGH_ELEMENTS = 64
_UNIT = ROUNDING_UNITS["fp32"]
# Needs no explanation: kernels of one precision differ in how they add up, and fp32 leaves room for much worse ones.
_HARMLESS = 5e-5
# A choice that rounding decides otherwise, as in a ReLU or a maximum, moves a gradient by less than this at a state.
_FLIPPED = 0.05
# A bias along the gradient that does not matter, and how well it must be known to be judged for one output alone.
BIAS_ALLOWED = 0.005
_BIAS_KNOWN = 0.3 * BIAS_ALLOWED
# An output that is less well known is flagged by itself only where chance is ruled out for hundreds of outputs.
_FOR_MANY = 2.6
# Where noise hides a bias of this size, or so much of the gradient's length, nothing is shown.
_BIAS_HIDDEN = 0.05
_LENGTH_HIDDEN = 0.1
_POOLED = "outputs below their rounding noise"


class OutputErrors(NamedTuple):
    """One output of a step at one state.

    Attributes:
        name: Such as `gradient encoder.weight`.
        elements: How many numbers it has.
        size: Length of the reference.
        baseline: Error of the config before the change.
        expected: Error of an eager step in the candidate's precision.
        noise: How far the baseline moves under perturbations as small as its rounding.
        candidate: Error of the config after the change.
        shift: Component of the candidate's error, less the expected one, along the reference, relative to its length.
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
    """The comparison at one state: after how many steps it was taken, and how far each output was off."""

    step: int
    outputs: Sequence[OutputErrors]


@dataclass(frozen=True, slots=True)
class Draws:
    """Steps from one state with random draws as in training.

    Attributes:
        count: Steps of each side.
        before: Mean of the loss of the baseline's steps, its deviation, and the spread of its gradients.
        after: The same of the candidate's.
        repeated: Pairs of the candidate's steps that came out the same.
        repeated_before: The same of the baseline.
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
        differences: Decisions that are not equal, in words: rates, decay, skipped steps.
        updates: For each parameter the error of its update, in multiples of what rounding explains.
        reference: What errors are measured against: `fp64`, `fp32`, `eager` (a step in the same precision, where the
            model draws random numbers itself) or `baseline` (itself, for want of a better one).
        unit: Unit of rounding of the coarser precision of both sides.
        changes_precision: The candidate computes in another precision.
        repeats: Relative distance of two runs of the baseline's step from the same state; 0: it is deterministic.
        draws: Comparison with random draws; None: nothing is drawn, or it was not compared.
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
        """What was compared, without the measurements."""
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
        """Plain values; `from_json` reads them back."""
        plain = asdict(self)
        plain["states"] = [{"step": item.step, "outputs": [list(row) for row in item.outputs]} for item in self.states]
        return plain

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Agreement:
        """What `to_json` wrote."""
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
        states: How many states both sides started from.
        reference: See `Agreement`.
        unit: See `Agreement`.
        repeats: See `Agreement`.
        draws: Steps of each side with random draws as in training; 0: not compared.
        updates: Parameters whose update was compared with that of torch's plain optimizer.
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
        times: One as a multiple of the other; more than `allowed` is a change.
        bias: Mean component of the error along the reference, relative to its length.
        bias_error: Half the width of the 95% interval of that.
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
    """Whether the sides agree (None: not shown), what that rests on, and the outputs, worst first."""

    passed: bool | None
    detail: str
    outputs: Sequence[OutputAgreement]


def judge_agreement(measured: Agreement) -> AgreementVerdict:
    """Judge a comparison; see the module."""
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
    """Every output over all states, those below their noise together, the least alike first."""
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
    """Several outputs as one long one, state by state."""
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
    bias = sum(shifts) / len(shifts)  # not by fsum, which raises on infinities of both signs
    scatter = math.inf
    if len(shifts) > 1:
        variance = sum((shift - bias) * (shift - bias) for shift in shifts) / (len(shifts) - 1)
        scatter = quantile(len(shifts) - 1) * math.sqrt(variance / len(shifts))
    scale = size or 1.0
    return OutputAgreement(name, error / scale, explained / scale, times, allowed, bias, scatter, below_noise)


def _without_flips(rows: Sequence[OutputErrors], unit: float) -> list[OutputErrors]:
    """The three quarters of the states at which an output is least off, and those of the others where it is by much."""

    def times(row: OutputErrors) -> float:
        explained = row.explained + max(unit, _HARMLESS) * row.size
        return row.candidate / explained if explained > 0 else row.candidate

    in_order, most_off = sorted(rows, key=times), len(rows) // 4
    kept, others = in_order[: len(rows) - most_off], in_order[len(rows) - most_off :]
    return kept + [row for row in others if not row.candidate < _FLIPPED * row.size]


def output_problem(item: OutputAgreement) -> str | None:
    """What speaks against one output, in words; None: nothing does."""
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
    """Whether a bias is shown that is not shown to be small enough."""
    return abs(item.bias) > item.bias_error


def _update_problems(updates: Mapping[str, float]) -> list[str]:
    wrong = sorted((name for name, times in updates.items() if not times <= 1), key=lambda name: -updates[name])
    if not wrong:
        return []
    more = f" (and {len(wrong) - 1} more parameters)" if len(wrong) > 1 else ""
    return [f"the optimizer's update of {wrong[0]}{more} is not what its settings and this gradient give"]


def _draw_problems(draws: Draws, unit: float) -> list[str]:
    """Random draws must differ from step to step, spread as widely, and mean the same."""
    if draws.repeated > draws.repeated_before:
        return [f"random draws repeat: {draws.repeated} of {draws.count} steps from one state came out the same"]
    mean, deviation, spread = draws.before
    other_mean, other_deviation, other_spread = draws.after
    # The deviation of a standard deviation from so many draws, five times.
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
