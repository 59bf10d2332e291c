"""Small trainings whose losses are stored, and the code that runs and compares them.

A golden holds what frameworm does today, so that code can move without changing behaviour. Everything here uses public
entrances only: `frameworm`, `frameworm.distributed`, `frameworm.cli.main:app` and the command line.

Rewrite a golden (`python tests/golden/write.py [part ...]`) only when a change of behaviour is intended, and say so in
the commit. A golden that fails after code was only moved has found a bug.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import frameworm
from frameworm.cli.main import app

HERE = Path(__file__).parent
STORED = HERE / "stored"
LOSSES = STORED / "losses.json"
QUICKSTART = HERE.parents[1] / "configs" / "quickstart.yaml"
RELATIVE_TOLERANCE, BF16_TOLERANCE = 1e-3, 1e-2  # on other machines than the one that wrote the goldens
DEADLINE_S = 500.0

# Output that depends on neither the terminal nor its width.
PLAIN = {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}

Settings = dict[str, Any]

# ---------------------------------------------------------------------------------------------------------------------
# Data: small files that every test writes anew into its working folder. Configs name them by relative paths.

_WORDS = (
    "goal team match season coach bread butter oven sugar recipe bank loan market profit budget rain storm cloud frost "
    "forecast the of and to in that was for on with as at by this from had were one which said their all would what so "
    "out about who when some no more time into than then other now over first only new after most"
)
WORDS = _WORDS.split()
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TOPIC_WORDS = 5  # the first words belong to four topics of five words each
TRAINING_SAMPLES, VALIDATION_SAMPLES = 96, 24


def write_data(folder: Path) -> None:
    """Write the data set of the cases, its vocabulary and a text for gpt into `folder/data`."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    uniform = random.Random("golden").random  # Python promises to keep the stream of this method only
    for name, count in (("train.csv", TRAINING_SAMPLES), ("test.csv", VALIDATION_SAMPLES)):
        rows = []
        for _ in range(count):
            topic = int(4 * uniform())
            words = [WORDS[int(len(WORDS) * uniform())] for _ in range(3 + int(18 * uniform() ** 2))]
            words[int(len(words) * uniform())] = WORDS[topic * TOPIC_WORDS + int(TOPIC_WORDS * uniform())]
            rows.append(f'"{topic + 1}","{words[0]}","{" ".join(words[1:])}"\n')
        (data / name).write_text("".join(rows), encoding="utf-8")
    (data / "vocab.txt").write_text("".join(f"{word}\n" for word in (*SPECIAL, *WORDS)), encoding="utf-8")
    text = " ".join(WORDS[int(len(WORDS) * uniform())] for _ in range(900))
    (data / "text.txt").write_text(text + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Cases that a config describes: settings over configs/quickstart.yaml.

SMALL: Settings = {
    "name": "golden",
    "seed": 5,
    "model.d_model": 32,
    "model.n_heads": 4,
    "model.num_layers": 2,
    "model.dim_feedforward": 64,
    "model.max_seq_len": 16,
    "data.dataset": "ag_news",
    "data.root": "data",
    "data.tokenizer": "data/vocab.txt",
    "data.cache_dir": "cache",
    "training.epochs": 2,
    "training.max_steps": 8,
    "training.global_batch": 16,
    "training.cpu_threads": 1,
    "checkpoint.every_steps": "off",
    "checkpoint.mode": "sync",
    "observe.system_interval_s": "off",
    "observe.progress": "false",
}
GPT: Settings = {
    "workload": "gpt",
    "model.dim_feedforward": None,  # not a key of gpt
    "data.dataset": "text",
    "data.root": "data/text.txt",
    "data.tokenizer": "bytes",
    "training.global_batch": 8,
}

SINGLE: dict[str, Settings] = {
    "padded": {},
    "bucketed": {"data.batching": "bucketed", "training.schedule": "cosine", "training.warmup": 0.25},
    "packed": {"data.batching": "packed", "training.schedule": "linear"},
    "packed_unbalanced": {"data.batching": "packed", "data.balance": "false", "data.drop_last": "true"},
    "gpt": GPT,
    "gpt_fused_loss": {**GPT, "model.fused_loss": "true", "model.dropout": 0.1},
    # 44 samples in steps of 4 micro-batches of 4: the last step of an epoch has 3 micro-batches.
    "accumulation_short_group": {"data.limit": 44, "training.micro_batch": 4, "training.max_steps": 6},
    "accumulation_packed": {"data.batching": "packed", "data.limit": 44, "training.micro_batch": 4},
    "bf16": {"gpu.mixed_precision": "bf16"},
    "bf16_half_residual": {"gpu.mixed_precision": "bf16", "model.residual": "half", "data.batching": "packed"},
    "recompute_full": {"memory.activation_checkpointing": "full", "model.dropout": 0.2},
    "recompute_selective": {"memory.activation_checkpointing": "selective"},
    "sgd_constant": {
        "training.optimizer": "sgd",
        "training.schedule": "constant",
        "training.clip_norm": "off",
        "training.weight_decay": 0.1,
        "training.lr": 0.1,
    },
    "adamw_betas_sqrt_scaling": {
        "training.betas": "[0.8, 0.95]",
        "training.weight_decay": 0.2,
        "training.lr_scaling": "sqrt",
        "training.base_batch": 4,
        "training.clip_norm": 0.05,
    },
    "dropout": {"model.dropout": 0.3},
    "workers": {"data.num_workers": 2},
    "host_kernels": {"training.cpu_gelu": "keep_slope", "training.cpu_onednn": "except_linear"},
    "not_shuffled_padded_to_max": {"data.shuffle": "false", "data.pad_to": "max", "gpu.fused_optimizer": "false"},
    "generated": {  # the data set of the quickstart, with a vocabulary that is trained on it
        "data.dataset": "generated",
        "data.root": "off",
        "data.tokenizer": "auto",
        "data.vocab_size": 256,
        "data.limit": 96,
    },
    "own_workload": {"workload": "golden_cases:own_workload", "model.width": 12},
}
PAIR: dict[str, Settings] = {
    "ddp": {},
    "ddp_accumulation": {"data.limit": 44, "training.micro_batch": 4, "data.batching": "bucketed"},
    "ddp_packed_dropout": {"data.batching": "packed", "model.dropout": 0.1},
    "ddp_gpt_bf16": {**GPT, "gpu.mixed_precision": "bf16"},
    "ddp_local_sgd": {"parallel.sync_every": 3},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2"},
    "zero2_accumulation": {"parallel.strategy": "zero2", "data.limit": 44, "training.micro_batch": 4},
    "zero3": {"parallel.strategy": "zero3"},
    "zero3_recompute_sgd": {
        "parallel.strategy": "zero3",
        "memory.activation_checkpointing": "full",
        "training.optimizer": "sgd",
    },
    "ddp_int8": {"parallel.compression": "int8"},
    "ddp_int4_stochastic": {"parallel.compression": "int4", "parallel.rounding": "stochastic"},
    "ddp_topk": {"parallel.compression": "topk", "parallel.compression_ratio": 0.05},
    "ddp_powersgd": {"parallel.compression": "powersgd", "parallel.powersgd_rank": 2},
}


def overrides(settings: Settings) -> list[str]:
    """The `--set` values of a case."""
    merged = {**SMALL, **settings}
    if ":" in str(merged.get("workload", "")):  # sections of the built-in models and data do not belong to it
        merged = {key: value for key, value in merged.items() if not key.startswith("model.") or key in settings}
    return [f"{key}={value}" for key, value in merged.items() if value is not None]


class Losses(frameworm.Callback):
    """Collects the loss of every step of this rank."""

    def __init__(self) -> None:
        self.values: list[float | None] = []

    def on_step(self, step: Any) -> None:
        """Keep the loss of one step."""
        self.values.append(step.loss)


def _hex(value: float | None) -> str | None:
    return None if value is None else float(value).hex()


def result_of(losses: Losses, record: frameworm.RunRecord) -> dict[str, Any]:
    """What is stored of one rank of a training."""
    return {
        "losses": [_hex(value) for value in losses.values],
        "train_loss": _hex(record.quality.train_loss),
        "val_loss": _hex(record.quality.val_loss),
    }


def load(settings: Settings) -> frameworm.Config:
    """The config of a case."""
    if settings.get("workload", "text_classifier") == "text_classifier":
        return frameworm.load_config(QUICKSTART, overrides(settings))
    # Another workload has another model section; the file's does not fit it.
    config = Path("other.yaml")
    config.write_text("gpu: {device: cpu}\ndata: {num_workers: 0}\n", encoding="utf-8")
    return frameworm.load_config(config, overrides(settings))


def run_config(settings: Settings, out: Path | None = None) -> dict[str, Any]:
    """Train a case in the working folder."""
    losses = Losses()
    record = frameworm.run(load(settings), out=out, callbacks=[losses])
    return result_of(losses, record)


# ---------------------------------------------------------------------------------------------------------------------
# A model, data and cases of one's own.


class Net(nn.Module):
    """Layers that can be recomputed, buffers, and dropout."""

    def __init__(self, width: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores of three classes."""
        hidden = self.norm(self.first(inputs))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        scores: Tensor = self.head(self.dropout(hidden))
        return scores


def points(count: int, seed: int) -> torch.utils.data.TensorDataset:
    """Samples of three classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))


