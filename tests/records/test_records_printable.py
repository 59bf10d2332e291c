"""Words from files are harmless where they leave the program."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworm.records.printable import csv_cell, printable


@settings(deadline=None)
@given(st.text())
def test_nothing_that_is_printed_steers_a_terminal(text: str) -> None:
    shown = printable(text)
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize("letter", ["\x1b", "\x07", "\x08", "\r", "\x7f", "\x9b", "\u202e", "\u2028", "\ufeff"])
def test_each_character_that_does_is_escaped(letter: str) -> None:
    assert printable(f"a{letter}b") == f"a\\u{ord(letter):04x}b"


@settings(deadline=None)
@given(st.text())
def test_json_means_the_same_after_it(text: str) -> None:
    assert json.loads(printable(json.dumps({"a": text}, indent=1))) == {"a": text}


@pytest.mark.parametrize("value", [-1, -0.5, 3, None, "", "-1", "-0.5", "+3e-4", "-1.", "a=b", "ag_news", "-inf"])
def test_numbers_and_plain_words_stay_as_they_are_in_a_cell(value: object) -> None:
    assert csv_cell(value) is value


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-", "-1-cmd()"])
def test_no_cell_begins_as_a_formula_does(text: str) -> None:
    assert csv_cell(text) == f"'{text}"
