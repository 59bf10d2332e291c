"""`frameworm memory` from end to end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import CommandLine, command_line

from frameworm.cli.scale import parse_size
from frameworm.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ("--set", "model.num_layers=2", "--set", "model.d_model=96", "--set", "training.micro_batch=4")


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data_cache_dir: Path
) -> Iterator[CommandLine]:
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capfd) as run:
        yield run


def test_savings_by_parameters(here: CommandLine) -> None:
    ended = here("memory", "--params", "175e9", "--gpus", "64", "--memory", "80GB")
    assert ended.code == 0
    for words in ("175,000,000,000 parameters on 64 devices", "2,800 GB", "1,421.875 GB", "732.8125 GB", "43.75 GB"):
        assert words in ended.stdout
    assert "fp32: zero3 fits in 80 GB" in ended.stdout


def test_savings_as_json(here: CommandLine) -> None:
    ended = here("memory", "--params", "7e9", "--gpus", "8", "--memory", "80GiB", "--json")
    data = json.loads(ended.stdout)
    assert data["bytes"]["fp32"]["ddp"] == 7e9 * 16
    assert data["fits"]["fp32"] == {"ddp": False, "zero1": True, "zero2": True, "zero3": True}


@pytest.mark.slow
def test_a_shipped_config_without_its_data(here: CommandLine) -> None:
    ended = here("memory", "--config", CONFIGS / "gpt2_124m.yaml", "--gpus", "4", "--memory", "80GB", *SMALL)
    assert ended.code == 0, ended.stderr
    for words in ("memory · gpt2_124m", "activations", "optimizer state", "fits: ", "zero3", "largest micro-batch: "):
        assert words in ended.stdout
    assert "\x1b" not in ended.stdout
    assert max(len(line) for line in ended.stdout.splitlines()) <= 140
    assert list(here.folder.iterdir()) == []


@pytest.mark.slow
def test_what_does_not_fit_says_what_would(here: CommandLine) -> None:
    arguments = ("--config", CONFIGS / "gpt2_124m.yaml", "--memory", "1.5GiB", *SMALL)
    bad = here("memory", *arguments, "--set", "training.micro_batch=32", "--json")
    assert bad.code == 1
    data = json.loads(bad.stdout)
    assert data["fits"] is False
    assert data["plan"]["total"] > data["usable_bytes"]
    assert sum(data["plan"][name] for name in ("parameters", "gradients", "optimizer", "activations")) > 0
    change = data["changes"][0]
    assert change["plan"]["total"] <= data["usable_bytes"]
    good = here("memory", *arguments, *(word for item in change["overrides"] for word in ("--set", item)), "--json")
    assert good.code == 0, "what was advised fits"
    assert json.loads(good.stdout)["plan"]["total"] == change["plan"]["total"]


@pytest.mark.slow
def test_the_machine_is_asked_for_its_memory(here: CommandLine) -> None:
    ended = here("memory", "--config", CONFIGS / "quickstart.yaml")
    assert ended.code == 0, ended.stderr
    assert "of this machine's memory" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --params N"),
        (["--params", "7e9", "--config", "x.yaml"], "either --params N"),
        (["--params", "many"], "--params many is not a number"),
        (["--params", "-7e9"], "not a number of parameters"),
        (["--params", "7e9", "--memory", "large"], "--memory large is not a size"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--config", str(CONFIGS / "quickstart.yaml"), "--gpus", "7"], "does not divide"),
    ],
)
def test_mistakes_are_said(here: CommandLine, arguments: list[str], words: str) -> None:
    ended = here("memory", *arguments)
    assert ended.code == 2
    assert words in ended.stderr


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("80 GiB", 80 * 2**30), ("1.5gib", 3 * 2**29), ("8e10", 8 * 10**10)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0GB", "1.2.3GB", "80 cows", "-5GB", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)
