from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from frameworm.config.load import load_config, load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.errors import ConfigError, EnvironmentSetupError
from frameworm.hardware.resolve import resolve_here
from frameworm.models.workloads import Workload, build_workload
from frameworm.tune.facts import workload_facts
from frameworm.tune.knobs import base
from frameworm.tune.knobs import registry as knobs_module
from frameworm.tune.knobs.base import Candidate, Knob, register_knob
from frameworm.tune.knobs.context import Context, TrialMachine, WorkloadFacts, apply_changes, setting_of
from frameworm.tune.knobs.registry import GROUP, all_knobs
from frameworm.tune.trials.outcomes import rounding_unit, without_dropout

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
H200 = TrialMachine("cuda", True, 9.0, 1, 16, 8, 141 * 2**30)
LAPTOP = TrialMachine("cpu", False, None, 0, 4, 4)
TEXTS = WorkloadFacts(
    accepts_packed=True, many_widths=True, assembles_batches=True, resident_bytes=2**28, samples_per_epoch=120_000
)


class Texts(Dataset[int]):
    """Texts of these lengths, in batches as wide as the longest or as all of them."""

    def __init__(self, lengths: list[int], widest: int | None = None) -> None:
        self.token_lengths = lengths
        self._widest = widest

    def __len__(self) -> int:
        return len(self.token_lengths)

    def __getitem__(self, index: int) -> int:
        return self.token_lengths[index]

    def padded_length(self, lengths: npt.NDArray[Any]) -> int:
        return int(lengths.max()) if self._widest is None else self._widest


def config_named(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", overrides, environ={})


def knob_named(name: str) -> Knob:
    return next(knob for knob in all_knobs() if knob.name == name)


def config_of(**sections: Any) -> Config:
    return load_config_from_mapping(sections, environ={})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Knob]]:
    fresh: dict[str, Knob] = {}
    monkeypatch.setattr(base, "_registered", fresh)
    return fresh


def possible(context: Context) -> list[Candidate]:
    return [
        candidate
        for knob in all_knobs()
        if knob.why_not(context) is None
        for candidate in knob.candidates(context)
        if context.why_not(candidate.changes) is None
    ]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("machine", [H200, LAPTOP], ids=["gpu", "cpu"])
def test_every_candidate_runs_and_keeps_the_global_batch(name: str, machine: TrialMachine) -> None:
    world_size = 4 if "4gpu" in name and machine.device == "cuda" else 1
    # A config for GPUs is refused on a CPU before any knob is asked.
    overrides = () if machine.device == "cuda" else ("parallel.strategy=auto", "gpu.capture=off")
    context = Context(config_named(name, *overrides), machine, TEXTS, world_size)
    found = possible(context)
    assert found
    for candidate in found:
        changed = context.resolve(apply_changes(context.config, candidate.changes))
        assert changed.training.global_batch == context.resolved.training.global_batch
        assert changed.training.lr == context.resolved.training.lr
        assert changed != context.resolved
        assert changed.seed == context.config.seed


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.endswith("fast") and "4gpu" not in name])
def test_each_setting_of_the_fast_configs_is_within_reach(name: str) -> None:
    plain, fast = config_named(name.removesuffix("_fast")), config_named(name)
    workload = TEXTS if plain.workload == "text_classifier" else WorkloadFacts(samples_per_epoch=10_000)
    context = Context(fast, H200, workload)
    differing = [
        f"{section}.{key}"
        for section, values in fast.model_dump().items()
        if isinstance(values, dict)
        for key, value in values.items()
        if setting_of(plain, f"{section}.{key}") != value
    ]
    assert differing
    for key in differing:
        # The fast config but for this one setting.
        there = context.having(apply_changes(fast, {key: setting_of(plain, key)}))
        wanted = setting_of(context.resolved, key)
        reached = [apply_changes(there.config, candidate.changes) for candidate in possible(there)]
        assert any(setting_of(there.resolve(config), key) == wanted for config in reached), key


