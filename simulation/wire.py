"""All messages at once, for what sends or reads any of them: tests, fuzzers, fake agents.

An agent needs no such list: each part registers its channel (`pmesh.core.wire.channels`), and each
session reads its own messages (`pmesh.core.wire.session`).
"""

from typing import Any, TypeAlias

import msgspec

from pmesh.charts.wire import AskCharts, ChartReply
from pmesh.core.wire.channels import Channel, Message
from pmesh.core.wire.control import ControlReply, ControlRequest
from pmesh.core.wire.lanes import LANES, LaneMessage
from pmesh.core.wire.link import LINK, LinkMessage
from pmesh.core.wire.probes import PATHS, PathMessage
from pmesh.core.wire.relays import RELAYS, Relay
from pmesh.core.wire.session import SessionDecoder
from pmesh.core.wire.trainer import TrainerReply, TrainerRequest
from pmesh.core.wire.views import VIEWS, AgreementMessage
from pmesh.errors import ProtocolError
from pmesh.invites.wire import InvitationReply, Invite
from pmesh.launches.wire.messages import (
    LAUNCHES,
    AnyLaunchMessage,
    LaunchInput,
    LaunchQuestion,
    LaunchReply,
    SignalLaunch,
)
from pmesh.members.wire import MEMBERS, MembersMessage, MembersQuestion, MembersReply
from pmesh.p2p.wire import P2P, AttachedReply, AttachedRequest, P2PMessage
from pmesh.store.wire import STORES, StorePart
from pmesh.traces.wire import TRACES, AskTrace, TraceReply, TracesMessage

AnyMessage: TypeAlias = (
    LinkMessage
    | AgreementMessage
    | LaneMessage
    | P2PMessage
    | StorePart
    | Relay
    | AnyLaunchMessage
    | MembersMessage
    | TracesMessage
)
"""Those of a link, which are delivered once and in order."""
AnyPathMessage: TypeAlias = AnyMessage | PathMessage

_CHANNELS: dict[int, Channel[Any]] = {
    channel.number: channel
    for channel in (PATHS, LINK, VIEWS, LANES, P2P, STORES, RELAYS, LAUNCHES, MEMBERS, TRACES)
}


def encode_unbounded(message: object, channel: int | None = None) -> bytes:
    """Return a message as bytes, also where it is larger than any honest machine would make it."""
    if channel is None:
        assert isinstance(message, Message)  # noqa: S101 - else the channel is named
        channel = message.channel
    return bytes((channel,)) + msgspec.msgpack.encode(message)


def decode_untrusted(data: bytes) -> AnyPathMessage:
    """Reverse `encode` for a message of any channel; raise ProtocolError for anything else."""
    channel = _CHANNELS.get(data[0]) if data else None
    if channel is None:
        raise ProtocolError(f"a control message on no channel: {data[:1].hex()!r}")
    message: AnyPathMessage = channel.decode_untrusted(data)
    return message


AnyRequest: TypeAlias = (
    TrainerRequest
    | AttachedRequest
    | ControlRequest
    | LaunchQuestion
    | SignalLaunch
    | LaunchInput
    | Invite
    | MembersQuestion
    | AskTrace
    | AskCharts
)
AnyReply: TypeAlias = (
    TrainerReply
    | AttachedReply
    | ControlReply
    | LaunchReply
    | InvitationReply
    | MembersReply
    | TraceReply
    | ChartReply
)

ANY_REQUESTS: SessionDecoder[AnyRequest] = SessionDecoder("request", AnyRequest)
ANY_REPLIES: SessionDecoder[AnyReply] = SessionDecoder("reply", AnyReply)
decode_request_untrusted = ANY_REQUESTS.decode_untrusted
decode_reply_untrusted = ANY_REPLIES.decode_untrusted
