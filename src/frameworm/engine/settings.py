"""Keyword settings of the Python API, laid onto a config.

`Trainer(model, optimizer, clip_norm=1.0, every_steps=100)` sets `training.clip_norm` and `checkpoint.every_steps`: a
keyword is the name of a config field, and a whole section (`gpu=GPUConfig(...)`) may be given as well.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from frameworm.config.keys import dotted
from frameworm.config.model_sections import PYTHON_WORKLOAD, PythonModelConfig
from frameworm.config.problems import problems_of
from frameworm.config.schema import Config, Section
from frameworm.engine.given import OWN_LOOP
from frameworm.errors import ConfigError

SECTIONS = ("training", "gpu", "memory", "parallel", "checkpoint", "storage", "observe")
TOP_LEVEL = ("name", "seed")
OBJECTS = ("model", "optimizer", "loss_fn", "scheduler", "callbacks", "metrics", "loggers", "processing_class")
OLDER_SPELLINGS = {"gradient_accumulation_steps": "accumulation", "device_type": "device"}


def api_defaults() -> Config:
    """Where the Python API starts from: the user's model, optimizer and precision as they are."""
    config = Config()
    config.training.clip_norm = None
    config.training.accumulation = 1
    config.training.schedule = "constant"
    config.gpu.mixed_precision = "off"
    return config


def as_python_run(config: Config, model: nn.Module) -> Config:
    """A copy of the config that says where the model comes from: a script, not a workload of a config file."""
    kind = type(getattr(model, "_orig_mod", model))  # torch.compile wraps it
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    described = PythonModelConfig(
        script=None if file is None else str(Path(file).absolute()), class_name=f"{kind.__module__}.{kind.__qualname__}"
    )
    data = config.data.model_copy(update={"dataset": PYTHON_WORKLOAD})
    return config.model_copy(update={"workload": PYTHON_WORKLOAD, "model": described, "data": data})


def apply_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy of the config with keyword settings applied.

    Raises:
        ConfigError: A keyword is unknown (the nearest is named) or its value does not fit.
    """
    config = config.model_copy(deep=True)
    # A name that two sections have is the first one's: `compression` is of gradients, and that of checkpoints needs its
    # section.
    places = {name: section for section in reversed(SECTIONS) for name in type(getattr(config, section)).model_fields}
    for given, value in settings.items():
        name = OLDER_SPELLINGS.get(given, given)
        target: Section
        if name in SECTIONS or name in TOP_LEVEL:
            target = config
        elif name in places:
            target = getattr(config, places[name])
        else:
            known = [*places, *SECTIONS, *TOP_LEVEL, *OLDER_SPELLINGS]
            if callable(value) or _holds_optimizer(value):
                raise ConfigError(
                    f"unknown setting {given}: settings are values, and of functions and objects Trainer takes "
                    f"{', '.join(OBJECTS)}. {OWN_LOOP}"
                )
            near = difflib.get_close_matches(given, [*known, *OBJECTS], n=1, cutoff=0.0)
            raise ConfigError(f"unknown setting {given}; the nearest is {near[0]}")
        try:
            setattr(target, name, value)
        except ValidationError as error:
            found = problems_of(error, type(target))
            lines = [f"{dotted((given, *problem.keys[0][1:]))}: {problem.text}" for problem in found]
            raise ConfigError("\n".join(lines)) from None
    return config


def _holds_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer, or a collection with one in it."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(item, torch.optim.Optimizer) for item in items)
