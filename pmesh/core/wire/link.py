"""Control messages between two agents, as they travel on a link.

MessagePack arrays, tagged by a short number; msgspec validates them while it decodes. What a
message means is decided in `pmesh.core.views.agreement` (views), `pmesh.agent.lanes.rendezvous`
(lanes) and `pmesh.net.links.link` (Hello).
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import (
    MAX_MEMBERS,
    MAX_TRAINERS,
    Id,
    Ids,
    Job,
    Name,
    Op,
    RosterNumber,
    Terms,
    Verdict,
    View,
)
from pmesh.errors import ProtocolError
from pmesh.ids import Epoch, Incarnation, Member, Slot

PROTOCOL_VERSION = 6

MAX_MESSAGE_BYTES = 256 * 1024  # a view of 64 members with rosters is 20 KiB; more is an attack

MAX_ADDRESSES = 64  # of one machine; a Mac with every port in use has about ten
MAX_TOLD = 1024  # of anything that one member tells about its own jobs in one message

_OpOrNone = Annotated[int, Meta(ge=-1, le=2**62)]
_Cost = Annotated[int, Meta(ge=0, le=1000)]  # half octaves of microseconds: 126 for 2^63
_CostRow = Annotated[tuple[_Cost, ...], Meta(max_length=MAX_MEMBERS)]
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_Microseconds = Annotated[int, Meta(ge=0, le=2**62)]
_Seats = Annotated[tuple[Member, ...], Meta(max_length=MAX_MEMBERS)]
_Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Index = Annotated[int, Meta(ge=0, le=MAX_TRAINERS - 1)]
"""A rank as a call counts it: a job has at most 1024."""
_Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=64)]
"""numpy knows at most 64 dimensions; 2^48 values are more than a processor can address."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where an agent can be dialled."""

    host: Annotated[str, Meta(max_length=255)]
    """An IP address, v6 with its scope where it has one, or a host name."""
    port: Annotated[int, Meta(ge=1, le=65535)]

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Hello(_Message, frozen=True, tag=1):
    """The first message on a link, from both sides."""

    protocol: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    member: Member
    name: Name
    """What the user calls the machine."""
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)] = ()
    """Where others can dial the sender."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What a rank called as an op; all ranks must have called the same (I5, O8)."""

    kind: Name
    dtype: Name
    shape: _Shape
    reduction: Name = ""
    root: Annotated[int, Meta(ge=-1, le=MAX_TRAINERS - 1)] = -1
    compression: Name = ""
    tree: Name = ""
    """For a bucket of a tree: a digest of all its paths, shapes and dtypes, because trees that
    differ may well have buckets of one size (I5)."""
    receivers: Annotated[tuple[_Index, ...], Meta(max_length=MAX_TRAINERS)] = ()
    """Of a broadcast: the ranks that lack the root's values; none named: all but the root."""
    strategy: Name = ""
    """How an all-reduce is to run: one of `pmesh.core.ops.cost`; none named: as the costs say."""

    def __str__(self) -> str:
        words = [
            word for word in (self.reduction, self.compression, self.strategy, self.tree) if word
        ]
        words += [f"root={self.root}"] * (self.root >= 0)
        words += [f"to={self.receivers}"] * bool(self.receivers)
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.kind}({', '.join([self.dtype, shape, *words])})"


class OpReport(msgspec.Struct, frozen=True, array_like=True):
    """What one rank knows of an op that is not yet stable."""

    op: Op
    call: Call
    completed: bool = False
    verdict: Verdict | None = None
    contributors: Ids = ()
    """As in `OpOutcome`, once it has ended."""
    holds: bool = True
    """Once it has completed: it has the result too, which a broadcast does not bring to all."""
    is_root: bool = False
    """Of a broadcast: what it sends is the result, and it has it from the beginning."""


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """The flush answer's part for one rank of a job (V3)."""

    trainer: Id
    stable: _OpOrNone
    """Every op up to this one has ended at all ranks; -1 before the first."""
    ops: Annotated[tuple[OpReport, ...], Meta(max_length=MAX_TOLD)]


class JobReport(msgspec.Struct, frozen=True, array_like=True):
    """The flush answer's part for one job: its identity, and each local rank's ops."""

    job: Job
    born: Epoch
    number: RosterNumber
    fenced: bool
    """Nothing of this roster's number reaches a trainer any more."""
    ranks: Annotated[tuple[RankReport, ...], Meta(max_length=MAX_TRAINERS)]


