"""The Unix socket at which local programs reach their agent, and one session on it.

Tensors are passed in shared memory instead (`pmesh.net.sessions.arenas`). The kernel proves that a
program belongs to the same user; it may still send garbage, send nothing, or disappear.
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
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

import trio

from pmesh.core.values import Verdict
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import (
    MAX_REQUEST_BYTES,
    Refused,
    SessionDecoder,
    SessionMessage,
    encode,
)
from pmesh.errors import AgentAlreadyRunning, ConfigError, ProtocolError
from pmesh.net.links.acceptor import BROKEN_LISTENER, RETRY_S


class PeerCredentials(NamedTuple):
    """The process that connected."""

    pid: int
    uid: int


class UnixSocket(Protocol):
    """The one call needed, which trio's sockets and the standard library's have."""

    def getsockopt(self, level: int, option: int, buffersize: int, /) -> bytes:
        """Return the option's value, at most `buffersize` bytes."""
        ...


def credentials_of(connection: UnixSocket) -> PeerCredentials:
    """Return the process that called `connect`. Raises OSError if it is already gone (macOS)."""
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
        raise OSError(f"struct xucred has version {version}, but pmesh knows {_XUCRED_VERSION}")
    (pid,) = _PID.unpack(connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, _PID.size))
    return PeerCredentials(pid, uid)


_CREDENTIALS = {"darwin": _credentials_macos}
"""By `sys.platform`; Linux is the default."""


VISIT_S = 5.0  # programs of pmesh send at once, and read the reply
MAX_VISITORS = 64  # programs that do not stay; beyond that, the oldest is closed
REPORT_S = 1.0  # a program that does not read this notices the end of its session
BACKLOG = 128
MAX_REFUSAL = 16 * 1024  # characters: other machines may have written some of them
_RECEIVE_BYTES = 64 * 1024


_Request = TypeVar("_Request", bound=SessionMessage)


class _NoRequests(SessionDecoder[SessionMessage]):
    def __init__(self) -> None:
        super().__init__("request", SessionMessage)

    def decode_untrusted(self, data: bytes) -> NoReturn:
        raise ProtocolError(f"a request of {len(data)} bytes while another one was answered")


_NO_REQUESTS = _NoRequests()


class Session:
    """One program's connection to this agent. One task may receive while others send."""

    def __init__(self, stream: trio.SocketStream, credentials: PeerCredentials) -> None:
        self._stream = stream
        self._reader = FrameReader(max_bytes=MAX_REQUEST_BYTES)
        self._sending = trio.Lock()
        self.on_stay: Callable[[], None] = _do_nothing
        self._poll = select.poll()
        self._poll.register(stream.socket.fileno(), select.POLLIN)  # macOS: without POLLIN no HUP
        self.pid = credentials.pid

    @property
    def descriptor(self) -> int:
        """The connection's, for who receives and sends whole messages in its place."""
        return self._stream.socket.fileno()

    @property
    def is_sending(self) -> bool:
        """Whether something is half sent."""
        return self._sending.locked()

    @property
    def unread_bytes(self) -> int:
        """How much has been received and not been returned."""
        return self._reader.buffered

    def take_unread(self) -> bytes:
        """Return that much, for who goes on in its place."""
        return self._reader.take_data()

    def put_back(self, data: bytes) -> None:
        """Take what somebody else has received: `receive` continues with it."""
        self._reader.receive_data(data)

    def stay(self) -> None:
        """End the visitor's limits: from now on only the handler ends the session."""
        self.on_stay()

    async def receive(self, requests: SessionDecoder[_Request]) -> _Request:
        """Return the next request, of those that this session takes.

        Raises:
            ProtocolError: Something else arrived; the session can't be used any more.
            trio.EndOfChannel: The program has closed its end, or is gone.
        """
        while (message := self._reader.next_message_untrusted()) is None:
            # Not trio's streams, which try first and yield after each call: a request is never
            # there yet, and the wait for it is the turn of other tasks.
            await trio.lowlevel.wait_readable(self._stream.socket)
            try:
                data = os.read(self._stream.socket.fileno(), _RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except ConnectionError as e:
                raise trio.EndOfChannel from e
            if not data:
                raise trio.EndOfChannel
            self._reader.receive_data(data)
        return requests.decode_untrusted(message)

    async def await_end(self) -> NoReturn:
        """Wait until the program is gone. Run it beside whatever answers for long.

        Raises:
            trio.EndOfChannel: It is gone.
            ProtocolError: It has sent something, though its request is being answered.
        """
        await self.receive(_NO_REQUESTS)
        raise AssertionError("it takes no request")

    async def send(self, reply: SessionMessage, descriptors: tuple[int, ...] = ()) -> None:
        """Send a whole reply; a caller that cancels this must close the session.

        The descriptors travel with the last byte: they have arrived when the message is complete,
        and no read of an earlier message can swallow them.

        Raises:
            trio.BrokenResourceError: The program is gone.
        """
        data = frame(encode(reply))
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            if not (descriptors or self._sending.locked()):
                # The usual case. Not trio's sockets, which yield after each call: that would be a
                # third of an op's turns of the loop.
                try:
                    sent = os.write(self._stream.socket.fileno(), data)
                except BlockingIOError:
                    sent = 0
                if sent == len(data):
                    return
                data = data[sent:]
            async with self._sending:
                if not descriptors:
                    await self._stream.send_all(data)
                    return
                await self._stream.send_all(data[:-1])
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                await self._stream.socket.sendmsg([data[-1:]], [rights])
        except OSError as e:
            raise trio.BrokenResourceError(f"the program is gone: {e.strerror}") from e

    async def all_sent(self) -> None:
        """Wait until no reply is being sent; usually returns at once."""
        if self._sending.locked():
            async with self._sending:
                pass

    def trainer_gone(self) -> bool:
        """Return True if the other end is closed; asks the kernel and consumes no data.

        Unlike a peek, this sees the end behind an unread message.
        """
        if self._stream.socket.fileno() < 0:
            return True
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in self._poll.poll(0))

    async def aclose(self) -> None:
        """Close the connection; the program reads the end of file."""
        await self._stream.aclose()


