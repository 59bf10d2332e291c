"""Codecs by their names in a config."""

from __future__ import annotations

from collections.abc import Callable

from frameworm.errors import ConfigError
from frameworm.parallel.compression.codecs import Codec
from frameworm.parallel.compression.quantize import Quantizer
from frameworm.parallel.compression.sparse import TopK

Maker = Callable[[float, str], Codec]

# Each makes a codec, given the fraction of values that top-k keeps and the rounding of the quantizers.
_MAKERS: dict[str, Maker] = {
    "int8": lambda ratio, rounding: Quantizer(8, rounding=rounding),
    "int4": lambda ratio, rounding: Quantizer(4, rounding=rounding),
    "topk": lambda ratio, rounding: TopK(ratio),
}
CODECS = tuple(_MAKERS)
RESERVED = ("auto", "off", "fp16", "bf16", "powersgd", *CODECS)  # all methods of a config
_registered: dict[str, Maker] = {}


def register_codec(name: str, make: Maker) -> None:
    """Add a codec for `enable_gradient_compression` and DDP hooks in this process; call it on every rank.

    Payloads are gathered from all ranks and added up, with error feedback.

    Args:
        name: The method's name.
        make: Makes the codec, given `compression_ratio` and `rounding`.

    Raises:
        ConfigError: It is the name of one of frameworm's own methods.
    """
    if name in RESERVED:
        raise ConfigError(f"compression method {name!r} is frameworm's own; give the codec another name")
    _registered[name] = make


def registered_codecs() -> tuple[str, ...]:
    """The names of registered codecs."""
    return tuple(_registered)


def make_codec(name: str, *, ratio: float = 0.01, rounding: str = "nearest") -> Codec:
    """The codec of a compression method.

    Args:
        name: "int8", "int4", "topk", or the name of a registered codec.
        ratio: Fraction of the values that top-k keeps.
        rounding: "nearest" or "stochastic"; top-k always rounds to nearest.
    """
    makers = {**_MAKERS, **_registered}
    if name not in makers:
        raise ConfigError(f"there is no codec {name!r}: use one of {', '.join(makers)}")
    return makers[name](ratio, rounding)
