"""Start and steady speed of a deep language model: compiled as a whole, by its blocks, or not at all.

    python benchmarks/compile_scope.py --device cuda --layers 24
    python benchmarks/compile_scope.py --device cpu --layers 24 --width 64 --length 32 --batch 2 --vocabulary 512

A Hugging Face Llama of that many layers takes training steps (forward, loss, backward, AdamW). Every way runs in a
process of its own with an empty compiler cache. Its start is the time of the first step, less that of a later one. The
ways then take turns, `--steps` steps each per round; the steady speed is compared round by round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
from harness import Interval, Measured, Sample, interleave, paired, table, tell_progress, timed, write_results

from frameworm.config.schema import GPUConfig
from frameworm.engine.model.compilation import Compiler

WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "model": {"compile_model": True},
    "blocks": {"compile_model": True, "compile_scope": "blocks"},
}


def serve(settings: dict[str, Any], options: argparse.Namespace, channel: Connection) -> None:
    """Train one way: say what the start took, then answer each request with a block of steps."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        compiler = Compiler(GPUConfig(**settings), captured=False)
        step = make_step(compiler, options)
        device = torch.device(options.device)
        with compiler.eager_if_it_fails():
            begun = perf_counter()
            step()
            _wait_for(device)
            first_s = perf_counter() - begun
            warm = timed(step, 3, device)
            record = compiler.record()
            graphs = None if record is None else record.graphs
            peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
            start_s = first_s - warm.step_s
            channel.send({"start_s": start_s, "graphs": graphs, "note": compiler.note, "peak_bytes": peak})
            while channel.recv():
                channel.send(timed(step, options.steps, device))


def make_step(compiler: Compiler, options: argparse.Namespace) -> Any:
    """A function that takes one training step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // min(64, options.width // 4),
        use_cache=False,
    )
    device = torch.device(options.device)
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, options.vocabulary, (options.batch, options.length), device=device)
    compiler.apply(model)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All ways, and how compiling by blocks compares with compiling the whole."""
    context = multiprocessing.get_context("spawn")
    channels: dict[str, Connection] = {}
    starts: dict[str, dict[str, Any]] = {}
    for name, settings in WAYS.items():  # one after the other: a start needs the processors
        channels[name], other = context.Pipe()
        context.Process(target=serve, args=(settings, options, other), daemon=True).start()
        other.close()
        starts[name] = channels[name].recv()
        tell_progress(f"{name}: started in {starts[name]['start_s']:.1f} s")

    def block_of(channel: Connection) -> Sample:
        channel.send(True)
        answer: Sample = channel.recv()
        return answer

    blocks = {name: (lambda channel=channel: block_of(channel)) for name, channel in channels.items()}
    found = interleave(blocks, options.rounds, tell_progress)
    for channel in channels.values():
        channel.send(False)
    return {
        "ways": {name: {**starts[name], "step_s": found[name].step_s} for name in WAYS},
        "start_of_blocks_to_model": starts["blocks"]["start_s"] / starts["model"]["start_s"],
        "step_of_blocks_to_model": vars(_ratio(found["blocks"], found["model"])),
    }


def _ratio(one: Measured, other: Measured) -> Interval:
    return paired(one, other, lambda ours, theirs: ours / theirs)


def main() -> None:
    """Measure and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    result = measure(options)
    rows = [
        (name, f"{way['start_s']:.1f} s", f"{way['step_s'] * 1e3:.1f} ms", str(way["graphs"] or ""))
        for name, way in result["ways"].items()
    ]
    print(table(("way", "start", "step", "graphs"), rows))
    step = result["step_of_blocks_to_model"]
    print(f"start, blocks to model: {result['start_of_blocks_to_model']:.2f}")
    print(f"step, blocks to model: {step['value']:.3f} ({step['low']:.3f} to {step['high']:.3f})")
    where = write_results("compile_scope", torch.device(options.device), vars(options), result)
    print(f"written to {where}")


if __name__ == "__main__":
    main()