def own_workload(config: Any) -> frameworm.Workload:
    """A workload of one's own."""
    return frameworm.Workload(Net(config.model.width), points(52, 1), points(16, 2))


def _loader(count: int, batch_size: int, shuffle: bool) -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(9)
    return torch.utils.data.DataLoader(points(count, 1), batch_size, shuffle=shuffle, generator=generator)


TRAINER_RUN = Path("trainer-run")


def _trainer_plain() -> dict[str, Any]:
    """A plain DataLoader, torch's scheduler, accumulation with a short last group, cross-entropy by default."""
    torch.manual_seed(3)
    model, losses = Net(), Losses()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = frameworm.Trainer(
        model,
        optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        callbacks=[losses],
        run_dir=TRAINER_RUN,
        device="cpu",
        accumulation=3,
        clip_norm=0.5,
        every_steps=4,
        mode="sync",
        seed=7,
        cpu_threads=1,
        progress=False,
    )
    return result_of(losses, trainer.train(_loader(52, 4, True), _loader(20, 8, False), epochs=2))


def _summed(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets), (targets != 1).sum() + 1


def _trainer_own_loss() -> dict[str, Any]:
    """A loss with a count of its own, Adagrad, bf16, recomputed layers and dropout."""
    torch.manual_seed(4)
    model, losses = Net(dropout=0.2), Losses()
    trainer = frameworm.Trainer(
        model,
        torch.optim.Adagrad(model.parameters(), lr=0.05),
        _summed,
        callbacks=[losses],
        run_dir=None,
        device="cpu",
        seed=8,
        accumulation=2,
        cpu_threads=1,
        progress=False,
    )
    trainer.enable_mixed_precision().enable_gradient_checkpointing()
    return result_of(losses, trainer.train(_loader(40, 4, True), epochs=2))


