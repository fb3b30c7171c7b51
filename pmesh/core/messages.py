"""Control messages between two agents, as they travel on a link.

MessagePack arrays, tagged by a short number; msgspec validates them while it decodes. What a
message means is decided in `pmesh.core.agreement` (views), `pmesh.core.lane_offers` (lanes) and
`pmesh.net.links` (Hello).
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.views import Terms, Verdict, View
from pmesh.errors import ProtocolError
from pmesh.ids import PRINTABLE, Epoch, Incarnation, JobName, Member, OpNumber, Slot, TrainerId

PROTOCOL_VERSION = 5

MAX_MESSAGE_BYTES = 256 * 1024  # a view of 64 members with rosters is 20 KiB; more is an attack

_Name = Annotated[str, Meta(max_length=64)]
_Job = Annotated[JobName, Meta(max_length=64)]
_Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Word = Annotated[str, Meta(max_length=64, pattern=PRINTABLE)]
_Index = Annotated[int, Meta(ge=0, le=1023)]
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

    protocol: int
    member: Member
    name: _Name
    """What the user calls the machine."""
    addresses: tuple[Address, ...] = ()
    """Where others can dial the sender."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What a rank called as an op; all ranks must have called the same (I5, O8)."""

    kind: _Word
    dtype: _Word
    shape: _Shape
    reduction: _Word = ""
    root: Annotated[int, Meta(ge=-1, le=1023)] = -1
    compression: _Word = ""
    tree: _Word = ""
    """For a bucket of a tree: a digest of all its paths, shapes and dtypes, because trees that
    differ may well have buckets of one size (I5)."""
    receivers: Annotated[tuple[_Index, ...], Meta(max_length=1024)] = ()
    """Of a broadcast: the ranks that lack the root's values; none named: all but the root."""
    strategy: _Word = ""
    """How an all-reduce is to run: one of `pmesh.core.costs`; none named: as the costs say."""

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

    op: OpNumber
    call: Call
    completed: bool = False
    verdict: Verdict | None = None
    contributors: tuple[TrainerId, ...] = ()
    """As in `OpOutcome`, once it has ended."""
    holds: bool = True
    """Once it has completed: it has the result too, which a broadcast does not bring to all."""
    is_root: bool = False
    """Of a broadcast: what it sends is the result, and it has it from the beginning."""


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """The flush answer's part for one rank of a job (V3)."""

    trainer: TrainerId
    stable: int
    """Every op up to this one has ended at all ranks; -1 before the first."""
    ops: tuple[OpReport, ...]


class JobReport(msgspec.Struct, frozen=True, array_like=True):
    """The flush answer's part for one job: its identity, and each local rank's ops."""

    job: _Job
    born: Epoch
    number: int
    fenced: bool
    """Nothing of this roster's number reaches a trainer any more."""
    ranks: tuple[RankReport, ...]


