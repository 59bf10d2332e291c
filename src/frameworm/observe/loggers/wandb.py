"""Weights & Biases, online or offline."""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from frameworm.errors import EnvironmentSetupError
from frameworm.observe.loggers.protocol import LoggedRun

log = logging.getLogger("frameworm")
_OWN_STEP = "trainer/step"


class WandbLogger:
    """Logs to W&B. A run that the script has opened with `wandb.init` is used, and left open at the end.

    Args:
        project: Project; None: W&B's own settings.
        entity: User or team; None: the default one.
        folder: W&B keeps its files in a subfolder `wandb` of this; None: the run folder.
        offline: Only write files; `wandb sync FOLDER` sends them later.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(
        self, project: str | None = None, entity: str | None = None, folder: str | None = None, offline: bool = False
    ) -> None:
        self._wandb: Any = import_module("wandb")
        self._given = {"project": project, "entity": entity}
        self._folder = folder
        self._offline = offline
        self._run: Any = None
        self._theirs = False  # whether it is the script's own run, with its own step numbers
        self._first_step = 0

    def start(self, run: LoggedRun) -> str | None:
        """Open the run, or continue it under the same id."""
        wandb = self._wandb
        self._theirs = wandb.run is not None
        if self._theirs:
            self._run = wandb.run
            self._run.config.update(dict(run.config), allow_val_change=True)
            for names in ("train/*", "time/*", "memory/*", "epoch/*"):
                self._run.define_metric(names, step_metric=_OWN_STEP)
            return str(self._run.id)
        settings = wandb.Settings(silent=True, console="off")
        if hasattr(settings, "finish_timeout"):
            settings.finish_timeout = run.close_s  # also at the interpreter's exit, which would wait for ever
        folder = self._folder or (None if run.folder is None else str(run.folder))
        arguments = {**self._given, "name": run.name, "dir": folder, "settings": settings, "config": dict(run.config)}
        known = run.id or uuid.uuid4().hex[:12]
        mode = "offline" if self._offline else wandb.setup().settings.mode or "online"
        if mode == "online":  # offline there is no run to resume, and `wandb sync` joins the parts by id
            self._check_login()
            arguments["resume"] = "allow"
        self._run = wandb.init(id=known, mode=mode, **arguments)
        self._first_step = int(getattr(self._run, "starting_step", 0) or 0)
        if mode == "online":
            log.info("wandb: %s", self._run.url)
        return known

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values at their step; W&B rejects steps that it received before the run was resumed."""
        if self._theirs:
            self._run.log({**values, _OWN_STEP: step})
        elif step >= self._first_step:
            self._run.log(dict(values), step=step)

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write the summary and close the run."""
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        if self._theirs:
            return
        if status == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "completed" else 1)

    def _check_login(self) -> None:
        """Raise instead of prompting for a login, since nobody expects a prompt from a thread during training."""
        login = self._wandb.login
        if "prompt" in inspect.signature(login).parameters and not login(prompt=False):
            raise EnvironmentSetupError("not logged in; run `wandb login`, or set observe.wandb.offline: true")
