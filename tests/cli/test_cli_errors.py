"""What `frameworm train` refuses: one line with where and what to do, exit code 2, nothing written over or left."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml
from command_line import CommandLine, command_line
from safetensors.torch import save_file

from frameworm.config.load import load_config
from frameworm.models.workloads import build_workload
from frameworm.records.store import RunFolder

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
GOOD_ROWS = [f'{label},"Title {row}","Some words about item {row}"' for row in range(4) for label in (1, 2, 3, 4)]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def _files(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder by its path; None for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def _make_run(folder: Path) -> Path:
    """A folder that holds a run, as another training has left it."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "summary.json", "epochs.csv", "steps-rank0.jsonl", "checkpoints/latest"):
        (folder / name).write_text(f"{name} of a run that took three weeks\n")
    return folder


class Refusal:
    """Runs `frameworm train` in a folder of its own."""

    def __init__(self, here: CommandLine) -> None:
        self.folder = here.folder
        self._here = here

    def of(self, *args: str | Path, lines: int = 1) -> str:
        """The message; checks that it is one line, that the exit code is 2 and that no file has changed."""
        before = _files(self.folder)
        ended = self._here("train", *args)
        assert "Traceback" not in ended.stdout + ended.stderr
        assert (ended.code, ended.stdout) == (2, ""), ended.stderr
        # That a data set is read for the first time may be said before.
        said = [line for line in ended.stderr.splitlines() if not line.startswith("tokenising: ")]
        assert len(said) == lines, ended.stderr
        assert said[0].startswith("frameworm: ")
        assert _files(self.folder) == before
        return "\n".join(said).removeprefix("frameworm: ")

    def everywhere(self, *args: str | Path) -> str:
        """The message where a new run folder would be made, which is the same where one is in the way."""
        message = self.of(*args)
        run = _make_run(self.folder / "taken")
        assert self.of(*args, "--out", run) == message
        return message


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data_cache_dir: Path
) -> Iterator[CommandLine]:
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capfd) as run:
        yield run


