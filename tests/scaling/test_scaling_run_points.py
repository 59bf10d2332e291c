"""Folders of runs become curves; what may not be compared is listed with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from stored_runs import store_run

from frameworm.errors import RunFolderError
from frameworm.scaling.analysis import analyse
from frameworm.scaling.run_points import INCOMPLETE, NOT_COMPARABLE, UNREADABLE, collect


def test_warm_up_epochs_are_dropped_and_repeats_averaged(tmp_path: Path) -> None:
    for number, epoch_s in enumerate((100.0, 104.0)):
        store_run(tmp_path / f"one{number}", epoch_s=epoch_s, first_epoch_s=900.0)
    store_run(tmp_path / "deep" / "two", world_size=2, epoch_s=60.0, name="ag_news_ddp_2gpu")
    found = collect(tmp_path)
    assert not found.excluded
    (curve,) = analyse(found.points).curves
    assert [len(row.point.measurements) for row in curve.rows] == [2, 1]
    assert curve.rows[0].point.mean("epoch_s") == pytest.approx(102.0)
    assert curve.rows[1].speedup.value == pytest.approx(1.7)
    assert curve.label == "ag_news"
    kept = collect(tmp_path, warmup=0)
    assert analyse(kept.points).curves[0].rows[0].point.mean("epoch_s") == pytest.approx((1100 + 1108) / 3 / 2)


def test_a_run_with_nothing_but_warm_up_says_so(tmp_path: Path) -> None:
    store_run(tmp_path / "one", epochs=1)
    found = collect(tmp_path)
    assert found.points[0].mean("epoch_s") == 200.0
    assert found.notes
    assert "warm-up" in found.notes[0]


def test_strong_and_weak_curves_share_the_run_on_one_device(tmp_path: Path) -> None:
    store_run(tmp_path / "one")
    store_run(tmp_path / "strong", world_size=2)
    store_run(tmp_path / "weak", world_size=2, global_batch=64)
    curves = analyse(collect(tmp_path).points).curves
    assert [(curve.mode, len(curve.rows), curve.label) for curve in curves] == [
        ("strong", 2, "ag_news strong"),
        ("weak", 2, "ag_news weak"),
    ]


def test_variants_of_a_model_are_curves_of_their_own(tmp_path: Path) -> None:
    larger = {"model": {"d_model": 256}, "global_batch": 128}
    store_run(tmp_path / "a")
    store_run(tmp_path / "b", world_size=4, name="ag_news_ddp_4gpu_20ep")
    store_run(tmp_path / "c", name="ag_news_single_gpu_optimized", **larger)  # type: ignore[arg-type]
    store_run(tmp_path / "d", world_size=4, name="ag_news_ddp_4gpu_20ep_optimized", **larger)  # type: ignore[arg-type]
    curves = analyse(collect(tmp_path).points).curves
    assert [curve.label for curve in curves] == ["ag_news", "ag_news optimized"]


def test_ways_of_communicating_are_not_averaged(tmp_path: Path) -> None:
    store_run(tmp_path / "one")
    store_run(tmp_path / "plain", world_size=2, epoch_s=80.0)
    store_run(tmp_path / "int8", world_size=2, epoch_s=60.0, config={"parallel": {"compression": "int8"}})
    curves = analyse(collect(tmp_path).points).curves
    assert sorted(curve.rows[1].speedup.value for curve in curves) == pytest.approx([100 / 80, 100 / 60])
    assert len({curve.label for curve in curves}) == 2


def test_incomplete_and_broken_runs_are_listed(tmp_path: Path) -> None:
    store_run(tmp_path / "one")
    store_run(tmp_path / "two", world_size=2)
    store_run(tmp_path / "stopped", status="interrupted")
    (tmp_path / "running").mkdir()
    (tmp_path / "running" / "config.yaml").write_text("name: x\n")
    store_run(tmp_path / "broken").summary_json.write_text("{", encoding="utf-8")
    store_run(tmp_path / "odd").epochs_csv.write_text("nothing\n", encoding="utf-8")
    (tmp_path / "not_a_run").mkdir()
    found = collect(tmp_path)
    kinds = {item.run: item.kind for item in found.excluded}
    assert kinds == {"broken": UNREADABLE, "odd": UNREADABLE, "running": INCOMPLETE, "stopped": INCOMPLETE}
    assert "interrupted" in next(item.reason for item in found.excluded if item.run == "stopped")
    assert len(analyse(found.points).curves[0].rows) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config": {"gpu": {"mixed_precision": "fp16"}}}, "gpu.mixed_precision is fp16, where the others have bf16"),
        ({"device": "NVIDIA H200"}, "device is NVIDIA H200, where the others have NVIDIA A100"),
        ({"global_batch": 48}, "global batch 48, where the others have 32"),
    ],
)
def test_what_is_not_comparable_is_not_averaged_in(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    store_run(tmp_path / "one")
    store_run(tmp_path / "two", world_size=2)
    store_run(tmp_path / "other", world_size=2, epoch_s=1.0, **change)  # type: ignore[arg-type]
    found = collect(tmp_path)
    assert [(item.run, item.kind) for item in found.excluded] == [("other", NOT_COMPARABLE)]
    assert reason in found.excluded[0].reason
    (curve,) = analyse(found.points).curves
    assert curve.rows[1].speedup.value == 1.0


def test_runs_of_two_sizes_that_share_nothing_stand_alone_with_a_note(tmp_path: Path) -> None:
    store_run(tmp_path / "one")
    store_run(tmp_path / "two", world_size=2, global_batch=48)
    found = collect(tmp_path)
    assert len(analyse(found.points).curves) == 2
    assert any("cannot be compared" in note and "global batch 48" in note for note in found.notes)


def test_data_sets_are_chosen_in_any_spelling(tmp_path: Path) -> None:
    store_run(tmp_path / "ag")
    store_run(tmp_path / "imdb", dataset="imdb", name="imdb")
    assert [point.dataset for point in collect(tmp_path, datasets=["AGNews"]).points] == ["ag_news"]
    with pytest.raises(RunFolderError, match="no runs of MNIST; it has ag_news, imdb"):
        collect(tmp_path, datasets=["MNIST"])


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no runs"):
        collect(tmp_path)
    with pytest.raises(RunFolderError, match="does not exist"):
        collect(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is not a folder"):
        collect(tmp_path / "file")
