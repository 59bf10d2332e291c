"""The arithmetic of the speed benchmarks, and that a contender that fails is recorded and harms nobody."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import frameworm
from frameworm.models.gpt import GPT
from frameworm.records.schema import EpochRecord, StepRecord

ROOT = Path(__file__).parents[2]
Benchmark = Callable[[str], ModuleType]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Benchmark]:
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)


class Link:
    """The contender's end of a pipe whose other end always says the same words."""

    def __init__(self, words: list[str]) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self._words = deque(words)

    def send(self, message: tuple[str, dict[str, Any]]) -> None:
        self.sent.append(message)

    def recv(self) -> str:
        return self._words.popleft()


def samples(harness: ModuleType, *steps: float) -> Any:
    made = [harness.Sample(step, 0.0) for step in steps]
    return harness.Measured(made[0], made)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_block_holds_its_steps_however_far_the_loop_reads_ahead(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    live = benchmark("live")
    now = [100.0]
    monkeypatch.setattr(live, "perf_counter", lambda: now[0])
    plan = live.Plan(warmup=5, lead_in=2, steps=10, blocks=3)
    link = Link(["go"] * 3 + ["last"])
    gate = live.Gate(link, plan, torch.device("cpu"))
    gate.facts["weights"] = 4.0
    trained = 0
    waiting: deque[int] = deque()
    while gate.open:
        for batch in gate.batches(range(7)):  # an epoch ends in the middle of a block
            waiting.append(batch)
            if len(waiting) > ahead:
                waiting.popleft()
                trained += 1
                # The first steps compile; a lead-in is slow, and neither is in the window.
                now[0] += 50.0 if trained <= 5 else 2.0
    assert [kind for kind, _ in link.sent] == ["ready", "block", "block", "block"]
    assert link.sent[0][1]["weights"] == 4.0
    assert link.sent[0][1]["warmup_s"] == pytest.approx(50.0 * (5 - ahead))
    for _, facts in link.sent[2:]:
        assert facts["step_s"] == pytest.approx(2.0)
    assert trained + len(waiting) == plan.total


def test_a_gate_can_be_closed_early_or_for_good(benchmark: Benchmark) -> None:
    live = benchmark("live")
    plan = live.Plan(warmup=1, lead_in=0, steps=1, blocks=3)
    gate = live.Gate(Link(["go", "finish"]), plan, torch.device("cpu"))
    told: list[str] = []
    gate.on_early_end = lambda: told.append("end")
    assert list(gate.batches(range(100))) == [0, 1]
    assert told == ["end"]
    assert not gate.open
    with pytest.raises(live.Over):
        list(live.Gate(Link(["end"]), plan, torch.device("cpu")).batches(range(100)))


@pytest.mark.slow
def test_a_failing_contender_is_recorded_and_the_others_go_on(benchmark: Benchmark) -> None:
    harness = benchmark("harness")
    calls = []

    def good() -> Any:
        calls.append("good")
        return harness.Sample(1.0, 0.0)

    def bad() -> Any:
        calls.append("bad")
        if calls.count("bad") == 2:
            raise harness.ContenderError("out of memory")
        return harness.Sample(2.0, 0.0)

    failures: dict[str, str] = {}
    warm = harness.Sample(9.0, 0.0)
    blocks = {"good": good, "bad": bad}
    measured = harness.interleave(blocks, 3, lambda text: None, warmups={"good": warm, "bad": warm}, failures=failures)
    assert list(measured) == ["good"]
    assert len(measured["good"].rounds) == 3
    assert measured["good"].warmup is warm
    assert failures == {"bad": "round 2: out of memory"}
    assert calls.count("bad") == 2
    with pytest.raises(harness.ContenderError):
        harness.interleave({"bad": lambda: (_ for _ in ()).throw(harness.ContenderError("no"))}, 3, lambda text: None)


def test_a_results_file_names_its_commit_and_time(benchmark: Benchmark, tmp_path: Path) -> None:
    path = benchmark("harness").write_results("name", torch.device("cpu"), {"rounds": 1}, {"a": 1}, tmp_path)
    document = json.loads(path.read_text())
    assert (document["benchmark"], document["settings"], document["results"]) == ("name", {"rounds": 1}, {"a": 1})
    if (ROOT / ".git").exists():
        git = subprocess.run(
            ["git", "-C", str(ROOT), "-c", "safe.directory=*", "rev-parse", "HEAD"], capture_output=True, text=True
        )
        commit, *dirty = document["commit"].split("-")
        assert git.stdout.startswith(commit)
        assert dirty in ([], ["dirty"])
    assert document["environment"]["frameworm"] == frameworm.__version__
    age = datetime.now(timezone.utc) - datetime.fromisoformat(document["measured"])
    assert 0 <= age.total_seconds() < 60


def _repository(folder: Path) -> str:
    """A repository with one commit; its short name."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    (folder / "benchmarks/results").mkdir(parents=True)
    (folder / "benchmarks/speed.py").write_text("first\n")
    (folder / "benchmarks/results/speed.json").write_text("{}\n")
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return head.stdout[:12]


def test_the_commit_says_whether_the_code_was_changed_since(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    commit_of = benchmark("harness").commit_of
    commit = _repository(tmp_path)
    assert commit_of(tmp_path) == commit
    (tmp_path / "benchmarks/results/speed.json").write_text("[]\n")
    assert commit_of(tmp_path) == commit
    (tmp_path / "benchmarks/speed.py").write_text("second\n")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_no_result_is_written_without_its_commit_where_there_is_a_repository(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    commit_of = benchmark("harness").commit_of
    assert commit_of(tmp_path) is None
    (tmp_path / ".git").write_text("gitdir: /nowhere\n")
    with pytest.raises(RuntimeError, match="BENCHMARK_COMMIT"):
        commit_of(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="git"):
        commit_of(tmp_path)
    monkeypatch.setenv("BENCHMARK_COMMIT", "0123456789ab")
    assert commit_of(tmp_path) == "0123456789ab"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.stem)
def test_every_stored_result_names_a_commit(path: Path) -> None:
    document = json.loads(path.read_text())
    commit = document.get("commit") or document["committed_in"]
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", commit)


@pytest.mark.slow
def test_rounds_end_when_the_time_is_over(benchmark: Benchmark) -> None:
    harness = benchmark("harness")
    left = iter([True, False])
    measured = harness.interleave(
        {"one": lambda: harness.Sample(1.0, 0.0)}, 9, lambda text: None, may_go_on=lambda: next(left)
    )
    assert len(measured["one"].rounds) == 2


def test_goals_are_judged_against_the_better_peer_and_by_the_interval(benchmark: Benchmark) -> None:
    harness, peers_gpu = benchmark("harness"), benchmark("peers_gpu")
    case = peers_gpu.Case("c", "f", 100, goal_usual=10.0, goal_best=4.0)
    measured = {
        "frameworm": samples(harness, 1.0, 1.0, 1.0),
        "lightning": samples(harness, 30.0, 30.0, 30.0),
        "accelerate": samples(harness, 12.0, 12.0, 12.0),
        "lightning-best": samples(harness, 3.0, 3.0, 3.0),
    }
    usual, best = peers_gpu.goals(case, measured)
    assert usual["times"]["value"] == 12.0
    assert "accelerate" in usual["goal"]
    assert (usual["verdict"], best["verdict"]) == ("met", "missed")
    measured["accelerate"] = samples(harness, 5.0, 12.0, 20.0)
    assert peers_gpu.goals(case, measured)[0]["verdict"] == "open"
    del measured["frameworm"]
    assert {goal["verdict"] for goal in peers_gpu.goals(case, measured)} == {"not measured"}


def test_the_goal_of_capture_alone_is_for_short_steps(benchmark: Benchmark) -> None:
    harness, peers_gpu = benchmark("harness"), benchmark("peers_gpu")
    case = peers_gpu.CASES["ag_news"]
    own = {"own-captured": samples(harness, 0.002, 0.002), "own-plain": samples(harness, 0.005, 0.005)}
    assert peers_gpu.goals(case, own)[-1]["verdict"] == "met"
    own = {"own-captured": samples(harness, 0.02, 0.02), "own-plain": samples(harness, 0.03, 0.03)}
    assert "does not apply" in peers_gpu.goals(case, own)[-1]["verdict"]


def test_other_weights_and_a_worse_loss_are_doubts(benchmark: Benchmark) -> None:
    peers_gpu = benchmark("peers_gpu")
    fine = {"bare-fp32": {"initial_weights": 100.0, "val_loss": 0.50}}
    fine["frameworm"] = {"initial_weights": 100.0, "val_loss": 0.52}
    assert peers_gpu.doubts(fine) == []
    assert "same weights" in peers_gpu.doubts({**fine, "own": {"initial_weights": 100.1}})[0]
    assert "frameworm" in peers_gpu.doubts({**fine, "frameworm": {"initial_weights": 100.0, "val_loss": 0.6}})[0]


def test_the_table_names_what_failed(benchmark: Benchmark) -> None:
    harness, peers_gpu = benchmark("harness"), benchmark("peers_gpu")
    times = harness.as_data(harness.Interval(2.0, 1.5, 2.5))
    row = {
        "samples_per_s": 4200.0,
        "real_tokens_per_s": 2e5,
        "step_us": 7600.0,
        "frameworm_times_as_fast": times,
        "variant": "lightning-best/default/max",
        "warmup_s": 3.0,
    }
    text = peers_gpu.draw({"lightning-best": row}, {"accelerate": "CUDA error"})
    assert "1.50..2.50" in text
    assert "lightning-best/default/max" in text
    assert "accelerate: CUDA error" in text


def test_every_mode_and_padding_is_tried_for_those_at_their_best(benchmark: Benchmark) -> None:
    peers = benchmark("peers")
    tried = peers.variants(peers.ENTRIES["lightning-best"])
    assert {(item.mode, item.pad) for item in tried} == {(mode, pad) for mode in peers.MODES for pad in peers.PADS}
    assert all(item.best and item.kind == "lightning" for item in tried)
    assert peers.variants(peers.ENTRIES["lightning"]) == [peers.ENTRIES["lightning"]]


def test_peers_read_the_samples_frameworm_reads(benchmark: Benchmark) -> None:
    peers = benchmark("peers")
    order = peers.SameOrder(50, 8, seed=3)
    first, second = list(order), list(order)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    plan = peers.StepSampler(50, 8, 8, seed=3)
    assert [index for step in plan for index in step] == first
    texts = [
        {"input_ids": torch.arange(1, 1 + length), "lengths": torch.tensor(length), "labels": torch.tensor(1)}
        for length in (3, 5)
    ]
    assert peers.Collate(0, None)(texts)["input_ids"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert peers.Collate(0, 7)(texts)["input_ids"].shape == (2, 7)


def test_the_own_model_cannot_be_packed(benchmark: Benchmark) -> None:
    peers = benchmark("peers")
    assert not getattr(peers.OwnClassifier, "accepts_packed", False)


def test_flops_of_gpt2(benchmark: Benchmark) -> None:
    gpt_mfu = benchmark("gpt_mfu")
    model = GPT(97, d_model=16, n_heads=2, num_layers=3, max_seq_len=12)
    counted = sum(item.numel() for item in model.parameters()) - model.position_embedding.weight.numel()
    assert gpt_mfu.multiplied_parameters(97, 16, 3) == counted
    assert gpt_mfu.multiplied_parameters(50257, 768, 12) == 124_439_808 - 1024 * 768
    flops = gpt_mfu.flops_per_token(50257, 768, 12, 1024)
    assert flops == 6 * 123_653_376 + 6 * 12 * 768 * 1024
    # What was measured for a plain loop on an H200 before this benchmark: 547,000 tokens/s, 44%.
    assert gpt_mfu.model_flops_utilisation(547_000, flops, 989.4e12) == pytest.approx(0.4415, abs=1e-3)
    assert gpt_mfu.model_flops_utilisation(547_000, flops, None) is None


def test_forward_of_a_layer_takes_the_counted_multiplications(benchmark: Benchmark) -> None:
    gpt_mfu = benchmark("gpt_mfu")
    model = GPT(96, d_model=32, n_heads=2, num_layers=2, max_seq_len=64, fused_loss=False)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(tokens)
    # Forward is a third; torch counts full attention (twice the causal half) and neither biases nor norms.
    counted = counter.get_total_flops() / 64
    attention_half = 2 * 2 * 32 * 64
    assert counted - attention_half == pytest.approx(gpt_mfu.flops_per_token(96, 32, 2, 64) / 3, rel=0.04)


def test_mfu_figures_and_failures(benchmark: Benchmark) -> None:
    harness, gpt_mfu = benchmark("harness"), benchmark("gpt_mfu")
    measured = {"plain": samples(harness, 0.2, 0.2), "frameworm": samples(harness, 0.1, 0.1)}
    said = {name: {"warmup_s": 1.0, "peak_bytes": 10**9} for name in measured}
    figures = gpt_mfu.summarise(measured, said, tokens=1000, flops=10**9, peak=1e14)
    assert figures["frameworm"]["tokens_per_s"] == pytest.approx(10_000)
    assert figures["frameworm"]["mfu"] == pytest.approx(0.1)
    assert figures["frameworm"]["times_as_fast_as_plain"]["value"] == pytest.approx(2.0)
    alone = gpt_mfu.summarise({"frameworm": measured["frameworm"]}, said, 1000, 10**9, None)
    assert alone["frameworm"]["times_as_fast_as_plain"] is None
    assert "plain: out of memory" in gpt_mfu.draw(alone, {"plain": "out of memory"})


def test_time_to_accuracy_and_differences_by_seed(benchmark: Benchmark) -> None:
    accuracy = benchmark("accuracy")
    epochs = [EpochRecord(number, 2.0, 1.0, 1.0, 0.8 + 0.05 * number, None) for number in (1, 2, 3)]
    assert accuracy.time_to(epochs, 0.90) == (4.0, 2)
    assert accuracy.time_to(epochs, 0.99) is None

    def trial(value: float) -> dict[str, Any]:
        return {"val_accuracy": value, "training_s": 1.0, "run_s": 2.0, "to_target_s": None}

    result = accuracy.summarise(
        {
            "plain": {0: trial(0.910), 1: trial(0.900), 2: trial(0.905)},
            "fast": {0: trial(0.908), 1: trial(0.901), 2: {"error": "exit code 1"}},
        },
        0.90,
    )
    assert result["differences"] == pytest.approx([-0.002, 0.001])
    assert result["within_half_a_point"]
    assert result["failed"] == {"fast seed 2": "exit code 1"}
    assert result["kinds"]["fast"]["seeds"] == 2
    assert result["kinds"]["fast"]["to_target_s"] is None
    worse = accuracy.summarise({"plain": {0: trial(0.91)}, "fast": {0: trial(0.90)}}, 0.90)
    assert not worse["within_half_a_point"]
    assert "exit code 1" in accuracy.draw("ag_news", result, comparable=False)


@pytest.mark.slow
def test_a_trial_that_fails_says_why(benchmark: Benchmark, tmp_path: Path) -> None:
    accuracy = benchmark("accuracy")
    trial = accuracy.Trial("ag_news", "plain", 0, ("data.root=/nowhere", "gpu.device=cpu"))
    assert "gpu.mixed_precision=off" in trial.command(tmp_path)
    assert "nowhere" in accuracy.run_trial(trial, tmp_path, 60.0)["error"]


def test_the_share_of_waiting_leaves_compiling_and_validation_out(benchmark: Benchmark) -> None:
    input_pipeline = benchmark("input_pipeline")

    def step(number: int, step_s: float, **phases: float) -> StepRecord:
        return StepRecord(number, 1, 0.0, step_s, None, None, 32, 32, phases=phases)

    steps = [
        step(1, 60.0, data_wait=0.0, forward=60.0),
        step(2, 1.0),
        step(3, 1.0, data_wait=0.02, transfer=0.01, forward=0.97),
        step(4, 9.0, data_wait=0.01, forward=0.99, validation=8.0),
    ]
    assert input_pipeline.wait_share(steps, skip=1) == pytest.approx(0.04 / 2.0)
    assert input_pipeline.wait_share(steps[:2], skip=1) is None


def test_padding_of_an_epoch_and_a_data_set_that_is_not_there(benchmark: Benchmark) -> None:
    input_pipeline = benchmark("input_pipeline")
    settings = ["gpu.device=cpu", "training.global_batch=32", "data.limit=200"]
    config = ROOT / "configs" / "quickstart.yaml"
    padded, packed = (
        input_pipeline.waste_of(input_pipeline.loader_of(config, [*settings, f"data.batching={batching}"]))
        for batching in ("padded", "packed")
    )
    assert padded["samples"] == packed["samples"] == 200
    assert padded["tokens"] == packed["tokens"]
    assert 0 <= packed["waste"] < padded["waste"] < 1
    missing = input_pipeline.measure_waste("ag_news", ["padded"], [32], Path("/nowhere"), [])
    assert "nowhere" in missing["padded, batch 32"]["error"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_contenders_live_on_take_turns_and_fail_alone(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    live, peers_gpu = benchmark("live"), benchmark("peers_gpu")
    plan = live.Plan(warmup=1, lead_in=0, steps=1, blocks=2)
    sizes = ["model.d_model=16", "model.n_heads=2", "model.num_layers=1", "model.max_seq_len=8"]
    config = ROOT / "configs" / "quickstart.yaml"
    overrides = [*sizes, "training.global_batch=8", "data.limit=96"]
    facts = peers_gpu.look_at_data(config, config, overrides, "cpu", plan.total)
    names = ("frameworm", "accelerate", "lightning", "own-captured")
    for name in names:  # eight more processes would take longer to start than all else
        monkeypatch.setitem(peers_gpu.ENTRIES, name, replace(peers_gpu.ENTRIES[name], workers=0))
    options = peers_gpu.Options(plan, "cpu", names, ("default",), ("max",), 4, 200.0, float("inf"))
    field = peers_gpu.Field(facts.work, options, tmp_path)
    try:
        field.start()
        measured = field.measure(rounds=1)
        field.finish(measured)
    finally:
        field.close()
    absent = {name for name in ("accelerate", "lightning") if peers_gpu.ENTRIES[name].missing}
    assert set(field.failures) == {"own-captured"} | absent
    assert "CUDA graphs" in field.failures["own-captured"]
    figures = peers_gpu.summarise(field, measured, facts, plan)
    assert set(figures) == set(names) - {"own-captured"} - absent
    assert all(len(item["rounds"]) == 1 and item["val_loss"] > 0 for item in figures.values())
    assert peers_gpu.doubts(figures) == []
    assert all(
        goal["verdict"] in ("met", "missed", "open", "not measured")
        for goal in peers_gpu.goals(peers_gpu.CASES["ag_news"], measured)
    )
