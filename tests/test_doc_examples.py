"""docs/python.md: every example runs as it stands; with the pages on measuring it holds every public name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import frameworm
import frameworm.distributed
from frameworm import FramewormError, compat, errors

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = [
    (section.partition("\n")[0], code)
    for section in re.split(r"^##+ ", TEXT, flags=re.MULTILINE)
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
]


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, data_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FRAMEWORM_DATA_CACHE_DIR", str(data_cache_dir))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_all_examples_are_found() -> None:
    assert len(EXAMPLES) == TEXT.count("```python") >= 12


@pytest.mark.parametrize("module", [frameworm, frameworm.distributed], ids=lambda module: module.__name__)
def test_every_public_name_is_used_in_an_example(module: object) -> None:
    others = [
        (PAGE.parent / name).read_text(encoding="utf-8") for name in ("measuring.md", "communication.md", "clusters.md")
    ]
    code = "\n".join([*(code for _, code in EXAMPLES), *re.findall(r"```python\n(.*?)```", "".join(others), re.DOTALL)])
    missing = [name for name in module.__all__ if not re.search(rf"\b{name}\b", code)]  # type: ignore[attr-defined]
    assert missing == []


@pytest.mark.slow(cases="all")
@pytest.mark.filterwarnings("default::UserWarning")  # of some processors' bf16
@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[re.sub(r"\W+", "_", title) for title, _ in EXAMPLES])
def test_the_example_runs(title: str, code: str) -> None:
    exec(compile(code, f"docs/python.md: {title}", "exec"), {"__name__": "__main__"})


def test_every_error_and_old_spelling_is_on_the_page() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, FramewormError) and kind is not FramewormError:
            assert f"| `{name}` | {(kind.__doc__ or '').splitlines()[0]} |" in TEXT
    for spelling in compat.EVERY:
        assert f"| `{spelling.old}` | `{spelling.new}` | {spelling.removed_in} |" in TEXT
