"""Small trainings give the losses they gave when the goldens were written.

On the machine that wrote them, bit for bit; on others to a relative 1e-3, because other kernels add up in another
order (see `golden_cases.differences`). All cases of one number of ranks run in one process or pair: a start costs more
than a case.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_cases import DROPOUT, GROUPS, TRAINER_RUN, differences, run_group, stored_losses
from golden_outlines import check, run_outlines


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", GROUPS)
def test_losses_are_what_they_were(group: str, tmp_path: Path) -> None:
    expected = {name: ranks for name, ranks in stored_losses("cases").items() if name in GROUPS[group]}
    assert differences(run_group(group, tmp_path), expected, DROPOUT) == []
    if group == "single":
        assert check(run_outlines(tmp_path / TRAINER_RUN, "trainer")) == []


def test_nothing_is_stored_that_no_case_makes() -> None:
    assert set(stored_losses("cases")) == {name for cases in GROUPS.values() for name in cases}
