"""Messages about launches: commands that one machine asks others to run.

Between agents they travel on the link, so the sender is the node that TLS has proven; a launch
belongs to the node that asked for it first. Between `pmesh run` and its agent they travel on the
Unix socket.
"""

from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import MAX_MEMBERS, MAX_TRAINERS, Job, Name
from pmesh.core.wire.channels import Channel, Message
from pmesh.core.wire.session import Refused, SessionDecoder, SessionMessage
from pmesh.core.wire.stream import PART_BYTES, Part
from pmesh.ids import MAX_NAME, PRINTABLE, NodeId, PathName
from pmesh.launches.wire.engines import Backend, Engine
from pmesh.launches.wire.tree import MAX_ENTRIES, MAX_PATH, MAX_TREE_BYTES, Sha256

MAX_COMMAND_TEXT = 32 * 1024
MAX_COMMAND_WORDS = 1024
MAX_VARIABLES = 256
MAX_PORTS = 64  # of the ranks of one machine
MAX_JOB_NAME = 64
MAX_RESTARTS = 10**6
MAX_TERM_S = 86400
MAX_SHOWN_FILES = 5


LaunchId: TypeAlias = Annotated[PathName, Meta(max_length=12, pattern=r"^[0-9a-f]{12}\Z")]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_COMMAND_TEXT, pattern=r"^[^\x00]*\Z")]
"""Anything that may be an argument of a program, line breaks included."""
VariableName: TypeAlias = Annotated[str, Meta(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
Sentence: TypeAlias = Annotated[str, Meta(max_length=4096, pattern=PRINTABLE)]
SignalNumber: TypeAlias = Literal[1, 2, 9, 15]
"""SIGHUP, SIGINT, SIGKILL, SIGTERM: the same numbers on Linux and macOS."""
Failure: TypeAlias = Literal["at once", "in a fixed job", "no more"]
"""How a rank fails: in its first run, before it has completed an op; in a job that nobody can enter
while it runs; or not any more, as it has completed an op since."""
StreamName: TypeAlias = Literal["ranks", "files", "new files"]
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_Rank = Annotated[int, Meta(ge=0, le=MAX_TRAINERS - 1)]
_RankOrNone = Annotated[int, Meta(ge=-1, le=MAX_TRAINERS - 1)]
_Node = Annotated[NodeId, Meta(min_length=32, max_length=32)]
_Seconds = Annotated[float, Meta(ge=0, le=MAX_TERM_S)]
_Port = Annotated[int, Meta(ge=1, le=65535)]

Host: TypeAlias = Annotated[
    str, Meta(max_length=15, pattern=r"^([0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3})?\Z")
]
"""An IPv4 address; "" for none. It becomes part of environments, so it can be nothing else."""
Interface: TypeAlias = Annotated[str, Meta(max_length=15, pattern=r"^[A-Za-z0-9_.-]*\Z")]
"""The name of a network interface, as long as systems allow (IFNAMSIZ); "" for none."""


class Variable(NamedTuple):
    """One variable of an environment."""

    name: VariableName
    value: Text


Variables: TypeAlias = Annotated[tuple[Variable, ...], Meta(max_length=MAX_VARIABLES)]


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """The content of a file, or of a package with all of its modules."""

    path: Text
    """Relative to the working directory, or absolute."""
    sha256: Annotated[str, Meta(max_length=64, pattern=r"^[0-9a-f]{64}\Z")]


class TreeName(msgspec.Struct, frozen=True, array_like=True):
    """The directory that all machines are to run in, by the hash of its encoded tree."""

    sha256: Sha256
    nbytes: Annotated[int, Meta(ge=1, le=MAX_TREE_BYTES)]


class Command(msgspec.Struct, frozen=True, array_like=True):
    """What each rank runs."""

    words: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_COMMAND_WORDS)]
    cwd: Text
    """A path that begins with `~/` lies in the home directory of each machine's user."""
    variables: Variables = ()
    """Of `--env`."""
    python: Name = ""
    """The version, such as 3.13, that the first word must be; "" if it is no Python."""
    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_COMMAND_WORDS)] = ()
    """What must be the same on each machine."""
    tree: TreeName | None = None
    """What each machine is to have a copy of and run in, instead of `cwd`."""


class LaunchTerms(msgspec.Struct, frozen=True, array_like=True):
    """How ranks are started again and ended."""

    engine: Engine = "pmesh"
    restarts: Annotated[int, Meta(ge=0, le=MAX_RESTARTS)] = 10
    grace_s: _Seconds = 3.0
    """Between a signal and SIGKILL."""
    detach: bool = False
    """False: all ends with the starter."""
    hang_timeout_s: _Seconds = 0.0
    """Without a line from any rank for so long, all are started again; 0 for never."""
    backend: Backend | None = None
    """What answers for gloo and nccl, if a script asks torch for them; None for themselves."""


