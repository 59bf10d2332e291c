"""Hooks of mkdocs.yml: pages made from the code, and links from docs/ to files elsewhere in the repository.

Pages are written so that their links work where the repository is read. A link that leaves docs/ (to a result, a
config, an example) leads to a copy of that file in the site; README.md is the front page.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COPIES = "repository"  # where the site keeps files from outside docs/
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)([^)\s]*\))")
CODE = re.compile(r"```.*?```", re.DOTALL)
MODULES = ("frameworm", "frameworm.distributed", "frameworm.api", "frameworm.tune.knobs")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page, the reference pages and every file that a page links to."""
    sys.path.insert(0, str(ROOT / "src"))
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/command_line.md", content=command_line()))
    files.append(File.generated(config, "reference/python_api.md", content=python_api()))
    waiting = [ROOT / "README.md", *DOCS.rglob("*.md")]
    copied: set[str] = set()
    while waiting:
        page = waiting.pop()
        for target in targets(page):
            place = site_path(target)
            if DOCS in target.parents or target == ROOT / "README.md" or place in copied or not target.is_file():
                continue
            copied.add(place)
            if target.suffix == ".md":
                waiting.append(target)
                files.append(File.generated(config, place, content=target.read_text(encoding="utf-8")))
            else:
                files.append(File.generated(config, place, content=target.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to where the site has the files; in tables, take the backslash off a `|` in code."""
    here = page.file.src_uri
    source = source_of(here)
    folder = PurePosixPath(here).parent

    def moved(match: re.Match[str]) -> str:
        if "://" in match[2] or match[2].startswith("mailto:"):
            return match[0]
        place = PurePosixPath(site_path((source.parent / match[2]).resolve()))
        up = [".."] * len(folder.parts)
        return match[1] + "/".join([*up, *place.parts]) + match[3]

    parts = re.split(f"({CODE.pattern})", markdown, flags=re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(moved, bars_in_code(part)) for part in parts)


def bars_in_code(text: str) -> str:
    """Tables as Python-Markdown reads them: there a `|` in code divides no cells and takes no backslash."""
    row = re.compile(r"^\|.*\|$", re.MULTILINE)
    return row.sub(lambda line: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line[0]), text)


def targets(page: Path) -> Iterator[Path]:
    """Files that a page links to."""
    for match in LINK.finditer(CODE.sub("", page.read_text(encoding="utf-8"))):
        if "://" not in match[2]:
            yield (page.parent / match[2]).resolve()


def site_path(file: Path) -> str:
    """Where the site has a file of the repository."""
    if file == ROOT / "README.md":
        return "index.md"
    if DOCS in file.parents:
        return file.relative_to(DOCS).as_posix()
    return f"{COPIES}/{file.relative_to(ROOT).as_posix()}"


def source_of(place: str) -> Path:
    """The file of the repository that a page of the site is made from; the inverse of `site_path`."""
    if place == "index.md":
        return ROOT / "README.md"
    if place.startswith(f"{COPIES}/"):
        return ROOT / place[len(COPIES) + 1 :]
    return DOCS / place


def command_line() -> str:
    """The reference of the command line, from the help of each verb."""
    import typer.main

    from frameworm.cli.main import app

    lines = ["# Command line", "", "The options of every verb, as `frameworm VERB --help` prints them.", ""]
    for name, command in verbs(typer.main.get_command(app), ""):
        lines += [f"## frameworm{name}", ""]
        paragraphs = (command.help or "").split("\n\n")
        for paragraph in paragraphs:
            text = " ".join(paragraph.replace("\b", "").split())
            before, found, example = text.partition(": frameworm ")
            if found:
                lines += [f"{before}:", "", "```bash", f"frameworm {example}".replace(" \\ ", " \\\n  "), "```", ""]
            else:
                lines += [text, ""]
        context = command.context_class(command)
        records = [record for parameter in command.params if (record := parameter.get_help_record(context))]
        lines += ["| option | what it does |", "|---|---|"] if records else []
        for option, text in records:
            meaning = " ".join(html.escape(text, quote=False).replace("|", "&#124;").replace("*", "&#42;").split())
            lines.append(f"| `{option}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def verbs(group: Any, before: str) -> Iterator[tuple[str, Any]]:
    """The verbs of a group and, after each, those below it."""
    for name, command in group.commands.items():
        yield f"{before} {name}", command
        if hasattr(command, "commands"):
            yield from verbs(command, f"{before} {name}")


def python_api() -> str:
    """The reference of the Python API: every public name, from its docstring."""
    lines = ["# Python API", "", "Every public name with its signature and docstring.", ""]
    lines += ["[Examples that run](../python.md) show the names in use.", ""]
    for module_name in MODULES:
        module = import_module(module_name)
        lines += [f"## {module_name}", ""]
        for name in module.__all__:
            lines += [f"::: {module_name}.{name}", ""]
    return "\n".join(lines)
