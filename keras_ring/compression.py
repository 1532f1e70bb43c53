"""The names of the codecs that shorten what travels between hosts.

`compression=kr.compression.fp16` and `compression="fp16"` are the same.
"""

from typing import Literal, TypeAlias, get_args

from keras_ring.errors import ConfigError

Compression: TypeAlias = Literal["fp16", "bf16"]

none = None
"""Everything travels as it is."""

fp16: Compression = "fp16"
"""float32 and float64 travel as float16: 11 bits of precision; beyond 65504 is infinity."""

bf16: Compression = "bf16"
"""float32 and float64 travel as bfloat16: 8 bits of precision, the range of float32."""


def attribute_of(compression: Compression | None, what: str) -> str:
    """Return what the op is told, or refuse a name that is no codec's.

    Args:
        compression: What the user gave.
        what: Whose argument it is, as the message begins.

    Raises:
        ConfigError: There is no such codec.
    """
    if compression is None:
        return "none"
    if compression not in get_args(Compression):
        raise ConfigError(
            f"{what}: compression={compression!r} is unknown; expected None or one of "
            f"{', '.join(map(repr, get_args(Compression)))}."
        )
    return compression
