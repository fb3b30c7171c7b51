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
from pmesh.launches.wire.messages import (
    LAUNCH_REPLIES,
    AskHosts,
    AskLaunches,
    EndLaunch,
    Fetched,
    FetchFiles,
    Hosts,
    LaunchEnding,
    LaunchHost,
    LaunchRow,
    LaunchRows,
)

ReplyT = TypeVar("ReplyT", bound=SessionMessage)


def ask_status(home: Path, *, timeout_s: float = 5.0) -> bytes:
    """Return the status of the agent of this home, as JSON.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
    """
    with closing(AgentConnection(home, CONTROL_REPLIES, silence_s=timeout_s)) as connection:
        return _ask(connection, AskStatus(), StatusReply).json


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
        return _ask(connection, AskEvents(after), Events).json


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
        return _ask(connection, AskMachines(names), Machines).ids


def forget_name(home: Path, name: str, *, timeout_s: float = 5.0) -> str:
    """Free a machine's name for another machine; return the id of the one that had it.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
        UsageError: The agent knows no such name.
    """
    with closing(AgentConnection(home, CONTROL_REPLIES, silence_s=timeout_s)) as connection:
        (node,) = _ask(connection, ForgetName(name), Machines).ids
        return node


def ask_launches(home: Path, *, timeout_s: float = 5.0) -> tuple[LaunchRow, ...]:
    """Return the launches that the agent of this home has started or runs, the latest first.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
    """
    rows: list[LaunchRow] = []
    with closing(AgentConnection(home, LAUNCH_REPLIES, silence_s=timeout_s)) as connection:
        some = _ask(connection, AskLaunches(), LaunchRows).rows
        while some:
            rows += some
            some = _await(connection, LaunchRows).rows
    return tuple(rows)


def ask_hosts(home: Path, request: AskHosts, *, timeout_s: float = 5.0) -> tuple[LaunchHost, ...]:
    """Return the machines on which ranks would run, in the order of the ring.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
        UsageError: A machine is not there, or has no IPv4 address.
    """
    with closing(AgentConnection(home, LAUNCH_REPLIES, silence_s=timeout_s)) as connection:
        return _ask(connection, request, Hosts).hosts


def end_launch(home: Path, launch: str, *, timeout_s: float = 5.0) -> str:
    """End a launch, named by its id or its job; return its id.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
        UsageError: The agent knows no such launch.
    """
    with closing(AgentConnection(home, LAUNCH_REPLIES, silence_s=timeout_s)) as connection:
        return _ask(connection, EndLaunch(launch), LaunchEnding).launch


def fetch_files(home: Path, request: FetchFiles, *, timeout_s: float = 86400.0) -> Fetched:
    """Return what ranks have written into their copies; contents are put into the agent's store.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or did not answer in time.
        UsageError: The launch has no copies, or was not started here.
    """
    with closing(AgentConnection(home, LAUNCH_REPLIES, silence_s=timeout_s)) as connection:
        return _ask(connection, request, Fetched)


def stop_agent(home: Path, *, timeout_s: float = 10.0) -> int:
    """Make the agent of this home leave the mesh; return its pid when it has left.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent did not answer, or did not leave, within `timeout_s`.
    """
    with closing(AgentConnection(home, CONTROL_REPLIES, silence_s=timeout_s)) as connection:
        stopping = _ask(connection, StopAgent(), Stopping)
        connection.await_end()  # closing it is the last thing that the agent does
    return stopping.pid


def _ask(
    connection: AgentConnection[SessionMessage], request: SessionMessage, wanted: type[ReplyT]
) -> ReplyT:
    connection.send(request)
    return _await(connection, wanted)


def _await(connection: AgentConnection[SessionMessage], wanted: type[ReplyT]) -> ReplyT:
    reply = connection.receive()
    if isinstance(reply, Refused):
        raise error_of(reply.verdict)
    if not isinstance(reply, wanted):
        raise ProtocolError(
            f"the agent at {connection.path} answered with {type(reply).__name__}, "
            f"not {wanted.__name__}"
        )
    return reply
