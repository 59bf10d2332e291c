"""The batch-size finder with real processes on the CPU: memory limits, and ways to die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from batch_workloads import SAMPLE_BYTES, Broken, Eater, config_of, data, train_an_epoch

from frameworm.distributed import find_optimal_batch_size
from frameworm.errors import ConfigError, TrainingFailedError
from frameworm.scaling.batch_search import BatchSizeReport
from frameworm.tune.batch_size.search import BatchSizeFinder
from frameworm.tune.processes import forkserver as zygote
from frameworm.tune.processes import process_tree as family
from frameworm.tune.processes.batch_data import longest_first, rehearsal
from frameworm.tune.processes.batch_trial import RankJob, out_of, out_of_in
from frameworm.tune.processes.forkserver import warm_up
from frameworm.tune.processes.process_tree import RankEnd, judge

LIMIT_BYTES = 4 * 2**30
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


def find(workload: str, world_size: int = 1, deadline_s: float = 60.0, most: int = 64) -> BatchSizeReport:
    """The free search under a limit of the address space."""
    finder = BatchSizeFinder(
        config_of(workload),
        world_size=world_size,
        most=most,
        free_global_batch=True,
        deadline_s=deadline_s,
        budget_s=240,
        limit_bytes=LIMIT_BYTES,
        speed=False,
    )
    return finder.run()


@pytest.mark.slow
def test_the_largest_under_a_limit_is_verified_and_then_trains_an_epoch(left_behind: Callable[[], list[int]]) -> None:
    report = find("eater")
    assert report.verified
    assert report.largest is not None
    assert report.ends_below is not None
    assert 0.97 * (report.ends_below - 1) <= report.largest < report.ends_below
    # Allocators take address space in large pieces, up to 1 GiB: some of it was mapped before the limit was set.
    assert 0.7 * LIMIT_BYTES <= report.largest * SAMPLE_BYTES <= 1.4 * LIMIT_BYTES
    assert report.search_trials <= 8
    assert {trial.outcome for trial in report.trials} == {"fits", "host_oom"}
    assert report.limit_name is not None
    assert report.trials[-1].steps == 12
    assert left_behind() == []
    for size, code in ((report.largest, 0), (report.ends_below + 8, 7)):
        process = warm_up().Process(target=train_an_epoch, args=(size, LIMIT_BYTES))
        process.start()
        process.join(150)
        assert process.exitcode == code, f"micro-batch {size}"


@pytest.mark.slow
def test_a_hog_on_one_rank_decides_for_all(left_behind: Callable[[], list[int]]) -> None:
    alone = find("eater", world_size=2)
    hogged = find("hog_on_rank_1", world_size=2)
    assert alone.largest is not None
    assert hogged.largest is not None
    assert hogged.verified
    assert hogged.largest < alone.largest - 5
    failed = [trial for trial in hogged.trials if not trial.fits]
    assert failed
    assert {trial.outcome for trial in failed} == {"host_oom"}
    assert {trial.rank for trial in failed if trial.micro_batch <= alone.largest} == {1}
    assert left_behind() == []


@pytest.mark.slow
def test_a_killed_child_costs_one_trial() -> None:
    report = find("killed", most=4)
    assert [trial.outcome for trial in report.trials].count("killed") == 1
    assert report.trials[0].message == "killed by SIGKILL"
    assert (report.largest, report.verified) == (4, True)


@pytest.mark.slow
def test_where_forked_trials_cannot_use_the_gpu_they_are_started_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([zygote.BAD_FORK, None])
    monkeypatch.setattr(zygote, "_forks", True)
    monkeypatch.setattr(family, "run_rank", _refuse)
    real = family._wait

    def wait(processes: list[BaseProcess], deadline_s: float) -> bool:
        if next(answers) is None:  # the second try
            assert not zygote._forks
        return real(processes, deadline_s)

    monkeypatch.setattr(family, "_wait", wait)
    ends, verdict = family.run_family(RankJob(config_of("eater"), str(tmp_path)), 60.0)
    assert [end.exit_code for end in ends] == [0]
    assert verdict.outcome == "fits"


def _refuse(job: RankJob, rank: int) -> None:
    marker = Path(job.folder) / "refused"
    if marker.exists():
        os._exit(0)
    marker.touch()
    os._exit(zygote.BAD_FORK)


@pytest.mark.slow
def test_a_rank_stuck_before_a_collective_costs_one_trial(left_behind: Callable[[], list[int]]) -> None:
    report = find("stuck", world_size=2, deadline_s=25, most=4)
    assert [trial.outcome for trial in report.trials].count("hang") == 1
    # A machine too busy to be quick with smaller sizes gives the one that hung no second chance.
    assert report.largest in (3, 4)
    assert report.verified
    assert left_behind() == []


@pytest.mark.slow
def test_a_broken_model_is_not_too_large() -> None:
    with pytest.raises(TrainingFailedError, match="this model is broken"):
        find("broken", most=4)


@pytest.mark.slow
def test_a_model_in_hand() -> None:
    model = Eater()
    before = model.scale.detach().clone()
    found = find_optimal_batch_size(model, max_batch_size=5, data=data(), device="cpu")
    assert found == 5
    assert isinstance(found, int)
    assert found.report.verified
    assert torch.equal(model.scale, before)
    # Without data a model that begins with a Linear layer is fed with noise.
    assert find_optimal_batch_size(torch.nn.Linear(3, 2), 2, device="cpu") == 2
    with pytest.raises(TrainingFailedError, match="this model is broken"):
        find_optimal_batch_size(Broken(), 2, data=data(), device="cpu")


SCRIPT = """
from torch import nn
from frameworm.distributed import find_optimal_batch_size

