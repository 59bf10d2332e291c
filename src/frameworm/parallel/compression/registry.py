"""Codecs by the name that a config gives them."""

from __future__ import annotations

from collections.abc import Callable

from frameworm.errors import ConfigError
from frameworm.parallel.compression.codecs import Codec
from frameworm.parallel.compression.quantize import Quantizer
from frameworm.parallel.compression.sparse import TopK

# Each makes a codec from the share of the values that top-k keeps and the rounding of the quantizers.
_MAKERS: dict[str, Callable[[float, str], Codec]] = {
    "int8": lambda ratio, rounding: Quantizer(8, rounding=rounding),
    "int4": lambda ratio, rounding: Quantizer(4, rounding=rounding),
    "topk": lambda ratio, rounding: TopK(ratio),
}
CODECS = tuple(_MAKERS)


def make_codec(name: str, *, ratio: float = 0.01, rounding: str = "nearest") -> Codec:
    """The codec of a compression method.

    Args:
        name: "int8", "int4" or "topk".
        ratio: Share of the values that top-k keeps.
        rounding: "nearest" or "stochastic"; top-k rounds to the nearest always.
    """
    if name not in _MAKERS:
        raise ConfigError(f"there is no codec {name!r}: use one of {', '.join(CODECS)}")
    return _MAKERS[name](ratio, rounding)
