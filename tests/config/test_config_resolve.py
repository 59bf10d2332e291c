"""What `auto` becomes, and the arithmetic of the batch words."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworm.config.load import dump_config, load_config, load_config_from_mapping
from frameworm.config.resolve import DEFAULT_GLOBAL_BATCH, effective_lr, growing_batch_note, resolve
from frameworm.config.schema import Config, ParallelConfig
from frameworm.errors import ConfigError, DeviceError

COUNTS = st.integers(1, 64)


def config_of(**sections: dict[str, Any]) -> Config:
    return load_config_from_mapping(sections, environ={})


def batch(world_size: int, *, allow_uneven: bool = False, **training: Any) -> tuple[int | None, Any, Any]:
    config = config_of(training=training)
    done = resolve(config, world_size=world_size, device="cpu", bf16=False, allow_uneven=allow_uneven).training
    assert done.batch_size is None
    return done.global_batch, done.micro_batch, done.accumulation


@pytest.mark.parametrize(
    ("world_size", "training", "expected"),
    [
        (1, {}, (32, 32, 1)),
        (4, {}, (32, 8, 1)),
        (1, {"accumulation": 4}, (32, 8, 4)),
        (4, {"global_batch": 128}, (128, 32, 1)),
        (4, {"global_batch": 128, "micro_batch": 8}, (128, 8, 4)),
        (4, {"global_batch": 128, "accumulation": 2}, (128, 16, 2)),
        (4, {"global_batch": 128, "micro_batch": 16, "accumulation": 2}, (128, 16, 2)),
        (4, {"batch_size": 16}, (64, 16, 1)),
        (4, {"batch_size": 16, "accumulation": 3}, (192, 16, 3)),
        (2, {"batch_size": 16, "global_batch": 128}, (128, 16, 4)),
        (2, {"batch_size": 16, "micro_batch": 16}, (32, 16, 1)),
        (3, {"micro_batch": 5}, (15, 5, 1)),
    ],
)
def test_batch_words(world_size: int, training: dict[str, int], expected: tuple[int, int, int]) -> None:
    assert batch(world_size, **training) == expected


@settings(deadline=None)
@given(
    world_size=COUNTS,
    global_batch=st.none() | st.integers(1, 4096),
    micro=st.none() | COUNTS,
    accumulation=st.none() | COUNTS,
    older_spelling=st.booleans(),
    allow_uneven=st.booleans(),
)
def test_the_identity_holds_or_the_error_names_sizes_that_work(
    world_size: int,
    global_batch: int | None,
    micro: int | None,
    accumulation: int | None,
    older_spelling: bool,
    allow_uneven: bool,
) -> None:
    names = ("global_batch", "batch_size" if older_spelling else "micro_batch", "accumulation")
    asked = {name: value for name, value in zip(names, (global_batch, micro, accumulation)) if value is not None}
    try:
        total, size, steps = batch(world_size, allow_uneven=allow_uneven, **asked)
    except ConfigError as error:
        message = str(error)
        assert message.startswith("training.global_batch: ")
        assert "\n" not in message
        if micro is None or accumulation is None:
            nearest = [int(word) for word in message.split("nearest that does: ")[1].split(" or ")]
            for fitting in nearest:
                assert batch(world_size, **{**asked, "global_batch": fitting})[0] == fitting
            assert not allow_uneven or (global_batch or DEFAULT_GLOBAL_BATCH) < world_size
        return
    assert total is not None
    if allow_uneven:
        # Enough room for the whole batch, and not a whole micro-batch row too much.
        assert size * steps * world_size >= total
        assert (size - 1) * steps * world_size < total
        assert micro is None or size <= micro
    else:
        assert size * steps * world_size == total
        assert accumulation in (None, steps)
        assert micro in (None, size)
    assert total == (
        global_batch or (DEFAULT_GLOBAL_BATCH if micro is None else micro * (accumulation or 1) * world_size)
    )


@settings(deadline=None)
@given(global_batch=st.integers(64, 512), before=st.integers(1, 64), after=st.integers(1, 64))
def test_a_resolved_run_resumes_on_another_number_of_processes(global_batch: int, before: int, after: int) -> None:
    config = config_of(training={"global_batch": global_batch})
    first = resolve(config, world_size=before, device="cpu", bf16=False, allow_uneven=True)
    second = resolve(
        first.model_copy(update={"parallel": config.parallel}),
        world_size=after,
        device="cpu",
        bf16=False,
        allow_uneven=True,
    )
    assert second.training.global_batch == global_batch
    assert isinstance(first.training.micro_batch, int)
    assert isinstance(second.training.micro_batch, int)
    assert second.training.micro_batch <= first.training.micro_batch


@settings(deadline=None)
@given(world_size=st.sampled_from([1, 2, 4, 8]), device=st.sampled_from(["cpu", "cuda"]), bf16=st.booleans())
def test_resolving_twice_changes_nothing(world_size: int, device: Any, bf16: bool) -> None:
    once = resolve(config_of(), world_size=world_size, device=device, bf16=bf16)
    assert resolve(once, world_size=world_size, device=device, bf16=bf16) == once


def test_a_global_batch_that_does_not_divide_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("training:\n  epochs: 1\n  global_batch: 30\n")
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(file, environ={}), world_size=4, device="cpu", bf16=False)
    assert str(caught.value) == (
        f"{file}:3: training.global_batch: global_batch 30 does not divide by world size 4; nearest that does: 28 or 32"
    )
    config = load_config(file, ["training.micro_batch=4", "training.accumulation=2"], {})
    with pytest.raises(ConfigError) as caught:
        resolve(config, world_size=4, device="cpu", bf16=False)
    assert str(caught.value) == (
        f"{file}:3: training.global_batch: global_batch 30 is not world size 4 x micro_batch 4 x accumulation 2 = 32; "
        "set 32, or leave accumulation out"
    )


def test_autos_on_a_gpu_with_several_processes() -> None:
    config = config_of()
    done = resolve(config, world_size=4, device="cuda", bf16=True)
    assert (done.gpu.device, done.gpu.mixed_precision, done.gpu.fused_optimizer, done.gpu.benchmark) == (
        "cuda",
        "bf16",
        True,
        True,
    )
    assert (done.parallel.strategy, done.parallel.backend, done.parallel.static_graph) == ("ddp", "nccl", False)
    assert (done.data.pin_memory, done.data.persistent_workers, done.data.num_workers) == (True, True, "auto")
    assert resolve(config, world_size=4, device="cuda", bf16=False).gpu.mixed_precision == "fp16"
    assert config == config_of()


def test_autos_on_a_cpu_alone() -> None:
    done = resolve(config_of(data={"num_workers": 0}), world_size=1, device="cpu", bf16=True)
    assert (done.gpu.device, done.gpu.mixed_precision) == ("cpu", "off")
    assert (done.parallel.strategy, done.parallel.backend) == ("single", "gloo")
    assert (done.data.pin_memory, done.data.persistent_workers) == (False, False)


@pytest.mark.parametrize("strategy", get_args(ParallelConfig.model_fields["strategy"].annotation))
@pytest.mark.parametrize(("device", "world_size"), [("cpu", 1), ("cpu", 2), ("cuda", 1), ("cuda", 2)])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gpu": {"capture": "auto"}, "data": {"batching": "packed", "num_workers": 0}},
        {"gpu": {"deterministic": True, "compile_model": True}, "memory": {"activation_checkpointing": "full"}},
    ],
    ids=["plain", "packed", "deterministic"],
)
def test_a_resolved_config_can_be_loaded_and_resolved_again(
    strategy: str, device: Literal["cpu", "cuda"], world_size: int, more: dict[str, Any], tmp_path: Path
) -> None:
    def resolved() -> Config:
        wanted = config_of(parallel={"strategy": strategy}, **more)
        return resolve(wanted, world_size=world_size, device=device, bf16=True)

    several_in_one = strategy in ("single", "dp") and world_size > 1
    without_its_device = strategy == "dp" and (device == "cpu" or "data" in more)
    compiled_shards = strategy in ("zero2", "zero3") and "memory" in more
    if several_in_one or without_its_device or compiled_shards:
        with pytest.raises(ConfigError):
            resolved()
        return
    done = resolved()
    (tmp_path / "config.yaml").write_text(dump_config(done))
    again = load_config(tmp_path / "config.yaml", environ={})
    assert again == done
    assert resolve(again, world_size=world_size, device=device, bf16=True) == done


def test_what_is_given_is_kept() -> None:
    config = config_of(
        gpu={"device": "cpu", "mixed_precision": "fp16", "fused_optimizer": False},
        parallel={"strategy": "ddp", "backend": "gloo", "static_graph": True},
        data={
            "pin_memory": True,
            "persistent_workers": False,
            "num_workers": 2,
            "balance": True,
            "resident": False,
            "eval_batch": 7,
        },
    )
    done = resolve(config, world_size=1, device="cuda", bf16=True)
    assert (done.gpu, done.parallel, done.data) == (config.gpu, config.parallel, config.data)


@pytest.mark.parametrize(
    ("data", "device", "balance", "resident"),
    [
        ({}, "cuda", False, False),
        ({"batching": "bucketed"}, "cuda", False, False),
        ({"batching": "packed"}, "cuda", True, "auto"),
        ({"batching": "packed"}, "cpu", True, False),
        ({"batching": "packed", "shuffle": False}, "cpu", False, False),
        ({"batching": "packed", "resident": True, "balance": False}, "cuda", False, True),
        ({"resident": True}, "cpu", False, True),
        ({"resident": True, "batching": "bucketed"}, "cuda", False, True),
    ],
)
def test_batching_decides_balance_and_place(data: dict[str, Any], device: Any, balance: Any, resident: Any) -> None:
    done = resolve(config_of(data=data), world_size=1, device=device, bf16=True)
    assert (done.data.balance, done.data.resident) == (balance, resident)
    again = resolve(done, world_size=1, device=device, bf16=True)
    assert again.data == done.data


@pytest.mark.parametrize(
    ("training", "world_size", "passes"),
    [
        ({"global_batch": 64}, 1, (32, 2)),
        ({"global_batch": 64}, 2, (16, 2)),
        ({"global_batch": 6}, 2, (3, 1)),  # cannot be halved
        ({"global_batch": 64, "micro_batch": 64}, 1, (64, 1)),  # as the user says
        ({"global_batch": 64, "accumulation": 1}, 1, (64, 1)),
        ({"batch_size": 64}, 1, (64, 1)),
    ],
)
def test_each_half_of_a_bucketed_step_is_a_pass_of_its_own(
    training: dict[str, Any], world_size: int, passes: tuple[int, int]
) -> None:
    config = config_of(data={"batching": "bucketed"}, training=training)
    done = resolve(config, world_size=world_size, device="cpu", bf16=False)
    assert (done.training.micro_batch, done.training.accumulation) == passes
    again = resolve(done, world_size=world_size, device="cpu", bf16=False)
    assert again.training == done.training


def test_resident_data_needs_a_gpu() -> None:
    config = config_of(data={"resident": True, "batching": "packed"})
    with pytest.raises(DeviceError, match=r"^data\.resident: "):
        resolve(config, world_size=1, device="cpu", bf16=False)


@pytest.mark.parametrize(
    ("workload", "micro_batch", "expected"),
    [("text_classifier", 32, 256), ("text_classifier", 512, 512), ("gpt", 8, 8), ("my.module:function", 8, 8)],
)
def test_validation_batches(workload: str, micro_batch: int, expected: int) -> None:
    data = {"dataset": "text", "root": "texts"} if workload == "gpt" else {}
    config = config_of(workload=workload, data=data, training={"micro_batch": micro_batch})  # type: ignore[arg-type]
    assert resolve(config, world_size=1, device="cpu", bf16=False).data.eval_batch == expected


def test_deterministic_turns_benchmarking_off() -> None:
    config = config_of(gpu={"deterministic": True, "benchmark": True})
    assert resolve(config, world_size=1, device="cpu", bf16=False).gpu.benchmark is False


@pytest.mark.parametrize(
    ("sections", "world_size", "message"),
    [
        (
            {"parallel": {"strategy": "single"}},
            2,
            "parallel.strategy: single is one process and there are 2; use ddp or auto",
        ),
        ({"parallel": {"strategy": "dp"}}, 2, "parallel.strategy: dp is one process and there are 2; use ddp or auto"),
        (
            {"parallel": {"strategy": "dp"}},
            1,
            "parallel.strategy: dp spreads one process over GPUs and no GPU can be used here; use single or ddp",
        ),
        (
            {"parallel": {"backend": "nccl"}},
            2,
            "parallel.backend: nccl talks between GPUs and no GPU can be used here; use gloo or auto",
        ),
    ],
)
def test_what_the_world_rules_out(sections: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config_of(**sections), world_size=world_size, device="cpu", bf16=False)
    assert str(caught.value) == message


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match=r"gpu\.device: cuda is asked for"):
        resolve(config_of(gpu={"device": "cuda"}), world_size=1, device="cpu", bf16=False)


def test_configs_built_in_python_are_checked_too() -> None:
    config = Config(parallel={"strategy": "zero3", "check_replicas": 5})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        resolve(config, world_size=1, device="cuda", bf16=True)
    message = "parallel.check_replicas: under strategy zero3 no two ranks hold the same; leave it out"
    assert str(caught.value) == message


def test_the_origin_of_values_travels_and_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("training: {global_batch: 30}\n")
    loaded = load_config(file, environ={"HOME": "/h"})
    assert loaded == load_config_from_mapping({"training": {"global_batch": 30}}, environ={"HOME": "/h"})
    for config in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert config == loaded
        with pytest.raises(ConfigError, match=r"x\.yaml:1: training\.global_batch"):
            resolve(config, world_size=4, device="cpu", bf16=False)


@pytest.mark.parametrize(("scaling", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_learning_rate_grows_with_the_batch(scaling: str, expected: float) -> None:
    training = {"lr": 0.1, "lr_scaling": scaling, "base_batch": 32, "global_batch": 128}
    assert effective_lr(config_of(training=training)) == pytest.approx(expected)


def test_learning_rate_of_an_unresolved_config() -> None:
    with pytest.raises(ConfigError, match="resolve the config first"):
        effective_lr(config_of(training={"lr_scaling": "linear", "base_batch": 32}))


def test_a_resolved_config_reads_back_equal(tmp_path: Path) -> None:
    done = resolve(config_of(training={"batch_size": 3}), world_size=2, device="cuda", bf16=True)
    (tmp_path / "config.yaml").write_text(dump_config(done))
    assert load_config(tmp_path / "config.yaml", environ={}) == done


def test_a_batch_per_device_is_said_to_grow_with_the_ranks() -> None:
    said = growing_batch_note(config_of(training={"batch_size": 16, "accumulation": 2}).training, 4)
    assert said is not None
    assert "global batch is 128" in said
    assert "training.batch_size is per device" in said
    assert "training.global_batch=32" in said
    assert "micro_batch is per device" in str(growing_batch_note(config_of(training={"micro_batch": 5}).training, 3))


@pytest.mark.parametrize(
    ("world_size", "training"),
    [(1, {"batch_size": 16}), (4, {"global_batch": 64, "micro_batch": 16}), (4, {}), (2, {"accumulation": 2})],
)
def test_a_batch_that_does_not_grow_needs_no_note(world_size: int, training: dict[str, Any]) -> None:
    assert growing_batch_note(config_of(training=training).training, world_size) is None
