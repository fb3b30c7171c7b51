import typing
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.values import View
from pmesh.core.wire import link
from pmesh.core.wire.calls import Call, Envelope
from pmesh.core.wire.channels import CHANNEL_BYTES, MAX_MESSAGE_BYTES, Channels, Message, encode
from pmesh.core.wire.framing import encode_hello
from pmesh.core.wire.lanes import LaneMessage, OfferLane
from pmesh.core.wire.link import Address, Hello, KnownPeers, LinkMessage
from pmesh.core.wire.probes import PathMessage
from pmesh.core.wire.relays import Relay
from pmesh.core.wire.views import (
    VIEWS,
    AskToJoin,
    Commit,
    Flushed,
    Heartbeat,
    KnownPrimary,
    Refuse,
    TellView,
    ViewMessage,
)
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, JobName, Member, NodeId, TrainerId
from pmesh.launches.wire.messages import AnyLaunchMessage
from pmesh.members.wire import MembersMessage
from pmesh.p2p.wire import AnnounceMessage, MessageAddress, P2PMessage
from pmesh.store.wire import StorePart
from pmesh.traces.wire import TracesMessage
from simulation.wire import AnyPathMessage, decode_untrusted, encode_unbounded
from tests.worlds.builders import (
    ANNA,
    BERT,
    DIGITS,
    make_epoch,
    make_heartbeat,
    make_roster,
    make_seat,
    make_view,
    unsigned,
)
from tests.worlds.examples import examples
from tests.worlds.strategies import garbled, values_of

