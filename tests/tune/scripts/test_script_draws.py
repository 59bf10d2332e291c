"""Random draws of a script as in training: other masks of the same kind pass, masks of another kind are found."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frameworm.attach.trial.switches import Switches
from frameworm.guard.agreement import AgreementVerdict, judge_agreement
from frameworm.tune.scripts.comparing import Comparing
from frameworm.tune.scripts.result import ScriptResult
from frameworm.tune.scripts.trials import ScriptTrials

DEADLINE_S = 600.0  # of all the tests here together
SCRIPT = """
import torch
from torch import nn

class Dropped(nn.Module):
    def forward(self, batch):
        return nn.functional.dropout(batch, 0.2, self.training)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), Dropped(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs = torch.randn(32, 20)
for step in range(40):
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
PLAIN = "nn.functional.dropout(batch, 0.2, self.training)"
OTHERS = {
    "other masks": "nn.functional.dropout(batch.t(), 0.2, self.training).t()",
    "off": "nn.functional.dropout(batch, 0.0, self.training)",
    "more": "nn.functional.dropout(batch, 0.5, self.training)",
    "the same mask each time": "frozen(batch)",
}
EXTRA = """
def frozen(batch):
    before = torch.get_rng_state()
    torch.manual_seed(5)
    batch = nn.functional.dropout(batch, 0.2)
    torch.set_rng_state(before)
    return batch
"""
FACTS: dict[str, Any] = {
    "half": False,
    "device": "cpu",
    "tf32": False,
    "draws": True,
    "parameters": 10,
    "framework": None,
}

Judge = Callable[[str], AgreementVerdict]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    folder = tmp_path_factory.mktemp("draws")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    result = ScriptResult([str(script)], {}, isolated=False)
    result.facts = FACTS
    trials = ScriptTrials(script, [], folder / "trials", time.monotonic() + DEADLINE_S, result)
    trials.draws_differently = lambda switches: True  # type: ignore[method-assign]
    comparing = Comparing(trials)

    def judge(drop: str) -> AgreementVerdict:
        source = SCRIPT.replace("class Dropped", f"{EXTRA}\nclass Dropped").replace(PLAIN, drop)
        agreement = comparing.compare(Switches(), source=source).agreement
        assert agreement is not None
        assert agreement.draws is not None
        assert agreement.draws.count == 32
        return judge_agreement(agreement)

    return judge


@pytest.mark.slow
def test_other_masks_of_the_same_kind_pass(judged: Judge) -> None:
    assert judged(PLAIN).passed is True
    assert judged(OTHERS["other masks"]).passed is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("off", "random draws repeat"),
        ("more", "random draws move the gradient"),
        ("the same mask each time", "random draws repeat"),
    ],
)
def test_masks_of_another_kind_are_found(kind: str, told: str, judged: Judge) -> None:
    verdict = judged(OTHERS[kind])
    assert verdict.passed is False
    assert told in verdict.detail


def test_only_what_compiles_draws_otherwise(tmp_path: Path) -> None:
    result = ScriptResult(["script.py"], {}, isolated=False)
    result.facts = FACTS
    trials = ScriptTrials(tmp_path / "script.py", [], tmp_path / "trials", 0.0, result)
    assert not trials.draws_differently(Switches(fused_optimizer=True, workers=1))
    assert trials.draws_differently(Switches(compile_blocks=True))
    result.facts = {**FACTS, "draws": False}
    assert not trials.draws_differently(Switches(compile=True))
