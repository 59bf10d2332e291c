"""Codecs on CPU tensors: what comes back, what is kept for later, and how large the payload is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from frameworm.errors import ConfigError
from frameworm.parallel.compression import quantize, sparse
from frameworm.parallel.compression.codecs import Codec
from frameworm.parallel.compression.quantize import Quantizer
from frameworm.parallel.compression.registry import make_codec
from frameworm.parallel.compression.sparse import TopK

NAMES = ("int8", "int4", "topk")
COUNTS = (0, 1, 2, 3, 63, 99, 100, 101, 127, 128, 129, 255, 256, 257, 1000, 4099)
KINDS = ("normal", "zeros", "constant", "tiny", "small", "huge", "one huge", "mixed scales", "integers")


def values_of(kind: str, count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=draw)
    made = {
        "normal": lambda: normal,
        "zeros": lambda: torch.zeros(count),
        "constant": lambda: torch.full((count,), -0.7),
        "tiny": lambda: normal * 1e-44,
        "small": lambda: normal * 1e-38,
        "huge": lambda: normal.clamp(-3, 3) * 1e38,
        "one huge": lambda: torch.where(torch.arange(count) == count // 2, 3e38, normal),
        "mixed scales": lambda: normal * torch.randint(-60, 60, (count,), generator=draw).float().exp2(),
        "integers": lambda: normal.mul(5).round(),
    }[kind]()
    return made.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def encoded(codec: Codec, values: Tensor, residual: Tensor | None = None, **more: torch.Generator) -> Tensor:
    payload = torch.full((codec.encoded_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(values, payload, residual, **more)
    return payload


def decoded(codec: Codec, payload: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((count,), 77.0, dtype=dtype)
    codec.decode(payload, out)
    return out


def steps_of(codec: Quantizer, payload: Tensor, count: int) -> Tensor:
    """The step of each value."""
    blocks = -(-count // codec.granularity)
    return payload[payload.numel() - 4 * blocks :].view(torch.float32).repeat_interleave(codec.granularity)[:count]


def by_hand(codec: Quantizer, total: Tensor) -> Tensor:
    """What a quantizer makes of finite values, in fp64 and one block after the other."""
    blocks = []
    for block in total.double().split(codec.granularity) if total.numel() else ():
        step = (block.abs().max() / codec.levels).float().double()
        blocks.append(block.mul(0) if step < quantize.SMALLEST_STEP else (block / step).round() * step)
    return torch.cat(blocks).float() if blocks else total.float()


@settings(max_examples=100, deadline=None)
@given(
    bits=st.sampled_from((8, 4)),
    kind=st.sampled_from(KINDS),
    count=st.one_of(st.sampled_from(COUNTS), st.integers(0, 3000)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 1000),
)
def test_quantized_values_are_half_a_step_off_at_most(
    bits: int, kind: str, count: int, dtype: torch.dtype, seed: int
) -> None:
    codec = Quantizer(bits)
    values = values_of(kind, count, seed, dtype)
    before = values.clone()
    payload = encoded(codec, values)
    assert torch.equal(values, before)
    steps = steps_of(codec, payload, count)
    out = decoded(codec, payload, count)
    bound = torch.where(steps > 0, steps.double() * 0.5001, quantize.SMALLEST_STEP * codec.levels * 1.01)
    assert ((values.double() - out.double()).abs() <= bound).all()
    # Where rounding is a tie, one step is the difference between two right answers.
    assert ((by_hand(codec, values) - out).double().abs() <= steps.double() * 1.001).all()
    if kind in ("zeros", "constant"):
        assert torch.allclose(out, values.float(), rtol=1e-6, atol=0)
    if kind == "zeros":
        assert torch.equal(out, torch.zeros(count))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_integers_come_back_exactly(bits: int) -> None:
    codec = Quantizer(bits)
    values = torch.arange(1020).remainder(2 * codec.levels + 1).sub(codec.levels).float()
    assert torch.equal(decoded(codec, encoded(codec, values), 1020), values)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    rounding=st.sampled_from(("nearest", "stochastic")),
    kind=st.sampled_from(KINDS),
    count=st.one_of(st.sampled_from(COUNTS), st.integers(0, 3000)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 1000),
)
def test_what_was_not_sent_is_kept(
    name: str, rounding: str, kind: str, count: int, dtype: torch.dtype, seed: int
) -> None:
    codec = make_codec(name, rounding=rounding)
    values = values_of(kind, count, seed, dtype)
    residual = values_of("small" if kind in ("tiny", "small") else "normal", count, seed + 1)
    total = values.float() + residual
    payload = encoded(codec, values, residual, draw=torch.Generator().manual_seed(seed))
    sent = decoded(codec, payload, count).double()
    rounding = (total.double().abs() + sent.abs()) * 2.0**-23 + 1e-44
    assert ((sent + residual.double() - total.double()).abs() <= rounding).all()
    if name == "topk" and count:
        assert torch.count_nonzero(residual - total) <= codec.encoded_bytes(count) / 3
    elif count and kind == "normal":
        assert residual.norm() < total.norm() * (0.03 if name == "int8" else 0.5)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    count=st.sampled_from(COUNTS[1:]),
    seed=st.integers(0, 1000),
    bad=st.lists(st.sampled_from((math.nan, math.inf, -math.inf)), min_size=1, max_size=4),
    in_residual=st.booleans(),
)
def test_a_bad_block_decodes_to_nan_and_keeps_its_residual(
    name: str, count: int, seed: int, bad: list[float], in_residual: bool
) -> None:
    codec = make_codec(name)
    values, residual = values_of("normal", count, seed), values_of("normal", count, seed + 1)
    clean_residual = residual.clone()
    clean = decoded(codec, encoded(codec, values, clean_residual), count)
    places = torch.randint(count, (len(bad),), generator=torch.Generator().manual_seed(seed))
    (residual if in_residual else values)[places] = torch.tensor(bad)
    before = residual.clone()
    out = decoded(codec, encoded(codec, values, residual), count)

    groups = torch.arange(count)
    groups = groups % codec.columns(count) if isinstance(codec, TopK) else groups // codec.granularity
    spoiled = torch.isin(groups, groups[places])
    assert out[spoiled].isnan().all()
    assert torch.equal(out[~spoiled], clean[~spoiled])
    assert torch.equal(residual[spoiled].view(torch.int32), before[spoiled].view(torch.int32))
    assert torch.equal(residual[~spoiled], clean_residual[~spoiled])
    total = torch.ones(count)
    codec.decode_add(encoded(codec, values, before), total)
    assert torch.equal(total.isnan(), spoiled)


@pytest.mark.parametrize(("name", "budget"), [("int8", 1.035), ("int4", 0.54), ("topk", 0.045)])
def test_payloads_are_small_and_every_byte_is_written(name: str, budget: float) -> None:
    codec = make_codec(name)
    for count in (20_000, 100_003, 10_500_000):
        assert codec.encoded_bytes(count) <= budget * count
    assert codec.encoded_bytes(0) == 0
    for count in COUNTS:
        size = codec.encoded_bytes(count)
        assert size % 4 == 0
        values = values_of("normal", count, 0)
        payloads = [torch.full((size,), fill, dtype=torch.uint8) for fill in (0x00, 0xFF)]
        for payload in payloads:
            codec.encode(values, payload)
        assert torch.equal(*payloads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoding_into_other_types_and_adding(name: str, dtype: torch.dtype) -> None:
    codec = make_codec(name)
    for count in COUNTS:
        payload = encoded(codec, values_of("normal", count, 3))
        full = decoded(codec, payload, count)
        assert torch.equal(decoded(codec, payload, count, dtype), full.to(dtype))
        total = values_of("normal", count, 4)
        expected = total + full
        codec.decode_add(payload, total)
        assert torch.equal(total, expected)


@pytest.mark.parametrize("name", NAMES)
def test_parts_that_fit_no_buffer_and_odd_addresses_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 5003
    values, start = values_of("normal", count, 5), values_of("normal", count, 6)
    values[1234] = math.nan
    residual = start.clone()
    payload = encoded(make_codec(name), values, residual)
    for module in (quantize, sparse):
        monkeypatch.setattr(module, "CHUNK_VALUES", 512)
    codec = make_codec(name)
    apart, odd = start.clone(), torch.zeros(payload.numel() + 3, dtype=torch.uint8)[3:]
    codec.encode(values, odd, apart)
    assert torch.equal(odd, payload)
    assert torch.equal(apart, residual)
    assert torch.equal(
        decoded(codec, odd, count).nan_to_num(9), decoded(make_codec(name), payload, count).nan_to_num(9)
    )


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_over_from_the_call_before(name: str) -> None:
    codec = make_codec(name)
    for count in (3000, 130, 1, 2000, 257):
        values = values_of("normal", count, count)
        payload = encoded(codec, values)
        assert torch.equal(payload, encoded(make_codec(name), values))
        encoded(codec, values * math.nan)
        assert torch.equal(decoded(codec, payload, count), decoded(make_codec(name), payload, count))


@settings(max_examples=80, deadline=None)
@given(
    bits=st.sampled_from((8, 4)),
    world_size=st.sampled_from((1, 2, 3, 8)),
    count=st.sampled_from(COUNTS),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_the_mean_of_payloads(bits: int, world_size: int, count: int, kind: str, seed: int) -> None:
    codec = Quantizer(bits)
    payloads = torch.stack([encoded(codec, values_of(kind, count, seed + rank)) for rank in range(world_size)])
    parts = torch.stack([decoded(codec, payload, count).double() for payload in payloads])
    mean = parts.mean(0)
    residual = values_of("normal" if kind != "tiny" else "tiny", count, seed + 99)
    before = residual.clone()
    payload = torch.full_like(payloads[0], 0xA5)
    codec.reduce_mean(payloads, payload, count, residual)
    out = decoded(codec, payload, count)
    steps = steps_of(codec, payload, count)
    # What is added is rounded by its own size, also where it cancels out in the end.
    scale = parts.abs().mean(0).max() if count else mean.sum()
    assert ((out - mean).abs() <= steps.double() * 0.5001 + scale * 1e-6 + 1e-39).all()
    assert ((out - by_hand(codec, mean.float())).double().abs() <= steps.double() * 1.001 + scale * 1e-6 + 1e-39).all()
    # The owner's next contribution, a world_size-th of which enters the mean, brings the difference back.
    returned = (residual.double() - before.double()) / world_size
    rounding = (residual.double().abs() + before.double().abs()) * 2.0**-23
    assert ((returned - (mean - out.double())).abs() <= rounding + scale * 1e-6 + 1e-39).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_one_ranks_nan_reaches_the_mean_and_not_the_residual(bits: int) -> None:
    codec = Quantizer(bits)
    count = codec.granularity * 3
    bad = values_of("normal", count, 1)
    bad[codec.granularity + 5] = math.inf
    payloads = torch.stack([encoded(codec, values_of("normal", count, 0)), encoded(codec, bad)])
    residual = values_of("normal", count, 2)
    before = residual.clone()
    payload = torch.empty_like(payloads[0])
    codec.reduce_mean(payloads, payload, count, residual)
    out = decoded(codec, payload, count).view(3, -1)
    assert out[1].isnan().all()
    assert out[::2].isfinite().all()
    block = slice(codec.granularity, 2 * codec.granularity)
    assert torch.equal(residual[block], before[block])
    assert residual.isfinite().all()
    assert not torch.equal(residual, before)


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_is_right_on_average_and_repeatable(bits: int) -> None:
    codec = Quantizer(bits, rounding="stochastic")
    values = values_of("normal", 1000, 7)
    step = steps_of(codec, encoded(codec, values), 1000)
    draws = 200
    draw = torch.Generator().manual_seed(11)
    total = torch.zeros(1000)
    for _ in range(draws):
        once = decoded(codec, encoded(codec, values, draw=draw), 1000)
        assert ((once - values).abs() <= step * 1.001).all()
        total += once
    # A draw is off by half a step (standard deviation) at most: five of them in a mean of 200.
    assert ((total / draws - values).abs() <= 5 * 0.5 * step / math.sqrt(draws)).all()
    assert ((total / draws - values) / step).mean().abs() <= 5 * 0.5 / math.sqrt(draws * 1000)

    state = draw.get_state()
    first = [encoded(codec, values, draw=draw) for _ in range(2)]
    draw.set_state(state)
    assert all(torch.equal(encoded(codec, values, draw=draw), payload) for payload in first)
    assert not torch.equal(*first)


def test_nearest_rounding_draws_nothing() -> None:
    draw = torch.Generator().manual_seed(1)
    before = draw.get_state()
    payloads = [encoded(make_codec("int4"), values_of("normal", 500, 1), draw=draw) for _ in range(2)]
    assert torch.equal(*payloads)
    assert torch.equal(draw.get_state(), before)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.3, 0.01, 1 / 256, 1 / 257, 0.001])
def test_top_k_keeps_the_largest_of_every_group(ratio: float) -> None:
    codec = TopK(ratio)
    for count in (1, 2, 7, 100, 999):
        values = values_of("normal", count, 8)
        out = decoded(codec, encoded(codec, values), count)
        columns = codec.columns(count)
        assert columns >= count * ratio * 0.75
        for group in range(columns):
            members, kept = values[group::columns], out[group::columns]
            if not len(members):
                continue
            assert torch.count_nonzero(kept) == 1
            place = int(kept.abs().argmax())
            # The order of magnitudes is seen in 16 bits, or 8 with large groups.
            assert members[place].abs() >= members.abs().max() * (1 - 2.0**-7)
            assert kept[place] == members[place].to(torch.bfloat16).float()


def test_top_k_sees_a_hot_row() -> None:
    values = values_of("normal", 256 * 400, 9).mul_(1e-3)
    values[256 * 7 : 256 * 8] += 5.0
    out = decoded(TopK(0.01), encoded(TopK(0.01), values), values.numel())
    assert torch.count_nonzero(out[256 * 7 : 256 * 8]) == 256


def test_top_k_does_not_make_an_infinity_of_the_largest_number() -> None:
    values = torch.full((1,), torch.finfo(torch.float32).max)
    assert decoded(TopK(), encoded(TopK(), values), 1).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_feedback_brings_everything_over_in_the_end(name: str) -> None:
    codec = make_codec(name)
    values = values_of("normal", 5000, 10)
    residual, total = torch.zeros(5000), torch.zeros(5000)
    rounds = 300
    for _ in range(rounds):
        codec.decode_add(encoded(codec, values, residual), total)
    # What is missing is one residual, whose size does not grow with the rounds.
    assert torch.allclose(total + residual, values * rounds, rtol=1e-4, atol=0.05)
    assert residual.norm() < values.norm() * (120 if name == "topk" else 0.5)


def test_refusals() -> None:
    for refused in (
        lambda: make_codec("int3"),
        lambda: make_codec("int4", rounding="up"),
        lambda: make_codec("topk", ratio=0.0),
        lambda: make_codec("topk", ratio=1.5),
        lambda: make_codec("topk", ratio=math.nan),
        lambda: Quantizer(3),
        lambda: Quantizer(4, block_size=7),
    ):
        with pytest.raises(ConfigError):
            refused()
