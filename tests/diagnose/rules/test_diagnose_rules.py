"""Every code fires on its fault, stays silent without it, under noise, and where the figure is missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from planted_facts import (
    COMPUTE,
    GIB,
    around,
    climbing,
    cpu_system,
    gpu_system,
    make_record,
    make_steps,
    make_trace,
    rank,
)

from frameworm.diagnose.rules.judge import CODES, RULES, Diagnosis, apply_judgement, judge
from frameworm.records.observations import Compression, OtherTime, Place, SystemSummary
from frameworm.records.schema import (
    Batch,
    Bucket,
    CheckpointStatistics,
    Communication,
    Compilation,
    ExpectedSpeedup,
    Finding,
    Memory,
)

GPU = "NVIDIA H200"
CONTRACT = [
    *("input_bound", "transfer_bound", "host_bound", "compute_bound", "communication_bound", "straggler"),
    *("sync_stall", "checkpoint_stall", "logging_stall", "small_batch", "precision_unused", "padding_waste"),
    *("memory_pressure", "memory_underused", "memory_growth", "recompilation", "cpu_oversubscribed"),
    *("negative_scaling", "throttled"),
]


def judged(
    phases: dict[str, float] | None = None,
    *,
    device: str = "cpu",
    steps_args: dict[str, Any] | None = None,
    world_size: int = 1,
    config: dict[str, Any] | None = None,
    trace: Any = None,
    baseline: Any = None,
    **fields: Any,
) -> Diagnosis:
    steps = make_steps({**COMPUTE, **(phases or {})}, **(steps_args or {}))
    record = make_record(steps, device, world_size, **fields)
    return judge(record, steps=steps, config=config, trace=trace, baseline=baseline)


def baseline_of(samples_per_s: float) -> Any:
    steps = make_steps()
    record = make_record(steps)
    record.throughput = dataclasses.replace(record.throughput, samples_per_s=samples_per_s)
    return record


def two_ranks(wait_0: float | None, wait_1: float | None, slowest: int | None, **late: float) -> dict[str, Any]:
    return {
        "world_size": 2,
        "communication": Communication(0.012, 0.010, 10**7, wait_0, slowest),
        "ranks": [rank(0, wait_0), rank(1, wait_1, "b", **late)],
    }


LEAK = {"rss_bytes": climbing(1 * GIB, 2 * GIB), "rss_growth_bytes_per_s": GIB / 50}
TINY_GPU = {"memory": Memory(4 * GIB, None, 80 * GIB)}
FEW_ROWS = {**TINY_GPU, "batch": Batch(2, 1, 1, 2), "steps_args": {"samples": 2}}
TWO_BUCKETS = {"communication": Communication(0.02, 0.01, 10**8, 0.0, None, [Bucket(5 * 10**7, 0, 0, 1)] * 2)}

# code: (what plants the fault, what looks alike and is none)
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "input_bound": ({"phases": {"data_wait": 0.02}}, [{"phases": {"data_wait": 0.0001}}]),
    "transfer_bound": (
        {"phases": {"transfer": 0.01}, "device": GPU},
        [{"phases": {"transfer": 0.0001}, "device": GPU}, {"device": GPU}],
    ),
    "host_bound": (
        {"device": GPU, "system": gpu_system(0.3)},
        [
            {"device": GPU, "system": gpu_system(0.97)},
            {"device": "cpu", "system": gpu_system(0.3)},
            {"device": GPU},
            {"device": GPU, "phases": {"data_wait": 0.045}, "system": gpu_system(0.3)},
            {"device": GPU, "system": gpu_system(0.5, std=2.0)},
        ],
    ),
    "compute_bound": ({}, [{"phases": {"data_wait": 0.1}}, {"device": GPU, "system": gpu_system(0.2)}]),
    "communication_bound": (
        {"phases": {"communication_exposed": 0.01}, "world_size": 2, "strategy": "ddp"},
        [
            {"phases": {"communication_exposed": 0.0001}, "world_size": 2},
            {"phases": {"communication_exposed": 0.01}, "world_size": 1},
            {"phases": {"communication_exposed": 0.01}, **two_ranks(0.01, 0.0, 1)},
        ],
    ),
    "straggler": (
        {"phases": {"communication_exposed": 0.011}, **two_ranks(0.01, 0.0, 1, forward=0.018)},
        [
            {"phases": {"communication_exposed": 0.011}, **two_ranks(0.0001, 0.0002, None)},
            {"phases": {"communication_exposed": 0.011}, "world_size": 2},
            {"world_size": 1},
        ],
    ),
    "sync_stall": (
        {"device": GPU, "system": gpu_system(0.6), "steps_args": {"metrics": {"sync_s": 0.012}}},
        [
            {"device": GPU, "system": gpu_system(0.99), "steps_args": {"metrics": {"sync_s": 0.012}}},
            {"device": GPU, "system": gpu_system(0.6)},
            {"device": GPU, "steps_args": {"metrics": {"sync_s": 0.012}}},
        ],
    ),
    "checkpoint_stall": (
        {
            "steps_args": {"every": {"checkpoint": (10, 0.1)}},
            "checkpoint": CheckpointStatistics(10, 1.0),
            "config": {"checkpoint": {"every_steps": 10, "mode": "sync"}},
        },
        [{"steps_args": {"every": {"checkpoint": (50, 0.001)}}}, {}],
    ),
    "logging_stall": (
        {"steps_args": {"metrics": {"logging_s": 0.005}}},
        [{"steps_args": {"metrics": {"logging_s": 0.0001}}}, {"phases": {"other": 0.001}}],
    ),
    "small_batch": (
        {"device": GPU, "system": gpu_system(0.7), **FEW_ROWS},
        [
            {"device": GPU, "system": gpu_system(0.4), **FEW_ROWS},  # idle for want of launches
            {"device": GPU, "system": gpu_system(0.7), **TINY_GPU},
            {"device": GPU, "system": gpu_system(0.7), "batch": Batch(2, 1, 1, 2), "steps_args": {"samples": 2}},
            {"device": "cpu", **FEW_ROWS},
        ],
    ),
    "precision_unused": (
        {"device": GPU, "precision": "fp32", "system": gpu_system()},
        [
            {"device": GPU, "precision": "bf16", "system": gpu_system()},
            {"device": "NVIDIA GeForce GTX 1080 Ti", "precision": "fp32", "system": gpu_system()},
            {"device": "cpu", "precision": "fp32"},
            {"device": GPU, "precision": "fp32", "system": gpu_system(0.03)},
        ],
    ),
    "padding_waste": ({"padding_waste": 0.5}, [{"padding_waste": 0.01}, {"padding_waste": None}]),
    "memory_pressure": (
        {"device": GPU, "memory": Memory(78 * GIB, 79 * GIB, 80 * GIB)},
        [{"device": GPU}, {"device": GPU, "memory": Memory(78 * GIB)}, {"device": GPU, "memory": Memory()}],
    ),
    "memory_underused": (
        {"device": GPU, "system": gpu_system(0.5), **TINY_GPU},
        [{"device": GPU, "system": gpu_system(0.95), **TINY_GPU}, {"device": GPU, **TINY_GPU}, {"device": "cpu"}],
    ),
    "memory_growth": (
        {"system": cpu_system(**LEAK)},
        [
            {"system": cpu_system(**{**LEAK, "rss_growth_bytes_per_s": 1e4})},
            {"system": cpu_system(**{**LEAK, "rss_growth_bytes_per_s": None})},
            # a jump at the start: the middle is as high as the end
            {"system": cpu_system(rss_bytes=around(2.0 * GIB, 1e6), rss_growth_bytes_per_s=GIB / 50)},
            {},
        ],
    ),
    "recompilation": (
        {"compilation": Compilation(2.5, 8, 7, ["size mismatch"])},
        [
            {"compilation": Compilation(0.9, 2, 1, [])},
            {"compilation": Compilation(0.01, 8, 7, [])},
            {"compilation": None},
        ],
    ),
    "cpu_oversubscribed": (
        {"system": cpu_system(0.99), "environment": {"torch_threads": 32}},
        [
            {"system": cpu_system(0.99)},
            {"system": cpu_system(0.6), "environment": {"torch_threads": 32}},
            {"environment": {"torch_threads": 32}},
            {"system": cpu_system(0.99), "environment": {"torch_threads": None}},
            {"system": cpu_system(0.99, cpu_process=around(1.0)), "environment": {"torch_threads": 32}},
        ],
    ),
    "negative_scaling": (
        {"world_size": 2, "baseline": baseline_of(30_000.0)},
        [{"world_size": 2, "baseline": baseline_of(7_000.0)}, {"world_size": 2}, {"baseline": baseline_of(30_000.0)}],
    ),
    "throttled": (
        {
            "device": GPU,
            "system": gpu_system(throttled_share=0.9, gpu_clock_share=around(0.6, 0.02), throttle_reasons=["thermal"]),
        },
        [
            {"device": GPU, "system": gpu_system(0.3, throttled_share=0.0, gpu_clock_share=around(0.6, 0.02))},
            {"device": GPU, "system": gpu_system(0.95, throttled_share=0.0, gpu_clock_share=around(0.8, 0.02))},
            {"device": GPU, "system": gpu_system(throttled_share=0.01, gpu_clock_share=around(0.9, 0.02))},
            {"device": GPU, "system": gpu_system(gpu_clock_share=around(0.6, 0.02))},
        ],
    ),
}


def finding_of(judgement: Diagnosis, code: str) -> Finding | None:
    return next((finding for finding in judgement.findings if finding.code == code), None)


def test_every_code_of_the_contract_has_its_rule_and_its_cases() -> None:
    assert set(CODES) == set(RULES) == set(CONTRACT) == set(CASES)


@pytest.mark.parametrize("code", CONTRACT)
def test_fires_on_its_fault(code: str) -> None:
    judgement = judged(**CASES[code][0])
    finding = finding_of(judgement, code)
    assert finding is not None, judgement
    assert finding.evidence
    if code == "compute_bound":
        assert (judgement.verdict, finding.severity) == ("healthy", "info")
    elif code == "memory_underused":
        assert finding.severity == "info"
    else:
        assert judgement.verdict == code, judgement
        assert finding.severity in ("warning", "critical")
        assert finding.remedies
    certain = code not in ("recompilation", "small_batch")  # which cost nine tenths or more
    told = finding.share is not None and finding.severity != "info" and certain
    assert (finding.expected_speedup is not None) == told


@pytest.mark.parametrize(
    ("code", "case"), [(code, case) for code in CONTRACT for case in CASES[code][1]], ids=lambda item: str(item)[:60]
)
def test_stays_silent_without_it(code: str, case: dict[str, Any]) -> None:
    assert finding_of(judged(**case), code) is None


@pytest.mark.parametrize("phase", ["data_wait", "transfer", "communication_exposed", "checkpoint"])
def test_what_noise_could_be_is_no_finding(phase: str) -> None:
    """A phase that is large in a few steps and absent from the rest is too uncertain to accuse."""
    steps = make_steps(COMPUTE, count=16)
    steps[-1].phases[phase] = 0.06
    steps[-1].step_s += 0.06
    judgement = judge(make_record(steps, GPU, 2), steps=steps)
    assert [finding.code for finding in judgement.findings if finding.severity != "info"] == []
    assert judgement.verdict == "inconclusive"
    assert any("measure more steps" in note for note in judgement.notes)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("seed", range(5))
def test_healthy_runs_have_no_finding_above_info(device: str, seed: int) -> None:
    steps = make_steps(seed=seed, noise=0.05, every={"validation": (50, 0.3)}, samples=256)
    system = gpu_system(0.95, cpu_busy=around(0.3, 0.05), throttled_share=0.0, rss_bytes=around(GIB, 1e6))
    judgement = judge(make_record(steps, device, system=system), steps=steps)
    assert judgement.verdict == "healthy", judgement
    assert {finding.severity for finding in judgement.findings} == {"info"}


def test_a_compute_bound_run_gets_no_advice_about_workers() -> None:
    judgement = judged({"data_wait": 0.001}, config={"data": {"num_workers": 0}})
    assert judgement.verdict == "healthy"
    assert finding_of(judgement, "input_bound") is not None  # 5% of the step: known, not worth a change
    assert not [remedy for finding in judgement.findings for remedy in finding.remedies]


def test_the_costliest_comes_first_and_is_the_verdict() -> None:
    judgement = judged({"data_wait": 0.02}, padding_waste=0.5, system=cpu_system(**LEAK))
    assert [finding.code for finding in judgement.findings] == [
        "input_bound",
        "memory_growth",  # memory is full within the hour, which is critical too
        "padding_waste",
    ]
    assert judgement.verdict == "input_bound"


def test_shares_and_gains_agree_with_what_was_planted() -> None:
    finding = finding_of(judged({"data_wait": COMPUTE["forward"] + 0.0112}), "input_bound")
    assert finding is not None
    assert finding.share is not None
    assert finding.expected_speedup is not None
    assert finding.share == pytest.approx(0.5, abs=0.01)
    assert finding.evidence["data_wait_s"] == pytest.approx(0.0192, rel=0.02)
    assert finding.evidence["share_low"] < finding.share < finding.evidence["share_high"]
    gain = finding.expected_speedup
    assert gain.value == pytest.approx(2.0, rel=0.02)
    assert 1 < gain.low < gain.value < gain.high
    assert gain.basis == "modelled"


def test_what_was_measured_replaces_what_was_modelled() -> None:
    steps = make_steps({**COMPUTE, "data_wait": 0.02})
    gain = ExpectedSpeedup(1.4, 1.3, 1.5, "measured")
    judgement = judge(make_record(steps), steps=steps, measured={"input_bound": gain})
    assert judgement.findings[0].expected_speedup is gain


@pytest.mark.parametrize(
    ("workers", "wait_s", "wanted"),
    [(0, 0.019, 1), (0, 0.06, 4), (2, 0.019, 4), (2, 0.6, 8), (8, 0.06, None)],
)
def test_as_many_workers_as_keep_up_and_fit_the_cores(workers: int, wait_s: float, wanted: int | None) -> None:
    finding = judged({"data_wait": wait_s}, config={"data": {"num_workers": workers}}).findings[0]
    assert finding.code == "input_bound"
    knobs = {remedy.knob: remedy.value for remedy in finding.remedies}
    assert knobs.get("data.num_workers") == wanted


def test_cores_that_are_too_few_limit_the_gain() -> None:
    """Batches take 60 ms, the rest of a step 19.2 ms: two processes deliver every 30 ms."""
    steps = make_steps({**COMPUTE, "data_wait": 0.06})
    record = make_record(steps, environment={"cpus_usable": 2})
    finding = judge(record, steps=steps, config={"data": {"num_workers": 0}}).findings[0]
    assert finding.remedies[0].value == 2
    assert finding.expected_speedup is not None
    assert finding.expected_speedup.value == pytest.approx(0.0792 / 0.030, rel=0.03)


def test_busy_cores_get_no_more_workers() -> None:
    finding = judged({"data_wait": 0.02}, system=cpu_system(0.99), config={"data": {"num_workers": 0}}).findings[0]
    assert finding.code == "input_bound"
    assert [remedy.knob for remedy in finding.remedies] == [""]
    assert "all cores are busy" in finding.remedies[0].text


def test_workers_that_outnumber_the_cores_are_the_cause_of_waiting() -> None:
    judgement = judged({"data_wait": 0.02}, system=cpu_system(0.99), config={"data": {"num_workers": 32}})
    assert judgement.verdict == "cpu_oversubscribed"
    assert finding_of(judgement, "input_bound") is None
    assert judgement.findings[0].share == pytest.approx(0.51, abs=0.02)
    assert ("data.num_workers", 7) in [(item.knob, item.value) for item in judgement.findings[0].remedies]


def crowded(waiting: float, stolen: float = 0.0, **fields: Any) -> SystemSummary:
    """A machine of 8 cores whose run keeps 3 of them busy."""
    spread = {"cpu_waiting": around(waiting, 0.01), "cpu_stolen": around(stolen, 0.01), "cpu_process": around(3.0)}
    return cpu_system(**{"busy": 0.99, **spread, **fields})


def test_work_of_others_is_named_and_costs_what_the_run_waited() -> None:
    judgement = judged(system=crowded(0.55), environment={"torch_threads": 8})
    assert judgement.verdict == "cpu_oversubscribed"
    finding = judgement.findings[0]
    assert (finding.severity, finding.share) == ("critical", pytest.approx(0.55))
    assert finding.evidence["cores_of_others"] == pytest.approx(0.99 * 8 - 3)
    assert finding.remedies[0].text.startswith("other processes keep 4.9 of 8 cores busy")
    assert "OMP_NUM_THREADS=1" in finding.remedies[1].text


def test_cores_that_the_hypervisor_took_are_named() -> None:
    finding = judged(system=crowded(0.1, 0.5)).findings[0]
    assert finding.code == "cpu_oversubscribed"
    assert finding.share == pytest.approx(1 - 0.9 * 0.5)
    assert "hypervisor" in finding.remedies[0].text


@pytest.mark.parametrize(
    "system",
    [
        crowded(0.55, cpu_process=around(7.9)),  # its own threads wait for each other
        crowded(0.0),  # others compute, and there was a core whenever one was needed
        crowded(0.55, busy=0.4),  # nobody else computes
        cpu_system(0.99, cpu_process=around(3.0)),  # the kernel keeps no account
    ],
)
def test_others_that_take_nothing_are_no_cause(system: SystemSummary) -> None:
    assert judged(system=system, environment={"torch_threads": 8}).verdict == "healthy"


@pytest.mark.parametrize(
    ("workers", "own", "cost"),
    [
        (8, 6.8, 0.14),  # the loader's processes and the threads wait for each other
        (0, 6.8, 0.55),  # threads wait for each other at the end of each operation, so one that waits holds up all
        (0, 7.1, 0.55),
    ],
)
def test_a_run_with_more_to_do_than_cores_waits_for_itself(workers: int, own: float, cost: float) -> None:
    system = crowded(0.55, cpu_process=around(own))
    judgement = judged(system=system, config={"data": {"num_workers": workers}})
    finding = finding_of(judgement, "cpu_oversubscribed")
    assert finding is not None
    assert finding.share == pytest.approx(cost, abs=0.01)
    assert finding.evidence["cpu_waiting"] == pytest.approx(0.55)
    assert (judgement.verdict == "cpu_oversubscribed") is (workers == 0)


def test_nobody_waits_for_others_longer_than_they_compute() -> None:
    """On 2 cores of which others have a quarter of one."""
    system = cpu_system(0.99, cpu_process=around(1.73), cpu_waiting=around(0.55, 0.01))
    judgement = judged(system=system, environment={"cpus_usable": 2, "torch_threads": 2})
    finding = finding_of(judgement, "cpu_oversubscribed")
    assert finding is not None
    assert finding.share == pytest.approx(0.25, abs=0.01)


def test_what_a_hypervisor_takes_of_a_machine_that_rests_is_not_taken_from_others_too() -> None:
    """Half of the working time was stolen, which is a fifth of all time; others computed in a tenth of it."""
    system = cpu_system(0.4, cpu_process=around(0.8), cpu_waiting=around(0.0), cpu_stolen=around(0.5, 0.01))
    finding = finding_of(judged(system=system), "cpu_oversubscribed")
    assert finding is not None
    assert finding.evidence["cores_of_others"] == pytest.approx(0.8)


def test_what_others_take_now_and_then_is_no_verdict() -> None:
    judgement = judged(system=crowded(0.15))
    assert judgement.verdict == "healthy"
    finding = finding_of(judgement, "cpu_oversubscribed")
    assert finding is not None
    assert finding.severity == "info"


def test_a_host_that_waits_costs_only_what_the_gpu_was_idle() -> None:
    system = dataclasses.replace(crowded(0.6), gpu_busy=around(0.97, 0.005))
    assert judged(device=GPU, system=system).verdict != "cpu_oversubscribed"


def test_crowded_threads_leave_cores_idle_while_they_wait_for_each_other() -> None:
    threads = {"torch_threads": 64}
    busy = cpu_system(0.85, cpu_process=around(6.8))
    judgement = judged(system=busy, environment=threads)
    assert judgement.verdict == "cpu_oversubscribed"
    evidence = judgement.findings[0].evidence
    assert (evidence["threads_per_core"], evidence["cores_used"]) == (8.0, 6.8)
    # As many threads as cores that are as busy: that is computing, and somebody else's work is not ours.
    assert judged(system=busy).verdict == "healthy"
    assert judged(system=cpu_system(0.85, cpu_process=around(1.0)), environment=threads).verdict == "healthy"


def test_a_straggler_is_named_with_the_phase_it_loses() -> None:
    finding = judged(**CASES["straggler"][0]).findings[0]
    assert finding.evidence["slowest_rank"] == 1
    assert finding.evidence["host"] == "b"
    assert finding.evidence["late_phase"] == "forward"
    assert finding.evidence["late_by_s"] == pytest.approx(0.010)


def test_a_straggler_is_found_when_it_is_the_rank_that_looks() -> None:
    judgement = judged({"communication_exposed": 0.0005}, **two_ranks(0.0, 0.01, 0))
    assert judgement.verdict == "straggler"
    assert judgement.findings[0].evidence["slowest_rank"] == 0


def test_a_straggler_shows_before_backward_where_no_wait_was_seen() -> None:
    ranks = [rank(0, None), rank(1, None, forward=0.018), rank(2, None)]
    judgement = judged(world_size=3, ranks=ranks, unseen=["communication_exposed"])
    assert judgement.verdict == "straggler"
    assert judgement.findings[0].evidence["slowest_rank"] == 1


def test_ranks_that_wait_in_turn_are_no_straggler() -> None:
    judgement = judged({"communication_exposed": 0.011}, **two_ranks(0.01, 0.01, None))
    finding = finding_of(judgement, "straggler")
    assert finding is not None
    assert (finding.severity, finding.evidence["slowest_rank"]) == ("info", "changes")


def test_the_wait_of_each_rank_comes_from_its_steps() -> None:
    phases = {**COMPUTE, "communication_exposed": 0.011}
    steps = {0: make_steps(phases, rank_wait_s=0.0), 1: make_steps(phases, rank_wait_s=0.010)}
    record = make_record(steps[0], world_size=2, communication=Communication(slowest_rank=0))
    judgement = judge(record, steps=steps)
    assert judgement.verdict in ("straggler", "communication_bound")
    found = finding_of(judgement, "straggler")
    assert found is not None
    assert found.share == pytest.approx(0.010 / 0.0304, rel=0.03)


def test_settings_that_stand_already_are_not_advised() -> None:
    fault = CASES["checkpoint_stall"][0] | {"config": {"checkpoint": {"every_steps": 10, "mode": "async"}}}
    knobs = {remedy.knob: remedy.value for remedy in judged(**fault).findings[0].remedies}
    assert knobs == {"checkpoint.every_steps": 200}


def test_what_this_version_does_not_have_is_not_advised() -> None:
    from frameworm.config.checks import NOT_YET

    fault = {**CASES["communication_bound"][0], **TWO_BUCKETS}
    ours = [remedy.knob for remedy in judged(**fault).findings[0].remedies]
    theirs = [remedy.knob for remedy in judged(**fault, source="attached").findings[0].remedies]
    assert "parallel.bucket_cap_mb" in ours
    assert ("parallel.compression" in ours) == ("parallel.compression" not in NOT_YET)
    assert "parallel.compression" in theirs


def test_smaller_buckets_are_advised_in_the_unit_of_the_setting() -> None:
    sent = Communication(0.02, 0.01, 80 * 2**20, 0.0, None, [Bucket(40 * 2**20, 0, 0, 1)] * 2)
    remedies = judged(**{**CASES["communication_bound"][0], "communication": sent}).findings[0].remedies
    sizes = [remedy.value for remedy in remedies if remedy.knob == "parallel.bucket_cap_mb"]
    assert sizes == [10.0], "eight buckets; torch's megabytes are 2**20 bytes"


def test_compression_is_advised_by_what_is_sent_now() -> None:
    fault = {**CASES["communication_bound"][0]}
    before = fault.get("communication") or Communication()

    def advised(now: Compression | None) -> dict[str, Any]:
        changed = {**fault, "communication": dataclasses.replace(before, compression=now)}
        remedies = judged(**changed).findings[0].remedies
        return {item.knob: item.value for item in remedies if item.knob.startswith("parallel.")}

    assert advised(None)["parallel.compression"] == "auto"
    assert advised(Compression("int8", "user"))["parallel.compression"] == "auto"
    by_auto = advised(Compression("int4", "auto"))
    assert by_auto.pop("parallel.allow_approximate") is True
    assert "parallel.compression" not in by_auto
    none = advised(Compression("powersgd", "auto"))
    assert not {"parallel.compression", "parallel.allow_approximate"} & none.keys()
    sharded = judged(**fault, config={"parallel": {"strategy": "zero3"}}).findings[0].remedies
    assert "parallel.compression" not in [item.knob for item in sharded]


def test_remedies_are_values_that_the_config_takes() -> None:
    from frameworm.config.load import load_config_from_mapping

    for code, (fault, _) in CASES.items():
        for finding in judged(**fault).findings:
            for remedy in finding.remedies:
                if remedy.knob and remedy.value is not None:
                    section, key = remedy.knob.split(".")
                    data = {section: {key: remedy.value}}
                    assert load_config_from_mapping(data) is not None, (code, remedy)


def test_a_script_is_told_what_to_write() -> None:
    fault = {"phases": {"data_wait": 0.02}, "source": "attached"}
    texts = [remedy.text for remedy in judged(**fault).findings[0].remedies]
    assert any("DataLoader(" in text for text in texts)


@pytest.mark.parametrize(("cause", "code"), [("host", "host_bound"), ("synchronisation", "sync_stall")])
def test_a_trace_tells_why_the_device_was_idle(cause: str, code: str) -> None:
    assert judged(device=GPU, trace=make_trace(**{cause: 0.5})).verdict == code
    assert finding_of(judged(device=GPU, trace=make_trace(data_loading=0.5)), code) is None


def test_a_host_that_waits_for_the_device_is_not_slow() -> None:
    judgement = judged(**CASES["sync_stall"][0])
    assert finding_of(judgement, "host_bound") is None


def test_a_small_batch_shows_however_badly_the_idle_time_is_known() -> None:
    """Six samples of 10% to 100%: what is not idle is computed in tiles that are nearly empty, so it hardly matters."""
    found = judged(device=GPU, system=dataclasses.replace(gpu_system(0.5, std=0.4), samples=6), **FEW_ROWS)
    assert found.verdict == "small_batch"
    assert found.findings[0].share > 0.5


@pytest.mark.parametrize("source", ["engine", "attached"])
def test_a_gpu_without_launches_is_host_bound_however_few_rows_it_computes(source: str) -> None:
    """Busy for 6% of the time: the gain lies anywhere between 1.8 and 40 times, so none is given."""
    judgement = judged(device=GPU, system=gpu_system(0.06, std=0.1), source=source, **FEW_ROWS)
    assert judgement.verdict == "host_bound"
    finding = judgement.findings[0]
    assert finding.expected_speedup is None
    knobs = [remedy.knob for remedy in finding.remedies]
    assert knobs[:2] == ["gpu.capture", "gpu.compile_model"]
    assert "training.micro_batch" in knobs
    if source == "attached":
        assert "reduce-overhead" in finding.remedies[0].text
        assert "torch.compile(model)" in finding.remedies[1].text


def test_rows_of_a_script_are_counted_by_the_shapes_of_its_batches() -> None:
    """Two texts of 400 tokens are no small batch, whatever the number of samples says."""
    case = {**TINY_GPU, "batch": Batch(2, 1, 1, 2), "device": GPU, "system": gpu_system(0.7), "source": "attached"}
    few = judged(**case, steps_args={"samples": 2, "metrics": {"rows": 2.0}})
    many = judged(**case, steps_args={"samples": 2, "metrics": {"rows": 800.0}})
    assert few.verdict == "small_batch"
    assert finding_of(many, "small_batch") is None
    assert many.verdict == "host_bound"


def test_a_model_that_is_compiled_already_is_not_told_to_be() -> None:
    judgement = judged(device=GPU, system=gpu_system(0.3), source="attached", compilation=Compilation(1.0, 4, 0))
    assert "gpu.compile_model" not in [remedy.knob for remedy in judgement.findings[0].remedies]


def test_a_power_limit_under_load_is_no_fault() -> None:
    system = gpu_system(throttled_share=0.9, gpu_clock_share=around(0.8, 0.02), throttle_reasons=["power cap"])
    finding = finding_of(judged(device=GPU, system=system), "throttled")
    assert finding is not None
    assert finding.severity == "info"


def test_a_clock_that_was_locked_low_is_found_without_a_reason_from_the_driver() -> None:
    system = gpu_system(0.95, throttled_share=0.0, gpu_clock_share=around(0.18, 0.01))
    judgement = judged(device=GPU, system=system)
    assert judgement.verdict == "throttled"
    finding = finding_of(judgement, "throttled")
    assert finding is not None
    assert "nvidia-smi -rgc" in finding.remedies[0].text


def test_fp32_is_only_mentioned_when_nobody_watched_the_gpu() -> None:
    finding = finding_of(judged(device=GPU, precision="fp32"), "precision_unused")
    assert finding is not None
    assert finding.severity == "info"


@pytest.mark.parametrize(
    ("device", "word"),
    [(GPU, "bf16"), ("Tesla V100-SXM2-16GB", "fp16"), ("NVIDIA GeForce RTX 4090", "bf16"), ("Tesla T4", "fp16")],
)
def test_the_precision_that_the_gpu_has(device: str, word: str) -> None:
    finding = judged(device=device, precision="fp32", system=gpu_system()).findings[0]
    assert finding.code == "precision_unused"
    assert finding.remedies[0].value == word


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_padding_is_packed_where_that_is_faster(device: str) -> None:
    config = {"workload": "text_classifier", "data": {"batching": "padded", "pad_to": "longest"}}
    finding = judged(device=device, padding_waste=0.5, config=config).findings[0]
    values = [remedy.value for remedy in finding.remedies]
    assert values == (["bucketed"] if device == "cpu" else ["packed", "bucketed"])


def test_callbacks_between_steps_are_output() -> None:
    judgement = judged({"other": 0.01})
    assert judgement.verdict == "logging_stall"
    assert judgement.findings[0].evidence["between_steps_s"] == pytest.approx(0.01, rel=0.05)
    attached = judged({"other": 0.01}, source="attached")
    assert attached.verdict == "inconclusive"  # in a script it may be anything
    assert any("no phase" in note for note in attached.notes)


def seen(work: str = "computing", samples: int = 100, places: int = 1, **others: int) -> OtherTime:
    """Samples of a script in no phase: of one kind of work, at so many places, and of other kinds."""
    found = [Place("train.py", 10 * number, "log", work, samples // places, 0.3) for number in range(1, places + 1)]
    works = {work: samples, **others}
    return OtherTime(sum(works.values()), works, found[:5])


def scripted(other_s: float, other_time: OtherTime | None, **fields: Any) -> Diagnosis:
    return judged({"other": other_s}, source="attached", other_time=other_time, **fields)


@pytest.mark.parametrize("work", ["writing", "computing"])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_own_code_between_steps_is_named(work: str, device: str) -> None:
    system = gpu_system(0.64) if device == GPU else None
    judgement = scripted(0.01, seen(work, waiting=10), device=device, system=system)
    assert judgement.verdict == "logging_stall"
    finding = judgement.findings[0]
    assert finding.evidence["place"] == "train.py:10 in log"
    assert finding.evidence["there_share"] == 0.3
    assert finding.evidence["work"] == work
    # 10 of 29.2 ms are in no phase, and 100 of 110 samples of them at work.
    assert finding.evidence["between_steps_s"] == pytest.approx(0.01 * 100 / 110, rel=0.05)
    assert finding.share == pytest.approx(10 / 29.2 * 100 / 110, rel=0.05)
    assert ("train.py:10" in finding.remedies[0].text) == (work == "computing")
    # What the GPU idles meanwhile is told once.
    assert "host_bound" not in {item.code for item in judgement.findings if item.severity != "info"}


@pytest.mark.parametrize(
    ("other_time", "words"),
    [
        (None, "no phase that can be seen;"),
        (seen(samples=5), "no phase that can be seen;"),
        (seen("waiting"), "100% of that at train.py:10 in log, which waits"),
        (seen("library"), "which is in a library"),
        (seen("preparing"), "which prepares batches"),
        (seen(places=20), "5% of that at train.py:10 in log, which computes"),
        (seen("waiting", 95, computing=5), "95% of that at train.py:10 in log, which waits"),
    ],
)
def test_what_samples_cannot_tell_stays_open(other_time: OtherTime | None, words: str) -> None:
    judgement = scripted(0.01, other_time)
    assert judgement.verdict == "inconclusive"
    assert "logging_stall" not in {finding.code for finding in judgement.findings if finding.severity != "info"}
    assert any(words in note for note in judgement.notes), judgement.notes


def test_own_code_may_be_a_phase_that_was_not_seen() -> None:
    assert scripted(0.01, seen(), unseen=["data_wait"]).verdict == "inconclusive"
    assert scripted(0.01, seen("writing"), unseen=["data_wait"]).verdict == "logging_stall"


def test_the_glue_of_a_loop_is_no_stall() -> None:
    tiny = {"forward": 0.002, "backward": 0.003, "optimizer": 0.0003, "other": 0.001}
    assert judged(tiny, source="attached", other_time=seen()).verdict == "healthy"
    assert judged(tiny, source="attached", other_time=seen("writing")).verdict == "logging_stall"
    assert scripted(0.0002, seen()).verdict == "healthy"


def test_prints_are_timed_and_placed() -> None:
    judgement = scripted(0.006, seen("writing", 50, waiting=50), steps_args={"metrics": {"logging_s": 0.005}})
    finding = judgement.findings[0]
    assert finding.code == "logging_stall"
    assert finding.evidence["logging_s"] == pytest.approx(0.005, rel=0.05)
    assert "between_steps_s" not in finding.evidence
    assert finding.evidence["place"] == "train.py:10 in log"


def test_time_that_a_gpu_hides_costs_nothing() -> None:
    judgement = scripted(0.0001, seen("writing", 500), device=GPU, system=gpu_system())
    assert judgement.verdict == "healthy"


TOO_SHORT: list[Callable[[], Diagnosis]] = [
    lambda: judged({"data_wait": 0.02}, steps_args={"count": 12}),
    lambda: judge(make_record(make_steps(count=3))),
]


@pytest.mark.parametrize("short", TOO_SHORT)
def test_a_short_run_is_inconclusive(short: Callable[[], Diagnosis]) -> None:
    judgement = short()
    assert (judgement.verdict, judgement.findings) == ("inconclusive", [])
    assert "train longer" in judgement.notes[0]


def test_a_run_without_steps_is_not_told_to_train_longer() -> None:
    judgement = judge(make_record([]))
    assert (judgement.verdict, judgement.findings) == ("inconclusive", [])
    assert judgement.notes == ["inconclusive: no training step was seen"]


def test_a_run_without_phases_is_inconclusive() -> None:
    steps = make_steps()
    for step in steps:
        step.phases = {}
    judgement = judge(make_record(steps, phases={}), steps=steps)
    assert judgement.verdict == "inconclusive"
    assert "phases" in judgement.notes[0]


def test_unseen_communication_is_not_called_healthy() -> None:
    judgement = judged(world_size=2, unseen=["communication_exposed"])
    assert judgement.verdict == "inconclusive"
    assert "could not be seen" in judgement.notes[0]
    assert judged(world_size=1, unseen=["communication_exposed"]).verdict == "healthy"


def test_a_noisy_run_is_inconclusive() -> None:
    judgement = judged(steps_args={"noise": 6.0, "count": 20})
    assert judgement.verdict == "inconclusive"
    assert any("quiet machine" in note for note in judgement.notes)


def test_steps_that_slow_down_are_noted() -> None:
    steps = make_steps()
    for number, step in enumerate(steps):
        for name in ("forward", "backward"):
            step.phases[name] *= 1 + number / 100
        step.step_s = sum(step.phases.values())
    judgement = judge(make_record(steps), steps=steps)
    assert judgement.verdict == "healthy"
    assert any("slower" in note for note in judgement.notes)


def test_a_judgement_replaces_the_one_before() -> None:
    steps = make_steps(count=8)
    record = make_record(steps, notes=["a note of the run"])
    apply_judgement(record, judge(record, steps=steps))
    assert record.verdict == "inconclusive"
    assert len(record.notes) == 2
    steps = make_steps({**COMPUTE, "data_wait": 0.02})
    apply_judgement(record, judge(make_record(steps), steps=steps))
    assert (record.verdict, record.notes) == ("input_bound", ["a note of the run"])
    assert record.to_dict()["findings"][0]["code"] == "input_bound"


def test_without_steps_the_spread_of_the_summary_decides() -> None:
    steps = make_steps({**COMPUTE, "data_wait": 0.02})
    assert judge(make_record(steps)).verdict == "input_bound"
    wild = make_record(steps)
    assert wild.throughput.step_s is not None
    wild.throughput.step_s.std = 20 * wild.throughput.step_s.mean
    judgement = judge(wild)
    assert judgement.verdict == "inconclusive"
    assert finding_of(judgement, "input_bound") is None


def test_a_config_object_will_do() -> None:
    from frameworm.config.schema import Config

    steps = make_steps({**COMPUTE, "data_wait": 0.06})
    config = Config.model_validate({"data": {"num_workers": 4}})
    finding = judge(make_record(steps), steps=steps, config=config).findings[0]
    assert finding.evidence["num_workers"] == 4
