"""Questions of the commands to the local agent, and its answers."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec

from pmesh.client.session.connection import AgentConnection, error_of
from pmesh.core.wire.control import (
    CONTROL_REPLIES,
    AgentEvents,
    AskEvents,
    AskPing,
    AskStatus,
    Pinged,
    StatusReply,
    StopAgent,
    Stopping,
    WayTried,
)
from pmesh.core.wire.session import Refused, SessionDecoder, SessionMessage, encode
from pmesh.errors import ProtocolError, UsageError

ReplyT = TypeVar("ReplyT", bound=SessionMessage)


def check_question(request: SessionMessage) -> None:
    """Raise UsageError for what no agent reads: it would end the connection without a word."""
    try:
        msgspec.msgpack.decode(encode(request), type=type(request))
    except UnicodeEncodeError as e:
        raise UsageError(f"{e.object!r} is not valid UTF-8, and so the name of nothing") from e
    except (OverflowError, msgspec.ValidationError) as e:
        raise UsageError(f"the agent takes no such value: {e}") from e


def ask(
    home: Path,
    request: SessionMessage,
    wanted: type[ReplyT],
    *,
    replies: SessionDecoder[SessionMessage] = CONTROL_REPLIES,
    timeout_s: float = 5.0,
) -> ReplyT:
    """Ask the agent of this home one question, and return its answer.

    Args:
        home: The home of the agent, as `home_directory` returns it.
        request: The question.
        wanted: The type of the answer.
        replies: All that the agent may answer in a session that begins with this question.
        timeout_s: How long the agent may stay silent.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
        UsageError: A value in the question is none that an agent reads.
        PmeshError: The agent refused; this is the error that it named.
    """
    check_question(request)
    with closing(AgentConnection(home, replies, silence_s=timeout_s)) as connection:
        connection.send(request)
        return await_reply(connection, wanted)


def ask_status(home: Path, *, timeout_s: float = 5.0) -> bytes:
    """Return the status of the agent of this home, as JSON; raise what `ask` raises."""
    return ask(home, AskStatus(), StatusReply, timeout_s=timeout_s).json


def ask_events(home: Path, after: int = -1, *, timeout_s: float = 5.0) -> bytes:
    """Return the events of the agent of this home, as JSON; raise what `ask` raises.

    Args:
        home: The home of the agent, as `home_directory` returns it.
        after: The number of the last event that the caller has; -1 for all that are kept.
        timeout_s: How long the agent may stay silent.
    """
    return ask(home, AskEvents(after), AgentEvents, timeout_s=timeout_s).json


def ping(home: Path, name: str, *, timeout_s: float = 10.0) -> Iterator[WayTried | Pinged]:
    """Yield each way to a machine once the agent has tried it, and Pinged at the end.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
        UsageError: No other machine has this name.
        PeerUnreachable: There is no link to it now.
    """
    check_question(AskPing(name))
    with closing(AgentConnection(home, CONTROL_REPLIES, silence_s=timeout_s)) as connection:
        connection.send(AskPing(name))
        while True:
            reply = connection.receive()
            if isinstance(reply, Refused):
                raise error_of(reply.verdict)
            if not isinstance(reply, (WayTried, Pinged)):
                raise connection.nonsense(type(reply).__name__)
            yield reply
            if isinstance(reply, Pinged):
                return


def stop_agent(home: Path, *, timeout_s: float = 10.0) -> int:
    """Make the agent of this home leave the mesh; return its pid when it has left.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent did not answer, or did not leave, within `timeout_s`.
    """
    with closing(AgentConnection(home, CONTROL_REPLIES, silence_s=timeout_s)) as connection:
        connection.send(StopAgent())
        stopping = await_reply(connection, Stopping)
        connection.await_end()  # closing it is the last thing that the agent does
    return stopping.pid


def await_reply(connection: AgentConnection[SessionMessage], wanted: type[ReplyT]) -> ReplyT:
    """Return the next reply, of this type; raise the error that the agent names instead."""
    reply = connection.receive()
    if isinstance(reply, Refused):
        raise error_of(reply.verdict)
    if not isinstance(reply, wanted):
        raise ProtocolError(
            f"the agent at {connection.path} answered with {type(reply).__name__}, "
            f"not {wanted.__name__}"
        )
    return reply
