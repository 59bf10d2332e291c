"""zstd compression from Python's standard library or the `zstandard` package."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable

from frameworm.errors import MissingPackageError

_LEVEL = 1  # higher levels hardly make weights any smaller


def zstd_functions() -> tuple[Callable[[bytes], bytes], Callable[[bytes, int], bytes]]:
    """Return functions to compress, and to decompress to a known size.

    Raises:
        MissingPackageError: If no zstd package is installed.
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
    own = threading.local()  # a compressor is not thread-safe

    def compress(content: bytes) -> bytes:
        if not hasattr(own, "compressor"):
            own.compressor = package.ZstdCompressor(level=_LEVEL)
        done: bytes = own.compressor.compress(content)
        return done

    def decompress(content: bytes, size: int) -> bytes:
        # A frame may claim any size; read no more than was asked for.
        with package.ZstdDecompressor().stream_reader(content) as reader:
            done: bytes = reader.read(size)
        return done

    return compress, decompress
