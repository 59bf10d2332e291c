"""Live trials and proofs of real runs, and what becomes of those that crash, hang, eat memory or cheat."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from live_workloads import trick_knob, tricky_config

from frameworm.config.load import load_config, load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.engine.run import run
from frameworm.guard.agreement import ROUNDING_UNITS, judge_agreement
from frameworm.guard.proof import AGREEMENT, NumericsEffect
from frameworm.numerics.sample_hash import batch_hash
from frameworm.records.statistics import DEFAULT_WARMUP
from frameworm.tune.knobs.context import apply_changes
from frameworm.tune.processes.forkserver import warm_up
from frameworm.tune.trials.live import LiveError
from frameworm.tune.trials.outcomes import Budget, Failure, ProofRequest, ProofResult, TrialRequest
from frameworm.tune.trials.runner import TrialRunner
from frameworm.tune.trials.windows import Effort
from frameworm.tune.tuner import tune

# Enough to see a factor of two; tests share their machine.
QUICK = Effort(
    window_s=0.1, windows=3, pairs=6, warm_s=2.0, warm_windows=2, learn_steps=(16, 16), states=6, draws=12, limit_s=90.0
)
UNITS = (ROUNDING_UNITS["fp32"], ROUNDING_UNITS["fp32"])

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No window is repeated because of what else this machine does."""
    monkeypatch.setattr("frameworm.tune.processes.neighbours.Neighbours.disturbance", lambda self: 0.0)


@pytest.fixture
def runner(tmp_path: Path) -> TrialRunner:
    return TrialRunner(tmp_path, effort=QUICK, limit_bytes=2**33)


def request_of(
    before: Config,
    after: Config,
    numerics_effect: NumericsEffect = "nothing",
    learning: tuple[Config, Config] | None = None,
) -> ProofRequest:
    """The proof of a change between configs without dropout."""
    learning = learning or (before, after)
    return ProofRequest("change", before, after, *learning, *learning, numerics_effect, UNITS, False, "change")


def proof_of(runner: TrialRunner, trick: str) -> ProofResult:
    return runner.prove(request_of(tricky_config(), tricky_config(trick)))


