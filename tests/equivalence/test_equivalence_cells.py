"""Every pair of habits, trained by frameworm and by a plain loop: equal, or refused where that is right."""

from __future__ import annotations

import pytest
from cells import AXES, REFUSALS, Cell, combinations, cover, excluded, refusal_of
from rank_pair import RankPair
from verdicts import WRONG, judge

PAIRS = cover(2)[0]
LEAST_EQUAL = 0.9


@pytest.mark.parametrize("cell", [cell for cell in PAIRS if cell.ranks == 1], ids=str)
def test_one_process_trains_as_a_plain_loop(cell: Cell, pair: RankPair) -> None:
    verdict = judge(cell, pair)
    assert verdict.kind != WRONG, verdict.detail


@pytest.mark.parametrize("cell", [cell for cell in PAIRS if cell.ranks > 1], ids=str)
def test_two_ranks_train_as_a_plain_loop(cell: Cell, pair: RankPair) -> None:
    verdict = judge(cell, pair)
    assert verdict.kind != WRONG, verdict.detail


def test_the_cells_hold_every_pair_of_options() -> None:
    held = {
        ((one, getattr(cell, one)), (other, getattr(cell, other))) for cell in PAIRS for one in AXES for other in AXES
    }
    assert combinations(2) <= held
    assert all(excluded(vars(cell)) is None for cell in PAIRS)
    assert cover(2)[0] == PAIRS, "the same cells every time"


@pytest.mark.slow
def test_few_cells_may_be_refused() -> None:
    refusable = sum(refusal_of(cell) is not None for cell in PAIRS)
    assert refusable <= (1 - LEAST_EQUAL) * len(PAIRS)
    # Of all cells that exist, drawn evenly.
    drawn = cover(3, most=300)[0]
    assert sum(refusal_of(cell) is not None for cell in drawn) <= (1 - LEAST_EQUAL) * len(drawn)


def test_every_refusal_has_a_cell() -> None:
    for refusal in REFUSALS:
        assert any(refusal.rule.applies(vars(cell)) for cell in PAIRS), refusal.rule.reason
