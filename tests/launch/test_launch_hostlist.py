from __future__ import annotations

import pytest

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.hostlist import expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n0", ["n0"]),
        ("n0,n1", ["n0", "n1"]),
        ("n[001-003,7],x9", ["n001", "n002", "n003", "n7", "x9"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("r[1-2]n[1-2].lan", ["r1n1.lan", "r1n2.lan", "r2n1.lan", "r2n2.lan"]),
        ("a-b[3].example.org", ["a-b3.example.org"]),
    ],
)
def test_hostlists_are_written_out_in_order(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n1]", "n[[1]]", "n[3-1]", "n[a-b]", "n1,,n2", "n[]", "n1, n2"])
def test_malformed_hostlists_are_refused(text: str) -> None:
    with pytest.raises(EnvironmentSetupError, match="node list"):
        expand_hostlist(text)
