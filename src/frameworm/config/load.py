"""Read a config: file, environment variables and overrides become one checked `Config`.

Precedence: `--set` > `FRAMEWORM_*` > file > defaults.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from frameworm.config.checks import check_buildable, find_problems
from frameworm.config.describe import CLOSE, nearest, show
from frameworm.config.keys import key_tree
from frameworm.config.model_sections import CustomModelConfig
from frameworm.config.overrides import (
    PREFIX,
    Assignment,
    assign,
    assignments_of_environment,
    assignments_of_overrides,
)
from frameworm.config.problems import Origin, Origins, Problem, make_error, problems_of
from frameworm.config.schema import Config, model_section_of
from frameworm.config.source import SourceReader, YamlError, write_yaml
from frameworm.errors import ConfigError

_MOST_BYTES = 2**20
WHAT_A_CONFIG_IS = (
    "a config is a mapping of sections such as model, data and training; `frameworm init quickstart` writes one"
)
_QUICKSTART = "quickstart.yaml"  # named in every guide, and absent where only the package is installed


def load_config(path: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """Read and check a config file.

    Args:
        path: YAML file.
        overrides: Settings such as `training.lr=3e-4`; they win over everything, the later over the earlier.
        environ: Variables to take FRAMEWORM_* from; default: those of the process. Pass `{}` to read back the config of
            a stored run.

    Returns:
        The config, with the cache folder filled in; `resolve` does the rest.

    Raises:
        ConfigError: One line per problem, each with the place, the key and what to do.
    """
    label = show_path(path)
    return load_config_from_text(_read_text(path, label), label, overrides, environ)


def load_config_from_text(
    text: str, label: str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Config:
    """Check the text of a config file, for instance from `RunFolder.read_config`.

    Args:
        text: YAML.
        label: Name of the source in messages.
        overrides: As in `load_config`.
        environ: As in `load_config`.

    Raises:
        ConfigError: One line per problem.
    """
    reader = SourceReader(label)
    try:
        values = reader.read(text)
    except YamlError as error:
        raise ConfigError(f"{label}:{error.line}: {error}") from None
    if values is None and not reader.problems:
        raise ConfigError(f"{label}: the file is empty; {WHAT_A_CONFIG_IS}")
    if not isinstance(values, dict):
        text = f"expected a mapping, got {show(values)}; {WHAT_A_CONFIG_IS}"
        raise make_error(reader.problems or [Problem((), text, origin=Origin(label, 1))], Origins())
    return _build(values, reader.origins, reader.problems, overrides, environ, label)


def load_runnable(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Like `load_config`, for a config that will be used to train.

    Raises:
        ConfigError: There is a problem, or the config comes from a run of the Python API.
    """
    config = load_config(path, overrides)
    check_buildable(config, show_path(path))
    return config


def load_config_from_mapping(
    values: Mapping[str, Any], overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Config:
    """Build and check a config from plain values, laid out as in the file.

    Args:
        values: Sections and settings; they are not modified.
        overrides: As in `load_config`.
        environ: As in `load_config`.

    Raises:
        ConfigError: One line per problem.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"expected a mapping, got {show(values)}; {WHAT_A_CONFIG_IS}")
    return _build(_plain_copy(values), Origins(), [], overrides, environ, "")


def dump_config(config: Config, without: Mapping[str, Collection[str] | None] | None = None) -> str:
    """Return the config as YAML that `load_config` reads back to an equal config.

    Args:
        config: Any config.
        without: Keys to omit, by section; None omits the whole section.

    Raises:
        ConfigError: The model section of a custom workload contains something other than plain values.
    """
    try:
        left_out: Any = {section: True if keys is None else set(keys) for section, keys in (without or {}).items()}
        return write_yaml(_plain_copy(config.model_dump(exclude=left_out)))
    except yaml.representer.RepresenterError as error:
        raise ConfigError(f"model: {show(error.args[-1])} cannot be written to YAML; use plain values") from None


def default_cache_dir(environ: Mapping[str, str]) -> str:
    """Return the user's cache folder for frameworm.

    Args:
        environ: Variables; XDG_CACHE_HOME is honoured only if it is absolute, as its specification requires.
    """
    cache_home = Path(environ.get("XDG_CACHE_HOME", ""))
    if not cache_home.is_absolute():
        cache_home = Path(environ.get("HOME") or Path.home()) / ".cache"
    return str(cache_home / "frameworm")


def _build(
    values: dict[str, Any],
    origins: Origins,
    problems: list[Problem],
    overrides: Sequence[str],
    environ: Mapping[str, str] | None,
    label: str,
) -> Config:
    variables = os.environ if environ is None else environ
    model_section = model_section_of(_workload(values, overrides, variables))
    tree = key_tree(Config, model_section)
    own_workload = model_section is CustomModelConfig
    problems = list(problems)
    for item in (
        *assignments_of_environment(variables, tree, own_workload),
        *assignments_of_overrides(overrides, tree, own_workload),
    ):
        if isinstance(item, Assignment):
            assign(values, origins, item)
        else:
            problems.append(item)
    config: Config | None = None
    try:
        config = Config.model_validate(values)
        problems += find_problems(config)
    except ValidationError as error:
        told = {key for problem in problems for key in problem.keys}
        problems += [item for item in problems_of(error, Config, model_section) if not told.intersection(item.keys)]
    if problems or config is None:
        raise make_error(problems, origins, label)
    if config.data.cache_dir == "auto":
        config.data.cache_dir = default_cache_dir(variables)
    config._origins = origins
    return config


def _workload(values: Mapping[str, Any], overrides: Sequence[str], variables: Mapping[str, str]) -> Any:
    """The workload that will take effect. It is needed first, because it decides which keys `model` has."""
    workload = values.get("workload", "text_classifier")
    workload = variables.get(f"{PREFIX}WORKLOAD") or workload
    for text in overrides:
        name, equals, raw = text.partition("=")
        if equals and name.strip() == "workload":
            workload = raw
    return workload.strip().strip("'\"") if isinstance(workload, str) else workload


def _plain_copy(value: Any) -> Any:
    """A copy that can be merged into: mappings become dicts and tuples become lists, recursively."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {name: _plain_copy(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_copy(item) for item in value]
    return value


def show_path(path: str | Path) -> str:
    """Format a path for messages."""
    text = str(path)
    return text if text.isprintable() else repr(text)[1:-1]


def _read_text(path: str | Path, label: str) -> str:
    file = Path(path)
    try:
        with file.open("rb") as opened:  # any file that can be read: `--config <(command)` is a pipe
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"{label}: larger than a config can be ({_MOST_BYTES // 2**20} MiB)")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{label}: no such file{_similar_file(file)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{label}: this is a folder; give a config file in it") from None
    except UnicodeDecodeError as error:
        byte, position = error.object[error.start], error.start
        raise ConfigError(f"{label}: not UTF-8 text (byte 0x{byte:02x} at {position}); save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{label}: cannot be read: {reason}") from None


def _similar_file(file: Path) -> str:
    try:
        names = [entry.name for entry in file.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        names = []
    name, alike = nearest(file.name, names) if names else ("", 0.0)
    if alike >= CLOSE:
        return f"; did you mean {show_path(file.parent / name)}?"
    return f"; `frameworm init quickstart` writes {_QUICKSTART}" if file.name == _QUICKSTART else ""
