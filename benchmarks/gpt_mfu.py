"""GPT-2 124M on one GPU: frameworm's engine against a plain compiled loop, in tokens per second and MFU.

    PYTHONPATH=src python benchmarks/gpt_mfu.py --micro-batches 128 --accumulation 4 --rounds 5

`plain`: the same decoder by torch's own operations with GPT-2's vocabulary of 50,257, torch.compile, bf16 autocast,
fused AdamW, clipping and F.cross_entropy over whole logits, in a loop as one writes it. `frameworm`:
configs/gpt2_124m_fast.yaml through `frameworm train`'s own path, run folder and records on: vocabulary padded to
50,304, fused loss, compilation, capture, and the kernels that the model has of its own.
Both read random tokens of the 50,257. They live in processes of their own and take turns (see live.py).

FLOPs per token = 6 x parameters that multiply (the head once, embedding look-ups not) + 6 x layers x width x context:
forward and backward, causal attention counted once. The vocabulary is 50,257 for both, since padding is no work. MFU is
against the device's dense bf16 peak (hardware/devices.py); an unknown device gives null.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any
from unittest import mock

import numpy as np
import torch
from harness import (
    RESULTS,
    ContenderError,
    Measured,
    Sample,
    as_data,
    interleave,
    names_among,
    table,
    tell_progress,
    times_as_fast,
    write_results,
)
from live import Gate, Live, Plan
from peers import run_config
from torch import Tensor, nn
from torch.utils.data import DataLoader

from frameworm.config.load import load_config
from frameworm.config.schema import Config, GPTModelConfig
from frameworm.data.corpora.cache import open_store, write_store
from frameworm.data.corpora.text import LanguageData, TokenBlocks
from frameworm.hardware.devices import peak_flops
from frameworm.hardware.resolve import resolve_here
from frameworm.models import workloads
from frameworm.models.gpt import GPT

CONFIG = Path(__file__).parents[1] / "configs" / "gpt2_124m_fast.yaml"
VOCABULARY = 50257
GOAL_MFU = 0.50
DISTINCT_TOKENS = 2**22  # drawn at random, then repeated
SEED = 20


def multiplied_parameters(vocabulary: int, d_model: int, layers: int) -> int:
    """Parameters of the decoder less the position embedding; the token embedding counts once, as the head."""
    layer = 12 * d_model * d_model + 13 * d_model  # four matrices with biases, two norms
    return layers * layer + 2 * d_model + vocabulary * d_model


def flops_per_token(vocabulary: int, d_model: int, layers: int, context: int) -> int:
    """Forward and backward of one token."""
    return 6 * multiplied_parameters(vocabulary, d_model, layers) + 6 * layers * d_model * context


def model_flops_utilisation(tokens_per_s: float, flops: float, peak: float | None) -> float | None:
    """Share of the device's peak that the model's own arithmetic takes."""
    return None if peak is None else tokens_per_s * flops / peak


@dataclass(frozen=True)
class Work:
    """What both train; `tokens` is a folder with a token store."""

    overrides: tuple[str, ...]
    tokens: str
    micro_batch: int
    accumulation: int
    workers: int
    mode: str

    def config(self) -> Config:
        """The fast config with the overrides."""
        return load_config(CONFIG, self.overrides)


def write_tokens(folder: Path, blocks: int, context: int, vocabulary: int = VOCABULARY) -> None:
    """A store of random tokens, enough for so many blocks."""
    drawn = np.random.default_rng(SEED).integers(0, vocabulary, DISTINCT_TOKENS, dtype=np.uint16)
    needed = blocks * context + 1
    folder.mkdir()
    meta = {"vocab_size": vocabulary, "pad_id": 0, "num_classes": 0}
    write_store(folder, meta, lambda writer: writer.append([np.resize(drawn, needed)]))


def plain(gate: Gate, work: Work) -> dict[str, Any]:
    """The loop as one writes it."""
    config = resolve_here(work.config(), 1)
    settings, training, device = config.model, config.training, gate.device
    assert isinstance(settings, GPTModelConfig)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(config.seed)
    model = GPT(
        VOCABULARY,
        d_model=settings.d_model,
        n_heads=settings.n_heads,
        num_layers=settings.num_layers,
        max_seq_len=settings.max_seq_len,
        dropout=settings.dropout,
        fused_loss=False,
    ).to(device)
    for layer in model.layers:
        layer.own_kernels = False  # type: ignore[assignment]
    compiled: nn.Module = model if work.mode == "off" else torch.compile(model, mode=work.mode)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.lr, betas=training.betas, weight_decay=training.weight_decay, fused=True
    )
    loader = DataLoader(
        TokenBlocks(open_store(Path(work.tokens)), settings.max_seq_len),
        batch_size=work.micro_batch,
        num_workers=work.workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
        collate_fn=_as_it_is,
    )
    loss = torch.zeros(())
    while gate.open:
        for group in gate.batches(_groups(loader, work.accumulation)):
            for host_batch in group:
                batch = {name: tensor.to(device, non_blocking=True) for name, tensor in host_batch.items()}
                with torch.autocast(device.type, torch.bfloat16):
                    loss = compiled(batch["input_ids"], batch["targets"])
                (loss / work.accumulation).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm or float("inf"))
            optimizer.step()
            optimizer.zero_grad()
    return {"settings": f"bf16, torch.compile {work.mode}, fused AdamW", "loss": float(loss), **_memory(device)}


def frameworm(gate: Gate, work: Work) -> dict[str, Any]:
    """The engine from the fast config; only the tokens come from elsewhere."""

    def random_tokens(data: Any, *, max_seq_len: int, **more: Any) -> LanguageData:
        store = open_store(Path(work.tokens))
        return LanguageData(TokenBlocks(store, max_seq_len), TokenBlocks(store, max_seq_len, limit=1), VOCABULARY)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(workloads, "load_language_modelling", random_tokens),
    ):
        facts = run_config(gate, Path(folder), work.config(), lambda model: None)
    return {**facts, **_memory(gate.device)}


CONTENDERS = {"plain": plain, "frameworm": frameworm}


def _groups(batches: Iterable[dict[str, Tensor]], size: int) -> Iterator[list[dict[str, Tensor]]]:
    iterator = iter(batches)
    while len(group := list(islice(iterator, size))) == size:
        yield group


def _as_it_is(batch: Any) -> Any:
    return batch


def _memory(device: torch.device) -> dict[str, Any]:
    return {"peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None}


def measure(
    work: Work, names: list[str], plan: Plan, rounds: int, device: str, folder: Path, limit_s: float, deadline: float
) -> tuple[dict[str, Measured], dict[str, dict[str, Any]], dict[str, str]]:
    """Both contenders on one micro-batch: rounds, what each said about itself, and failures."""
    failures: dict[str, str] = {}
    lives: dict[str, Live] = {}
    said: dict[str, dict[str, Any]] = {}
    warmups: dict[str, Sample] = {}
    measured: dict[str, Measured] = {}
    try:
        for name in names:
            # One after the other: both come near the end of the memory while they compile.
            tell_progress(f"starting {name}, micro-batch {work.micro_batch}")
            lives[name] = Live(name, CONTENDERS[name], (work,), plan, device, folder, limit_s)
            try:
                said[name] = lives[name].wait_ready()
                warmups[name] = lives[name].block()
            except ContenderError as error:
                failures[name] = str(error)
                tell_progress(f"{name} failed: {error}")
                lives[name].end()
        if warmups:
            measured = interleave(
                {name: lives[name].block for name in warmups},
                rounds,
                tell_progress,
                warmups=warmups,
                failures=failures,
                may_go_on=lambda: monotonic() < deadline,
            )
        for name, item in measured.items():
            try:
                said[name].update(lives[name].finish(early=len(item.rounds) + 1 < plan.blocks))
            except ContenderError as error:
                said[name]["ending_failed"] = str(error)
    finally:
        for live in lives.values():
            live.end()
    return {name: item for name, item in measured.items() if item.rounds}, said, failures


def summarise(
    measured: dict[str, Measured], said: dict[str, dict[str, Any]], tokens: int, flops: int, peak: float | None
) -> dict[str, dict[str, Any]]:
    """The figures of each contender; `tokens` of one step."""
    figures = {}
    for name, item in measured.items():
        rate = tokens / item.step_s
        against = as_data(times_as_fast(item, measured["plain"])) if "plain" in measured else None
        figures[name] = {
            "tokens_per_s": rate,
            "mfu": model_flops_utilisation(rate, flops, peak),
            "step_ms": item.step_s * 1e3,
            "times_as_fast_as_plain": against,
            **said.get(name, {}),
            "rounds": [as_data(sample) for sample in item.rounds],
        }
    return figures


def draw(figures: dict[str, dict[str, Any]], failures: dict[str, str]) -> str:
    """The table of one micro-batch."""
    columns = ("contender", "tokens/s", "MFU", "ms/step", "x plain", "95%", "peak GB", "warm-up s")
    rows = []
    for name, item in figures.items():
        times, mfu, peak = item["times_as_fast_as_plain"], item["mfu"], item.get("peak_bytes")
        rows.append(
            (
                name,
                f"{item['tokens_per_s']:,.0f}",
                "-" if mfu is None else f"{mfu:.1%}",
                f"{item['step_ms']:.1f}",
                "" if times is None else f"{times['value']:.3f}",
                "" if times is None else f"{times['low']:.3f}..{times['high']:.3f}",
                "-" if peak is None else f"{peak / 1e9:.1f}",
                f"{item['warmup_s']:.1f}",
            )
        )
    rows += [(name, "failed", *[""] * (len(columns) - 2)) for name in failures]
    return "\n".join([table(columns, rows), *(f"  {name}: {text}" for name, text in failures.items())])


def main() -> int:
    """Run the micro-batches asked for."""
    arguments = _arguments()
    deadline = monotonic() + arguments.budget_s
    plan = Plan(arguments.warmup, arguments.lead_in, arguments.steps, arguments.rounds + 1)
    device = torch.device(arguments.device)
    peak = peak_flops(torch.cuda.get_device_name(device), "bf16") if device.type == "cuda" else None
    model = load_config(CONFIG, arguments.set).model
    assert isinstance(model, GPTModelConfig)
    context = model.max_seq_len
    flops = flops_per_token(VOCABULARY, model.d_model, model.num_layers, context)
    results: dict[str, Any] = {"flops_per_token": flops, "peak_flops": peak, "micro_batches": {}}
    settings = {
        "config": "configs/gpt2_124m_fast.yaml",
        "overrides": arguments.set,
        "context": context,
        "accumulation": arguments.accumulation,
        "rounds": arguments.rounds,
        "warmup_steps": plan.warmup,
        "steps": plan.steps,
        "plain_mode": arguments.plain_mode,
    }
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        for micro_batch in arguments.micro_batches:
            batch = micro_batch * arguments.accumulation
            tokens_at = Path(folder) / f"tokens-{micro_batch}"
            write_tokens(tokens_at, (plan.total + 1) * batch, context)
            overrides = [
                *arguments.set,
                f"gpu.device={arguments.device}",
                f"data.root={tokens_at}",
                f"training.micro_batch={micro_batch}",
                f"training.global_batch={batch}",
                f"training.max_steps={plan.total}",
            ]
            work = Work(
                tuple(overrides),
                str(tokens_at),
                micro_batch,
                arguments.accumulation,
                arguments.workers,
                arguments.plain_mode,
            )
            measured, said, failures = measure(
                work,
                arguments.contenders,
                plan,
                arguments.rounds,
                arguments.device,
                Path(folder),
                arguments.limit_s,
                deadline,
            )
            figures = summarise(measured, said, batch * context, flops, peak)
            results["micro_batches"][str(micro_batch)] = {"contenders": figures, "failed": failures}
            # After each: a later one may take the machine down.
            path = write_results("gpt_mfu", device, settings, results, arguments.out)
            print(f"\nmicro-batch {micro_batch} x {arguments.accumulation}, context {context}")
            print(draw(figures, failures), flush=True)
            fine &= not failures
            mfu = figures.get("frameworm", {}).get("mfu")
            if mfu is not None:
                print(f"goal: {GOAL_MFU:.0%} MFU: {'met' if mfu >= GOAL_MFU else 'missed'}")
    print(f"written to {path}")
    return 0 if fine else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--micro-batches", type=_numbers, default=[64], help="sequences per pass, comma between")
    add("--accumulation", type=int, default=1, help="passes per step")
    add("--contenders", type=names_among(CONTENDERS), default=list(CONTENDERS), help="names, comma between")
    add("--rounds", type=int, default=5, help="rounds that count")
    add("--steps", type=int, default=20, help="timed steps of a block")
    add("--lead-in", type=int, default=3, help="steps at the beginning of each block that are not timed")
    add("--warmup", type=int, default=20, help="steps before the first block")
    add("--plain-mode", choices=("default", "reduce-overhead", "max-autotune", "off"), default="default")
    add("--workers", type=int, default=2, help="loader processes of the plain loop")
    add("--budget-s", type=float, default=1e9, help="no new round after so many seconds")
    add("--limit-s", type=float, default=300.0, help="a contender that is silent for so long has failed")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to see that the script works")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for both")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    return arguments


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
