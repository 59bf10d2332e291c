"""How a batch identifies its padding, simple enough to be written into a script.

A layout is plain data: `form` of the batch (mapping, list or tuple) and its `length`, the members to `cut`, the `side`
of the padding, and `real`: members with a test each, one of which holds at every position that is not padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from frameworm.attach.padding import IGNORED, padding_in, trimmed

_Test = tuple[Any, str]


def layout_of(batch: Any) -> dict[str, Any] | None:
    """Return the layout of a batch that can be trimmed; None if it is not padded or not this simple."""
    kind: type = type(batch)
    if isinstance(batch, Mapping):
        form = "mapping"
    elif kind in (list, tuple):
        form = kind.__name__
    else:
        return None
    members = dict(batch.items() if isinstance(batch, Mapping) else enumerate(batch))
    after = trimmed(batch)
    cut = [key for key, item in members.items() if _is_cut(item, after[key])]
    if not cut or not all(isinstance(key, (str, int)) for key in cut):
        return None
    before, left = members[cut[0]], after[cut[0]]
    width = left.shape[1]
    sides = {"right": before[:, :width], "left": before[:, -width:]}
    side = next((side for side, kept in sides.items() if torch.equal(kept, left)), None)
    tables = {key: members[key] for key in cut if members[key].dim() == 2}
    words = torch.stack([torch.from_numpy(~pads) for pads in padding_in(batch) or []]).any(0)
    real = (
        None
        if side is None
        else next((tests for tests in _tests(tables) if _keeps(tests, tables, side, width, words)), None)
    )
    if real is None:
        return None
    return {
        "form": form,
        "length": len(members),
        "cut": cut,
        "side": side,
        "real": [[key, test] for key, test in real],
    }


def _is_cut(before: Any, after: Any) -> bool:
    return isinstance(before, torch.Tensor) and before.shape != after.shape


def _tests(tables: Mapping[Any, torch.Tensor]) -> Iterator[list[_Test]]:
    """Yield tests for real positions: a mask, or labels that are not ignored together with non-padding IDs."""
    by_name = sorted(tables, key=lambda key: "mask" not in str(key).lower())
    masks = [key for key in by_name if bool(((tables[key] == 0) | (tables[key] == 1)).all())]
    for key in masks:
        if tables[key].dtype == torch.bool or "mask" in str(key).lower():
            yield [(key, "!= 0")]
            yield [(key, "== 0")]
    ignoring = [key for key, table in tables.items() if bool((table == IGNORED).any())]
    for labels in ignoring:
        for words in (key for key in tables if key != labels):
            pads = tables[words][tables[labels] == IGNORED]
            for value in {int(pads[0]), int(pads[-1])}:
                yield [(labels, f"!= {IGNORED}"), (words, f"!= {value}")]
    for key in masks:
        yield [(key, "!= 0")]
        yield [(key, "== 0")]


def _keeps(tests: list[_Test], tables: Mapping[Any, torch.Tensor], side: str, width: int, words: torch.Tensor) -> bool:
    """Whether the tests cut a batch to this width; a mask must not hide words, as a table of tags may."""
    real = torch.zeros_like(next(iter(tables.values())), dtype=torch.bool)
    for key, test in tests:
        sign, value = test.split()
        same = tables[key] == int(value)
        real |= same if sign == "==" else ~same
    columns = real.any(0).nonzero()
    if not columns.numel() or (len(tests) == 1 and not bool((real | ~words).all())):
        return False
    last = int(columns.max()) + 1 if side == "right" else real.shape[1] - int(columns.min())
    return width - 8 < last <= width
