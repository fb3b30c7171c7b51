""" """

import contextlib
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.wire.channels import encode
from pmesh.core.wire.framing import (
    FIRST_BYTES,
    GUEST_MAGIC,
    MAX_CLIENT_HELLO_BYTES,
    PREFIX_BYTES,
    FirstBytes,
    FrameReader,
    OtherProtocol,
    encode_hello,
    frame,
    read_hello_untrusted,
    recognize,
)
from pmesh.core.wire.link import PROTOCOL_VERSION, Address, Hello, Leaving
from pmesh.core.wire.preamble import Preamble, encode_preamble
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, Member, NodeId
from tests.worlds.builders import unsigned

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


PREAMBLE = encode_preamble(Preamble(bytes(range(16)), 1))
# What OpenSSL 3.0 sends first, as Python makes it; 225 bytes follow in all.
CLIENT_HELLO = bytes.fromhex("16030100dc010000d80303")


def client_hello(claims: int) -> bytes:
    return b"\x16\x03\x01\x40\x00\x01" + claims.to_bytes(3, "big")


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (b"", FirstBytes.TOO_FEW),
        (CLIENT_HELLO, FirstBytes.LINK),
        (client_hello(MAX_CLIENT_HELLO_BYTES), FirstBytes.LINK),
        (client_hello(MAX_CLIENT_HELLO_BYTES + 1), FirstBytes.GARBAGE),
        (client_hello(0xFFFFFF), FirstBytes.GARBAGE),
        (PREAMBLE, FirstBytes.LANE),
        (PREAMBLE[:-1], FirstBytes.TOO_FEW),
        (GUEST_MAGIC, FirstBytes.GUEST),
        (GUEST_MAGIC + b"more", FirstBytes.GUEST),
        (GUEST_MAGIC[:-1] + b"\x02", FirstBytes.GARBAGE),  # of a later version
        (b"PMLN\x01" + bytes(20), FirstBytes.GARBAGE),
        (b"G", FirstBytes.GARBAGE),
        (b"\xff\xff\xff\xff", FirstBytes.GARBAGE),  # a frame that claims 4 GiB
        (b"\x16\x02", FirstBytes.GARBAGE),
        (b"\x16\x03\x01\x00\x05\x02", FirstBytes.GARBAGE),  # a ServerHello
        (b"\x15\x03\x01\x00\x02\x02\x28", FirstBytes.GARBAGE),  # an alert
    ],
)
def test_first_bytes_say_what_a_connection_is(first: bytes, kind: FirstBytes) -> None:
    assert recognize(first) is kind


@pytest.mark.parametrize("whole", [PREAMBLE, CLIENT_HELLO, GUEST_MAGIC])
def test_the_beginning_of_a_good_connection_is_never_garbage(whole: bytes) -> None:
    for length in range(len(whole)):
        assert recognize(whole[:length]) is not FirstBytes.GARBAGE


@given(
    st.one_of(
        st.binary(max_size=FIRST_BYTES),
        st.binary(max_size=15).map(lambda rest: PREAMBLE[:6] + rest),
        st.binary(max_size=15).map(lambda rest: CLIENT_HELLO[:6] + rest),
        st.binary(max_size=15).map(lambda rest: GUEST_MAGIC[:4] + rest),
    )
)
def test_a_decision_is_never_taken_back(first: bytes) -> None:
    decided = FirstBytes.TOO_FEW
    for length in range(len(first) + 1):
        kind = recognize(first[:length])
        assert decided in (FirstBytes.TOO_FEW, kind)
        decided = kind


@given(st.binary(min_size=FIRST_BYTES, max_size=FIRST_BYTES))
def test_all_is_decided_when_all_is_read(first: bytes) -> None:
    assert recognize(first) is not FirstBytes.TOO_FEW


ADA = NodeId(b"a" * 32)
ADDRESS = Address("10.0.0.1", 24160)
HELLO = Hello(PROTOCOL_VERSION, Member(ADA, Incarnation(7)), unsigned("ada"), (ADDRESS,))


def test_a_hello_of_our_version_is_read_whole() -> None:
    assert read_hello_untrusted(encode_hello(HELLO), proven=ADA) == HELLO


@given(
    st.integers(0, 2**63 - 1).filter(lambda version: version != PROTOCOL_VERSION),
    st.lists(st.one_of(st.none(), st.integers(0, 9), st.text(), st.lists(st.binary()))),
)
def test_another_version_is_recognized_whatever_its_hello_looks_like(
    version: int, rest: list[object]
) -> None:
    data = msgspec.msgpack.encode([1, version, *rest])
    assert read_hello_untrusted(data, proven=ADA) == OtherProtocol(version)


def test_a_hello_in_the_name_of_another_node_is_refused() -> None:
    with pytest.raises(ProtocolError, match="another node"):
        read_hello_untrusted(encode_hello(HELLO), proven=NodeId(b"b" * 32))


@pytest.mark.parametrize(
    "data", [b"", b"\x91\x01", encode(Leaving()), msgspec.msgpack.encode([1, PROTOCOL_VERSION])]
)
def test_anything_but_a_hello_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_hello_untrusted(data, proven=ADA)


@given(st.one_of(st.binary(), st.binary().map(lambda rest: encode_hello(HELLO)[:2] + rest)))
def test_garbage_raises_protocol_error_only(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        read_hello_untrusted(data, proven=ADA)


def test_a_hello_larger_than_any_peer_takes_is_not_made() -> None:
    addresses = (Address("h" * 255, 1),) * 64
    with pytest.raises(ValueError, match=r"a Hello of 16.* bytes, 16384 are allowed"):
        encode_hello(msgspec.structs.replace(HELLO, addresses=addresses))
