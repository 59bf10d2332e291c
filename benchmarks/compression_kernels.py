"""What the codecs of gradient compression cost on a GPU, pass by pass, in milliseconds and GB/s beside a plain copy.

    PYTHONPATH=src python benchmarks/compression_kernels.py --rounds 15

`kernels`: frameworm's triton kernels, as the hooks call them. `eager`: the plain torch path of the same codecs, which
is what runs without triton. `compiled`: the same arithmetic written as expressions, for torch.compile to fuse. All
work on the same fp32 gradients of GPT-2 124M's size, with error feedback. The passes:

- encode: gradients + residual into the payload, and the new residual
- reduce@n: the payloads of n ranks for the own n-th of the gradients into the payload of their mean, and the residual
- add@n (top-k): decode of the own payload and n - 1 payloads added to it
- decode: the payload into fp32 gradients
- whole@n: encode, reduce@n (or add@n) and decode, one after the other; this is what the goals are about

GB/s are the bytes a pass has to read and write at least, over its time; the copy's are those of the same round. Times
are CUDA events around `--repeats` launches; contenders take turns. `--tiles` and `--topk-tiles` time other shapes of
the kernels beside the shipped ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from harness import (
    RESULTS,
    Interval,
    Measured,
    Sample,
    as_data,
    bootstrap_median,
    interleave,
    names_among,
    table,
    tell_progress,
    timed,
    times_as_fast,
    write_results,
)
from torch import Tensor

from frameworm.parallel.compression import codecs, quantize, sparse
from frameworm.parallel.compression.codecs import Codec
from frameworm.parallel.compression.quantize import Quantizer
from frameworm.parallel.compression.registry import make_codec
from frameworm.parallel.compression.sparse import TopK

COUNT = 124_439_808
GOALS_MS = {"int8": 0.8, "int4": 0.7, "topk": 1.0}
CODECS = ("int8", "int4", "topk")
PATHS = ("kernels", "eager", "compiled")
SEED = 20


@dataclass
class Case:
    """One codec, its tensors, and the payloads of as many ranks as are asked for."""

    codec: Codec
    values: Tensor
    residual: Tensor
    payload: Tensor
    out: Tensor
    shards: dict[int, Shard] = field(default_factory=dict)


@dataclass
class Shard:
    """The own part of the gradients at one world size, and what the ranks sent for it."""

    count: int
    payloads: Tensor
    payload: Tensor
    residual: Tensor


def make_case(name: str, count: int, worlds: list[int], device: torch.device) -> Case:
    """Gradients of uneven size from block to block, and payloads of them."""
    generator = torch.Generator(device).manual_seed(SEED)
    values = torch.randn(count, generator=generator, device=device)
    values *= torch.rand(count, generator=generator, device=device) * 1e-3
    codec = make_codec(name)
    residual = torch.zeros(count, device=device)
    payload = torch.empty(codec.encoded_bytes(count), dtype=torch.uint8, device=device)
    case = Case(codec, values, residual, payload, torch.empty_like(values))
    for world in worlds:
        # Whole blocks to each rank, as the hook does it; top-k's payloads are all of the whole.
        blocks = -(-count // codec.granularity)
        part = min(count, -(-blocks // world) * codec.granularity) if name != "topk" else count
        payloads = torch.empty(world, codec.encoded_bytes(part), dtype=torch.uint8, device=device)
        for rank in range(world):
            start = min(rank * part, count - part)
            codec.encode(values[start : start + part].roll(rank), payloads[rank])
        case.shards[world] = Shard(part, payloads, torch.empty_like(payloads[0]), torch.zeros(part, device=device))
    return case


def own_passes(case: Case) -> dict[str, Callable[[], None]]:
    """The passes by the codec's own methods, with or without kernels."""
    codec = case.codec

    def encode() -> None:
        codec.encode(case.values, case.payload, case.residual)

    def decode() -> None:
        codec.decode(case.payload, case.out)

    def combine(shard: Shard) -> None:
        if isinstance(codec, Quantizer):
            codec.reduce_mean(shard.payloads, shard.payload, shard.count, shard.residual)
            return
        codec.decode(shard.payloads[0], case.out)
        for payload in shard.payloads[1:]:
            codec.decode_add(payload, case.out)

    return named_passes(case, encode, combine, decode)


