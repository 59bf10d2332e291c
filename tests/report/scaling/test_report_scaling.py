"""The files of a scaling report: what they say equals the records, and what is no evidence stays out."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from scaling_runs import PUBLISHED, SAMPLES, store_published, store_run

from frameworm.errors import MissingPackageError, RunFolderError
from frameworm.report.scaling import plots as scaling_plots
from frameworm.report.scaling.build import file_stems, shown_name
from frameworm.report.scaling.files import CSV_COLUMNS, TEX_COLUMNS, render_csv, render_tex
from frameworm.report.scaling.plot_style import STYLE, WIDTH_IN
from frameworm.report.scaling.report import WrittenReport, read_report, write_report
from frameworm.report.scaling.table import DatasetTable, ScalingReport
from frameworm.report.scaling.text import render_scaling

FIGURES = ("epoch_time_detailed", "speedup_efficiency", "throughput", "accuracy")
TABLES = ("comprehensive_summary.csv", "summary_table.tex", "performance_report.txt", "report.html")


def lines_of(report: ScalingReport) -> dict[tuple[str, int], dict[str, str]]:
    found = csv.DictReader(io.StringIO(render_csv(report)))
    return {(line["dataset"], int(line["world_size"])): line for line in found}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> WrittenReport:
    root = tmp_path_factory.mktemp("experiments")
    store_published(root)
    return write_report(root, tmp_path_factory.mktemp("plots"))


@pytest.mark.slow
def test_all_files_of_the_contract_are_there(published: WrittenReport) -> None:
    names = {path.name for path in published.files}
    assert names == {*TABLES, *(f"{dataset}_{figure}.png" for dataset in PUBLISHED for figure in FIGURES)}
    for path in published.files:
        assert path.stat().st_size > 200
        if path.suffix == ".png":
            width, height = struct.unpack(">II", path.read_bytes()[16:24])
            assert width == round(WIDTH_IN * 300)
            assert 400 < height < 2000


def test_numbers_in_the_csv_equal_the_records(published: WrittenReport) -> None:
    lines = lines_of(published.report)
    assert set(lines) == {(dataset, size) for dataset, times in PUBLISHED.items() for size in times}
    for (dataset, size), line in lines.items():
        base_s, time_s = PUBLISHED[dataset][1], PUBLISHED[dataset][size]
        assert float(line["epoch_time_s"]) == pytest.approx(time_s, rel=1e-9)  # the slow first epoch is left out
        assert float(line["samples_per_s"]) == pytest.approx(SAMPLES / time_s, rel=1e-6)
        assert float(line["speedup"]) == pytest.approx(base_s / time_s, rel=1e-9)
        assert float(line["efficiency"]) == pytest.approx(base_s / time_s / size, rel=1e-9)
        assert float(line["val_accuracy"]) == 0.9
        assert float(line["train_loss"]) == 0.25
        assert (line["runs"], line["measured_epochs"], line["warmup_epochs"]) == ("1", "3", "1")
        assert line["global_batch"] == "32"
        assert line["run_folders"] == f"{dataset}/world{size}-0"


def test_published_cases_are_told_as_what_they_are(published: WrittenReport) -> None:
    lines = lines_of(published.report)
    assert lines["imdb", 4]["status"] == "excellent"
    assert lines["ag_news", 4]["status"] == "negative_scaling"
    assert lines["ag_news", 1]["status"] == "baseline"
    for words in ("model too small", "batch too small", "sequences too short"):
        assert words in lines["ag_news", 4]["cause"]
        assert words in (published.files[2]).read_text().replace("\n            ", " ")
    assert "training.global_batch" in lines["ag_news", 4]["recommendation"]
    lost = [float(value) for name, value in lines["ag_news", 4].items() if name.startswith("lost_to_") and value]
    assert math.fsum(lost) == pytest.approx(1 - float(lines["ag_news", 4]["efficiency"]))


def test_intervals_are_over_runs_or_else_over_epochs(tmp_path: Path, published: WrittenReport) -> None:
    one = lines_of(published.report)["imdb", 4]
    assert one["interval_over"] == "epochs of one run"
    # Student's t with two degrees of freedom over epochs that scatter by a percent.
    relative = 4.303 * 0.01 / math.sqrt(3)
    assert math.log(float(one["epoch_time_s_high"]) / float(one["epoch_time_s"])) == pytest.approx(relative, rel=1e-3)
    assert float(one["speedup_low"]) < float(one["speedup"]) < float(one["speedup_high"])
    store_published(tmp_path, repeats=3)
    several = lines_of(read_report(tmp_path))["imdb", 4]
    assert several["interval_over"] == "runs"
    relative = 4.303 * 0.004 / math.sqrt(3)
    width = math.log(float(several["epoch_time_s_high"]) / float(several["epoch_time_s"]))
    assert width == pytest.approx(relative, rel=1e-3)
    assert several["runs"] == "3"


def test_warm_up_is_what_is_asked_for(tmp_path: Path) -> None:
    store_run(tmp_path / "one", "imdb", 1, [30.0, 20.0, 10.0, 10.0])
    store_run(tmp_path / "two", "imdb", 2, [30.0, 20.0, 5.0, 5.0])
    for warmup, mean_s in ((0, 17.5), (1, 40 / 3), (2, 10.0)):
        assert float(lines_of(read_report(tmp_path, warmup))["imdb", 1]["epoch_time_s"]) == pytest.approx(mean_s)


def test_the_tex_is_a_table_and_equals_the_csv(published: WrittenReport) -> None:
    text = (published.files[1]).read_text()
    body = re.search(r"\\begin\{tabular\}\{@\{\}(\w+)@\{\}\}(.*?)\\end\{tabular\}", text, re.DOTALL)
    assert body is not None
    assert len(body[1]) == len(TEX_COLUMNS)
    rows = [line.strip() for line in body[2].splitlines() if "&" in line]
    assert all(row.endswith(r"\\") for row in rows)
    cells = [[cell.strip() for cell in row.removesuffix(r"\\").split("&")] for row in rows]
    assert tuple(cells[0]) == TEX_COLUMNS
    order = [line.strip() for line in body[2].splitlines() if "rule" in line]
    assert order == [r"\toprule", r"\midrule", r"\midrule", r"\bottomrule"]
    for opened, closed in (("{", "}"), (r"\begin", r"\end")):
        assert text.count(opened) == text.count(closed)
    lines = lines_of(published.report)
    assert len(cells) == 1 + len(lines)
    for cell, ((dataset, size), line) in zip(cells[1:], sorted(lines.items())):
        assert cell[0] == {"imdb": "IMDB", "ag_news": "AGNews"}[dataset]
        assert cell[2] == str(size)
        assert float(cell[3].split()[0]) == pytest.approx(float(line["epoch_time_s"]), rel=1e-3)
        assert float(cell[4].split()[0].replace(",", "")) == pytest.approx(float(line["samples_per_s"]), abs=0.06)
        assert float(cell[5].split()[0]) == pytest.approx(float(line["speedup"]), abs=0.006)
        assert float(cell[6].split()[0]) == pytest.approx(float(line["efficiency"]), abs=0.0006)
        assert cell[8] == line["status"].replace("_", " ")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("packages", ["booktabs", "booktabs,graphicx"])
def test_the_tex_compiles(published: WrittenReport, tmp_path: Path, packages: str) -> None:
    head = rf"\documentclass[twocolumn]{{article}}\usepackage{{{packages}}}"
    (tmp_path / "page.tex").write_text(head + r"\begin{document}\input{table}\end{document}")
    (tmp_path / "table.tex").write_text(published.files[1].read_text())
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1000:]
    assert ("Overfull" in done.stdout) == (packages == "booktabs")


def test_names_cannot_break_the_tex_or_the_csv(tmp_path: Path) -> None:
    name = r'a_b%$#&{}~^\input{x}"é,' + "\n=1"
    store_run(tmp_path / "one", name, 1, [3.0, 1.0])
    store_run(tmp_path / "two", name, 2, [3.0, 1.0])
    report = read_report(tmp_path)
    text = render_tex(report)
    row = next(line for line in text.splitlines() if "baseline" in line)
    assert r"a\_b\%\$\#\&\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}input\{x\}''e" in row
    assert len(re.findall(r"(?<!\\)&", row)) == len(TEX_COLUMNS) - 1
    assert text.isascii()
    assert [line["dataset"] for line in csv.DictReader(io.StringIO(render_csv(report)))] == [name] * 2
    assert re.fullmatch(r"[a-z0-9_-]+", report.datasets[0].stem)


def test_runs_that_are_no_evidence_are_listed_and_change_nothing(tmp_path: Path) -> None:
    store_published(tmp_path)
    before = render_csv(read_report(tmp_path))
    store_run(tmp_path / "odd" / "stopped", "imdb", 4, [9.0, 9.0, 9.0], status="interrupted")
    store_run(tmp_path / "odd" / "short", "imdb", 4, [9.0])
    store_run(tmp_path / "odd" / "precise", "imdb", 4, [9.0, 9.0], settings={"gpu": {"mixed_precision": "off"}})
    store_run(tmp_path / "odd" / "going", "imdb", 4, [9.0, 9.0]).summary_json.unlink()
    store_run(tmp_path / "odd" / "damaged", "imdb", 4, [9.0, 9.0]).summary_json.write_text("{")
    timeless = store_run(tmp_path / "odd" / "timeless", "imdb", 4, [9.0, 9.0])
    timeless.epochs_csv.write_text(timeless.epochs_csv.read_text().replace("9.0", "nan", 1))
    report = read_report(tmp_path)
    assert render_csv(report) == before
    reasons = {item.run.removeprefix("odd/"): (item.kind, item.reason) for item in report.left_out}
    assert {name: kind for name, (kind, _) in reasons.items()} == {
        "stopped": "incomplete",
        "short": "incomplete",
        "going": "incomplete",
        "precise": "not comparable",
        "damaged": "unreadable",
        "timeless": "unreadable",
    }
    assert "interrupted" in reasons["stopped"][1]
    assert "warm-up" in reasons["short"][1]
    assert "summary.json" in reasons["going"][1]
    assert "mixed_precision" in reasons["precise"][1]
    assert "nan" in reasons["timeless"][1]
    text = render_scaling(report)
    for name, (kind, _) in reasons.items():
        assert f"odd/{name} ({kind})" in text


def test_a_summary_with_values_of_the_wrong_kind_is_listed(tmp_path: Path) -> None:
    store_run(tmp_path / "one", "imdb", 1, [3.0, 1.0])
    folder = store_run(tmp_path / "two", "imdb", 2, [3.0, 1.0])
    folder.epochs_csv.unlink()
    good = json.loads(folder.summary_json.read_text())
    places = [("batch", "global"), ("batch", "world_size"), ("environment",), ("epochs", 0, "epoch"), ("phases",)]
    for place, bad in itertools.product(places, ("x", [1], -1)):
        data = json.loads(json.dumps(good))
        holder = data
        for key in place[:-1]:
            holder = holder[key]  # type: ignore[index]
        holder[place[-1]] = bad  # type: ignore[index]
        folder.summary_json.write_text(json.dumps(data))
        report = read_report(tmp_path)
        render_scaling(report)
        assert len(report.datasets[0].rows) + len(report.left_out) == 2, (place, bad)


def test_data_sets_are_chosen_in_any_spelling(tmp_path: Path) -> None:
    store_published(tmp_path)
    for names in (["AGNews"], ["ag_news"], ["AG News"], ["agnews"]):
        assert [table.dataset for table in read_report(tmp_path, datasets=names).datasets] == ["ag_news"]
    assert len(read_report(tmp_path, datasets=["IMDB", "AGNews"]).datasets) == 2
    with pytest.raises(RunFolderError, match=r"no runs of MNIST; it has ag_news, imdb"):
        read_report(tmp_path, datasets=["MNIST"])


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    # A sweep keeps its config above its runs; a link leads to what was seen, or back up.
    store_run(tmp_path / "sweep" / "a" / "one", "imdb", 1, [3.0, 1.0])
    store_run(tmp_path / "sweep" / "b" / "two", "imdb", 2, [3.0, 0.6])
    (tmp_path / "sweep" / "config.yaml").write_text("name: imdb\n")
    (tmp_path / "again").symlink_to(tmp_path / "sweep" / "a")
    (tmp_path / "sweep" / "up").symlink_to(tmp_path)
    report = read_report(tmp_path)
    assert [len(row.runs) for row in report.datasets[0].rows] == [1, 1]
    assert report.left_out == ()


def test_empty_and_missing_folders_say_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no runs"):
        write_report(tmp_path, tmp_path / "plots")
    with pytest.raises(RunFolderError, match="does not exist"):
        write_report(tmp_path / "nowhere", tmp_path / "plots")
    assert not (tmp_path / "plots").exists()
    store_run(tmp_path / "runs" / "one", "imdb", 1, [3.0, 1.0])
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="--out"):
        write_report(tmp_path / "runs", tmp_path / "file")


def test_one_run_and_none_that_is_whole(tmp_path: Path) -> None:
    store_run(tmp_path / "runs" / "one", "imdb", 1, [3.0, 1.0])
    written = write_report(tmp_path / "runs", tmp_path / "plots")
    assert len(written.files) == 8
    line = lines_of(written.report)["imdb", 1]
    assert (line["status"], line["speedup"], line["epoch_time_s"]) == ("baseline", "", "1.0")
    assert "only world size 1" in render_scaling(written.report)
    shutil.rmtree(tmp_path / "runs")
    store_run(tmp_path / "runs" / "one", "imdb", 1, [3.0, 1.0], status="failed")
    written = write_report(tmp_path / "runs", tmp_path / "empty")
    assert {path.name for path in written.files} == set(TABLES)
    assert "one (incomplete)" in render_scaling(written.report)
    assert lines_of(written.report) == {}


def test_without_matplotlib_only_the_pictures_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_run(tmp_path / "runs" / "one", "imdb", 1, [3.0, 1.0])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'frameworm\[plots\]'"):
        write_report(tmp_path / "runs", tmp_path / "plots")
    assert {path.name for path in (tmp_path / "plots").iterdir()} == set(TABLES)


def busy(root: Path) -> DatasetTable:
    """Three configurations with long names on up to ten world sizes, and no accuracy."""
    sizes = (1, 2, 3, 4, 6, 8, 16, 32, 64, 512)
    for index, (width, size) in enumerate(itertools.product((64, 128, 256), sizes)):
        time_s = 700 / size**0.9
        path, name = root / f"{width}-{size}", f"imdb_with_a_long_name_of_its_own_{'x' * (width // 16)}"
        settings = {"model": {"d_model": width}}
        times = [2 * time_s, time_s, time_s * (1 + 0.002 * index)]
        store_run(path, "imdb", size, times, name=name, global_batch=4096, accuracy=None, settings=settings)
    return read_report(root).datasets[0]


def drawn_texts(figure: Figure) -> list[Text]:
    """Every text that is drawn; axes also hold ticks beyond their ends, which are not."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *tick_labels(axes.xaxis)]
        found += tick_labels(axes.yaxis)
    return [text for text in found if text.get_text()]


