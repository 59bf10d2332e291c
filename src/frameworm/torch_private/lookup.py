"""Finds a private name of torch, or says clearly that this torch no longer has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from frameworm.errors import TorchVersionError


def attribute(owner: Any, name: str) -> Any:
    """A private attribute of something of torch's.

    Raises:
        TorchVersionError: This torch has no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _missing(owner, name) from None


def function(owner: Any, name: str) -> Callable[..., Any]:
    """A private function of torch's, or one that raises `TorchVersionError` when it is called."""
    found: Callable[..., Any] | None = getattr(owner, name, None)
    if found is not None:
        return found

    def absent(*_inputs: Any, **_named: Any) -> NoReturn:
        raise _missing(owner, name)

    return absent


def _missing(owner: Any, name: str) -> TorchVersionError:
    place = getattr(owner, "__name__", type(owner).__name__)
    return TorchVersionError(
        f"torch {torch.__version__} has no `{name}` in `{place}`, which frameworm needs here: install a version of "
        "torch that frameworm is tested with (2.11 to 2.13), or a newer frameworm"
    )
