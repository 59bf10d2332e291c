"""A small network trained by hand, so that roundings, skipped work and frozen layers can be planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from frameworm.guard.agreement import ROUNDING_UNITS, Agreement, OutputErrors, StateErrors
from frameworm.guard.proof import Learning, StepEvidence

SAMPLES, WIDTH, HIDDEN, CLASSES, BATCH = 512, 16, 32, 4, 32
NAMES = ("first", "second")
COMPARED = (1, 3, 5, 6, 9, 13, 18, 23)

Rounding = Callable[[np.ndarray], np.ndarray]
Arrays = dict[str, np.ndarray]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 and back."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def to_fp32(values: np.ndarray) -> np.ndarray:
    """float32 as it is."""
    return values.astype(np.float32)


def to_fp64(values: np.ndarray) -> np.ndarray:
    """float64 throughout."""
    return values.astype(np.float64)


ROUNDINGS: dict[str, Rounding] = {"fp32": to_fp32, "bf16": to_bf16}


@dataclass(frozen=True)
class Faults:
    """How a side differs from an honest one.

    Attributes:
        kept: Samples of each batch that are computed; None: all.
        frozen: A layer that is not updated.
        reverse: The samples of a step in another order, which changes sums only.
        lie: Report the whole batch although only `kept` samples were computed.
        order_seed: Seed of the order of samples.
        factor: What the gradient of the first layer is multiplied with.
    """

    kept: int | None = None
    frozen: str | None = None
    reverse: bool = False
    lie: bool = False
    order_seed: int = 0
    factor: float = 1.0


HONEST = Faults()


def _data() -> tuple[np.ndarray, np.ndarray]:
    world = np.random.default_rng(99)
    centres = world.normal(size=(CLASSES, WIDTH))
    labels = world.integers(0, CLASSES, SAMPLES)
    return centres[labels] + 1.5 * world.normal(size=(SAMPLES, WIDTH)), labels


INPUTS, LABELS = _data()


def _step(weights: Arrays, step: int, rounding: Rounding, faults: Faults) -> tuple[float, Arrays]:
    """Loss and gradients of a step."""
    order = np.random.default_rng(faults.order_seed).permutation(SAMPLES)
    ids = order[np.arange(step * BATCH, (step + 1) * BATCH) % SAMPLES][: faults.kept]
    ids = ids[::-1] if faults.reverse else ids
    x, y = rounding(INPUTS[ids].astype(np.float32)), LABELS[ids]
    first, second = rounding(weights["first"]), rounding(weights["second"])
    hidden = rounding(np.maximum(rounding(x @ first), 0))
    scores = rounding(hidden @ second)
    scores = scores - scores.max(axis=1, keepdims=True)
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    loss = float(-np.log(shares[np.arange(len(ids)), y]).mean())
    slope = shares.copy()
    slope[np.arange(len(ids)), y] -= 1
    slope = rounding(slope / len(ids))
    gradients = {
        "second": rounding(hidden.T @ slope),
        "first": faults.factor * rounding(x.T @ rounding((slope @ second.T) * (hidden > 0))),
    }
    return loss, {name: gradient for name, gradient in gradients.items() if name != faults.frozen}


def _states(steps: int, rounding: Rounding, faults: Faults) -> list[Arrays]:
    """The weights before each step of Adam, and after the last."""
    start = np.random.default_rng(0)
    weights = {
        "first": (start.normal(size=(WIDTH, HIDDEN)) / 4).astype(np.float32),
        "second": (start.normal(size=(HIDDEN, CLASSES)) / 6).astype(np.float32),
    }
    means = {name: np.zeros_like(weights[name]) for name in NAMES}
    squares = {name: np.zeros_like(weights[name]) for name in NAMES}
    found = [dict(weights)]
    for step in range(steps):
        for name, gradient in _step(weights, step, rounding, faults)[1].items():
            means[name] = 0.9 * means[name] + 0.1 * gradient
            squares[name] = 0.999 * squares[name] + 0.001 * gradient**2
            ahead = means[name] / (1 - 0.9 ** (step + 1))
            size = np.sqrt(squares[name] / (1 - 0.999 ** (step + 1))) + 1e-8
            weights[name] = (weights[name] - 0.01 * ahead / size).astype(np.float32)
        found.append(dict(weights))
    return found


def train(rounding: Rounding = to_fp32, faults: Faults = HONEST, steps: int = 24) -> Learning:
    """Adam on a noisy classification."""
    states = _states(steps, rounding, faults)
    order = np.random.default_rng(faults.order_seed).permutation(SAMPLES)
    evidence = []
    for step in range(steps):
        ids = order[np.arange(step * BATCH, (step + 1) * BATCH) % SAMPLES]
        told = ids if faults.lie else ids[: faults.kept]
        loss = _step(states[step], step, rounding, faults)[0]
        evidence.append(StepEvidence(loss, str(sorted(told.tolist())), 10 * len(told)))
    moved = frozenset(name for name in NAMES if not np.array_equal(states[0][name], states[-1][name]))
    return Learning(evidence, moved)


def compare(
    rounding: Rounding = to_fp32, faults: Faults = HONEST, *, declared: str = "fp32", steps: tuple[int, ...] = COMPARED
) -> Agreement:
    """An honest side in float32 beside one with faults, at the states of the former.

    Args:
        rounding: Of the side with faults.
        faults: Of that side.
        declared: The precision that it is said to compute in.
        steps: At which they are compared.
    """
    states = _states(max(steps), to_fp32, HONEST)
    found, differences = [], []
    for step in steps:
        weights = states[step]
        draw = np.random.default_rng(step)
        nearby = {
            name: value * (1 + ROUNDING_UNITS["fp32"] * draw.uniform(-1, 1, value.shape).astype(np.float32))
            for name, value in weights.items()
        }
        sides: list[Arrays] = []
        exactly = {name: value.astype(np.float64) for name, value in weights.items()}
        for at, how, wrong in (
            (exactly, to_fp64, HONEST),
            (weights, to_fp32, HONEST),
            (weights, ROUNDINGS[declared], HONEST),
            (nearby, to_fp32, HONEST),
            (weights, rounding, faults),
        ):
            loss, gradients = _step(at, step, how, wrong)
            sides.append({"loss": np.array([loss]), **{f"gradient of {name}": gradients[name] for name in gradients}})
        true, baseline, expected, moved, candidate = sides
        outputs = []
        for name, value in true.items():
            if name not in candidate:
                differences.append(f"only one side computes the {name}")
                continue
            size = _length(value)
            shift = float(((candidate[name] - expected[name]) * value).sum()) / size**2
            errors = [_length(side[name] - value) for side in (baseline, expected)]
            noise, error = _length(moved[name] - baseline[name]), _length(candidate[name] - value)
            outputs.append(OutputErrors(name, value.size, size, *errors, noise, error, shift))
        found.append(StateErrors(step, outputs))
    unit = ROUNDING_UNITS[declared]
    more: dict[str, Any] = {"reference": "fp64", "unit": unit, "changes_precision": declared != "fp32"}
    return Agreement(found, sorted(set(differences)), {}, **more)


def _length(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))
