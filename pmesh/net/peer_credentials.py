"""Who is at the other end of a Unix socket, by the kernel's word."""

import socket
import struct
import sys
from typing import NamedTuple, Protocol


class PeerCredentials(NamedTuple):
    """The process that connected."""

    pid: int
    uid: int


class UnixSocket(Protocol):
    """The one call needed: trio's sockets and the standard library's both have it."""

    def getsockopt(self, level: int, option: int, buffersize: int, /) -> bytes:
        """The option's value, at most `buffersize` bytes."""
        ...


def credentials_of(connection: UnixSocket) -> PeerCredentials:
    """The process that called `connect`; raises OSError if it is gone already (macOS)."""
    return _CREDENTIALS.get(sys.platform, _credentials_linux)(connection)


_SO_PEERCRED = 17  # asm-generic/socket.h; Python has the name only where the system has it
_UCRED = struct.Struct("iII")  # pid, uid, gid


def _credentials_linux(connection: UnixSocket) -> PeerCredentials:
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERCRED, _UCRED.size))
    return PeerCredentials(pid, uid)


_SOL_LOCAL = 0  # sys/un.h
_LOCAL_PEERCRED = 1
_LOCAL_PEERPID = 2
_XUCRED = struct.Struct("IIh16I")  # sys/ucred.h: version, uid, group count, groups
_XUCRED_VERSION = 0
_PID = struct.Struct("i")


def _credentials_macos(connection: UnixSocket) -> PeerCredentials:
    found = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
    version, uid, *_ = _XUCRED.unpack(found)
    if version != _XUCRED_VERSION:
        raise OSError(f"struct xucred has version {version}, {_XUCRED_VERSION} is known")
    (pid,) = _PID.unpack(connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, _PID.size))
    return PeerCredentials(pid, uid)


_CREDENTIALS = {"darwin": _credentials_macos}
"""By `sys.platform`, where it is not Linux."""
