"""How a machine that has missed a rotation of the mesh key gets the latest one: one question.

The machine dials, and sends the tag of the key that it has. If the other agent had that key once,
both prove it and their node keys by TLS. Then the other decides by the node id whether to answer.
Nothing else is said on such a connection, in either direction.
"""

from collections.abc import Callable

import msgspec
import trio

from pmesh.core.identity.certificates import node_of_certificate_untrusted
from pmesh.core.identity.rotations import (
    MAX_ROTATION_BYTES,
    Rotation,
    check_rotation_untrusted,
)
from pmesh.core.wire.framing import RENEWAL_BYTES, RENEWAL_MAGIC, frame
from pmesh.errors import PeerUnreachable, ProtocolError
from pmesh.ids import NodeId
from pmesh.net.links.path import HANDSHAKE_TIMEOUT_S, Wire
from pmesh.net.links.tls import TlsContexts, TlsProtocol


async def ask_for_rotation(
    stream: trio.SocketStream,
    *,
    tag: bytes,
    contexts: TlsContexts,
    trusts: Callable[[NodeId], bool],
) -> Rotation:
    """Ask the agent at the other end for the key that has replaced ours.

    Args:
        stream: A new connection to it, which is closed afterwards.
        tag: Of the key that we have.
        contexts: Of the same key.
        trusts: Whether to take a key from a node: whoever has the old key can pretend to be any
            other one.

    Raises:
        PeerUnreachable: It has no later key for us.
        MeshKeyMismatch: It never had our key.
        ProtocolError: It does not speak pmesh, or no node has signed what it says.
    """
    async with stream:
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                await stream.send_all(RENEWAL_MAGIC + tag)
                wire = Wire(stream, TlsProtocol(contexts, server_side=False))
                node = node_of_certificate_untrusted(await wire.handshake(b""))
                if not trusts(node):
                    raise PeerUnreachable(f"{wire.remote} is no member that this machine knows")
                return _read_untrusted(await wire.next_frame())
        except (trio.TooSlowError, trio.EndOfChannel, trio.BrokenResourceError) as e:
            raise PeerUnreachable("it has no later mesh key for this machine") from e


async def give_rotation(
    stream: trio.abc.HalfCloseableStream,
    first: bytes,
    *,
    contexts: Callable[[bytes], TlsContexts | None],
    rotation_for: Callable[[NodeId], Rotation | None],
    authenticated: Callable[[], None],
) -> NodeId:
    """Answer `ask_for_rotation` on an accepted connection, and close it.

    Args:
        stream: The connection.
        first: What was read of it: `RENEWAL_BYTES` or more.
        contexts: Returns those of a key that was replaced, by its tag; None if it is not known.
        rotation_for: Returns what a node gets; None if it has no place in the mesh.
        authenticated: Called once TLS has proven the key and the node, and it will be answered.

    Raises PeerUnreachable, MeshKeyMismatch or ProtocolError if it gets nothing.
    """
    tag = first[len(RENEWAL_MAGIC) : RENEWAL_BYTES]
    theirs = contexts(tag)
    if theirs is None:
        raise PeerUnreachable("a machine asked for the mesh key by a key that is not known here")
    wire = Wire(stream, TlsProtocol(theirs, server_side=True))
    node = node_of_certificate_untrusted(await wire.handshake(first[RENEWAL_BYTES:]))
    rotation = rotation_for(node)
    if rotation is None:
        raise PeerUnreachable(f"{wire.remote} has no place in the mesh, and gets no mesh key")
    authenticated()
    try:
        await wire.send(frame(msgspec.msgpack.encode(rotation)))
        await wire.part()
    finally:
        await trio.aclose_forcefully(stream)
    return node


def _read_untrusted(data: bytes) -> Rotation:
    if len(data) > MAX_ROTATION_BYTES:
        raise ProtocolError(f"a rotation of {len(data)} bytes, {MAX_ROTATION_BYTES} are allowed")
    try:
        rotation = msgspec.msgpack.decode(data, type=Rotation)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a rotation: {e}") from e
    check_rotation_untrusted(rotation)
    return rotation
