"""Control messages between two agents on a link.

They are MessagePack arrays, tagged by a short number; msgspec validates them as it decodes. They
are handled by `pmesh.core.views.agreement` (views), `pmesh.agent.lanes.rendezvous` (lanes),
`pmesh.agent.store.stores` (jobs' stores), `pmesh.agent.launches` (launches) and
`pmesh.net.links.path` (Hello).

Each kind of message has a bound in bytes, `bound_of`. What others have said goes into our messages,
so each part that one member may fill is small enough for all of them to fit. `encode` refuses a
message beyond its bound: that is our error, and must not look like the receiver's peer's.
"""

from typing import Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import (
    MAX_JOBS,
    MAX_MEMBERS,
    MAX_TRAINERS,
    MAX_VIEW_BYTES,
    Id,
    Ids,
    Job,
    Name,
    Op,
    RosterNumber,
    SignedName,
    Terms,
    Verdict,
    View,
)
from pmesh.core.wire.launches import AnyLaunchMessage
from pmesh.core.wire.probes import AskProbe, Ping, Pong, Probe
from pmesh.errors import ProtocolError
from pmesh.ids import Epoch, Incarnation, Member, NodeId, Slot

PROTOCOL_VERSION = 14

EAGER_BYTES = 16 * 1024  # a token's activations of the largest open models
MAX_MESSAGE_BYTES = 256 * 1024  # 0.2 s at 10 Mbit/s: heartbeats behind it are not late
MAX_HELLO_BYTES = 16 * 1024  # 64 addresses and interfaces take 8 KiB; each peer passes it on

MAX_RELAYED_BYTES = 16 * 1024  # one TLS record
MAX_ADDRESSES = 64  # of one machine; a Mac with every port in use has about ten
MAX_STORE_PART_BYTES = 32 * 1024  # heartbeats go between the parts: 26 ms at 10 Mbit/s
MAX_ENTRIES = 1024  # entries of any kind about one member's own jobs in one message
MAX_WAITING = 128  # trainers of one member: as many as an agent serves
MAX_REQUESTS_BYTES = 64 * 1024  # of one member's view requests: 400 with the usual texts
MAX_PRIMARIES = MAX_JOBS + 32  # of the view's jobs, and of those that a member dropped out of

_OpOrNone = Annotated[int, Meta(ge=-1, le=2**62)]
_Cost = Annotated[int, Meta(ge=0, le=1000)]  # sixteenths of an octave: 992 for 2^62 microseconds
_CostRow = Annotated[tuple[_Cost, ...], Meta(max_length=MAX_MEMBERS)]
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_Microseconds = Annotated[int, Meta(ge=0, le=2**62)]
_Seats = Annotated[tuple[Member, ...], Meta(max_length=MAX_MEMBERS)]
_Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Index = Annotated[int, Meta(ge=0, le=MAX_TRAINERS - 1)]
"""A rank in a call: a job has at most 1024."""
_Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=64)]
"""numpy supports at most 64 dimensions; no processor can address 2^48 values."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    most_bytes: ClassVar[int] = MAX_MESSAGE_BYTES
    """The bound: smaller for what contains others' values, so that it fits whatever they say."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """An address at which an agent can be dialled."""

    host: Annotated[str, Meta(max_length=255)]
    """An IP address (IPv6 with its scope, if it has one) or a host name."""
    port: Annotated[int, Meta(ge=1, le=65535)]

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PeerInterface(msgspec.Struct, frozen=True, array_like=True):
    """A network interface of the sender's, for paths between two machines."""

    name: Name
    kind: Name
    """As in `pmesh.core.links.addresses`; a later version may know others."""
    speed_mbit_s: Annotated[int, Meta(ge=0, le=2**32)]
    """As the system says; 0 if it does not."""
    hosts: Annotated[
        tuple[Annotated[str, Meta(max_length=255)], ...], Meta(max_length=MAX_ADDRESSES)
    ]
    """IP addresses without a scope."""


