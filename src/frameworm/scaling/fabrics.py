"""Links and the cost of collectives over them: one kind of link, measured, or fast inside a node and slow between.

A network computes in closed form how long a collective of a given size takes, so thousands of ranks cost no more time
than two. Sizes are counted as in `scaling.network`; for `reduce_scatter`, the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from frameworm.errors import NetworkModelError
from frameworm.records.statistics import percentile
from frameworm.scaling.network import NetworkModel, bus_share, ring_steps

GIGABIT = 1e9 / 8

# Of a rate that the user only states, collectives in a good and in a poor installation reach these fractions.
_NAMED_BEST, _NAMED_WORST = 1.0, 0.8


class Network(Protocol):
    """The connection between the ranks."""

    def seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        """Return how long one collective takes."""

    def host_seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        """Return the processor time of one rank for it, which on a CPU is taken from computing."""

    def exchange_seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        """Like `seconds`, for exchanges of compressed gradients, which frameworm implements itself on gloo."""

    def faster(self, factor: float) -> Network:
        """Return a network whose links (between nodes, if there are nodes) are faster by a factor."""

    def bounds(self) -> tuple[Network, Network]:
        """Return the network at its best and at its worst."""

    def describe(self) -> str:
        """Describe the network in words."""

    @property
    def gbps(self) -> float | None:
        """Link bandwidth in one direction (between nodes, if there are nodes), in Gbit/s."""


@dataclass(frozen=True)
class Link:
    """A link with its nominal rate, and the part of it that collectives reach.

    Attributes:
        bytes_per_s: In one direction.
        latency_s: Of one message between neighbours, including software.
        attained: Fraction of the rate that large collectives reach: typical, worst, best.
        source: Where the numbers come from.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    attained: tuple[float, float, float] = (1.0, _NAMED_WORST, _NAMED_BEST)
    source: str = "given"

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and math.isfinite(self.bytes_per_s)):
            raise NetworkModelError(f"a bandwidth must be a positive number, not {self.bytes_per_s / GIGABIT:g} Gbit/s")
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise NetworkModelError(f"a latency must be 0 or more, not {self.latency_s * 1e6:g} us")


def _ethernet(gigabits: float, latency_us: float) -> Link:
    return Link(
        f"{gigabits:g}gbe",
        gigabits * GIGABIT,
        latency_us * 1e-6,
        (0.9, 0.7, 0.95),
        "IEEE 802.3 line rate; TCP payload at most 0.949 of it at 1,500-byte frames; latency of kernel TCP",
    )


# Rates are per direction and, inside a node, per GPU. docs/scale.md has the sources.
FABRICS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink3", 300e9, 3e-6, (0.75, 0.67, 0.8), "NVIDIA A100: 600 GB/s both directions together"),
        Link("nvlink4", 450e9, 3e-6, (0.8, 0.7, 0.83), "NVIDIA H100: 900 GB/s both directions together"),
        Link("nvlink5", 900e9, 3e-6, (0.8, 0.7, 0.83), "NVIDIA B200: 1,800 GB/s both directions together"),
        Link("pcie4", 32e9, 5e-6, (0.7, 0.5, 0.8), "PCI-SIG: PCIe 4.0 x16"),
        Link("infiniband-ndr", 400 * GIGABIT, 3e-6, (0.92, 0.8, 0.97), "NVIDIA ConnectX-7: 400 Gbit/s per port"),
        Link("infiniband-hdr", 200 * GIGABIT, 3e-6, (0.92, 0.8, 0.97), "NVIDIA ConnectX-6: 200 Gbit/s per port"),
        _ethernet(100, 20),
        _ethernet(25, 25),
        _ethernet(10, 30),
        _ethernet(1, 50),
    )
}


