"""How a lane comes up: over a dialled connection, through the door, or within one agent.

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

from pmesh.core.wire.link import OfferLane
from pmesh.core.wire.records import Preamble, encode_preamble, subflow_key
from pmesh.net.lanes.lane import WAKE_UP_BYTES, Lane

_LOCAL_BUFFER_BYTES = 1024 * 1024  # macOS gives a socket pair 8 KiB: 64 switches a segment
_SAME_MACHINE_BUFFER_BYTES = 512 * 1024  # a segment, in pages that a core still has next time


async def dial_lane(
    stream: trio.SocketStream, offer: OfferLane, *, peer: str, index: int = 0
) -> Lane:
    """Open the lane of an offer over a connection that we have dialled to the peer's door.

    Whoever dials speaks first; the lane is up when both have greeted.

    Args:
        stream: the new connection, which the lane takes over.
        offer: as it went over the link.
        peer: the other machine's name, for errors.
        index: of the connection, if the lane has several.

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
        LaneBroken: who dialled does not know the offer, or did not say so within 5 s.
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
    """The offer with the keys by which one connection of its lane greets.

    Where a lane has several, each index has keys of its own, so no index may be used twice.
    """
    if not offer.several:
        return offer
    return msgspec.structs.replace(
        offer,
        key=subflow_key(offer.key, index),
        return_key=subflow_key(offer.return_key, index),
    )


def local_lanes(offer: OfferLane, *, peers: tuple[str, str]) -> tuple[Lane, Lane]:
    """The two ends of a lane between two ranks of one agent: the sending one, the receiving one.

    Args:
        offer: made like any other, though it travels nowhere.
        peers: what the sending end, and what the receiving end, calls the other.
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
    # Below trio's sockets: theirs always yield, and `post` must send without giving up its turn.
    family = stream.socket.family  # which macOS does not say any more of one that was reset
    sock = socket.socket(family, socket.SOCK_STREAM, fileno=stream.socket.detach())
    if not _is_within_one_machine(sock):
        # The system's own send buffer is better there: it grows with what is under way.
        return Lane(sock, offer, sending=sending, peer=peer, wake_up_bytes=WAKE_UP_BYTES)
    with contextlib.suppress(OSError):  # it was reset: the first call will say so
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SAME_MACHINE_BUFFER_BYTES)
    return Lane(sock, offer, sending=sending, peer=peer)


def _is_within_one_machine(sock: socket.socket) -> bool:
    try:
        return sock.family == socket.AF_UNIX or sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:  # it was reset
        return False