def _distributed_trainer() -> dict[str, Any]:
    """`DistributedTrainer` over a plain DataLoader, which it divides among the ranks."""
    from frameworm.distributed import DistributedTrainer

    torch.manual_seed(3)
    model, losses = Net(), Losses()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = DistributedTrainer(
        model,
        optimizer,
        gradient_accumulation_steps=2,
        callbacks=[losses],
        run_dir=None,
        device="cpu",
        seed=7,
        cpu_threads=1,
        progress=False,
    )
    return result_of(losses, trainer.train(_loader(52, 4, True), _loader(20, 8, False), epochs=2))


def _zero_optimizer() -> dict[str, Any]:
    """A training loop of one's own around `ZeROStage1Optimizer` and `enable_gradient_compression`."""
    import torch.distributed as dist

    from frameworm.distributed import ZeROStage1Optimizer, enable_gradient_compression

    torch.manual_seed(3)
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(Net())
    enable_gradient_compression(model, rank, method="int8")
    optimizer = ZeROStage1Optimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.02)
    inputs, targets = points(48, 1).tensors
    losses = []
    for step in range(6):
        part = slice(8 * step + 4 * rank, 8 * step + 4 * rank + 4)
        loss = nn.functional.cross_entropy(model(inputs[part]), targets[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": [_hex(value) for value in losses]}


SINGLE_CODE: dict[str, Callable[[], dict[str, Any]]] = {
    "trainer_plain": _trainer_plain,
    "trainer_own_loss": _trainer_own_loss,
}
PAIR_CODE: dict[str, Callable[[], dict[str, Any]]] = {
    "distributed_trainer": _distributed_trainer,
    "zero_optimizer_int8": _zero_optimizer,
}
# Cases by the processes that run them, one after the other.
GROUPS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "single": {**{name: lambda s=settings: run_config(s) for name, settings in SINGLE.items()}, **SINGLE_CODE},
    "pair": {**{name: lambda s=settings: run_config(s) for name, settings in PAIR.items()}, **PAIR_CODE},
}
WORLD_SIZES = {"single": 1, "pair": 2}
DROPOUT = {*(name for name, settings in {**SINGLE, **PAIR}.items() if "model.dropout" in settings), "trainer_own_loss"}

# ---------------------------------------------------------------------------------------------------------------------
# Stored runs: folders that an earlier version wrote and that must stay readable and resumable.

STORED_RUNS = STORED / "runs"
TINY: Settings = {
    "model.d_model": 6,
    "model.n_heads": 2,
    "model.num_layers": 1,
    "model.dim_feedforward": 12,
    "model.dropout": 0.1,
    "training.max_steps": "off",
    "checkpoint.keep": 1,
}
RUN_KINDS: dict[str, Settings] = {
    "single": {"data.batching": "packed", "observe.system_interval_s": 0.05},
    "zstd": {"checkpoint.compression": "zstd", "gpu.mixed_precision": "bf16"},
    "ddp": {"observe.system_interval_s": 0.05},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3"},
    "compressed": {"parallel.compression": "int8"},
}
ALONE = ("single", "zstd")
TOGETHER = tuple(kind for kind in RUN_KINDS if kind not in ALONE)  # with two ranks
EPOCH_STEPS = 6  # of 12
STOP_AFTER = 3  # ranks stop a few steps after the signal, at a step that all agree on


class Stop(Losses):
    """Has the system tell this process to stop, as a scheduler does that wants the machine back."""

    def on_step(self, step: Any) -> None:
        """Send the signal after one of the steps."""
        super().on_step(step)
        if step.step == STOP_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)