@pytest.mark.parametrize(
    ("dataset", "many"),
    [
        (Texts([3, 9, 4]), True),
        (Texts([5, 5, 5]), False),
        (Texts([3, 9, 4], widest=16), False),
        (Subset(Texts([3, 9, 4]), [0, 1]), True),
        (Subset(Texts([3, 9, 4]), [1]), False),
        (Texts([]), False),
        ([1, 2, 3], False),
    ],
)
def test_widths_are_many_only_where_padded_batches_differ_in_them(dataset: Any, many: bool) -> None:
    workload = Workload(nn.Linear(1, 1), dataset)
    assert workload_facts(config_named("quickstart"), workload).many_widths is many


@pytest.mark.parametrize(
    ("sizes", "many"),
    [(range(40, 140), True), ([3] * 60 + [9] * 40, False), ([7] * 100, False)],
)
def test_a_graph_is_not_tried_where_hardly_two_batches_have_the_same_shape(sizes: Any, many: bool) -> None:
    config = resolve_here(config_of(workload="a.b:c", training={"global_batch": 4}), 1)
    rows = [torch.ones(size, 2) for size in sizes]
    facts = workload_facts(config, Workload(nn.Linear(2, 1), rows, collate_fn=torch.cat))
    assert facts.many_shapes is many
    told = knob_named("capture").why_not(Context(config_of(gpu={"device": "cuda"}), H200, facts))
    assert (told is not None and "same shape" in told) is many


def test_masked_batches_of_many_widths_are_captured_on_few() -> None:
    config = config_of(gpu={"device": "cuda", "compile_model": True})
    widths, capture = knob_named("widths"), knob_named("capture")
    for masked in (True, False):
        context = Context(config, H200, WorkloadFacts(many_widths=True, many_shapes=True, masks_padding=masked))
        assert capture.why_not(context) is not None
        assert (widths.why_not(context) is None) is masked
    (few,) = widths.candidates(context)
    assert capture.why_not(context.having(apply_changes(config, few.changes))) is None


def test_small_data_goes_to_the_device_with_what_usually_gains_much() -> None:
    config = config_of(gpu={"device": "cuda"})
    for size, gain in ((10_000, 0.1), (1_000_000, 0.05)):
        facts = WorkloadFacts(resident_bytes=size, parameter_bytes=100_000)
        assert knob_named("resident").gain(Context(config, H200, facts)) == gain


def test_a_text_cut_into_blocks_is_compiled_and_captured_and_not_bucketed(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("some words of a text\n" * 100)
    sizes = {"d_model": 16, "n_heads": 2, "num_layers": 1, "max_seq_len": 32}
    config = config_of(workload="gpt", model=sizes, data={"dataset": "text", "root": str(tmp_path)})
    facts = workload_facts(config, build_workload(config))
    everything = config.model_dump()
    everything["gpu"]["device"] = "cuda"
    everything["gpu"]["capture"] = "step"
    context = Context(load_config_from_mapping(everything, environ={}), H200, facts)
    labels = [candidate.label for candidate in possible(context)]
    assert "gpu.compile_model=true, gpu.compile_scope=model" in labels, "its one block is not repeated"
    assert not [label for label in labels if label.startswith("data.batching")]


def test_blocks_are_compiled_where_a_model_repeats_them_and_start_sooner() -> None:
    quickstart = config_named("quickstart")
    repeated = workload_facts(quickstart, build_workload(quickstart))
    without = workload_facts(quickstart, Workload(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), [1, 2]))
    knob = knob_named("compile")
    scopes = {
        facts.repeats_blocks: [
            (candidate.changes["gpu.compile_scope"], candidate.setup_s)
            for candidate in knob.candidates(Context(quickstart, LAPTOP, facts))
        ]
        for facts in (repeated, without)
    }
    assert scopes[False] == [("model", None)]
    assert [scope for scope, _ in scopes[True]] == ["blocks", "model"]
    quick_s, usual_s = (setup_s for _, setup_s in scopes[True])
    assert usual_s is None
    assert quick_s is not None
    assert quick_s < knob.setup_s
    compiled = config_named("quickstart", "gpu.compile_model=true")
    assert not knob.candidates(Context(compiled, LAPTOP, repeated))


