"""What is tried for a script, in which order, and what becomes of it: with times that are given, not measured."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from frameworm.attach.trial.switches import WORDS, Switches, through_options
from frameworm.guard.agreement import Agreement, OutputErrors, StateErrors
from frameworm.guard.gain import Speedup, Window, speedup_of
from frameworm.guard.proof import Evidence, Learning, StepEvidence
from frameworm.report.tune.text import by_hand, waterfall
from frameworm.tune.scripts.knobs import ScriptKnob, forget_options
from frameworm.tune.scripts.process import ScriptError, Stand
from frameworm.tune.scripts.search import ScriptSearch

CPU: dict[str, Any] = {
    "device": "cpu",
    "device_name": "CPU",
    "capability": None,
    "parameters": 1000,
    "half": False,
    "tf32": False,
    "cudnn_benchmark": False,
    "threads": 1,
    "draws": False,
    "attention": None,
    "zeroes": False,
    "copies": False,
    "can_fuse": True,
    "compiled": True,
    "blocks": 0,
    "block_list": None,
    "convolutions": False,
    "workers": 0,
    "pinned": False,
    "padded_share": None,
    "indexable": False,
    "gathers_twice": False,
    "shard_calls": 0,
    "places": [],
    "framework": None,
    "data_parallel": None,
    "data_wait_share": 0.4,
}
GPU = {**CPU, "device": "cuda", "device_name": "NVIDIA H200", "capability": 9, "compiled": False}

GATHERED = {
    "gradient_mib": 1.0,
    "bucket_mib": 25.0,
    "bucket_views": False,
    "looks_for_unused": False,
    "passes_per_update": 1.0,
    "hooked": False,
}


class Given(ScriptSearch):
    """A search whose trials take what a table says, and compute the same unless they are wrong."""

    def __init__(self, folder: Path, facts: dict[str, Any], gains: dict[str, float], wrong: Sequence[str] = ()) -> None:
        script = folder / "train.py"
        script.write_text("")
        super().__init__(script, [], folder, 1000.0)
        self._facts, self._gains, self._wrong = facts, gains, wrong
        self.timed: list[dict[str, Any]] = []

    def _look(self) -> list[ScriptKnob]:
        self.result.facts = dict(self._facts)
        return self._knobs()

    def _step(self, switches: Switches) -> float:
        step_s = 1.0
        for name in switches.to_dict():
            step_s /= self._gains.get(name, 1.0)
        return step_s

    def _time_both(self, before: Switches, after: Switches, **_: Any) -> list[Window]:
        self.timed.append(after.to_dict())
        if "crash" in [self._gains.get(name) for name in after.to_dict()]:
            raise ScriptError("the script itself fails: no kernel")
        noise = (1.0, 1.01, 0.99, 1.0, 1.005, 0.995, 1.0, 1.002, 1.0, 0.998)
        pairs = [
            (Window("before", self._step(before) * item), Window("after", self._step(after) / item)) for item in noise
        ]
        return [window for pair in pairs for window in pair]

    def _compare(self, candidate: Switches, *_: Any, **__: Any) -> Evidence:
        off = 0.02 if set(self._wrong) & candidate.to_dict().keys() else 0.0
        errors = [OutputErrors("gradient of weight", 1000, 1.0, 0.0, 1e-7, 1e-7, off, off)]
        learning = Learning([StepEvidence(1.0, 1)])
        return Evidence(learning, learning, Agreement([StateErrors(step, errors) for step in range(2, 10)]))


def statuses(search: ScriptSearch) -> dict[str, str]:
    return {", ".join(item.changes): item.status for item in search.result.attempts if item.status != "skipped"}


def test_what_gains_is_kept_and_what_does_not_is_not(tmp_path: Path) -> None:
    search = Given(tmp_path, CPU, {"workers": 1.5, "fused_optimizer": 1.0})
    result = search.run()
    found = statuses(search)
    assert found.pop("workers") == "accepted"
    assert found.pop("fused_optimizer") != "accepted"
    assert found == {}
    assert list(result.changes) == ["workers"]
    assert result.speedup is not None
    assert result.speedup.value == pytest.approx(1.5, rel=0.01)
    assert {item.reason for item in result.attempts if "tf32" in item.changes} == {"needs a GPU"}


def test_a_module_is_run_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`frameworm run` takes a file; that it runs as a module is in the facts."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "package/train.py"
    script.parent.mkdir()
    script.write_text("")
    search = ScriptSearch(script, ["--lr", "1"], tmp_path / "out", 10.0, module="package.train")
    monkeypatch.setattr(search, "_seen_alone", lambda: dict(CPU))
    search._look()
    assert search.result.to_json()["command"] == "frameworm run --with tuned.yaml package/train.py --lr 1"
    assert search.result.facts["module"] == "package.train"


def test_what_computes_something_else_is_rejected_however_fast(tmp_path: Path) -> None:
    search = Given(tmp_path, CPU, {"workers": 3.0, "fused_optimizer": 1.2}, wrong=["workers"])
    result = search.run()
    assert statuses(search) == {"workers": "rejected", "fused_optimizer": "accepted"}
    assert list(result.changes) == ["fused_optimizer"]


def test_on_a_gpu_what_usually_helps_is_tried_at_once(tmp_path: Path) -> None:
    search = Given(tmp_path, GPU, {"autocast": 1.5, "compile": 1.5, "fused_optimizer": 1.1, "tf32": 1.0})
    result = search.run()
    assert list(search.timed[0]) == ["tf32", "autocast", "fused_optimizer", "compile", "workers"]
    assert {"autocast", "compile", "fused_optimizer"} <= result.changes.keys()
    assert all(len(item) >= 5 for item in search.timed), "what came with the first is not tried again"


def test_where_that_is_wrong_they_are_tried_one_by_one(tmp_path: Path) -> None:
    search = Given(tmp_path, GPU, {"autocast": 1.5, "compile": 1.5, "fused_optimizer": 1.1}, wrong=["compile"])
    result = search.run()
    assert {"autocast", "fused_optimizer"} <= result.changes.keys()
    assert "compile" not in result.changes
    assert result.total is not None
    assert result.total.speedup is not None
    assert result.total.speedup.value == pytest.approx(1.65, rel=0.02)


def test_a_change_that_fails_costs_one_trial_and_one_line(tmp_path: Path) -> None:
    gains: dict[str, Any] = {"workers": "crash", "fused_optimizer": 1.2}
    search = Given(tmp_path, CPU, gains)
    result = search.run()
    assert statuses(search) == {"workers": "failed", "fused_optimizer": "accepted"}
    failed = next(item for item in result.attempts if item.status == "failed")
    assert failed.reason == "the script itself fails: no kernel"


@pytest.mark.slow
def test_nothing_is_accepted_that_changes_nothing(tmp_path: Path) -> None:
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert Given(folder, GPU, {}).run().changes == {}


def test_cuda_graphs_need_consent_and_then_come_first(tmp_path: Path) -> None:
    gains = {"compile": 1.3, "cuda_graphs": 2.0}
    search = Given(tmp_path, GPU, gains)
    assert "cuda_graphs" not in search.run().changes
    reasons = [item.reason for item in search.result.attempts if "cuda_graphs" in item.changes]
    assert reasons == [
        "what the model has returned is overwritten when it is called again; if that is all right, add --allow graphs"
    ]
    (tmp_path / "allowed").mkdir()
    search = Given(tmp_path / "allowed", GPU, gains)
    search._allowed = ["graphs"]
    changes = search.run().changes
    assert "cuda_graphs" in search.timed[0]
    assert "cuda_graphs" in changes
    assert "compile" not in changes


class Process:
    """A trial whose steps take what is given; of those that run, no two may be there at once."""

    running = 0

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def __enter__(self) -> Process:
        assert Process.running == 0, "there is room for one"
        Process.running += 1
        return self

    def __exit__(self, *_: object) -> None:
        Process.running -= 1

    def stand(self) -> Stand:
        return Stand(None, 3, 0.0, 0, 1.0, {})

    def go(self, steps: int) -> Stand:
        return Stand(steps * self._step_s, 3, 0.0, 0, 1.0, {})


@pytest.mark.parametrize(("share", "apart"), [(0.2, False), (0.6, True)])
def test_processes_that_do_not_fit_beside_each_other_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, apart: bool
) -> None:
    (tmp_path / "train.py").write_text("")
    search = ScriptSearch(tmp_path / "train.py", [], tmp_path, 1000.0)

    def start(switches: Switches, *_: Any, **__: Any) -> Process:
        return Process(0.5 if switches.compile else 1.0)

    monkeypatch.setattr(search._trials, "start", start)
    search.result.facts = {**GPU, "device_memory_share": share}
    if not apart:
        with pytest.raises(AssertionError, match="room for one"):
            search._time_both(Switches(), Switches(compile=True))
        return
    windows = search._time_both(Switches(), Switches(compile=True))
    assert Process.running == 0
    assert speedup_of(windows) == Speedup(2.0, 2.0, 2.0, 10)


TRAINER: dict[str, Any] = {
    **CPU,
    "own_names": "a",
    "compiled": False,
    "framework": {
        "name": "transformers",
        "arguments": "TrainingArguments",
        "options": {"torch_compile": False, "optim": "adamw_torch"},
        "unfused_optimizer": "AdamW",
    },
}


@pytest.mark.parametrize(
    ("seen", "left"),
    [
        ({"can_fuse": False, "compiled": True}, Switches()),
        ({"can_fuse": True, "compiled": True}, Switches(fused_optimizer=True)),  # its optimizer is made elsewhere
        (
            {"can_fuse": False, "compiled": True, "own_names": "b"},  # saves other names
            Switches(fused_optimizer=True, compile=True),
        ),
        (
            {"can_fuse": False, "compiled": True, "tf32": True},  # rounds more coarsely
            Switches(fused_optimizer=True, compile=True),
        ),
    ],
)
def test_an_option_that_does_less_or_more_is_set_in_torch(seen: dict[str, Any], left: Switches) -> None:
    facts = copy.deepcopy(TRAINER)
    wanted = Switches(fused_optimizer=True, compile=True)
    assert through_options(wanted, facts)[0] == Switches()
    assert forget_options(wanted, facts, {**TRAINER, **seen}) == (left != Switches())
    assert through_options(wanted, facts)[0] == left
    assert not forget_options(left, facts, {**TRAINER, **seen}), "once is enough"


def test_one_loader_process_is_tried_where_several_draw_other_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frameworm.tune.scripts.knobs.usable_cpus", lambda: 8)
    facts = {**CPU, "threads": 8, "can_fuse": False}

    class Wrong(Given):
        def _compare(self, candidate: Switches, **how: Any) -> Evidence:
            self._wrong = ["workers"] if candidate.workers > 1 else []
            return super()._compare(candidate, **how)

    search = Wrong(tmp_path, facts, {"workers": 1.5})
    result = search.run()
    assert result.switches == Switches(workers=1, threads=7)
    assert search.timed[:2] == [{"workers": 4, "threads": 4}, {"workers": 1, "threads": 7}]


def test_what_was_found_is_not_tried_with_other_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frameworm.tune.scripts.knobs.usable_cpus", lambda: 8)
    search = Given(tmp_path, {**CPU, "threads": 8, "can_fuse": False}, {"workers": 1.5, "threads": 1.2})
    assert search.run().switches == Switches(workers=4, threads=4)
    assert [item.changes for item in search.result.attempts if item.status != "skipped"] == [
        {"workers": 4, "threads": 4}
    ]


class Lucky(Given):
    """A search whose processes differ by themselves: of each pair, the one with the change by this factor."""

    def __init__(self, folder: Path, gain: float, luck: Sequence[float]) -> None:
        super().__init__(folder, CPU, {"fused_optimizer": gain})
        self._luck = list(luck)

    def _time_both(self, before: Switches, after: Switches, **more: Any) -> list[Window]:
        luck = self._luck.pop(0) if after.fused_optimizer and self._luck else 1.0
        windows = super()._time_both(before, after, **more)
        return [Window(side, value / luck if side == "after" else value) for side, value in windows]


@pytest.mark.parametrize(
    ("gain", "luck", "status"),
    [
        (1.0, [1.03, 0.99], "rejected"),  # the first process was a fast one
        (1.0, [1.03, 1.03, 1.0], "rejected"),
        (1.05, [1.0, 0.98, 1.01], "accepted"),
        (1.3, [1.0], "accepted"),  # no further pair is needed
        (1.0, [1.015], "rejected"),  # too small to be worth a change
    ],
)
def test_a_small_gain_must_show_in_several_pairs_of_processes(
    tmp_path: Path, gain: float, luck: list[float], status: str
) -> None:
    search = Lucky(tmp_path, gain, luck)
    search.run()
    assert statuses(search)["fused_optimizer"] == status
    assert not search._luck, "as many pairs of processes as were needed"


def test_compiling_says_after_how_many_steps_it_pays(tmp_path: Path) -> None:
    result = Given(tmp_path, {**CPU, "compiled": False}, {"compile": 2.0}).run()
    assert "compile" in result.changes
    result.accepted[-1].setup_s = 31.0
    result.setup_s, result.step_s, result.total_steps = 1.0, 0.2, 80
    told = result.to_json()
    assert told["pays_after_steps"] == pytest.approx(300, abs=10)
    assert (told["run_s_before"], told["run_s_after"]) == (pytest.approx(17.0), pytest.approx(39.0, rel=0.02))
    assert "after 30" in waterfall(told)
    assert "other work" not in waterfall(told)
    result.disturbed = 0.4
    assert "other work on this machine took 40% of the first trial" in " ".join(waterfall(result.to_json()).split())
    result.switches = Switches(fused_optimizer=True)  # starts as late as without it, but for noise
    assert "pays_after_steps" not in result.to_json()


@pytest.mark.parametrize(
    ("facts", "tried"),
    [
        ({**CPU, "zeroes": True}, [{"none_gradients": True}]),
        ({**CPU, "attention": "flash"}, [{"attention": "math"}]),
        ({**GPU, "attention": "flash"}, [{"attention": "cudnn"}, {"attention": "efficient"}]),
        ({**GPU, "attention": "flash", "capability": 7}, [{"attention": "efficient"}]),
        ({**GPU, "copies": True}, [{"non_blocking": True, "pin_memory": True}]),
        ({**GPU, "copies": True, "pinned": True}, [{"non_blocking": True}]),
        ({**CPU, "shard_calls": 5}, [{"shard_calls": 5}]),
        ({**CPU, "shard_calls": 5, "parameters": 10**9}, []),
    ],
)
def test_a_switch_is_tried_where_it_means_something(
    tmp_path: Path, facts: dict[str, Any], tried: list[dict[str, Any]]
) -> None:
    names = {"none_gradients", "attention", "non_blocking", "shard_calls"}
    knobs = Given(tmp_path, facts, {})._look()
    assert [changes for knob in knobs if (changes := knob.changes(facts)).keys() & names] == tried


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("late_losses", GPU),
        ("static_graph", {**CPU, "data_parallel": {**GATHERED, "looks_for_unused": True}}),
    ],
)
def test_what_only_the_user_can_judge_needs_consent(tmp_path: Path, name: str, facts: dict[str, Any]) -> None:
    def offered(*allowed: str) -> bool:
        search = Given(tmp_path, facts, {})
        search._allowed = allowed
        return any(name in knob.changes(facts) for knob in search._look())

    assert not offered()
    assert offered(name)


class Noisy(Given):
    """A search whose windows are disturbed in the first so many pairs of processes with the change."""

    def __init__(self, folder: Path, gain: float, disturbed: int) -> None:
        super().__init__(folder, CPU, {"workers": 1.5, "fused_optimizer": gain})
        self._disturbed, self.pairs = disturbed, list[int]()

    def _time_both(self, before: Switches, after: Switches, **more: Any) -> list[Window]:
        windows = super()._time_both(before, after, **more)
        if not after.fused_optimizer:
            return windows
        self.pairs.append(more.get("pairs", 10))
        if len(self.pairs) > self._disturbed:
            return windows
        return [Window(side, value * (1.0, 0.6, 1.0, 1.6)[place % 4]) for place, (side, value) in enumerate(windows)]


def test_what_the_noise_left_open_is_tried_once_more_with_more_windows(tmp_path: Path) -> None:
    search = Noisy(tmp_path, 1.3, 1)
    result = search.run()
    assert search.pairs[:2] == [10, 20]
    assert [item.status for item in result.attempts if "fused_optimizer" in item.changes] == [
        "inconclusive",
        "accepted",
    ]
    assert result.switches.fused_optimizer


def test_a_whole_that_the_noise_hides_is_not_told_as_proved(tmp_path: Path) -> None:
    class Disturbed(Given):
        def _prove_whole(self, last: Any) -> None:
            self.disturb = True
            super()._prove_whole(last)

        def _time_both(self, before: Switches, after: Switches, **more: Any) -> list[Window]:
            windows = super()._time_both(before, after, **more)
            if not getattr(self, "disturb", False):
                return windows
            return [Window(side, value * (1.0, 9.0, 0.2)[place % 3]) for place, (side, value) in enumerate(windows)]

    result = Disturbed(tmp_path, CPU, {"workers": 1.5, "fused_optimizer": 1.2}).run()
    assert len(result.accepted) == 2
    assert result.speedup is None
    assert "what they gain together is not proved" in waterfall(result.to_json())


class Written(Given):
    """A search whose script has lines to write into; what that gains, a table says for words in the text."""

    def __init__(
        self, folder: Path, gains: dict[str, float], words: dict[str, float], wrong_words: Sequence[str] = ()
    ) -> None:
        places = [("optimizer", 1, "Adam"), ("loader", 2, "DataLoader")]
        super().__init__(folder, {**CPU, "padded_share": 0.5, "places": places}, gains, wrong=["tf32"])
        (folder / "train.py").write_text("optimizer = Adam(model)\nloader = DataLoader(data)\n")
        self._words, self._wrong_words = words, wrong_words

    def _time_both(self, before: Switches, after: Switches, source: str | None = None, **how: Any) -> list[Window]:
        if source is None:
            return super()._time_both(before, after, **how)
        gain = math.prod(value for word, value in self._words.items() if word in source)
        pairs = [(Window("before", self._step(before) * item), Window("after", 1 / gain)) for item in (1.0, 1.01) * 4]
        return [window for pair in pairs for window in pair]

    def _compare(self, candidate: Switches, source: str | None = None, **_: Any) -> Evidence:
        is_wrong = source is not None and any(word in source for word in self._wrong_words)
        return super()._compare(Switches(tf32=True) if is_wrong else candidate)


def test_what_can_be_written_becomes_a_patch_and_the_rest_lines_by_hand(tmp_path: Path) -> None:
    gains = {"fused_optimizer": 1.3, "trim_padding": 1.5}
    result = Written(tmp_path, gains, {"fused=True": 1.3}).run()
    assert set(result.changes) == set(gains)
    assert result.patch is not None
    assert "+optimizer = Adam(model, fused=True)" in result.patch
    assert result.patch_without == {
        "trim_padding": "its batches are not a flat mapping or sequence of tensors, all of them alike"
    }
    assert result.patch_speedup is not None
    assert result.patch_speedup.value == pytest.approx(1.3, rel=0.02)
    assert result.by_hand == [WORDS["trim_padding"][2]]
    told = by_hand(result.to_json(), "tuned.patch")
    assert told.startswith(
        "patch       git apply tuned.patch\nwithout     batches as wide as their longest sample: its ba"
    )


def test_a_part_that_is_not_proved_faster_is_not_offered(tmp_path: Path) -> None:
    result = Written(tmp_path, {"fused_optimizer": 1.3, "trim_padding": 1.5}, {"fused=True": 1.01}).run()
    assert result.patch is None
    assert result.no_patch is not None
    assert "not proved faster" in result.no_patch
    assert len(result.by_hand) == 2


def test_loader_processes_that_draw_other_samples_are_left_out_of_the_patch(tmp_path: Path) -> None:
    gains = {"fused_optimizer": 1.3, "workers": 1.5}
    result = Written(tmp_path, gains, {"fused=True": 1.3, "num_workers": 1.5}, wrong_words=["num_workers"]).run()
    assert set(result.changes) == set(gains)
    assert result.patch is not None
    assert "num_workers" not in result.patch
    assert result.no_patch is None
    assert result.patch_without["workers"].startswith("written into the script they do not compute the same")


def test_a_whole_patch_is_as_fast_as_the_switches(tmp_path: Path) -> None:
    gains = {"fused_optimizer": 1.3, "workers": 1.5}
    result = Written(tmp_path, gains, {"fused=True": 1.3, "num_workers": 1.5}).run()
    assert result.patch is not None
    assert result.patch_without == {}
    assert result.patch_speedup is None
    slow = Written(tmp_path, gains, {"fused=True": 1.1, "num_workers": 1.0}).run()
    assert slow.patch is not None, "without the loader processes it is still faster than the script"
    assert slow.patch_without["workers"].startswith("written into the script they are not as fast")
