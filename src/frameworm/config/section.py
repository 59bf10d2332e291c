"""What all sections of a config share: which values they take, and how they refuse others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from frameworm.config.describe import kinds
from frameworm.config.problems import Origins, make_error, problems_of

Auto = Literal["auto"]


def _off_is_a_word(value: Any) -> Any:
    """YAML reads a bare `off` as false; settings whose values are words take it back as the word."""
    return "off" if value is False else value


def _off_is_none(value: Any) -> Any:
    return None if value is False or (isinstance(value, str) and value in ("off", "none")) else value


def _on_is_auto(value: Any) -> Any:
    """`true` and `false` are older spellings of `auto` and `off`."""
    return "auto" if value is True else _off_is_a_word(value)


OffWord = BeforeValidator(_off_is_a_word)
OffNone = BeforeValidator(_off_is_none)
OnAuto = BeforeValidator(_on_is_auto)


Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the config; unknown keys and values of another type are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_assignment=True, protected_namespaces=()
    )

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                problems = problems_of(error, type(self), self.model_section_in(values))
                raise make_error(problems, Origins()) from None

        # Tells pydantic that sections inside sections need not be built through this method.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def model_section_in(cls, values: Mapping[str, Any]) -> type[Section] | None:
        """The class of the `model` section among raw values; only a whole config has one."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _as_yaml_would_give_it(cls, values: Any) -> Any:
        """Take what Python callers and YAML write for the same thing: paths, tuples, `1e3` for a count."""
        if not isinstance(values, dict):
            return values
        plain = dict(values)
        for name, field in cls.model_fields.items():
            value = plain.get(name)
            allowed = kinds(field)
            if isinstance(value, PurePath) and str in allowed:
                plain[name] = str(value)
            elif isinstance(value, float) and int in allowed and float not in allowed and value.is_integer():
                plain[name] = int(value)
            elif isinstance(value, (list, tuple)):
                origins = {get_origin(kind) for kind in allowed}
                plain[name] = tuple(value) if tuple in origins else list(value) if list in origins else value
        return plain