# --- between two agents


class LaunchMessage(Message, frozen=True):
    """A message between two agents about one launch."""

    channel = 7
    launch: LaunchId


class PrepareLaunch(LaunchMessage, frozen=True, tag=40):
    """Asks whether the receiver can and may run the command; answered by LaunchPrepared."""

    job: Job
    command: Command
    terms: LaunchTerms
    seat: Annotated[int, Meta(ge=0, le=MAX_MEMBERS - 1)]
    """Of the receiver, in `nodes`."""
    nodes: Annotated[tuple[_Node, ...], Meta(max_length=MAX_MEMBERS)]
    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_MEMBERS)]
    ranks: Annotated[int, Meta(ge=1, le=MAX_PORTS)]
    """How many the receiver is to run."""


class WayTo(msgspec.Struct, frozen=True, array_like=True):
    """How the sender reaches another machine over the best path."""

    node: _Node
    host: Host
    """Of the other machine."""
    interface: Interface
    """The sender's own."""


class LaunchPrepared(LaunchMessage, frozen=True, tag=41):
    """Nothing has been started yet."""

    refusal: Sentence = ""
    """Why the sender does not run the command; "" if it does."""
    ports: Annotated[tuple[_Port, ...], Meta(max_length=2 * MAX_PORTS)] = ()
    """TCP ports that are free: two for each rank."""
    ways: Annotated[tuple[WayTo, ...], Meta(max_length=MAX_MEMBERS)] = ()
    offset: _Count = 0
    """Where the sender's direction of the stream begins."""


class RankGroup(msgspec.Struct, frozen=True, array_like=True):
    """The ranks of one machine, and where an engine finds them."""

    count: Annotated[int, Meta(ge=1, le=MAX_PORTS)]
    host: Host = ""
    """Where the machine of the group before reaches this one."""
    ports: Annotated[tuple[_Port, ...], Meta(max_length=MAX_PORTS)] = ()
    """Where each of its ranks may listen."""
    interfaces: Annotated[tuple[Interface, ...], Meta(max_length=MAX_MEMBERS)] = ()
    """Of this machine, by the group to which they lead; "" to itself."""


class BeginRanks(LaunchMessage, frozen=True, tag=42):
    """Every machine has agreed: start the ranks.

    The receiver makes their environment of these facts by itself: the message has no variables.
    """

    generation: _Count
    group: Annotated[int, Meta(ge=0, le=MAX_MEMBERS - 1)]
    """The receiver's, in `groups`."""
    groups: Annotated[tuple[RankGroup, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    """Ranks count through them. With the engine `pmesh` they may have only their counts."""
    first_host: Host = ""
    """Where the receiver reaches the machine of rank 0."""


class SignalRanks(LaunchMessage, frozen=True, tag=43):
    """Ends the receiver's ranks: the signal, and SIGKILL after the grace."""

    number: SignalNumber


class RankEnded(LaunchMessage, frozen=True, tag=44):
    """A rank has ended and is not started again by the sender; all of its output was sent."""

    generation: _Count
    rank: _Rank
    code: Annotated[int, Meta(ge=-64, le=255)]
    """Minus the number of a signal, as in `subprocess`."""
    number: _RankOrNone = -1
    """Its `mesh.rank`, as long as it had one; -1 if it never had."""


class RankFails(LaunchMessage, frozen=True, tag=53):
    """A rank has failed, and its machine starts it again soon; or it works again."""

    generation: _Count
    rank: _Rank
    how: Failure
    number: _RankOrNone = -1
    """As in `RankEnded`."""


class GiveUpRank(LaunchMessage, frozen=True, tag=54):
    """The starter does not want a rank that fails to be started again; answered by RankEnded."""

    generation: _Count
    rank: _Rank


class LaunchPart(LaunchMessage, frozen=True, tag=45):
    """A part of a stream between the starter and a machine (`pmesh.core.wire.stream`).

    The stream `ranks` brings the output of the machine's ranks to the starter, as
    `pmesh.launches.rules.lines` writes it, and standard input to the machine with rank 0. The other
    streams bring the contents that were asked for, one after the other: `files` those of AskFiles
    to a machine, `new files` those of AskNewContents to the starter. There, acknowledgements are
    also repeated as a sign of life.
    """

    offset: _Count
    read: _Count
    data: Annotated[bytes, Meta(max_length=PART_BYTES)] = b""
    ends: bool = False
    to_starter: bool = False
    """A machine may be both ends of a stream."""
    stream: StreamName = "ranks"
    number: _Count = 0
    """Of the question for files."""

    @property
    def part(self) -> Part:
        return Part(self.offset, self.read, self.data, self.ends)


class StopLaunch(LaunchMessage, frozen=True, tag=49):
    """`pmesh stop` on a machine that takes part; the receiver is the starter."""


class AskFiles(LaunchMessage, frozen=True, tag=50):
    """Before LaunchPrepared: the sender lacks files. The starter sends them as a stream."""

    pull: _Count
    """The number of this question; a new one takes the place of the last one."""
    wanted: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MAX_ENTRIES - 1)], ...], Meta(max_length=MAX_ENTRIES)
    ] = ()
    """Indices of contents of the tree, ascending; empty for the tree itself."""


class NewFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that ranks have written into the copy in which they run."""

    path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH)]
    nbytes: _Count


class AskNewFiles(LaunchMessage, frozen=True, tag=55):
    """The sender has started the launch: what have its ranks written into the receiver's copy?"""

    number: _Count
    """Of the question, repeated in all that follows from it."""
    contents: bool = False
    """True: it is to be fetched, so the receiver makes a tree of it."""


class NewFiles(LaunchMessage, frozen=True, tag=56):
    """The answer. Without a refusal and without a count there is no copy of that launch."""

    number: _Count
    refusal: Sentence = ""
    count: Annotated[int, Meta(ge=-1, le=MAX_ENTRIES)] = -1
    nbytes: _Count = 0
    """Of all of them."""
    shown: Annotated[tuple[NewFile, ...], Meta(max_length=MAX_SHOWN_FILES)] = ()
    """The first ones."""
    tree: TreeName | None = None
    left_out: Sentence = ""
    """Which files can't be sent, and why."""


class AskNewContents(LaunchMessage, frozen=True, tag=57):
    """As AskFiles, for the tree of the last NewFiles."""

    number: _Count
    wanted: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MAX_ENTRIES - 1)], ...], Meta(max_length=MAX_ENTRIES)
    ] = ()


NewFilesMessage: TypeAlias = AskNewFiles | NewFiles | AskNewContents
AnyLaunchMessage: TypeAlias = (
    PrepareLaunch
    | LaunchPrepared
    | BeginRanks
    | SignalRanks
    | RankEnded
    | RankFails
    | GiveUpRank
    | LaunchPart
    | StopLaunch
    | AskFiles
    | NewFilesMessage
)
LAUNCHES: Channel[AnyLaunchMessage] = Channel(LaunchMessage.channel, AnyLaunchMessage)


# --- between a local program and its agent


LaunchText: TypeAlias = Annotated[
    str, Meta(max_length=MAX_JOB_NAME + 1 + MAX_NAME, pattern=PRINTABLE)
]
"""How a launch is named: ID, or ID@MACHINE for that of one starter, or the latest of a JOB."""


class Launch(SessionMessage, frozen=True, tag="launch"):
    """Starts a command; answered by Refused, or LaunchBegan and then as FollowLaunch."""

    job: Annotated[str, Meta(max_length=MAX_JOB_NAME, pattern=PRINTABLE)]
    """"" for the id of the launch."""
    command: Command
    terms: LaunchTerms
    on: Annotated[tuple[Name, ...], Meta(max_length=MAX_MEMBERS)] = ()
    """What stood between the commas: names of machines, ids, or their first 8 or more characters.
    Empty for all machines."""
    count: Annotated[int, Meta(ge=0, le=MAX_TRAINERS)] = 0
    """How many ranks in all; 0 for `per_node` on each machine."""
    per_node: Annotated[int, Meta(ge=1, le=MAX_PORTS)] = 1


class SignalLaunch(SessionMessage, frozen=True, tag="signal_launch"):
    """Passes a signal on to all ranks; they are killed after the grace, or by a second one."""

    number: SignalNumber


class LaunchInput(SessionMessage, frozen=True, tag="launch_input"):
    """Standard input for rank 0; answered by LaunchInputTaken."""

    data: Annotated[bytes, Meta(max_length=PART_BYTES)]


class FollowLaunch(SessionMessage, frozen=True, tag="follow_launch"):
    """Asks for the output of a launch; answered by LaunchBegan, LaunchLines and LaunchOver."""

    launch: LaunchText
    follow: bool = False


