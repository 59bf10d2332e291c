"""The guard on runs that were really made here: a few of them, and twenty pairs of each kind in `make campaign`."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import Trainer
from frameworm.guard.regression import judge
from frameworm.guard.run_metrics import RunMetrics, read_runs

CAMPAIGN = "CAMPAIGN" in os.environ
PAIRS = 20 if CAMPAIGN else 2
STEPS = 150
WORK_S = 0.008
# The step around the work takes some tenths of a millisecond; a tenth of both is added. The few of the ordinary suite,
# which others may disturb, are slower by more.
SLOWER_S = 0.00885 if CAMPAIGN else 0.0092


class Working(nn.Module):
    """Works for a while, by the processor's own time: some of it in vain."""

    def __init__(self, work_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)
        self.work_s = work_s

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores."""
        until = time.thread_time() + self.work_s
        matrix = torch.full((64, 64), 1e-3)
        while time.thread_time() < until:
            matrix = matrix @ matrix
        scores: Tensor = self.layer(inputs)
        return scores


def _run(folder: Path, work_s: float) -> RunMetrics:
    torch.manual_seed(0)
    model = Working(work_s)
    data = TensorDataset(torch.randn(STEPS * 8, 64), torch.randint(4, (STEPS * 8,)))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), run_dir=folder)
    trainer.train(DataLoader(data, 8), epochs=1)
    return read_runs([str(folder)])[0]


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(900)
def test_real_runs(tmp_path: Path) -> None:
    """In turns, so that both kinds meet the same hours of the machine."""
    same: Counter[str] = Counter()
    slower: Counter[str] = Counter()
    for pair in range(PAIRS):
        before = _run(tmp_path / f"before{pair}", WORK_S)
        same[judge([before], [_run(tmp_path / f"same{pair}", WORK_S)]).verdict] += 1
        slower[judge([before], [_run(tmp_path / f"slower{pair}", SLOWER_S)]).verdict] += 1
    print(f"unchanged: {dict(same)}; a tenth slower: {dict(slower)}")
    assert same["regression"] <= 1
    # Beside other programs the guard says that it cannot tell, which is right as well; ok would be wrong.
    told = slower["regression"] if CAMPAIGN else slower["regression"] + slower["inconclusive"]
    assert told >= PAIRS - PAIRS // 20