@pytest.fixture
def refusal(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    def start(*args: Any, **settings: Any) -> NoReturn:
        raise AssertionError("a worker would have been started")

    monkeypatch.setattr("frameworm.launch.torchrun.launch_workers", start)
    return Refusal(here)


SETTINGS = [
    pytest.param(["training.bogus=1"], ["training.bogus", "unknown key", "nearest is training.betas"], id="unknown"),
    pytest.param(["trainning.lr=1"], ["trainning.lr", "did you mean training.lr"], id="unknown-section"),
    pytest.param(["training.epochs=many"], ["training.epochs", "a whole number", "'many'"], id="wrong-type"),
    pytest.param(["training.epochs=0"], ["training.epochs", "1 or more", "got 0"], id="out-of-range"),
    pytest.param(["training.lr=nan"], ["training.lr", "a number"], id="not-a-number"),
    pytest.param(["training.schedule=onecyle"], ["training.schedule", "did you mean onecycle"], id="bad-literal"),
    pytest.param(["observe.sinks=[jsonl,wandb]"], ["observe.sinks", "wandb"], id="bad-list-item"),
    pytest.param(["training.lr"], ["--set training.lr", "expected key=value"], id="no-value"),
    pytest.param(
        ["model.d_model=64", "model.n_heads=3"], ["model.n_heads", "does not divide d_model 64", "2 or 4"], id="heads"
    ),
    pytest.param(
        ["training.micro_batch=24"], ["training.global_batch", "micro_batch 24", "48 or 72"], id="micro-batch"
    ),
    pytest.param(
        ["training.batch_size=8", "training.micro_batch=4"],
        ["batch_size 8 contradicts micro_batch 4"],
        id="two-batches",
    ),
    pytest.param(
        ["parallel.strategy=zero3", "gpu.compile_model=true"], ["gpu.compile_model", "zero3", "use zero1"], id="zero3"
    ),
    pytest.param(
        ["parallel.compression=int8", "parallel.strategy=single"],
        ["parallel.compression", "cannot be combined with strategy single"],
        id="compression",
    ),
    pytest.param(["parallel.backend=nccl"], ["parallel.backend", "gloo or auto"], id="nccl-on-cpu"),
    pytest.param(["gpu.device=cuda"], ["gpu.device", "cuda", "cpu or auto"], id="no-gpu", marks=NO_GPU),
    pytest.param(["data.dataset=ag_nws"], ["data.dataset", "did you mean ag_news"], id="unknown-data-set"),
    pytest.param(["data.dataset=imdb"], ["data.root", "imdb needs the folder"], id="no-root"),
    pytest.param(["model.vocab_size=100"], ["model.vocab_size", "at least"], id="vocabulary-too-small"),
    pytest.param(["model.init_from=none.safetensors"], ["model.init_from", "does not exist"], id="init-from-missing"),
    pytest.param(["data.tokenizer=vocab.txt"], ["data.tokenizer", "vocab.txt does not exist"], id="vocab-missing"),
    pytest.param(["workload=my.module:build"], ["workload", "no module my ", "looked for in"], id="no-module"),
    pytest.param(["workload=json:dmps"], ["workload", "no function dmps", "did you mean dump"], id="no-function"),
    pytest.param(["workload=json:__all__"], ["workload", "json:__all__ is a list, not a function"], id="no-callable"),
]


@pytest.mark.slow(cases="all")
@pytest.mark.parametrize(("settings", "words"), SETTINGS)
def test_impossible_settings(refusal: Refusal, settings: list[str], words: list[str]) -> None:
    assert_says(refusal.everywhere("--config", QUICKSTART, *_set(*settings)), words)


def test_every_problem_has_a_line_of_its_own(refusal: Refusal) -> None:
    settings = _set("training.epochs=0", "parallel.strategy=zero3", "parallel.compression=fp16")
    message = refusal.of("--config", QUICKSTART, *settings[:2], *_set("training.bogus=1"), lines=2)
    assert_says(message, ["training.epochs", "training.bogus"])
    message = refusal.of("--config", QUICKSTART, *settings[2:], *_set("parallel.check_replicas=4"), lines=2)
    assert_says(message, ["compression fp16 cannot be combined with strategy zero3", "under strategy zero3 no two"])


def _set(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def assert_says(message: str, words: list[str]) -> None:
    for word in words:
        assert word in message


CONFIG_FILES = [
    pytest.param("seed: 0\ntraining:\n  epochz: 3\n", ["bad.yaml:3", "training.epochz", "training.epochs"], id="key"),
    pytest.param("training:\n  lr: fast\n", ["bad.yaml:2", "training.lr", "'fast'"], id="type"),
    pytest.param("training: [1, 2\nseed: 0\n", ["bad.yaml:2", "not valid YAML"], id="syntax"),
    pytest.param("training:\n\tepochs: 3\n", ["bad.yaml:2", "indent with spaces"], id="tab"),
    pytest.param("seed: 0\nname: a\nseed: 1\n", ["bad.yaml:3", "seed", "given twice, first on line 1"], id="duplicate"),
    pytest.param("", ["bad.yaml", "empty"], id="empty"),
    pytest.param("- a\n- b\n", ["bad.yaml:1", "expected a mapping"], id="list"),
    pytest.param("training: fast\n", ["bad.yaml:1", "training", "expected a section"], id="no-section"),
    pytest.param("name: ../../etc\n", ["bad.yaml:1", "name", "letters, digits"], id="name"),
    pytest.param(b"name: caf\xe9\n", ["bad.yaml", "not UTF-8"], id="not-utf-8"),
]


@pytest.mark.parametrize(("content", "words"), CONFIG_FILES)
def test_bad_config_files(refusal: Refusal, content: str | bytes, words: list[str]) -> None:
    (refusal.folder / "bad.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_says(refusal.everywhere("--config", "bad.yaml"), words)


def test_config_file_that_is_not_there(refusal: Refusal) -> None:
    assert_says(refusal.everywhere("--config", "none.yaml"), ["none.yaml", "no such file"])
    (refusal.folder / "quickstart.yaml").write_text("seed: 0\n")
    assert "did you mean quickstart.yaml?" in refusal.of("--config", "quikstart.yaml")
    assert_says(refusal.of("--config", refusal.folder), ["this is a folder"])


def test_bad_variable(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMEWORM_TRAINING_EPOCHZ", "3")
    message = refusal.everywhere("--config", QUICKSTART)
    assert_says(message, ["FRAMEWORM_TRAINING_EPOCHZ", "FRAMEWORM_TRAINING_EPOCHS"])


LAUNCHES = [
    pytest.param(
        ["--distributed", "--nproc-per-node", "3", "--set", "training.global_batch=64"],
        ["global_batch 64", "world size 3", "63 or 66"],
        id="batch",
    ),
    pytest.param(["--distributed", "--nproc-per-node", "x"], ["--nproc-per-node", "a number or auto", "x"], id="word"),
    pytest.param(["--distributed", "--nproc-per-node", "0"], ["--nproc-per-node", "1 or more"], id="none"),
    pytest.param(["--nproc-per-node", "2"], ["--nproc-per-node", "need --distributed"], id="without-distributed"),
    pytest.param(["--master-port", "29500"], ["need --distributed"], id="port-without-distributed"),
    pytest.param(["--distributed", "--nnodes", "2"], ["--nnodes 2", "--rdzv-endpoint"], id="nowhere-to-meet"),
    pytest.param(["--distributed", "--nnodes", "2:1"], ["--nnodes", "MIN:MAX"], id="nodes"),
    pytest.param(
        ["--distributed", "--nproc-per-node", "2", "--set", "parallel.strategy=single"],
        ["parallel.strategy", "there are 2", "use ddp or auto"],
        id="single-on-two",
    ),
]


@pytest.mark.parametrize(("flags", "words"), LAUNCHES)
def test_launches_that_fail_before_any_process_starts(refusal: Refusal, flags: list[str], words: list[str]) -> None:
    assert_says(refusal.everywhere("--config", QUICKSTART, *flags), words)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ["rank 0 of 2", "--distributed"]),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2", "MASTER_ADDR": "h"},
            ["rank 1 of 2", "--distributed"],
        ),
        ({"RANK": "two", "WORLD_SIZE": "2"}, ["RANK=two", "whole number"]),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, ["RANK is not set"]),
    ],
    ids=["first-of-two", "second-task", "no-number", "half-a-worker"],
)
def test_variables_that_speak_of_other_processes(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: list[str]
) -> None:
    """Training alone would do the work of all, waiting for the others would never end."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_says(refusal.everywhere("--config", QUICKSTART), words)


def _lines(*lines: str) -> bytes:
    return ("\n".join(lines) + "\n").encode()


GOOD = _lines(*GOOD_ROWS)
AG_NEWS_FOLDERS = [
    pytest.param({}, ["no train.csv", "get the AG News CSV files"], id="no-files"),
    pytest.param({"train.csv": GOOD}, ["no test.csv"], id="no-test"),
    pytest.param({"train.csv": b"", "test.csv": GOOD}, ["train.csv", "is empty"], id="empty"),
    pytest.param({"train.csv": GOOD, "test.csv": b"\n\n"}, ["test.csv", "is empty"], id="empty-test"),
    pytest.param(
        {"train.csv": _lines(GOOD_ROWS[0], '2,"no description"'), "test.csv": GOOD},
        ["train.csv:2", "expected 3 columns (class,title,description), found 2"],
        id="columns",
    ),
    pytest.param(
        {"train.csv": GOOD, "test.csv": _lines(*GOOD_ROWS[:2], '5,"title","description"')},
        ["test.csv:3", "class '5' is not 1, 2, 3 or 4"],
        id="label",
    ),
    pytest.param(
        {"train.csv.gz": gzip.compress(GOOD)[:-20], "test.csv": GOOD},
        ["train.csv.gz", "truncated or not a gzip file", "download it again"],
        id="truncated-gz",
    ),
    pytest.param({"train.csv.gz": GOOD, "test.csv": GOOD}, ["train.csv.gz", "not a gzip file"], id="not-gz"),
    pytest.param(
        {"train.csv": GOOD + b'1,"caf\xe9","description"\n', "test.csv": GOOD},
        ["train.csv:17", "not UTF-8", "0xe9"],
        id="not-utf-8",
    ),
    pytest.param(
        {"train.csv": _lines(GOOD_ROWS[0], '1,"title,"description"'), "test.csv": GOOD},
        ["train.csv:2", "not valid CSV"],
        id="quotes",
    ),
]


@pytest.mark.parametrize(("files", "words"), AG_NEWS_FOLDERS)
def test_bad_ag_news_folders(
    refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], words: list[str]
) -> None:
    assert_says(_refuse_data(refusal, tmp_path, monkeypatch, "ag_news", files), words)


IMDB_FOLDERS = [
    pytest.param({"train.csv": _lines("text,label", "a,1")}, ["no test.csv"], id="no-test"),
    pytest.param(
        {"train.csv": _lines("text,label", "a,1"), "test.csv": _lines("review,sentiment", "a,pos")},
        ["train.csv:1", "columns review and sentiment", "found text,label"],
        id="header",
    ),
    pytest.param(
        {
            "train.csv": _lines("review,sentiment", "fine,positive", "hm,mixed"),
            "test.csv": _lines("review,sentiment", "a,pos"),
        },
        ["train.csv:3", "sentiment 'mixed'"],
        id="label",
    ),
    pytest.param({"aclImdb/train/pos/0_9.txt": b"good"}, ["no .txt files in", "train/neg"], id="one-class"),
]


@pytest.mark.parametrize(("files", "words"), IMDB_FOLDERS)
def test_bad_imdb_folders(
    refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], words: list[str]
) -> None:
    assert_says(_refuse_data(refusal, tmp_path, monkeypatch, "imdb", files), words)


TEXT_FOLDERS = [
    pytest.param({"notes.md": b"words"}, ["no .txt files in"], id="no-text"),
    pytest.param({"a.txt": b"too short"}, ["tokens", "smaller max_seq_len"], id="short"),
    pytest.param({"a.txt": b""}, ["a.txt", "is empty"], id="empty"),
    pytest.param({"a.txt": b"\xff\xfe words" * 100}, ["a.txt:1", "not UTF-8"], id="not-utf-8"),
]


@pytest.mark.parametrize(("files", "words"), TEXT_FOLDERS)
def test_bad_text_folders(
    refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], words: list[str]
) -> None:
    config = {"workload": "gpt", "model": {"d_model": 16, "n_heads": 2, "num_layers": 1, "max_seq_len": 64}}
    (refusal.folder / "gpt.yaml").write_text(yaml.safe_dump({**config, "gpu": {"device": "cpu"}}))
    message = _refuse_data(refusal, tmp_path, monkeypatch, "text", files, refusal.folder / "gpt.yaml")
    assert_says(message, words)


def _refuse_data(
    refusal: Refusal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: str,
    files: dict[str, bytes],
    config: Path = QUICKSTART,
) -> str:
    """What is said of a data folder; its path is in the message, and the cache keeps no half-written part of it."""
    root = refusal.folder / "data"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    root.mkdir(exist_ok=True)
    cache = tmp_path / "cache"
    monkeypatch.setenv("FRAMEWORM_DATA_CACHE_DIR", str(cache))
    message = refusal.everywhere("--config", config, *_set(f"data.dataset={dataset}", f"data.root={root}"))
    assert str(root) in message or dataset in message
    assert not list(cache.rglob("tmp-*"))
    return message


@pytest.mark.parametrize("dataset", ["ag_news", "imdb"])
def test_data_root_that_is_no_folder(refusal: Refusal, dataset: str) -> None:
    arguments = ["--config", str(QUICKSTART), *_set(f"data.dataset={dataset}", "data.root=data")]
    assert_says(refusal.everywhere(*arguments), [dataset, "the folder data does not exist", "get the"])
    (refusal.folder / "data").write_text("a file\n")
    assert_says(refusal.of(*arguments), [dataset, "data is a file", "must be a folder"])


def test_hub_data_without_its_package(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refusal.everywhere("--config", QUICKSTART, *_set("data.dataset=hf:ag_news"))
    assert_says(message, ["hf:ag_news", "pip install 'frameworm[hub]'"])


@pytest.mark.parametrize("place", ["cache", "cache/deeper"])
def test_cache_folder_with_a_file_in_the_way(refusal: Refusal, place: str) -> None:
    (refusal.folder / "cache").write_text("a file\n")
    message = refusal.everywhere("--config", QUICKSTART, *_set(f"data.cache_dir={place}"))
    assert_says(message, [place, "cannot be written", "set data.cache_dir"])


@pytest.mark.slow
def test_weights_of_another_model(refusal: Refusal) -> None:
    small = load_config(QUICKSTART, ["model.d_model=32"])
    weights = {name: weight.contiguous() for name, weight in build_workload(small).model.state_dict().items()}
    file = refusal.folder / "small.safetensors"
    save_file(weights, file)
    message = refusal.everywhere("--config", QUICKSTART, *_set("model.init_from=small.safetensors"))
    assert_says(message, ["model.init_from", "small.safetensors", "shape", "check the sizes"])
    weights.pop(next(iter(weights)))
    save_file(weights, file)
    assert "lacks" in refusal.of("--config", QUICKSTART, *_set("model.init_from=small.safetensors"))
    file.write_text("no weights\n")
    assert "is not a safetensors file" in refusal.of("--config", QUICKSTART, *_set("model.init_from=small.safetensors"))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", ["returned NoneType", "expected a Workload"]),
        ("(1, 2)", ["returned a tuple of 2"]),
        ("('model', [1], None)", ["returned a str as the model"]),
        ("(torch.nn.Linear(1, 1), 3, None)", ["returned a int as train_data"]),
        ("(torch.nn.Linear(1, 1), [], None)", ["has no samples"]),
    ],
    ids=["nothing", "short", "model", "data", "no-samples"],
)
def test_own_workload_that_returns_nonsense(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, returned: str, words: list[str]
) -> None:
    (refusal.folder / "nonsense.py").write_text(f"import torch\n\n\ndef build(config):\n    return {returned}\n")
    monkeypatch.delitem(sys.modules, "nonsense", raising=False)
    (refusal.folder / "own.yaml").write_text("workload: nonsense:build\ngpu: {device: cpu}\n")
    assert_says(refusal.everywhere("--config", "own.yaml"), words)
    monkeypatch.delitem(sys.modules, "nonsense", raising=False)


@pytest.mark.slow
def test_run_folders_that_cannot_be_used(refusal: Refusal) -> None:
    def of(*args: str) -> str:
        return refusal.of("--config", QUICKSTART, *args)

    run = _make_run(refusal.folder / "run")
    (refusal.folder / "plain").mkdir()
    (refusal.folder / "plain" / "thesis.tex").write_text("words\n")
    (refusal.folder / "file").write_text("a file\n")
    assert_says(of("--out", str(run)), ["already holds a run", "--resume auto", "another --out"])
    assert_says(of("--out", "plain"), ["plain is not empty", "thesis.tex"])
    assert_says(of("--out", "file"), ["file is in the way"])
    assert_says(of("--out", "file/deeper"), ["file/deeper", "a writable place with --out"])
    assert_says(of("--resume", "none"), ["none does not exist", "frameworm runs"])
    assert_says(of("--resume", "file"), ["file is not a folder"])
    assert_says(of("--resume", "plain"), ["plain is not a run"])
    assert_says(of("--resume", str(run), "--out", "plain"), [str(run), "plain", "leave --out out"])


def test_damaged_checkpoints(refusal: Refusal) -> None:
    """Starting over without a word would throw three weeks away."""
    run = _make_run(refusal.folder / "run")
    (run / "checkpoints" / "step-00000009.pt").write_bytes(b"half of it")
    message = refusal.of("--config", QUICKSTART, "--resume", run)
    assert_says(message, [str(run), "checkpoint"])


def test_what_fails_after_the_run_folder_was_made_takes_it_away(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    (refusal.folder / "runs").mkdir()
    message = refusal.of("--config", QUICKSTART, *_set("observe.sinks=[tensorboard]"))
    assert_says(message, ["observe.sinks", "pip install 'frameworm[tensorboard]'"])


@pytest.mark.slow
def test_real_command_line_refuses_alike(cli: Callable[..., Any], tmp_path: Path) -> None:
    """Once with nothing patched, as a user types it."""
    run = _make_run(tmp_path / "run")
    before = _files(tmp_path)
    flags = ["--distributed", "--nproc-per-node", "3", "--out", run]
    result = cli("train", "--config", QUICKSTART, *flags, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert_says(result.stderr, ["quickstart.yaml:", "training.global_batch", "world size 3"])
    assert _files(tmp_path) == before
    assert RunFolder(run).holds_run()