@pytest.mark.parametrize(
    ("data", "size", "reason"),
    [
        (TensorDataset(torch.zeros(100, 40), torch.zeros(100).long()), 100 * 168, None),
        ([{"x": torch.zeros(3), "y": 1.0}] * 50, 50 * 20, None),
        ([torch.zeros(length) for length in (1, 2, 3)], None, "differ in shape"),
        (iter([1, 2]), None, "by index"),
    ],
)
def test_any_data_of_equal_samples_may_be_resident(data: Any, size: int | None, reason: str | None) -> None:
    config = config_of(workload="some.module:function")
    facts = workload_facts(config, Workload(nn.Linear(1, 1), data))
    assert facts.resident_bytes == size
    knob = knob_named("resident")
    for machine in (H200, LAPTOP):
        told = knob.why_not(Context(config, machine, facts))
        assert told is None if reason is None else reason in (told or "")
    if reason is None:
        resident = Context(config_of(workload="some.module:function", data={"resident": True}), H200, facts)
        for name in ("workers", "prefetch", "pinning"):
            assert knob_named(name).why_not(resident) == "batches are put together on the device"
        small = replace(H200, memory_bytes=2 * facts.resident_bytes)
        assert "50% of the device's memory" in (knob.why_not(Context(config, small, facts)) or "")


@pytest.mark.parametrize(("pads", "many"), [(True, True), (False, False)])
def test_a_collate_function_that_pads_shows_many_widths(pads: bool, many: bool) -> None:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True) if pads else torch.cat(samples)

    config = config_of(workload="some.module:function")
    data = [torch.zeros(1 + length % 9) for length in range(50)]
    facts = workload_facts(config, Workload(nn.Linear(1, 1), data, collate_fn=collate))
    assert facts.many_widths is many
    labels = [candidate.label for candidate in possible(Context(config, H200, facts))]
    assert ("data.batching=bucketed" in labels) is many


def test_gelu_is_tried_where_there_are_layers_of_it_on_a_cpu() -> None:
    quickstart = config_named("quickstart")
    with_gelu = workload_facts(quickstart, build_workload(quickstart))
    without = workload_facts(quickstart, Workload(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), [1, 2]))
    compiled = config_named("quickstart", "gpu.compile_model=true")
    for config, facts, machine, tried in (
        (quickstart, with_gelu, LAPTOP, True),
        (quickstart, without, LAPTOP, False),
        (compiled, with_gelu, LAPTOP, False),
        (config_named("ag_news_single_gpu"), with_gelu, H200, False),
    ):
        labels = [candidate.label for candidate in possible(Context(config, machine, facts))]
        assert ("training.cpu_gelu=keep_slope" in labels) is tried


def test_the_fused_loss_is_tried_on_any_model_that_scores_words() -> None:
    quickstart = config_named("quickstart")
    facts = [
        workload_facts(quickstart, Workload(nn.Sequential(nn.Embedding(5000, 4), nn.Linear(4, width)), [1, 2]))
        for width in (5000, 50)
    ]
    assert [item.has_wide_head for item in facts] == [True, False]
    for item, tried in zip(facts, (True, False), strict=True):
        labels = [candidate.label for candidate in possible(Context(quickstart, H200, item))]
        assert ("training.fused_loss=true" in labels) is tried
    sharded = config_named("quickstart", "parallel.strategy=zero2", "gpu.channels_last=false")
    assert "training.fused_loss=true" not in [item.label for item in possible(Context(sharded, H200, facts[0], 2))]


@pytest.mark.parametrize(
    ("capture", "many_shapes", "modes"),
    [
        ("off", False, ["reduce-overhead", "max-autotune"]),
        ("step", False, ["max-autotune"]),
        ("off", True, ["max-autotune"]),
    ],
)
def test_compiled_parts_are_captured_where_the_step_is_not(capture: str, many_shapes: bool, modes: list[str]) -> None:
    config = config_of(gpu={"device": "cuda", "compile_model": True, "capture": capture})
    context = Context(config, H200, WorkloadFacts(many_shapes=many_shapes))
    found = knob_named("compile_mode").candidates(context)
    assert [item.changes["gpu.compile_mode"] for item in found] == modes
    assert [item.setup_s for item in found] == [15.0, None][-len(modes) :]


