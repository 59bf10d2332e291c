"""What a type checker says about a user's file: right uses pass, and a wrong one is an error that names the option."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

USER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import frameworm
from frameworm import Callback, FramewormError, GPUConfig, RunRecord, Trainer
from frameworm.distributed import DDPTrainer, DistributedTrainer

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.randint(2, (8,))), batch_size=4)
trainer = Trainer(
    model, optimizer, torch.nn.CrossEntropyLoss(), clip_norm=1.0, ema="off", accumulation=2, every_steps=None, epochs=3,
    gpu=GPUConfig(device="cpu"), early_stop={"metric": "val_loss"}, callbacks=[Callback()], loggers=["csv"],
)
record: RunRecord = trainer.train(loader, {"dev": loader}, epochs=1)
loss: float = trainer.evaluate(loader)["loss"]
DistributedTrainer(model, optimizer, use_amp=True, strategy="zero2", mixed_precision=True)
DDPTrainer(model, optimizer, 0, 1, run_dir=None, backend="gloo")
caught: type[Exception] = FramewormError

Trainer(model, optimizer, clip_nrm=1.0)  # E: did you mean "clip_norm"
Trainer(model, optimizer, compile_model="yes")  # E: expected "bool"
Trainer(model, optimizer, mixed_precision="bf32")  # E: mixed_precision
Trainer(model, optimizer, lr=0.1)  # E: "lr"
Trainer(optimizer, model)  # E: expected "Optimizer"
DistributedTrainer(model, optimizer, gradient_acumulation_steps=2)  # E: did you mean "gradient_accumulation_steps"
DDPTrainer(model, optimizer, 0, 1, strategy="ddp")  # E: "strategy"
trainer.train(loader, epoch=3)  # E: did you mean "epochs"
trainer.train(3)  # E: Argument 1
record.verdct  # E: maybe "verdict"
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_mypy_reads_the_types_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    monkeypatch.setenv("MYPYPATH", str(Path(__file__).parents[1] / "src"))
    # The package is read as an installed one: errors inside it are its own tests' business.
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir=/dev/null", "user.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False).stdout
    found = {int(line): text for line, text in re.findall(r"^user\.py:(\d+): error: (.*)$", said, re.MULTILINE)}
    parts = {number: line.partition("  # E: ")[2] for number, line in enumerate(USER.splitlines(), 1)}
    wanted = {number: words for number, words in parts.items() if words}
    assert sorted(found) == sorted(wanted), said
    for number, words in wanted.items():
        assert words in found[number], said
