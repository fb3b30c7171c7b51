"""Asks the local agent for its launches."""

from contextlib import closing
from pathlib import Path

from pmesh.client.control import await_reply
from pmesh.client.session.connection import AgentConnection
from pmesh.launches.wire.messages import LAUNCH_REPLIES, AskLaunches, LaunchRow, LaunchRows


def ask_launches(home: Path, *, timeout_s: float = 5.0) -> tuple[LaunchRow, ...]:
    """Return the launches that the agent of this home has started or runs, the latest first.

    Raises:
        AgentNotRunning: Nobody listens at its socket.
        AgentStopped: The agent ended, or stayed silent for `timeout_s`.
    """
    rows: list[LaunchRow] = []
    with closing(AgentConnection(home, LAUNCH_REPLIES, silence_s=timeout_s)) as connection:
        connection.send(AskLaunches())
        while some := await_reply(connection, LaunchRows).rows:
            rows += some
    return tuple(rows)
