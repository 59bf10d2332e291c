"""Four kills of the upload campaign, and that it would notice what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def uploads() -> Iterator[ModuleType]:
    pytest.importorskip("moto", reason="an S3 server needs moto[server]")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import upload_campaign

        yield upload_campaign
        for name in ("upload_campaign", "crash_campaign", "crash_hooks", "object_server", "harness"):
            sys.modules.pop(name, None)


def test_a_fresh_machine_goes_on_bitwise_after_a_kill_at_any_moment(uploads: ModuleType) -> None:
    tally = uploads.campaign(4, seed=1)
    assert tally.failures == []
    assert tally.kills >= 4
    assert tally.outcomes["bitwise equal"] > 0


def test_the_campaign_notices_what_is_wrong(uploads: ModuleType, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/far/run"
    place = uploads.Place(url)
    place.write("checkpoints/step-00000004/manifest.json", b"{}")
    place.write("checkpoints/step-00000006/rank-00000.safetensors", b"half")
    place.write("checkpoints/latest", b"step-00000006\n")
    found, step, torn = uploads.problems_of(place, tmp_path / "scratch")
    assert [text.partition(" ")[0] for text in found] == ["step-00000004", "latest"]
    assert (step, torn) == (4, True)
