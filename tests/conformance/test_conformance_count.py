"""Every entry of the contract is used by a test of this suite."""

from __future__ import annotations

import importlib
from pathlib import Path

from contract_entries import ENTRIES


def test_every_entry_of_the_contract_is_used() -> None:
    used: set[str] = set()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        for value in vars(module).values():
            used |= getattr(value, "covered", frozenset())
    print(f"{len(used)} of {len(ENTRIES)} entries of the contract are used")
    assert sorted(ENTRIES - used) == []
