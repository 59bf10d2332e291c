"""A small network trained by hand, so that roundings, skipped work and frozen layers can be planted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from frameworm.guard.proof import Learning, StepEvidence

SAMPLES, WIDTH, HIDDEN, CLASSES = 512, 16, 32, 4
NAMES = ("first", "second")


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 and back."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def exact(values: np.ndarray) -> np.ndarray:
    """float32 as it is."""
    return values.astype(np.float32)


def train(
    *,
    rounding: Callable[[np.ndarray], np.ndarray] = exact,
    seed: int = 0,
    steps: int = 40,
    batch: int = 32,
    push: float = 0.0,
    push_seed: int = 1,
    kept: int | None = None,
    frozen: str | None = None,
    reverse: bool = False,
    lie: bool = False,
    lr: float = 0.01,
    order_seed: int | None = None,
) -> Learning:
    """Adam on a noisy classification.

    Args:
        rounding: Applied to every operand and result.
        push: Weights are moved by so much times a random number, relative to each.
        kept: Samples of each batch that are computed; None: all.
        frozen: A layer that is not updated.
        reverse: The samples of a step in another order, which changes sums only.
        lie: Report the whole batch although only `kept` samples were computed.
        order_seed: Seed of the order of samples, if another.
    """
    world = np.random.default_rng(99)
    centres = world.normal(size=(CLASSES, WIDTH))
    labels = world.integers(0, CLASSES, SAMPLES)
    inputs = (centres[labels] + 1.5 * world.normal(size=(SAMPLES, WIDTH))).astype(np.float32)
    start = np.random.default_rng(seed)
    weights = {
        "first": (start.normal(size=(WIDTH, HIDDEN)) / 4).astype(np.float32),
        "second": (start.normal(size=(HIDDEN, CLASSES)) / 6).astype(np.float32),
    }
    order = np.random.default_rng(seed if order_seed is None else order_seed).permutation(SAMPLES)
    pusher = np.random.default_rng(push_seed)
    for name in NAMES:
        moves = 1 + push * pusher.uniform(-1, 1, weights[name].shape)
        weights[name] = (weights[name] * moves).astype(np.float32)
    begin = {name: weights[name].copy() for name in NAMES}
    means = {name: np.zeros_like(weights[name]) for name in NAMES}
    squares = {name: np.zeros_like(weights[name]) for name in NAMES}
    evidence = []
    for step in range(steps):
        places = np.arange(step * batch, (step + 1) * batch) % SAMPLES
        ids = order[places]
        told = ids if lie else ids[:kept]
        ids = ids[:kept]
        if reverse:
            ids = ids[::-1]
        x, y = rounding(inputs[ids]), labels[ids]
        first, second = rounding(weights["first"]), rounding(weights["second"])
        hidden = rounding(np.maximum(rounding(x @ first), 0))
        scores = rounding(hidden @ second).astype(np.float32)
        scores = scores - scores.max(axis=1, keepdims=True)
        shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        loss = float(-np.log(shares[np.arange(len(ids)), y]).mean())
        evidence.append(StepEvidence(loss, str(sorted(told.tolist())), 10 * len(told)))
        slope = shares.copy()
        slope[np.arange(len(ids)), y] -= 1
        slope = rounding((slope / len(ids)).astype(np.float32))
        gradients = {
            "second": rounding(hidden.T @ slope),
            "first": rounding(x.T @ rounding((slope @ second.T) * (hidden > 0))),
        }
        for name in NAMES:
            if name == frozen:
                continue
            means[name] = 0.9 * means[name] + 0.1 * gradients[name]
            squares[name] = 0.999 * squares[name] + 0.001 * gradients[name] ** 2
            ahead = means[name] / (1 - 0.9 ** (step + 1))
            size = np.sqrt(squares[name] / (1 - 0.999 ** (step + 1))) + 1e-8
            weights[name] = (weights[name] - lr * ahead / size).astype(np.float32)
    updates = {name: float(np.linalg.norm(weights[name] - begin[name])) for name in NAMES}
    return Learning(evidence, updates)
