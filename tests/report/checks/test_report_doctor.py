from __future__ import annotations

import pytest

from frameworm.records.machine import Check, ChecklistItem, GpuFacts, KnownGain, MachineFacts
from frameworm.report.checks.doctor import render_doctor

FACTS = MachineFacts(gpus=(GpuFacts("NVIDIA H200"), GpuFacts("NVIDIA H200")), cpus_usable=16, torch_version="2.13.0")
LONG = "a sentence of many words that does not fit into what is left of a line on any terminal that people use " * 2
CHECKS = [
    Check("fine", "first", "all right", "ok", "", "hidden reason"),
    Check("wrong", "second", "nothing is right", "problem", "mend it", LONG),
    Check("doubt", "second", "not known", "unknown"),
    Check("better", "first", "could be more", "advice", LONG, "it is faster"),
]
ITEMS = [
    ChecklistItem("one", "done", "set"),
    ChecklistItem(
        "two", "not done", LONG, ("a.b=c", "d.e=f"), KnownGain("2x", "measured", "file.json", 2.0), "knob", "host_bound"
    ),
    ChecklistItem("three", "does not apply", "no such thing\x1b[31m"),
]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_is_told_within_the_width(width: int) -> None:
    text = render_doctor(FACTS, CHECKS, ITEMS, "configs/x.yaml", ["a note"], width)
    assert max(len(line) for line in text.splitlines()) <= width
    flat = " ".join(text.split())
    assert "2 x NVIDIA H200 · 16 cores · torch 2.13.0" in flat
    assert "PROBLEM wrong nothing is right do: mend it why: a sentence" in flat
    assert "hidden reason" not in flat
    assert flat.index("first") < flat.index("better") < flat.index("second")
    assert "set --set a.b=c --set d.e=f gain 2x (measured: file.json) see docs/findings.md#host_bound" in flat
    assert flat.index("not done (1)") < flat.index("done (1) one set") < flat.index("does not apply (1)")
    assert (
        "4 checks: 1 problem, 1 with advice, 1 ok, 1 unknown; checklist: 1 done, 1 not done, 1 does not apply" in flat
    )
    assert "note: a note" in flat
    assert "\x1b" not in text


def test_a_long_name_does_not_push_the_others_aside() -> None:
    long = Check("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "first", "not set", "advice", "set it", LONG)
    lines = render_doctor(FACTS, [*CHECKS, long], width=80).splitlines()
    assert "  ok       fine                  all right" in lines
    assert "  advice   TORCH_DISABLE_SHARE_RDZV_TCP_STORE  not set" in lines
    assert "                                 do:  set it" in lines
    assert max(len(line) for line in lines) <= 80


def test_without_a_config() -> None:
    text = render_doctor(MachineFacts(), CHECKS[:1])
    assert "no GPU" in text
    assert "checklist" not in text
    assert "1 checks: no problems" in text
