import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.framing import PREFIX_BYTES, FrameReader, frame
from pmesh.errors import ProtocolError

LIMIT = 1000


def take_all(reader: FrameReader) -> list[bytes]:
    return list(iter(reader.next_message_untrusted, None))


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(0, 500)))
def test_messages_come_out_whole_however_the_stream_was_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(map(frame, messages))
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader, taken = FrameReader(max_bytes=LIMIT), list[bytes]()
    for start, end in itertools.pairwise(places):
        reader.receive_data(stream[start:end])
        taken += take_all(reader)
    assert taken == messages
    assert reader.buffered == 0


@given(st.binary(max_size=300))
def test_whatever_arrives_gives_messages_within_the_limit_or_a_protocol_error(
    data: bytes,
) -> None:
    reader = FrameReader(max_bytes=20)
    reader.receive_data(data)
    with contextlib.suppress(ProtocolError):
        assert all(len(message) <= 20 for message in take_all(reader))


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview])
def test_data_may_come_in_any_kind_of_buffer(
    container: type[bytes | bytearray | memoryview],
) -> None:
    reader = FrameReader(max_bytes=LIMIT)
    reader.receive_data(container(frame(b"hello")))
    assert take_all(reader) == [b"hello"]


def test_a_message_is_held_back_until_its_last_byte() -> None:
    reader, stream = FrameReader(max_bytes=LIMIT), frame(b"hello")
    for byte in stream[:-1]:
        reader.receive_data(bytes([byte]))
        assert reader.next_message_untrusted() is None
    assert reader.buffered == len(stream) - 1
    reader.receive_data(stream[-1:])
    assert reader.next_message_untrusted() == b"hello"


def test_an_empty_message_is_a_message() -> None:
    reader = FrameReader(max_bytes=LIMIT)
    reader.receive_data(frame(b""))
    assert reader.next_message_untrusted() == b""
    assert reader.next_message_untrusted() is None


def test_a_message_as_long_as_the_limit_is_allowed() -> None:
    reader = FrameReader(max_bytes=LIMIT)
    reader.receive_data(frame(bytes(LIMIT)))
    assert reader.next_message_untrusted() == bytes(LIMIT)


def test_a_longer_one_is_refused_when_only_its_prefix_is_there() -> None:
    reader = FrameReader(max_bytes=LIMIT)
    reader.receive_data(frame(bytes(LIMIT + 1))[:PREFIX_BYTES])
    with pytest.raises(ProtocolError, match="claims 1001 bytes, 1000 are allowed"):
        reader.next_message_untrusted()


def test_a_claim_of_four_gibibytes_costs_four_bytes() -> None:
    reader = FrameReader(max_bytes=LIMIT)
    reader.receive_data(b"\xff" * PREFIX_BYTES)
    with pytest.raises(ProtocolError, match="claims 4294967295 bytes"):
        reader.next_message_untrusted()
    assert reader.buffered == PREFIX_BYTES