def named_passes(
    case: Case, encode: Callable[[], None], combine: Callable[[Shard], None], decode: Callable[[], None]
) -> dict[str, Callable[[], None]]:
    """The passes by the names they have in the table."""
    sparse_codec = isinstance(case.codec, TopK)
    passes: dict[str, Callable[[], None]] = {"encode": encode, "decode": decode}
    for world, shard in case.shards.items():

        def alone(shard: Shard = shard) -> None:
            combine(shard)

        def whole(shard: Shard = shard) -> None:
            encode()
            combine(shard)
            if not sparse_codec:
                decode()

        passes[f"{'add' if sparse_codec else 'reduce'}@{world}"] = alone
        passes[f"whole@{world}"] = whole
    return passes


def needed_bytes(case: Case) -> dict[str, float]:
    """What each pass has to read and write at least."""
    count, size = case.values.numel(), case.payload.numel()
    needed: dict[str, float] = {"encode": 12 * count + size, "decode": 4 * count + size}
    for world, shard in case.shards.items():
        received = shard.payloads.numel()
        if isinstance(case.codec, TopK):
            # An added value is read and written, in sectors of 32 bytes where they lie apart; counted as 4.
            columns = case.codec.columns(count)
            needed[f"add@{world}"] = 4 * count + received + 8 * columns * (world - 1)
            needed[f"whole@{world}"] = needed["encode"] + needed[f"add@{world}"]
        else:
            needed[f"reduce@{world}"] = received + shard.payload.numel() + 8 * shard.count
            needed[f"whole@{world}"] = needed["encode"] + needed[f"reduce@{world}"] + needed["decode"]
    return needed


