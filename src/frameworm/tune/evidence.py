"""What the ranks of a run tell about its learning, as the evidence that a proof asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from frameworm.guard.proof import Learning, StepEvidence
from frameworm.tune.sample_hash import add_hashes


def merged(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[Learning]:
    """The learnings of a run from what its ranks told."""
    return [_learning([rank[number] for rank in ranks]) for number in range(len(ranks[0]))]


def _learning(parts: Sequence[dict[str, Any]]) -> Learning:
    steps = []
    for step in range(min(len(part["losses"]) for part in parts)):
        losses = [(loss, count) for loss, count in (part["losses"][step] for part in parts) if loss is not None]
        total = math.fsum(count for _, count in losses)
        loss = math.fsum(loss * count for loss, count in losses) / total if total else math.nan
        tokens = [part["real_tokens"][step] for part in parts]
        samples = add_hashes([part["samples"][step] for part in parts])
        steps.append(StepEvidence(loss, samples, None if None in tokens else sum(tokens)))
    return Learning(steps, parts[0]["updates"])
