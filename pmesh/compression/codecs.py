"""Ring codecs: what a hop of a compressed all-reduce computes, and the table of what there is.

In the scatter phase each rank adds its own values to the partial sum that arrives and sends it on,
encoded; the owner of a chunk encodes the final values once, and in the gather phase those bytes are
forwarded verbatim. So partial sums exist as fp32 only inside `Codec.hop`, and all ranks decode the
same bytes.
"""

from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.casts import Cast
from pmesh.compression.int8 import Int8


class Codec(Protocol):
    """Turns fp32 values into bytes and back. Thread-safe: it keeps nothing of a call.

    A *piece* is what one call takes: `count` consecutive values of a tensor, and their
    `wire_bytes(count)` bytes. Every array is contiguous; bytes that begin at a multiple of 4 are
    faster.
    """

    @property
    def name(self) -> str:
        """As in `Call.compression`."""
        ...

    @property
    def block(self) -> int:
        """Pieces begin at multiples of so many values of a chunk; only the last may be shorter."""
        ...

    @property
    def divides_first(self) -> bool:
        """A mean scales each rank's own values by 1/n, and the owner does not divide."""
        ...

    def prepare(self) -> bool:
        """Compile the twin in numba, which from then on gives the same bits in less time.

        To be called in a thread that may take its time: 5 s at the first time on a machine, 1 s
        after that, most of it numba's import. Other threads go on with numpy meanwhile.

        Returns:
            Whether there is a twin now; no, where numba is not installed or does not fit numpy.
        """
        ...

    def wire_bytes(self, count: int) -> int:
        """What a piece of `count` values takes; a multiple of 4."""
        ...

    def hop(
        self,
        incoming: Bytes | None,
        own: Float32s,
        outgoing: Bytes,
        *,
        own_scale: float = 1.0,
        divisor: int = 1,
        residual: Float32s | None = None,
        residual_out: Float32s | None = None,
        draw: int = 0,
    ) -> int:
        """Add this rank's values to a partial sum, and encode the sum.

        With v = (decode(incoming) + own_scale * (own + residual)) / divisor, in fp32:

            outgoing = encode(v)
            residual_out = (v - decode(outgoing)) * divisor / own_scale

        so that what was rounded away, added to this rank's values next time, weighs what it weighed
        now (Seide et al. 2014, error feedback). It is finite: 0 where v or its image is not.

        Args:
            incoming: uint8[wire_bytes(count)], or None at the first hop.
            own: float32[count]; only read.
            outgoing: uint8[wire_bytes(count)], written.
            own_scale: of this rank's values; not 0.
            divisor: of the sum; at least 1.
            residual: float32[count], as an earlier call left it; only read.
            residual_out: float32[count], written; may be the same memory as `residual`.
            draw: 64 bits, from which the codecs that draw lots make them: the same, the same bytes.
                Hops on the way of one chunk need different ones, or their errors add up.

        Returns:
            How many finite values were clipped.

        Raises:
            ValueError: an array has another length than stands here.
        """
        ...

    def decode(self, wire: Bytes, out: Float32s) -> None:
        """Write the values of a piece: uint8[wire_bytes(count)] to float32[count].

        The bytes come from another machine: whatever they are, some values are written.
        """
        ...


@cache
def codec_of(name: str) -> Codec:
    """The codec of that name; the same object each time.

    Raises:
        ValueError: there is none; it says which there are.
    """
    make = _CODECS.get(name)
    if make is None:
        raise ValueError(f"no ring codec {name!r}; there are: {', '.join(_CODECS)}")
    codec: Codec = make()
    return codec


_CODECS = MappingProxyType[str, Any](
    {
        "fp16": lambda: Cast("fp16"),
        "bf16": lambda: Cast("bf16"),
        "int8": lambda: Int8(stochastic=False),
        "int8-stochastic": lambda: Int8(stochastic=True),
    }
)
