"""What every codec promises, whatever it does to the values."""

from __future__ import annotations

import torch

from frameworm.parallel.compression.codecs import Codec

COUNTS = (0, 1, 3, 31, 32, 33, 127, 128, 129, 1000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_codec(codec: Codec) -> None:
    """Check payloads, decoding, error feedback and non-finite values.

    Raises:
        AssertionError: The codec breaks a promise of `Codec`.
    """
    draw = torch.Generator().manual_seed(0)
    for count in COUNTS:
        size = codec.encoded_bytes(count)
        assert size % 4 == 0
        for dtype in DTYPES:
            values = torch.randn(count, generator=draw).to(dtype)
            before, kept = values.clone(), torch.randn(count, generator=draw)
            residual = kept.clone()
            payloads = [torch.full((size,), fill, dtype=torch.uint8) for fill in (0x00, 0xA5)]
            codec.encode(values, payloads[0], residual)
            codec.encode(values, payloads[1], kept.clone())
            assert torch.equal(*payloads), "every byte is written, and the same values give the same bytes"
            assert torch.equal(values, before), "the values are not changed"
            out, total = torch.full((count,), 77.0), torch.ones(count)
            codec.decode(payloads[0], out)
            codec.decode_add(payloads[0], total)
            torch.testing.assert_close(total, out + 1)
            torch.testing.assert_close(out + residual, values.float() + kept, msg="what is lost is kept")
            rounded = torch.full((count,), 77.0, dtype=dtype)
            codec.decode(payloads[0], rounded)
            torch.testing.assert_close(rounded, out.to(dtype))
    for bad in (torch.nan, torch.inf):
        values, residual = torch.full((codec.granularity,), 1.0), torch.full((codec.granularity,), 2.0)
        values[0] = bad
        payload = torch.zeros(codec.encoded_bytes(len(values)), dtype=torch.uint8)
        codec.encode(values, payload, residual)
        out = torch.zeros(len(values))
        codec.decode(payload, out)
        assert out.isnan().any(), "a value that is not finite is seen on all ranks"
        assert residual.isfinite().all(), "and does not stay for the next step"