class Hello(_Message, frozen=True, tag=1):
    """The first message on a path, from both sides."""

    most_bytes = MAX_HELLO_BYTES
    protocol: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    member: Member
    said: SignedName
    """The user's name for the machine."""
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)] = ()
    """The addresses at which others can dial the sender."""
    interfaces: Annotated[tuple[PeerInterface, ...], Meta(max_length=MAX_ADDRESSES)] = ()
    link: _Count = 0
    """The number that the sender gives to its link with the receiver. Two paths are of one link if
    both numbers are the same."""

    @property
    def name(self) -> str:
        """What the machine calls itself; others may say the same."""
        return self.said.name


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The call of an op by one rank; all ranks must make the same call (I5, O8)."""

    kind: Name
    dtype: Name
    shape: _Shape
    reduction: Name = ""
    root: Annotated[int, Meta(ge=-1, le=MAX_TRAINERS - 1)] = -1
    compression: Name = ""
    tree: Name = ""
    """For a bucket of a tree: a digest of all its paths, shapes and dtypes, because different
    trees may have buckets of the same size (I5)."""
    receivers: Annotated[tuple[_Index, ...], Meta(max_length=MAX_TRAINERS)] = ()
    """In a broadcast: the ranks that lack the root's values; if empty, all but the root."""
    strategy: Name = ""
    """The strategy of an all-reduce, from `pmesh.core.ops.cost`; if empty, the costs decide."""

    def __str__(self) -> str:
        words = [
            word for word in (self.reduction, self.compression, self.strategy, self.tree) if word
        ]
        words += [f"root={self.root}"] * (self.root >= 0)
        words += [f"to={self.receivers}"] * bool(self.receivers)
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.kind}({', '.join([self.dtype, shape, *words])})"


class OpReport(msgspec.Struct, frozen=True, array_like=True):
    """One rank's report on an op that is not yet stable."""

    op: Op
    call: Call
    completed: bool = False
    verdict: Verdict | None = None
    contributors: Ids = ()
    """As in `OpOutcome`, once it has ended."""
    holds: bool = True
    """True if a rank that completed the op has its result; a broadcast sends it only to some."""
    is_root: bool = False
    """True for the root of a broadcast, which has the result from the start."""


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """The flush answer's part for one rank of a job (V3)."""

    trainer: Id
    stable: _OpOrNone
    """Every op up to this one has ended at all ranks; -1 before the first."""
    ops: Annotated[tuple[OpReport, ...], Meta(max_length=MAX_ENTRIES)]
    sends_to: Annotated[tuple[Id, ...], Meta(max_length=MAX_TRAINERS)] = ()
    """The ranks to which it holds an open lane (V4)."""
    receives_from: Annotated[tuple[Id, ...], Meta(max_length=MAX_TRAINERS)] = ()
    """The ranks from which it holds an open lane."""


class JobReport(msgspec.Struct, frozen=True, array_like=True):
    """The flush answer's part for one job: its identity, and each local rank's ops."""

    job: Job
    born: Epoch
    number: RosterNumber
    fenced: bool
    """True if nothing of this roster number reaches a trainer any more."""
    ranks: Annotated[tuple[RankReport, ...], Meta(max_length=MAX_TRAINERS)]


