"""Muon: which parameters it updates, that it is torch's, and that no shard is ever made orthogonal by itself."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding_cases import Net, Tied, apart, largest_difference, make, train, whole_values
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from workbench import mlp, tagger

from frameworm.config.checks import check
from frameworm.config.schema import Config, ParallelConfig, TrainingConfig
from frameworm.engine.optim.muon import MuonAdamW, WholeMuon, hidden_matrices
from frameworm.engine.optim.optimizers import build_optimizer
from frameworm.errors import ConfigError
from frameworm.models.gpt import GPT
from frameworm.models.text_classifier import TextClassifier

SETTINGS: dict[str, Any] = {"kind": "tied", "optimizer": "muon", "clip_norm": 0.05}
HALF, WHOLE = 7, 11
DEADLINE_S = 100.0


def _config(**training: Any) -> Config:
    return Config(training=TrainingConfig(optimizer="muon", **training))


def _names(model: nn.Module) -> set[str]:
    hidden = set(map(id, hidden_matrices(model)))
    return {name for name, item in model.named_parameters() if id(item) in hidden}


def test_the_matrices_of_repeated_blocks_are_hidden() -> None:
    for model in (
        GPT(11, d_model=8, n_heads=2, num_layers=2, max_seq_len=8),
        TextClassifier(64, 4, d_model=8, n_heads=2, num_layers=2, dim_feedforward=16, max_seq_len=8),
        Net(),
        Tied(),
    ):
        inside = {
            name
            for name, item in model.named_parameters()
            if item.ndim == 2 and any(part.isdigit() for part in name.split("."))
        }
        assert _names(model) == inside, type(model).__name__
        assert inside


class Strange(nn.Module):
    """A block with tables, a norm over two dimensions and a layer of its own beside its matrices."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(4, 6))

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 5))
        self.positions = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm((4, 4))
        self.column = nn.Linear(1, 4)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.product = self.Product()


def test_tables_norms_and_vectors_are_not() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Strange(), Strange(), nn.Linear(4, 2))
    expected = {"attention.in_proj_weight", "attention.out_proj.weight", "product.kernel"}
    assert _names(model) == {f"{place}.{name}" for place in (1, 2) for name in expected}


def test_without_blocks_all_matrices_but_the_last_are_hidden() -> None:
    assert _names(mlp()) == {"0.weight"}
    assert _names(tagger()) == set()
    assert _names(nn.Sequential(nn.Embedding(9, 4), nn.LSTM(4, 4), nn.Linear(4, 9))) == {
        "1.weight_ih_l0",
        "1.weight_hh_l0",
    }
    with pytest.raises(ConfigError, match="trains none; use adamw"):
        build_optimizer(tagger(), _config())


def _gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_it_is_torchs_muon_and_torchs_adamw() -> None:
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    optimizer = build_optimizer(model, _config(lr=0.01, weight_decay=0.1))
    hidden = hidden_matrices(reference)
    rest = [item for item in reference.parameters() if all(item is not one for one in hidden)]
    others = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [item for item in rest if item.ndim > 1], "weight_decay": 0.1},
                {"params": [item for item in rest if item.ndim < 2], "weight_decay": 0.0},
            ],
            lr=0.01,
            fused=True,
        ),
    ]
    for step in range(4):
        _gradients(model, step)
        _gradients(reference, step)
        optimizer.step()
        for other in others:
            other.step()
    assert largest_difference(whole_values(model), whole_values(reference)) == 0.0