async def refuse(session: Session, error: str, message: str) -> None:
    """Refuse a request with the name of a class in `pmesh.errors`."""
    await session.send(Refused(Verdict(error, message[:MAX_REFUSAL])))


async def report_errors(session: Session, errors: Sequence[str]) -> None:
    """Send the program the reason why its session ends, if it still reads.

    For the program the whole agent has ended: mesh.sync returns in a new session.
    """
    with trio.move_on_after(REPORT_S), contextlib.suppress(trio.BrokenResourceError):
        for error in errors[:1]:
            await refuse(session, "AgentStopped", f"{error}; the agent's log has its traceback")


@dataclass(slots=True)
class SessionCounters:
    """Connections to the socket; for `pmesh status`."""

    accepted: int = 0
    refused: int = 0
    """Closed, because they were another user's."""
    silent: int = 0
    """Closed after VISIT_S, or as the oldest of too many visitors."""
    garbage: int = 0
    out_of_files: int = 0
    """Not accepted, as the system had no descriptor or memory left, or refused it otherwise."""


SessionHandler: TypeAlias = Callable[[Session], Awaitable[object]]

ENDS_OF_A_SESSION = (ProtocolError, trio.EndOfChannel, trio.BrokenResourceError)
"""Errors that a handler may raise: the program sent garbage, or is gone."""


async def serve_sessions(
    path: Path,
    handler: SessionHandler,
    *,
    counters: SessionCounters,
    most_visitors: int = MAX_VISITORS,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen at `path` until cancelled, and run `handler` for each program of this user.

    The session is closed when its handler returns. Until the handler calls `Session.stay` the
    program is a visitor: visitors are limited in number, and to VISIT_S. A ProtocolError, or the
    end of the program, ends only that session; any other error of a handler is a bug and ends the
    server. If the system has no descriptor for another connection, programs wait.

    Raises:
        AgentAlreadyRunning: Another agent listens there.
        ConfigError: The path can't be used, or holds a file that is not a socket.
    """
    with _listening(path) as listener:
        task_status.started()
        async with trio.open_nursery() as nursery:
            await _Sessions(handler, counters, most_visitors).accept(listener, nursery)


class _Sessions:
    def __init__(
        self, handler: SessionHandler, counters: SessionCounters, most_visitors: int
    ) -> None:
        self._handler = handler
        self._counters = counters
        self._most_visitors = most_visitors
        self._visits: list[trio.CancelScope] = []  # oldest first

    async def accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> NoReturn:
        while True:
            try:
                stream = await listener.accept()
            except OSError as e:
                if e.errno in BROKEN_LISTENER:
                    raise
                self._counters.out_of_files += 1
                self._end_oldest_visit()  # it holds a descriptor that another may need
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
            return  # the program is already gone
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
        """Limit a visitor's time, until it stays or others push it out."""
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
                if os.path.samestat(path.lstat(), made):  # else it is another agent's
                    path.unlink()


def _do_nothing() -> None: ...


def _remove_stale(path: Path) -> None:
    """Remove the socket of an agent that was killed."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is in the way and is not a socket; move it elsewhere")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)
        result = probe.connect_ex(str(path))
    if result in (0, errno.EAGAIN):  # EAGAIN: an agent listens, and its queue is full
        raise AgentAlreadyRunning(f"another agent listens at {path}; stop it with 'pmesh down'")
    if result not in (errno.ECONNREFUSED, errno.ENOENT):
        raise ConfigError(f"{path} is in the way: {os.strerror(result)}")
    path.unlink(missing_ok=True)