class RankMarks(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank has come, on every heartbeat: the stable mark is made of these (O2)."""

    job: Job
    number: RosterNumber
    trainer: Id
    started: _OpOrNone
    """The highest op started; -1 before the first."""
    completed: _OpOrNone
    """Every op up to this one has ended; -1 before the first."""
    fingerprint: Annotated[int, Meta(ge=0)] = 0
    """Of the call of op `started` (O8), 0 for none: compared even where no data flows."""
    synced: _OpOrNone = -1
    """The last op that was a `sync`, in which others may enter (O6); -1 before the first."""
    stopped: bool = False
    """The trainer's process has been stopped, as by SIGSTOP: it is not merely computing."""


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """A trainer that waits for its job to begin, or in a `sync` to enter it (O6)."""

    job: Job
    slot: Annotated[Slot, Meta(ge=0, le=2**62)]
    wait_for: Annotated[int, Meta(ge=1, le=MAX_TRAINERS)]
    terms: Terms = Terms()


class Concern(msgspec.Struct, frozen=True, array_like=True):
    """Something that only a view change can settle: a request to the leader (O3)."""

    job: Job
    born: Epoch
    number: RosterNumber
    """The roster's number when the concern arose; a higher one has settled it."""
    verdict: Verdict | None
    """What the op concerned shall fail with, or who is lost and why; None: the op runs again, over
    new lanes, and if it is a `sync` then with those who wait to enter (O6)."""
    op: _OpOrNone = -1
    """The op concerned; -1 when ranks are lost."""


class KnownPrimary(msgspec.Struct, frozen=True, array_like=True):
    """The last roster with a quorum that its sender knows of a job, perhaps from before (V10)."""

    job: Job
    born: Epoch
    epoch: Epoch
    in_force: bool = False
    """A majority of all whose votes it needed has been seen to have installed it."""


class Heartbeat(_Message, frozen=True, tag=2):
    """Where a member stands. Self-contained: a lost one is repaired by the next."""

    view: Epoch
    promised: Epoch
    flushed: bool
    """It has promised an epoch and not yet installed it."""
    acting: bool
    """It is the most senior of its view that it can hear."""
    needs_epoch: bool
    """It has been flushed for too long and asks for a new proposal (V6)."""
    heard: Annotated[
        dict[Annotated[Incarnation, Meta(ge=1, le=2**63 - 1)], _Microseconds],
        Meta(max_length=MAX_TOLD),
    ]
    """Whom it hears (V5), with the round trip in microseconds, 0 while unknown."""
    waiting: Annotated[tuple[Waiting, ...], Meta(max_length=MAX_TOLD)] = ()
    concerns: Annotated[tuple[Concern, ...], Meta(max_length=MAX_TOLD)] = ()
    marks: Annotated[tuple[RankMarks, ...], Meta(max_length=MAX_TOLD)] = ()
    sent_us: _Microseconds = 0
    """The sender's monotonic clock; only the sender reads it again."""
    echo_us: _Microseconds = 0
    """The last `sent_us` that came from the receiver."""
    held_us: _Microseconds = 0
    """How long ago that was."""
    in_force: Annotated[tuple[KnownPrimary, ...], Meta(max_length=MAX_TOLD)] = ()
    """Of the jobs in its view: others may have missed what the sender has seen (V10)."""


class AskView(_Message, frozen=True, tag=3):
    """Asks for the view of an epoch that a heartbeat named."""

    epoch: Epoch


class TellView(_Message, frozen=True, tag=4):
    """A view that the sender has installed."""

    view: View


class AskToJoin(_Message, frozen=True, tag=5):
    """Asks the leader of a heavier view to be taken in."""

    view: Epoch
    whole: bool = False
    """With all of its view, so that no job is torn; else it has waited for that for too long."""


class Propose(_Message, frozen=True, tag=6):
    """The leader asks the future members of an epoch to flush."""

    epoch: Epoch
    base: View
    """The view that the leader has installed."""
    members: _Seats
    continuing: _Seats
    """Those of `members` that the leader takes to be of its lineage."""
    jobs: Annotated[tuple[Job, ...], Meta(max_length=MAX_TOLD)]
    """Whose ops must stop; the others run on (V7)."""


class Flushed(_Message, frozen=True, tag=7):
    """A promise: nothing below this epoch will be installed or, for its jobs, delivered."""

    epoch: Epoch
    name: Name
    """What the user calls the sender's machine."""
    view: View
    """What the sender has installed."""
    jobs: Annotated[tuple[JobReport, ...], Meta(max_length=MAX_TOLD)]
    waiting: Annotated[tuple[Waiting, ...], Meta(max_length=MAX_TOLD)] = ()
    primaries: Annotated[tuple[KnownPrimary, ...], Meta(max_length=MAX_TOLD)] = ()
    """Only of jobs that ask for a quorum."""


class Refuse(_Message, frozen=True, tag=8):
    """The epoch does not exceed what the sender has promised (V1)."""

    epoch: Epoch
    promised: Epoch


class Veto(_Message, frozen=True, tag=9):
    """Someone who should be in the proposal, or should lead it, is alive."""

    epoch: Epoch


class Superseded(_Message, frozen=True, tag=10):
    """The receiver's lineage went on without it: this view proves it."""

    view: View


class Commit(_Message, frozen=True, tag=11):
    """The decision. Install it if its epoch is what you promised (V1)."""

    view: View
    costs: Annotated[tuple[_CostRow, ...], Meta(max_length=MAX_MEMBERS)]
    """What the ring was planned from: a row for each member in the order of `sorted`."""


class Leaving(_Message, frozen=True, tag=12):
    """A clean end: not a failure."""


class OfferLane(_Message, frozen=True, tag=20):
    """The sender of an edge's data offers a lane: one key for each direction, used once."""

    lane: Annotated[bytes, Meta(min_length=16, max_length=16)]
    job: Job
    born: Epoch
    number: RosterNumber
    sender: Id
    receiver: Id
    key: _Key
    """Seals what the offering side writes."""
    return_key: _Key
    """Seals what the accepting side writes: its proof of having read this offer."""
    op: Annotated[int, Meta(ge=-(2**62), le=2**62)] = -1
    """-1: the ring edge; below that the lanes of messages between two ranks. Else the lane brings
    the retained output of this op (O2)."""
    dial: bool = False
    """The receiver of this message dials; otherwise the sender does."""


class AskResult(_Message, frozen=True, tag=21):
    """A survivor that missed the end of an op asks a holder for its result (O2)."""

    job: Job
    born: Epoch
    number: RosterNumber
    op: Op
    holder: Id
    receiver: Id


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What one rank sends to one other: an array, of which this is all but the values (O4)."""

    tag: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Only a receive of the same tag takes it."""
    dtype: Name
    shape: _Shape
    nbytes: Annotated[int, Meta(ge=0, le=2**48)]


class MessageAddress(msgspec.Struct, frozen=True, array_like=True):
    """Which message of a job: no two ever have the same address, whatever views come (O4)."""

    job: Job
    born: Epoch
    sender: Id
    receiver: Id
    sequence: _Count
    """Its number among all from this sender to this receiver, from 0, whatever their tags."""


class P2PLinkMessage(_Message, frozen=True):
    """What two agents say of a message."""

    address: MessageAddress


class AnnounceMessage(P2PLinkMessage, frozen=True, tag=23):
    """The sender keeps a message for the receiver; said again and again until it is settled."""

    envelope: Envelope
    first: _Count
    """Every message of this pair below this number is settled: delivered, or withdrawn."""
    before: _OpOrNone
    """The one of the same tag to be delivered before it; -1 if all of them are settled."""


class RequestMessage(P2PLinkMessage, frozen=True, tag=24):
    """The receiver has somebody who waits for the message: its values may come."""

    number: RosterNumber
    """The roster's, as in OfferLane."""
    lane: Annotated[int, Meta(ge=0, le=2**61)]
    """Which of the lanes that this pair has one after the other under this number; from 0."""
    transfer: _Count
    """Its place among the messages on this lane, from 0."""


class MessageDelivered(P2PLinkMessage, frozen=True, tag=25):
    """The receiver's trainer has it: the send is over."""


class MessageWithdrawn(P2PLinkMessage, frozen=True, tag=26):
    """The sender no longer keeps it."""


class KnownPeers(_Message, frozen=True, tag=22):
    """Whom the sender has links with, and where they listen: one address meets everyone."""

    peers: Annotated[tuple[Hello, ...], Meta(max_length=MAX_TOLD)]


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
LinkMessage: TypeAlias = Hello | AgreementMessage | OfferLane | AskResult | P2PMessage | KnownPeers

_decoder: msgspec.msgpack.Decoder[LinkMessage] = msgspec.msgpack.Decoder(LinkMessage)
_encoder = msgspec.msgpack.Encoder()


def encode(message: LinkMessage) -> bytes:
    """The message as bytes, without a length prefix."""
    return _encoder.encode(message)


def decode_untrusted(data: bytes) -> LinkMessage:
    """The reverse of `encode`; raises ProtocolError for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a control message: {e}") from e
