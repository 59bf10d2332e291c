"""Train cells with frameworm and with the plain loop, and write the table of verdicts.

    python tests/equivalence/table.py                                # all pairs and 200 cells more: docs/equivalence.md
    python tests/equivalence/table.py --check --cells 1000 --seed 5  # a campaign: nothing is written

The exit code is 1 where a cell is wrong or fewer than 90% are equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cells import AXES, IMPOSSIBLE, REFUSALS, Cell, combinations, cover, refusal_of
from rank_pair import RankPair
from verdicts import EQUAL, REFUSED, WRONG, Verdict, judge

DOCUMENT = Path(__file__).parents[2] / "docs" / "equivalence.md"
LEAST_EQUAL = 0.9
KINDS = (EQUAL, REFUSED, WRONG)
INTRODUCTION = """\
# Equivalence with a plain loop

A *cell* is one way to train: one option of each axis below. Each cell is trained twice, by frameworm and by a plain
PyTorch loop, and everything that the two leave behind is compared: parameters and buffers of the model and of the loss,
the rate of every step, the training and validation loss of every epoch, and which samples were trained. *Resumed* cells
are stopped by Ctrl-C in the middle of an epoch and go on in a new `Trainer`; the plain loop is never stopped.

- **equal**: bitwise in one process without accumulation. With several micro-batches or ranks the same numbers are added
  in another order, and a value may differ by 5e-5 (of itself, where it is above 1).
- **refused**: an error that says why, before the first step; the list below holds every reason.
- **wrong**: anything else.

`make equivalence` writes this page; the code is in `tests/equivalence/`. The test suite trains the cells that hold
every pair of options, `make campaign` a thousand more.
"""


def run(cells: Sequence[Cell], deadline_s: float = 120.0) -> list[Verdict]:
    """The verdict on each cell; says on stderr how far it is, and what is wrong at once."""
    verdicts = []
    begun = time.monotonic()
    with RankPair() as pair:
        for number, cell in enumerate(cells, 1):
            verdict = judge(cell, pair, deadline_s)
            verdicts.append(verdict)
            if verdict.kind == WRONG:
                print(f"wrong: {cell}\n    {verdict.detail}", file=sys.stderr, flush=True)
            if number % 25 == 0 or number == len(cells):
                print(f"{time.monotonic() - begun:6.0f} s  {number} of {len(cells)} cells", file=sys.stderr, flush=True)
    return verdicts


def choose(more: int, seed: int) -> tuple[list[Cell], str]:
    """Cells that hold every pair, with so many more that hold as many threes as they can; and a sentence about them."""
    pairs = cover(2)[0]
    threes, missing = cover(3, seed=seed, most=more) if more else ([], len(combinations(3)))
    all_threes = len(combinations(3))
    return list(dict.fromkeys([*pairs, *threes])), (
        f"{len(pairs)} cells hold every pair of options that can be combined; {more} more, drawn with seed {seed}, "
        f"hold {(all_threes - missing) / all_threes:.0%} of all threes."
    )


def result_line(verdicts: Sequence[Verdict]) -> str:
    """How many cells there are of each kind."""
    counts = Counter(verdict.kind for verdict in verdicts)
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


def write(verdicts: Sequence[Verdict], sentence: str) -> str:
    """The page."""
    lines = [INTRODUCTION, "## Result", "", f"{sentence} Result: **{result_line(verdicts)}**.", ""]
    lines += ["Each entry is equal / refused / wrong.", ""]
    strategies = AXES["strategy"]
    lines += [f"| axis | option | {' | '.join(strategies)} |", f"|---|---|{'---|' * len(strategies)}"]
    for axis, options in AXES.items():
        if axis == "strategy":
            continue
        for option in options:
            counts = [
                Counter(
                    item.kind for item in verdicts if getattr(item.cell, axis) == option and item.cell.strategy == name
                )
                for name in strategies
            ]
            entries = " | ".join(" / ".join(str(count[kind]) for kind in KINDS) for count in counts)
            word = ("yes" if option else "no") if isinstance(option, bool) else option
            lines.append(f"| {axis} | {word} | {entries} |")
    lines += ["", "## Refused", ""]
    for refusal in REFUSALS:
        number = sum(item.kind == REFUSED and refusal_of(item.cell) is refusal for item in verdicts)
        lines.append(f"- {describe(refusal.rule.options)}: {refusal.rule.reason} ({number} cells).")
    lines += ["", "## Not combined", ""]
    lines += [f"- {describe(rule.options)}: {rule.reason}." for rule in IMPOSSIBLE]
    wrong = [item for item in verdicts if item.kind == WRONG]
    if wrong:
        lines += ["", "## Wrong", "", *(f"- {item.cell}: {item.detail}" for item in wrong)]
    return "\n".join(lines) + "\n"


def describe(options: dict[str, tuple[object, ...]]) -> str:
    """Options as words."""
    return " with ".join(f"{axis} {' or '.join(map(str, chosen))}" for axis, chosen in options.items())


def main() -> int:
    """Run the cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=200, help="cells beside those that hold every pair")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    settings = parser.parse_args()
    cells, sentence = choose(settings.cells, settings.seed)
    verdicts = run(cells)
    if not settings.check:
        settings.out.write_text(write(verdicts, sentence), encoding="utf-8")
    print(f"{sentence} Result: {result_line(verdicts)}.")
    equal = sum(verdict.kind == EQUAL for verdict in verdicts)
    wrong = sum(verdict.kind == WRONG for verdict in verdicts)
    return 1 if wrong or equal < LEAST_EQUAL * len(verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