def tick_labels(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_text()]


@pytest.mark.slow
def test_nothing_in_a_figure_is_cut_off_or_too_small_to_read(tmp_path: Path, published: WrittenReport) -> None:
    for table in (*published.report.datasets, busy(tmp_path)):
        for name, draw in scaling_plots.FIGURES.items():
            with matplotlib.rc_context(STYLE):
                figure = draw(table)
                canvas = FigureCanvasAgg(figure)
                canvas.draw()
                renderer = canvas.get_renderer()
                assert figure.get_figwidth() == WIDTH_IN
                for text in drawn_texts(figure):
                    assert text.get_fontsize() >= 6
                    box = text.get_window_extent(renderer)
                    low, high = min(box.x0, box.y0), max(box.x1 - figure.bbox.width, box.y1 - figure.bbox.height)
                    assert low >= -1 and high <= 1, (name, text.get_text())  # noqa: PT018
                for axes in figure.axes:
                    boxes = [label.get_window_extent(renderer) for label in tick_labels(axes.xaxis)]
                    for left, right in itertools.pairwise(sorted(boxes, key=lambda box: box.x0)):
                        assert left.x1 < right.x0, f"{name} of {table.name}"


def test_without_an_accuracy_the_loss_is_drawn(tmp_path: Path) -> None:
    table = busy(tmp_path)
    with matplotlib.rc_context(STYLE):
        axes = scaling_plots.FIGURES["accuracy"](table).axes[0]
    assert axes.get_ylabel() == "validation loss"
    assert sum(list(line.get_xdata()) == [1, 2, 3] for line in axes.lines) == 30
    assert axes.get_xlim()[0] < 1
    assert axes.get_xlim()[1] > 3


def test_drawing_leaves_the_settings_of_the_process_alone(published: WrittenReport, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    scaling_plots.draw_figures(published.report.datasets[0], tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_names_of_data_sets() -> None:
    assert (shown_name("ag_news"), shown_name("IMDB"), shown_name("my set")) == ("AGNews", "IMDB", "my set")
    assert file_stems(["ag_news", "imdb"]) == {"ag_news": "ag_news", "imdb": "imdb"}
    odd = file_stems(["a/b", "a b", "A.B", "../..", "é", "x" * 300])
    assert len(set(odd.values())) == 6
    assert all(re.fullmatch(r"[a-z0-9_-]{1,90}", stem) for stem in odd.values())


def test_csv_has_the_columns_it_promises(published: WrittenReport) -> None:
    assert tuple(csv.reader(io.StringIO(render_csv(published.report))).__next__()) == CSV_COLUMNS
