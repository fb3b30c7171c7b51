"""The Unix socket at which local programs reach their agent, and one session on it.

Tensors never travel here: see `pmesh.net.local.arenas`. The kernel says who connects: it is always
the same user, who may still send garbage, send nothing, or vanish.
"""

import array
import contextlib
import errno
import math
import os
import select
import socket
import stat
import struct
import sys
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol, TypeAlias

import trio

from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.local import (
    MAX_REQUEST_BYTES,
    Reply,
    Request,
    decode_request_untrusted,
    encode,
)
from pmesh.errors import AgentAlreadyRunning, ConfigError, ProtocolError
from pmesh.net.links.acceptor import OUT_OF_RESOURCES, RETRY_S


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


VISIT_S = 5.0  # every program of ours speaks at once, and reads its answer
MAX_VISITORS = 64  # programs that do not stay; beyond, the oldest is closed
BACKLOG = 128
_RECEIVE_BYTES = 64 * 1024


class Session:
    """One program's connection to this agent. One task may receive while others send."""

    def __init__(self, stream: trio.SocketStream, credentials: PeerCredentials) -> None:
        self._stream = stream
        self._reader = FrameReader(max_bytes=MAX_REQUEST_BYTES)
        self._sending = trio.Lock()
        self.on_stay: Callable[[], None] = _do_nothing
        self._poll = select.poll()
        self._poll.register(stream.socket.fileno(), select.POLLIN)  # macOS: nothing asked, no HUP
        self.pid = credentials.pid

    def stay(self) -> None:
        """It is no visitor's: from here on nothing but its handler ends it."""
        self.on_stay()

    async def receive(self) -> Request:
        """The next request.

        Raises:
            ProtocolError: something else arrived; the session is of no more use.
            trio.EndOfChannel: the program has closed its end, or is gone.
        """
        while (message := self._reader.next_message_untrusted()) is None:
            try:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
            except trio.BrokenResourceError as e:
                raise trio.EndOfChannel from e
            if not data:
                raise trio.EndOfChannel
            self._reader.receive_data(data)
        return decode_request_untrusted(message)

    async def send(self, reply: Reply, descriptors: tuple[int, ...] = ()) -> None:
        """Send a reply, whole; whoever cancels this must close the session.

        The descriptors travel with its last byte: they are there when the message is complete, and
        no read of an earlier message can swallow them.

        Raises:
            trio.BrokenResourceError: the program is gone.
        """
        data = frame(encode(reply))
        try:
            self._sending.acquire_nowait()  # the usual case, without a turn of the loop
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            if not descriptors:
                await self._send(data)
                return
            await self._stream.send_all(data[:-1])
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            await self._stream.socket.sendmsg([data[-1:]], [rights])
        except OSError as e:
            raise trio.BrokenResourceError(f"the program is gone: {e.strerror}") from e
        finally:
            self._sending.release()

    async def all_sent(self) -> None:
        """Wait until no reply is on its way; returns at once in the usual case."""
        if self._sending.locked():
            async with self._sending:
                pass

    async def _send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            # Below trio's sockets, which then give up their turn: a third of an op's rounds
            # through the loop.
            sent = os.write(self._stream.socket.fileno(), data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            await self._stream.send_all(data[sent:])

    def trainer_gone(self) -> bool:
        """Whether the other end is closed: asks the kernel, at once, and takes nothing.

        Unlike a peek, this sees the end behind a message that lies unread.
        """
        if self._stream.socket.fileno() < 0:
            return True
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in self._poll.poll(0))

    async def aclose(self) -> None:
        """Close the connection; the program sees the end of file."""
        await self._stream.aclose()


@dataclass(slots=True)
class SessionCounters:
    """What came to the socket; for `pmesh status`."""

    accepted: int = 0
    refused: int = 0
    """Another user's."""
    silent: int = 0
    """Neither stayed nor went within VISIT_S, or the oldest of too many visitors."""
    garbage: int = 0
    out_of_files: int = 0
    """The system had no descriptor or memory for one more."""


Handler: TypeAlias = Callable[[Session], Awaitable[object]]

