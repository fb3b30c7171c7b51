"""Questions about launches to the local agent, with their answers."""

from contextlib import closing
from pathlib import Path

from pmesh.client.control import ask, await_reply
from pmesh.client.session.connection import AgentConnection
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


def ask_launches(home: Path, *, timeout_s: float = 5.0) -> tuple[LaunchRow, ...]:
    """Return the launches that the agent of this home has started or runs, the latest first.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
    """
    rows: list[LaunchRow] = []
    with closing(AgentConnection(home, LAUNCH_REPLIES, silence_s=timeout_s)) as connection:
        some = ask(connection, AskLaunches(), LaunchRows).rows
        while some:
            rows += some
            some = await_reply(connection, LaunchRows).rows
    return tuple(rows)


def ask_hosts(home: Path, request: AskHosts, *, timeout_s: float = 5.0) -> tuple[LaunchHost, ...]:
    """Return the machines on which ranks would run, in the order of the ring.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
        UsageError: A machine is not there, or has no IPv4 address.
    """
    with closing(AgentConnection(home, LAUNCH_REPLIES, silence_s=timeout_s)) as connection:
        return ask(connection, request, Hosts).hosts


def end_launch(home: Path, launch: str, *, timeout_s: float = 5.0) -> str:
    """End a launch, named by its id or its job; return its id.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
        UsageError: The agent knows no such launch.
    """
    with closing(AgentConnection(home, LAUNCH_REPLIES, silence_s=timeout_s)) as connection:
        return ask(connection, EndLaunch(launch), LaunchEnding).launch


def fetch_files(home: Path, request: FetchFiles, *, timeout_s: float = 86400.0) -> Fetched:
    """Return what ranks have written into their copies; contents are put into the agent's store.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or did not answer in time.
        UsageError: The launch has no copies, or was not started here.
    """
    with closing(AgentConnection(home, LAUNCH_REPLIES, silence_s=timeout_s)) as connection:
        return ask(connection, request, Fetched)
