"""The kernels write the bytes that the plain path of the codecs writes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from frameworm.parallel.compression import codecs
from frameworm.parallel.compression.codecs import Codec
from frameworm.parallel.compression.quantize import Quantizer
from frameworm.parallel.compression.registry import make_codec
from frameworm.parallel.compression.sparse import TopK
from triton_here import DEVICE, GPU, INTERPRETED, needs_gpu, needs_kernels

COUNTS = [1, 3, 100, 127, 128, 129, 256, 257, 2047, 2048, 4097, 12_345]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["int8", "int4", "topk"]


def _marked(test: Callable[..., None]) -> Any:
    test = needs_kernels(test)
    return pytest.mark.gpu(test) if GPU else test


def on_gpu(test: Callable[..., None]) -> Any:
    return pytest.mark.gpu(needs_gpu(_marked(test)))


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Runs something with the kernels in charge of the device's tensors, also where they are only interpreted."""

    def run(work: Callable[[], None]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(codecs, "_DEVICE_TYPES", (DEVICE.type,))
            codecs.has_kernels.cache_clear()
            assert codecs.has_kernels(DEVICE)
            work()
        codecs.has_kernels.cache_clear()

    return run


Runner = Callable[[Callable[[], None]], None]


def gradients(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + count)
    spread = torch.exp(2 * torch.randn(count, generator=generator))
    return (0.01 * torch.randn(count, generator=generator) * spread).to(dtype)


def adversarial() -> Tensor:
    """Blocks of zeros, of subnormal numbers, with one huge value, with NaN, with infinities, of one constant."""
    values = gradients(16 * 256)
    block = values.view(16, 256)
    block[1] = 0.0
    block[2] *= 1e-41
    block[3] *= 1e-36
    block[4, 77] = 3e38
    block[5, 3] = float("nan")
    block[6, 200] = float("inf")
    block[7, 255] = float("-inf")
    block[8] = 0.25
    block[9] = 3.4e38
    block[10] = -1e-45
    block[11, 10:] = 0.0
    return values


def encoded(codec: Codec, values: Tensor, residual: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor | None]:
    """Payload and residual, on the CPU; the payload's bytes are garbage before."""
    kept = None if residual is None else residual.clone()
    payload = torch.full((codec.encoded_bytes(values.numel()),), 0xA5, dtype=torch.uint8, device=values.device)
    codec.encode(values, payload, kept, **more)
    return payload.cpu(), None if kept is None else kept.cpu()


def both(
    run: Runner, name: str, values: Tensor, residual: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """What the kernels and the plain path make of the same values."""
    ours: list[tuple[Tensor, Tensor | None]] = []
    moved = None if residual is None else residual.to(DEVICE)
    run(lambda: ours.append(encoded(make_codec(name), values.to(DEVICE), moved)))
    return ours[0], encoded(make_codec(name), values, residual)


def same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.nan_to_num(12345.0), theirs.nan_to_num(12345.0))


@_marked
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_encoding_writes_the_same_bytes(with_kernels: Runner, name: str, dtype: torch.dtype) -> None:
    for count in COUNTS if dtype == torch.float32 else COUNTS[-2:]:
        values, residual = gradients(count, dtype), 0.3 * gradients(count, seed=7)
        (payload, kept), (their_payload, their_kept) = both(with_kernels, name, values, residual)
        assert torch.equal(payload, their_payload), count
        assert kept is not None
        assert their_kept is not None
        # The plain path may or may not contract integer * step into the difference.
        within = (values.float() + residual).abs().max() * 2.0**-22
        assert (kept - their_kept).abs().max() <= within
        assert torch.equal(both(with_kernels, name, values)[0][0], encoded(make_codec(name), values)[0]), count


@_marked
@pytest.mark.parametrize("name", NAMES)
def test_encoding_nothing(with_kernels: Runner, name: str) -> None:
    values = torch.empty(0, device=DEVICE)
    with_kernels(lambda: encoded(make_codec(name), values, values.clone()) and None)


@_marked
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_encoding_adversarial_blocks(with_kernels: Runner, name: str) -> None:
    values = adversarial()
    codec = make_codec(name)
    residual = 0.1 * gradients(values.numel(), seed=3)
    residual.view(16, 256)[[1, 2, 3, 9, 10]] = 0.0
    for before in (residual, None):
        (payload, kept), (their_payload, their_kept) = both(with_kernels, name, values, before)
        decoded, theirs = torch.empty_like(values), torch.empty_like(values)
        codec.decode(payload, decoded)
        codec.decode(their_payload, theirs)
        assert torch.equal(decoded.isnan(), theirs.isnan())
        integers = values.numel() * (8 if name == "int8" else 4) // 8
        steps = their_payload[integers:].view(torch.float32)
        assert same(payload[integers:].view(torch.float32), steps)
        # Dividing and multiplying by the inverse may fall on different sides of a half: seldom, and by one step.
        apart = (decoded - theirs).nan_to_num(0.0).abs()
        assert (apart <= 1.001 * steps.nan_to_num(0.0).repeat_interleave(codec.granularity)).all()
        assert (apart > 0).sum() <= 8
        if before is None:
            continue
        assert kept is not None
        assert their_kept is not None
        assert kept.isfinite().all()
        bad = decoded.isnan()
        assert bad.any()
        assert torch.equal(kept[bad], residual[bad])
        total = values.double() + residual.double()
        assert ((decoded.double() + kept - total).abs() <= total.abs() * 2.0**-22 + 1e-44)[~bad].all()


@_marked
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 0.004, 0.003])
def test_sparse_adversarial_groups(with_kernels: Runner, ratio: float) -> None:
    values = adversarial()
    residual = 0.1 * gradients(values.numel(), seed=3)
    ours: list[tuple[Tensor, Tensor | None]] = []
    with_kernels(lambda: ours.append(encoded(TopK(ratio), values.to(DEVICE), residual.to(DEVICE))))
    (payload, kept), (their_payload, their_kept) = ours[0], encoded(TopK(ratio), values, residual)
    kept_bytes = 2 * TopK(ratio).columns(values.numel())
    # Devices write NaN with different bits.
    assert same(payload[:kept_bytes].view(torch.bfloat16), their_payload[:kept_bytes].view(torch.bfloat16))
    assert torch.equal(payload[kept_bytes:], their_payload[kept_bytes:])
    assert kept is not None
    assert their_kept is not None
    assert torch.equal(kept, their_kept)
    assert kept.isfinite().all()


