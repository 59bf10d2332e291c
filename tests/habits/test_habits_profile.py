"""What `frameworm profile` says of scripts that train in less common ways."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from number_cases import Cli, built_once, completed

from frameworm.records.schema import StepRecord
from frameworm.records.statistics import DEFAULT_WARMUP
from frameworm.records.writer import read_steps

pytestmark = pytest.mark.slow


class Profiled(NamedTuple):
    summary: dict[str, Any]
    steps: list[StepRecord]
    stdout: str
    stderr: str


# Loader workers take a second to start, in every epoch; from then on a batch is there when it is asked for. The script
# prints how long all of it took.
START_S = 1.0
EPOCHS = 3
STEPS_PER_EPOCH = 10
STARTING_WORKERS = f"""
    import time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset


    def start(worker):
        time.sleep({START_S})


    if __name__ == "__main__":
        data = TensorDataset(torch.ones({4 * STEPS_PER_EPOCH}, 4))
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        began = time.perf_counter()
        for epoch in range({EPOCHS}):
            for (inputs,) in DataLoader(data, 4, num_workers=1, worker_init_fn=start):
                optimizer.zero_grad()
                model(inputs).sum().backward()
                time.sleep(0.02)
                optimizer.step()
        print(time.perf_counter() - began)
"""

# A generator of 12 parameters and a discriminator of 5 learn from 8 samples per step; then the generator is traced.
GAN = """
    import torch
    from torch import nn

    generator, discriminator = nn.Linear(2, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.Adam(part.parameters()) for part in (discriminator, generator)]
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
    for step in range(20):
        real, made = torch.randn(8, 4), generator(torch.randn(8, 2))
        optimizers[0].zero_grad()
        (criterion(discriminator(real), ones) + criterion(discriminator(made.detach()), zeros)).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        criterion(discriminator(made), ones).backward()
        optimizers[1].step()
    torch.jit.trace(generator, torch.ones(3, 2))
    print("exported")
"""

# LBFGS evaluates the same 64 samples four times per step: without tolerances it never ends earlier.
LBFGS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    target = inputs.sum(-1, keepdim=True) + torch.randn(64, 1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, tolerance_grad=0, tolerance_change=0)
    calls = []


    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = (model(inputs) - target).square().mean()
        loss.backward()
        return loss


    for step in range(15):
        optimizer.step(closure)
    print(len(calls))
"""

SCRIPTS = {"starting_workers": STARTING_WORKERS, "gan": GAN, "lbfgs": LBFGS}


@pytest.fixture
def profiled(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Profiled]:
    """Profile one of the scripts, once for all tests that read its result."""

    def profile(name: str) -> Profiled:
        def build(folder: Path) -> None:
            script = folder / f"{name}.py"
            script.write_text(textwrap.dedent(SCRIPTS[name]))
            done = completed(cli, "profile", "--out", folder / "run", script)
            if done.returncode:
                raise RuntimeError(done.stderr)  # not the failure that a test expects
            (folder / "stdout").write_text(done.stdout)
            (folder / "stderr").write_text(done.stderr)

        folder = built_once(tmp_path_factory, f"profile-{name}", build)
        summary = json.loads((folder / "run" / "summary.json").read_text())
        steps = read_steps(folder / "run" / "steps-rank0.jsonl")
        return Profiled(summary, steps, (folder / "stdout").read_text(), (folder / "stderr").read_text())

    return profile


def test_the_start_of_loader_workers_is_no_wait_of_the_steady_step(profiled: Callable[[str], Profiled]) -> None:
    found = profiled("starting_workers")
    assert found.summary["steps"] == len(found.steps) == EPOCHS * STEPS_PER_EPOCH
    # However busy the machine: what a step takes is part of the rest.
    spent_s = sum(max(step.step_s, sum(step.phases.values())) for step in found.steps)
    assert spent_s < float(found.stdout) - 0.8 * EPOCHS * START_S


def test_the_start_of_loader_workers_does_not_call_for_more_of_them(profiled: Callable[[str], Profiled]) -> None:
    """On a busy machine steps may wait for batches after all: no more is promised than that explains."""
    found = profiled("starting_workers")
    promised = [
        finding["expected_speedup"]["value"]
        for finding in found.summary["findings"]
        if finding["expected_speedup"] and any("num_workers" in remedy["knob"] for remedy in finding["remedies"])
    ]
    counted = found.steps[DEFAULT_WARMUP:]
    step_s = sum(step.step_s for step in counted)
    most = step_s / (step_s - sum(step.phases.get("data_wait", 0.0) for step in counted))
    assert [value for value in promised if value > max(1.5, 1.01 * most)] == []


def test_the_parameters_of_all_optimizers_are_counted(profiled: Callable[[str], Profiled]) -> None:
    summary = profiled("gan").summary
    assert summary["steps"] == 20
    assert summary["parameters"] == 17


def test_the_batch_of_two_models_is_not_counted_twice(profiled: Callable[[str], Profiled]) -> None:
    assert profiled("gan").summary["batch"]["micro"] in (None, 8)


def test_evaluations_of_a_closure_are_not_accumulation(profiled: Callable[[str], Profiled]) -> None:
    summary = profiled("lbfgs").summary
    assert summary["steps"] == 15
    assert summary["batch"]["accumulation"] == 1
    assert summary["batch"]["global"] in (None, 64)


def test_a_closure_is_evaluated_as_often_as_without_a_profile(profiled: Callable[[str], Profiled]) -> None:
    assert profiled("lbfgs").stdout == f"{4 * 15}\n"


def test_tracing_a_model_gives_no_warnings_of_ours(profiled: Callable[[str], Profiled]) -> None:
    found = profiled("gan")
    assert found.stdout == "exported\n"
    assert "TracerWarning" not in found.stderr
