"""Write the goldens again: `python tests/golden/write.py [losses] [runs] [sweep] [help] [keys]`, or all of it.

Legitimate only when a change of behaviour is intended and the commit says which. Never rewrite a golden to make a test
pass after code was moved: then the test has found a change that nobody meant.

Losses are trained twice, and nothing is written unless both agree bit for bit. Stored runs are written before the
losses of their resumption, so `runs` also renews these.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_cases as cases
import golden_help
import golden_outlines


def _twice(name: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The results of two equal trainings.

    Raises:
        SystemExit: They differ.
    """
    results = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            results.append(make(Path(folder)))
    unequal = [case for case in results[0] if results[0][case] != results[1][case]]
    if unequal:
        raise SystemExit(f"{name}: not deterministic, leave them out: {', '.join(unequal)}")
    return results[0]


def _store_losses(section: str, results: dict[str, Any]) -> None:
    """Replace one section of losses.json."""
    stored = json.loads(cases.LOSSES.read_text(encoding="utf-8")) if cases.LOSSES.exists() else {}
    if stored.get("fingerprint") != cases.fingerprint() and set(stored) - {"fingerprint", section}:
        print("losses.json was written on another machine: write its other sections here too")
    stored = {**stored, "fingerprint": cases.fingerprint(), section: results}
    cases.LOSSES.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def write_losses() -> None:
    """Write the losses of the cases."""
    results: dict[str, Any] = {}
    for group in cases.GROUPS:
        results.update(_twice(group, lambda folder, group=group: cases.run_group(group, folder)))
    _store_losses("cases", results)


def _copies(folder: Path) -> None:
    shutil.copytree(cases.STORED_RUNS, folder / "runs")


def _anonymous(folder: Path) -> None:
    """Take the name of this host out of a run folder, and its kernel; remove the large page."""
    (folder / "report.html").unlink(missing_ok=True)
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    summary["environment"]["kernel"] = "0"
    for rank in summary["ranks"]:
        rank["host"] = "host"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    telling = [str(Path.home()), str(Path.cwd()), str(cases.HERE.parents[1]), tempfile.gettempdir()]
    for file in folder.rglob("*"):
        # Not in tensors: a short name may be there by chance.
        if file.is_file() and not file.name.endswith((".safetensors", ".zst")):
            text = file.read_text(encoding="utf-8")
            named = [name for name in telling if name in text] + re.findall(f'"{re.escape(platform.node())}"', text)
            if named:
                raise SystemExit(f"{file} names {', '.join(named)}")


def write_runs() -> None:
    """Write a run folder of each kind, what verbs read in it, and the losses of its resumption."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases.run_kinds("start", cases.ALONE, folder)
        cases.run_kinds("start", cases.TOGETHER, folder, 2)
        for kind in cases.RUN_KINDS:
            _anonymous(folder / "runs" / kind)
        shutil.rmtree(cases.STORED_RUNS, ignore_errors=True)
        shutil.copytree(folder / "runs", cases.STORED_RUNS)

    def resumed(kinds: tuple[str, ...], world_size: int) -> Callable[[Path], dict[str, Any]]:
        def resume(folder: Path) -> dict[str, Any]:
            _copies(folder)
            return cases.run_kinds("resume", kinds, folder, world_size)

        return resume

    def read(folder: Path) -> dict[str, Any]:
        _copies(folder)
        return cases.run_kinds("read", tuple(cases.RUN_KINDS), folder)

    alone, together = _twice("alone", resumed(cases.ALONE, 1)), _twice("together", resumed(cases.TOGETHER, 2))
    _store_losses("resumed", {**alone, **together})
    _store_losses("read", _twice("read", read))


def write_sweep() -> None:
    """Write a sweep of two runs, without checkpoints and pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases.write_data(folder)
        golden_outlines.prepare(folder)
        shutil.rmtree(folder / "sweep", ignore_errors=True)
        golden_outlines.apart(*golden_outlines.SWEEP, folder=folder)
        shutil.rmtree(golden_outlines.STORED_SWEEP, ignore_errors=True)
        pages = ("*.html", "*.png", "*.tex", "*.txt", "comprehensive_summary.csv", "scaling.json")
        left_out = shutil.ignore_patterns("checkpoints", "system-*", "*.log", ".*", *pages)
        for run in (folder / "sweep" / "runs").iterdir():
            if run.is_dir():
                _anonymous(run)
        shutil.copytree(folder / "sweep", golden_outlines.STORED_SWEEP, ignore=left_out)


def write_keys() -> None:
    """Write the outlines of JSON files and output."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        golden_outlines.prepare(folder)
        for tasks in golden_outlines.VERB_GROUPS.values():
            for (outlines,) in cases.run_tasks([f"verb:{task}" for task in tasks], 1, folder).values():
                found.update(outlines)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copies(folder)
        cases.run_kinds("resume", cases.ALONE, folder)
        cases.run_kinds("resume", cases.TOGETHER, folder, 2)
        cases.run_tasks(["case:trainer_plain"], 1, folder)
        for kind in cases.RUN_KINDS:
            found.update(golden_outlines.run_outlines(folder / "runs" / kind, kind))
        found.update(golden_outlines.run_outlines(folder / cases.TRAINER_RUN, "trainer"))
    golden_outlines.KEYS.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def write_help() -> None:
    """Write the help texts."""
    shutil.rmtree(golden_help.FOLDER, ignore_errors=True)
    golden_help.FOLDER.mkdir()
    for verb in golden_help.verbs():
        (golden_help.FOLDER / f"{verb}.txt").write_text(golden_help.help_of(verb), encoding="utf-8")
    golden_help.VERSIONS.write_text(json.dumps(golden_help.drawn_with(), indent=1) + "\n", encoding="utf-8")


PARTS = {
    "losses": write_losses,
    "runs": write_runs,
    "sweep": write_sweep,
    "help": write_help,
    "keys": write_keys,
}

if __name__ == "__main__":
    cases.STORED.mkdir(exist_ok=True)
    for part in sys.argv[1:] or PARTS:
        if part not in PARTS:
            raise SystemExit(f"{part} is not one of {', '.join(PARTS)}")
        PARTS[part]()
        print(f"written: {part}")
