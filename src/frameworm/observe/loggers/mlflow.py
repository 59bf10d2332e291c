"""MLflow, on a server or in a local database."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from frameworm.observe.loggers.points import flat
from frameworm.observe.loggers.protocol import LoggedRun

# MLflow's limits per request, and per text.
_MOST_PARAMS = 100
_MOST_METRICS = 1000
_LONGEST_PARAM = 500
_LONGEST_TAG = 5000
_STATUS = {"completed": "FINISHED", "interrupted": "KILLED", "preempted": "KILLED", "failed": "FAILED"}


class MlflowLogger:
    """Logs to MLflow through its own client, so that a run that the script has open is not affected.

    Args:
        uri: Tracking server (`http://...`) or database (`sqlite:///mlflow.db`); None: MLflow's own setting.
        experiment: Name of the experiment; None: MLflow's own setting, else the name of the run in its config.

    Raises:
        ImportError: Neither mlflow nor mlflow-skinny is installed.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        self._mlflow: Any = import_module("mlflow")
        self._entities: Any = import_module("mlflow.entities")
        self._uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._id = ""

    def start(self, run: LoggedRun) -> str | None:
        """Open the run with its config as parameters, or continue it."""
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        if run.id is not None and self._reopened(run.id):
            self._id = run.id
            return self._id
        created = self._client.create_run(self._experiment_id(run), run_name=run.name)
        self._id = created.info.run_id
        params = (self._entities.Param(name, str(value)[:_LONGEST_PARAM]) for name, value in flat(run.config))
        for group in _groups(params, _MOST_PARAMS):
            self._client.log_batch(self._id, params=group)
        return self._id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values at their step, all at once."""
        now = int(time.time() * 1000)
        metrics = (self._entities.Metric(_allowed(name), value, now, step) for name, value in values.items())
        for group in _groups(metrics, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=group)

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Log the numbers of the summary as metrics and its texts as tags, and end the run."""
        numbers = {name: value for name, value in summary.items() if not isinstance(value, (str, bool))}
        self.log({f"summary/{name}": float(value) for name, value in numbers.items()}, int(summary.get("steps", 0)))
        words = ((name, str(value)[:_LONGEST_TAG]) for name, value in summary.items() if name not in numbers)
        for group in _groups((self._entities.RunTag(f"summary.{name}", text) for name, text in words), _MOST_PARAMS):
            self._client.log_batch(self._id, tags=group)
        self._client.set_terminated(self._id, _STATUS.get(status, "FAILED"))

    def _reopened(self, known: str) -> bool:
        """Continue a run; False if this server does not have it."""
        try:
            self._client.update_run(known, status="RUNNING")
        except self._mlflow.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def _experiment_id(self, run: LoggedRun) -> str:
        variables = import_module("mlflow.environment_variables")
        name = self._experiment or variables.MLFLOW_EXPERIMENT_NAME.get() or str(run.config.get("name", run.name))
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))


def _allowed(name: str) -> str:
    """A name as MLflow accepts it: letters, digits and `_-. :/`."""
    return "".join(letter if letter.isalnum() or letter in "_-. :/" else "_" for letter in name)


def _groups(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while group := list(itertools.islice(items, size)):
        yield group
