"""Identify the experiment of runs without a name: the model, the data and the script."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

_MOST_VALUES = 1024
_MOST_ITEMS = 64
_DEEPEST = 4  # data sets inside data sets


def describe_experiment(model: nn.Module, loader: Any, script: str | None) -> dict[str, str]:
    """Describe the experiment in words that are the same whenever it is started again.

    Args:
        model: As the user built it; its structure counts, its weights do not.
        loader: The training loader; of its data, types, number of samples, first values and file names count.
        script: The script that was started; None for this process's script.
    """
    return {"model": _describe_model(model), "data": _describe_data(loader), "script": script or _main_script()}


def _describe_model(model: nn.Module) -> str:
    lines = [f"{name}: {type(module).__qualname__}" for name, module in model.named_modules()]
    for name, parameter in model.named_parameters():
        shape = "?" if isinstance(parameter, nn.parameter.UninitializedParameter) else tuple(parameter.shape)
        lines.append(f"{name}: {shape}")
    return f"{type(model).__qualname__} {_digest(lines)}"


def _describe_data(loader: Any) -> str:
    dataset = getattr(loader, "dataset", loader)
    count = ""
    with suppress(Exception):  # user code; a stream may have no length
        count = f" of {len(dataset)}"
    name = getattr(dataset, "__qualname__", type(dataset).__qualname__)
    return f"{name}{count} {_digest(list(_lines(dataset, _DEEPEST)))}"


def _lines(dataset: Any, depth: int) -> Iterator[str]:
    """Describe what a data set holds, except numbers, which may be counters, and dicts, which may be caches."""
    yield type(dataset).__qualname__
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        for item in value[:_MOST_ITEMS] if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield f"{name}: {tuple(item.shape)} {item.dtype}"
                with suppress(Exception):  # sparse, transposed or without values: the shape is enough
                    yield str(item.detach().view(-1)[:_MOST_VALUES].tolist())
            elif isinstance(item, np.ndarray):
                yield f"{name}: {item.shape} {item.dtype} {item.flat[:_MOST_VALUES].tolist()}"
            elif isinstance(item, str):
                yield f"{name}: {PurePath(item).name}"  # paths may differ between machines
            elif isinstance(item, Dataset) and depth:
                yield from _lines(item, depth - 1)


def _main_script() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return "interactive" if path is None else os.path.relpath(path)  # relative to the working directory, as runs are


def _digest(lines: list[str]) -> str:
    return f"({hashlib.sha256(os.linesep.join(lines).encode()).hexdigest()[:12]})"
