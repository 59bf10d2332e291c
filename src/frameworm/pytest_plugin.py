"""The fixture `performance_guard`: a test that fails when a training step has become slower, larger or worse.

pytest loads this module in every project whose environment has frameworm, so nothing heavy is imported until the
fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from frameworm.guard.regression import GuardVerdict

UPDATE = "--update-performance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes baselines."""
    group = parser.getgroup("frameworm", "performance of training steps")
    group.addoption(
        UPDATE, action="store_true", default=False, help="make or replace the baselines of performance_guard"
    )


class PerformanceGuard:
    """Compares a run folder or a callable with a baseline file; see docs/guard.md."""

    def __init__(self, name: str, *, update: bool, root: Path) -> None:
        self._name = name
        self._update = update
        self._root = root

    def __call__(
        self,
        subject: str | Path | Callable[[], Any],
        *,
        baseline: str | Path,
        max_regression: str | float | None = "10%",
        max_memory: str | float | None = "10%",
        max_accuracy_drop: str | float | None = "1%",
        max_loss_increase: str | float | None = "10%",
        warmup: int = 5,
        measured_s: float = 3.0,
        allow_different_hardware: bool = False,
    ) -> GuardVerdict:
        """Fail the test on a regression; skip it if there is no verdict (no baseline, another machine, too much noise).

        Args:
            subject: The folder of a run, or one training step as a callable without arguments.
            baseline: Baseline file, relative to pytest's root folder; `--update-performance` writes it.
            max_regression: Largest accepted increase of the step time: `10%`, 0.1, or None.
            max_memory: Largest accepted increase of peak memory; for a callable, only device memory is measured.
            max_accuracy_drop: Largest accepted drop of validation accuracy, in points (runs only).
            max_loss_increase: Largest accepted increase of losses (runs only).
            warmup: Calls before measurement starts.
            measured_s: How long to measure a callable.
            allow_different_hardware: Accept a baseline from another machine.
        """
        from frameworm.guard.baseline import Baseline, read_baseline, write_baseline
        from frameworm.guard.limits import Limits, parse_limit
        from frameworm.guard.regression import check_fit, judge
        from frameworm.guard.run_metrics import read_runs
        from frameworm.report.checks.guard import judgement_sentences, render_judgement

        __tracebackhide__ = True
        limits = Limits(
            parse_limit(max_regression, "max_regression"),
            parse_limit(max_memory, "max_memory"),
            parse_limit(max_accuracy_drop, "max_accuracy_drop"),
            parse_limit(max_loss_increase, "max_loss_increase"),
        )
        path = self._root / baseline
        if not self._update and not path.exists():
            pytest.skip(f"no baseline at {baseline}: make it with pytest {UPDATE}")
        if callable(subject):
            from frameworm.tune.analyzer.step_guard import measure_step

            run = measure_step(subject, self._name, warmup=warmup, measured_s=measured_s)
        else:
            run = read_runs([str(subject)])[0]
        if self._update:
            check_fit([run])
            write_baseline(Baseline(path, [run]))
            pytest.skip(f"the baseline {baseline} was written")
        stored = read_baseline(path)
        judgement = judge(stored.runs, [run], limits, allow_different_hardware=allow_different_hardware)
        if judgement.verdict == "regression":
            pytest.fail("\n" + render_judgement(judgement, str(baseline), run.name), pytrace=False)
        if judgement.verdict == "inconclusive":
            pytest.skip(f"inconclusive: {'; '.join(judgement_sentences(judgement))}")
        return judgement


@pytest.fixture
def performance_guard(request: pytest.FixtureRequest) -> PerformanceGuard:
    """Compare a training step with its baseline: `performance_guard(step, baseline="tests/perf/step.json")`."""
    return PerformanceGuard(
        request.node.name, update=bool(request.config.getoption(UPDATE)), root=request.config.rootpath
    )
