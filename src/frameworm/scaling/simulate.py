"""Simulates a step of many ranks from the step of one.

DDP: buckets of gradients become ready during backward and are sent one after the other on one stream; the optimizer
waits for the last. ZeRO: parameters are gathered before they are used and gradients are scattered, on the same stream.
All ranks are alike except for chance: all wait for the slowest, whose time is an expected maximum. The cost of a bucket
has a closed form, so thousands of ranks take no longer to simulate than two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from frameworm.scaling.fabrics import Network
from frameworm.scaling.traffic import Bucket, Codec, Gradient, Sending, divide_into_buckets

MEGABYTE = 2**20
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class StepProfile:
    """The step of one device, in seconds.

    Attributes:
        gradients: With the times at which they are ready in the backward that sends them.
        forward_s: For one micro-batch.
        backward_s: For one micro-batch.
        optimizer_s: Once per step.
        other_s: The rest of the step: waiting for data, copies, the loop.
        accumulation: Micro-batches per step.
        step_times_s: Times of single steps; their spread determines the time of the slowest of many ranks.
    """

    gradients: tuple[Gradient, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    other_s: float = 0.0
    accumulation: int = 1
    step_times_s: tuple[float, ...] = ()

    @property
    def compute_s(self) -> float:
        """Duration of the whole step on one device."""
        return self.other_s + self.accumulation * (self.forward_s + self.backward_s) + self.optimizer_s

    @property
    def gradient_bytes(self) -> int:
        """Gradient bytes of the whole model."""
        return sum(gradient.size_bytes for gradient in self.gradients)

    def with_share_of_batch(self, share: float, fixed_share: float) -> StepProfile:
        """Return the profile for a micro-batch scaled by `share`; `fixed_share` of its time does not depend on size."""
        factor = fixed_share + (1 - fixed_share) * share
        return self.stretched(factor, also_rest=False)

    def stretched(self, factor: float, also_rest: bool = True) -> StepProfile:
        """Return the profile with all times multiplied by `factor`; without `also_rest`, only forward and backward."""
        rest = factor if also_rest else 1.0
        return replace(
            self,
            gradients=tuple(replace(item, ready_s=item.ready_s * factor) for item in self.gradients),
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            optimizer_s=self.optimizer_s * rest,
            other_s=self.other_s * rest,
        )


@dataclass(frozen=True)
class Setting:
    """How the ranks work together.

    Attributes:
        busy_host: Fraction of communication's processor time that is taken from computing: 1 if a rank has no spare
            core, 0 on a GPU.
    """

    strategy: str = "ddp"
    codec: Codec = field(default_factory=Codec)
    bucket_cap_mb: float = 25.0
    first_bucket_mb: float = 1.0
    busy_host: float = 0.0


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective of a step; times are from the start of the backward that sends it."""

    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step; `step_s` is the slowest rank's compute plus exposed communication."""

    step_s: float
    compute_s: float  # of the slowest rank, including straggler_s
    straggler_s: float
    communication_s: float  # total, one after the other
    exposed_s: float
    sent_bytes: float
    buckets: tuple[Sent, ...] = ()


def simulate_step(profile: StepProfile, setting: Setting, network: Network, world_size: int) -> Timeline:
    """Simulate one optimizer step of `world_size` ranks that each do what `profile` does."""
    straggler_s = straggling(profile, world_size)
    if world_size <= 1:
        return Timeline(profile.compute_s, profile.compute_s, 0.0, 0.0, 0.0, 0.0)
    if setting.strategy in ("zero2", "zero3"):
        return _sharded(profile, setting, network, world_size, straggler_s)
    buckets = divide_into_buckets(
        profile.gradients, setting.first_bucket_mb * MEGABYTE, setting.bucket_cap_mb * MEGABYTE
    )
    sendings = [setting.codec.send(bucket, network, world_size) for bucket in buckets]
    sent, backward_s = overlap(buckets, sendings, profile.backward_s, setting.busy_host)
    communication_s = math.fsum(item.total_s for item in sendings)
    sent_bytes = math.fsum(item.sent_bytes for item in sendings)
    optimizer_s, after_s = profile.optimizer_s, 0.0
    if setting.strategy == "zero1":
        optimizer_s /= world_size
        after_s = network.seconds("all_gather", profile.gradient_bytes, world_size)
        sent_bytes += profile.gradient_bytes * (world_size - 1) / world_size
    compute_s = profile.compute_s - profile.optimizer_s + optimizer_s + straggler_s
    exposed_s = backward_s - profile.backward_s + after_s
    return Timeline(
        compute_s + exposed_s,
        compute_s,
        straggler_s,
        communication_s + after_s,
        exposed_s,
        sent_bytes,
        tuple(sent),
    )


