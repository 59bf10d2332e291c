"""A measured network in words."""

from __future__ import annotations

from frameworm.report.checks.network import render_network
from frameworm.scaling.network import NetworkModel, NetworkPoint


def test_the_table_says_size_time_and_rate() -> None:
    points = (
        NetworkPoint(1024, 0.00099999, 0.0002, 0.0025, 7),
        NetworkPoint(2**20, 0.1, 0.09, 0.11, 5),
        NetworkPoint(2**24, 1.6, 1.5, 1.7, 3),
    )
    text = render_network(
        NetworkModel({"all_reduce": points}, 4, hosts=2, backend="gloo", environment={"device": "cpu"})
    )
    lines = text.splitlines()
    assert lines[0] == "network · 4 ranks on 2 hosts · gloo · cpu"
    assert lines[3].split() == ["all_reduce", "1", "ms", "83.9", "Mbit/s", "126", "Mbit/s"]
    rows = [" ".join(line.split()) for line in lines]
    assert "1 KiB 1 ms 200 µs to 2.5 ms 12.3 Mbit/s 7" in rows
    assert "1 MiB 100 ms 90 ms to 110 ms 126 Mbit/s 5" in rows
    assert "16 MiB 1.6 s 1.5 s to 1.7 s 126 Mbit/s 3" in rows
    assert len({len(line) for line in lines[6:10]}) == 1, "columns are aligned"


def test_what_is_unknown_is_called_so() -> None:
    text = render_network(NetworkModel({"broadcast": (NetworkPoint(2**31, 0.01, 0.01, 0.01, 1),)}, 2))
    assert "2 ranks on 1 host · unknown · cpu" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "broadcast 10 ms unknown unknown" in rows
    assert "2 GiB 10 ms 10 ms to 10 ms 1,718 Gbit/s 1" in rows
