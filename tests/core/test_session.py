import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmesh.core.messages import Call
from pmesh.core.session import (
    SESSION_VERSION,
    AskStatus,
    Connect,
    Joined,
    Leave,
    Refused,
    Reply,
    Request,
    StartOp,
    StopAgent,
    Stopping,
    WantArena,
    decode_reply_untrusted,
    decode_request_untrusted,
    encode,
)
from pmesh.core.views import Verdict
from pmesh.errors import ProtocolError
from pmesh.ids import JobName, OpNumber
from tests.core.strategies import garbled, values_of

REQUESTS: tuple[type[msgspec.Struct], ...] = typing.get_args(Request)
REPLIES: tuple[type[msgspec.Struct], ...] = typing.get_args(Reply)
ENCODED = st.sampled_from(REQUESTS + REPLIES).flatmap(values_of).map(encode)
HOSTILE = st.binary(max_size=200) | ENCODED | garbled(ENCODED)


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_request_comes_back_from_its_bytes(kind: type[Request]) -> None:
    @settings(max_examples=25)  # 17 kinds
    @given(values_of(kind))
    def comes_back(request: Request) -> None:
        assert decode_request_untrusted(encode(request)) == request

    comes_back()


@pytest.mark.parametrize("kind", REPLIES)
def test_every_reply_comes_back_from_its_bytes(kind: type[Reply]) -> None:
    @settings(max_examples=25)  # 17 kinds
    @given(values_of(kind))
    def comes_back(reply: Reply) -> None:
        assert decode_reply_untrusted(encode(reply)) == reply

    comes_back()


@given(HOSTILE)
def test_whatever_a_program_sends_is_a_request_or_a_protocol_error(data: bytes) -> None:
    try:
        request = decode_request_untrusted(data)
    except ProtocolError as e:
        assert str(e).startswith("not a session request: ")  # noqa: PT017 - both ends are allowed
    else:
        assert isinstance(request, REQUESTS)


@given(HOSTILE)
def test_whatever_an_agent_sends_is_a_reply_or_a_protocol_error(data: bytes) -> None:
    try:
        reply = decode_reply_untrusted(data)
    except ProtocolError as e:
        assert str(e).startswith("not a session reply: ")  # noqa: PT017 - both ends are allowed
    else:
        assert isinstance(reply, REPLIES)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x81\xa4type\xa4nope", id="an unknown tag"),
        pytest.param(b"\x81\xa4type\xa2\xff\xff", id="a tag that is not UTF-8"),
        pytest.param(
            b"\x82\xa4type\xa5leave\xa1x" + b"\x91" * 100_000,
            id="a request with a field to skip that is nested deeper than any stack",
        ),
        pytest.param(
            b"\x83\xa4type\xa8stopping\xa3pid\x01\xa1x" + b"\x91" * 100_000,
            id="a reply with such a field",
        ),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="a map of 2^32 entries"),
        pytest.param(encode(Leave()) + b"\x00", id="bytes left over"),
    ],
)
def test_garbage_of_every_kind_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_request_untrusted(data)
    with pytest.raises(ProtocolError):
        decode_reply_untrusted(data)


def connect(
    job: str = "digits", wait_for: int = 1, timeout_s: float = 1.0, program: str = ""
) -> Connect:
    return Connect(SESSION_VERSION, JobName(job), wait_for, timeout_s, program)


def start_op(timeout_s: float = 1.0, count: int = 1) -> StartOp:
    call = Call("all_reduce", "float32", (count,), "sum")
    return StartOp(OpNumber(0), call, "float32", count, 0, timeout_s)


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(connect(job=""), id="a job without a name"),
        pytest.param(connect(job="x" * 65), id="a job's name of 65 characters"),
        pytest.param(connect(wait_for=0), id="waiting for nobody"),
        pytest.param(connect(wait_for=1025), id="waiting for 1025"),
        pytest.param(connect(timeout_s=0.0), id="no time to connect"),
        pytest.param(connect(timeout_s=float("nan")), id="a time that is no number"),
        pytest.param(connect(program="x" * 257), id="a program's name of 257 characters"),
        pytest.param(WantArena(-1), id="an arena of -1 bytes"),
        pytest.param(start_op(timeout_s=-1.0), id="no time for the op"),
        pytest.param(start_op(count=-1), id="-1 values"),
    ],
)
def test_values_beyond_their_limits_are_refused(request_: Request) -> None:
    with pytest.raises(ProtocolError):
        decode_request_untrusted(encode(request_))


def test_a_dtype_that_has_no_wire_form_is_refused() -> None:
    data = encode(start_op()).replace(b"\xaawire_dtype\xa7float32", b"\xaawire_dtype\xa7float16")
    with pytest.raises(ProtocolError, match="float16"):
        decode_request_untrusted(data)


def test_a_reply_is_no_request_and_the_other_way_round() -> None:
    with pytest.raises(ProtocolError):
        decode_request_untrusted(encode(Stopping(pid=1)))
    with pytest.raises(ProtocolError):
        decode_reply_untrusted(encode(StopAgent()))


def test_no_two_messages_share_a_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in REQUESTS + REPLIES]
    assert len(set(tags)) == len(tags)


def test_messages_carry_the_names_of_their_fields() -> None:
    assert msgspec.msgpack.decode(encode(AskStatus())) == {"type": "ask_status"}
    assert msgspec.msgpack.decode(encode(Refused(Verdict("RankLost", "why")))) == {
        "type": "refused",
        "verdict": ["RankLost", "why", []],
    }


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(ProtocolError, match="missing required field `world`"):
        decode_reply_untrusted(msgspec.msgpack.encode({"type": Joined.__struct_config__.tag}))
