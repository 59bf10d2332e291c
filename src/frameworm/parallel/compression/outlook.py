"""Predictions for each method on this network and machine before any has run, for `auto` to pick its candidates."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from frameworm.parallel.compression.auto import METHODS, OFF, Outlook
from frameworm.parallel.compression.codecs import Codec
from frameworm.parallel.compression.quantize import Quantizer
from frameworm.parallel.compression.registry import make_codec
from frameworm.parallel.network.probe import quick_probe
from frameworm.scaling.network import NetworkModel, bus_share

SAMPLE = 2**20  # values used to time the codecs
REPETITIONS = 3
_FP32_BYTES, _HALF_BYTES = 4, 2


def outlook_of(model: nn.Module, device: torch.device, hidden_s: float, ratio: float, powersgd_rank: int) -> Outlook:
    """Probe the network and time the codecs; all ranks call it at the same time.

    Args:
        model: The model whose gradients are to be sent.
        device: The device of the gradients.
        hidden_s: Seconds from the first bucket to the last in a step, with which sending can overlap.
        ratio: Fraction of the values that topk keeps.
        powersgd_rank: Columns of powersgd's matrices.
    """
    parameters = [item for item in model.parameters() if item.requires_grad]
    count = sum(item.numel() for item in parameters)
    world_size = dist.get_world_size()
    network = quick_probe(device=device if dist.get_backend() == "nccl" else None)
    costs_s = codec_costs(device, count, world_size, ratio, powersgd_rank)
    sending_s = {OFF: network.seconds("all_reduce", _FP32_BYTES * count)}
    for method in METHODS:
        if method == "powersgd":
            left, right = matrix_values(parameters, powersgd_rank)
            wire_s = sum(network.seconds("all_reduce", _FP32_BYTES * values) for values in (left, right))
        else:
            wire_s = _wire_s(method, network, count, ratio)
        sending_s[method] = wire_s + costs_s[method]
    bytes_per_s = network.bus_bytes_per_s()
    return Outlook(
        sending_s,
        hidden_s,
        bandwidth_gbps=None if bytes_per_s is None else bytes_per_s * 8 / 1e9,
        latency_us=network.latency_s() * 1e6,
    )


def _wire_s(method: str, network: NetworkModel, count: int, ratio: float) -> float:
    """Seconds spent on the wire, without the codec."""
    if method in ("fp16", "bf16"):
        return network.seconds("all_reduce", _HALF_BYTES * count)
    codec = make_codec(method, ratio=ratio)
    size_bytes = codec.encoded_bytes(count)
    if isinstance(codec, Quantizer):
        return _exchange_s("all_to_all", network, size_bytes) + _exchange_s("all_gather", network, size_bytes)
    return _exchange_s("all_gather", network, size_bytes * network.world_size)


def _exchange_s(collective: str, network: NetworkModel, size_bytes: int) -> float:
    """Seconds of an exchange as the hook does it: on gloo in pairs, using both directions of the links at once."""
    bytes_per_s = network.bus_bytes_per_s()
    if network.backend != "gloo" or not bytes_per_s:
        return network.seconds(collective, size_bytes)
    return network.latency_s() + size_bytes * bus_share(collective, network.world_size) / bytes_per_s


def matrix_values(parameters: list[nn.Parameter], rank: int) -> tuple[int, int]:
    """Values of powersgd's two exchanges; parameters that are not matrices are sent uncompressed with the first."""
    left = right = 0
    for parameter in parameters:
        if parameter.dim() < 2:
            left += parameter.numel()
            continue
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        if (rows + columns) * rank >= parameter.numel():
            left += parameter.numel()
        else:
            left += rows * rank
            right += columns * rank
    return left, right


def codec_costs(
    device: torch.device, count: int, world_size: int, ratio: float, powersgd_rank: int
) -> dict[str, float]:
    """Seconds to encode and decode all gradients on this machine, by method; extrapolated from a sample."""
    sample = min(max(count, 1), SAMPLE)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sample, generator=generator).to(device)
    share = count / sample
    costs = {}
    for method in METHODS:
        if method in ("fp16", "bf16"):
            half = torch.float16 if method == "fp16" else torch.bfloat16
            once = _seconds(device, lambda half=half: values.copy_(values.to(half)))  # type: ignore[misc]
        elif method == "powersgd":
            once = _seconds(device, _low_rank(values, powersgd_rank))
        else:
            once = _seconds(device, _coding(make_codec(method, ratio=ratio), values, world_size))
        costs[method] = once * share
    return costs


def _coding(codec: Codec, values: Tensor, world_size: int) -> Callable[[], object]:
    """A function that does one rank's coding work for its gradients."""
    count = values.numel()
    residual = torch.zeros(count, device=values.device)
    payload = torch.empty(codec.encoded_bytes(count), dtype=torch.uint8, device=values.device)
    out = torch.empty_like(values)
    if not isinstance(codec, Quantizer):

        def sparse() -> None:
            codec.encode(values, payload, residual)
            out.zero_()
            for _ in range(world_size):
                codec.decode_add(payload, out)

        return sparse
    shard = -(-count // world_size // codec.granularity) * codec.granularity
    shard = min(shard, count)
    shard_bytes = codec.encoded_bytes(shard)
    parts = torch.zeros(world_size, shard_bytes, dtype=torch.uint8, device=values.device)
    reduced = torch.empty(shard_bytes, dtype=torch.uint8, device=values.device)

    def quantized() -> None:
        codec.encode(values, payload, residual)
        codec.reduce_mean(parts, reduced, shard, residual[:shard])
        codec.decode(payload, out)

    return quantized


def _low_rank(values: Tensor, rank: int) -> Callable[[], object]:
    side = max(1, int(values.numel() ** 0.5))
    matrix = values[: side * side].view(side, side)
    vectors, residual = torch.randn(side, rank, device=values.device), torch.zeros_like(matrix)

    def both() -> None:
        whole = matrix + residual
        left = whole @ vectors
        right = whole.t() @ left
        mean = left @ right.t()
        torch.sub(whole, mean, out=residual)

    return both


def _seconds(device: torch.device, action: Callable[[], object]) -> float:
    """The fastest of a few runs after one warm-up."""
    best = float("inf")
    for number in range(REPETITIONS + 1):
        _wait(device)
        begin = perf_counter()
        action()
        _wait(device)
        if number:
            best = min(best, perf_counter() - begin)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
