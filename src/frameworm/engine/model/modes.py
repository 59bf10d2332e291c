"""Training and evaluation mode, module by module: what the user has put into evaluation mode stays there."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

Modes = list[tuple[nn.Module, bool]]
_MOST_NAMED = 3


def modes_of(modules: Iterable[nn.Module]) -> Modes:
    """The mode of every part, outer ones first."""
    return [(part, part.training) for module in modules for part in module.modules()]


def restore_modes(modes: Modes) -> None:
    """Bring every part back to its mode, by `train()`, which some modules override."""
    for module, training in modes:
        if module.training != training:
            module.train(training)  # also what is inside of it, which comes later in the list


def start_evaluation(modules: Iterable[nn.Module]) -> Modes:
    """Put modules into evaluation mode; returns what `restore_modes` needs afterwards."""
    modules = list(modules)
    before = modes_of(modules)
    for module in modules:
        module.eval()
    return before


class TrainingMode:
    """Keeps a model in the mode to train in.

    A model that is in training mode trains as it is, with those of its layers in evaluation mode that the user has put
    there. One that is in evaluation mode as a whole is put into training mode as a whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modes: Modes = []

    def enter(self) -> None:
        """Put the model into training mode; call before every epoch, in case a callback left it in evaluation mode."""
        if not self._model.training:
            if self._modes:
                restore_modes(self._modes)
            else:
                self._model.train()
        self._modes = modes_of([self._model])

    @staticmethod
    def note(model: nn.Module) -> str | None:
        """What the summary says of layers that train in evaluation mode."""
        quiet = [name for name, part in model.named_modules() if not part.training]
        if not model.training or not quiet:
            return None
        named = ", ".join(quiet[:_MOST_NAMED]) + (" and others" if len(quiet) > _MOST_NAMED else "")
        return f"in evaluation mode, and left there: {named} (model.train() before training changes that)"
