"""What a training loads: torch's compiler takes more than a second, and nobody waits for it who does not compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

_PROGRAM = """
import sys
from pathlib import Path
from frameworm.config.load import load_config
from frameworm.engine.run import run
config = load_config(Path(sys.argv[1]), ["data.limit=256", "training.epochs=2", "checkpoint.every_steps=2"])
folder = Path("run")
for resume in (None, folder):
    record = run(config, out=folder, resume=resume)
    assert record.steps > 0
    config.training.epochs += 1
assert record.checkpoint.count > 0
print("loaded", sorted({"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_training_that_compiles_nothing_does_not_load_the_compiler(tmp_path: Path, data_cache_dir: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(QUICKSTART)],
        cwd=tmp_path,
        env={**os.environ, "FRAMEWORM_DATA_CACHE_DIR": str(data_cache_dir)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "loaded []"
