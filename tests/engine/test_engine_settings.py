"""The keywords of the trainers: each setting once, with the type its section gives it, in signatures and for mypy."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from frameworm import Config, Trainer
from frameworm.config.describe import members
from frameworm.config.section import OffWord, OnAuto
from frameworm.distributed import DDPTrainer, DistributedTrainer
from frameworm.engine import settings as module
from frameworm.engine.settings import SECTIONS, TOP_LEVEL, DDPSettings, DistributedSettings, Settings
from frameworm.errors import ConfigError

OF_OBJECTS = {"optimizer", "loggers", *module._OF_OPTIMIZER, *module._OF_LOADER}
MODEL = torch.nn.Linear(2, 2)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


def _annotation(annotation: Any, metadata: Sequence[Any]) -> str:
    """How a TypedDict writes what a field of a section takes."""
    words: list[str] = []
    kinds: list[str] = []
    limits: list[Any] = []
    for kind, found in members(annotation, metadata):
        limits += found
        origin = get_origin(kind)
        if kind is NoneType:
            continue
        if origin is Literal:
            words += [f'"{word}"' for word in get_args(kind)]
        elif origin is list:
            kinds.append(f"Sequence[{_annotation(get_args(kind)[0], [])}]")
        elif origin is tuple:
            kinds.append("tuple[" + ", ".join(_annotation(item, []) for item in get_args(kind)) + "]")
        elif issubclass(kind, BaseModel):
            kinds.append(f"{kind.__name__} | Mapping[str, Any]")
        else:
            kinds.append(kind.__name__)
    if any(limit is OffWord for limit in limits):
        words.append("False")
    if any(limit is OnAuto for limit in limits):
        kinds.append("bool")
    ways = [f"Literal[{', '.join(words)}]"] if words else []
    off = ["Off", "None"] if NoneType in {kind for kind, _ in members(annotation)} else []
    return " | ".join(dict.fromkeys([*ways, *kinds, *off]))


def _expected() -> dict[str, str]:
    fields: dict[str, FieldInfo] = {name: Config.model_fields[name] for name in (*TOP_LEVEL, *SECTIONS)}
    for section in SECTIONS:
        for name, field in type(getattr(Config(), section)).model_fields.items():
            fields.setdefault(name, field)
    found = {name: _annotation(field.annotation, field.metadata) for name, field in fields.items()}
    found["dir"] = found["dir"].replace("str", "str | Path")  # a folder
    return {name: text for name, text in found.items() if name not in OF_OBJECTS}


def _written(kind: Any) -> dict[str, str]:
    return {name: hint.__forward_arg__.replace("'", '"') for name, hint in kind.__annotations__.items()}


def test_every_setting_is_a_keyword_of_its_type() -> None:
    assert _written(Settings) == _expected()


def test_trainers_of_ranks_take_them_too() -> None:
    objects = set(inspect.signature(Trainer).parameters) - {"model", "optimizer"} - set(_written(Settings))
    own = {"backend", "find_unused_parameters"}
    assert set(_written(DistributedSettings)) == (set(_written(Settings)) - own) | objects
    more = {"use_amp", "gradient_accumulation_steps"}
    assert set(_written(DDPSettings)) == ((set(_written(Settings)) - {"strategy"}) | objects | more)


@pytest.mark.parametrize("kind", [Trainer, DistributedTrainer, DDPTrainer])
def test_signatures_name_every_setting_with_its_default(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    assert not [item for item in parameters.values() if item.kind is item.VAR_KEYWORD]
    assert parameters["every_steps"].default == 500
    assert parameters["clip_norm"].default is None  # of the Python API, not of config files
    assert {"loss_fn", "run_dir", "gpu", "seed", "compile_model"} <= set(parameters)


def test_a_subclass_has_the_signature_that_it_writes() -> None:
    class Mine(Trainer):
        def __init__(self, size: int) -> None:
            super().__init__(MODEL, _optimizer())

    assert list(inspect.signature(Mine).parameters) == ["size"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("clip_nrm", "clip_norm"), ("acumulation", "accumulation"), ("run_dirr", "run_dir"), ("los_fn", "loss_fn")],
)
def test_a_typo_is_an_error_that_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting {wrong}; the nearest is {right}$"):
        Trainer(MODEL, _optimizer(), **{wrong: 1})  # type: ignore[misc]


@pytest.mark.parametrize("name", [*module._OF_OPTIMIZER, *module._OF_LOADER])
def test_what_an_object_brings_is_refused_as_a_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} has no effect here: the (optimizer|loader) brings it"):
        Trainer(MODEL, _optimizer(), **{name: 1})  # type: ignore[misc]


def test_values_are_taken_as_python_writes_them() -> None:
    trainer = Trainer(MODEL, _optimizer(), run_dir=None, dir=Path("fast"), checkpoint_modules=("Block",), every_steps=2)
    config = trainer.config
    assert (config.checkpoint.dir, config.memory.checkpoint_modules) == ("fast", ["Block"])
