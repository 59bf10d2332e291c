"""Training and evaluation mode per module: modules that the user put into evaluation mode stay there."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

Modes = list[tuple[nn.Module, bool]]
_MOST_NAMED = 3


def modes_of(modules: Iterable[nn.Module]) -> Modes:
    """Return the mode of every submodule, outer ones first."""
    return [(part, part.training) for module in modules for part in module.modules()]


def restore_modes(modes: Modes) -> None:
    """Restore the mode of every submodule through `train()`, which some modules override."""
    for module, training in modes:
        if module.training != training:
            module.train(training)  # also sets the modules inside, which come later in the list


def start_evaluation(modules: Iterable[nn.Module]) -> Modes:
    """Put modules into evaluation mode and return their modes for `restore_modes`."""
    modules = list(modules)
    before = modes_of(modules)
    for module in modules:
        module.eval()
    return before


class TrainingMode:
    """Keeps a model in the mode in which it trains.

    A model in training mode trains as it is, including any layers that the user put into evaluation mode. A model in
    evaluation mode is put into training mode as a whole.
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
        """What the summary says about layers that stay in evaluation mode during training."""
        quiet = [name for name, part in model.named_modules() if not part.training]
        if not model.training or not quiet:
            return None
        named = ", ".join(quiet[:_MOST_NAMED]) + (" and others" if len(quiet) > _MOST_NAMED else "")
        return f"in evaluation mode, and left there: {named} (model.train() before training changes that)"
