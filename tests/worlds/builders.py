"""Small builders for the values of the core: name what a test is about, the rest is ordinary."""

from collections.abc import Iterable, Mapping

from pmesh.core.topology.graph import UNKNOWN
from pmesh.core.values import (
    MAX_DIFFERING,
    MAX_TRAINERS,
    Comparison,
    OpOutcome,
    Primary,
    Roster,
    Seat,
    SignedName,
    Terms,
    Trainer,
    Verdict,
    View,
)
from pmesh.core.views.state import MemberState, Peer
from pmesh.core.wire.calls import Call
from pmesh.core.wire.views import (
    Candidate,
    Flushed,
    Heartbeat,
    JobReport,
    KnownPrimary,
    OpReport,
    Propose,
    RankReport,
    ViewRequest,
)
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, OpNumber, Slot, TrainerId

DIGITS = JobName("digits")
LARGEST_COMPARISON = Comparison(
    OpNumber(2**62),
    2**63 - 1,
    "f" * 32,
    MAX_TRAINERS,
    MAX_TRAINERS,
    (TrainerId(2**62),) * MAX_DIFFERING,
    mended=True,
)
FACES = JobName("faces")


def make_member(letter: str, incarnation: int = 0) -> Member:
    """The member whose node id is this letter 32 times."""
    return Member(NodeId(letter.encode() * 32), Incarnation(incarnation or ord(letter)))


ANNA, BERT, CARA, DORA = map(make_member, "abcd")


def name_of(member: Member) -> str:
    return f"mac-{chr(member.node[0])}"


def unsigned(name: str) -> SignedName:
    """A name as it travels; the core leaves it to the driver to check the signature."""
    return SignedName(name, bytes(64))


def said_by(member: Member) -> SignedName:
    return unsigned(name_of(member))


def make_epoch(counter: int, leader: Member = ANNA) -> Epoch:
    return Epoch(counter, *leader)


def make_seat(member: Member, admitted: int = 1, previous: Epoch | None = None) -> Seat:
    return Seat(member, said_by(member), make_epoch(admitted), previous)


def make_view(
    counter: int,
    *members: Member,
    leader: Member | None = None,
    previous: Epoch | None = None,
    rosters: Iterable[Roster] = (),
) -> View:
    """The members in ring order; each was admitted after the one before it."""
    seats = [make_seat(member, i + 1, previous) for i, member in enumerate(members)]
    return View(make_epoch(counter, leader or members[0]), tuple(seats), tuple(rosters))


def make_trainer(id_: int, member: Member, *, slot: int = 0, enters: int = 0) -> Trainer:
    return Trainer(TrainerId(id_), member, Slot(slot), said_by(member), OpNumber(enters))


def make_roster(
    *members: Member,
    ids: Iterable[int] | None = None,
    job: JobName = DIGITS,
    born: Epoch | None = None,
    number: int = 5,
    terms: Terms | None = None,
    quorate: bool = True,
    primary: Primary | None = None,
    outcomes: Iterable[OpOutcome] = (),
    lost_holders: Iterable[Trainer] = (),
    losses: Iterable[Verdict] = (),
) -> Roster:
    """One trainer for each member named, ranks in that order, and numbered so unless said."""
    slots: dict[Member, int] = {}
    trainers: list[Trainer] = []
    numbers = range(len(members)) if ids is None else ids
    for id_, member in zip(numbers, members, strict=True):
        trainers.append(make_trainer(id_, member, slot=slots.get(member, 0)))
        slots[member] = slots.get(member, 0) + 1
    lost_holders = tuple(lost_holders)
    known = [trainer.id for trainer in (*trainers, *lost_holders)]
    return Roster(
        job=job,
        born=born or make_epoch(5),
        number=number,
        trainers=tuple(trainers),
        primary=primary or Primary(born or make_epoch(5), members),
        next_id=TrainerId(max(known, default=-1) + 1),
        terms=terms or Terms(),
        quorate=quorate,
        outcomes=tuple(outcomes),
        lost_holders=lost_holders,
        losses=tuple(losses),
    )


def ids_of(*ids: int) -> tuple[TrainerId, ...]:
    return tuple(map(TrainerId, ids))


def make_call(kind: str = "all_reduce", shape: tuple[int, ...] = (3,)) -> Call:
    return Call(kind, "float32", shape, reduction="sum")


def make_verdict(error: str = "OpTimedOut", *trainers: int) -> Verdict:
    return Verdict(error, f"{error} because the test says so", ids_of(*trainers))


def make_outcome(
    op: int, *contributors: int, holders: Iterable[int] = (), verdict: Verdict | None = None
) -> OpOutcome:
    return OpOutcome(OpNumber(op), ids_of(*contributors), ids_of(*holders), verdict)


