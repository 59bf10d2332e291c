from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from frameworm import Trainer
from frameworm.engine.model.processors import TURN_S, _onednn_at_first, bind_to_share, cores_of_rank


@pytest.fixture
def as_before() -> Iterator[None]:
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    torch.set_num_threads(threads)
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
        os.sched_setaffinity(int(thread), cores)


def test_shares_are_disjoint_and_whole() -> None:
    cores = [0, 1, 2, 5, 6, 7, 9]
    shares = [cores_of_rank(cores, index, 3) for index in range(3)]
    assert [core for share in shares for core in share] == cores
    assert all(len(share) in (2, 3) for share in shares)
    assert cores_of_rank([0, 1], 0, 3) == []


@pytest.mark.usefixtures("as_before")
def test_training_uses_the_threads_asked_for() -> None:
    wanted = 1 if torch.get_num_threads() > 1 else 2
    model = nn.Linear(2, 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), cpu_threads=wanted, run_dir=None)
    trainer.train([(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))], epochs=1)
    assert torch.get_num_threads() == wanted


@pytest.mark.parametrize("usual_s", [0.004, 5e-5])
def test_threads_take_quick_turns_while_training(usual_s: float) -> None:
    before_s = sys.getswitchinterval()
    seen: list[float] = []
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda *_: seen.append(sys.getswitchinterval()))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=None)
    try:
        sys.setswitchinterval(usual_s)
        trainer.train([(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))], epochs=1)
        assert seen == [pytest.approx(min(usual_s, TURN_S), abs=2e-6)]
        assert sys.getswitchinterval() == pytest.approx(usual_s, abs=2e-6)
    finally:
        sys.setswitchinterval(before_s)


@pytest.fixture
def onednn() -> Iterator[bool]:
    present = _onednn_at_first()
    torch._C._set_mkldnn_enabled(present)  # a training before this one may have turned it off
    yield present
    torch._C._set_mkldnn_enabled(present)


class Asks(nn.Sequential):
    """Notes who computes with oneDNN: the model as a whole, its linear layers."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh(), nn.Linear(2, 2))
        self.seen: list[tuple[str, bool]] = []
        self[1].forward = self._linear  # type: ignore[method-assign]

    def _linear(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append(("linear", torch._C._get_mkldnn_enabled()))
        if not inputs.isfinite().all():
            raise RuntimeError("planted")
        return nn.Linear.forward(self[1], inputs)  # type: ignore[arg-type]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = super().forward(inputs)
        self.seen.append(("model", torch._C._get_mkldnn_enabled()))
        return scores


def trained(inputs: torch.Tensor, cpu_onednn: bool | str) -> Asks:
    model = Asks()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), cpu_onednn=cpu_onednn, run_dir=None)
    trainer.train([(inputs, torch.zeros(4, dtype=torch.long))], epochs=1)
    return model


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("wanted", "linear", "model"), [(False, False, False), (True, True, True), ("except_linear", False, True)]
)
def test_who_computes_with_onednn(wanted: bool | str, linear: bool, model: bool, onednn: bool) -> None:
    asked = trained(torch.randn(4, 2), wanted)
    assert asked.seen == [("linear", linear and onednn), ("model", model and onednn)]
    asked.seen.clear()
    asked(torch.randn(4, 2))
    assert asked.seen[0] == ("linear", model and onednn), "what was put on the layers is gone"


@pytest.mark.usefixtures("as_before")
def test_a_linear_layer_that_fails_leaves_onednn_as_it_was(onednn: bool) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        trained(torch.full((4, 2), torch.nan), "except_linear")
    assert torch._C._get_mkldnn_enabled() == onednn


@pytest.mark.usefixtures("as_before")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_process_is_bound_to_its_share() -> None:
    cores = sorted(os.sched_getaffinity(0))
    bind_to_share(1, 2)
    assert sorted(os.sched_getaffinity(0)) == cores[len(cores) // 2 :]
    bind_to_share(0, 2)
    assert sorted(os.sched_getaffinity(0)) == cores[: len(cores) // 2]


@pytest.mark.usefixtures("as_before")
def test_linear_layers_are_called_as_before_afterwards() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), cpu_onednn="except_linear", run_dir=None)
    trainer.train([(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))], epochs=1)
    assert not any("forward" in vars(module) for module in model)


@pytest.mark.slow
def test_interop_threads_are_set_once_or_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch
from frameworm import Trainer
from frameworm.errors import FramewormError

def train(count):
    model = torch.nn.Linear(4, 1)
    loss = lambda output, target: output.mean()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=loss, cpu_interop_threads=count,
                      run_dir=None, device="cpu")
    trainer.train([(torch.ones(2, 4), torch.ones(2))])
    return torch.get_num_interop_threads()

print(train("auto"), train(3), train(3), train("auto"))
try:
    train(5)
except FramewormError as error:
    print(error)
"""
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=True)
    first, second = ended.stdout.splitlines()
    assert first.split()[1:] == ["3", "3", "3"]
    assert "cpu_interop_threads: 5 comes too late" in second
