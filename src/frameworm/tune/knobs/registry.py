"""All knobs: frameworm's own, those of plugins, and those registered by a script.

A plugin declares its knobs under the entry point group `frameworm.knobs`: a `Knob`, or a function that returns one or
several. A script calls `register_knob`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from frameworm.errors import EnvironmentSetupError
from frameworm.tune.knobs.base import Knob, registered_knobs
from frameworm.tune.knobs.data import DATA_KNOBS
from frameworm.tune.knobs.device import DEVICE_KNOBS
from frameworm.tune.knobs.ranks import RANK_KNOBS

GROUP = "frameworm.knobs"


def all_knobs() -> tuple[Knob, ...]:
    """Frameworm's own knobs, those of plugins, and registered ones; a later one of the same name wins.

    Raises:
        EnvironmentSetupError: A plugin cannot be loaded, or returns something that is not a knob.
    """
    found = {knob.name: knob for knob in (*DEVICE_KNOBS, *DATA_KNOBS, *RANK_KNOBS)}
    for plugin in entry_points(group=GROUP):
        found.update((knob.name, knob) for knob in _knobs_of(plugin))
    found.update(registered_knobs())
    return tuple(found.values())


def _knobs_of(plugin: EntryPoint) -> Iterator[Knob]:
    try:
        given = plugin.load()
        given = given() if callable(given) and not isinstance(given, Knob) else given
        knobs = [given] if isinstance(given, Knob) else list(given)
    except Exception as error:
        raise EnvironmentSetupError(
            f"knobs of plugin {plugin.name} ({plugin.value}) cannot be loaded: {error}; repair or uninstall it"
        ) from error
    for knob in knobs:
        if not isinstance(knob, Knob):
            raise EnvironmentSetupError(f"plugin {plugin.name} ({plugin.value}) gives {knob!r}, which is not a Knob")
        yield knob
