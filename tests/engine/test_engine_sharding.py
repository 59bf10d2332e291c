"""Strategies zero1, zero2 and zero3 train what ddp trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharding_cases import largest_difference, make, make_optimizer, perplexing, train
from torch.utils.data import DataLoader, TensorDataset
from workbench import Steps, classification

from frameworm import Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.errors import ConfigError, ModelError, StateError

SHARDED = ("zero1", "zero2", "zero3")
DEADLINE_S = 100.0


def _against_ddp(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        values, record, losses = train("ddp", **case)
        for strategy in SHARDED:
            own_values, own_record, own_losses = train(strategy, **case)
            if rank != 0:  # DDP brings other ranks rank 0's buffers when the next step begins
                for name in [name for name in values if "running" in name]:
                    values[name] = own_values[name]
            results.append(
                {
                    "case": f"{strategy} {case}",
                    "difference": largest_difference(values, own_values),
                    "steps": own_record.steps,
                    "losses": max(abs(a - b) for a, b in zip(losses, own_losses, strict=True) if a and b),
                    "validation": (record.quality.val_loss, own_record.quality.val_loss),
                    "strategy": own_record.strategy,
                    "unseen": own_record.unseen,
                    "bytes": own_record.communication.bytes_per_step,
                    "plain_bytes": record.communication.bytes_per_step,
                    "parameters": own_record.parameters == record.parameters,
                }
            )
    return results


CASES: list[list[dict[str, Any]]] = [
    [{}, {"clip_norm": 0.05}, {"accumulation": 2, "clip_norm": 0.05}],
    [{"kind": "gpt", "clip_norm": 0.05}, {"kind": "tied", "accumulation": 2, "clip_norm": 0.05}],
    [{"kind": "buffers"}, {"optimizer": "fused_sgd", "scheduler": True}, {"optimizer": "fused", "clip_norm": 0.05}],
    [{"optimizer": "adagrad"}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}],
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES, ids=["clipping", "tied", "buffers", "optimizers"])
def test_ten_steps_are_those_of_ddp(run_ranks: Callable[..., list[Any]], cases: list[dict[str, Any]]) -> None:
    for results in run_ranks(_against_ddp, 2, (cases,), timeout_s=DEADLINE_S):
        for result in results:
            assert result["steps"] == 10, result
            assert result["difference"] < 1e-5, result
            assert result["losses"] < 1e-5, result
            assert result["parameters"], result
            assert result["bytes"] > result["plain_bytes"], result
            # Nobody watches what fully_shard sends.
            assert result["unseen"] == ([] if result["strategy"] == "zero1" else ["communication_exposed"]), result


def _validates(rank: int, world_size: int, samples: int) -> list[float]:
    # Three batches of two, or one: rank 1 has fewer than rank 0, or none at all.
    held_out = classification(samples, seed=9)
    losses = []
    for strategy in ("ddp", *SHARDED):
        loader = DataLoader(held_out, 2)
        record = train(strategy, kind="buffers", max_steps=4, validation=loader)[1]
        assert record.quality.val_loss is not None
        losses.append(record.quality.val_loss)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("samples", [6, 1])
def test_validation_with_unequal_numbers_of_batches(run_ranks: Callable[..., list[Any]], samples: int) -> None:
    for losses in run_ranks(_validates, 2, (samples,), timeout_s=DEADLINE_S):
        assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)


def _skips(rank: int, world_size: int, settings: dict[str, Any]) -> list[tuple[list[bool | None], bool]]:
    data = classification(40)
    inputs = data.tensors[0].clone()
    inputs[9, 0] = 1e4  # in the third step, and then on one rank only
    results = []
    for strategy in ("ddp", *SHARDED):
        model, _ = make("plain")
        steps = Steps()
        trainer = Trainer(
            model,
            make_optimizer("fused" if settings.get("mixed_precision") == "fp16" else "adamw", model),
            perplexing,
            strategy=strategy,
            run_dir=None,
            device="cpu",
            progress=False,
            callbacks=[steps],
            **settings,
        )
        trainer.train(OptimizedDataLoader.create(TensorDataset(inputs, data.tensors[1]), 2, shuffle=False))
        finite = all(bool(torch.isfinite(item).all()) for item in model.state_dict().values())
        results.append(([step.skipped for step in steps.records], finite))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"clip_norm": 1.0}, {"mixed_precision": "fp16"}], ids=["clipping", "fp16"])
def test_a_step_with_bad_gradients_is_left_out_everywhere(
    run_ranks: Callable[..., list[Any]], settings: dict[str, Any]
) -> None:
    both = run_ranks(_skips, 2, (settings,), timeout_s=DEADLINE_S)
    for (skipped, finite), (others, _) in zip(*both, strict=True):
        assert finite
        assert skipped[2]
        assert sum(map(bool, skipped)) < 4
        assert skipped == others == both[0][0][0]


def _refuses(rank: int, world_size: int) -> list[str]:
    messages = []

    def attempt(strategy: str, model: Any, optimizer: Any, data: Any = None, **settings: Any) -> None:
        trainer = Trainer(model, optimizer, strategy=strategy, run_dir=None, device="cpu", **settings)
        try:
            trainer.train(OptimizedDataLoader.create(data or classification(16), 4))
        except (ConfigError, ModelError, StateError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("nothing")

    for strategy in SHARDED:
        model, data = make("plain")
        used = make_optimizer("adamw", model)
        model(data[0][0][None]).sum().backward()
        used.step()
        attempt(strategy, model, used)
    scalar, _ = make("plain")
    scalar.scale = torch.nn.Parameter(torch.ones(()))
    attempt("zero3", scalar, make_optimizer("adamw", scalar))
    mixed, _ = make("plain")
    mixed.first.double()
    attempt("zero2", mixed, make_optimizer("adamw", mixed))
    attempt("zero1", mixed, make_optimizer("adamw", mixed))
    model, _ = make("plain")
    attempt("zero3", model, make_optimizer("adamw", model), compile_model=True)
    model, _ = make("plain")
    model.table = torch.nn.Embedding(4, 4, sparse=True)
    attempt("zero2", model, make_optimizer("adamw", model))
    return messages


@pytest.mark.slow
def test_what_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    expected = [
        *["StateError: the optimizer has taken steps already"] * 3,
        "ModelError: strategy zero3 divides parameters by their first dimension, and scale has none",
        "ModelError: strategy zero2 needs parameters of one type: scale is float32 and first.weight is float64",
        "ModelError: strategy zero1 cannot divide this optimizer's state",
        "ConfigError: gpu.compile_model: a compiled model cannot be divided by strategy zero3",
        "ModelError: strategy zero2 cannot divide sparse gradients, which table has",
    ]
    for messages in run_ranks(_refuses, 2, timeout_s=DEADLINE_S):
        for message, begin in zip(messages, expected, strict=True):
            assert message.startswith(begin), message


def _from_outside(rank: int, world_size: int) -> str:
    model, data = make("plain")

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        total: torch.Tensor = model(batch[0]).sum() + model.layers[0].expand(torch.ones(2, 8)).sum()
        return total

    trainer = Trainer(model, make_optimizer("sgd", model), loss_fn, strategy="zero3", run_dir=None, device="cpu")
    try:
        trainer.train(OptimizedDataLoader.create(data, 4))
    except ModelError as error:
        return str(error)
    return "nothing"


def test_a_weight_used_from_outside_is_explained(run_ranks: Callable[..., list[Any]]) -> None:
    for message in run_ranks(_from_outside, 2, timeout_s=DEADLINE_S):
        assert "call the model, and its layers as layer(x)" in message
        assert "use zero1" in message


def _half(rank: int, world_size: int) -> list[tuple[float, float]]:
    results = []
    for strategy in ("ddp", *SHARDED):
        values, record, losses = train(strategy, mixed_precision="bf16", clip_norm=1.0, accumulation=2)
        assert all(item.dtype == torch.float32 for item in values.values())
        assert record.precision == "bf16"
        results.append((float(losses[0] or 0), float(losses[-1] or 0)))
    return results


@pytest.mark.slow
def test_layers_compute_in_half_precision(run_ranks: Callable[..., list[Any]]) -> None:
    for (first, last), *others in run_ranks(_half, 2, timeout_s=DEADLINE_S):
        for begin, end in others:
            assert begin == pytest.approx(first, rel=0.02)
            assert end == pytest.approx(last, rel=0.1)
            assert end < begin
