"""The first message on a link: readable by every version of pmesh, past and to come.

What all versions share is its outermost shape, an array that begins with the tag 1 and the sender's
protocol version. The rest is read only if the versions are equal.
"""

from dataclasses import dataclass

import msgspec

from pmesh.core.messages import PROTOCOL_VERSION, Hello, decode_untrusted
from pmesh.errors import ProtocolError
from pmesh.ids import NodeId


class _AnyHello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    protocol: int


@dataclass(frozen=True, slots=True)
class OtherProtocol:
    """A peer that speaks another version."""

    protocol: int


def read_hello_untrusted(data: bytes, *, proven: NodeId) -> Hello | OtherProtocol:
    """The Hello of the peer whose node key TLS has proven.

    Raises ProtocolError for what isn't a Hello, and for one in the name of another node.
    """
    try:
        protocol = msgspec.msgpack.decode(data, type=_AnyHello).protocol
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a Hello: {e}") from e
    if protocol != PROTOCOL_VERSION:
        return OtherProtocol(protocol)
    hello = decode_untrusted(data)
    if not isinstance(hello, Hello) or hello.member.node != proven:
        raise ProtocolError("a Hello in the name of another node")
    return hello
