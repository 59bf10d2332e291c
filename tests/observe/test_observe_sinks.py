"""TensorBoard files hold what the run recorded."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from frameworm.errors import MissingPackageError
from frameworm.observe.sinks import TensorBoardSink
from frameworm.records.schema import EpochRecord, StepRecord


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.on_step(StepRecord(1, 1, 0.0, 0.5, 2.0, 0.1, 4, 4.0))
    sink.on_step(StepRecord(2, 1, 0.0, 0.25, float("nan"), 0.2, 4, 4.0))
    sink.on_epoch(EpochRecord(1, 1.0, 1.5, None, 0.75, 100.0))
    sink.on_run_end(None)  # type: ignore[arg-type]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(item.step, item.value) for item in events.Scalars("train/loss")] == [(1, 2.0)]
    assert [round(item.value, 6) for item in events.Scalars("train/lr")] == [0.1, 0.2]
    assert [item.value for item in events.Scalars("time/step_s")] == [0.5, 0.25]
    assert events.Scalars("epoch/val_accuracy")[0].value == 0.75
    assert "epoch/val_loss" not in events.Tags()["scalars"]


def test_without_the_package_the_install_line_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def blocked(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(MissingPackageError, match=r"pip install 'frameworm\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
