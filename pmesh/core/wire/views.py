"""Messages about views: what members know, propose and decide (`pmesh.core.views.agreement`)."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import (
    MAX_JOBS,
    MAX_MEMBERS,
    MAX_TRAINERS,
    MAX_VIEW_BYTES,
    Comparison,
    Id,
    Ids,
    Job,
    Op,
    Reports,
    RosterNumber,
    SignedName,
    Terms,
    Verdict,
    View,
)
from pmesh.core.wire.calls import Call
from pmesh.core.wire.channels import MAX_ENTRIES, Channel, Message
from pmesh.core.wire.link import Leaving
from pmesh.ids import Epoch, Incarnation, Member, Slot

MAX_WAITING = 128  # trainers of one member: as many as an agent serves
MAX_REQUESTS_BYTES = 64 * 1024  # of one member's view requests: 400 with the usual texts
MAX_PRIMARIES = MAX_JOBS + 32  # of the view's jobs, and of those that a member dropped out of
RELAYED = -1
_OpOrNone = Annotated[int, Meta(ge=-1, le=2**62)]
_PercentOrNone = Annotated[int, Meta(ge=-1, le=100)]
_Cost = Annotated[int, Meta(ge=0, le=1000)]  # sixteenths of an octave: 992 for 2^62 microseconds
_CostRow = Annotated[tuple[_Cost, ...], Meta(max_length=MAX_MEMBERS)]
_Microseconds = Annotated[int, Meta(ge=0, le=2**62)]
_Seats = Annotated[tuple[Member, ...], Meta(max_length=MAX_MEMBERS)]


class _ViewMessage(Message, frozen=True):
    channel = 2


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
    own_percent: _PercentOrNone = -1
    """The share of its time that the trainer spends outside collective calls; -1 while unknown."""
    share_percent: _PercentOrNone = -1
    """The rank's share of the rows of a batch; -1 in a job that deals none."""
    reports: Reports = msgspec.field(default_factory=dict[str, float])
    """What its trainer has reported last: its loss, and so on."""
    comparison: Comparison | None = None
    """What the ranks have found last of their states; None if they never compared them."""


class Candidate(msgspec.Struct, frozen=True, array_like=True):
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


class MeasuredEdge(msgspec.Struct, frozen=True, array_like=True):
    """What one end has measured of the edge between two members."""

    round_trip_us: _Microseconds = 0
    """The least that was measured; 0 while unknown."""
    mbit_s: Annotated[int, Meta(ge=RELAYED, le=2**32)] = 0
    """The settled bandwidth from the other end to this one; 0 while unknown, RELAYED if no bytes
    travel directly."""


class Heartbeat(_ViewMessage, frozen=True, tag=2):
    """The state of a member. It is self-contained: the next one makes up for a lost one."""

    most_bytes = 184 * 1024  # view requests 64, waiting, progress and in_force 16 + 50 + 45 KiB
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
    waiting: Annotated[tuple[Candidate, ...], Meta(max_length=MAX_WAITING)] = ()
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
    cpu_percent: _PercentOrNone = -1
    """How busy the sender's machine is, of all its processors; -1 while unknown."""
    memory_percent: _PercentOrNone = -1
    """How much of its memory is in use; -1 while unknown."""


class AskView(_ViewMessage, frozen=True, tag=3):
    """Requests the view of an epoch that a heartbeat named."""

    epoch: Epoch


class TellView(_ViewMessage, frozen=True, tag=4):
    """A view that the sender has installed."""

    most_bytes = MAX_VIEW_BYTES + 16
    view: View


class AskToJoin(_ViewMessage, frozen=True, tag=5):
    """Asks the leader of a heavier view to let the sender join."""

    view: Epoch
    whole: bool = False
    """True: only with all of its view, so that no job is split. False: it waited too long."""


class Propose(_ViewMessage, frozen=True, tag=6):
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


class Flushed(_ViewMessage, frozen=True, tag=7):
    """A promise to install nothing below this epoch, and to deliver nothing older for its jobs."""

    epoch: Epoch
    said: SignedName
    """The user's name for the sender's machine."""
    view: View
    """The view that the sender has installed."""
    jobs: Annotated[tuple[JobReport, ...], Meta(max_length=MAX_ENTRIES)]
    waiting: Annotated[tuple[Candidate, ...], Meta(max_length=MAX_WAITING)] = ()
    primaries: Annotated[tuple[KnownPrimary, ...], Meta(max_length=MAX_PRIMARIES)] = ()
    """Only of jobs that require a quorum."""


class Refuse(_ViewMessage, frozen=True, tag=8):
    """The epoch does not exceed the one that the sender has promised (V1)."""

    epoch: Epoch
    promised: Epoch


class Veto(_ViewMessage, frozen=True, tag=9):
    """A member that should be in the proposal, or should lead it, is alive."""

    epoch: Epoch


class Superseded(_ViewMessage, frozen=True, tag=10):
    """The receiver's lineage continued without it; this view is the proof."""

    most_bytes = MAX_VIEW_BYTES + 16
    view: View


class Commit(_ViewMessage, frozen=True, tag=11):
    """The decided view. The receiver installs it if it promised its epoch (V1)."""

    most_bytes = MAX_VIEW_BYTES + 16 * 1024  # 64 x 64 costs of 3 bytes
    view: View
    costs: Annotated[tuple[_CostRow, ...], Meta(max_length=MAX_MEMBERS)]
    """The costs from which the ring was planned: a row for each member, in sorted order."""


ViewMessage: TypeAlias = (
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
)
AgreementMessage: TypeAlias = ViewMessage | Leaving
VIEWS: Channel[ViewMessage] = Channel(_ViewMessage.channel, ViewMessage)
