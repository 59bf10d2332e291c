"""Two sweeps side by side: which curves belong together, and what changed."""

from __future__ import annotations

import pytest

from frameworm.report.scaling.before_after import render_sweeps, sentence
from frameworm.scaling.analysis import Analysis, analyse
from frameworm.scaling.before_after import compare_sweeps
from frameworm.scaling.points import Measurement, Point


def _sweep(*times_s: tuple[int, float], dataset: str = "ag_news", name: str = "", mode: str = "strong") -> list[Point]:
    return [
        Point(dataset, size, (Measurement(epoch_s=time_s, samples_per_s=1000 / time_s),), name=name, mode=mode)  # type: ignore[arg-type]
        for size, time_s in times_s
    ]


def _published() -> tuple[Analysis, Analysis]:
    return analyse(_sweep((1, 10.0), (4, 21.7), name="small")), analyse(_sweep((1, 40.0), (4, 13.0), name="large"))


def test_the_table_of_the_published_cure() -> None:
    changes, alone = compare_sweeps(*_published())
    assert alone == []
    (change,) = changes
    pair = change.pairs[1]
    assert pair.world_size == 4
    assert pair.before is not None
    assert pair.after is not None
    assert pair.before.speedup.value == pytest.approx(0.46, abs=0.005)
    assert pair.after.speedup.value == pytest.approx(3.08, abs=0.005)
    assert (pair.before.status, pair.after.status) == ("negative_scaling", "good")
    assert pair.epoch_gain == pytest.approx(21.7 / 13)
    assert pair.speedup_gain == pytest.approx(6.68, abs=0.01)
    text = render_sweeps("before", "after", changes)
    for words in ("epoch time 21.7 s 13.0 s 1.67x", "efficiency 11.5% 76.9% +65.4 pp", "status negative_scaling good"):
        assert words in " ".join(text.split())
    assert "from 0.46 to 3.08" in str(sentence(change))
    assert change.to_dict()["pairs"][1]["epoch_gain"] == pytest.approx(pair.epoch_gain)


def test_curves_of_one_name_belong_together() -> None:
    before = analyse([*_sweep((1, 8.0), (2, 5.0), name="wide"), *_sweep((1, 9.0), (2, 9.0), name="deep")])
    after = analyse([*_sweep((1, 8.0), (2, 4.0), name="wide"), *_sweep((1, 4.0), (2, 3.0), dataset="imdb")])
    changes, alone = compare_sweeps(before, after)
    assert [change.pairs[1].speedup_gain for change in changes] == [pytest.approx(1.25)]
    assert len(alone) == 2
    assert any("only A has" in text and "deep" in text for text in alone)
    assert any("only B has imdb" in text for text in alone)


def test_world_sizes_that_one_sweep_lacks_stay_empty() -> None:
    changes, _ = compare_sweeps(analyse(_sweep((1, 8.0), (2, 5.0))), analyse(_sweep((1, 8.0), (4, 3.0))))
    (change,) = changes
    assert [(pair.world_size, pair.before is None, pair.after is None) for pair in change.pairs] == [
        (1, False, False),
        (2, False, True),
        (4, True, False),
    ]
    assert change.pairs[1].epoch_gain is None
    assert sentence(change) is None
    assert "4" in render_sweeps("a", "b", changes)


def test_strong_and_weak_sweeps_say_so() -> None:
    changes, _ = compare_sweeps(analyse(_sweep((1, 8.0), (2, 5.0))), analyse(_sweep((1, 8.0), (2, 9.0), mode="weak")))
    assert "A strong scaling: the global batch stays, B weak scaling" in render_sweeps("a", "b", changes)
