"""zstd, if it is there."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable

from frameworm.errors import MissingPackageError

_LEVEL = 1  # weights hardly get smaller with more effort


def zstd_functions() -> tuple[Callable[[bytes], bytes], Callable[[bytes, int], bytes]]:
    """How to compress, and how to decompress to a known size.

    Raises:
        MissingPackageError: There is no zstd here.
    """
    try:
        native = importlib.import_module("compression.zstd")  # Python 3.14 and later
    except ImportError:
        pass
    else:
        return (
            lambda content: native.compress(content, _LEVEL),
            lambda content, size: native.ZstdDecompressor().decompress(content, max_length=size),
        )
    try:
        package = importlib.import_module("zstandard")
    except ImportError:
        raise MissingPackageError(
            "checkpoint.compression needs zstd, which is not installed: pip install 'frameworm[zstd]', or set it to off"
        ) from None
    own = threading.local()  # a compressor is for one thread at a time

    def compress(content: bytes) -> bytes:
        if not hasattr(own, "compressor"):
            own.compressor = package.ZstdCompressor(level=_LEVEL)
        done: bytes = own.compressor.compress(content)
        return done

    def decompress(content: bytes, size: int) -> bytes:
        # A frame may claim any size; no more is made of it than was asked for.
        with package.ZstdDecompressor().stream_reader(content) as reader:
            done: bytes = reader.read(size)
        return done

    return compress, decompress