def find_fabric(name: str) -> Link:
    """Return a preset by its name.

    Raises:
        NetworkModelError: There is no such preset; the message lists them.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    aliases = {"nvlink": "nvlink4", "ndr": "infiniband-ndr", "hdr": "infiniband-hdr", "ethernet": "10gbe"}
    link = FABRICS.get(aliases.get(wanted, wanted))
    if link is None:
        raise NetworkModelError(f"no fabric is called {name}; there are {', '.join(FABRICS)}")
    return link


@dataclass(frozen=True)
class LinkNetwork:
    """Rings over identical links."""

    link: Link
    share: float | None = None  # fraction of the link's rate that is reached; default: the typical one

    def seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        if world_size <= 1:
            return 0.0
        kind, part = ("all_reduce", 0.5) if collective == "reduce_scatter" else (collective, 1.0)
        share = self.link.attained[0] if self.share is None else self.share
        transfer_s = bus_share(kind, world_size) * size_bytes / (self.link.bytes_per_s * share)
        return part * (ring_steps(kind, world_size) * self.link.latency_s + transfer_s)

    def exchange_seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        return self.seconds(collective, size_bytes, world_size)

    def host_seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        return 0.0

    def faster(self, factor: float) -> LinkNetwork:
        return replace(self, link=replace(self.link, bytes_per_s=self.link.bytes_per_s * factor))

    def bounds(self) -> tuple[Network, Network]:
        _, worst, best = self.link.attained
        return replace(self, share=best), replace(self, share=worst)

    @property
    def gbps(self) -> float | None:
        return self.link.bytes_per_s / GIGABIT

    def describe(self) -> str:
        rate = self.link.bytes_per_s / GIGABIT
        given = "" if self.link.source == "given" else f"{self.link.name}, "
        return f"{given}{rate:g} Gbit/s, {self.link.latency_s * 1e6:g} us a message"


@dataclass(frozen=True)
class MeasuredNetwork:
    """A measured network (`network.json`); other world sizes are computed by the ring formulas."""

    model: NetworkModel
    factor: float = 1.0  # factor on the measured bandwidth
    stretch: float = 1.0  # factor on the measured times
    _latencies: dict[str, float] = field(default_factory=dict, compare=False, repr=False)

    def seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        if world_size <= 1:
            return 0.0
        if collective == "reduce_scatter":
            # gloo implements it as an all_reduce.
            part = 1.0 if self.model.backend == "gloo" else 0.5
            return part * self.seconds("all_reduce", size_bytes, world_size)
        whole_s = self.model.seconds(collective, size_bytes, world_size)
        if self.factor == 1.0:
            return whole_s * self.stretch
        latency_s = min(whole_s, self._latency_s(collective, world_size))
        return (latency_s + (whole_s - latency_s) / self.factor) * self.stretch

    def exchange_seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        bytes_per_s = self.model.bus_bytes_per_s()
        in_pairs = self.model.backend == "gloo" and (collective == "all_to_all" or world_size == 2)
        if world_size <= 1 or not in_pairs or not bytes_per_s:
            return self.seconds(collective, size_bytes, world_size)
        transfer_s = size_bytes * bus_share(collective, world_size) / (bytes_per_s * self.factor)
        return (self._latency_s("all_reduce", world_size) + transfer_s) * self.stretch

    def host_seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        kind = "all_reduce" if collective == "reduce_scatter" else collective
        return 0.0 if world_size <= 1 else self.model.host_seconds(kind, size_bytes, world_size)

    def faster(self, factor: float) -> MeasuredNetwork:
        return replace(self, factor=self.factor * factor)

    def bounds(self) -> tuple[Network, Network]:
        points = self.model.points.get("all_reduce") or next(iter(self.model.points.values()))
        low = percentile(sorted(point.q1_s / point.median_s for point in points), 0.5)
        high = percentile(sorted(point.q3_s / point.median_s for point in points), 0.5)
        return replace(self, stretch=self.stretch * low), replace(self, stretch=self.stretch * high)

    @property
    def gbps(self) -> float | None:
        rate = self.model.bus_bytes_per_s()
        return None if rate is None else rate * self.factor / GIGABIT

    def describe(self) -> str:
        carries = "unknown" if self.gbps is None else f"{self.gbps:.3g} Gbit/s per link"
        latency_us = self.model.latency_s() * 1e6
        return f"measured between {self.model.world_size} ranks: {carries}, {latency_us:.3g} us an all_reduce at least"

    def _latency_s(self, collective: str, world_size: int) -> float:
        if collective not in self._latencies:
            self._latencies[collective] = self.model.latency_s(collective)
        return (
            self._latencies[collective]
            * ring_steps(collective, world_size)
            / ring_steps(collective, self.model.world_size)
        )


@dataclass(frozen=True)
class NodesNetwork:
    """Nodes of several ranks; traffic between nodes is sent once per node.

    An all_reduce is a reduce_scatter inside every node, an all_reduce between the nodes, and an all_gather inside. The
    three run one after the other, although NCCL may overlap them. The network between nodes carries what all ranks of a
    node send.
    """

    inside: Network
    between: Network
    ranks_per_node: int

    def seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        return self._sum("seconds", collective, size_bytes, world_size)

    def exchange_seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        return self._sum("exchange_seconds", collective, size_bytes, world_size)

    def host_seconds(self, collective: str, size_bytes: float, world_size: int) -> float:
        return self._sum("host_seconds", collective, size_bytes, world_size)

    def _sum(self, ask: str, collective: str, size_bytes: float, world_size: int) -> float:
        inside, between = getattr(self.inside, ask), getattr(self.between, ask)
        local = min(self.ranks_per_node, world_size)
        nodes = math.ceil(world_size / self.ranks_per_node)
        if nodes == 1:
            return float(inside(collective, size_bytes, local))
        if local == 1:
            return float(between(collective, size_bytes, nodes))
        if collective == "all_reduce":
            ends_s = inside("reduce_scatter", size_bytes, local) + inside("all_gather", size_bytes, local)
            return float(ends_s + between("all_reduce", size_bytes, nodes))
        if collective == "all_to_all":
            near_s = inside(collective, size_bytes * local / world_size, local)
            return float(near_s + between(collective, size_bytes * local, nodes))
        return float(inside(collective, size_bytes, local) + between(collective, size_bytes, nodes))

    def faster(self, factor: float) -> NodesNetwork:
        return replace(self, between=self.between.faster(factor))

    def bounds(self) -> tuple[Network, Network]:
        near, far = self.inside.bounds(), self.between.bounds()
        return replace(self, inside=near[0], between=far[0]), replace(self, inside=near[1], between=far[1])

    @property
    def gbps(self) -> float | None:
        return self.between.gbps

    def describe(self) -> str:
        return (
            f"nodes of {self.ranks_per_node}: inside {self.inside.describe()}; between, per node, "
            f"{self.between.describe()}"
        )
