"""Writes docs/config.md from the schema: `python -m frameworm.config.docs > docs/config.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from frameworm.config.checks import NOT_YET
from frameworm.config.describe import expected_of, section_of
from frameworm.config.model_sections import CustomModelConfig
from frameworm.config.overrides import RESERVED, RESERVED_PREFIX
from frameworm.config.schema import MODEL_SECTIONS, Config

RESERVED_FOR = {
    "FRAMEWORM_DATA": "folder of the data sets that tests and benchmarks read",
    "FRAMEWORM_RANKS_PER_GPU": "ranks that may share a GPU",
}
INTRODUCTION = """\
# The config file

<!-- Written by `python -m frameworm.config.docs`; change src/frameworm/config/schema.py instead. -->

A run is described by one YAML file. Every setting has a default, so a file holds only what differs:

```yaml
name: ag_news
workload: text_classifier
data: {dataset: ag_news, root: data/ag_news}
training:
  epochs: 3
  global_batch: 128
  lr: 3e-4
```

A setting can be given in four places; the first one that has it wins:

1. `--set training.lr=1e-3` on the command line; the value is YAML, so `--set observe.sinks=[jsonl,tensorboard]` works.
   If a key is given several times, the last one counts.
2. An environment variable: `FRAMEWORM_TRAINING_LR=1e-3`, or with two underscores between the parts,
   `FRAMEWORM_TRAINING__LR=1e-3`. An empty variable is ignored.
3. The file.
4. The default.

```
FRAMEWORM_SEED=1 frameworm train --config configs/quickstart.yaml --set training.epochs=2
```

Unknown keys, values of the wrong type and impossible combinations end the command before any process starts, with one
line per problem that names the place, the key and the nearest valid one:

```
configs/mine.yaml:6: training.epoch: unknown key; did you mean training.epochs?
--set gpu.device=gpu: gpu.device: expected one of auto, cpu, cuda, got 'gpu'; did you mean cpu?
```

`off`, `no` and `false` mean the same, and so do `on`, `yes` and `true`, or `3e-4` and `3.0e-4`. If `auto` depends on
the machine, it is decided when a run starts; the run's `config.yaml` contains the decision.
"""


def markdown() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *_reserved(), *_tables()]).rstrip() + "\n"


def _reserved() -> Iterator[str]:
    known = ", ".join(f"`{name}` ({RESERVED_FOR[name]})" for name in sorted(RESERVED))
    yield f"These variables are not settings and are ignored here: {known}, and all that begin with `{RESERVED_PREFIX}`"
    yield "(used between frameworm's own processes).\n"


def _tables() -> Iterator[str]:
    fields = Config.model_fields
    yield from _table(
        "Top level", "A whole run.", [(name, fields[name]) for name in fields if not section_of(fields[name])]
    )
    for workload, section in MODEL_SECTIONS.items():
        yield from _table(f"`model` of `{workload}`", section.__doc__, _rows(section), "model")
    yield from _table("`model` of your own workload", CustomModelConfig.__doc__, _rows(CustomModelConfig), "model")
    for name, field in fields.items():
        inner = section_of(field)
        if inner is not None and name != "model":
            yield from _table(f"`{name}`", inner.__doc__, _rows(inner), name)


def _rows(section: type[BaseModel], prefix: str = "") -> list[tuple[str, FieldInfo]]:
    rows = []
    for name, field in section.model_fields.items():
        rows.append((prefix + name, field))
        inner = section_of(field)
        if inner is not None:
            rows += _rows(inner, f"{prefix}{name}.")
    return rows


def _table(title: str, sentence: str | None, rows: list[tuple[str, FieldInfo]], section: str = "") -> Iterator[str]:
    yield f"## {title}\n\n{sentence}\n"
    yield "| key | type | default | what it does |\n|---|---|---|---|"
    for name, field in rows:
        meaning = field.description or ""
        missing = NOT_YET.get(f"{section}.{name}")
        if missing is not None:
            meaning += f" Not in this version yet: {', '.join(missing.values)}."
        cells = (f"`{name}`", expected_of(field), _default(field), meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if isinstance(value, BaseModel):
        return "as below"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, (list, tuple)):
        return "`[" + ", ".join(str(item) for item in value) + "]`"
    return f"`{value}`"


if __name__ == "__main__":
    print(markdown(), end="")