ENDS_OF_A_SESSION = (ProtocolError, trio.EndOfChannel, trio.BrokenResourceError)
"""What a handler may raise: the program has sent garbage, or is gone."""


async def serve_sessions(
    path: Path,
    handler: Handler,
    *,
    counters: SessionCounters,
    most_visitors: int = MAX_VISITORS,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen at `path` until cancelled, and run `handler` for each program of this user.

    The session is closed when its handler returns. Until the handler calls `Session.stay` the
    program is a visitor: limited in number, and for VISIT_S. A ProtocolError, and the program's
    going away, end that session alone; anything else that a handler raises is a bug and ends the
    server. Where the system has no descriptor for another connection, programs wait.

    Raises:
        AgentAlreadyRunning: someone listens there.
        ConfigError: there is a file that is no socket, or the path can't be used.
    """
    with _listening(path) as listener:
        task_status.started()
        async with trio.open_nursery() as nursery:
            await _Sessions(handler, counters, most_visitors).accept(listener, nursery)


class _Sessions:
    def __init__(self, handler: Handler, counters: SessionCounters, most_visitors: int) -> None:
        self._handler = handler
        self._counters = counters
        self._most_visitors = most_visitors
        self._visits: list[trio.CancelScope] = []  # oldest first

    async def accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> NoReturn:
        while True:
            try:
                stream = await listener.accept()
            except OSError as e:
                if e.errno not in OUT_OF_RESOURCES:
                    raise
                self._counters.out_of_files += 1
                self._end_oldest_visit()  # who is silent holds what another may need
                await trio.sleep(RETRY_S)
            else:
                nursery.start_soon(self._serve, stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            await self._meet(stream)
        finally:
            await trio.aclose_forcefully(stream)

    async def _meet(self, stream: trio.SocketStream) -> None:
        self._counters.accepted += 1
        try:
            credentials = credentials_of(stream.socket)
        except OSError:
            return  # it has gone again
        if credentials.uid != os.getuid():
            self._counters.refused += 1
            return
        session = Session(stream, credentials)
        try:
            with self._visit(session):
                await self._handler(session)
        except* ProtocolError:
            self._counters.garbage += 1
        except* (trio.EndOfChannel, trio.BrokenResourceError):
            pass

    @contextlib.contextmanager
    def _visit(self, session: Session) -> Generator[None]:
        """The time of a visitor, until it stays or is pushed out by others."""
        if len(self._visits) >= self._most_visitors:
            self._end_oldest_visit()
        with trio.move_on_after(VISIT_S) as scope:
            self._visits.append(scope)

            def end() -> None:
                if scope in self._visits:
                    self._visits.remove(scope)

            def stay() -> None:
                end()
                scope.deadline = math.inf

            session.on_stay = stay
            try:
                yield
            finally:
                end()
        if scope.cancelled_caught:
            self._counters.silent += 1

    def _end_oldest_visit(self) -> None:
        if self._visits:
            self._visits.pop(0).cancel()


@contextlib.contextmanager
def _listening(path: Path) -> Generator[trio.SocketListener]:
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            listening.bind(str(path))
            path.chmod(0o600)  # before listen: until then every connect is refused
            listening.listen(BACKLOG)
        except OSError as e:
            raise ConfigError(f"can't listen at {path}: {e.strerror or e}") from e
        made = path.lstat()
        try:
            yield trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), made):  # or another agent has made its own
                    path.unlink()


def _do_nothing() -> None: ...


def _remove_stale(path: Path) -> None:
    """Make way where a killed agent has left its socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is in the way and is not a socket; move it elsewhere")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)
        result = probe.connect_ex(str(path))
    if result in (0, errno.EAGAIN):  # EAGAIN: it lives, and its queue is full
        raise AgentAlreadyRunning(f"another agent listens at {path}; stop it with 'pmesh down'")
    if result not in (errno.ECONNREFUSED, errno.ENOENT):
        raise ConfigError(f"{path} is in the way: {os.strerror(result)}")
    path.unlink(missing_ok=True)