def _after(steps: int, **flags: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = build_optimizer(model, _config(lr=0.01, weight_decay=0.1))
    for step in range(steps):
        _gradients(model, step)
        for name, value in flags.items():
            setattr(optimizer, name, value)
        optimizer.step()
    return model, optimizer


def test_rates_and_flags_on_the_device_give_the_same_steps() -> None:
    plain, _ = _after(4)
    flagged, optimizer = _after(4, found_inf=torch.zeros(()), grad_scale=None)
    assert largest_difference(whole_values(plain), whole_values(flagged)) < 1e-6
    before, state = whole_values(flagged), copy.deepcopy(optimizer.state_dict()["state"])
    for parameter in flagged.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert largest_difference(whole_values(flagged), before) == 0.0
    now = optimizer.state_dict()["state"]
    for number, values in state.items():
        assert all(torch.equal(value, now[number][name]) for name, value in values.items()), number
    scaled, _ = _after(2, grad_scale=torch.full((), 4.0), found_inf=torch.zeros(()))
    unscaled, quarter = _after(0)
    for step in range(2):
        _gradients(unscaled, step)
        for parameter in unscaled.parameters():
            assert parameter.grad is not None
            parameter.grad /= 4
        quarter.step()
    assert largest_difference(whole_values(scaled), whole_values(unscaled)) < 1e-6


def test_copies_and_added_groups_work_on_their_own_state() -> None:
    _, optimizer = _after(2)
    assert isinstance(optimizer, MuonAdamW)
    other = copy.deepcopy(optimizer)
    assert other.param_groups[0]["rule"] == "muon"
    for inner in (other._muon, other._adamw):
        assert inner is not None
        assert inner.state is other.state
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(3)
    optimizer.step()
    assert float(extra.detach().max()) < 1
    _, fresh = _after(0)
    _, trained = _after(2)
    fresh.load_state_dict(trained.state_dict())
    assert isinstance(fresh, MuonAdamW)
    assert isinstance(fresh._muon, WholeMuon)
    assert fresh._muon.state is fresh.state
    assert fresh._muon.param_groups[0] is fresh.param_groups[0]


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    expected, _, _ = train("single", world_size=1, max_steps=WHOLE, **SETTINGS)
    train("single", world_size=1, max_steps=HALF, folder=tmp_path, **SETTINGS)
    found, record, _ = train("single", world_size=1, max_steps=WHOLE, folder=tmp_path, resume=True, **SETTINGS)
    assert record.steps == WHOLE
    assert largest_difference(found, expected) == 0.0


def test_matrices_in_host_memory_are_refused() -> None:
    config = Config(
        training=TrainingConfig(optimizer="muon"), parallel=ParallelConfig(strategy="zero3", offload_optimizer=True)
    )
    with pytest.raises(ConfigError, match="muon gathers whole matrices"):
        check(config)


def _sharded(rank: int, world_size: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    results = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        results[strategy] = train(strategy, max_steps=WHOLE, **SETTINGS)[0]
        train(strategy, max_steps=HALF, folder=Path(folder) / strategy, **SETTINGS)
    for source, strategy in (("zero1", "zero1"), ("zero2", "zero2"), ("zero3", "zero3"), ("zero3", "zero1")):
        copied = Path(folder) / f"{source}-{strategy}"
        if rank == 0:
            shutil.copytree(Path(folder) / source, copied)
        torch.distributed.barrier()
        results[copied.name] = train(strategy, max_steps=WHOLE, folder=copied, resume=True, **SETTINGS)[0]
    return results


@pytest.mark.slow
def test_divided_matrices_are_updated_as_whole_ones(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    start = whole_values(make("tied")[0])
    single = train("single", world_size=1, max_steps=WHOLE, **SETTINGS)[0]
    for results in run_ranks(_sharded, 2, (str(tmp_path),), timeout_s=DEADLINE_S):
        for strategy in ("zero1", "zero2", "zero3"):
            # Muon rounds to bfloat16, where a last digit of a gradient may show.
            share, where = apart(results[strategy], results["ddp"], start)
            assert share < 5e-3, f"{strategy}: {share:.2g}, {where}"
            assert largest_difference(results[f"{strategy}-{strategy}"], results[strategy]) == 0.0, strategy
        assert apart(results["ddp"], single, start)[0] < 2e-2
        assert apart(results["zero3-zero1"], single, start)[0] < 2e-2
