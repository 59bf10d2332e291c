"""Watch modules that torch does not import itself: checkpoints of libraries, waits for sharded tensors."""

from __future__ import annotations

import functools
import sys

from frameworm.attach.collectives import wait_of
from frameworm.attach.hooks import phase_of_its_own
from frameworm.attach.patches import Patches
from frameworm.attach.script import AfterImport
from frameworm.attach.watch import Watch
from frameworm.observe.clocks.phases import CHECKPOINT
from frameworm.torch_private.names import FUNCTIONAL_COLLECTIVES

# Functions that save, by module.
SAVES: dict[str, tuple[str, ...]] = {
    "safetensors.torch": ("save_file", "save_model"),
    "accelerate.accelerator": ("Accelerator.save_state", "Accelerator.save_model"),
    "lightning.pytorch.trainer.trainer": ("Trainer.save_checkpoint",),
    "pytorch_lightning.trainer.trainer": ("Trainer.save_checkpoint",),
    "transformers.trainer": ("Trainer._save_checkpoint", "Trainer.save_model"),
}


def watch_libraries(patches: Patches, watch: Watch) -> list[AfterImport]:
    """Watch libraries as soon as the script imports them.

    Returns:
        Import hooks to `disarm` at the end.
    """
    waiting = [AfterImport(module, functools.partial(_watch_saves, patches, watch, module)) for module in SAVES]
    waiting.append(AfterImport(FUNCTIONAL_COLLECTIVES, functools.partial(_watch_waits, patches, watch)))
    for item in waiting:
        item.arm()
    return waiting


def _watch_saves(patches: Patches, watch: Watch, module: str) -> None:
    """Wrap a module's save functions; errors must not reach the script, as library versions differ."""
    try:
        for path in SAVES[module]:
            *classes, name = path.split(".")
            owner = functools.reduce(getattr, classes, sys.modules[module])
            patches.set(owner, name, functools.partial(phase_of_its_own, watch, CHECKPOINT))
    except Exception as error:
        watch.notes.append(f"checkpoints of {module} are not watched: {type(error).__name__}: {error}")


def _watch_waits(patches: Patches, watch: Watch) -> None:
    patches.set(sys.modules[FUNCTIONAL_COLLECTIVES], "wait_tensor", functools.partial(wait_of, watch))