def test_cudnn_is_not_tried_where_gpt_has_kernels_of_its_own() -> None:
    knob = knob_named("flash_attention")
    for width, wanted in ((768, []), (576, ["cudnn"])):
        config = config_of(workload="gpt", model={"d_model": width}, data={"dataset": "text", "root": "x"})
        found = knob.candidates(Context(config, H200))
        assert [candidate.changes["gpu.use_flash_attention"] for candidate in found] == wanted


def test_knobs_name_real_settings_and_real_findings() -> None:
    codes = {
        *("input_bound", "transfer_bound", "host_bound", "compute_bound", "communication_bound", "straggler"),
        *("sync_stall", "small_batch", "precision_unused", "padding_waste", "memory_pressure", "memory_underused"),
        *("recompilation", "cpu_oversubscribed", "negative_scaling"),
    }
    names = {knob.name for knob in all_knobs()}
    everything = config_named("gpt2_124m").model_dump()
    for knob in all_knobs():
        assert set(knob.codes(Context(config_named("gpt2_124m"), H200))) <= codes, knob.name
        assert set(knob.partners) <= names, knob.name
        for key in knob.keys:
            section, setting = key.split(".")
            assert setting in everything[section], key


def test_a_micro_batch_keeps_the_global_batch_in_all_spellings() -> None:
    for training in (
        {"batch_size": 8},
        {"micro_batch": 8},
        {"micro_batch": 8, "accumulation": 4},
        {"global_batch": 32},
    ):
        context = Context(config_of(training=training), H200, TEXTS)
        candidates = knob_named("micro_batch").candidates(context)
        assert candidates or context.global_batch == 8
        for candidate in candidates:
            assert context.why_not(candidate.changes) is None
            changed = context.resolve(apply_changes(context.config, candidate.changes))
            assert changed.training.global_batch == context.global_batch


def test_a_change_of_the_global_batch_is_refused_whoever_asks() -> None:
    context = Context(config_of(training={"global_batch": 32}))
    told = context.why_not({"training.global_batch": 64})
    assert told == "the global batch would be 64 instead of 32"


def test_what_the_config_refuses_is_never_a_candidate() -> None:
    context = Context(config_of(parallel={"strategy": "zero2"}, training={"global_batch": 32}), H200, TEXTS, 4)
    assert "cannot be divided" in (context.why_not({"gpu.compile_model": True}) or "")
    assert not [item for item in possible(context) if item.knob in ("compile", "bucket_size")]


@pytest.mark.parametrize(
    ("gpu", "values"),
    [
        ({"device": "cuda"}, "already so by auto"),
        ({"device": "cuda", "compile_model": True}, [True]),
        ({"device": "cuda", "compile_model": True, "channels_last": True}, [False]),
        ({"device": "cuda", "mixed_precision": "off"}, [True]),
        ({"device": "cuda", "channels_last": True}, "already so"),
    ],
)
def test_the_compiler_chooses_where_channels_lie_unless_told(gpu: dict[str, Any], values: list[bool] | str) -> None:
    knob = knob_named("memory_format")
    context = Context(config_of(gpu=gpu), H200, WorkloadFacts(has_convolutions=True))
    assert (knob.why_not(context) or [item.changes["gpu.channels_last"] for item in knob.candidates(context)]) == values


def test_full_precision_is_tried_where_each_cast_is_a_launch() -> None:
    knob = knob_named("precision")
    context = Context(config_of(gpu={"device": "cuda"}), H200)
    assert [item.changes for item in knob.candidates(context)] == [{"gpu.mixed_precision": "off"}]
    assert knob.why_not(context) is None
    assert (knob.codes(context), knob.gain(context)) == (("host_bound",), 0.0)
    captured = Context(config_of(gpu={"device": "cuda", "capture": "step"}), H200)
    assert knob.why_not(captured) == "already bf16"


def test_the_planner_prunes_what_does_not_fit() -> None:
    def planner(config: Config) -> str | None:
        size = config.training.micro_batch
        return f"{size} samples do not fit" if isinstance(size, int) and size > 16 else None

    config = config_of(training={"global_batch": 64, "micro_batch": 8})
    context = Context(config, H200, TEXTS, planner=planner)
    sizes = [item.changes["training.micro_batch"] for item in possible(context) if item.knob == "micro_batch"]
    assert sizes == [4, 16]


