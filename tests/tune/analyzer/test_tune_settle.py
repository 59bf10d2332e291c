"""What measured gains do to a judgement."""

from __future__ import annotations

from typing import Any

from frameworm.diagnose.rules.judge import Diagnosis, keep_shown
from frameworm.records.estimate import Interval
from frameworm.records.schema import ExpectedSpeedup, Finding, Remedy
from frameworm.tune.analyzer.experiments import Measured, median_interval
from frameworm.tune.analyzer.settle import ExperimentResult, settle


def finding(code: str = "input_bound", severity: str = "warning", **changes: Any) -> Finding:
    values: dict[str, Any] = {
        "share": 0.3,
        "evidence": {"data_wait_s": 0.01},
        "remedies": [Remedy("data.num_workers", 2, "more"), Remedy("", None, "cheaper")],
        "expected_speedup": ExpectedSpeedup(1.4, 1.1, 1.5, "modelled"),
        **changes,
    }
    return Finding(code, severity, **values)


def test_a_modelled_gain_becomes_a_measured_one() -> None:
    gain = ExperimentResult(
        Interval(1.2, 1.1, 1.3), "two workers", Remedy("data.num_workers", 4, "four"), cost=Interval(1.5, 1.4, 1.6)
    )
    settled = settle(Diagnosis("input_bound", [finding()]), {"input_bound": gain})
    (found,) = settled.findings
    assert settled.verdict == "input_bound"
    assert found.expected_speedup == ExpectedSpeedup(1.2, 1.1, 1.3, "measured")
    assert [item.value for item in found.remedies] == [4, None]
    assert found.evidence["speedup_without_it"] == 1.5
    assert found.evidence["data_wait_s"] == 0.01


def test_a_knob_that_gained_nothing_is_not_advised() -> None:
    gain = ExperimentResult(Interval(1.5, 1.4, 1.6), "no loader", refuted="data.num_workers")
    (found,) = settle(Diagnosis("input_bound", [finding()]), {"input_bound": gain}).findings
    assert [item.knob for item in found.remedies] == [""]


def test_a_cause_that_costs_nothing_when_tried_is_no_verdict() -> None:
    gain = ExperimentResult(Interval(1.0, 0.99, 1.01), "no loader")
    settled = settle(Diagnosis("input_bound", [finding()]), {"input_bound": gain})
    assert settled.verdict == "healthy"
    assert settled.findings[0].severity == "info"
    assert settled.findings[0].remedies == []
    assert settled.findings[0].expected_speedup is None


def test_an_experiment_shows_what_no_rule_can_see_but_only_above_its_noise() -> None:
    clear = ExperimentResult(Interval(1.9, 1.6, 2.0), "twice the batch", Remedy("training.micro_batch", 4, ""))
    vague = ExperimentResult(Interval(1.9, 1.0, 2.0), "twice the batch")
    settled = settle(Diagnosis("healthy", []), {"small_batch": clear, "precision_unused": vague})
    assert settled.verdict == "small_batch"
    (found,) = settled.findings
    assert found.severity == "critical"
    assert found.expected_speedup is not None
    assert found.expected_speedup.basis == "measured"
    assert settle(Diagnosis("inconclusive", []), {"small_batch": vague}).verdict == "inconclusive"


def test_unclear_communication_is_not_called_healthy() -> None:
    unclear = {"communication_bound": ExperimentResult(Interval(1.4, 1.05, 1.9), "no_sync")}
    settled = settle(Diagnosis("healthy", []), unclear)
    assert settled.verdict == "inconclusive"
    assert "1.05 to 1.90 times as fast" in settled.notes[0]
    nothing = {"communication_bound": ExperimentResult(Interval(1.04, 0.9, 1.9), "no_sync")}
    assert settle(Diagnosis("healthy", []), nothing).verdict == "healthy"
    clear = {
        "communication_bound": ExperimentResult(Interval(1.54, 1.5, 1.6), "no_sync", instead=Remedy("a.b", 1, "less"))
    }
    settled = settle(Diagnosis("healthy", []), clear)
    assert settled.verdict == "communication_bound"
    assert [item.knob for item in settled.findings[0].remedies] == ["a.b"]


def test_waiting_for_a_rank_is_not_a_cost_of_communication() -> None:
    by_phase = finding("communication_bound", share=0.9, evidence={"share_low": 0.8, "share_high": 1.0, "buckets": 1})
    tried = {
        "communication_bound": ExperimentResult(Interval(1.3, 1.2, 1.4), "no_sync"),
        "straggler": ExperimentResult(Interval(4.0, 3.0, 5.0), "no_sync on each rank", figures={"slowest_rank": 1}),
    }
    settled = settle(Diagnosis("communication_bound", [by_phase]), tried)
    assert settled.verdict == "straggler"
    (less,) = (item for item in settled.findings if item.code == "communication_bound")
    assert less.share is not None
    assert 0.2 < less.share < 0.25
    assert "share_low" not in less.evidence
    assert less.evidence["buckets"] == 1


def test_gains_are_taken_within_a_round() -> None:
    measured = Measured([{"a": 2.0 * n, "b": 1.0 * n} for n in (1, 5, 30)] + [{"a": 9.0}])
    assert measured.gain("a", "b") == Interval(2.0, 2.0, 2.0)
    assert measured.gain("a", "c") is None
    assert median_interval([1.0, 2.0]) is None


def test_a_stored_run_keeps_what_experiments_had_shown() -> None:
    by_rules = Diagnosis("input_bound", [finding(), finding("compute_bound", "info", share=0.8)], ["drift: none"])
    tried = {
        "input_bound": ExperimentResult(Interval(1.0, 0.99, 1.01), "no loader"),
        "small_batch": ExperimentResult(Interval(1.6, 1.5, 1.7), "x"),
    }
    settled = settle(by_rules, tried)
    assert settled.verdict == "small_batch"
    assert keep_shown(by_rules, settled.findings) == settled
    assert keep_shown(by_rules, by_rules.findings) is by_rules
