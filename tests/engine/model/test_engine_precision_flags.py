"""Which attention kernels come first."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from frameworm.engine.model.precision import apply_backend_flags, prefer_cudnn_attention


def test_cudnn_attention_comes_first_only_where_asked() -> None:
    usual = list(torch._C._get_sdp_priority_order())
    flags = {"tf32": True, "benchmark": True, "deterministic": False}
    try:
        apply_backend_flags(**flags, flash_attention="cudnn")
        order = list(torch._C._get_sdp_priority_order())
        assert order[0] == int(SDPBackend.CUDNN_ATTENTION)
        assert sorted(order) == sorted(usual)
        apply_backend_flags(**flags, flash_attention="auto")
        assert list(torch._C._get_sdp_priority_order()) == usual
        apply_backend_flags(tf32=True, benchmark=True, deterministic=True, flash_attention="cudnn")
        assert list(torch._C._get_sdp_priority_order()) == usual  # same bits win
    finally:
        apply_backend_flags(**flags, flash_attention="auto")
        prefer_cudnn_attention(False)
