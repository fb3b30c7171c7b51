import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.wire.calls import Call
from pmesh.core.wire.preamble import (
    PREAMBLE_BYTES,
    Preamble,
    decode_preamble_untrusted,
    encode_preamble,
)
from pmesh.core.wire.records import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    OVERHEAD_BYTES,
    Opener,
    RecordHeader,
    Sealer,
    fingerprint,
    read_header_untrusted,
    subflow_key,
)
from pmesh.errors import ProtocolError

KEY = bytes(range(32))
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def header_of(body: bytes, *, op: int = 7) -> RecordHeader:
    return RecordHeader(len(body), 3, op, 0, 99, -1)


def sealed(sealer: Sealer, body: bytes, *, op: int = 7) -> bytes:
    buffer = memoryview(bytearray(len(body) + OVERHEAD_BYTES))
    assert sealer.seal(header_of(body, op=op), body, buffer) == len(buffer)
    return bytes(buffer)


def opened(opener: Opener, record: bytes) -> bytes:
    into = bytearray(len(record) - OVERHEAD_BYTES)
    opener.open_untrusted(memoryview(record), into)
    return bytes(into)


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_bodies_come_out_as_they_went_in_and_in_order(bodies: list[bytes]) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    assert [opened(opener, sealed(sealer, body)) for body in bodies] == bodies


@given(st.builds(RecordHeader, st.integers(0, MAX_BODY_BYTES), U64, U64, U32, U64, st.just(-1)))
def test_a_header_is_read_as_it_was_written(header: RecordHeader) -> None:
    buffer = memoryview(bytearray(header.body_bytes + OVERHEAD_BYTES))
    Sealer(KEY).seal(header, bytes(header.body_bytes), buffer)
    assert read_header_untrusted(buffer) == header


def test_the_layout_is_the_documented_one() -> None:
    assert (HEADER_BYTES, OVERHEAD_BYTES, PREAMBLE_BYTES) == (40, 72, 25)
    buffer = memoryview(bytearray(OVERHEAD_BYTES))
    Sealer(KEY).seal(RecordHeader(0, 1, 2, 3, 4, -1), b"", buffer)
    expected = (
        "00000000 0000000000000001 0000000000000002 00000003 0000000000000004 ffffffffffffffff"
    )
    assert buffer[:HEADER_BYTES] == bytes.fromhex(expected)


@given(st.binary(min_size=1, max_size=40), st.data())
def test_any_flipped_bit_is_refused(body: bytes, data: st.DataObject) -> None:
    record = bytearray(sealed(Sealer(KEY), body))
    bit = data.draw(st.integers(0, len(record) * 8 - 1))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        opened(Opener(KEY), bytes(record))


def test_an_empty_body_may_go_to_an_empty_place_that_is_read_only() -> None:
    record = memoryview(sealed(Sealer(KEY), b""))
    Opener(KEY).open_untrusted(record, memoryview(b""))


def test_a_repeated_a_lost_and_a_foreign_record_are_refused() -> None:
    sealer = Sealer(KEY)
    first, second = sealed(sealer, b"same"), sealed(sealer, b"same")
    assert first[HEADER_BYTES:] != second[HEADER_BYTES:]
    opener = Opener(KEY)
    opened(opener, first)
    for opener_, record in ((opener, first), (Opener(KEY), second), (Opener(bytes(32)), first)):
        with pytest.raises(ProtocolError):
            opened(opener_, record)


def test_the_bytes_of_a_record_do_not_change_unnoticed() -> None:
    sealer = Sealer(KEY)
    assert sealed(sealer, b"first")[HEADER_BYTES:].hex() == (
        "86f197ca9a4e0043de9e2603b915878666fe5e518c01a2765121ddb724f106568d6b915b34"
    )
    assert sealed(sealer, b"second")[HEADER_BYTES:].hex() == (
        "1e87f9f3dc7aec51c9e5f8a3f40cb366658615ae789331320b8267c3cef7fa49018ae740ad0e"
    )


def test_the_key_and_the_count_are_all_that_a_direction_remembers() -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    opened(opener, sealed(sealer, b"first"))
    other_sealer, other_opener = Sealer(bytes(32)), Opener(bytes(32))
    other_sealer.key, other_sealer.records = sealer.key, sealer.records
    other_opener.key, other_opener.records = opener.key, opener.records

    assert (len(sealer.key), sealer.records, opener.records) == (16, 1, 1)
    assert sealed(other_sealer, b"second") == (second := sealed(sealer, b"second"))
    assert opened(other_opener, second) == opened(opener, second) == b"second"


@given(st.lists(st.binary(max_size=40), min_size=2, max_size=6), st.data())
def test_records_in_another_order_are_refused_from_the_first_wrong_one_on(
    bodies: list[bytes], data: st.DataObject
) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    records = [sealed(sealer, body) for body in bodies]
    arriving = data.draw(st.lists(st.sampled_from(range(len(records))), min_size=1, max_size=8))
    for place, index in enumerate(arriving):
        if place == index:
            assert opened(opener, records[index]) == bodies[index]
        else:
            with pytest.raises(ProtocolError, match="fails authentication"):
                opened(opener, records[index])
            break


@given(st.binary(max_size=200), st.integers(0, 200))
def test_whatever_arrives_the_opener_raises_only_protocol_errors(data: bytes, size: int) -> None:
    with pytest.raises(ProtocolError):
        Opener(KEY).open_untrusted(memoryview(data), bytearray(size))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_header_or_a_protocol_error(data: bytes) -> None:
    try:
        header = read_header_untrusted(data)
    except ProtocolError:
        claims = int.from_bytes(data[:4], "big")
        assert len(data) < HEADER_BYTES or claims > MAX_BODY_BYTES
    else:
        assert 0 <= header.body_bytes <= MAX_BODY_BYTES


def test_a_claim_of_4_gib_is_refused_by_its_header() -> None:
    with pytest.raises(ProtocolError, match="claims 4294967295 bytes"):
        read_header_untrusted(b"\xff" * HEADER_BYTES)


@given(st.binary(max_size=30))
def test_any_bytes_are_a_preamble_or_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_preamble_untrusted(data)
    preamble = Preamble(data[:16].ljust(16, b"."), len(data) << 27)
    assert decode_preamble_untrusted(encode_preamble(preamble)) == preamble


def test_a_fingerprint_tells_calls_apart_and_is_the_same_everywhere() -> None:
    call = Call("all_reduce", "float32", (3, 4), "sum")
    others = [
        Call("broadcast", "float32", (3, 4), "sum"),
        Call("all_reduce", "float64", (3, 4), "sum"),
        Call("all_reduce", "float32", (4, 3), "sum"),
        Call("all_reduce", "float32", (3, 4), "mean"),
        Call("all_reduce", "float32", (3, 4), "sum", root=0),
        Call("all_reduce", "float32", (3, 4), "sum", compression="int8"),
    ]
    assert len({fingerprint(c) for c in [call, *others]}) == 7
    assert fingerprint(call) == 0x1DB398978F177CBA  # other releases must compute the same


def test_each_connection_of_a_lane_has_a_key_of_its_own() -> None:
    key = bytes(range(32))
    keys = {subflow_key(key, index) for index in range(4)}
    assert len(keys | {key}) == 5
    assert all(len(each) == len(key) for each in keys)
    assert subflow_key(key, 1) == subflow_key(key, 1)
