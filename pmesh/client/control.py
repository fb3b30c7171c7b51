"""Requests of `pmesh status`, `events`, `down` and so on to the local agent, with their answers."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from pmesh.client.session.connection import AgentConnection, error_of
from pmesh.core.wire.control import (
    CONTROL_REPLIES,
    AskEvents,
    AskMachines,
    AskPing,
    AskStatus,
    Events,
    ForgetName,
    Machines,
    Pinged,
    StatusReply,
    StopAgent,
    Stopping,
    WayTried,
)
from pmesh.core.wire.session import Refused, SessionMessage
from pmesh.errors import ProtocolError

ReplyT = TypeVar("ReplyT", bound=SessionMessage)


def ask_status(home: Path, *, timeout_s: float = 5.0) -> bytes:
    """Return the status of the agent of this home, as JSON.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
    """
    with closing(AgentConnection(home, CONTROL_REPLIES, silence_s=timeout_s)) as connection:
        return ask(connection, AskStatus(), StatusReply).json


def ask_events(home: Path, after: int = -1, *, timeout_s: float = 5.0) -> bytes:
    """Return the events of the agent of this home, as JSON.

    Args:
        home: The home of the agent, as `home_directory` returns it.
        after: The number of the last event that the caller has; -1 for all that are kept.
        timeout_s: How long the agent may stay silent.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
    """
    with closing(AgentConnection(home, CONTROL_REPLIES, silence_s=timeout_s)) as connection:
        return ask(connection, AskEvents(after), Events).json


def ping(home: Path, name: str, *, timeout_s: float = 10.0) -> Iterator[WayTried | Pinged]:
    """Yield each way to a machine once the agent has tried it, and Pinged at the end.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
        UsageError: No other machine has this name.
        PeerUnreachable: There is no link to it now.
    """
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


def ask_machines(home: Path, names: tuple[str, ...], *, timeout_s: float = 5.0) -> tuple[str, ...]:
    """Return the node ids, as text, of machines named by their names or the starts of their ids.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
        UsageError: The agent knows no such machine.
    """
    with closing(AgentConnection(home, CONTROL_REPLIES, silence_s=timeout_s)) as connection:
        return ask(connection, AskMachines(names), Machines).ids


def forget_name(home: Path, name: str, *, timeout_s: float = 5.0) -> str:
    """Free a machine's name for another machine; return the id of the one that had it.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
        UsageError: The agent knows no such name.
    """
    with closing(AgentConnection(home, CONTROL_REPLIES, silence_s=timeout_s)) as connection:
        (node,) = ask(connection, ForgetName(name), Machines).ids
        return node


def stop_agent(home: Path, *, timeout_s: float = 10.0) -> int:
    """Make the agent of this home leave the mesh; return its pid when it has left.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent did not answer, or did not leave, within `timeout_s`.
    """
    with closing(AgentConnection(home, CONTROL_REPLIES, silence_s=timeout_s)) as connection:
        stopping = ask(connection, StopAgent(), Stopping)
        connection.await_end()  # closing it is the last thing that the agent does
    return stopping.pid


def ask(
    connection: AgentConnection[SessionMessage], request: SessionMessage, wanted: type[ReplyT]
) -> ReplyT:
    """Send a request and return its reply; raise the error that the agent names instead."""
    connection.send(request)
    return await_reply(connection, wanted)


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
