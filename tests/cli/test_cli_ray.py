"""`frameworm ray`: what it refuses before any worker starts; tests/engine/test_engine_ray.py trains."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import CommandLine, command_line

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TWO = ("ray", "--config", CONFIG, "--num-workers", "2")


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data_cache_dir: Path
) -> Iterator[CommandLine]:
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capfd) as run:
        yield run


def _no_cluster(**settings: Any) -> None:
    raise ConnectionError("Could not find any running Ray instance.\nMore of it.")


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that finds none running."""
    train = SimpleNamespace()
    ray = SimpleNamespace(is_initialized=lambda: False, init=_no_cluster, train=train)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    # The verb sets these for Ray; the next test must not see them.
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_CHDIR_TO_TRIAL_DIR"):
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ray", "--config", CONFIG, "--num-workers", "0"), "--num-workers"),
        (("ray", "--config", CONFIG, "--num-workers", "3:2"), "--num-workers"),
        ((*TWO, "--use-gpu", "maybe"), "--use-gpu takes auto, yes, no"),
        ((*TWO, "--resources-per-worker", "CPU"), "NAME=AMOUNT"),
        ((*TWO, "--resources-per-worker", "CPU=-1"), "NAME=AMOUNT"),
        ((*TWO, "--resources-per-worker", "cpu=1"), "Ray knows it as CPU"),
        ((*TWO, "--resources-per-worker", "GPU=0.5"), "one GPU"),
        ((*TWO, "--use-gpu", "no", "--resources-per-worker", "GPU=1"), "contradict each other"),
        ((*TWO, "--use-gpu", "yes", "--resources-per-worker", "GPU=0"), "contradict each other"),
        ((*TWO, "--working-dir", "nowhere"), "--working-dir nowhere"),
        ((*TWO, "--set", "training.epoch=3"), "epochs"),
        (("ray", "--config", "missing.yaml", "--num-workers", "1"), "missing.yaml"),
        ((*TWO, "--out", "s3://bucket/runs/x"), "storage.url"),
    ],
)
def test_bad_options_need_no_ray(here: CommandLine, arguments: tuple[str | Path, ...], said: str) -> None:
    ended = here(*arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert said in ended.stderr


def test_without_ray_the_install_line_is_said(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ended = here(*TWO)
    assert ended.code == 2
    assert "pip install 'frameworm[ray]'" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "ray start --head"),
        (("--address", "somewhere"), "HOST:PORT"),
        (("--address", "ray://head:10001"), "ray job submit"),
        (("--use-gpu", "yes"), "would be idle"),
        (("--set", "training.global_batch=33"), "does not divide by world size 2"),
    ],
)
def test_what_fails_before_anything_starts(
    here: CommandLine, no_cluster: None, arguments: tuple[str, ...], said: str
) -> None:
    ended = here(*TWO, *arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert not (here.folder / "runs").exists()


def test_an_address_where_nothing_listens(here: CommandLine, no_cluster: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ended = here(*TWO, "--address", f"127.0.0.1:{port}")
    assert ended.code == 2
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in ended.stderr
