"""Ring codecs: the protocol of a hop of a compressed all-reduce, and the table of codecs.

In the scatter phase each rank adds its own values to the partial sum that arrives and sends it on,
encoded. The owner of a chunk encodes the final values once; in the gather phase those bytes are
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
    """Converts fp32 values to bytes and back. Thread-safe: a call leaves no state.

    One call handles a *piece*: `count` consecutive values of a tensor, and their
    `wire_bytes(count)` bytes. Every array is contiguous; bytes aligned to 4 are faster.
    """

    @property
    def name(self) -> str:
        """As in `Call.compression`."""
        ...

    @property
    def block(self) -> int:
        """Each piece begins at a multiple of this in its chunk; only the last may be shorter."""
        ...

    @property
    def divides_first(self) -> bool:
        """True if for a mean each rank scales its own values by 1/n and the owner never divides."""
        ...

    def prepare(self) -> bool:
        """Compile the kernels by numba, which then give the same bits in less time.

        Call it in a background thread: it takes 5 s the first time on a machine, then 1 s, most of
        it for numba's import. Other threads use numpy meanwhile.

        Returns False if numba is not installed or does not fit numpy.
        """
        ...

    def wire_bytes(self, count: int) -> int:
        """Return the bytes of a piece of `count` values; a multiple of 4."""
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

        so that the rounding error has the same weight when it is added to this rank's values next
        time (Seide et al. 2014, error feedback). It is finite: 0 where v or its image is not.

        Args:
            incoming: uint8[wire_bytes(count)], or None at the first hop.
            own: float32[count]; only read.
            outgoing: uint8[wire_bytes(count)], written.
            own_scale: The factor for this rank's values; not 0.
            divisor: The divisor of the sum; at least 1.
            residual: float32[count], from an earlier call; only read.
            residual_out: float32[count], written; may be the same memory as `residual`.
            draw: A 64-bit seed for stochastic codecs: equal seeds give equal bytes. The hops of one
                chunk need different seeds, or their errors add up.

        Returns:
            The number of finite values that were clipped.

        Raises:
            ValueError: An array does not have the length given here.
        """
        ...

    def decode(self, wire: Bytes, out: Float32s) -> None:
        """Write the values of a piece: uint8[wire_bytes(count)] to float32[count].

        The bytes come from another machine: any bytes decode to some values.
        """
        ...


@cache
def codec_of(name: str) -> Codec:
    """Return the codec of that name; the same object each time.

    Raises ValueError with the known names if there is none.
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
