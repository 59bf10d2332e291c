from __future__ import annotations

import re
from pathlib import Path

from frameworm.tune.knobs.registry import GROUP, all_knobs

DOCS = Path(__file__).parent.parent.parent / "docs" / "tune.md"


def test_the_page_lists_every_knob_with_its_settings_and_numbers() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = {row[0]: row for row in re.findall(r"^\| (\w+) \| (`.*?`) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)}
    words = {"nothing": "the same", "rounding": "rounding", "more": "approximate"}
    assert set(rows) == {knob.name for knob in all_knobs()}
    for knob in all_knobs():
        _, settings, description, numbers = rows[knob.name]
        assert re.findall(r"`(.*?)`", settings) == list(knob.keys)
        assert description == knob.description.rstrip(".")
        if isinstance(knob.numerics_effect, str):
            assert numbers == words[knob.numerics_effect]
        else:
            for value, told in re.findall(r"`(\w+)`(?=[^:]*: (\w+))", numbers):
                assert words[knob.numerics_effect(value)] == told
    assert f'"{GROUP}"' in text


def test_the_knob_of_the_example_is_one() -> None:
    found = re.search(r"```python\n(# my_package/knobs.py\n.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    names: dict[str, object] = {}
    exec(found[1], names)
    from frameworm.tune.knobs import Knob

    assert isinstance(names["CACHE"], Knob)
