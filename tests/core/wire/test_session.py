import math
import typing
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from pmesh.core.values import Comparison, Terms, Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.control import AskEvents, AskStatus, StopAgent, Stopping
from pmesh.core.wire.session import MAX_REQUEST_BYTES, SESSION_VERSION, Refused, WantArena, encode
from pmesh.core.wire.trainer import (
    ComparesStates,
    Compresses,
    Connect,
    GroupOf,
    Joined,
    Leave,
    ReportsNumbers,
    StartOp,
)
from pmesh.errors import ProtocolError
from pmesh.ids import JobName, OpNumber, TrainerId
from pmesh.p2p.wire import ReceiveMessage
from simulation.wire import AnyReply, AnyRequest, decode_reply_untrusted, decode_request_untrusted
from tests.worlds.examples import examples
from tests.worlds.strategies import garbled, values_of

REQUESTS: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyRequest)
REPLIES: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyReply)
ENCODED = st.sampled_from(REQUESTS + REPLIES).flatmap(values_of).map(encode)
HOSTILE = st.binary(max_size=200) | ENCODED | garbled(ENCODED)


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_request_comes_back_from_its_bytes(kind: type[AnyRequest]) -> None:
    @examples(25)  # 17 kinds
    @given(values_of(kind))
    def comes_back(request: AnyRequest) -> None:
        assert decode_request_untrusted(encode(request)) == request

    comes_back()


@pytest.mark.parametrize("kind", REPLIES)
def test_every_reply_comes_back_from_its_bytes(kind: type[AnyReply]) -> None:
    @examples(25)  # 17 kinds
    @given(values_of(kind))
    def comes_back(reply: AnyReply) -> None:
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


def compares(digest: str = "0" * 32, others: tuple[TrainerId, ...] = ()) -> ComparesStates:
    return ComparesStates(Comparison(OpNumber(1), 1, digest, 9, len(others), others))


def connect(
    job: str = "digits", wait_for: int = 1, timeout_s: float = 1.0, program: str = ""
) -> Connect:
    return Connect(SESSION_VERSION, JobName(job), wait_for, timeout_s, program)


def start_op(timeout_s: float = 1.0, count: int = 1, **of_the_call: object) -> StartOp:
    call = replace(Call("all_reduce", "float32", (1,), "sum"), **of_the_call)
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
        pytest.param(connect(job="a\nb"), id="a job's name of two lines"),
        pytest.param(connect(job="\x1b[2J"), id="a job's name that clears the screen"),
        pytest.param(connect(job="a\u202eb"), id="a job's name that turns the direction"),
        pytest.param(connect(program="a\x9bb"), id="a program's name that steers a terminal"),
        pytest.param(Compresses("int8\r"), id="a compression that begins a line anew"),
        pytest.param(ReportsNumbers({"x" * 25: 1.0}), id="a report's name of 25 characters"),
        pytest.param(ReportsNumbers({"loss\n": 1.0}), id="a report's name of two lines"),
        pytest.param(ReportsNumbers(dict.fromkeys("abcdefghi", 1.0)), id="nine reports"),
        pytest.param(compares(digest="\x1b[2J"), id="a hash that clears the screen"),
        pytest.param(compares(others=(TrainerId(1),) * 4), id="four ranks that are named"),
        pytest.param(AskEvents(2**63 - 1), id="events after the largest number that there is"),
        pytest.param(WantArena(2**63), id="an arena of 8 EiB"),
        pytest.param(replace(connect(), straggler_after_s=math.nan), id="patience of no number"),
        pytest.param(replace(connect(), terms=Terms(2**62)), id="2^62 ranks at least"),
        pytest.param(replace(connect(), terms=Terms(0)), id="no ranks at least"),
        pytest.param(replace(start_op(), parts=(0,) * 1025), id="parts for 1025 ranks"),
        pytest.param(start_op(shape=(1,) * 65), id="65 dimensions"),
        pytest.param(start_op(shape=(-1,)), id="-1 rows"),
        pytest.param(start_op(root=1024), id="a root beyond all ranks"),
        pytest.param(start_op(receivers=(-1,)), id="a receiver before all ranks"),
        pytest.param(start_op(tree="\n"), id="a digest of a line's end"),
        pytest.param(WantArena(-1), id="an arena of -1 bytes"),
        pytest.param(start_op(timeout_s=-1.0), id="no time for the op"),
        pytest.param(start_op(count=-1), id="-1 values"),
    ],
)
def test_values_beyond_their_limits_are_refused(request_: AnyRequest) -> None:
    with pytest.raises(ProtocolError):
        decode_request_untrusted(encode(request_))


@pytest.mark.parametrize("request_", [connect(timeout_s=math.inf), start_op(timeout_s=math.inf)])
def test_a_program_may_wait_for_ever(request_: AnyRequest) -> None:
    assert decode_request_untrusted(encode(request_)) == request_


@pytest.mark.parametrize("kind", REQUESTS)
def test_nothing_in_a_request_is_without_bounds(kind: type[AnyRequest]) -> None:
    assert list(unbounded(inspect.type_info(kind), kind.__name__)) == []


def unbounded(  # noqa: C901 - one arm for each type
    info: inspect.Type, where: str
) -> Iterator[str]:
    """The places in a type whose values may be of any size."""
    match info:
        case inspect.StructType(fields=fields) | inspect.NamedTupleType(fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{where}.{field.name}")
        case inspect.UnionType(types=types):
            for type_ in types:
                yield from unbounded(type_, where)
        case inspect.VarTupleType(item_type=item, max_length=longest):
            yield from [where] * (longest is None)
            yield from unbounded(item, f"{where}[]")
        case inspect.DictType(key_type=key, value_type=inspect.FloatType(), max_length=longest):
            yield from [where] * (longest is None)
            yield from unbounded(key, f"{where}[]")  # the numbers are shown, whatever they are
        case inspect.IntType(ge=least, le=most):
            yield from [where] * (least is None or most is None)
        case inspect.FloatType(gt=above, ge=least):  # a NaN is greater than nothing
            yield from [where] * (above is None and least is None)
        case inspect.StrType(max_length=longest, pattern=pattern):
            yield from [where] * (longest is None or pattern is None)
        case inspect.BytesType(max_length=longest):
            yield from [where] * (longest is None)
        case inspect.LiteralType() | inspect.BoolType() | inspect.NoneType():
            pass
        case _:
            yield where


def test_the_largest_requests_fit_into_what_an_agent_reads() -> None:
    ranks, word = tuple(range(1024)), "\U0001f40d" * 64
    call = Call(word, word, (2**48,) * 64, word, 1023, word, word, ranks, word)
    parts = (2**48,) * 1024
    largest = replace(start_op(), call=call, parts=parts, parts_in=parts)
    some = tuple(TrainerId(2**32 - rank - 1) for rank in ranks)
    group = replace(connect(), group_of=GroupOf(JobName(word), some, some[0]))
    for request in (largest, group, ReceiveMessage(2**62, some, 2**62, 1.0)):
        assert decode_request_untrusted(encode(request)) == request
        assert len(encode(request)) < MAX_REQUEST_BYTES


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
