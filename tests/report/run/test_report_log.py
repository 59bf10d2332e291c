"""`train.log`: what is said while a run goes on, in its folder."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from engine.workbench import classification, mlp
from frameworm import Trainer
from frameworm.records.schema import EpochRecord
from frameworm.report.run.log import RunLog

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  .+")


def test_lines_have_the_time_and_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("frameworm")
    made = RunLog(tmp_path / "train.log", 100, 3, 1)
    made.on_epoch(EpochRecord(1, 2.5, 0.5, 0.6, 0.9, 1500.0, {"f1": 0.75}))
    assert not (tmp_path / "train.log").exists(), "it would not be empty for a run that goes on"
    made.begin()
    log.warning("two\nlines \x1b[31m")
    made.close()
    log.warning("not heard")
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert all(LINE.fullmatch(line) for line in lines)
    assert [line[21:] for line in lines][1:2] == ["two"]
    assert "f1 0.75" in lines[0]
    assert "\x1b" not in "".join(lines)
    assert len(lines) == 3


@pytest.mark.slow
def test_a_run_leaves_its_log_and_adds_to_it_when_it_goes_on(tmp_path: Path) -> None:
    import torch

    for epochs in (1, 2):
        model = mlp()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), run_dir=tmp_path / "run")
        loader = DataLoader(classification(64), batch_size=8)
        trainer.train(loader, epochs=epochs, resume=None if epochs == 1 else "auto")
    text = (tmp_path / "run" / "train.log").read_text()
    assert re.findall(r"epoch (\d/\d)  loss", text) == ["1/1", "2/2"]
    assert len(re.findall(r"completed after step \d+, loss", text)) == 2
    assert not logging.getLogger("frameworm").filters


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    import torch

    model = mlp()

    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no loss today")

    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn=broken, run_dir=tmp_path / "run")
    with pytest.raises(RuntimeError, match="no loss today"):
        trainer.train(DataLoader(classification(64), batch_size=8), epochs=1)
    assert "failed in step 1: RuntimeError: no loss today" in (tmp_path / "run" / "train.log").read_text()
    assert not logging.getLogger("frameworm").filters
