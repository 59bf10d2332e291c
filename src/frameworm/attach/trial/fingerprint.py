"""What a tuning result depends on: the script, its arguments, library versions, and the device."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Libraries that affect how a script computes.
_LIBRARIES = ("torch", "triton", "transformers", "accelerate", "trl", "peft", "lightning", "pytorch-lightning")


def fingerprint_of(script: Path, arguments: Sequence[str], world_size: int = 1) -> dict[str, Any]:
    """Return the facts that must be equal for a result to apply; the device is known once the script uses it."""
    versions = {}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "name": script.stem,
        "script": hashlib.sha256(script.read_bytes()).hexdigest(),
        "arguments": list(arguments),
        "python": platform.python_version(),
        "versions": versions,
        "world_size": world_size,
        "device": None,
    }


def differences(tuned: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Describe what has changed since the script was tuned."""
    found = []
    if tuned.get("script") != here["script"]:
        found.append("the script has changed")
    if tuned.get("arguments") != here["arguments"]:
        before = " ".join(map(str, tuned.get("arguments") or ())) or "none"
        found.append(f"its arguments were {before}")
    if tuned.get("world_size", 1) != here["world_size"]:
        found.append(f"it ran as {tuned.get('world_size', 1)} processes, not {here['world_size']}")
    if tuned.get("python") != here["python"]:
        found.append(f"Python was {tuned.get('python')}")
    then = tuned.get("versions") or {}
    for name in sorted({*then, *here["versions"]}):
        if then.get(name) != here["versions"].get(name):
            found.append(f"{name} was {then.get(name, 'not installed')}")
    if here.get("device") is not None and tuned.get("device") != here["device"]:
        found.append(f"the device was {tuned.get('device')}")
    return found
