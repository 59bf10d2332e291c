"""CONTRIBUTING.md: each of its worked examples runs as it stands, in the place it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_checks import check_codec
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.diagnose.rules import judge
from frameworm.distributed import enable_gradient_compression
from frameworm.errors import ConfigError
from frameworm.launch import environment
from frameworm.parallel.compression import registry
from frameworm.tune.knobs import base

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture(autouse=True)
def registries_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(base, "_registered", dict(base._registered))
    monkeypatch.setattr(judge, "RULES", dict(judge.RULES))
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(environment, "_readers", dict(environment._readers))


def _run(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(EXAMPLES[name], f"CONTRIBUTING.md, {name}", "exec"), names)
    return names


def test_the_page_has_all_its_examples() -> None:
    assert list(EXAMPLES) == ["knob", "rule", "codec", "launcher"]
    assert PAGE.count("```python") == len(EXAMPLES)


@pytest.mark.parametrize("name", ["knob", "rule", "launcher"])
def test_an_example_finds_what_it_says(name: str) -> None:
    _run(name)


def test_a_knob_says_why_it_does_not_apply() -> None:
    names = _run("knob")
    config = names["load_config"]("configs/quickstart.yaml", ["checkpoint.every_steps=off"])
    assert names["knob"].why_not(names["Context"](config)) == "the run saves no checkpoints"


@pytest.mark.parametrize("codec", ["int8", "int4", "topk", "onebit"])
def test_a_codec_keeps_the_promises_of_all_codecs(codec: str) -> None:
    _run("codec")
    check_codec(registry.make_codec(codec))


def _train(rank: int, world_size: int, example: str) -> tuple[float, float, list[float], int]:
    """Train a line with gradients of one bit; first and last loss, the parameters, and the bytes of a step."""
    exec(compile(example, "CONTRIBUTING.md", "exec"), {"__name__": "example"})
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 1))
    compression = enable_gradient_compression(model, rank, "onebit")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    draw = torch.Generator().manual_seed(rank)
    truth = torch.linspace(-1, 1, 64)
    losses = []
    for _ in range(150):
        inputs = torch.randn(32, 64, generator=draw)
        loss = nn.functional.mse_loss(model(inputs).squeeze(1), inputs @ truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert compression.method == "onebit"
    sent = compression._control.hook.sent_bytes
    compression.close()
    return losses[0], losses[-1], [value for item in model.parameters() for value in item.flatten().tolist()], sent


@pytest.mark.slow
def test_two_ranks_train_with_the_codec(run_ranks: Callable[..., list[Any]]) -> None:
    (first, last, parameters, sent), (_, _, same, _) = run_ranks(_train, 2, (EXAMPLES["codec"],))
    assert last < first / 4
    assert parameters == same
    assert 0 < sent < 150 * 65 * 4 / 4, "a quarter of fp32 at most"


def test_names_of_our_own_cannot_be_taken() -> None:
    with pytest.raises(ConfigError, match="int8"):
        registry.register_codec("int8", lambda ratio, rounding: registry.make_codec("int4"))

    def input_bound(facts: Any) -> None:
        return None

    with pytest.raises(ValueError, match="input_bound"):
        judge.register_rule(input_bound)


def test_torchrun_comes_before_a_registered_launcher_and_slurm_after_it() -> None:
    _run("launcher")
    mpi = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
    mpi |= {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
    torchrun = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    assert environment.detect({**mpi, **torchrun}).launcher == "torchrun"
    assert environment.detect({**mpi, **slurm}).launcher == "other"
    assert environment.detect(slurm).launcher == "srun"


def test_what_the_page_names_exists() -> None:
    for path in re.findall(r"`((?:src|tests|benchmarks)/[\w./]+)`", PAGE):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    commands = re.findall(r"```bash.*?```|`make [^`]*`", PAGE, re.DOTALL)
    assert set(re.findall(r"make ([a-z-]+)", "\n".join(commands))) <= targets
