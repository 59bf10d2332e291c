"""Whatever a file, an override or a variable holds, the answer is a config or a ConfigError of plain lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frameworm.config.keys import dotted, key_tree
from frameworm.config.load import dump_config, load_config, load_config_from_mapping
from frameworm.config.schema import Config, GPTModelConfig
from frameworm.errors import ConfigError

KEYS = [dotted(path) for path in key_tree(Config, GPTModelConfig)]
WORDS = sorted({part for key in KEYS for part in key.split(".")})
TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
LOOKALIKES = [
    "off",
    "3e-4",
    "1:30",
    "1_0",
    "0x1f",
    "010",
    "~",
    "null",
    "",
    "<<",
    "=",
    "yes",
    ".5",
    "1.",
    "+1",
    "2024-01-01",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**300, max_value=10**301)
    | st.floats()
    | TEXT
    | st.sampled_from(["auto", "ddp", "gpt", "a:b", "text", *LOOKALIKES])
)
NAMES = st.sampled_from(WORDS) | TEXT
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)
MARKS = [
    ":",
    ": ",
    "\n",
    "\n  ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "&a ",
    "*a",
    "!!int ",
    "!!set ",
    "!x ",
    "!!float ",
    "|",
    ">",
]
MARKS += [
    "!!bool ",
    "%YAML 1.1\n",
    "---\n",
    "...\n",
    "? ",
    "'",
    '"',
    "\\U",
    "\\x",
    "#",
    "\t",
    "<<: ",
    "1e3",
    "\ufeff",
    "\x85",
]
YAML_BITS = st.lists(st.sampled_from([*WORDS, *MARKS, "1" * 5000]), max_size=25).map("".join)

quiet = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def lines_of(error: ConfigError) -> list[str]:
    lines = str(error).splitlines()
    assert all(line.strip() and line.isprintable() and len(line) < 600 for line in lines)
    return lines


@quiet
@given(st.binary(max_size=60) | (YAML_BITS | TEXT).map(lambda text: text.encode()))
def test_arbitrary_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(content)
    try:
        load_config(file, environ={})
    except ConfigError as error:
        lines = lines_of(error)
        assert all(line.startswith(f"{file}:") for line in lines)


@pytest.mark.slow
@quiet
@given(
    st.dictionaries(st.sampled_from([name for name in WORDS if name in Config.model_fields]) | TEXT, TREES, max_size=4)
)
def test_arbitrary_values_for_real_keys(tmp_path: Path, values: dict[str, Any]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    for read in (lambda: load_config(file, environ={}), lambda: load_config_from_mapping(values, environ={})):
        try:
            read()
        except ConfigError as error:
            lines_of(error)


@quiet
@given(st.lists(st.tuples(st.sampled_from(KEYS) | TEXT, TEXT | YAML_BITS), max_size=3), st.booleans())
def test_arbitrary_overrides_and_variables(pairs: list[tuple[str, str]], own_workload: bool) -> None:
    values = {"workload": "a:b"} if own_workload else {}
    variables = {f"FRAMEWORM_{key.replace('.', '_').upper()}": value for key, value in pairs}
    for overrides, environ in (([f"{key}={value}" for key, value in pairs], {}), ([], variables)):
        try:
            load_config_from_mapping(values, overrides, environ)
        except ConfigError as error:
            for line in lines_of(error):
                assert line.startswith(("--set ", "FRAMEWORM_", "data.dataset: the gpt", "workload: "))


NUMBERS = st.floats(min_value=1e-300, max_value=1e300)
PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.sampled_from(LOOKALIKES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter(lambda key: key != "<<"), inner, max_size=3)
    ),
    max_leaves=5,
)
OWN_SETTINGS = st.dictionaries(st.text(alphabet="abcdefgh_", min_size=1, max_size=6), PLAIN_VALUES, max_size=3)
CONFIGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "workload": st.just("my.own:workload"),
        "model": OWN_SETTINGS,
        "data": st.fixed_dictionaries({"root": TEXT, "cache_dir": st.just("c")}),
        "training": st.fixed_dictionaries(
            {"lr": NUMBERS, "clip_norm": st.none() | NUMBERS, "micro_batch": st.just("auto") | st.integers(1, 10**30)},
            optional={"early_stop": st.none() | st.fixed_dictionaries({"patience": st.integers(1, 9)})},
        ),
        "checkpoint": st.fixed_dictionaries({"every_steps": st.none() | st.integers(1, 10**9)}),
    }
)


@pytest.mark.slow
@quiet
@given(CONFIGS)
def test_a_dumped_config_reads_back_equal(tmp_path: Path, values: dict[str, Any]) -> None:
    config = load_config_from_mapping(values, environ={})
    file = tmp_path / "x.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file, environ={}) == config


@pytest.mark.parametrize(
    "text", ["'\\ud800': 1", '"\\ud800": 1', 'name: "\\ud800"', 'model: {"\\ud800": 1}', "seed: " + "9" * 5000]
)
def test_texts_that_cannot_be_printed(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    str(caught.value).encode()
    lines_of(caught.value)
