"""Small builders for the values of the core: name what a test is about, the rest is ordinary."""

from collections.abc import Iterable, Mapping

from pmesh.core.messages import (
    Call,
    Concern,
    Flushed,
    Heartbeat,
    JobReport,
    OpReport,
    Propose,
    RankReport,
    Waiting,
)
from pmesh.core.standing import Peer, State
from pmesh.core.views import OpOutcome, Roster, Seat, Trainer, Verdict, View
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, OpNumber, Rank, Slot

DIGITS = JobName("digits")
FACES = JobName("faces")


def make_member(letter: str, incarnation: int = 0) -> Member:
    """The member whose node id is this letter 32 times."""
    return Member(NodeId(letter.encode() * 32), Incarnation(incarnation or ord(letter)))


ANNA, BERT, CARA, DORA = map(make_member, "abcd")


def name_of(member: Member) -> str:
    return f"mac-{chr(member.node[0])}"


def make_epoch(counter: int, leader: Member = ANNA) -> Epoch:
    return Epoch(counter, *leader)


def make_seat(member: Member, admitted: int = 1, previous: Epoch | None = None) -> Seat:
    return Seat(member, name_of(member), make_epoch(admitted), previous)


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


def make_roster(
    *members: Member,
    job: JobName = DIGITS,
    born: Epoch | None = None,
    number: int = 5,
    lost: Iterable[Verdict] = (),
    outcomes: Iterable[OpOutcome] = (),
) -> Roster:
    """One trainer for each member named, ranks in that order."""
    slots: dict[Member, int] = {}
    trainers: list[Trainer] = []
    for member in members:
        trainers.append(Trainer(member, Slot(slots.get(member, 0))))
        slots[member] = slots.get(member, 0) + 1
    return Roster(
        job=job,
        born=born or make_epoch(5),
        number=number,
        trainers=tuple(trainers),
        names=tuple(map(name_of, members)),
        outcomes=tuple(outcomes),
        lost=tuple(lost),
    )


def make_call(kind: str = "all_reduce", shape: tuple[int, ...] = (3,)) -> Call:
    return Call(kind, "float32", shape, reduction="sum")


def make_verdict(error: str = "OpTimedOut", *ranks: int) -> Verdict:
    return Verdict(error, f"{error} because the test says so", tuple(map(Rank, ranks)))


def running(op: int, call: Call | None = None) -> OpReport:
    return OpReport(OpNumber(op), call or make_call())


def completed(op: int, call: Call | None = None) -> OpReport:
    return OpReport(OpNumber(op), call or make_call(), completed=True)


def failed(op: int, verdict: Verdict) -> OpReport:
    return OpReport(OpNumber(op), make_call(), verdict=verdict)


def make_report(
    roster: Roster, ranks: Mapping[int, Iterable[OpReport]], *, fenced: bool = True
) -> JobReport:
    """What a member says of its ranks of a job."""
    told = tuple(RankReport(Rank(rank), tuple(ops)) for rank, ops in ranks.items())
    return JobReport(roster.job, roster.born, roster.number, fenced, told)


def make_flushed(
    member: Member,
    view: View,
    *,
    epoch: Epoch | None = None,
    jobs: Iterable[JobReport] = (),
    waiting: Iterable[Waiting] = (),
) -> Flushed:
    """The member's flush answer: what it has installed, and what it knows of its ops."""
    return Flushed(
        epoch or make_epoch(9), name_of(member), view, tuple(jobs), waiting=tuple(waiting)
    )


def make_concern(roster: Roster, verdict: Verdict | None, op: int = -1) -> Concern:
    return Concern(roster.job, roster.born, roster.number, verdict, op)


def make_waiting(wait_for: int, slot: int = 0, job: JobName = DIGITS) -> Waiting:
    return Waiting(job, Slot(slot), wait_for)


def make_heartbeat(
    view: View,
    *heard: Member,
    promised: Epoch | None = None,
    flushed: bool = False,
    acting: bool = False,
    needs_epoch: bool = False,
    waiting: Iterable[Waiting] = (),
    concerns: Iterable[Concern] = (),
) -> Heartbeat:
    """A heartbeat of a member that has installed the view and hears these."""
    return Heartbeat(
        view=view.epoch,
        promised=promised or view.epoch,
        flushed=flushed,
        acting=acting,
        needs_epoch=needs_epoch,
        heard={member.incarnation: 0 for member in heard},
        waiting=tuple(waiting),
        concerns=tuple(concerns),
    )


def make_peer(member: Member, view: View, heartbeat: Heartbeat) -> Peer:
    return Peer(member=member, heartbeat=heartbeat, view=view)


def make_state(me: Member, view: View, *peers: Peer, now: float = 100.0) -> State:
    """A member that installed the view long before now, 100 s, and hears these peers."""
    return State(
        me=me,
        name=name_of(me),
        view=view,
        promised=view.epoch,
        installed_at=now - 50.0,
        highest_counter=view.epoch.counter,
        peers={peer.member.node: peer for peer in peers},
    )


def all_hearing_each_other(me: Member, view: View, *others: Member) -> State:
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