@_marked
def test_equal_values_are_kept_by_position(with_kernels: Runner) -> None:
    values = torch.ones(5000)
    values[::3] = -1.0
    (payload, kept), (their_payload, their_kept) = both(with_kernels, "topk", values, torch.zeros(5000))
    assert torch.equal(payload, their_payload)
    assert kept is not None
    assert their_kept is not None
    assert torch.equal(kept, their_kept)


@_marked
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_decoding(with_kernels: Runner, name: str, dtype: torch.dtype) -> None:
    codec = make_codec(name)
    hard = adversarial()
    if INTERPRETED and dtype != torch.float32:
        hard.clamp_(-6e4, 6e4)  # the interpreter does not take larger ones to infinity in silence, as a GPU does
    for values in (*(gradients(count) for count in (COUNTS if dtype == torch.float32 else COUNTS[-2:])), hard):
        payload, _ = encoded(codec, values)
        out = torch.full_like(values, 7.0, dtype=dtype)
        ours = out.to(DEVICE, copy=True)
        moved = payload.to(DEVICE)
        with_kernels(lambda: make_codec(name).decode(moved, ours))  # noqa: B023 (called at once)
        codec.decode(payload, out)
        if INTERPRETED and dtype == torch.bfloat16:  # the interpreter cuts off where a GPU rounds
            torch.testing.assert_close(ours, out, rtol=2.0**-7, atol=2e-38, equal_nan=True)
        else:
            assert same(ours.cpu(), out), values.numel()
        if dtype == torch.float32:
            total = gradients(values.numel(), seed=5)
            summed = total.to(DEVICE, copy=True)
            with_kernels(lambda: make_codec(name).decode_add(moved, summed))  # noqa: B023
            codec.decode_add(payload, total)
            assert same(summed.cpu(), total), values.numel()


@_marked
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_reducing_writes_the_same_bytes(with_kernels: Runner, name: str, world_size: int) -> None:
    codec = make_codec(name)
    assert isinstance(codec, Quantizer)
    for count in (1, 257, 2048, 5000):
        payloads = torch.stack([encoded(codec, gradients(count, seed=100 * rank))[0] for rank in range(world_size)])
        residual = gradients(count, seed=9)
        ours, theirs = torch.full_like(payloads[0], 0xA5), torch.full_like(payloads[0], 0xA5)
        kept, their_kept = residual.to(DEVICE, copy=True), residual.clone()
        moved, written = payloads.to(DEVICE), ours.to(DEVICE)

        def reduce() -> None:
            reducer = make_codec(name)
            assert isinstance(reducer, Quantizer)
            reducer.reduce_mean(moved, written, count, kept)  # noqa: B023 (called at once)

        with_kernels(reduce)
        codec.reduce_mean(payloads, theirs, count, their_kept)
        assert torch.equal(written.cpu(), theirs), count
        assert (kept.cpu() - their_kept).abs().max() <= world_size * 2.0**-22 * max(1.0, float(residual.abs().max()))


