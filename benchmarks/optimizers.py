"""What averaged weights, schedules and other optimizers add to a step, beside fused AdamW with a constant rate.

    python benchmarks/optimizers.py                       # on a CPU
    python benchmarks/optimizers.py --device cuda --data DATA --cases gpt2

Every contender trains the same config with one setting changed; they take turns, and each is held against AdamW in the
same round by the median of its steps. Adding averaged weights or a schedule should cost at most 5% of a step; where an
optimizer costs more, the table says so. `quickstart` is the shipped config (127,364 parameters),
`text_4m` a wider and deeper text classifier, `gpt2` the shipped GPT-2, which needs a text file.
An optimizer whose package is missing is left out, and named.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import (
    ContenderError,
    Measured,
    Sample,
    as_data,
    interleave,
    names_among,
    paired,
    ratio,
    table,
    tell_progress,
    write_results,
)

from frameworm.config.load import load_config
from frameworm.engine.run import run
from frameworm.errors import FramewormError

CONFIGS = Path(__file__).parents[1] / "configs"
CONTENDERS = {
    "AdamW": (),
    "averaged weights": ("training.ema=0.999",),
    "wsd with a warm-up": ("training.schedule=wsd", "training.warmup=10"),
    "Muon with AdamW": ("training.optimizer=muon",),
    "AdamW in 8 bits": ("training.optimizer=adamw8bit",),
    "schedule-free AdamW": ("training.optimizer=schedulefree",),
}
PLAIN = ("training.schedule=constant", "checkpoint.every_steps=off", "training.epochs=1000000")
CASES = {
    "quickstart": ("quickstart.yaml",),
    "text_4m": (
        "quickstart.yaml",
        "model.d_model=256",
        "model.num_layers=4",
        "model.dim_feedforward=1024",
        "training.global_batch=16",
    ),
    "gpt2": ("gpt2_124m.yaml", "training.global_batch=64", "training.micro_batch=16"),
}
GOAL = 1.05


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=names_among(CASES), default=["quickstart", "text_4m"])
    parser.add_argument("--contenders", type=names_among(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="the text of gpt2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=120, help="of one training")
    options = parser.parse_args()
    device = torch.device(options.device)
    names = list(dict.fromkeys(["AdamW", *options.contenders]))
    results = {}
    for case in options.cases:
        config, *overrides = CASES[case]
        overrides += [*PLAIN, f"gpu.device={options.device}", f"training.max_steps={options.steps}"]
        if options.data is not None:
            overrides.append(f"data.root={options.data}")
        failures: dict[str, str] = {}
        blocks = {name: functools.partial(train, config, [*overrides, *CONTENDERS[name]]) for name in names}
        tell = functools.partial(say, case)
        results[case] = judged(case, interleave(blocks, options.rounds, tell, failures=failures), failures)
    settings = {"rounds": options.rounds, "steps": options.steps, "goal": GOAL}
    print("written to", write_results("optimizers", device, settings, results))


def say(case: str, text: str) -> None:
    """How far it is."""
    tell_progress(f"{case}: {text}")


def train(config: str, overrides: Sequence[str]) -> Sample:
    """One training; the median of its steps."""
    try:
        record = run(load_config(CONFIGS / config, overrides, {}), out=None)
    except FramewormError as error:
        raise ContenderError(str(error)) from error
    assert record.throughput.step_s is not None
    return Sample(record.throughput.step_s.p50, 0.0, record.quality.train_loss)


def judged(case: str, measured: dict[str, Measured], failures: dict[str, str]) -> dict[str, object]:
    """Print the table of one case; its figures as data."""
    plain = measured["AdamW"]
    rows, found = [], {}
    for name, item in measured.items():
        losses = [sample.loss for sample in item.rounds]
        found[name] = {"step_s": item.step_s, "rounds": [sample.step_s for sample in item.rounds], "loss": losses[-1]}
        row = [name, f"{item.step_s * 1e3:.2f}", "", "", f"{losses[-1]:.3f}"]
        if name != "AdamW":
            times = paired(item, plain, ratio)
            kept = "within 5%" if times.high <= GOAL else "more" if times.low > GOAL else "open"
            found[name] |= {"of_adamw": as_data(times), "verdict": kept}
            row[2:4] = [f"{times.value:.3f} ({times.low:.3f}..{times.high:.3f})", kept]
        rows.append(row)
    print(table([case, "ms/step", "of AdamW (95%)", "5%", "loss"], rows))
    for name, why in failures.items():
        print(f"left out: {name}: {why}")
    return {"contenders": found, "left_out": failures}


if __name__ == "__main__":
    main()
