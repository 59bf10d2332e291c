"""Where the real tokens of a batch are, and how batches come to few shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frameworm.data.batches.real_tokens import (
    MASK,
    PLAN,
    FewWidths,
    PaddingPlanner,
    cut_back,
    few_widths,
    make_plan,
    why_unsuitable,
    widened,
)
from frameworm.data.prefetch import CudaDataLoader
from frameworm.errors import ConfigError


def batch_of(lengths: list[int], *, left: bool = False, **more: Tensor) -> dict[str, Tensor]:
    width = max(lengths)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in zip(mask, lengths):
        row[width - length :] = 1
        if not left:
            row.copy_(row.flip(0))
    ids = torch.arange(1, mask.numel() + 1).view_as(mask) * mask
    return {"input_ids": ids, MASK: mask, **more}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("lengths", [[5, 1, 9], [4, 4, 4], [70, 3, 0, 64], [200]])
def test_tokens_go_there_and_come_back(lengths: list[int], left: bool) -> None:
    batch = batch_of(lengths, left=left)
    plan = PaddingPlanner(widen=True)(batch)[PLAN]
    wider = widened(batch, plan["length"])
    assert wider is not None
    ids = wider["input_ids"].flatten()
    packed = torch.cat([ids, torch.zeros(1, dtype=torch.long)])[plan["places"]]
    assert torch.equal(packed[: sum(lengths)], ids[ids != 0]), "all real tokens, in their order"
    assert not packed[sum(lengths) :].any()
    assert torch.equal(torch.cat([packed, torch.zeros(1, dtype=torch.long)])[plan["back"]], ids)
    sizes = plan["offsets"].diff().tolist()
    assert sizes[: len(lengths)] == lengths
    assert plan["offsets"][-1] == len(plan["places"])
    assert max(sizes) <= plan["length"], "no kernel is told a length that a sequence exceeds"
    assert len(plan["places"]) != plan["length"], "a row of tokens is told from a batch of one sample by its length"


def test_capacities_and_widths_are_few() -> None:
    generator = np.random.default_rng(0)
    shapes, waste = set(), []
    for _ in range(500):
        lengths = generator.integers(16, 257, 32)
        width = few_widths(int(lengths.max()))
        plan = make_plan(np.arange(lengths.max()) < lengths[:, None], width)
        shapes.add((width, len(plan["places"])))
        waste.append(1 - lengths.sum() / len(plan["places"]))
    assert len(shapes) <= 24
    assert np.mean(waste) < 0.05


def test_a_width_that_came_before_serves_batches_that_are_hardly_narrower() -> None:
    plan = PaddingPlanner(widen=True)
    widths = [plan(batch_of([3, longest]))[PLAN]["length"] for longest in (250, 220, 180, 100, 255, 110)]
    assert widths == [256, 256, 192, 112, 256, 112]


def test_batches_are_padded_on_to_few_widths() -> None:
    generator = np.random.default_rng(0)
    widths = FewWidths()
    seen = set()
    for _ in range(100):
        lengths = generator.integers(16, 257, 8).tolist()
        batch = batch_of(lengths)
        wider = widths({**batch, "labels": torch.zeros(8)})
        seen.add(wider["input_ids"].shape[1])
        assert int(wider[MASK].sum()) == sum(lengths)
        assert torch.equal(wider["input_ids"][:, : max(lengths)], batch["input_ids"])
    assert len(seen) <= 5
    assert all(str(width) in widths.note for width in seen)
    full = batch_of([5, 5])
    kept = widths({**full, "labels": full["input_ids"]})
    assert kept["input_ids"].shape == (2, 5), "nothing says what the loss ignores"
    assert widths.note.endswith("1 of 101 could not be")
    with pytest.raises(ConfigError, match=r"data\.pad_to: few needs batches .* attention_mask"):
        FewWidths()((torch.ones(2, 3), torch.ones(2)))


def test_as_many_borders_whatever_the_capacity() -> None:
    plan = PaddingPlanner(widen=True)
    plans = [plan(batch_of([250] * 16 + [shorter] * 16))[PLAN] for shorter in (20, 90, 240)]
    assert len({len(item["places"]) for item in plans}) == 3
    assert len({len(item["offsets"]) for item in plans}) == 1, "the compiler takes it for a constant"


def test_widths_stay_within_what_the_model_has_positions_for() -> None:
    assert [few_widths(longest) for longest in (3, 8, 9, 100, 129, 256, 257)] == [8, 8, 16, 112, 160, 256, 320]
    assert few_widths(290, 300) == 300
    assert few_widths(301, 300) == 301, "too long a text is the model's to refuse"


def test_only_parts_that_may_be_are_widened() -> None:
    batch = batch_of([3, 5], labels=torch.tensor([0, 1]), scores=torch.ones(2, 5, 4))
    wider = widened(batch, 8)
    assert wider is not None
    assert {name: tuple(item.shape) for name, item in wider.items()} == {
        "input_ids": (2, 8),
        MASK: (2, 8),
        "labels": (2,),
        "scores": (2, 8, 4),
    }
    assert not wider[MASK][:, 5:].any()
    restored = cut_back({**wider, PLAN: {}}, 5)
    assert restored.keys() == batch.keys()
    assert all(torch.equal(restored[name], item) for name, item in batch.items())


def test_targets_of_tokens_are_widened_only_where_padding_is_ignored() -> None:
    batch = batch_of([3, 5])
    targets = torch.where(batch[MASK] == 1, batch["input_ids"], -100)
    wider = widened({**batch, "labels": targets}, 8)
    assert wider is not None
    assert (wider["labels"][:, 5:] == -100).all()
    assert widened({**batch, "labels": batch["input_ids"]}, 8) is None, "padding counts in this loss"
    full = batch_of([5, 5])
    assert widened({**full, "labels": full["input_ids"]}, 8) is None, "nothing says what the loss ignores"
    assert widened({**batch, "bias": torch.zeros(2, 4, 5, 5)}, 8) is None


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((torch.zeros(2, 3), torch.zeros(2)), "dicts with a tensor attention_mask"),
        ({"input_ids": torch.zeros(2, 3)}, "dicts with a tensor attention_mask"),
        ({MASK: torch.ones(2, 1, 3, 3, dtype=torch.long)}, r"int64 tensor of shape \(2, 1, 3, 3\)"),
        ({MASK: torch.zeros(2, 3)}, "float32"),
        ({MASK: torch.tensor([[1, 1, 2, 2]])}, "other numbers"),
        ({MASK: torch.tensor([[1, 0, 1, 1]])}, "between the tokens"),
    ],
)
def test_masks_that_do_not_say_what_is_padding_are_refused(batch: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        PaddingPlanner(widen=False)(batch)


def test_a_later_batch_that_does_not_fit_stays_padded() -> None:
    planner = PaddingPlanner(widen=False)
    planner(batch_of([40, 300]))
    odd = {**batch_of([2, 3]), MASK: torch.tensor([[1, 0, 1], [1, 1, 1]])}
    assert planner(odd) is odd
    assert planner.note is not None
    assert planner.note.endswith("1 of 2 batches ran padded")
    assert "36% of the tokens" in planner.note  # 340 of 600 rounded up to 384


def test_bool_masks_are_masks() -> None:
    assert why_unsuitable({MASK: torch.tensor([[True, True, False]])}) is None


def test_the_loader_plans_before_it_copies() -> None:
    batches = [batch_of([3, 5]), batch_of([4, 2])]
    found = list(CudaDataLoader(batches, "cpu", PaddingPlanner(widen=True)))
    assert [item[MASK].shape[1] for item in found] == [8, 8]
    assert all(PLAN in item for item in found)
