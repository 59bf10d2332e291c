"""The settings a search may change: each is an object with its values, conditions and effect on numerics.

In: the context of a search (`context`). Out: candidates. `data`, `device` and `ranks` declare frameworm's own knobs
and `registry` lists them with those of plugins. `Knob` and `register_knob` are for plugins and scripts.
"""

from __future__ import annotations

from frameworm.tune.knobs.base import Knob, register_knob

__all__ = ["Knob", "register_knob"]