class AskLaunches(SessionMessage, frozen=True, tag="ask_launches"):
    """Requests what this agent has started or runs; answered by Launches, again and again."""


class AskHosts(SessionMessage, frozen=True, tag="ask_hosts"):
    """Asks where ranks would run, as `Launch` has it; answered by Refused or Hosts."""

    on: Annotated[tuple[Name, ...], Meta(max_length=MAX_MEMBERS)] = ()
    count: Annotated[int, Meta(ge=0, le=MAX_TRAINERS)] = 0
    per_node: Annotated[int, Meta(ge=1, le=MAX_PORTS)] = 1


class EndLaunch(SessionMessage, frozen=True, tag="end_launch"):
    """Ends a launch everywhere; answered by Refused or LaunchEnding."""

    launch: LaunchText


class FilesSent(msgspec.Struct, frozen=True):
    """How much of the files that a machine lacks it has by now."""

    name: str
    nbytes: int
    total: int


class LaunchSends(SessionMessage, frozen=True, tag="launch_sends"):
    """Repeated before LaunchBegan, while files are sent."""

    machines: tuple[FilesSent, ...]


class LaunchBegan(SessionMessage, frozen=True, tag="launch_began"):
    """Every machine has agreed."""

    launch: str
    job: str
    names: tuple[str, ...]
    """Of the machines; a line of output has the index of its machine."""
    counts: tuple[int, ...]
    """How many ranks each runs, as far as this agent knows."""
    ids: tuple[str, ...]
    """Their node ids, as text."""


class LaunchLines(SessionMessage, frozen=True, tag="launch_lines"):
    """Output, as `pmesh.launches.rules.lines` writes it."""

    data: bytes


class LaunchInputTaken(SessionMessage, frozen=True, tag="launch_input_taken"):
    """More input may be sent."""


class LaunchOver(SessionMessage, frozen=True, tag="launch_over"):
    """All output has been sent."""

    code: int
    """-1 if it goes on."""


class LaunchRow(msgspec.Struct, frozen=True):
    """One launch, in `pmesh ps`."""

    launch: str
    """As it is named: by its id, and its starter if another one has taken the same id."""
    job: str
    command: str
    starter: str
    """The name of the machine that has started it."""
    here: bool
    """True if that is this machine."""
    machines: tuple[str, ...]
    state: str
    age_s: float
    code: int | None


class LaunchRows(SessionMessage, frozen=True, tag="launches"):
    """Some of them, the latest first; a message without rows is the last one."""

    rows: tuple[LaunchRow, ...]


class LaunchHost(msgspec.Struct, frozen=True):
    """One machine, as it is reached from here over the best path."""

    name: str
    host: str
    """An IPv4 address."""
    ranks: int


class Hosts(SessionMessage, frozen=True, tag="hosts"):
    """In the order of the ring."""

    hosts: tuple[LaunchHost, ...]


class FetchFiles(SessionMessage, frozen=True, tag="fetch_files"):
    """Asks for what ranks have written into their copies; answered by Refused or Fetched."""

    launch: LaunchText
    contents: bool = False
    """False: only names and sizes."""
    most_bytes: Annotated[int, Meta(ge=0, le=2**62)] = 0
    """How much may be fetched from one machine."""


class FetchedFiles(msgspec.Struct, frozen=True):
    """What one machine has; with contents, these are in the store of this agent."""

    name: str
    id: str
    """Of the node, as text."""
    refusal: str = ""
    count: int = 0
    nbytes: int = 0
    shown: tuple[NewFile, ...] = ()
    tree: TreeName | None = None
    left_out: str = ""


class Fetched(SessionMessage, frozen=True, tag="fetched"):
    """Of all machines that have a copy, or should have."""

    launch: str
    machines: tuple[FetchedFiles, ...]


class LaunchEnding(SessionMessage, frozen=True, tag="launch_ending"):
    """The ranks are being ended."""

    launch: str


LaunchQuestion: TypeAlias = Launch | FollowLaunch | FetchFiles | AskLaunches | AskHosts | EndLaunch
LaunchReply: TypeAlias = (
    Refused
    | LaunchSends
    | LaunchBegan
    | LaunchLines
    | LaunchInputTaken
    | LaunchOver
    | LaunchRows
    | Hosts
    | Fetched
    | LaunchEnding
)
LAUNCH_REQUESTS: SessionDecoder[SignalLaunch | LaunchInput] = SessionDecoder(
    "request", SignalLaunch | LaunchInput
)
LAUNCH_REPLIES: SessionDecoder[LaunchReply] = SessionDecoder("reply", LaunchReply)