@pytest.mark.parametrize(("last", "share"), [(False, 0.5), (True, 1.0)])
def test_only_the_last_proof_may_take_all_that_is_left(
    last: bool, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def start(config: Config, folder: Path, deadline: float, **more: object) -> None:
        given.append(deadline - time.monotonic())
        raise LiveError(Failure("crash", "planted"))

    monkeypatch.setattr("frameworm.tune.trials.runner.Live", start)
    request = replace(request_of(tricky_config(), tricky_config()), timeout_s=200.0, last=last)
    assert TrialRunner(tmp_path).prove(request).failure is not None
    assert share * 200.0 - 30.0 < given[0] <= share * 200.0  # some of it may have passed on a busy machine


def test_a_trial_measures_the_real_run_and_judges_it(
    runner: TrialRunner, tmp_path: Path, left_behind: Callable[[], list[int]]
) -> None:
    waited_s: list[float] = []

    def keep_going(windows: Sequence[float]) -> bool:
        before = time.monotonic()
        time.sleep(4.0 if len(windows) == 2 else 0.0)  # before the last of three
        waited_s.append(time.monotonic() - before)
        return True

    _start_server()
    before = time.monotonic()
    result = runner.run_trial(TrialRequest("real", tricky_config(pause_s=1e-3), "real", keep_going=keep_going))
    took_s = time.monotonic() - before
    assert result.failure is None
    assert len(result.seconds_per_sample) == QUICK.windows
    assert min(result.seconds_per_sample) >= 1e-3  # a sample sleeps as long
    assert result.setup_s is not None
    assert max(waited_s) >= 4
    # However busy the machine: what the run waited for its turn belongs neither to its start nor to a step.
    assert result.steps is not None
    first, lead_in, steps = result.steps
    measured = first + QUICK.windows * (lead_in + steps) - DEFAULT_WARMUP
    steps_s = measured * sum(phase["mean_s"] for phase in result.details["phases"].values())
    assert measured * 16 * 1e-3 <= steps_s < took_s - sum(waited_s)
    assert result.setup_s < took_s - sum(waited_s)
    assert result.verdict is not None
    assert (tmp_path / "trials" / "real" / "rank-0.log").exists()
    assert not left_behind()


def test_a_trial_on_a_busy_machine_says_so_and_is_not_cut_short(
    runner: TrialRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frameworm.tune.processes.neighbours.Neighbours.disturbance", lambda self: 0.4)
    request = TrialRequest(
        "busy", tricky_config(pause_s=1e-3), "busy", timeout_s=120.0, keep_going=lambda windows: False
    )
    result = runner.run_trial(request)
    assert result.failure is None
    assert (result.stopped_early, result.disturbed, result.steps) == (False, pytest.approx(0.4), None)
    assert len(result.seconds_per_sample) == QUICK.windows


@pytest.mark.parametrize(("trick", "ended"), [("stumble", False), ("none", True)])
def test_one_slow_step_does_not_end_a_trial_but_several_do(runner: TrialRunner, trick: str, ended: bool) -> None:
    pause_s = 1e-3 if trick == "stumble" else 2e-2
    limit_s = 5e-3  # of a sample; the slow step takes 32 ms for each
    result = runner.run_trial(
        TrialRequest(trick, tricky_config(trick, pause_s), trick, keep_going=lambda windows: min(windows) < limit_s)
    )
    assert result.failure is None
    assert result.stopped_early == ended
    assert len(result.seconds_per_sample) == (1 if ended else QUICK.windows)


@pytest.mark.timing
def test_first_steps_of_widths_are_start_up_and_not_the_pace(tmp_path: Path) -> None:
    pause_s, first_s, widths = 0.03, 0.12, 24
    config = load_config_from_mapping(
        {
            "name": "widths",
            "workload": "live_workloads:widths",
            "model": {"pause_s": pause_s, "first_s": first_s, "widths": widths},
            "data": {"num_workers": 0},
            "training": {"epochs": 4, "global_batch": 2, "cpu_threads": 1},
            "gpu": {"device": "cpu"},
        },
        environ={},
    )
    # The second step is of a new width, and so no reason to end the trial.
    result = TrialRunner(tmp_path).run_trial(
        TrialRequest("widths", config, "widths", keep_going=lambda windows: min(windows) < 0.6 * pause_s)
    )
    assert result.failure is None
    assert not result.stopped_early
    step_s = 2 * result.sample_s
    assert pause_s <= step_s <= 1.5 * pause_s, "a first step of a width takes five times as long"
    assert result.setup_s is not None
    # One width or another may come late.
    assert 0.9 * widths * first_s < result.setup_s < widths * first_s + 3


@pytest.mark.parametrize(
    ("trick", "kind"), [("crash", "crash"), ("die", "crash"), ("hog", "oom"), ("hang", "hang")], ids=str
)
def test_what_goes_wrong_is_classified(
    runner: TrialRunner, trick: str, kind: str, left_behind: Callable[[], list[int]]
) -> None:
    began = time.monotonic()
    result = runner.run_trial(
        TrialRequest(trick, tricky_config(trick), trick, timeout_s=8.0 if trick == "hang" else 200.0)
    )
    assert result.failure is not None
    assert result.failure.kind == kind
    assert ("the budget leaves it no more" in result.failure.reason) == (trick == "hang")
    assert time.monotonic() - began < 80, "an end is noticed when it comes"
    assert not left_behind()


@pytest.mark.timeout(600)
def test_the_search_lives_on_and_lists_what_failed(tmp_path: Path) -> None:
    knob = trick_knob("crash", "hog", "good")
    # A run so long that no start, however slow, is worth more than what its steps save.
    config = apply_changes(tricky_config(), {"training.epochs": 400})
    result = tune(config, tmp_path, budget=Budget(300.0), knobs=[knob], effort=QUICK, limit_bytes=2**33)
    failed = {item.label: item.failure for item in result.attempts if item.status == "failed"}
    assert failed == {"model.trick=crash": "crash", "model.trick=hog": "oom"}
    assert [item.candidate.label for item in result.accepted] == ["model.trick=good"]
    assert result.speedup is not None
    assert result.speedup.low > 1
    assert result.speedup.value > 1.2
    best = load_config(tmp_path / "best.yaml", [])
    assert best.model.model_dump()["trick"] == "good"
    assert best.training.global_batch == 16
    assert json.loads((tmp_path / "tune.json").read_text())["stopped"]
    assert best.training.epochs == 400
    best = apply_changes(best, {"training.epochs": 4})
    assert run(best, out=None).losses == run(tricky_config(), out=None).losses, "it learns the same"


@pytest.mark.parametrize(("trick", "told"), [("half", "rounding explains"), ("freeze", "gradient of first")])
def test_speed_by_skipping_work_is_rejected(runner: TrialRunner, trick: str, told: str) -> None:
    result = proof_of(runner, trick)
    assert result.failure is None
    assert result.proof is not None
    assert result.proof.checks[0].passed, "it is faster"
    assert result.proof.verdict == "rejected"
    assert [item.name for item in result.proof.checks if item.passed is False] == [AGREEMENT]
    assert told in result.proof.reason


def test_an_honest_gain_is_accepted(runner: TrialRunner) -> None:
    proof = proof_of(runner, "good").proof
    assert proof is not None
    assert (proof.verdict, [item.name for item in proof.checks if not item.passed]) == ("accepted", ["real tokens"])
    assert proof.losses_before == proof.losses_after, "each side trains on as if it had not been compared"
    assert {item.name for item in proof.outputs} >= {"loss", "gradient of first.weight", "gradient of second.bias"}
    assert proof.change == "rounding"


def test_several_ranks_take_part_in_a_proof(tmp_path: Path, left_behind: Callable[[], list[int]]) -> None:
    proof = proof_of(TrialRunner(tmp_path, effort=QUICK, world_size=2), "half").proof
    assert proof is not None
    assert [item.passed for item in proof.checks if item.name == "samples"] == [True]
    assert proof.verdict == "rejected"
    assert not left_behind()


_SEARCH = """
import sys
sys.path[:0] = {paths!r}
from live_workloads import trick_knob, tricky_config
from test_tune_runner import QUICK
from frameworm.tune.knobs.context import apply_changes
from frameworm.tune.trials.outcomes import Budget
from frameworm.tune.tuner import tune
if __name__ == "__main__":
    config = apply_changes(tricky_config(), {{"data.num_workers": 1}})
    tune(config, {folder!r}, budget=Budget(300.0), knobs=[trick_knob("good", "hang")], effort=QUICK)
"""


def test_a_killed_search_repeats_no_finished_trial(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    script = tmp_path / "search.py"
    script.write_text(_SEARCH.format(paths=[str(Path(__file__).parents[1]), *sys.path], folder=str(folder)))
    search = subprocess.Popen([sys.executable, str(script)])
    try:
        _until(lambda: len(_ends(folder)) >= 2)
        time.sleep(1)  # the next one hangs by now
        family = psutil.Process(search.pid).children(recursive=True)
    finally:
        os.kill(search.pid, signal.SIGKILL)
        search.wait(60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, "its trials ended with it, and their loader processes"
    finished = _ends(folder)
    # With the value that hangs taken away the search ends at once.
    config = apply_changes(tricky_config(), {"data.num_workers": 1})
    tune(config, folder, budget=Budget(300.0), knobs=[trick_knob("good")], effort=QUICK)
    again = _ends(folder)
    assert again[: len(finished)] == finished
    assert len(set(again)) == len(again)


def test_packed_batches_hold_the_same_samples(tmp_path: Path) -> None:
    config = _quickstart()
    runner = TrialRunner(tmp_path, effort=QUICK)
    packed = apply_changes(config, {"data.batching": "packed"})
    same = {"data.batching": "padded", "data.balance": True}
    learning = apply_changes(config, same), apply_changes(packed, {"data.balance": True})
    request = request_of(config, packed, "rounding", learning)
    evidence = runner._compare(request, tmp_path, time.monotonic() + 240, 0.1)
    before, after = evidence.baseline, evidence.candidate
    assert [step.samples for step in before.steps] == [step.samples for step in after.steps]
    assert None not in [step.samples for step in before.steps]
    assert [step.real_tokens for step in before.steps] == [step.real_tokens for step in after.steps]
    assert len({step.samples for step in before.steps}) == len(before.steps)
    assert max(abs(one - other) for one, other in zip(before.losses, after.losses)) < 1e-3
    assert evidence.agreement is not None
    verdict = judge_agreement(evidence.agreement)
    assert verdict.passed, verdict.detail


def test_the_hash_of_samples_knows_neither_order_nor_padding() -> None:
    ids, lengths, labels = torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([2, 1]), torch.tensor([1, 0])
    padded = {"input_ids": ids, "lengths": lengths, "labels": labels}
    turned = {name: tensor.flip(0) for name, tensor in padded.items()}
    wider = {**padded, "input_ids": torch.nn.functional.pad(ids, (0, 4))}
    packed = {
        "labels": torch.tensor([0, 1, -100]),
        "input_ids": torch.tensor([7, 5, 6, 0]),
        "positions": torch.tensor([0, 0, 1, 0]),
        "offsets": torch.tensor([0, 1, 3, 3, 4], dtype=torch.int32),
    }
    expected = batch_hash(padded)
    assert expected is not None
    assert [batch_hash(item) for item in (turned, wider, packed)] == [expected] * 3
    assert batch_hash({**padded, "labels": torch.tensor([1, 1])}) != expected
    assert batch_hash({name: tensor[:1] for name, tensor in padded.items()}) != expected
    assert batch_hash((torch.ones(3, 2), torch.ones(2))) is None


def _quickstart() -> Config:
    return load_config_from_mapping(
        {
            "name": "small",
            "workload": "text_classifier",
            "model": {
                "d_model": 16,
                "n_heads": 2,
                "num_layers": 1,
                "dim_feedforward": 16,
                "max_seq_len": 32,
                "dropout": 0.0,
            },
            "data": {"dataset": "generated", "vocab_size": 256, "num_workers": 0, "limit": 512},
            "training": {"epochs": 2, "global_batch": 16, "cpu_threads": 1},
            "gpu": {"device": "cpu"},
        },
        environ={},
    )


def _ends(folder: Path) -> list[tuple[str, str]]:
    journal = folder / "journal.jsonl"
    if not journal.exists():
        return []
    lines = [json.loads(line) for line in journal.read_bytes().splitlines() if line.endswith(b"}")]
    return [(line["kind"], line["id"]) for line in lines if line["event"] == "end"]


def _start_server() -> None:
    """Have the server there that trials come from: its imports belong to none of them."""
    first = warm_up(["frameworm.tune.trials.live_rank"]).Process(target=time.sleep, args=(0,))
    first.start()
    first.join()


def _until(holds: object, limit_s: float = 180.0) -> None:
    assert callable(holds)
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.1)
