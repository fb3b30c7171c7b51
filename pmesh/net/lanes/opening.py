"""Opens lanes: over a dialled connection, over one that came through the door, or in one agent.

who dials                                  whose door it is
    │ preamble: the lane's id, in clear          │ looks up the offer of that id
    │ greeting, sealed ─────────────────────────▶│ knows: this one has read the offer
    │◀────────────────────────── greeting, sealed│
knows the same                               the lane is up
"""

import contextlib
import socket

import msgspec
import trio

from pmesh.core.wire.lanes import OfferLane
from pmesh.core.wire.preamble import Preamble, encode_preamble
from pmesh.core.wire.records import subflow_key
from pmesh.net.lanes.lane import WAKE_UP_BYTES, Lane

_LOCAL_BUFFER_BYTES = 1024 * 1024  # macOS gives a socket pair 8 KiB: 64 switches a segment
_SAME_MACHINE_BUFFER_BYTES = 512 * 1024  # one segment, whose pages stay in a core's cache


async def dial_lane(
    stream: trio.SocketStream, offer: OfferLane, *, peer: str, index: int = 0
) -> Lane:
    """Open the lane of an offer over a connection that we have dialled to the peer's door.

    The side that dials speaks first; the lane is open when both have greeted.

    Args:
        stream: the new connection, which the lane takes over.
        offer: the offer, as it went over the link.
        peer: the other machine's name, for errors.
        index: the connection's index, if the lane has several.

    Raises:
        LaneBroken: the other side does not know the offer, or did not answer within 5 s.
    """
    keyed = offer_of_connection(offer, index)
    lane = _lane_over(stream, keyed, sending=not offer.dial, peer=peer)
    try:
        await lane.greet(encode_preamble(Preamble(offer.lane, index)))
        await lane.receive_greeting()
    except BaseException:
        lane.close()
        raise
    return lane


async def welcome_lane(
    stream: trio.SocketStream, offer: OfferLane, *, peer: str, index: int = 0
) -> Lane:
    """Open the lane of an offer over a connection that came through our door.

    Args:
        stream: the connection, of which exactly the preamble has been read. The lane takes it over.
        offer: the one whose lane id the preamble names.
        peer: the other machine's name, for errors.
        index: as in the preamble.

    Raises:
        LaneBroken: the dialling side does not know the offer, or did not greet within 5 s.
    """
    keyed = offer_of_connection(offer, index)
    lane = _lane_over(stream, keyed, sending=offer.dial, peer=peer)
    try:
        await lane.receive_greeting()
        await lane.greet()
    except BaseException:
        lane.close()
        raise
    return lane


def offer_of_connection(offer: OfferLane, index: int) -> OfferLane:
    """Return the offer with the keys of one connection of its lane.

    If the lane has several, each index has keys of its own, so no index may be used twice.
    """
    if not offer.several:
        return offer
    return msgspec.structs.replace(
        offer,
        key=subflow_key(offer.key, index),
        return_key=subflow_key(offer.return_key, index),
    )


def local_lanes(offer: OfferLane, *, peers: tuple[str, str]) -> tuple[Lane, Lane]:
    """Return the sending and the receiving end of a lane between two ranks of one agent.

    Args:
        offer: an offer like any other, though it is not sent.
        peers: the other's name, for the sending and for the receiving end.
    """
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOCAL_BUFFER_BYTES)
    return (
        Lane(ends[0], offer, sending=True, peer=peers[0]),
        Lane(ends[1], offer, sending=False, peer=peers[1]),
    )


def _lane_over(stream: trio.SocketStream, offer: OfferLane, *, sending: bool, peer: str) -> Lane:
    # Not trio's socket, whose calls always yield: `post` must send without giving up its turn.
    family = stream.socket.family  # macOS can't look it up for the descriptor of a reset socket
    sock = socket.socket(family, socket.SOCK_STREAM, fileno=stream.socket.detach())
    if not _is_within_one_machine(sock):
        # Between machines the system's own send buffer is better: it grows with the data under way.
        return Lane(sock, offer, sending=sending, peer=peer, wake_up_bytes=WAKE_UP_BYTES)
    with contextlib.suppress(OSError):  # it was reset: the first call will say so
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SAME_MACHINE_BUFFER_BYTES)
    return Lane(sock, offer, sending=sending, peer=peer)


def _is_within_one_machine(sock: socket.socket) -> bool:
    try:
        return sock.family == socket.AF_UNIX or sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:  # it was reset
        return False
