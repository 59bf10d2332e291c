"""The templates of our HTML pages."""

from __future__ import annotations

import functools
import importlib.resources

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template


@functools.cache
def load_template(name: str) -> Template:
    """A template by file name; it escapes values, and an undefined name is an error."""
    folder = importlib.resources.files("frameworm.report.kit").joinpath("templates")
    loader = FunctionLoader(lambda file: folder.joinpath(file).read_text(encoding="utf-8"))
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)