def start_run(kind: str) -> dict[str, Any]:
    """Train a run of a kind until it is told to stop and has saved its state; its folder is `runs/<kind>`."""
    losses = Stop()
    try:
        frameworm.run(load({**TINY, **RUN_KINDS[kind]}), out=Path("runs") / kind, callbacks=[losses])
    except Exception as stop:
        record = getattr(stop, "record", None)  # of an interruption, not of a failure
        if record is None or record.status != "preempted":
            raise
        assert record.steps % EPOCH_STEPS > 0, "the run must stop within an epoch"
        return {**result_of(losses, record), "steps": record.steps}
    raise RuntimeError(f"{kind} ended before it could be stopped")


def resume_run(kind: str) -> dict[str, Any]:
    """Go on with the run in `runs/<kind>` to its end; returns the losses of the added steps."""
    losses = Losses()
    record = frameworm.run(load({**TINY, **RUN_KINDS[kind]}), resume=Path("runs") / kind, callbacks=[losses])
    return {**result_of(losses, record), "steps": record.steps}


def command(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and standard output of `frameworm ARGUMENTS...`, run within this process."""
    ended = CliRunner().invoke(app, [str(argument) for argument in arguments], env=PLAIN)
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise RuntimeError(f"frameworm {arguments}: {ended.exception}") from ended.exception
    return ended.exit_code, ended.stdout


_ALL = {**SINGLE, **PAIR, **RUN_KINDS}
BF16 = {*(name for name, settings in _ALL.items() if "gpu.mixed_precision" in settings), "trainer_own_loss"}


def read_run(kind: str) -> dict[str, Any]:
    """What the verbs that read a run folder find in `runs/<kind>`."""
    folder, weights = Path("runs") / kind, Path(f"{kind}.safetensors")
    code, diagnosis = command("diagnose", folder, "--json")
    told = json.loads(diagnosis)
    diagnosed = {"exit_code": code, **{name: told[name] for name in ("status", "steps", "verdict")}}
    listed = {row["run"]: row for row in json.loads(command("runs", "runs", "--json")[1])}
    row = listed[str(folder)]
    command("export", folder, "--out", weights)
    tensors = load_file(weights)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.ndim else tensor.numpy().tobytes())
    result = {
        "diagnose": diagnosed,
        "runs": {name: row[name] for name in ("status", "steps")},
        "exported_tensors": len(tensors),
        "exported_sha256": digest.hexdigest(),
    }
    scored = json.loads(command("evaluate", folder, "--json")[1])
    result["evaluate"] = {"step": scored["step"], "samples": scored["samples"], "loss": _hex(scored["loss"])}
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Processes that run tasks one after the other: see `perform`.


def perform(task: str) -> dict[str, Any]:
    """Run one task in this process and working folder.

    Args:
        task: `case:NAME`, `start:KIND`, `resume:KIND` or `read:KIND`, or `verb:NAME` of `golden_outlines`.
    """
    verb, _, name = task.partition(":")
    if verb == "case":
        return next(cases[name] for cases in GROUPS.values() if name in cases)()
    if verb == "verb":
        from golden_outlines import VERBS  # it imports this module

        return dict(VERBS[name]())
    return {"start": start_run, "resume": resume_run, "read": read_run}[verb](name)


def run_tasks(tasks: Sequence[str], world_size: int, folder: Path, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Run tasks in `world_size` new processes with one thread each.

    Returns:
        For each task the results of its ranks, in order.

    Raises:
        RuntimeError: A task failed, or time was up.
    """
    write_data(folder)
    out = folder / "results"
    out.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE / "golden_worker.py"), str(world_size), str(out), *tasks]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FRAMEWORM_", "SLURM_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**inherited, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _end(process)
        said, _ = process.communicate()
        raise RuntimeError(f"{tasks} were still running after {deadline_s} s\n{said}") from None
    finally:
        _end(process)
    if process.returncode != 0:
        raise RuntimeError(f"{tasks} failed with exit code {process.returncode}\n{said}")
    ranks = [json.loads((out / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(world_size)]
    return {task: [results[task] for results in ranks] for task in tasks}


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and what it started, if any of it is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def run_group(group: str, folder: Path) -> dict[str, Any]:
    """Results of all cases of a group by name."""
    tasks = [f"case:{name}" for name in GROUPS[group]]
    results = run_tasks(tasks, WORLD_SIZES[group], folder)
    return {task.partition(":")[2]: ranks for task, ranks in results.items()}


def run_kinds(verb: str, kinds: Sequence[str], folder: Path, world_size: int = 1) -> dict[str, Any]:
    """Start, resume or read the runs of some kinds in `folder/runs`; returns the results of the ranks by kind."""
    results = run_tasks([f"{verb}:{kind}" for kind in kinds], world_size, folder)
    return {task.partition(":")[2]: ranks for task, ranks in results.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Comparison.


def fingerprint() -> dict[str, Any]:
    """What decides the last bits of a result: the library's version and the instructions its kernels use."""
    name, flags = None, ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = value.strip()
    except OSError:
        name = platform.processor() or None
    return {
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "tokenizers": _version("tokenizers"),
        "machine": platform.machine(),
        "cpu_model": name,
        "cpu_flags_sha256": hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,  # of every process that `run_tasks` starts
    }


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def stored_losses(section: str) -> dict[str, Any]:
    """The stored results of a section, `cases` or `resumed`."""
    section_results: dict[str, Any] = json.loads(LOSSES.read_text(encoding="utf-8"))[section]
    return section_results


def differences(found: dict[str, Any], expected: dict[str, Any], drawn: Collection[str] = ()) -> list[str]:
    """Say in which results two sets of trainings differ, or nothing if they agree.

    On the machine that wrote the goldens (by `fingerprint`) numbers must be equal bit for bit: one process, one thread,
    the same kernels in the same order. Another machine has other kernels, which add up in another order, and a few
    steps of training amplify that; there the losses must agree to a relative 1e-3 (bf16: 1e-2), which a wrong learning
    rate, batch, weight or seed exceeds in one or two steps. AVX2 instead of AVX-512 changes them by 4e-7 (bf16: 8e-4).

    Args:
        drawn: Names of results that depend on dropout. Another architecture draws other masks from the same seed, so
            they are compared on the architecture of the golden only.
    """
    here, there = fingerprint(), json.loads(LOSSES.read_text(encoding="utf-8"))["fingerprint"]
    told = [f"{name}: was not run" for name in sorted(expected.keys() - found.keys())]
    for name, ranks in found.items():
        if name not in expected:
            told.append(f"{name}: is not stored; run tests/golden/write.py")
        elif name not in drawn or here["machine"] == there["machine"]:
            tolerance = BF16_TOLERANCE if name in BF16 else RELATIVE_TOLERANCE
            unequal = _unequal(ranks, expected[name], 0.0 if here == there else tolerance)
            told += [f"{name}{place}" for place in unequal]
    return told


def _unequal(found: Any, expected: Any, tolerance: float) -> list[str]:
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        parts = [(f"[{index}]", *pair) for index, pair in enumerate(zip(found, expected))]
    elif isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        parts = [(f".{key}", found[key], expected[key]) for key in expected]
    elif found == expected or (tolerance and _close(found, expected, tolerance)):
        return []
    else:
        return [f": {_shown(found)} instead of {_shown(expected)}"]
    return [place + more for place, *pair in parts for more in _unequal(*pair, tolerance)]


def _number(value: Any) -> float | None:
    """The number in a text of `float.hex`; None for anything else."""
    is_number = isinstance(value, str) and value.lstrip("-").startswith("0x")
    return float.fromhex(value) if is_number else None


def _close(found: Any, expected: Any, tolerance: float) -> bool:
    first, second = _number(found), _number(expected)
    return first is not None and second is not None and math.isclose(first, second, rel_tol=tolerance)


def _shown(value: Any) -> str:
    number = _number(value)
    return str(value) if number is None else f"{number} ({value})"
