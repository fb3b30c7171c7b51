"""`pmesh invite`: shows a code, and says what has become of it."""

from contextlib import closing
from pathlib import Path
from typing import Final, assert_never

from pmesh.client.control import await_reply
from pmesh.client.session.connection import AgentConnection, error_of
from pmesh.core.wire.session import Refused
from pmesh.errors import AgentStopped
from pmesh.home_paths import home_directory
from pmesh.invites.wire import (
    INVITATION_REPLIES,
    InvitationOver,
    InvitationReply,
    Invite,
    Invited,
)
from pmesh.terminal.lines import complain, say

ANSWER_S: Final = 5.0
SLACK_S: Final = 30.0  # the agent tells of the end, which an exchange may delay


def show_invitation(home: Path | None) -> int:
    """Show a code until a machine has joined by it, and return 0; 1 if none has.

    Raises:
        AgentNotRunning: Nobody listens at the socket of this home.
        AgentStopped: The agent ended.
        UsageError: Another code is open, or the hour has had its codes.
    """
    directory = home_directory(home)
    with closing(AgentConnection(directory, INVITATION_REPLIES, silence_s=ANSWER_S)) as connection:
        connection.send(Invite())
        invited = await_reply(connection, Invited)
        try:
            say(
                f"On the other machine, type within {invited.lasts_s / 60:g} minutes:",
                "",
                f"    pmesh join {invited.code}",
                "",
                "The code is good for one try. Ctrl-C withdraws it.",
            )
            return _tell(_await_end(connection, invited.lasts_s + SLACK_S))
        except KeyboardInterrupt:
            complain("the code is withdrawn")
            raise


def _await_end(connection: AgentConnection[InvitationReply], timeout_s: float) -> InvitationOver:
    reply = connection.receive_within(timeout_s)
    if isinstance(reply, Refused):
        raise error_of(reply.verdict)
    if not isinstance(reply, InvitationOver):
        raise AgentStopped(f"the agent at {connection.path} does not answer")
    return reply


def _tell(over: InvitationOver) -> int:
    who = f"{over.name} at {over.host}"
    match over.outcome:
        case "joined":
            say(f"{over.name} has joined: it is here as soon as 'pmesh up' runs there")
            return 0
        case "key sent":
            say(
                f"{who} was sent the mesh key, and did not say that it has stored it; if it says "
                "so there, type there: pmesh up"
            )
            return 0
        case "wrong code":
            complain(
                f"somebody tried a wrong code: {who}. If that was you, type here again: "
                "pmesh invite. If not, somebody on this network tries to get in; the code is "
                "void, and nothing was given away"
            )
        case "broken off":
            complain(
                f"{who} tried the code and broke off, so it is void; type here again: pmesh invite"
            )
        case "expired":
            complain("nobody has used the code, and it is void now; a new one: pmesh invite")
        case _:
            assert_never(over.outcome)
    return 1