@_marked
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_reducing_bad_blocks(with_kernels: Runner, name: str) -> None:
    values = adversarial()
    codec = make_codec(name)
    payloads = torch.stack([encoded(codec, values)[0], encoded(codec, gradients(values.numel(), seed=1))[0]]).to(DEVICE)
    residual = gradients(values.numel(), seed=9)
    kept, payload = residual.to(DEVICE, copy=True), torch.empty_like(payloads[0])

    def reduce() -> None:
        assert isinstance(codec, Quantizer)
        codec.reduce_mean(payloads, payload, values.numel(), kept)

    with_kernels(reduce)
    decoded = torch.empty_like(values)
    codec.decode(payload.cpu(), decoded)
    first = torch.empty_like(values)
    codec.decode(payloads[0].cpu(), first)
    bad = first.isnan()
    assert bad.any()
    assert torch.equal(decoded.isnan(), bad)
    assert torch.equal(kept.cpu()[bad], residual[bad])
    assert kept.isfinite().all()


@_marked
@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_is_right_on_average(with_kernels: Runner, bits: int) -> None:
    codec = Quantizer(bits, rounding="stochastic")
    values = torch.full((2048,), 2.3)
    values[:: codec.granularity] = codec.levels  # so that a step is 1
    values = values.to(DEVICE)
    draw = torch.Generator(DEVICE)
    rounds = 6

    def drawn() -> Tensor:
        payloads = torch.empty(rounds, codec.encoded_bytes(values.numel()), dtype=torch.uint8, device=DEVICE)
        draw.manual_seed(11)

        def encode() -> None:
            for payload in payloads:
                codec.encode(values, payload, draw=draw)

        with_kernels(encode)
        return payloads.cpu()

    payloads = drawn()
    decoded = torch.empty(rounds, values.numel())
    for payload, out in zip(payloads, decoded, strict=True):
        codec.decode(payload, out)
    exact = values.cpu() == codec.levels
    assert (decoded[:, exact] == codec.levels).all()
    rest = decoded[:, ~exact]
    assert set(rest.unique().tolist()) == {2.0, 3.0}
    spread = (0.3 * 0.7) ** 0.5
    assert abs(rest.mean() - 2.3) < 5 * spread / rest.numel() ** 0.5
    # Neither halves of a block nor neighbours nor calls draw the same.
    ups = rest[:, : rest.size(1) // 2 * 2] == 3.0
    for one, other in ((ups[:, ::2], ups[:, 1::2]), (ups[:, :-128], ups[:, 128:]), (ups[0], ups[1])):
        together = (one & other).float()
        assert abs(together.mean() - 0.09) < 5 * 0.3 / together.numel() ** 0.5
    assert torch.equal(payloads, drawn())


@_marked
def test_what_lies_at_odd_addresses(with_kernels: Runner) -> None:
    """Slices of a bucket need not be aligned as vectors are."""
    values, residual = gradients(3001), gradients(3001, seed=2)
    for name in NAMES:
        moved, kept = values.to(DEVICE)[1:], residual.to(DEVICE, copy=True)[1:]
        codec = make_codec(name)
        whole = torch.zeros(codec.encoded_bytes(3000) + 8, dtype=torch.uint8, device=DEVICE)
        payload = whole[4:-4]
        with_kernels(lambda: make_codec(name).encode(moved, payload, kept))  # noqa: B023 (called at once)
        theirs, _ = encoded(codec, values[1:], residual[1:])
        assert torch.equal(payload.cpu(), theirs), name
        assert not whole[:4].any()
        assert not whole[-4:].any()


@_marked
def test_shapes_without_a_kernel_take_the_plain_path(with_kernels: Runner) -> None:
    values = gradients(5000)
    for make in (lambda: Quantizer(8, block_size=100), lambda: TopK(0.0005)):
        ours: list[tuple[Tensor, Tensor | None]] = []
        with_kernels(lambda: ours.append(encoded(make(), values.to(DEVICE), values.to(DEVICE))))  # noqa: B023
        decoded, theirs = torch.empty_like(values), torch.empty_like(values)
        make().decode(ours[0][0], decoded)
        make().decode(encoded(make(), values, values)[0], theirs)
        # Devices divide by a constant differently in the last bit, so that a half may be rounded to the other side.
        assert (decoded - theirs).abs().max() <= 1.001 * (2 * values).abs().max() / 127
        assert ((decoded - theirs).abs() > 1e-6 * theirs.abs()).float().mean() < 0.01


@on_gpu
@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_and_a_graph_can_hold_it(name: str) -> None:
    count, world_size = 1_000_003, 4
    codec = make_codec(name)
    values, residual = gradients(count).to(DEVICE), torch.zeros(count, device=DEVICE)
    payload = torch.empty(codec.encoded_bytes(count), dtype=torch.uint8, device=DEVICE)
    out = torch.empty_like(values)

    def work() -> None:
        codec.encode(values, payload, residual)
        if isinstance(codec, Quantizer):
            codec.reduce_mean(payload.expand(world_size, -1).contiguous(), payload, count, residual)
        codec.decode(payload, out)
        codec.decode_add(payload, out)

    work()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    residual.zero_()
    work()
    torch.cuda.set_sync_debug_mode("default")
    first = out.clone(), residual.clone()
    graph = torch.cuda.CUDAGraph()
    residual.zero_()
    with torch.cuda.graph(graph):
        work()
    residual.zero_()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, first[0])
    assert torch.equal(residual, first[1])