class Net(nn.Sequential):
    pass

def main():
    print("found", find_optimal_batch_size({model}(nn.Linear(4, 4)), 2, input_shape=(4,), device="cpu"))

{call}
"""
GUARDED = 'if __name__ == "__main__":\n    main()'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "call", "said"),
    [
        ("nn.Sequential", "main()", None),  # the trials need nothing of the script
        ("Net", GUARDED, None),
        ("Net", "main()", 'line 11 would run again in each: put it under `if __name__ == "__main__":`'),
    ],
)
def test_a_script_with_or_without_a_guard(tmp_path: Path, model: str, call: str, said: str | None) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(model=model, call=call))
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250, check=False)
    if said is None:
        assert ended.stdout == "found 2\n", ended.stderr
    else:
        assert ended.returncode == 1
        assert said in ended.stderr.splitlines()[-1]
        assert "bootstrapping" not in ended.stderr


@pytest.mark.slow
def test_classes_of_a_console_are_refused_in_one_line(tmp_path: Path) -> None:
    lines = SCRIPT.format(model="Net", call="main()")
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=250, check=False)
    assert "write the model's and data set's classes to a module" in ended.stderr.splitlines()[-1]


def test_what_cannot_be_tried_is_said() -> None:
    with pytest.raises(ConfigError, match="data="):
        find_optimal_batch_size(Eater())
    with pytest.raises(ConfigError, match="top of a module"):
        find_optimal_batch_size(Eater(), data=data(), loss_fn=lambda model, batch: model(batch))
    with pytest.raises(ConfigError, match="max_batch_size"):
        find_optimal_batch_size(Eater(), 0)


@pytest.mark.slow
def test_the_quickstart_under_a_limited_address_space(data_cache_dir: Path) -> None:
    command = (
        f"ulimit -v 6000000; exec {sys.executable} -m frameworm batch-size --json --max 8 "
        f"--config {CONFIGS / 'quickstart.yaml'}"
    )
    environ = {**os.environ, "FRAMEWORM_DATA_CACHE_DIR": str(data_cache_dir), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=280, env=environ)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["limit_name"] == "the address space (ulimit -v)"
    assert report["global_batch"] == 64
    assert report["set"]["largest"] == {"training.micro_batch": 8, "training.accumulation": 8}
    assert report["verified"] is True
    assert report["fastest"] in (1, 2, 4, 8)


def failed(rank: int, message: str, kind: str | None = None, consequence: bool = False) -> RankEnd:
    failure = {"kind": kind, "message": message, "consequence": consequence}
    return RankEnd(rank, 1, {"done": [], "failure": failure})


LOST = failed(0, "DistBackendError: connection closed by peer", consequence=True)


@pytest.mark.parametrize(
    ("ends", "in_time", "oom_killed", "outcome", "rank"),
    [
        ([RankEnd(0, 0), RankEnd(1, 0)], True, False, "fits", None),
        ([LOST, failed(1, "CUDA out of memory", "cuda_oom")], True, False, "cuda_oom", 1),
        ([RankEnd(0, None), failed(1, "MemoryError", "host_oom")], True, False, "host_oom", 1),
        ([LOST, RankEnd(1, -9)], True, True, "host_oom", 1),
        ([LOST, RankEnd(1, -9)], True, False, "killed", 1),
        ([LOST, RankEnd(1, -6, log="what():  std::bad_alloc\n")], True, False, "host_oom", 1),
        ([RankEnd(0, -11)], True, True, "killed", 0),
        ([LOST, failed(1, "ValueError: no")], True, False, "error", 1),
        ([RankEnd(0, None), RankEnd(1, None)], False, False, "hang", 0),
        ([RankEnd(0, 3, log="it said why\n")], True, False, "error", 0),
    ],
)
def test_ends_are_told_apart(ends: list[RankEnd], in_time: bool, oom_killed: bool, outcome: str, rank: int) -> None:
    verdict = judge(ends, in_time, oom_killed, 10.0)
    assert (verdict.outcome, verdict.rank) == (outcome, rank)


def test_memory_errors_are_recognised() -> None:
    assert out_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) == "cuda_oom"
    assert out_of(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")) == "cuda_oom"
    assert out_of(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")) == "host_oom"
    assert out_of(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 5 bytes.")) == "host_oom"
    assert out_of(OSError(12, "Cannot allocate memory")) == "host_oom"
    assert out_of(MemoryError()) == "host_oom"
    assert out_of(ValueError("a batch of one")) is None
    wrapped = RuntimeError("step 3 failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert out_of(wrapped) == "cuda_oom"
    assert out_of_in("libgomp: Thread creation failed: Resource temporarily unavailable") == "host_oom"


class Lengths(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of 1 to n elements, shuffled."""

    def __init__(self, told: bool) -> None:
        self.sizes = [(7 * place) % 40 + 1 for place in range(40)]
        if told:
            self.token_lengths = self.sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(self.sizes[index])


