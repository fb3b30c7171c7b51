"""Messages of the sessions of `pmesh status`, `events`, `ping`, `allow` and `down`."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from pmesh.core.values import MAX_MEMBERS, Name
from pmesh.core.wire.session import Refused, SessionDecoder, SessionMessage
from pmesh.ids import PRINTABLE


class AskStatus(SessionMessage, frozen=True, tag="ask_status"):
    """Requests the agent's status; answered by Status."""


class AskEvents(SessionMessage, frozen=True, tag="ask_events"):
    """Requests the agent's events; answered by Events."""

    after: Annotated[int, Meta(ge=-1, le=2**48)]
    """The number of the last event that the caller has; -1 for all that are kept."""


class AskPing(SessionMessage, frozen=True, tag="ask_ping"):
    """Requests to try every way to a machine; answered by Refused, or WayTrieds and Pinged."""

    name: Annotated[str, Meta(max_length=256, pattern=PRINTABLE)]
    """Of the machine, as in the view."""


class AskMachines(SessionMessage, frozen=True, tag="ask_machines"):
    """Asks whose these names are; answered by Refused or Machines."""

    names: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    """Each is the name of a machine, its id, or the first 8 or more characters of that."""


class ForgetName(SessionMessage, frozen=True, tag="forget_name"):
    """Lets a machine have a name that was another one's; answered by Refused or Machines."""

    name: Name


class StopAgent(SessionMessage, frozen=True, tag="stop_agent"):
    """Asks the agent to leave the mesh and end; answered by Stopping, then end of file."""


class StatusReply(SessionMessage, frozen=True, tag="status"):
    """The agent's status, as the JSON that `pmesh status --json` prints."""

    json: bytes


class AgentEvents(SessionMessage, frozen=True, tag="events"):
    """The agent's events, as the JSON that `pmesh events --json` prints."""

    json: bytes


class WayTried(SessionMessage, frozen=True, kw_only=True, tag="way_tried"):
    """One way to the machine has answered, or can't be used."""

    interface: str
    """The local one; "" if it is not known."""
    remote: str = ""
    """The machine's interface; "" if the local one leads to none."""
    kind: str = ""
    """The worse of the kinds of both."""
    address: str = ""
    """HOST:PORT of the machine."""
    speed_mbit_s: int = 0
    """The lower of what both claim; 0 if one does not say."""
    mbit_s: int = 0
    """What was measured in the slower direction; 0 while unknown."""
    rtt_ms: float | None = None
    """None if it has not answered."""
    why_not: str = ""


class Pinged(SessionMessage, frozen=True, kw_only=True, tag="pinged"):
    """All ways have been tried; messages go over this one. Both interfaces are "" if over none."""

    interface: str = ""
    remote: str = ""
    why: str = ""


class Machines(SessionMessage, frozen=True, tag="machines"):
    """The machines that were asked for."""

    ids: tuple[str, ...]
    """Their node ids as text, in the order of the question."""


class Stopping(SessionMessage, frozen=True, tag="stopping"):
    """The agent leaves the mesh and ends."""

    pid: int


ControlRequest: TypeAlias = AskStatus | AskEvents | AskPing | AskMachines | ForgetName | StopAgent
ControlReply: TypeAlias = (
    Refused | StatusReply | AgentEvents | WayTried | Pinged | Machines | Stopping
)
CONTROL_REPLIES: SessionDecoder[ControlReply] = SessionDecoder("reply", ControlReply)
