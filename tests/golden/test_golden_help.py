"""`frameworm --help` and the help of every verb say what they said."""

from __future__ import annotations

import pytest
from golden_help import FOLDER, drawn_alike, help_of, options_in, verbs


def test_the_verbs_are_the_same() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(verbs())


@pytest.mark.parametrize("verb", verbs())
def test_help_is_the_same(verb: str) -> None:
    """Word for word where typer, rich and click are those of the golden; else each option must still be there."""
    found, expected = help_of(verb), (FOLDER / f"{verb}.txt").read_text(encoding="utf-8")
    if drawn_alike():
        assert found == expected
    else:
        assert options_in(found) == options_in(expected)
