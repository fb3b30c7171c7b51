"""The two ends of a connection, as addresses."""

import socket
from typing import Final, cast

import trio

from pmesh.core.messages import Address

UNKNOWN: Final = Address("unknown", 0)
"""The address of a stream without one: in memory, or broken before anybody asked."""


def local_address_of(stream: trio.abc.Stream) -> Address:
    """Our end of the stream."""
    return _ask(stream, "getsockname")


def remote_address_of(stream: trio.abc.Stream) -> Address:
    """The other side's end of the stream."""
    return _ask(stream, "getpeername")


def _ask(stream: trio.abc.Stream, question: str) -> Address:
    """Ask the socket of the stream: a fake that wants an address has a `socket`, too."""
    try:
        name: object = getattr(getattr(stream, "socket", None), question)()
    except (AttributeError, OSError):  # no socket; no longer connected
        return UNKNOWN
    if not isinstance(name, tuple):  # AF_UNIX: a path
        return UNKNOWN
    host, port, *ipv6 = cast("tuple[str, int, int, int]", name)
    scope = ipv6[1] if ipv6 else 0
    return Address(f"{host}%{socket.if_indextoname(scope)}" if scope else host, port)
