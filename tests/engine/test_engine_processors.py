from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from frameworm import Trainer
from frameworm.engine.processors import bind_to_share, share_of


@pytest.fixture
def as_before() -> Iterator[None]:
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    torch.set_num_threads(threads)
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
        os.sched_setaffinity(int(thread), cores)


def test_shares_are_disjoint_and_whole() -> None:
    cores = [0, 1, 2, 5, 6, 7, 9]
    shares = [share_of(cores, index, 3) for index in range(3)]
    assert [core for share in shares for core in share] == cores
    assert all(len(share) in (2, 3) for share in shares)
    assert share_of([0, 1], 0, 3) == []


@pytest.mark.usefixtures("as_before")
def test_training_uses_the_threads_asked_for() -> None:
    wanted = 1 if torch.get_num_threads() > 1 else 2
    model = nn.Linear(2, 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), cpu_threads=wanted, run_dir=None)
    trainer.train([(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))], epochs=1)
    assert torch.get_num_threads() == wanted


@pytest.mark.usefixtures("as_before")
def test_products_by_onednn_or_not() -> None:
    seen = []

    class Asks(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(torch._C._get_mkldnn_enabled())
            return super().forward(inputs)

    for wanted in (False, True):
        model = Asks(2, 2)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), cpu_onednn=wanted, run_dir=None)
        trainer.train([(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))], epochs=1)
    assert seen == [False, torch.backends.mkldnn.is_available()]


@pytest.mark.usefixtures("as_before")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_process_is_bound_to_its_share() -> None:
    cores = sorted(os.sched_getaffinity(0))
    bind_to_share(1, 2)
    assert sorted(os.sched_getaffinity(0)) == cores[len(cores) // 2 :]
    bind_to_share(0, 2)
    assert sorted(os.sched_getaffinity(0)) == cores[: len(cores) // 2]