def quantized_expressions(case: Case) -> dict[str, Callable[[], None]]:
    """The quantizer as expressions that torch.compile can fuse; gradients in whole blocks."""
    codec = case.codec
    assert isinstance(codec, Quantizer)
    bits, block, levels = codec.bits, codec.granularity, float(codec.levels)

    def parts(payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        # Tensors of their own: torch.compile refuses to write to two views of one tensor that differ in type.
        integers = count * bits // 8
        packed, steps = payload[:integers].view(torch.int8), payload[integers:].view(torch.float32)
        return packed.view(-1, block * bits // 8).clone(), steps.clone()

    def quantize_into(total: Tensor, packed: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        step = total.abs().amax(1) / levels
        bad = ~torch.isfinite(step)
        empty = step < quantize.SMALLEST_STEP
        divisor = torch.where(bad | empty, torch.inf, step)
        integers = torch.where(bad[:, None], 0.0, (total / divisor[:, None]).round())
        step = torch.where(bad, torch.nan, torch.where(empty, 0.0, step))
        steps.copy_(step)
        if bits == 8:
            packed.copy_(integers.to(torch.int8))
        else:
            low, high = integers.view(-1, 2, block // 2).unbind(1)
            packed.copy_((low + 16 * high).to(torch.int8))
        return total - integers * step[:, None], bad[:, None]

    def dequantize(packed: Tensor, steps: Tensor) -> Tensor:
        if bits == 4:
            wide = packed.to(torch.int32)
            high = (wide + 8) >> 4
            packed = torch.cat([wide - 16 * high, high], 1)
        return packed.float() * steps[:, None]

    def encode_all(values: Tensor, residual: Tensor, packed: Tensor, steps: Tensor) -> None:
        old = residual.view(-1, block)
        lost, bad = quantize_into(values.view(-1, block) + old, packed, steps)
        old.copy_(torch.where(bad, old, lost))

    def reduce_all(received: list[tuple[Tensor, Tensor]], residual: Tensor, packed: Tensor, steps: Tensor) -> None:
        share = 1 / len(received)
        total = dequantize(received[0][0], received[0][1] * share)
        for their_packed, their_steps in received[1:]:
            total = total + dequantize(their_packed, their_steps * share)
        lost, bad = quantize_into(total, packed, steps)
        residual.view(-1, block).add_(torch.where(bad, 0.0, lost * len(received)))

    def decode_all(packed: Tensor, steps: Tensor, out: Tensor) -> None:
        out.view(-1, block).copy_(dequantize(packed, steps))

    compiled_encode, compiled_reduce, compiled_decode = (
        torch.compile(function, dynamic=False) for function in (encode_all, reduce_all, decode_all)
    )
    whole = parts(case.payload, case.values.numel())
    received = {id(item): [parts(row, item.count) for row in item.payloads] for item in case.shards.values()}
    own = {id(item): parts(item.payload, item.count) for item in case.shards.values()}
    return named_passes(
        case,
        lambda: compiled_encode(case.values, case.residual, *whole),
        lambda shard: compiled_reduce(received[id(shard)], shard.residual, *own[id(shard)]),
        lambda: compiled_decode(*whole, case.out),
    )


def sparse_expressions(case: Case) -> dict[str, Callable[[], None]]:
    """Top-k as expressions that torch.compile can fuse."""
    codec = case.codec
    assert isinstance(codec, TopK)
    assert codec.place_bytes == 1
    count = case.values.numel()
    columns = codec.columns(count)
    rows = -(-count // columns)

    def parts(payload: Tensor) -> tuple[Tensor, Tensor]:
        return payload[: 2 * columns].view(torch.bfloat16).clone(), payload[2 * columns : 3 * columns].clone()

    def encode_all(values: Tensor, residual: Tensor, kept: Tensor, places: Tensor) -> None:
        total = F.pad(values + residual, (0, rows * columns - count)).view(rows, columns)
        row = torch.arange(rows, dtype=torch.int32, device=values.device)[:, None]
        keys = (total.view(torch.int32) & 0x7FFFFF00) | row
        key = keys.amax(0)
        bad = key >= 0x7F800000
        chosen = row == (key & 0xFF)
        largest = torch.where(chosen, total, 0.0).sum(0)
        limit = torch.finfo(torch.bfloat16).max
        sent = torch.where(bad, torch.nan, largest.clamp(-limit, limit)).to(torch.bfloat16)
        kept.copy_(sent)
        places.copy_((key & 0xFF).to(torch.uint8))
        old = F.pad(residual, (0, rows * columns - count)).view(rows, columns)
        lost = torch.where(bad, old, torch.where(chosen, total - sent, total))
        residual.copy_(lost.view(-1)[:count])

    def dense(kept: Tensor, places: Tensor) -> Tensor:
        row = torch.arange(rows, dtype=torch.int32, device=kept.device)[:, None]
        value = torch.where((row == places) | kept.isnan(), kept.float(), 0.0)
        return value.view(-1)[:count]

    def decode_all(kept: Tensor, places: Tensor, out: Tensor) -> None:
        out.copy_(dense(kept, places))

    def add_all(received: list[tuple[Tensor, Tensor]], out: Tensor) -> None:
        total = dense(*received[0])
        for kept, places in received[1:]:
            total = total + dense(kept, places)
        out.copy_(total)

    compiled_encode, compiled_add, compiled_decode = (
        torch.compile(function, dynamic=False) for function in (encode_all, add_all, decode_all)
    )
    whole = parts(case.payload)
    received = {id(item): [parts(row) for row in item.payloads] for item in case.shards.values()}
    return named_passes(
        case,
        lambda: compiled_encode(case.values, case.residual, *whole),
        lambda shard: compiled_add(received[id(shard)], case.out),
        lambda: compiled_decode(*whole, case.out),
    )


@contextmanager
def without_kernels() -> Iterator[None]:
    """The codecs take their plain path."""
    with (
        mock.patch.object(quantize, "kernels_take", return_value=False),
        mock.patch.object(sparse, "kernels_take", return_value=False),
    ):
        yield


@contextmanager
def shaped(name: str, tile: tuple[int, int] | None) -> Iterator[None]:
    """Kernels with another shape of their programs."""
    if tile is None:
        yield
        return
    from frameworm.parallel.compression import kernels, kernels_sparse

    module, second = (kernels_sparse, "VALUES_PER_THREAD") if name == "topk" else (kernels, "WARPS")
    with mock.patch.object(module, "VALUES_PER_PROGRAM", tile[0]), mock.patch.object(module, second, tile[1]):
        yield


def equal_share(case: Case) -> float:
    """Share of the payload's bytes in which kernels and plain path agree, from one residual."""
    fresh = torch.zeros_like(case.residual)
    case.codec.encode(case.values, case.payload, fresh)
    ours = case.payload.clone()
    with without_kernels():
        case.codec.encode(case.values, case.payload, fresh.zero_())
    return float((ours == case.payload).float().mean())


def measure(name: str, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All passes of one codec by all paths, with a copy in every round."""
    case = make_case(name, arguments.count, arguments.worlds, device)
    facts: dict[str, Any] = {"payload_bytes_per_value": case.payload.numel() / arguments.count}
    blocks: dict[str, Callable[[], Sample]] = {}

    def add(path: str, passes: dict[str, Callable[[], None]], around: Callable[[], Any]) -> None:
        for label, work in passes.items():

            def block(work: Callable[[], None] = work) -> Sample:
                with around():
                    return timed(work, arguments.repeats, device)

            blocks[f"{path} {label}"] = block

    def copy() -> None:
        case.out.copy_(case.values)

    blocks["copy"] = lambda: timed(copy, arguments.repeats, device)
    if "kernels" in arguments.paths:
        facts["equal_bytes"] = equal_share(case)
        add("kernels", own_passes(case), lambda: shaped(name, None))
        for tile in arguments.topk_tiles if name == "topk" else arguments.tiles:
            add(f"kernels[{tile[0]}:{tile[1]}]", own_passes(case), lambda tile=tile: shaped(name, tile))
    if "eager" in arguments.paths:
        add("eager", own_passes(case), without_kernels)
    if "compiled" in arguments.paths:
        expressions = sparse_expressions if name == "topk" else quantized_expressions
        add("compiled", expressions(case), without_kernels)
    tell_progress(f"{name}: {len(blocks)} contenders")
    measured = interleave(blocks, arguments.rounds, tell_progress)
    return {**facts, **summarise(measured, needed_bytes(case), name, arguments.count)}


def summarise(measured: dict[str, Measured], needed: dict[str, float], name: str, count: int) -> dict[str, Any]:
    """Times, rates, and whether the goals are met."""
    copy = measured["copy"]
    copy_rate = 8 * count / copy.step_s
    passes: dict[str, dict[str, Any]] = {}
    for label, item in measured.items():
        if label == "copy":
            continue
        path, _, what = label.partition(" ")
        rate = needed[what] / item.step_s
        ours = measured.get(f"kernels {what}")
        passes.setdefault(path, {})[what] = {
            "ms": _in_ms(bootstrap_median([sample.step_s for sample in item.rounds])),
            "gb_per_s": rate / 1e9,
            "share_of_copy": rate / copy_rate,
            "kernels_times_as_fast": None if ours is None else as_data(times_as_fast(ours, item)),
            "rounds_ms": [sample.step_s * 1e3 for sample in item.rounds],
        }
    goals = {
        what: {"goal_ms": GOALS_MS[name], "verdict": _verdict(figures["ms"], GOALS_MS[name])}
        for what, figures in passes.get("kernels", {}).items()
        if what.startswith("whole@") and count >= COUNT
    }
    return {"copy": {"ms": copy.step_s * 1e3, "gb_per_s": copy_rate / 1e9}, "passes": passes, "goals": goals}


def _in_ms(seconds: Interval) -> dict[str, float]:
    return {key: value * 1e3 for key, value in as_data(seconds).items()}


def _verdict(ms: dict[str, float], goal: float) -> str:
    return "met" if ms["high"] <= goal else "missed" if ms["low"] > goal else "open"


def draw(name: str, result: dict[str, Any]) -> str:
    """The table of one codec."""
    rows = []
    for path, passes in result["passes"].items():
        for what, item in passes.items():
            ms, times = item["ms"], item["kernels_times_as_fast"]
            rows.append(
                (
                    f"{path} {what}",
                    f"{ms['value']:.3f}",
                    f"{ms['low']:.3f}..{ms['high']:.3f}",
                    f"{item['gb_per_s']:,.0f}",
                    f"{item['share_of_copy']:.0%}",
                    "" if times is None or path == "kernels" else f"{times['value']:.2f}",
                )
            )
    copy = result["copy"]
    rows.append(("copy", f"{copy['ms']:.3f}", "", f"{copy['gb_per_s']:,.0f}", "100%", ""))
    columns = (name, "ms", "95%", "GB/s", "of copy", "kernels are x as fast")
    goals = [f"goal {what}: {item['goal_ms']} ms: {item['verdict']}" for what, item in result["goals"].items()]
    agree = [f"bytes as the plain path writes them: {result['equal_bytes']:.4%}"] if "equal_bytes" in result else []
    return "\n".join([table(columns, rows), *agree, *goals])


def main() -> int:
    """Measure the codecs asked for."""
    arguments = _arguments()
    device = torch.device(arguments.device)
    settings = {
        "count": arguments.count,
        "world_sizes": arguments.worlds,
        "paths": arguments.paths,
        "rounds": arguments.rounds,
        "repeats": arguments.repeats,
    }
    if "kernels" in arguments.paths and not codecs.has_kernels(torch.device("cuda", torch.cuda.current_device())):
        print("triton is not installed or cannot run here: no kernels to measure", file=sys.stderr)
        return 1
    results: dict[str, Any] = {}
    for name in arguments.codecs:
        results[name] = measure(name, arguments, device)
        torch._dynamo.reset()
        # After each: a later one may take the machine down.
        path = write_results("compression_kernels", device, settings, results, arguments.out)
        print(f"\n{name}, {arguments.count:,} fp32 gradients\n{draw(name, results[name])}", flush=True)
    copies = statistics.median(result["copy"]["ms"] for result in results.values())
    print(f"\ncopy of the gradients {copies:.3f} ms; written to {path}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--codecs", type=names_among(CODECS), default=list(CODECS), help="names, comma between")
    add("--paths", type=names_among(PATHS), default=None, help="names, comma between; on a CPU eager alone")
    add("--count", type=int, default=COUNT, help="gradients, rounded up to whole blocks of 256")
    add("--worlds", type=_numbers, default=[2, 4, 8], help="ranks whose payloads are reduced, comma between")
    add("--rounds", type=int, default=15, help="rounds that count")
    add("--repeats", type=int, default=10, help="calls between two events")
    add("--tiles", type=_pairs, default=[], help="also kernels of int8 and int4 with values:warps, comma between")
    add("--topk-tiles", type=_pairs, default=[], help="also kernels of top-k with values:values per thread")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to see that the script works")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    if arguments.paths is None:
        arguments.paths = list(PATHS) if arguments.device == "cuda" else ["eager"]
    if arguments.device == "cpu" and "kernels" in arguments.paths:
        parser.error("kernels need a CUDA device")
    arguments.count = -(-arguments.count // 256) * 256
    return arguments


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _pairs(text: str) -> list[tuple[int, int]]:
    return [(int(first), int(second)) for first, _, second in (part.partition(":") for part in text.split(","))]


if __name__ == "__main__":
    sys.exit(main())
