"""What `pmesh status` and `pmesh down` ask of the local agent: one question, one answer."""

import socket
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from pmesh.core.framing import FrameReader, frame
from pmesh.core.session import (
    MAX_SESSION_MESSAGE_BYTES,
    AskStatus,
    Reply,
    Request,
    Status,
    StopAgent,
    Stopping,
    decode_reply_untrusted,
    encode,
)
from pmesh.errors import AgentNotRunning, AgentStopped, ProtocolError

_RECEIVE_BYTES = 64 * 1024


def ask_status(path: Path, *, timeout_s: float = 5.0) -> bytes:
    """The picture of the agent that listens at `path`, as JSON.

    Raises:
        AgentNotRunning: Nobody listens there.
        AgentStopped: The agent went away, or stayed silent for `timeout_s`.
    """
    with _talk(path, timeout_s=timeout_s) as connection:
        reply = _ask(connection, AskStatus())
    if not isinstance(reply, Status):
        raise ProtocolError(f"the agent at {path} answered with {type(reply).__name__}, not Status")
    return reply.json


def stop_agent(path: Path, *, timeout_s: float = 10.0) -> int:
    """Make the agent at `path` leave the mesh; returns its pid when it has left.

    Raises:
        AgentNotRunning: Nobody listens there.
        AgentStopped: The agent did not answer, or did not leave, within `timeout_s`.
    """
    with _talk(path, timeout_s=timeout_s) as connection:
        reply = _ask(connection, StopAgent())
        if not isinstance(reply, Stopping):
            name = type(reply).__name__
            raise ProtocolError(f"the agent at {path} answered with {name}, not Stopping")
        _await_end(connection)
    return reply.pid


@contextmanager
def _talk(path: Path, *, timeout_s: float) -> Generator[socket.socket]:
    """A connection to the agent; what goes wrong on it becomes one of our errors."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
        except OSError as e:
            raise AgentNotRunning(
                f"no agent listens at {path} ({e.strerror or e}); start one with 'pmesh up'"
            ) from e
        try:
            yield connection
        except TimeoutError as e:
            raise AgentStopped(
                f"the agent at {path} has not answered for {timeout_s:g} s; its log may say why"
            ) from e
        except OSError as e:
            raise AgentStopped(f"the agent at {path} went away: {e.strerror or e}") from e


def _ask(connection: socket.socket, request: Request) -> Reply:
    connection.sendall(frame(encode(request)))
    reader = FrameReader(max_bytes=MAX_SESSION_MESSAGE_BYTES)
    while (message := reader.next_message_untrusted()) is None:
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            raise AgentStopped("the agent closed the connection without an answer")
        reader.receive_data(data)
    return decode_reply_untrusted(message)


def _await_end(connection: socket.socket) -> None:
    """The agent closes the connection as the last thing that it does."""
    try:
        while connection.recv(_RECEIVE_BYTES):
            pass
    except ConnectionResetError:
        pass  # ended too
