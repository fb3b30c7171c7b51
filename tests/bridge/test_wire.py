"""Messages as frames: what is made comes back, and nothing else is taken."""

import struct
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pmesh.bridge import wire
from pmesh.bridge.wire import BlockGradientPayload, Message, decode_untrusted, encode, frame_length
from pmesh.errors import ProtocolError
from tests.worlds.faults import Faults

FIELDS = {
    "I": st.integers(0, 2**32 - 1),
    "Q": st.integers(0, 2**64 - 1),
    "B": st.integers(0, 255),
    "f": st.floats(width=32),
    "s": st.text(max_size=wire.MAX_NAME // 4),
    "F": arrays.arrays(np.float32, st.integers(0, 9)),
    "S": st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
}


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(get_args(Message)))
    made: Message = kind(*(draw(FIELDS[field]) for field in kind.fields))
    return made


@given(messages())
def test_each_message_comes_back_from_its_frame(message: Message) -> None:
    frame = encode(message)
    assert frame_length(frame[:4], most=len(frame)) == len(frame) - 4
    back = decode_untrusted(frame[4:])
    assert back == message
    assert hash(back) == hash(message)


@given(messages(), st.data())
def test_a_frame_that_is_cut_off_or_longer_is_refused(
    message: Message, data: st.DataObject
) -> None:
    payload = encode(message)[4:]
    with pytest.raises(ProtocolError, match="too many"):
        decode_untrusted(payload + b"\0")
    if len(payload) > 1:
        with pytest.raises(ProtocolError):
            decode_untrusted(payload[: data.draw(st.integers(1, len(payload) - 1))])


@given(st.binary(min_size=1))
def test_any_bytes_are_a_message_or_refused(payload: bytes) -> None:
    try:
        message = decode_untrusted(payload)
    except ProtocolError:
        return
    assert encode(message)[4:] == payload


def test_a_block_s_gradient_is_these_bytes() -> None:
    message = BlockGradientPayload(1, 2, 3, 4, (2, 1), np.array([1, 2, 3], np.float32))
    payload = b"\x08" + struct.pack("<QIII", 1, 2, 3, 4) + struct.pack("<III", 2, 2, 1)
    payload += struct.pack("<Qfff", 3, 1, 2, 3)
    assert encode(message) == struct.pack(">I", len(payload)) + payload


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\x63", "sends a message with the unknown tag 99"),
        (b"\x02\0", "sends a JoinAccepted that is cut off: 4 bytes should follow, not 1"),
        (
            b"\x05" + struct.pack("<QQ", 0, 2**62) + b"\0" * 8,
            "sends a AveragedGradient with 4611686018427387904 values, and at most 2 fit",
        ),
        (
            b"\x06" + struct.pack("<I", 2**32 - 1),
            "sends a Heartbeat with 4294967295 bytes of text, and at most 1024 fit",
        ),
        (b"\x06\x01\0\0\0\xff", "sends a Heartbeat whose text is not UTF-8"),
        (
            b"\x09" + struct.pack("<QII", 0, 0, 5000),
            "sends a AveragedBlockGradient with 5000 components, and at most 4096 fit",
        ),
    ],
)
def test_a_length_is_checked_before_it_is_used(payload: bytes, why: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_untrusted(payload)
    assert str(caught.value) == why


def test_a_frame_that_is_too_large_or_empty_is_refused_by_its_length() -> None:
    assert frame_length(struct.pack(">I", 134_000_000), most=256 << 20) == 134_000_000
    with pytest.raises(ProtocolError, match="a frame of 1195725856 bytes, and at most 65536 are"):
        frame_length(b"GET ", most=wire.JOIN_BYTES)
    with pytest.raises(ProtocolError, match="an empty frame"):
        frame_length(b"\0\0\0\0", most=1)


def test_a_frame_that_no_length_can_say_is_not_sent(faults: Faults) -> None:
    faults.limit(wire, "MOST_FRAME_BYTES", 20)
    with pytest.raises(ProtocolError, match="at most 20 bytes, not 21"):
        encode(wire.AveragedGradient(0, np.zeros(0, np.float32), 0.0))