@pytest.mark.parametrize("told", [True, False])
def test_the_longest_samples_come_first_and_last(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from frameworm.hardware.resolve import resolve_here
    from frameworm.models.workloads import Workload

    dataset = Lengths(told)
    assert [dataset.sizes[place] for place in longest_first(dataset)] == list(range(40, 0, -1))
    config = resolve_here(config_of("eater", micro_batch=4, global_batch=4), 1)
    config, made = rehearsal(config, Workload(Eater(), dataset, dataset), 6, 1)
    sizes = [len(sample) for sample in made.train_data]
    assert len(sizes) == 24
    assert sizes[:4] == sizes[-4:] == [40, 39, 38, 37]
    assert min(sizes[8:16]) < 37
    assert config.data.shuffle is False
    assert max(len(sample) for sample in made.val_data) == 40


def test_the_share_is_kept_by_accumulation() -> None:
    job = RankJob(config_of("eater"), "", share=24)
    assert [job.accumulation(size) for size in (1, 8, 24)] == [24, 3, 1]
    assert RankJob(config_of("eater"), "").accumulation(8) == 1


def test_the_global_batch_decides_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    finder = BatchSizeFinder(config_of("eater", global_batch=48), world_size=2, speed=False, limit_bytes=LIMIT_BYTES)
    original: Callable[..., object] = finder._run

    def run(job: RankJob) -> object:
        tried.extend(job.sizes)
        return original(job)

    monkeypatch.setattr(finder, "_run", run)
    report = finder.run()
    assert set(tried) <= {1, 2, 3, 4, 6, 8, 12, 24}
    assert report.largest is not None
    assert report.largest * report.accumulation(report.largest) * 2 == 48


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_largest_on_a_gpu() -> None:
    # Activations fill the device, not inputs: those would have to be put together on the host.
    model = torch.nn.Sequential(torch.nn.Linear(8, 2**18), torch.nn.GELU(), torch.nn.Linear(2**18, 1))
    found = find_optimal_batch_size(model, 10**6, input_shape=(8,), device="cuda", memory_fraction=0.05)
    report = found.report
    assert report.verified
    assert report.ends_below is not None
    assert 0.97 * (report.ends_below - 1) <= found < report.ends_below
    assert {trial.outcome for trial in report.trials} == {"fits", "cuda_oom"}