def running(op: int, call: Call | None = None) -> OpReport:
    return OpReport(OpNumber(op), call or make_call())


def completed(op: int, *contributors: int, call: Call | None = None) -> OpReport:
    """Ended with what these have given; of all three ranks of a trio, unless said."""
    given = ids_of(*(contributors or (0, 1, 2)))
    return OpReport(OpNumber(op), call or make_call(), completed=True, contributors=given)


def failed(op: int, verdict: Verdict, *contributors: int) -> OpReport:
    given = ids_of(*(contributors or (0, 1, 2)))
    return OpReport(OpNumber(op), make_call(), verdict=verdict, contributors=given)


def make_report(
    roster: Roster,
    ranks: Mapping[int, Iterable[OpReport]],
    *,
    fenced: bool = True,
    stable: int = -1,
) -> JobReport:
    """What a member says of its trainers of a job."""
    told = tuple(RankReport(TrainerId(id_), stable, tuple(ops)) for id_, ops in ranks.items())
    return JobReport(roster.job, roster.born, roster.number, fenced, told)


def make_flushed(
    member: Member,
    view: View,
    *,
    epoch: Epoch | None = None,
    jobs: Iterable[JobReport] = (),
    waiting: Iterable[Candidate] = (),
    primaries: Iterable[KnownPrimary] | None = None,
) -> Flushed:
    """The member's flush answer: what it has installed, and what it knows of its ops.

    Unless said otherwise it remembers no primary rosters but those of its view.
    """
    return Flushed(
        epoch or make_epoch(9),
        said_by(member),
        view,
        tuple(jobs),
        tuple(waiting),
        known_from(view) if primaries is None else tuple(primaries),
    )


def known_from(view: View, *, in_force: bool = False) -> tuple[KnownPrimary, ...]:
    """What a member remembers that has always been in this view's line."""
    known = (
        KnownPrimary(roster.job, roster.born, roster.primary.epoch, in_force)
        for roster in view.rosters
        if roster.terms.quorum == "majority"
    )
    return tuple(sorted(known, key=lambda k: k.epoch))


def make_view_request(roster: Roster, verdict: Verdict | None, op: int = -1) -> ViewRequest:
    return ViewRequest(roster.job, roster.born, roster.number, verdict, op)


def make_waiting(
    wait_for: int, slot: int = 0, job: JobName = DIGITS, terms: Terms | None = None
) -> Candidate:
    return Candidate(job, Slot(slot), wait_for, terms or Terms())


def make_heartbeat(
    view: View,
    *heard: Member,
    promised: Epoch | None = None,
    flushed: bool = False,
    acting: bool = False,
    needs_epoch: bool = False,
    waiting: Iterable[Candidate] = (),
    view_requests: Iterable[ViewRequest] = (),
    in_force: Iterable[KnownPrimary] = (),
) -> Heartbeat:
    """A heartbeat of a member that has installed the view and hears these."""
    return Heartbeat(
        view=view.epoch,
        promised=promised or view.epoch,
        flushed=flushed,
        acting=acting,
        needs_epoch=needs_epoch,
        heard={member.incarnation: UNKNOWN for member in heard},
        waiting=tuple(waiting),
        view_requests=tuple(view_requests),
        in_force=tuple(in_force),
    )


def make_peer(member: Member, view: View, heartbeat: Heartbeat) -> Peer:
    return Peer(member=member, heartbeat=heartbeat, view=view)


def make_state(me: Member, view: View, *peers: Peer, now: float = 100.0) -> MemberState:
    """A member that installed the view long before now, 100 s, and hears these peers."""
    return MemberState(
        me=me,
        said=said_by(me),
        view=view,
        promised=view.epoch,
        installed_at=now - 50.0,
        highest_counter=view.epoch.counter,
        peers={peer.member.node: peer for peer in peers},
    )


def all_hearing_each_other(me: Member, view: View, *others: Member) -> MemberState:
    """`me` and the others have installed the view, and every one hears every other."""
    everyone = (me, *others)
    peers = [
        make_peer(member, view, make_heartbeat(view, *(m for m in everyone if m != member)))
        for member in others
    ]
    return make_state(me, view, *peers)


def make_proposal(
    leader: Member,
    counter: int,
    base: View,
    *members: Member,
    continuing: Iterable[Member] | None = None,
    jobs: Iterable[JobName] = (),
) -> Propose:
    """The leader's proposal; unless said otherwise all members are of its lineage."""
    kept = members if continuing is None else tuple(continuing)
    return Propose(make_epoch(counter, leader), base, members, kept, tuple(jobs))
