"""Keeps passwords, tokens and keys out of texts that users share.

Masking errs on the safe side: harmless text that looks like a key is masked too. A secret is recognised by
the name next to it, by its shape (a provider's token prefix, a long hash), or because it was seen under such a
name before, for example in an environment variable whose value a log repeats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import yaml

MASK = "<masked>"

_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|private_?key|api_?key|access_?key|account_?key|authorization|cookie|"
    r"(^|_)(token|pwd|auth|key|pat|signature|sig|dsn)(_?(value|v?\d+))?$|[a-z](token|pwd)$",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Shorter ones would mask ordinary words wherever they occur.
_FEWEST_LETTERS = 6
_HARMLESS = {"false", "true", "none", "null", "off", "auto"}

_SHAPES = re.compile(
    r"""
    -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b
    | \b(?:hf|gh[pousr]|github_pat|glpat|sk|rk|pk|xox[abpr]|npm|pypi|dckr_pat|shpat|SG)[-_.][\w.-]{16,}
    | \bAIza[\w-]{30,}
    | \beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?
    | (?<![0-9A-Za-z])[0-9a-fA-F]{32,}(?![0-9A-Za-z])
    | (?<![\w+/])(?=[\w+/]*[a-z])(?=[\w+/]*[A-Z])(?=[\w+/]*\d)[A-Za-z0-9+/]{40,}={0,2}
    """,
    re.VERBOSE | re.DOTALL,
)
_SCHEME = re.compile(r"\b(Bearer|Basic|Digest|Negotiate)(\s+)[\w.~+/=-]{6,}")
_URL = re.compile(r"(?<![\w+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^\s/@'\"<>]+@)?(?P<rest>[^\s'\"<>]*)")
# Names are searched for everywhere, also inside values; quotes may be escaped, as in JSON within JSON.
_NAME = re.compile(
    r"""(?<![\w.-])(?P<quote>\\?["']|)(?P<name>-{0,2}[A-Za-z_][\w.-]*)(?P=quote)(?P<sign>[ \t]*[:=][ \t]*|[ \t]+)"""
)
_VALUE = re.compile(
    r"""\\"[^"\\\n]*(?:\\")?|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|"""
    r"""\[(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\[\]{}"'\n])*\]|[^\s,;&}\])"'\[{\\][^\s,;&}\])"'\\]*"""
)


def is_secret_name(name: str) -> bool:
    """True if a variable, option or key of this name usually holds a secret.

    Args:
        name: Such as `WANDB_API_KEY`, `--hub-token` or `awsSecret`; of a dotted name only the last part counts.
    """
    last = name.strip("-").rpartition(".")[2]
    return _SECRET_NAME.search(_CAMEL.sub("_", last).replace("-", "_").lower()) is not None


class Masker:
    """Replaces secrets in texts and data by `<masked>`.

    Args:
        variables: Environment variables; the values of those that hold secrets are masked wherever they occur.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._known: set[str] = set()
        for name, value in variables.items():
            if is_secret_name(name):
                self.learn(value)
            for url in _URL.finditer(value):
                self.learn((url["user"] or "").rstrip("@").partition(":")[2])

    def learn(self, secret: str) -> None:
        """Mask this text wherever it occurs, unless it is as short as an ordinary word."""
        for line in secret.splitlines():
            word = line.strip()
            if len(word) >= _FEWEST_LETTERS and word.lower() not in _HARMLESS:
                self._known.update(
                    (word, quote(word, safe=""), json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1])
                )

    def learn_from(self, data: Any) -> None:
        """Learn every text under a secret's name in JSON-like data."""
        layer: list[tuple[bool, Any]] = [(False, data)]
        while layer:
            secret, item = layer.pop()
            if isinstance(item, dict):
                layer += [(secret or is_secret_name(str(name)), value) for name, value in item.items()]
            elif isinstance(item, list):
                layer += [(secret, value) for value in item]
            elif secret and isinstance(item, str):
                self.learn(item)

    def learn_from_yaml(self, text: str) -> None:
        """The same for a YAML text; invalid YAML is ignored."""
        try:
            node = yaml.compose(text, yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError, ValueError):
            return
        # Composed, not constructed: aliases could expand to millions of values.
        seen: set[int] = set()
        layer: list[tuple[bool, Any]] = [(False, node)]
        while layer:
            secret, item = layer.pop()
            if isinstance(item, yaml.ScalarNode):
                if secret:
                    self.learn(item.value)
            elif id(item) not in seen and isinstance(item, yaml.CollectionNode):
                seen.add(id(item))
                if isinstance(item, yaml.MappingNode):
                    layer += [(secret or is_secret_name(str(name.value)), value) for name, value in item.value]
                else:
                    layer += [(secret, value) for value in item.value]

    def text(self, text: str) -> str:
        """The text without its secrets; JSON stays JSON."""
        for secret in sorted(self._known, key=len, reverse=True):
            text = text.replace(secret, MASK)
        text = _SHAPES.sub(MASK, text)
        text = _URL.sub(_without_credentials, text)
        text = _SCHEME.sub(rf"\1\2{MASK}", text)
        return _masked_by_name(text)

    def chosen(self, variables: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
        """The named variables, sorted, with secrets masked."""
        return {
            name: MASK if is_secret_name(name) else self.text(variables[name])
            for name in sorted(names)
            if name in variables
        }


def _masked_by_name(text: str) -> str:
    parts, done = [], 0
    for match in _NAME.finditer(text):
        if match.start() < done or not is_secret_name(match["name"]):
            continue
        if not match["sign"].strip() and not match["name"].startswith("-"):
            continue  # two words of prose; of an option the value follows a blank
        value = _VALUE.match(text, match.end())
        if value is None or value[0].strip("\\\"'") in ("", MASK) or value[0].lower() in _HARMLESS:
            continue
        opened = re.match(r"\\?[\"']|", value[0])
        # If names are quoted, as in JSON, a masked number becomes a string.
        quotes = (opened[0] if opened else "") or match["quote"]
        parts += [text[done : value.start()], quotes, MASK, quotes]
        done = value.end()
    return "".join([*parts, text[done:]])


def _without_credentials(match: re.Match[str]) -> str:
    address, mark, query = match["rest"].partition("?")
    user = f"{MASK}@" if match["user"] else ""
    return f"{match['scheme']}://{user}{address}" + (f"?{MASK}" if mark and query else "")
