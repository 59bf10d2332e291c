"""Sixty kills of the crash campaign, and that it would notice a store that lies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def crash() -> Iterator[tuple[ModuleType, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import crash_campaign

        yield crash_campaign, crash_campaign.prepare(("async", "sync"))
        for name in ("crash_campaign", "crash_hooks", "harness"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_point_of_a_save_loses_no_more_than_that_save(crash: Any, seed: int) -> None:
    campaign, prepared = crash
    # A process of its own for the writer takes most of the time, so most cases do without.
    tally = campaign.campaign(prepared, 10, 100 + seed, share_async=0.2)
    assert tally.failures == []
    assert tally.kills >= 10
    assert tally.outcomes["bitwise equal"] > 0


def test_the_campaign_notices_what_is_wrong(crash: Any, tmp_path: Path) -> None:
    campaign, ((parameters, records), _) = crash
    parameters = parameters.clone()
    run = tmp_path / "run"
    result = campaign.train(run, "sync", resume=False)
    assert campaign.compare(tmp_path, (parameters, records), result) == []
    parameters[0] += 1
    assert campaign.compare(tmp_path, (parameters, records), result)
    assert campaign.compare(tmp_path, (result, [{**records[0], "loss": 0.0}, *records[1:]]), result)
    steps = run / "steps-rank0.jsonl"
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:-1]))
    assert campaign.compare(tmp_path, (result, records), result)
    (tmp_path / "began").write_text("2\n4\n18\n")
    assert "more than one interval" in campaign.problems_of(tmp_path)[0][0]
    shard = next((run / "checkpoints").glob("step-*/rank-00000.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (run / "checkpoints" / "latest").write_text("step-00000099\n")
    found = campaign.problems_of(tmp_path)[0]
    assert any("unloadable" in text for text in found)
    assert any("latest" in text for text in found)
