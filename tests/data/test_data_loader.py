"""The loader: same batches for any number of workers, the right part on every rank."""

from __future__ import annotations

import gc
import multiprocessing
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler, get_worker_info

import frameworm.data.samples.workers as workers_module
from frameworm.data.loader import LoaderSettings, OptimizedDataLoader
from frameworm.data.samples.workers import automatic_workers, measure_workers, worker_candidates
from frameworm.errors import ConfigError, DataError, EnvironmentSetupError

# A machine with one core is warned by torch about the two workers used here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

create = OptimizedDataLoader.create


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Texts(Numbers):
    """Assembles whole batches and knows its token counts."""

    assembles_batches = True

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(len(lengths))
        self.token_lengths = np.array(lengths)

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        return {"ids": indices}

    def padded_length(self, lengths: np.ndarray) -> int:
        return int(-(-lengths.max() // 8) * 8)


class Noisy(Numbers):
    """Every sample is random."""

    def __getitem__(self, index: int) -> tuple[float, float, float]:  # type: ignore[override]
        return random.random(), float(np.random.rand()), float(torch.rand(()))


class Stream(IterableDataset[int]):
    """0, 1, 2, ... once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * 1000, self.epoch * 1000 + self.size))


class Shuffled(Stream):
    """Draws its order from the global random state, as many data sets do."""

    def __iter__(self) -> Iterator[int]:
        for index in torch.randperm(self.size).tolist():
            yield index
            torch.rand(1)


class SplitByWorker(Stream):
    """Splits itself as torch's manual shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(worker, self.size, workers))


class Sharded(SplitByWorker):
    """The same, and says so."""

    shards_itself = True


def drawn(loader: OptimizedDataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    alone = create(Numbers(23), 4, num_workers=0, seed=1)
    helped = create(Numbers(23), 4, num_workers=2, seed=1)
    for epoch in (0, 1, 3):
        alone.set_epoch(epoch)
        helped.set_epoch(epoch)
        batches = drawn(alone)
        assert sorted(flat(batches)) == list(range(23))
        assert drawn(helped) == batches
    helped.seek(4)
    assert drawn(helped) == batches[4:]
    helped.close()
    assert drawn(helped) == batches
    helped.close()


def test_what_workers_draw_depends_on_seed_epoch_and_sample_alone() -> None:
    def noise(workers: int, epoch: int, start: int = 0, seed: int = 1) -> list[Any]:
        loader = create(Noisy(12), 3, num_workers=workers, seed=seed, persistent_workers=False)
        loader.set_epoch(epoch)
        loader.seek(start)
        return [[column.tolist() for column in batch] for batch in loader]

    reference = noise(1, 2)
    assert noise(2, 2) == reference
    assert noise(2, 2, start=2) == reference[2:]
    assert noise(1, 3) != reference
    columns = [value for batch in reference for column in batch for value in column]
    assert len(set(columns)) == len(columns)


def test_persistent_workers_draw_anew_in_every_epoch() -> None:
    loader = create(Noisy(4), 2, num_workers=1, shuffle=False)
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        epochs.append([batch[0].tolist() for batch in loader])
    loader.close()
    assert epochs[0] != epochs[1]
    assert epochs[0] == epochs[2]


def test_iterating_leaves_the_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn(create(Numbers(8), 2, num_workers=0))
    drawn(create(Stream(8), 2, num_workers=0))
    drawn(create(Shuffled(8), 2, num_workers=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_steps_are_the_same_for_any_split() -> None:
    def steps(world: int, accumulation: int, batch_size: int) -> list[set[int]]:
        found: list[set[int]] = []
        for rank in range(world):
            loader = create(Numbers(50), batch_size, num_workers=0, seed=4)
            loader.shard(rank, world, accumulation)
            assert loader.global_batch == 12
            batches = iter(drawn(loader))
            for step in range(loader.steps_per_epoch):
                shape = loader.step_shape(step)
                samples = {sample for count in shape.samples for sample in next(batches)[:count]}
                assert len(samples) == shape.local_samples
                if rank == 0:
                    found.append(set())
                assert not found[step] & samples
                found[step] |= samples
            assert next(batches, None) is None
        return found

    reference = steps(1, 1, 12)
    assert [len(step) for step in reference] == [12, 12, 12, 12, 2]
    assert steps(1, 4, 3) == steps(2, 2, 3) == steps(3, 2, 2) == steps(4, 1, 3) == reference


def test_an_explicit_global_batch_stays() -> None:
    loader = create(Numbers(64), 4, num_workers=0, global_batch=20)
    loader.shard(0, 3)
    assert loader.global_batch == 20
    assert loader.step_shape(0).samples == [4, 3]
    assert loader.steps_per_epoch == 4
    assert loader.step_shape(0).global_samples == 20


def test_sharding_again_moves_the_ranks_part() -> None:
    loader = create(Numbers(8), 2, num_workers=0, shuffle=False)
    assert len(loader) == 4
    loader.shard(1, 2)
    assert drawn(loader) == [[2, 3], [6, 7]]
    loader.shard(0, 2, fill_empty=False)
    assert drawn(loader) == [[0, 1], [4, 5]]
    with pytest.raises(ConfigError, match="rank"):
        loader.shard(2, 2)
    with pytest.raises(ConfigError, match="accumulation"):
        loader.shard(0, 2, 0)


def test_tokens_of_a_step() -> None:
    lengths = [3, 9, 17, 1, 5, 6]
    loader = create(Texts(lengths), 2, shuffle=False)
    loader.shard(0, 1, accumulation=2)
    assert loader.num_workers == 0
    assert next(iter(loader)) == {"ids": [0, 1]}
    first, last = loader.step_shape(0), loader.step_shape(1)
    assert (first.tokens, first.padded_tokens) == (30, 2 * 16 + 2 * 24)
    assert (last.samples, last.tokens, last.padded_tokens) == ([2], 11, 16)
    # A filler is computed on but holds no tokens of its own.
    filler = create(Texts([3, 9, 17, 1, 5]), 2, shuffle=False)
    filler.shard(1, 2)
    assert filler.step_shape(1) == ([0], 1, 0, 8)


def test_a_subset_keeps_what_its_data_set_declares() -> None:
    loader = create(Subset(Texts([3, 9, 17, 1]), [2, 3]), 2, shuffle=False)
    assert loader.num_workers == 0
    assert next(iter(loader)) == {"ids": [2, 3]}
    assert loader.step_shape(0)[2:] == (18, 48)


def test_a_data_set_without_lengths_has_no_tokens() -> None:
    shape = create(Numbers(4), 2, num_workers=0).step_shape(1)
    assert (shape.samples, shape.global_samples, shape.tokens, shape.padded_tokens) == ([2], 2, None, None)


def test_older_spelling_and_other_settings() -> None:
    loader = OptimizedDataLoader.create_dataloader(
        Numbers(10), 4, num_workers=0, pin_memory=True, persistent_workers=True, drop_last=True, distributed="auto"
    )
    assert [len(batch) for batch in drawn(loader)] == [4, 4]
    joined = create(Numbers(4), 2, 0, shuffle=False, collate_fn=lambda samples: sum(samples))
    assert list(joined) == [1, 5]
    assert drawn(create(Numbers(3), 8, num_workers=0, shuffle=False)) == [[0, 1, 2]]
    pairs = create(TensorDataset(torch.arange(4), torch.arange(4) * 2), 4, num_workers=0, shuffle=False)
    assert [part.tolist() for part in next(iter(pairs))] == [[0, 1, 2, 3], [0, 2, 4, 6]]


def test_a_samplers_draws_are_split() -> None:
    loaders = []
    for rank in range(2):
        loader = create(Numbers(5), 2, num_workers=0, sampler=WeightedRandomSampler([1, 0, 1, 1, 1], 9), seed=3)
        loader.shard(rank, 2, fill_empty=False)
        loaders.append(loader)
    assert loaders[0].steps_per_epoch == 3
    found = [flat(drawn(loader)) for loader in loaders]
    assert len(found[0]) + len(found[1]) == 9
    assert 1 not in found[0] + found[1]


@pytest.mark.parametrize(
    ("dataset", "options", "error", "word"),
    [
        (Numbers(0), {}, DataError, "no samples"),
        ([], {}, DataError, "no samples"),
        (Numbers(3), {"batch_size": 0}, ConfigError, "batch_size"),
        (Numbers(3), {"num_workers": -1}, ConfigError, "num_workers"),
        (Numbers(3), {"num_workers": "many"}, ConfigError, "num_workers"),
        (Numbers(3), {"prefetch_factor": 0}, ConfigError, "prefetch_factor"),
        (Numbers(3), {"global_batch": 0}, ConfigError, "global_batch"),
        (Numbers(3), {"seed": -1}, ConfigError, "seed"),
        (Stream(3), {"sampler": [1, 2]}, ConfigError, "sampler"),
    ],
)
def test_impossible_loaders(dataset: Any, options: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        create(dataset, **{"batch_size": 1, **options})


def test_a_data_set_without_length_says_what_to_do() -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(DataError, match="__len__"):
        create(Endless(), 2)


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise OSError("sample 5 is unreadable")
        return index


# torch takes five seconds to end a worker that has raised.
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_workers_error_surfaces(workers: int) -> None:
    batches = iter(create(Broken(8), 2, num_workers=workers, shuffle=False))
    assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="sample 5 is unreadable"):
        next(batches)
    del batches
    gc.collect()  # the error's traceback still holds the iterator; workers forked later should not inherit it


def test_closing_ends_the_workers() -> None:
    before = set(multiprocessing.active_children())
    loader = create(Numbers(8), 2, num_workers=1)
    drawn(loader)
    assert set(multiprocessing.active_children()) - before
    loader.close()
    assert not set(multiprocessing.active_children()) - before


def mark_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.size = 100 + worker_id  # type: ignore[attr-defined]


class Sized(Numbers):
    def __getitem__(self, index: int) -> int:
        return self.size


def test_worker_init_fn_sees_the_users_data_set() -> None:
    loader = create(Sized(2), 2, num_workers=1, worker_init_fn=mark_dataset, persistent_workers=False)
    assert drawn(loader) == [[100, 100]]


# Distributed


def test_it_follows_torch_distributed_when_iteration_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = create(Numbers(8), 2, num_workers=0, shuffle=False)
    own = create(Numbers(8), 2, num_workers=0, shuffle=False, distributed=False)
    required = create(Numbers(8), 2, num_workers=0, shuffle=False, distributed=True)
    assert len(loader) == 4
    with pytest.raises(EnvironmentSetupError, match="setup_ddp"):
        iter(required)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert drawn(loader) == drawn(required) == [[2, 3], [6, 7]]
    assert flat(drawn(own)) == list(range(8))


def test_a_rank_with_samples_of_its_own_is_not_split() -> None:
    loader = create(Numbers(9), 2, num_workers=0, shuffle=False, distributed=False)
    assert loader.sampler is not None
    loader.shard(1, 2, accumulation=2)
    assert flat(drawn(loader)) == list(range(9))
    assert loader.sampler is None, "other ranks may have other numbers of steps"
    assert loader.steps_per_epoch == 3


# Worker counts


def test_automatic_worker_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frameworm.hardware.host.usable_cpus", lambda: 8)
    assert automatic_workers(Numbers(3), 1) == 4
    assert automatic_workers(Numbers(3), 2) == 3
    assert automatic_workers(Numbers(3), 4) == 1
    assert automatic_workers(Numbers(3), 8) == 0
    assert automatic_workers(Texts([1]), 1) == 0
    assert automatic_workers(Subset(Numbers(3), [0]), 1) == 4
    loader = create(Numbers(8), 2)
    assert loader.num_workers == 4
    loader.shard(0, 4)
    assert loader.num_workers == 1
    loader.shard(0, 4, 2, local_world_size=2)
    assert loader.num_workers == 3
    assert create(Numbers(8), 2, num_workers=None).num_workers == 4
    assert worker_candidates(5) == [0, 1, 2, 4]
    assert worker_candidates(0) == [0]


def test_measuring_keeps_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(workers_module.time, "perf_counter", lambda: now[0])

    def batches_of(count: int) -> Iterator[int]:
        for index in range(1000):
            now[0] += 5.0 if index < count else {0: 0.4, 1: 0.2, 2: 0.3}[count]
            yield index

    measured = measure_workers([0, 1, 2], batches_of, batches=10, limit_s=100)
    assert measured == pytest.approx({0: 0.4, 1: 0.2, 2: 0.3})
    began = now[0]
    measure_workers([0], batches_of, batches=1000, limit_s=2)
    assert now[0] - began < 3
    assert measure_workers([2], lambda count: iter([]))[2] == 0


def test_num_workers_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frameworm.hardware.host.usable_cpus", lambda: 1)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = create(Numbers(12), 2, num_workers="measure", shuffle=False)
    assert flat(drawn(loader)) == list(range(12))
    assert loader.measured is not None
    assert set(loader.measured) == {0, 1}
    assert loader.num_workers == min(loader.measured, key=loader.measured.__getitem__)
    assert torch.equal(torch.get_rng_state(), before)
    loader.close()


# Streams


@pytest.mark.parametrize("dataset", [Stream(23), Shuffled(23)])
def test_a_stream_reaches_ranks_and_workers_once(dataset: Stream) -> None:
    def of_rank(rank: int, workers: int) -> list[list[int]]:
        torch.manual_seed(rank)
        loader = create(dataset, 3, num_workers=workers, seed=2, persistent_workers=False)
        loader.shard(rank, 2)
        return drawn(loader)

    helped = [of_rank(rank, 2) for rank in range(2)]
    assert sorted(flat(helped[0] + helped[1])) == list(range(23))
    assert [len(batch) for batch in helped[0]] == [3, 3, 3, 3]
    assert [len(batch) for batch in helped[1]] == [3, 3, 3, 2]
    assert [of_rank(rank, 0) for rank in range(2)] == helped


def test_a_stream_knows_its_epoch_in_persistent_workers() -> None:
    loader = create(Stream(4), 2, num_workers=1)
    assert drawn(loader) == [[0, 1], [2, 3]]
    loader.set_epoch(3)
    assert drawn(loader) == [[3000, 3001], [3002, 3003]]
    loader.close()


def test_a_stream_resumes_by_count() -> None:
    loader = create(Stream(20), 2, num_workers=0)
    loader.shard(1, 2, accumulation=2)
    whole = drawn(loader)
    loader.seek(1)
    assert drawn(loader) == whole[2:]
    assert drawn(loader) == whole
    with pytest.raises(ConfigError, match="step"):
        loader.seek(-1)
    with pytest.raises(DataError, match="iterable"):
        loader.step_shape(0)
    assert loader.sampler is None


def test_a_stream_that_shards_itself_is_left_alone() -> None:
    loader = create(Sharded(8), 2, num_workers=2, persistent_workers=False)
    loader.shard(1, 2)
    assert drawn(loader) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def give_part(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.epoch = worker_id  # type: ignore[attr-defined]
    info.dataset.set_epoch = lambda epoch: None  # type: ignore[attr-defined]


def test_workers_given_samples_by_the_user_are_not_split_again() -> None:
    loader = create(Stream(3), 2, num_workers=2, worker_init_fn=give_part, persistent_workers=False)
    assert sorted(flat(drawn(loader))) == [0, 1, 2, 1000, 1001, 1002]


def test_length_of_a_stream() -> None:
    class Known(Stream):
        def __len__(self) -> int:
            return self.size

    for rank in range(2):
        for drop_last in (False, True):
            loader = create(Known(21), 2, num_workers=0, drop_last=drop_last)
            loader.shard(rank, 2, accumulation=2)
            assert len(loader) == len(drawn(loader))
    assert [len(batch) for batch in drawn(loader)] == [2, 2, 2, 2]
    assert loader.steps_per_epoch == 2
    with pytest.raises(TypeError):
        len(create(Stream(3), 2, num_workers=0))


def test_settings_can_be_shared() -> None:
    settings = LoaderSettings(num_workers=0, shuffle=False)
    assert drawn(OptimizedDataLoader(Numbers(3), 2, settings)) == [[0, 1], [2]]


USER = """
import os, sys, time, torch
from frameworm.distributed import OptimizedDataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return os.getpid()
if __name__ == "__main__":
    loader = OptimizedDataLoader.create(Data(), 4, num_workers=1, multiprocessing_context=sys.argv[1])
    batches = iter(loader)
    print(int(next(batches)[0]), flush=True)
    time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "forkserver", "spawn"])
def test_workers_end_with_the_process_they_work_for(way: str, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    user = subprocess.Popen([sys.executable, tmp_path / "user.py", way], stdout=subprocess.PIPE, text=True)
    with user:  # closes its pipe
        try:
            assert user.stdout is not None
            worker = psutil.Process(int(user.stdout.readline()))
        finally:
            user.kill()
    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_profiler_finds_the_loader_only_while_it_looks() -> None:
    loader = create(Numbers(12), 4, num_workers=0, shuffle=False)
    batches = iter(loader)
    first = next(batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        second = next(batches)
    assert any("DataLoader" in event.key for event in profile.key_averages())
    third = next(batches)
    assert next(batches, None) is None
    assert torch.equal(torch.cat([first, second, third]), torch.arange(12))


@pytest.mark.parametrize("make", [OptimizedDataLoader.create, OptimizedDataLoader.create_dataloader])
def test_keywords_of_torchs_loader_are_taken_or_refused_by_name(make: Any) -> None:
    data = list(range(8))
    loader = make(data, 4, num_workers=0, prefetch_factor=None, timeout=0, in_order=True, generator=None)
    assert len(list(loader)) == 2
    assert make(data, 4, timeout=7).settings.timeout_s == 7
    refused = {"generator": torch.Generator(), "batch_sampler": [[0, 1]], "in_order": False}
    for name, value in refused.items():
        with pytest.raises(ConfigError, match=name):
            make(data, 4, **{name: value})
