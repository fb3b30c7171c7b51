"""How a tensor is cut into chunks and records, and how large these are."""

from collections.abc import Iterator

from pmesh.core.wire.records import MAX_BODY_BYTES

SEGMENT_BYTES = 512 * 1024
LARGE_SEGMENT_BYTES = MAX_BODY_BYTES  # fewer records; to fill the ring with them takes longer
LARGE_CHUNK_BYTES = 12 * LARGE_SEGMENT_BYTES  # so that what it takes longer is little
SMALL_BYTES = 32 * 1024  # fits the socket buffers of every system: no task is needed to send it
IN_LINE_BYTES = SEGMENT_BYTES  # fits those between two agents of one machine, and often others


def chunk_bounds(count: int, chunks: int) -> tuple[int, ...]:
    """Where the chunks of `count` values begin, and the end; as `numpy.array_split` cuts.

    >>> chunk_bounds(7, 3)
    (0, 3, 5, 7)
    """
    size, larger = divmod(count, chunks)
    return tuple(i * size + min(i, larger) for i in range(chunks + 1))


def segments(
    begin: int, end: int, *, segment_bytes: int = SEGMENT_BYTES
) -> tuple[tuple[int, int], ...]:
    """The offset and length of each record that carries the bytes from `begin` to `end`.

    At least one, if need be an empty one.

    >>> segments(0, 10, segment_bytes=4), segments(7, 7)
    (((0, 4), (4, 4), (8, 2)), ((7, 0),))
    """
    offsets = range(begin, end, segment_bytes) or (begin,)
    return tuple((offset, min(segment_bytes, end - offset)) for offset in offsets)


def halvings(size: int) -> Iterator[tuple[int, int]]:
    """The halvings from `size` blocks to one: those from the first number on are given away.

    As many as the logarithm of `size` to base 2, rounded up.

    >>> list(halvings(8)), list(halvings(5))
    ([(4, 8), (2, 4), (1, 2)], [(3, 5), (2, 3), (1, 2)])
    """
    while size > 1:
        half = (size + 1) // 2
        yield half, size
        size = half