class RankMarks(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank has come, on every heartbeat: the stable mark is made of these (O2)."""

    job: _Job
    number: int
    trainer: TrainerId
    started: int
    """The highest op started; -1 before the first."""
    completed: int
    """Every op up to this one has ended; -1 before the first."""
    fingerprint: int = 0
    """Of the call of op `started` (O8), 0 for none: compared even where no data flows."""
    synced: int = -1
    """The last op that was a `sync`, in which others may enter (O6); -1 before the first."""
    stopped: bool = False
    """The trainer's process has been stopped, as by SIGSTOP: it is not merely computing."""


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """A trainer that waits for its job to begin, or in a `sync` to enter it (O6)."""

    job: _Job
    slot: Slot
    wait_for: int
    terms: Terms = Terms()


class Concern(msgspec.Struct, frozen=True, array_like=True):
    """Something that only a view change can settle: a request to the leader (O3)."""

    job: _Job
    born: Epoch
    number: int
    """The roster's number when the concern arose; a higher one has settled it."""
    verdict: Verdict | None
    """What the op concerned shall fail with, or who is lost and why; None: the op runs again, over
    new lanes, and if it is a `sync` then with those who wait to enter (O6)."""
    op: int = -1
    """The op concerned; -1 when ranks are lost."""


class KnownPrimary(msgspec.Struct, frozen=True, array_like=True):
    """The last roster with a quorum that its sender knows of a job, perhaps from before (V10)."""

    job: _Job
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
    heard: dict[Incarnation, int]
    """Whom it hears (V5), with the round trip in microseconds, 0 while unknown."""
    waiting: tuple[Waiting, ...] = ()
    concerns: tuple[Concern, ...] = ()
    marks: tuple[RankMarks, ...] = ()
    sent_us: int = 0
    """The sender's monotonic clock; only the sender reads it again."""
    echo_us: int = 0
    """The last `sent_us` that came from the receiver."""
    held_us: int = 0
    """How long ago that was."""
    in_force: tuple[KnownPrimary, ...] = ()
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
    members: tuple[Member, ...]
    continuing: tuple[Member, ...]
    """Those of `members` that the leader takes to be of its lineage."""
    jobs: tuple[_Job, ...]
    """Whose ops must stop; the others run on (V7)."""


class Flushed(_Message, frozen=True, tag=7):
    """A promise: nothing below this epoch will be installed or, for its jobs, delivered."""

    epoch: Epoch
    name: _Name
    """What the user calls the sender's machine."""
    view: View
    """What the sender has installed."""
    jobs: tuple[JobReport, ...]
    waiting: tuple[Waiting, ...] = ()
    primaries: tuple[KnownPrimary, ...] = ()
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
    costs: tuple[tuple[int, ...], ...]
    """What the ring was planned from: a row for each member in the order of `sorted`."""


class Leaving(_Message, frozen=True, tag=12):
    """A clean end: not a failure."""


class OfferLane(_Message, frozen=True, tag=20):
    """The sender of an edge's data offers a lane: one key for each direction, used once."""

    lane: Annotated[bytes, Meta(min_length=16, max_length=16)]
    job: _Job
    born: Epoch
    number: int
    sender: TrainerId
    receiver: TrainerId
    key: _Key
    """Seals what the offering side writes."""
    return_key: _Key
    """Seals what the accepting side writes: its proof of having read this offer."""
    op: int = -1
    """-1: the ring edge. Else the lane brings the retained output of this op (O2)."""
    dial: bool = False
    """The receiver of this message dials; otherwise the sender does."""


class AskResult(_Message, frozen=True, tag=21):
    """A survivor that missed the end of an op asks a holder for its result (O2)."""

    job: _Job
    born: Epoch
    number: int
    op: OpNumber
    holder: TrainerId
    receiver: TrainerId


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """What one rank sends to one other: an array, of which this is all but the values (O4)."""

    tag: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Only a receive of the same tag takes it."""
    dtype: _Word
    shape: _Shape
    nbytes: Annotated[int, Meta(ge=0, le=2**48)]


class LetterAddress(msgspec.Struct, frozen=True, array_like=True):
    """Which letter of a job: no two ever have the same address, whatever views come (O4)."""

    job: _Job
    born: Epoch
    sender: TrainerId
    receiver: TrainerId
    sequence: Annotated[int, Meta(ge=0)]
    """Its number among all from this sender to this receiver, from 0, whatever their tags."""


class LetterMessage(_Message, frozen=True):
    """What two agents say of a letter."""

    address: LetterAddress


class AnnounceLetter(LetterMessage, frozen=True, tag=23):
    """The sender keeps a letter for the receiver; said again and again until it is settled."""

    letter: Letter
    first: int
    """Every letter of this pair below this number is settled: delivered, or withdrawn."""
    before: int
    """The one of the same tag to be delivered before it; -1 if all of them are settled."""


class AskLetter(LetterMessage, frozen=True, tag=24):
    """The receiver has somebody who waits for the letter: its values may come."""

    number: int
    """The roster's, as in OfferLane."""
    lane: Annotated[int, Meta(ge=0)]
    """Which of the lanes that this pair has one after the other under this number; from 0."""
    transfer: Annotated[int, Meta(ge=0)]
    """Its place among the letters on this lane, from 0."""


class LetterDelivered(LetterMessage, frozen=True, tag=25):
    """The receiver's trainer has it: the send is over."""


class LetterWithdrawn(LetterMessage, frozen=True, tag=26):
    """The sender no longer keeps it."""


class KnownPeers(_Message, frozen=True, tag=22):
    """Whom the sender has links with, and where they listen: one address meets everyone."""

    peers: tuple[Hello, ...]


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
LetterNews: TypeAlias = AnnounceLetter | AskLetter | LetterDelivered | LetterWithdrawn
LinkMessage: TypeAlias = Hello | AgreementMessage | OfferLane | AskResult | LetterNews | KnownPeers

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
