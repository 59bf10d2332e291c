"""What all config sections share: the values they accept, and how they refuse others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from frameworm.config.describe import kinds
from frameworm.config.problems import Origins, make_error, problems_of

Auto = Literal["auto"]


def _off_is_a_word(value: Any) -> Any:
    """Convert false back to the word `off`, because YAML reads a bare `off` as false."""
    return "off" if value is False else value


def _off_is_none(value: Any) -> Any:
    return None if value is False or (isinstance(value, str) and value in ("off", "none")) else value


def _on_is_auto(value: Any) -> Any:
    """Accept `true` for `auto`."""
    return "auto" if value is True else _off_is_a_word(value)


OffWord = BeforeValidator(_off_is_a_word)
OffNone = BeforeValidator(_off_is_none)
OnAuto = BeforeValidator(_on_is_auto)


Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the config; unknown keys and values of the wrong type are errors."""

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

        # Tells pydantic that nested sections need not be built through this method.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def model_section_in(cls, values: Mapping[str, Any]) -> type[Section] | None:
        """Return the class of the `model` section for raw values; only a whole config has one."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _plain_values(cls, values: Any) -> Any:
        """Accept the Python and YAML spellings of the same value: paths, tuples, `1e3` for a count."""
        if not isinstance(values, dict):
            return values
        return {
            name: cls.as_yaml_would_give_it(name, value) if name in cls.model_fields else value
            for name, value in values.items()
        }

    @classmethod
    def as_yaml_would_give_it(cls, name: str, value: Any) -> Any:
        """Convert the value of one field: paths to text, tuples to lists and whole floats to counts."""
        allowed = kinds(cls.model_fields[name])
        if isinstance(value, PurePath) and str in allowed:
            return str(value)
        if isinstance(value, float) and int in allowed and float not in allowed and value.is_integer():
            return int(value)
        if isinstance(value, (list, tuple)):
            origins = {get_origin(kind) for kind in allowed}
            return tuple(value) if tuple in origins else list(value) if list in origins else value
        return value