KINDS: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyPathMessage)
MESSAGES = st.sampled_from(KINDS).flatmap(values_of)
"""Each kind as often as any other."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_message_comes_back_from_its_bytes(kind: type[AnyPathMessage]) -> None:
    @examples(25)  # 15 kinds
    @given(values_of(kind))
    def comes_back(message: AnyPathMessage) -> None:
        decoded = decode_untrusted(encode(message))
        assert decoded == message
        assert type(decoded) is type(message)

    comes_back()


@given(st.binary(max_size=200) | garbled(MESSAGES.map(encode)))
def test_whatever_a_peer_sends_is_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        message = decode_untrusted(data)
    except ProtocolError as e:
        assert str(e).startswith(("not a control message: ", "a control message on no channel: "))  # noqa: PT017 - both ends are allowed
    else:
        assert isinstance(message, KINDS)


REFUSE = encode(Refuse(make_epoch(2), make_epoch(1)))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x02", id="a channel and nothing on it"),
        pytest.param(b"\xff" + REFUSE[1:], id="a channel that nobody has"),
        pytest.param(b"\x03" + REFUSE[1:], id="a message of another channel"),
        pytest.param(b"\x02\x93\x63\x00\x00", id="an unknown tag"),
        pytest.param(b"\x02" + b"\x91" * 100_000, id="arrays all the way down"),
        pytest.param(
            b"\x02\x94" + REFUSE[2:] + b"\x91" * 100_000,
            id="a field to skip that is nested deeper than any stack",
        ),
        pytest.param(b"\x01\x92\x16\xdd\xff\xff\xff\xff", id="an array of 2^32 values"),
        pytest.param(
            b"\x01\x92\x16\x91\x94\x01\x01\x92\xc4\x00\x01\xa1\xff", id="a name that is not UTF-8"
        ),
        pytest.param(REFUSE + b"\x00", id="bytes left over"),
        pytest.param(REFUSE[:-1], id="a byte too few"),
    ],
)
def test_garbage_of_every_kind_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_untrusted(data)


NAMELESS = unsigned("")


def offer(lane: bytes = bytes(16), key: bytes = bytes(32), job: JobName = DIGITS) -> OfferLane:
    return OfferLane(lane, job, make_epoch(1), 1, TrainerId(0), TrainerId(1), key, bytes(32))


def knows(hello: Hello) -> KnownPeers:
    return KnownPeers((hello,))


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(knows(Hello(1, ANNA, unsigned("x" * 65))), id="a name of 65 characters"),
        pytest.param(
            knows(Hello(1, ANNA, NAMELESS, (Address("h" * 256, 1),))),
            id="a host name too long",
        ),
        pytest.param(knows(Hello(1, ANNA, NAMELESS, (Address("host", 0),))), id="port 0"),
        pytest.param(knows(Hello(1, ANNA, NAMELESS, (Address("host", 65536),))), id="port 65536"),
        pytest.param(
            knows(Hello(1, ANNA, NAMELESS, (Address("host", 1),) * 65)), id="65 addresses"
        ),
        pytest.param(offer(lane=bytes(15)), id="a lane id of 15 bytes"),
        pytest.param(offer(key=bytes(33)), id="a key of 33 bytes"),
        pytest.param(offer(job=JobName("x" * 65)), id="a job's name of 65 characters"),
    ],
)
def test_values_beyond_their_limits_are_refused(message: AnyPathMessage) -> None:
    with pytest.raises(ProtocolError):
        decode_untrusted(encode(message))


def test_a_message_beyond_its_bound_is_neither_made_nor_taken() -> None:
    told = KnownPeers((Hello(1, ANNA, unsigned("mac-a"), (Address("h" * 255, 1),) * 31),) * 2)
    assert decode_untrusted(encode(told)) == told
    large = KnownPeers(told.peers * 2)
    with pytest.raises(ValueError, match=r"a KnownPeers of 3.* bytes, 16400 are allowed"):
        encode(large)
    with pytest.raises(ProtocolError, match=r"a KnownPeers of 3.* bytes, 16400 are allowed"):
        decode_untrusted(encode_unbounded(large))


def payload(message: Message) -> bytes:
    return encode(message)[CHANNEL_BYTES:]


def test_the_bytes_of_version_twenty_one_do_not_change_unnoticed() -> None:
    nobody = Member(NodeId(b"n"), Incarnation(7))
    assert link.PROTOCOL_VERSION == 21
    assert encode_hello(Hello(1, nobody, unsigned("mac"), (Address("h", 9),))).hex() == (
        f"98 01 01 92 c4 01 6e 07 92 a3 6d6163 c4 40 {'00' * 64} 91 92 a1 68 09 90 00 c0".replace(
            " ", ""
        )
    )
    assert msgspec.msgpack.decode(payload(AskToJoin(make_epoch(1), whole=True))) == [
        5,
        list(make_epoch(1)),
        True,
    ]
    view = View(make_epoch(1), ())
    known = KnownPrimary(DIGITS, make_epoch(1), make_epoch(3))
    flushed = Flushed(make_epoch(4), unsigned("mac"), view, (), primaries=(known,))
    assert msgspec.msgpack.decode(payload(flushed)) == [
        7,
        list(make_epoch(4)),
        ["mac", bytes(64)],
        [list(make_epoch(1)), [], []],
        [],
        [],
        [["digits", list(make_epoch(1)), list(make_epoch(3)), False]],
    ]
    said = AnnounceMessage(
        MessageAddress(DIGITS, make_epoch(1), TrainerId(0), TrainerId(1), 3),
        *(Envelope(5, "int8", (2,), 2), 1, -1, b"xy"),
    )
    assert msgspec.msgpack.decode(payload(said))[2:] == [[5, "int8", [2], 2], 1, -1, b"xy"]
    assert msgspec.msgpack.decode(payload(Commit(view, ((0,),)))) == [
        11,
        [list(make_epoch(1)), [], []],
        [[0]],
    ]


def test_the_channels_and_tags_are_those_of_version_fifteen() -> None:
    assert tags_of(PathMessage) == {0: {28: "Ping", 29: "Pong", 30: "AskProbe", 31: "Probe"}}
    assert tags_of(LinkMessage) == {1: {12: "Leaving", 22: "KnownPeers"}}
    assert tags_of(ViewMessage) == {
        2: {
            2: "Heartbeat",
            3: "AskView",
            4: "TellView",
            5: "AskToJoin",
            6: "Propose",
            7: "Flushed",
            8: "Refuse",
            9: "Veto",
            10: "Superseded",
            11: "Commit",
        }
    }
    assert tags_of(LaneMessage) == {
        3: {20: "OfferLane", 21: "AskResult", 27: "RestLane", 35: "Splice"}
    }
    assert tags_of(P2PMessage) == {
        4: {
            23: "AnnounceMessage",
            24: "RequestMessage",
            25: "MessageDelivered",
            26: "MessageWithdrawn",
        }
    }
    assert tags_of(StorePart | Relay | MembersMessage | TracesMessage) == {
        5: {1: "StorePart"},
        6: {1: "Relay"},
        8: {60: "TellRemovals", 61: "TellRotation"},
        9: {62: "AskOps", 63: "TellOps"},
    }
    assert tags_of(AnyLaunchMessage) == {
        7: {
            40: "PrepareLaunch",
            41: "LaunchPrepared",
            42: "BeginRanks",
            43: "SignalRanks",
            44: "RankEnded",
            45: "LaunchPart",
            49: "StopLaunch",
            50: "AskFiles",
            53: "RankFails",
            54: "GiveUpRank",
            55: "AskNewFiles",
            56: "NewFiles",
            57: "AskNewContents",
        }
    }


def tags_of(union: object) -> dict[int, dict[object, str]]:
    """The names by channel and tag."""
    tags = defaultdict[int, dict[object, str]](dict)
    for kind in typing.get_args(union):
        tags[kind.channel][kind.__struct_config__.tag] = kind.__name__
    return tags


def test_a_later_version_may_append_fields() -> None:
    longer = [*msgspec.msgpack.decode(payload(Refuse(make_epoch(2), make_epoch(1)))), "new"]
    decoded = decode_untrusted(encode_unbounded(longer, Refuse.channel))
    assert decoded == Refuse(make_epoch(2), make_epoch(1))


def test_sixty_four_members_with_jobs_need_an_eighth_of_what_is_allowed() -> None:
    members = [Member(NodeId(bytes([i]) * 32), Incarnation(2**62 + i)) for i in range(64)]
    view = View(
        make_epoch(2**40),
        tuple(map(make_seat, members)),
        tuple(make_roster(*members, job=JobName(f"job {i}")) for i in range(2)),
    )
    assert len(encode(TellView(view))) < MAX_MESSAGE_BYTES // 8


def test_an_idle_heartbeat_of_eight_members_fits_one_packet() -> None:
    others = [Member(NodeId(bytes([i]) * 32), Incarnation(2**62 + i)) for i in range(8)]
    assert len(encode(make_heartbeat(make_view(3, *others), *others))) < 400


def test_a_heartbeat_says_nothing_of_jobs_unless_told() -> None:
    beat = make_heartbeat(make_view(3, ANNA, BERT), BERT)
    assert isinstance(beat, Heartbeat)
    assert (beat.waiting, beat.view_requests, beat.progress, beat.in_force) == ((), (), (), ())


def test_known_peers_are_told_as_they_introduced_themselves() -> None:
    told = KnownPeers((Hello(1, ANNA, unsigned("mac-a"), (Address("10.0.0.1", 24160),)),))
    assert decode_untrusted(encode(told)) == told


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (Address("10.0.0.1", 24160), "10.0.0.1:24160"),
        (Address("mac-mini.local", 1), "mac-mini.local:1"),
        (Address("fe80::1%en0", 24160), "[fe80::1%en0]:24160"),
    ],
)
def test_an_address_reads_as_a_person_would_type_it(address: Address, text: str) -> None:
    assert str(address) == text


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call("all_reduce", "float32", (2, 3), "mean"), "all_reduce(float32, 2x3, mean)"),
        (Call("broadcast", "bool", (), root=0), "broadcast(bool, scalar, root=0)"),
        (
            Call("all_reduce", "float32", (5,), "sum", compression="int8"),
            "all_reduce(float32, 5, sum, int8)",
        ),
    ],
)
def test_a_call_reads_as_the_user_wrote_it(call: Call, text: str) -> None:
    assert str(call) == text


def test_two_parts_of_an_agent_can_not_have_one_channel() -> None:
    channels = Channels()
    channels.register(VIEWS, lambda _, __: None)
    with pytest.raises(ValueError, match="two parts of the agent have channel 2"):
        channels.register(VIEWS, lambda _, __: None)


def test_a_message_reaches_the_receiver_of_its_channel_and_no_other() -> None:
    heard = list[tuple[Member, object]]()
    channels = Channels()
    channels.register(VIEWS, lambda member, message: heard.append((member, message)))
    refuse = Refuse(make_epoch(2), make_epoch(1))
    channels.receive_untrusted(ANNA, encode(refuse))
    assert heard == [(ANNA, refuse)]
    for data in (b"", encode(knows(Hello(1, ANNA, unsigned("mac-a"))))):
        with pytest.raises(ProtocolError, match="on no channel"):
            channels.receive_untrusted(ANNA, data)