def test_knobs_say_why_they_mean_nothing_here() -> None:
    cpu, gpu = Context(config_of(), LAPTOP), Context(config_of(), H200)
    assert knob_named("capture").why_not(cpu) == "needs a GPU"
    asked = Context(config_of(gpu={"mixed_precision": "bf16"}), H200)
    assert knob_named("precision").why_not(asked) == "already bf16"
    assert knob_named("precision").why_not(cpu) == "this processor has no bf16"
    assert knob_named("memory_format").why_not(gpu) == "the model has no convolutions"
    assert knob_named("compression").why_not(gpu) == "there is one process"
    assert knob_named("resident").why_not(gpu) == "the samples are not known to be tensors of one shape"
    deterministic = Context(config_of(gpu={"deterministic": True}), H200)
    assert "deterministic" in (knob_named("capture").why_not(deterministic) or "")
    old = replace(H200, capability=7.5, bf16=False)
    assert "no TF32" in (knob_named("tf32").why_not(Context(config_of(gpu={"tf32": False}), old)) or "")


def test_packed_is_rounding_against_balanced_steps_and_bucketed_is_more() -> None:
    context = Context(config_of(), H200, TEXTS)
    found = {item.changes["data.batching"]: item for item in knob_named("batching").candidates(context)}
    assert found["packed"].numerics_effect == "rounding"
    assert found["packed"].reference["data.balance"] is True
    assert found["bucketed"].numerics_effect == "more"


def test_whole_runs_are_counted_in_samples() -> None:
    steps = config_of(training={"global_batch": 32, "max_steps": 100, "epochs": 2})
    assert Context(steps).run_samples == 3200
    assert Context(steps, workload=WorkloadFacts(samples_per_epoch=1000)).run_samples == 2000
    assert Context(config_of()).run_samples is None


def test_units_of_rounding_follow_the_coarser_side() -> None:
    exact = Context(config_of(gpu={"tf32": False, "mixed_precision": "off"}), H200).resolved
    assert rounding_unit(exact) == 2**-24
    tf32 = Context(config_of(gpu={"mixed_precision": "off"}), H200).resolved
    assert rounding_unit(exact, tf32) == 2**-11
    assert rounding_unit(tf32, Context(config_of(), H200).resolved) == 2**-8
    assert rounding_unit(Context(config_of(), LAPTOP).resolved) == 2**-24


def test_unknown_keys_and_bad_values_are_config_errors() -> None:
    with pytest.raises(ConfigError):
        apply_changes(config_of(), {"gpu.fast": True})
    with pytest.raises(ConfigError):
        apply_changes(config_of(), {"gpu.capture": "sideways"})
    assert without_dropout(config_of(model={"dropout": 0.1})) == {"model.dropout": 0.0}
    assert without_dropout(config_of(workload="a.b:c")) == {}


def test_a_knob_can_be_registered(registry: dict[str, Knob]) -> None:
    mine = Knob("mine", ("model.tile",), "Tiles.", lambda context: [16, 32])
    register_knob(mine)
    assert all_knobs()[-1] is mine
    assert registry == {"mine": mine}
    context = Context(config_of(workload="a.b:c", model={"tile": 16}))
    assert [item.changes for item in mine.candidates(context)] == [{"model.tile": 32}]


def plugin_knobs() -> list[Knob]:
    return [Knob("from_plugin", ("gpu.tf32",), "Another.", lambda context: [True])]


def plugin_of_nonsense() -> list[str]:
    return ["nonsense"]


def test_plugins_add_knobs_and_broken_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(*values: str) -> None:
        found = [EntryPoint(f"p{place}", value, GROUP) for place, value in enumerate(values)]
        monkeypatch.setattr(knobs_module, "entry_points", lambda group: found if group == GROUP else [])

    install(f"{__name__}:plugin_knobs")
    assert "from_plugin" in {knob.name for knob in all_knobs()}
    for value in (f"{__name__}:plugin_of_nonsense", "no_such_module:knobs"):
        install(value)
        with pytest.raises(EnvironmentSetupError, match="plugin p0"):
            all_knobs()
