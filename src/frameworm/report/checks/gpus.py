"""What `verify-gpus` found, as text and as a page to share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from frameworm.report.kit.layout import field, heading, table
from frameworm.report.kit.page_templates import load_template
from frameworm.report.kit.tables import plain

TITLES = {"equal": "captured = eager", "silent": "a rank is silent", "killed": "a rank is killed"}
HEADER = ("training", "mode", "1 GPU", "predicted", "measured", "as fast", "verdict")
WIDTH = 100
HOW = (
    "1 GPU: a step of the whole batch. predicted: a step on all GPUs, from a step on one GPU with the samples of one "
    "rank and the measured network, written to predictions.json before it was measured; 95% interval in brackets. as "
    "fast: 1 GPU over measured."
)


def render_verification(data: Mapping[str, Any]) -> str:
    """The content of verify.json as text."""
    lines = heading(_title(data), WIDTH)
    for check in data["checks"]:
        name = TITLES.get(check["name"], check["name"])
        lines += field(check["verdict"].upper() if check["verdict"] == "fails" else check["verdict"], name, WIDTH)
        lines += field("", f"{_strategy(check)}{plain(check['text'])}", WIDTH)
    if data["speeds"]:
        lines += ["", *table([HEADER, *speed_rows(data)], WIDTH), *field("", HOW, WIDTH)]
    if data["shared_gpu"] or data["on_cpu"]:
        lines += ["", *field("note", _not_gpus(data), WIDTH)]
    for text in data["skipped"]:
        lines += field("left out", plain(text), WIDTH)
    lines += ["", "everything that was checked holds" if data["holds"] else "NOT everything holds"]
    return "\n".join(lines) + "\n"


def render_verification_page(data: Mapping[str, Any]) -> str:
    """The content of verify.json as one self-contained HTML file."""
    return load_template("gpus.html.j2").render(
        title=_title(data),
        holds=data["holds"],
        checks=[
            {**check, "title": TITLES.get(check["name"], check["name"]), "text": _strategy(check) + check["text"]}
            for check in data["checks"]
        ],
        header=HEADER,
        rows=speed_rows(data),
        how=HOW,
        note=_not_gpus(data) if data["shared_gpu"] or data["on_cpu"] else None,
        skipped=data["skipped"],
        facts=[(name, _fact(value)) for name, value in data["environment"].items() if value not in (None, [])],
        wall=f"{data['wall_s'] / 60:.1f} minutes",
    )


def speed_rows(data: Mapping[str, Any]) -> list[Sequence[str]]:
    """One row per training and mode."""
    rows: list[Sequence[str]] = []
    for item in data["speeds"]:
        value, low, high = item["predicted_s"]
        predicted = f"{_ms(value)} [{_ms(low)}, {_ms(high)}]"
        measured, speedup = item["measured_s"], item["speedup"]
        times = "-" if speedup is None else f"{speedup:.2f}"
        cells = (item["training"], item["mode"], _ms(item["alone_s"]), predicted, _ms(measured), times)
        rows.append((*cells, _verdict(item)))
    return rows


def _verdict(item: Mapping[str, Any]) -> str:
    if item["failed"]:
        return plain(item["failed"])
    if item["in_interval"] is None:
        return "not judged"
    value, _, high = item["predicted_s"]
    if item["in_interval"]:
        return "as predicted"
    side = "slower" if item["measured_s"] > high else "faster"
    return f"{abs(item['measured_s'] / value - 1):.0%} {side} than predicted"


def _title(data: Mapping[str, Any]) -> str:
    facts = data["environment"]
    what = "processes on this CPU (a rehearsal)" if data["on_cpu"] else f"ranks on {plain(facts['device'])}"
    return f"verify-gpus · {data['gpus']} {what} · torch {plain(facts['torch'])}"


def _strategy(check: Mapping[str, Any]) -> str:
    strategy = check["evidence"].get("strategy")
    return f"{strategy}: " if strategy else ""


def _not_gpus(data: Mapping[str, Any]) -> str:
    if data["on_cpu"]:
        return "nothing ran on a GPU: steps were rehearsed, not recorded, and speeds say nothing about GPUs"
    return "the ranks shared a GPU: equality and failures are what they would be on several, speeds are not"


def _ms(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    return f"{1e3 * seconds:.3g} ms"


def _fact(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, (list, tuple)) else str(value)