def overlap(
    buckets: Sequence[Bucket], sendings: Sequence[Sending], backward_s: float, busy_host: float = 0.0
) -> tuple[list[Sent], float]:
    """Simulate DDP's last backward: when each bucket is sent and received, and when the optimizer may start.

    Encoding, sending and decoding are three stages, which different buckets can be in at the same time. If computing
    and sending share a core, everything after a bucket is delayed by its processor time.
    """
    late_s = coded_at = wire_at = decoded_at = 0.0
    sent = []
    for bucket, sending in zip(buckets, sendings):
        ready_s = bucket.ready_s + late_s
        start_s = max(ready_s, coded_at)
        coded_at = start_s + sending.encode_s
        wire_at = max(coded_at, wire_at) + sending.wire_s
        decoded_at = max(wire_at, decoded_at) + sending.decode_s
        late_s += busy_host * sending.host_s
        # Without encoding time there is only one stream: a bucket that waits for the wire has not started.
        begun_s = start_s if sending.encode_s else wire_at - sending.wire_s
        sent.append(Sent(ready_s, begun_s, decoded_at))
    # The last bucket is full at the end of backward, so it delays nothing.
    held_s = late_s - (busy_host * sendings[-1].host_s if sendings else 0.0)
    return sent, max(backward_s + held_s, decoded_at)


def _sharded(profile: StepProfile, setting: Setting, network: Network, world_size: int, straggler_s: float) -> Timeline:
    """FSDP: parameters are gathered unit by unit before use, and gradients are reduced to the rank that owns them.

    Units are assumed to be as large as DDP's buckets. zero2 gathers once per step, zero3 again in backward and for
    every micro-batch.
    """
    # In the order of backward.
    units = divide_into_buckets(profile.gradients, setting.bucket_cap_mb * MEGABYTE, setting.bucket_cap_mb * MEGABYTE)
    gather_s = [network.seconds("all_gather", unit.size_bytes, world_size) for unit in units]
    scatter_s = [network.seconds("reduce_scatter", unit.size_bytes, world_size) for unit in units]
    share = _shares(units, profile.backward_s)
    again = setting.strategy == "zero3"
    forward_s = gathered_s(list(reversed(gather_s)), [profile.forward_s * part for part in reversed(share)])
    no_gathers = [0.0] * len(units)
    backwards_s = [profile.backward_s * part for part in share]
    last_s = _backward_s(gather_s if again else no_gathers, scatter_s, backwards_s)
    earlier = profile.accumulation - 1
    if again:
        first_s = earlier * (forward_s + _backward_s(gather_s, no_gathers, backwards_s)) + forward_s
    else:
        first_s = forward_s + earlier * (profile.forward_s + profile.backward_s)
    optimizer_s = profile.optimizer_s / world_size
    fixed_s = profile.other_s + optimizer_s + straggler_s
    compute_s = fixed_s + profile.accumulation * (profile.forward_s + profile.backward_s)
    gathers = 2 * profile.accumulation if again else 1
    link = (world_size - 1) / world_size * profile.gradient_bytes
    step_s = fixed_s + first_s + last_s
    return Timeline(
        step_s,
        compute_s,
        straggler_s,
        gathers * math.fsum(gather_s) + math.fsum(scatter_s),
        max(0.0, step_s - compute_s),
        link * (gathers + 1),
    )


def _shares(units: Sequence[Bucket], backward_s: float) -> list[float]:
    """Fractions of backward per unit, by the times their gradients are ready; the rest goes to the last."""
    if not units:
        return [1.0]
    if backward_s <= 0:
        return [1 / len(units)] * len(units)
    ends = [min(1.0, unit.ready_s / backward_s) for unit in units]
    ends[-1] = 1.0
    return [end - begin for begin, end in zip([0.0, *ends], ends)]


def gathered_s(gathers_s: Sequence[float], computes_s: Sequence[float]) -> float:
    """Duration of a forward whose units are gathered one after the other, ahead of their use."""
    wire_at = done_at = 0.0
    for gather_s, compute_s in zip(gathers_s, computes_s):
        wire_at += gather_s
        done_at = max(done_at, wire_at) + compute_s
    return max(done_at, math.fsum(computes_s))


def _backward_s(gathers_s: Sequence[float], scatters_s: Sequence[float], computes_s: Sequence[float]) -> float:
    """Duration of a backward on one stream: the next unit is gathered during compute, then gradients are scattered."""
    if not gathers_s:
        return math.fsum(computes_s)
    wire_at = gathered_at = gathers_s[0]
    done_at = 0.0
    for index, compute_s in enumerate(computes_s):
        begin_s = max(done_at, gathered_at)
        done_at = begin_s + compute_s
        if index + 1 < len(gathers_s):
            wire_at = gathered_at = max(wire_at, begin_s) + gathers_s[index + 1]
        wire_at = max(wire_at, done_at) + scatters_s[index]
    return max(done_at, wire_at)


def straggling(profile: StepProfile, world_size: int) -> float:
    """Return how much later than the mean the slowest of this many ranks is."""
    times = profile.step_times_s
    if len(times) < 2 or world_size <= 1:
        return 0.0
    mean_s = math.fsum(times) / len(times)
    return max(0.0, expected_maximum(times, world_size) / mean_s - 1) * profile.compute_s if mean_s > 0 else 0.0


def expected_maximum(values: Sequence[float], draws: int) -> float:
    """Return the exact mean of the largest of `draws` independent draws from the values; at most the largest value."""
    ordered = sorted(values)
    count = len(ordered)
    return math.fsum(
        value * ((index / count) ** draws - ((index - 1) / count) ** draws)
        for index, value in enumerate(ordered, start=1)
    )
