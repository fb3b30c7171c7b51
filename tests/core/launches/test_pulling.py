"""Contents on their way: two ends, joined by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.launches.pulling import PART_BYTES, WINDOW_BYTES, Incoming, Outgoing, Slice
from pmesh.core.wire.tree import Content
from pmesh.errors import ProtocolError

SIZES = st.lists(st.integers(1, 3 * PART_BYTES), max_size=12)


def contents(sizes: list[int]) -> list[Content]:
    return [Content(bytes([n]) * 32, size) for n, size in enumerate(sizes)]


def byte_of(content: Content) -> bytes:
    return content.sha256[:1]


@given(SIZES, st.integers(PART_BYTES // 20, 4 * PART_BYTES), st.data())
def test_all_arrives_whole_and_never_more_than_a_window_waits(
    sizes: list[int], most: int, data: st.DataObject
) -> None:
    wanted = contents(sizes)
    outgoing, incoming = Outgoing(wanted), Incoming(wanted)
    came: dict[bytes, int] = {}
    while not incoming.is_stored:
        offset = outgoing.sent
        slices = outgoing.take(most)
        stream = b"".join(byte_of(s.content) * s.nbytes for s in slices)
        for begin in range(0, len(stream), PART_BYTES):
            part = stream[begin : begin + PART_BYTES]
            for piece, bytes_ in incoming.receive_untrusted(offset + begin, part):
                assert piece.start == came.get(piece.content.sha256, 0)
                assert bytes_ == byte_of(piece.content) * piece.nbytes
                came[piece.content.sha256] = piece.start + piece.nbytes
        assert outgoing.sent - outgoing.stored <= WINDOW_BYTES
        if not slices or data.draw(st.booleans()):
            incoming.stored = incoming.received
            outgoing.acknowledge_untrusted(incoming.stored)
    assert came == {content.sha256: content.nbytes for content in wanted}
    outgoing.acknowledge_untrusted(outgoing.total)
    assert outgoing.is_sent
    assert outgoing.take(1) == []


def test_a_full_window_holds_the_starter_up() -> None:
    outgoing = Outgoing(contents([2 * WINDOW_BYTES]))
    assert outgoing.take(WINDOW_BYTES + 1) == [
        Slice(contents([2 * WINDOW_BYTES])[0], 0, WINDOW_BYTES)
    ]
    assert outgoing.take(1) == []
    outgoing.acknowledge_untrusted(1)
    ((_, start, nbytes),) = outgoing.take(5)
    assert (start, nbytes) == (WINDOW_BYTES, 1)


def test_what_a_machine_can_not_have_stored_is_refused() -> None:
    outgoing = Outgoing(contents([5]))
    outgoing.take(3)
    with pytest.raises(ProtocolError, match="never sent"):
        outgoing.acknowledge_untrusted(4)
    outgoing.acknowledge_untrusted(3)
    outgoing.acknowledge_untrusted(1)  # an old one, repeated
    assert outgoing.stored == 3


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (1, b"x", "missing, or was sent twice"),
        (0, b"", "missing, or was sent twice"),
        (0, b"x" * 6, "more bytes"),
    ],
)
def test_bytes_that_were_not_asked_for_are_refused(offset: int, data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Incoming(contents([5])).receive_untrusted(offset, data)


def test_a_starter_that_does_not_wait_is_refused() -> None:
    incoming = Incoming(contents([2 * WINDOW_BYTES]))
    incoming.receive_untrusted(0, bytes(WINDOW_BYTES))
    with pytest.raises(ProtocolError, match="more bytes"):
        incoming.receive_untrusted(WINDOW_BYTES, b"x")
