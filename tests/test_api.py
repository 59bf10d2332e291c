"""The verbs from Python: what they show, that they hold what `--json` prints, and how they refuse."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from frameworm import FramewormError, RunRecord, api
from frameworm.cli.main import app
from frameworm.config.load import load_config
from frameworm.errors import ConfigError, EnvironmentSetupError, StateError, TrainingFailedError
from frameworm.records.schema import Batch, ExpectedSpeedup, Finding, Quality, Remedy, Throughput

RUNS = Path(__file__).parent / "golden" / "stored" / "runs"
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
LINK = {"bandwidth_gbps": 10.0, "latency_us": 50.0}
SCRIPT = """
import sys
import torch

print("begun")
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randint(2, (160,)))
for inputs, targets in torch.utils.data.DataLoader(data, int(sys.argv[1])):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
"""


def _printed(*arguments: str) -> Any:
    return json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)


def test_diagnose_holds_what_the_command_prints() -> None:
    found = api.diagnose(RUNS / "single")
    assert found.to_dict() == _printed("diagnose", str(RUNS / "single"))
    assert isinstance(found, RunRecord)
    assert found.throughput.samples_per_s
    first = repr(found).splitlines()[0]
    assert first.startswith("Diagnosis: golden (preempted, 3 steps) is inconclusive: ")


def test_compare_holds_what_the_command_prints() -> None:
    found = api.compare(RUNS / "ddp", RUNS / "zero1")
    assert found.to_dict() == _printed("compare", str(RUNS / "ddp"), str(RUNS / "zero1"))
    assert found.sentences
    assert found.sentences[0] in repr(found)
    assert "parallel.strategy ddp -> zero1" in repr(found)


def test_predict_holds_what_the_command_prints() -> None:
    found = api.predict(RUNS / "single", [1, 8], measure_codecs=False, **LINK)
    link = ["--bandwidth-gbps", "10", "--latency-us", "50", "--no-measure-codecs"]
    printed = _printed("predict", str(RUNS / "single"), "--world-sizes", "1,8", *link)
    assert json.loads(json.dumps(found.to_dict())) == printed
    speedup = found.rows[1].speedup
    assert f"8 ranks: {speedup.value:.2f}x as fast ({speedup.low:.2f} to {speedup.high:.2f})" in repr(found)


def test_predict_has_the_options_of_the_command() -> None:
    from frameworm.cli.predict import predict

    of_command = set(inspect.signature(predict).parameters) - {"weak", "out", "as_json"}
    assert set(inspect.signature(api.predict).parameters) == of_command


def test_a_record_shows_verdict_gain_quality_and_report(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    remedy = Remedy("data.num_workers", 4, "load with <4> workers")
    finding = Finding("input_bound", "warning", 0.5, {}, [remedy], ExpectedSpeedup(1.6, 1.4, 1.9, "measured"))
    record = RunRecord(
        "mine",
        "completed",
        {},
        Batch(8, 1, 1, 8),
        steps=1200,
        throughput=Throughput(samples_per_s=15294.3),
        quality=Quality(train_loss=0.25, metrics={"val_f1": 0.5}),
        verdict="input_bound",
        findings=[finding],
        run_dir=str(tmp_path),
    )
    assert repr(record).splitlines() == [
        "RunRecord: mine completed, 1,200 steps, 15,294 samples/s",
        "verdict: input_bound; load with <4> workers: 1.60x as fast (1.40 to 1.90), measured",
        "train_loss 0.25, val_f1 0.5",
        f"report: {tmp_path / 'report.html'}",
    ]
    page = record._repr_html_()
    assert page.startswith("<b>RunRecord: mine")
    assert "&lt;4&gt;" in page
    record.name = "\x1b[2J"
    assert "\x1b" not in repr(record)
    assert "\x1b" not in record._repr_html_()


def test_a_record_without_a_folder_has_no_report(tmp_path: Path) -> None:
    record = RunRecord("mine", "failed", {}, Batch(None, 1, 1, None))
    assert record.report is None
    assert repr(record).splitlines() == ["RunRecord: mine failed, 0 steps", "verdict: inconclusive"]
    record.run_dir = str(tmp_path)
    assert record.report is None


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: api.tune(), ConfigError, "give a config or a script"),  # type: ignore[call-overload]
        (lambda: api.tune("a.yaml", script="b.py"), ConfigError, "only one of them"),  # type: ignore[call-overload]
        (lambda: api.tune("train.py"), ConfigError, "give it as script='train.py'"),
        (lambda: api.tune("gtp"), ConfigError, "neither a config file nor a workload: text_classifier, gpt"),
        (lambda: api.tune(script="b.py", trials=2), ConfigError, "trials means nothing for a script"),  # type: ignore[call-overload]
        (lambda: api.tune("gpt", allow=["graphs"]), ConfigError, "allow means nothing for a config"),  # type: ignore[call-overload]
        (lambda: api.tune(script=__file__, allow=["graph"]), ConfigError, "there is no 'graph'; there are .*graphs"),
        (lambda: api.tune("gpt", budget="soon"), ConfigError, "soon"),
        (lambda: api.profile("a.yaml"), ConfigError, "give it as config='a.yaml'"),
        (lambda: api.profile("b.py", settings=["a=1"]), ConfigError, "settings means nothing for a script"),
        (lambda: api.profile("missing.py"), EnvironmentSetupError, "missing.py does not exist"),
        (lambda: api.diagnose("missing"), FramewormError, "missing does not exist"),
        (lambda: api.diagnose(__file__), FramewormError, "is a file"),
        (lambda: api.compare(RUNS, RUNS), FramewormError, "is a folder of runs"),
        (lambda: api.predict(world_sizes=[2], fabric="10gbe"), ConfigError, "give one of"),
        (lambda: api.plan_memory("missing.yaml"), ConfigError, "missing.yaml"),
    ],
)
def test_wrong_calls_are_errors_of_frameworm(
    call: Callable[[], object],
    kind: type[Exception],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=says) as caught:
        call()
    assert isinstance(caught.value, FramewormError)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr().out == ""


VERBS: list[Callable[[], object]] = [
    lambda: api.tune("gpt"),
    lambda: api.tune(script=__file__),
    lambda: api.profile(__file__),
]


@pytest.mark.parametrize("call", VERBS, ids=["tune a config", "tune a script", "profile"])
def test_no_process_is_started_where_it_would_start_others_without_end(
    call: Callable[[], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
        with pytest.raises(StateError, match="__main__"):
            call()
    with monkeypatch.context() as patch:
        patch.setenv("FRAMEWORM_INTERNAL_VERB", "profile")
        with pytest.raises(StateError, match=r"a process that profile\(\) has started"):
            call()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "")
        with pytest.raises(EnvironmentSetupError, match=r"sys\.executable"):
            call()
    with monkeypatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
            patch.setenv(name, value)
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "29500")
        with pytest.raises(EnvironmentSetupError, match="without torchrun or srun"):
            call()


def test_an_interpreter_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EnvironmentSetupError, match=r"cannot start .*python: No such file"):
        api.profile("train.py")


@pytest.mark.slow
def test_a_profiled_script_says_why_it_failed_and_leaves_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    with pytest.raises(TrainingFailedError, match=r"exit code 1(.|\n)*begun(.|\n)*ValueError: .*'none'$"):
        api.profile("train.py", ["none"], out="failed")
    found = api.profile("train.py", ["4"])
    assert found.steps == 40
    assert found.report is not None
    assert found.report.parent.parent == tmp_path / "runs"
    assert found.report.parent.with_name(found.report.parent.name + ".log").read_text() == "begun\n"
    assert found.to_dict() == json.loads((found.report.parent / "summary.json").read_text())
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_a_config_is_profiled(tmp_path: Path, data_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMEWORM_DATA_CACHE_DIR", str(data_cache_dir))
    monkeypatch.chdir(tmp_path)
    settings = ["data.limit=256", "data.num_workers=0", "training.cpu_threads=1"]
    found = api.profile(config=load_config(QUICKSTART), settings=settings, steps=12, budget="1s")
    assert found.steps == 12
    assert found.report is not None


@pytest.mark.slow
def test_a_script_is_tuned_and_cannot_tune_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "itself.py").write_text(
        "from frameworm import api\n"
        "if __name__ == '__main__':\n"
        "    print(api.tune(script=__file__, budget='200s', accept_side_effects=True).problem)\n",
        encoding="utf-8",
    )
    said: list[str] = []
    few = api.tune(
        script=tmp_path / "train.py",
        arguments=["80"],  # two steps: too few, which the first trial finds out
        budget="60s",
        out=tmp_path / "found",
        accept_side_effects=True,
        tell=said.append,
    )
    assert few.problem is not None
    assert repr(few).splitlines()[0] == f"ScriptResult: it cannot be tuned: {few.problem}"
    assert few.report == tmp_path / "found" / "report.html"
    assert few.report.exists()
    assert few.to_dict() == json.loads((tmp_path / "found" / "tune.json").read_text())
    assert said
    ended = subprocess.run(
        [sys.executable, "itself.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True
    )
    assert "StateError" in ended.stdout, ended.stdout + ended.stderr
