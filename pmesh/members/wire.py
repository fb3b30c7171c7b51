"""What agents tell each other of members, and what programs ask of them."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from pmesh.core.identity.removals import MAX_REMOVALS
from pmesh.core.identity.rotations import MAX_ROTATION_BYTES, Rotation
from pmesh.core.values import MAX_MEMBERS, Name, Removal, Version
from pmesh.core.wire.channels import Channel, Message
from pmesh.core.wire.session import Refused, SessionDecoder, SessionMessage

MAX_REMOVALS_BYTES = 64 * 1024  # 256 of 150 bytes take 38 KiB


class TellRemovals(Message, frozen=True, tag=60):
    """All removals that the sender knows; sent on each new link, and when there are others."""

    channel = 8
    most_bytes = MAX_REMOVALS_BYTES
    version: Version
    """Of the sender's pmesh."""
    removals: Annotated[tuple[Removal, ...], Meta(max_length=MAX_REMOVALS)]


class TellRotation(Message, frozen=True, tag=61):
    """By which rotation the sender has its mesh key; sent on each new link, and when it changes."""

    channel = 8
    most_bytes = MAX_ROTATION_BYTES
    rotation: Rotation


MembersMessage: TypeAlias = TellRemovals | TellRotation
MEMBERS: Channel[MembersMessage] = Channel(TellRemovals.channel, MembersMessage)


class AskMembers(SessionMessage, frozen=True, tag="ask_members"):
    """Asks who has a place in the mesh; answered by MemberRows."""


class RemoveMachine(SessionMessage, frozen=True, tag="remove_machine"):
    """Shuts a machine out, or lets it in again; answered by Refused or MachineTold."""

    name: Name
    """Of the machine, or its id, or the first 8 or more characters of that."""
    out: bool
    """False: let it in again."""


class RotateKey(SessionMessage, frozen=True, tag="rotate_key"):
    """Gives the mesh a new key; answered by Refused or KeyRotated."""

    without: Annotated[tuple[Name, ...], Meta(max_length=MAX_MEMBERS)] = ()
    """Machines that are removed, by name or id."""


class MemberRow(SessionMessage, frozen=True, kw_only=True):
    """One machine of `pmesh members`. Times are Unix seconds, by the clock of the machine asked."""

    id: str
    name: str
    state: str
    """`here`, `away` or `removed`."""
    version: str
    """Of pmesh; "" if it is not known."""
    first_seen: float
    last_seen: float
    removed_by: str | None = None
    """The machine that removed it."""
    me: bool = False
    """True for the machine that was asked."""


class MemberRows(SessionMessage, frozen=True, tag="member_rows"):
    """The machines of the mesh, those that are here first."""

    rows: tuple[MemberRow, ...]


class MachineTold(SessionMessage, frozen=True, tag="machine_told"):
    """The removal counts here, and was sent to all that are linked."""

    name: str
    """Of the machine that was removed, or let in again."""
    told: tuple[str, ...]
    """The machines that are here."""
    away: tuple[str, ...]
    """Members that learn it once they are back."""
    unwritten: str = ""
    """Why it is not on the disk of the machine that was asked, which tries again."""


class KeyRotated(SessionMessage, frozen=True, tag="key_rotated"):
    """The new key is in use here, and was sent to all members that are linked."""

    told: tuple[str, ...]
    """The machines that are here."""
    away: tuple[str, ...]
    """Members that get the key once they are back."""
    removed: tuple[str, ...]
    """Machines that get no key."""
    given: bool
    """True if this agent was started with a key of `PMESH_KEY` or of a file: an old one now."""


MembersQuestion: TypeAlias = AskMembers | RemoveMachine | RotateKey
MembersReply: TypeAlias = Refused | MemberRows | MachineTold | KeyRotated
MEMBERS_REPLIES: SessionDecoder[MembersReply] = SessionDecoder("reply", MembersReply)
