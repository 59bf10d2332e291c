"""Whatever a record holds: no exception, shares within 0 and 1, evidence for every finding, the same answer twice."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
import typing
from types import UnionType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from planted_facts import make_record, make_steps

from frameworm.diagnose.rules.cost import SEVERITIES
from frameworm.diagnose.rules.judge import CODES, judge
from frameworm.diagnose.targets import grade_targets
from frameworm.records import estimate, observations, schema
from frameworm.records.schema import PHASES, RunRecord, StepRecord

NUMBERS = (0.0, 1e-12, 0.001, 0.03, 0.5, 0.97, 1.0, 2.0, 50.0, 1e12, 1e300, 5e-324, -1.0, math.nan, math.inf)
COUNTS = (0, 1, 2, 8, 64, 1000, 10**12, 2**40)
WORDS = ("", "cpu", "NVIDIA H200", "fp32", "engine", "attached", "thermal", "forward")
KEYS = (*PHASES, "sync_s", "logging_s", "device", "cpus_usable", "torch_threads", "memory_bytes")
NAMES = {**vars(estimate), **vars(schema), **vars(observations)}


def invent(draw: random.Random, kind: Any) -> Any:
    """Anything a field may hold, and now and then None for a number that should be there."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return invent(draw, draw.choice(arguments))
    if kind is type(None):
        return None
    if origin is list:
        return [item for _ in range(draw.randrange(4)) if (item := invent(draw, arguments[0])) is not None]
    if origin is dict:
        return {key: invent(draw, arguments[1]) for key in draw.sample(KEYS, draw.randrange(8))}
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: invent(draw, hint) for name, hint in hints.items()})  # type: ignore[operator]
    if kind is bool:
        return draw.random() < 0.5
    if kind is str:
        return draw.choice(WORDS)
    if kind is float:
        return draw.choice((None, *NUMBERS, draw.random(), draw.random()))
    if kind is int:
        return draw.choice((None, *COUNTS))
    return draw.choice((None, *NUMBERS, *WORDS, "9.0"))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, NAMES)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


CONFIGS: tuple[Any, ...] = (
    None,
    {},
    *({"data": {"num_workers": count, "batching": "packed"}} for count in (0, 4, "auto", None)),
    {"parallel": {"backend": "nccl"}, "gpu": {"memory_fraction": 0.9}, "checkpoint": {"every_steps": None}},
)
SEEDS = st.integers(0, 2**32)


def check(record: RunRecord, **inputs: Any) -> None:
    before = copy.deepcopy(record)
    judgement = judge(record, **inputs)
    assert repr(judge(record, **inputs)) == repr(judgement)
    assert repr(record) == repr(before), "judging changes no record"
    codes = [finding.code for finding in judgement.findings]
    assert len(set(codes)) == len(codes)
    assert set(codes) <= set(CODES)
    loud = [finding for finding in judgement.findings if finding.severity != "info"]
    assert judgement.verdict == loud[0].code if loud else judgement.verdict in ("healthy", "inconclusive")
    assert (judgement.verdict == "inconclusive") == any(note.startswith("inconclusive") for note in judgement.notes)
    for finding in judgement.findings:
        assert finding.evidence
        assert None not in finding.evidence.values()
        assert finding.severity in SEVERITIES
        assert finding.share is None or 0 <= finding.share <= 1
        for remedy in finding.remedies:
            assert remedy.text
        gain = finding.expected_speedup
        if gain is not None:
            assert 1 <= gain.low <= gain.value <= gain.high


@settings(max_examples=200, deadline=None)
@given(seed=SEEDS)
def test_any_record_can_be_judged(seed: int) -> None:
    draw = random.Random(seed)
    record = invent(draw, RunRecord)
    steps = draw.choice((None, [invent(draw, StepRecord) for _ in range(draw.randrange(40))]))
    baseline = draw.choice((None, invent(draw, RunRecord)))
    check(record, steps=steps, config=draw.choice(CONFIGS), baseline=baseline)
    assert len(grade_targets(record)) in (6, 8)  # on a CPU two less


@settings(max_examples=200, deadline=None)
@given(
    phases=st.dictionaries(st.sampled_from(PHASES), st.floats(0, 0.1), min_size=1),
    metrics=st.dictionaries(st.sampled_from(["sync_s", "logging_s", "syncs"]), st.floats(0, 0.1)),
    noise=st.floats(0, 1),
    device=st.sampled_from(["cpu", "NVIDIA H200"]),
    seed=SEEDS,
)
def test_any_steps_can_be_judged(
    phases: dict[str, float], metrics: dict[str, float], noise: float, device: str, seed: int
) -> None:
    draw = random.Random(seed)
    fields = {
        "system": invent(draw, observations.SystemSummary),
        "memory": invent(draw, schema.Memory),
        "padding_waste": draw.choice((None, draw.random())),
        "communication": invent(draw, schema.Communication),
        "compilation": draw.choice((None, invent(draw, schema.Compilation))),
        "ranks": [invent(draw, observations.RankSummary) for _ in range(draw.randrange(4))],
        "precision": draw.choice(("fp32", "bf16", None)),
    }
    chosen = {name: value for name, value in fields.items() if draw.random() < 0.5}
    steps = make_steps(phases, count=25, noise=noise, metrics=metrics)
    record = make_record(steps, device, 2, **chosen)
    check(record, steps=steps, config=draw.choice(CONFIGS))


@settings(max_examples=30, deadline=None)
@given(wait=st.floats(0, 1), seed=st.integers(0, 1000))
def test_a_larger_wait_never_matters_less(wait: float, seed: int) -> None:
    shares = []
    for factor in (1.0, 1.5):
        steps = make_steps({"data_wait": wait * factor, "forward": 0.1, "backward": 0.2}, count=40, seed=seed)
        finding = next(
            (item for item in judge(make_record(steps), steps=steps).findings if item.code == "input_bound"), None
        )
        shares.append((SEVERITIES.index(finding.severity), finding.share or 0.0) if finding else (-1, 0.0))
    assert shares[0] <= shares[1]
