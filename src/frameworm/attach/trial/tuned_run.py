"""Run a script with the switches that its tuning found."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from frameworm.attach.children import Children
from frameworm.attach.script import AfterImport, Ending, check_script, run_script
from frameworm.attach.trial.fingerprint import differences, fingerprint_of
from frameworm.attach.trial.switches import Switches, in_words, through_options
from frameworm.errors import ConfigError


class TunedRun:
    """A script and the switches found for it.

    Args:
        script: The Python file.
        arguments: Its command-line arguments.
        tuned: The file that `frameworm tune` wrote.
        world_size: Number of processes that run it.

    Raises:
        ConfigError: If the file was not written by `frameworm tune`, or does not apply here.
        EnvironmentSetupError: If there is no such script.
    """

    def __init__(self, script: Path, arguments: Sequence[str], tuned: Path, world_size: int = 1) -> None:
        check_script(script)
        self.script, self.arguments = script, list(arguments)
        found = _read(tuned)
        self.switches = Switches.from_dict(found.get("switches") or {})
        self._fingerprint: Mapping[str, Any] = found.get("fingerprint") or {}
        self.facts: Mapping[str, Any] = found.get("facts") or {}
        self._speedup: Mapping[str, Any] = found.get("speedup") or {}
        others = differences(self._fingerprint, fingerprint_of(script, arguments, world_size))
        if others:
            raise ConfigError(
                f"{tuned} does not hold here: {'; '.join(others)}. Tune the script again, or run it without `--with`"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return what is switched on, and its speedup when tuned."""
        return {"script": str(self.script), "switches": self.switches.to_dict(), "speedup": dict(self._speedup) or None}

    def in_words(self) -> str:
        """Describe the same in one line."""
        gain = self._speedup.get("value")
        told = "" if gain is None else f" ({gain:.2f}x when it was tuned)"
        return f"frameworm: {in_words(self.switches.to_dict()) or 'nothing'} switched on{told}"

    def run(self) -> Ending:
        """Run the script."""
        switches, options = through_options(self.switches, self.facts)
        settings: dict[str, Any] = {
            "script": str(self.script.absolute()),
            "switches": switches.to_dict(),
            "options": options,
            "about": self.to_dict(),
            "device": self._fingerprint.get("device"),
        }
        finder = AfterImport("torch", lambda: _attach(**settings))
        finder.arm()
        if self.facts.get("spawned"):  # forked children inherit the hooks
            Children(__name__, settings, lambda: True, lambda: lambda code: None).arm()
        gc.freeze()  # keep our imports out of the script's garbage collections
        try:
            return run_script(self.script, self.arguments, self.facts.get("module"))
        finally:
            finder.disarm()


def begin_child(settings: Mapping[str, Any], files: Sequence[int]) -> None:
    """Set the same switches in this process, which the script has started with multiprocessing."""
    AfterImport("torch", lambda: _attach(**settings)).arm()


def _attach(
    script: str,
    switches: Mapping[str, Any],
    options: Mapping[str, Mapping[str, Any]],
    about: Mapping[str, Any],
    device: str | None,
) -> None:
    """Set the switches once the script has imported torch."""
    from frameworm.attach.patches import Patches
    from frameworm.attach.trial.framework_options import FrameworkOptions
    from frameworm.attach.trial.interception import intercept
    from frameworm.attach.trial.provenance import sign_saved_files
    from frameworm.attach.trial.timing import SwitchedRun

    patches = Patches()
    sign_saved_files(about, patches)
    FrameworkOptions(script, options).watch(patches)
    SwitchedRun(intercept(Switches.from_dict(switches), patches), device).counter.install()


def _read(tuned: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(tuned.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {tuned}: {error.strerror}; give the tuned.yaml of `frameworm tune`") from None
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict) or found.get("version") != 1 or not isinstance(found.get("fingerprint"), dict):
        raise ConfigError(f"{tuned} was not written by `frameworm tune SCRIPT.py`; give its tuned.yaml")
    return found
