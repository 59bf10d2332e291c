"""What compression does to gradients, measured and printed; and CompressedDDP as loops of other people use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from frameworm.distributed import CompressedDDP, GradientCompressor, benchmark_compression
from frameworm.errors import ConfigError


def test_every_method_and_size_has_ratio_time_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    found = benchmark_compression([1_000, 40_003, (3, 5, 7)], device="cpu", repetitions=2)
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    rows = {(row["method"], row["values"]): row for row in found["rows"]}
    assert len(rows) == 6 * 3
    assert {size for _, size in rows} == {1_000, 40_003, 105}
    for row in rows.values():
        assert row["ratio"] == row["bytes"] / row["compressed_bytes"]
        assert row["bytes"] == 4 * row["values"]
        assert row["time_ms"] > 0
        assert row["method"] in printed
    large = {method: rows[method, 40_003] for method in ("fp16", "bf16", "int8", "int4", "topk", "powersgd")}
    assert [round(large[name]["ratio"]) for name in ("fp16", "bf16")] == [2, 2]
    assert 3.5 < large["int8"]["ratio"] <= 4
    assert 7 < large["int4"]["ratio"] <= 8
    assert large["topk"]["ratio"] > 50
    assert large["powersgd"]["ratio"] > 50
    errors = [large[name]["error"] for name in ("fp16", "bf16", "int8", "int4", "topk")]
    assert errors == sorted(errors)
    assert 0 < errors[0] < 1e-3
    assert errors[-1] < large["powersgd"]["error"] * 1.1 < 1.2


def test_topk_of_everything_loses_rounding_only() -> None:
    (row,) = benchmark_compression([1_000], ["topk"], "cpu", compression_ratio=1.0, show=False)["rows"]
    assert row["error"] < 1e-2


def test_unknown_methods_and_empty_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="use some of fp16"):
        benchmark_compression(methods=["zip"])
    with pytest.raises(ConfigError, match="1 or more"):
        benchmark_compression([0], device="cpu")


def _wrapped(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(64, 4)
    wrapped = CompressedDDP(model, compression_ratio=0.1)
    assert wrapped.model is model
    assert wrapped.module is model
    assert isinstance(wrapped.compressor, GradientCompressor)
    assert wrapped.compressor.compression_ratio == 0.1
    for name in wrapped.state_dict():
        assert name.startswith("ddp.")
    wrapped.backward_with_compression(wrapped(torch.randn(3, 64) + rank).sum())
    kept = wrapped.compressor.compress_topk(wrapped.model.weight.grad)
    wrapped.compression.close()
    return len(kept["values"]), [item.grad.tolist() for item in wrapped.model.parameters()]


def test_the_model_and_a_compressor_are_at_hand(run_ranks: Any) -> None:
    first, second = run_ranks(_wrapped)
    assert first == second
    assert first[0] == 25