class RankProgress(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a rank, in every heartbeat: the stable mark follows from these (O2)."""

    job: Job
    number: RosterNumber
    trainer: Id
    started: _OpOrNone
    """The highest op started; -1 before the first."""
    completed: _OpOrNone
    """Every op up to this one has ended; -1 before the first."""
    fingerprint: Annotated[int, Meta(ge=0)] = 0
    """The fingerprint of the call of op `started` (O8), 0 for none; compared even without data."""
    synced: _OpOrNone = -1
    """The last op that was a `sync`, in which others may enter (O6); -1 before the first."""
    stopped: bool = False
    """True if the trainer's process is stopped, as by SIGSTOP, and not just busy."""
    step: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """`mesh.step` of the last `sync`; 0 before the first."""
    own_percent: Annotated[int, Meta(ge=-1, le=100)] = -1
    """The share of its time that the trainer spends outside collective calls; -1 while unknown."""


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """A trainer that waits for its job to begin, or in a `sync` to enter it (O6)."""

    job: Job
    slot: Annotated[Slot, Meta(ge=0, le=2**62)]
    wait_for: Annotated[int, Meta(ge=1, le=MAX_TRAINERS)]
    terms: Terms = Terms()
    place: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """Its rank among those that `pmesh run` has started: 0 where one has typed that; else -1."""


class ViewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to the leader about something that only a view change can settle (O3)."""

    job: Job
    born: Epoch
    number: RosterNumber
    """The roster's number when the view request arose; a higher one has settled it."""
    verdict: Verdict | None
    """The error of the op, or the lost ranks and why. None: the op runs again over new lanes, and
    in a `sync` the waiting trainers enter (O6)."""
    op: _OpOrNone = -1
    """The op concerned; -1 if ranks are lost."""


class KnownPrimary(msgspec.Struct, frozen=True, array_like=True):
    """The last roster of a job with a quorum that the sender knows, perhaps an old one (V10)."""

    job: Job
    born: Epoch
    epoch: Epoch
    in_force: bool = False
    """True if a majority of each set of voters that it needed is known to have installed it."""


RELAYED = -1


class MeasuredEdge(msgspec.Struct, frozen=True, array_like=True):
    """What one end has measured of the edge between two members."""

    round_trip_us: _Microseconds = 0
    """The least that was measured; 0 while unknown."""
    mbit_s: Annotated[int, Meta(ge=RELAYED, le=2**32)] = 0
    """The settled bandwidth from the other end to this one; 0 while unknown, RELAYED if no bytes
    travel directly."""


class Heartbeat(_Message, frozen=True, tag=2):
    """The state of a member. It is self-contained: the next one makes up for a lost one."""

    most_bytes = 160 * 1024  # view requests 64, waiting, progress and in_force 16 + 16 + 45 KiB
    view: Epoch
    promised: Epoch
    flushed: bool
    """True if it promised an epoch and has not yet installed it."""
    acting: bool
    """True if it is the most senior member of its view that it hears."""
    needs_epoch: bool
    """True if its promise is overdue and it requests a new proposal (V6)."""
    heard: Annotated[
        dict[Annotated[Incarnation, Meta(ge=1, le=2**63 - 1)], MeasuredEdge],
        Meta(max_length=MAX_ENTRIES),
    ]
    """The peers that it hears (V5), with what it has measured of the way to each."""
    waiting: Annotated[tuple[Waiting, ...], Meta(max_length=MAX_WAITING)] = ()
    view_requests: Annotated[tuple[ViewRequest, ...], Meta(max_length=MAX_ENTRIES)] = ()
    progress: Annotated[tuple[RankProgress, ...], Meta(max_length=MAX_WAITING)] = ()
    sent_us: _Microseconds = 0
    """The sender's monotonic clock; only the sender interprets it."""
    echo_us: _Microseconds = 0
    """The last `sent_us` from the receiver."""
    held_us: _Microseconds = 0
    """How long ago that was."""
    in_force: Annotated[tuple[KnownPrimary, ...], Meta(max_length=MAX_JOBS)] = ()
    """Rosters of its view that the sender knows to be in force, for peers that missed it (V10)."""
    silent: Annotated[
        tuple[Annotated[Incarnation, Meta(ge=1, le=2**63 - 1)], ...], Meta(max_length=MAX_ENTRIES)
    ] = ()
    """Those of `heard` that have been silent for long, so that the sender vouches for the others
    (V12)."""


class AskView(_Message, frozen=True, tag=3):
    """Requests the view of an epoch that a heartbeat named."""

    epoch: Epoch


class TellView(_Message, frozen=True, tag=4):
    """A view that the sender has installed."""

    most_bytes = MAX_VIEW_BYTES + 16
    view: View


class AskToJoin(_Message, frozen=True, tag=5):
    """Asks the leader of a heavier view to let the sender join."""

    view: Epoch
    whole: bool = False
    """True: only with all of its view, so that no job is split. False: it waited too long."""


class Propose(_Message, frozen=True, tag=6):
    """The leader asks the future members of an epoch to flush."""

    most_bytes = MAX_VIEW_BYTES + 32 * 1024  # 256 jobs, and 64 members twice
    epoch: Epoch
    base: View
    """The view that the leader has installed."""
    members: _Seats
    continuing: _Seats
    """The members that, as far as the leader knows, are of its lineage."""
    jobs: Annotated[tuple[Job, ...], Meta(max_length=MAX_JOBS)]
    """The jobs whose ops must stop; the others run on (V7)."""


class Flushed(_Message, frozen=True, tag=7):
    """A promise to install nothing below this epoch, and to deliver nothing older for its jobs."""

    epoch: Epoch
    said: SignedName
    """The user's name for the sender's machine."""
    view: View
    """The view that the sender has installed."""
    jobs: Annotated[tuple[JobReport, ...], Meta(max_length=MAX_ENTRIES)]
    waiting: Annotated[tuple[Waiting, ...], Meta(max_length=MAX_WAITING)] = ()
    primaries: Annotated[tuple[KnownPrimary, ...], Meta(max_length=MAX_PRIMARIES)] = ()
    """Only of jobs that require a quorum."""


class Refuse(_Message, frozen=True, tag=8):
    """The epoch does not exceed the one that the sender has promised (V1)."""

    epoch: Epoch
    promised: Epoch


class Veto(_Message, frozen=True, tag=9):
    """A member that should be in the proposal, or should lead it, is alive."""

    epoch: Epoch


class Superseded(_Message, frozen=True, tag=10):
    """The receiver's lineage continued without it; this view is the proof."""

    most_bytes = MAX_VIEW_BYTES + 16
    view: View


class Commit(_Message, frozen=True, tag=11):
    """The decided view. The receiver installs it if it promised its epoch (V1)."""

    most_bytes = MAX_VIEW_BYTES + 16 * 1024  # 64 x 64 costs of 3 bytes
    view: View
    costs: Annotated[tuple[_CostRow, ...], Meta(max_length=MAX_MEMBERS)]
    """The costs from which the ring was planned: a row for each member, in sorted order."""


class Leaving(_Message, frozen=True, tag=12):
    """The sender ends cleanly: this is no failure."""


class OfferLane(_Message, frozen=True, tag=20):
    """The sender of data offers a lane, with one key for each direction, used once."""

    lane: Annotated[bytes, Meta(min_length=16, max_length=16)]
    job: Job
    born: Epoch
    number: RosterNumber
    sender: Id
    receiver: Id
    key: _Key
    """Seals the data of the offering side."""
    return_key: _Key
    """Seals the data of the accepting side, which proves that it read this offer."""
    op: Annotated[int, Meta(ge=-(2**62), le=2**62)] = -1
    """-1: an edge of the ring. Below -1: a lane for messages between two ranks. Else the lane
    carries the retained output of this op (O2)."""
    dial: bool = False
    """True if the receiver of this message dials, False if the sender does."""
    several: bool = False
    """True if the lane runs over several connections (`pmesh.core.wire.subflows`)."""


class AskResult(_Message, frozen=True, tag=21):
    """A survivor that missed the end of an op asks a holder for its result (O2)."""

    job: Job
    born: Epoch
    number: RosterNumber
    op: Op
    holder: Id
    receiver: Id


class RestLane(_Message, frozen=True, tag=27):
    """The group of a lane rests: the lane's sender asks to close it until the next op.

    The receiver answers with the same message. It agrees, and has closed its end, unless it has
    started that op.
    """

    job: Job
    born: Epoch
    number: RosterNumber
    sender: Id
    receiver: Id
    agreed: bool | None = None
    """None: this asks."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The description of an array that one rank sends to another, without its values (O4)."""

    tag: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """It matches only a receive with the same tag."""
    dtype: Name
    shape: _Shape
    nbytes: Annotated[int, Meta(ge=0, le=2**48)]


class MessageAddress(msgspec.Struct, frozen=True, array_like=True):
    """The unique address of a message of a job, across all views (O4)."""

    job: Job
    born: Epoch
    sender: Id
    receiver: Id
    sequence: _Count
    """Its number among all messages from this sender to this receiver, from 0, of any tag."""


class ForRanks(_Message, frozen=True):
    """A message between two agents about what ranks send each other or share."""


class P2PLinkMessage(ForRanks, frozen=True):
    """A message between two agents about a point-to-point message."""

    address: MessageAddress


class AnnounceMessage(P2PLinkMessage, frozen=True, tag=23):
    """The sender keeps a message for the receiver; repeated until it is settled."""

    envelope: Envelope
    first: _Count
    """Every message of this pair below this number is settled: delivered or withdrawn."""
    before: _OpOrNone
    """The previous unsettled message of the same tag, to be delivered first; -1 if none."""
    values: Annotated[bytes, Meta(max_length=EAGER_BYTES)] = b""
    """All of the message's, or none."""


class RequestMessage(P2PLinkMessage, frozen=True, tag=24):
    """A trainer of the receiver waits for the message: its values may be sent."""

    number: RosterNumber
    """The roster's number, as in OfferLane."""
    lane: Annotated[int, Meta(ge=0, le=2**61)]
    """The number of the lane among the successive lanes of this pair under this roster, from 0."""
    transfer: _Count
    """Its index among the messages on this lane, from 0."""


class MessageDelivered(P2PLinkMessage, frozen=True, tag=25):
    """The receiver's trainer has the message: the send is complete."""


class MessageWithdrawn(P2PLinkMessage, frozen=True, tag=26):
    """The sender no longer keeps the message."""


class KnownPeers(_Message, frozen=True, tag=22):
    """The peers that the sender has links with, and their addresses: one address finds them all."""

    most_bytes = MAX_HELLO_BYTES + 16  # one peer in a message
    peers: Annotated[tuple[Hello, ...], Meta(max_length=MAX_ENTRIES)]


class Relay(_Message, frozen=True, tag=34):
    """Bytes of a connection between two agents that a third one forwards (V5).

    They are of a TLS connection between the two: nobody else can read or change them.
    """

    far: Annotated[NodeId, Meta(min_length=32, max_length=32)]
    """The other end: where the bytes shall go, or where they come from."""
    number: _Count
    """Of the connection, given by the end that opens it, the one with the smaller node id."""
    to_forward: bool = False
    """True: from an end to the agent that forwards. False: from that one to an end."""
    data: Annotated[bytes, Meta(max_length=MAX_RELAYED_BYTES)] = b""
    read: Annotated[int, Meta(ge=0, le=2**32)] = 0
    """How many more bytes of the other end the sender has read."""
    ends: bool = False
    """The sender sends no more."""


class Splice(_Message, frozen=True, tag=35):
    """Asks the receiver to continue a connection between the two to another member, both ways."""

    ticket: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Named by the connection's preamble, in the place of a lane."""
    to: Member
    """If it is the receiver, it takes the connection as if it had come through its door."""
    dial: bool = False
    """True if the receiver of this message dials, False if the sender does."""


class StorePart(ForRanks, frozen=True, tag=36):
    """A part of what two copies of a job's store say to each other (`pmesh.core.store.pipe`)."""

    job: Job
    roster: _Count
    """A hash of the roster under which it is said: both ends must have installed the same one."""
    offset: _Count
    """Of the first byte of `data` in all that the sender has said under this roster."""
    read: _Count
    """How many bytes of the receiver's the sender has read."""
    data: Annotated[bytes, Meta(max_length=MAX_STORE_PART_BYTES)] = b""


AgreementMessage: TypeAlias = (
    Heartbeat
    | AskView
    | TellView
    | AskToJoin
    | Propose
    | Flushed
    | Refuse
    | Veto
    | Superseded
    | Commit
    | Leaving
)
P2PMessage: TypeAlias = AnnounceMessage | RequestMessage | MessageDelivered | MessageWithdrawn
RanksMessage: TypeAlias = P2PMessage | StorePart
LinkMessage: TypeAlias = (
    Hello
    | AgreementMessage
    | OfferLane
    | RestLane
    | AskResult
    | RanksMessage
    | KnownPeers
    | Relay
    | Splice
    | AnyLaunchMessage
)
PathMessage: TypeAlias = LinkMessage | Ping | Pong | AskProbe | Probe

_decoder: msgspec.msgpack.Decoder[PathMessage] = msgspec.msgpack.Decoder(PathMessage)
_encoder = msgspec.msgpack.Encoder()


def bound_of(kind: type[PathMessage]) -> int:
    """Return how many bytes a message of this kind may have."""
    return kind.most_bytes if issubclass(kind, _Message) else MAX_MESSAGE_BYTES


def encode(message: PathMessage) -> bytes:
    """Return the message as bytes, without a length prefix.

    Raises ValueError for one beyond its bound: nobody would take it, and the error is ours.
    """
    data = _encoder.encode(message)
    if len(data) > bound_of(type(message)):
        raise ValueError(_too_large(message, data))
    return data


def decode_untrusted(data: bytes) -> PathMessage:
    """Reverse `encode`; raise ProtocolError for anything else."""
    try:
        message = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a control message: {e}") from e
    if len(data) > bound_of(type(message)):
        raise ProtocolError(_too_large(message, data))
    return message


def _too_large(message: PathMessage, data: bytes) -> str:
    kind = type(message)
    return f"a {kind.__name__} of {len(data)} bytes, {bound_of(kind)} are allowed"
