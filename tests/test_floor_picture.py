"""docs/architecture.md: its picture is what the code draws, and it speaks of every floor."""

from __future__ import annotations

from pathlib import Path

from floor_picture import arrows, picture
from test_architecture import FLOORS, FRONT_DOORS

DOCS = Path(__file__).parents[1] / "docs"


def test_the_picture_is_up_to_date() -> None:
    stored = (DOCS / "images" / "floors.svg").read_text(encoding="utf-8")
    assert stored == picture(), "run: python tests/floor_picture.py > docs/images/floors.svg"


def test_arrows_lead_down_and_leave_out_what_follows() -> None:
    drawn = arrows()
    assert all(FLOORS[above] > FLOORS[below] for above, below in drawn)
    assert ("cli", "tune") in drawn
    assert ("cli", "errors") not in drawn, "by way of all floors between"


def test_the_page_names_every_floor_and_front_door() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    missing = [name for name in [*FLOORS, *FRONT_DOORS - {"__init__", "__main__"}] if f"`{name}" not in text]
    assert missing == []
