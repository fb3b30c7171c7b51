"""What one member may send, whatever it is, never makes an honest one send what others refuse.

Two honest members, Anna who leads and Bert, run on the real functions. Cara, who has a seat, and
Dora, who has none and wants in, send anything that is taken.
"""

import typing
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.values import (
    MAX_JOB_BYTES,
    MAX_TEXT_BYTES,
    MAX_TRAINERS,
    OpOutcome,
    Primary,
    Roster,
    Seat,
    Terms,
    Trainer,
    Verdict,
    View,
    nbytes_of,
)
from pmesh.core.views import agreement
from pmesh.core.views.limits import check_message
from pmesh.core.views.state import Facts, Install, MemberState, MemberStep, SendOnLink, heartbeat_of
from pmesh.core.wire.channels import encode
from pmesh.core.wire.views import (
    MAX_REQUESTS_BYTES,
    MAX_WAITING,
    AgreementMessage,
    AskToJoin,
    Candidate,
    Flushed,
    Heartbeat,
    JobReport,
    MeasuredEdge,
    OpReport,
    Propose,
    RankReport,
    TellView,
    ViewRequest,
)
from pmesh.errors import ProtocolError
from pmesh.ids import (
    MAX_NAME,
    Epoch,
    JobName,
    Member,
    OpNumber,
    Slot,
    TrainerId,
)
from simulation.wire import decode_untrusted, encode_unbounded
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    FACES,
    all_hearing_each_other,
    completed,
    make_call,
    make_epoch,
    make_heartbeat,
    make_member,
    make_outcome,
    make_report,
    make_roster,
    make_trainer,
    make_verdict,
    make_view,
    make_view_request,
    make_waiting,
    running,
    unsigned,
)
from tests.worlds.examples import examples

NOW = 100.0
HONEST = (ANNA, BERT)
EMMA = make_member("e")
WIDE = "\N{CAT FACE}"  # four bytes
LONGEST_NAME = WIDE * MAX_NAME
LONGEST_JOB = JobName("j" * MAX_JOB_BYTES)
LARGEST = 2**62

OURS = make_roster(ANNA, BERT, CARA, terms=Terms(on_loss="raise", quorum="majority"))
BASE = make_view(5, ANNA, BERT, CARA, rosters=[OURS, make_roster(ANNA, BERT, job=FACES)])
OURS_TOO = make_roster(ANNA, BERT, CARA, job=FACES)
BOTH = make_view(5, ANNA, BERT, CARA, rosters=[OURS, OURS_TOO])  # Cara can fill both jobs


def is_taken(sender: Member, message: AgreementMessage) -> bool:
    """True if a member that sends this is not punished for it."""
    try:
        check_message(sender, typing.cast("AgreementMessage", decode_untrusted(encode(message))))
    except (ProtocolError, ValueError):
        return False
    return True


@dataclass
class HonestMembers:
    """The honest members, and the messages between them; those to others are dropped."""

    states: dict[Member, MemberState]
    facts: dict[Member, Facts]
    under_way: deque[tuple[Member, Member, AgreementMessage]] = field(default_factory=deque)
    epoch: Epoch | None = None
    """Of the last proposal."""

    def tell(self, member: Member, sender: Member, message: AgreementMessage) -> None:
        """Somebody who may lie sends this; if it is taken, the honest ones say what follows."""
        if is_taken(sender, message):
            try:
                self._take(member, self._received(member, sender, message))
            except ProtocolError:
                return  # the sender is punished
            self.deliver()

    def _received(self, member: Member, sender: Member, message: AgreementMessage) -> MemberStep:
        facts = self.facts[member]
        return agreement.receive(self.states[member], sender, message, facts, now=NOW)

    def _take(self, member: Member, step: MemberStep) -> None:
        self.states[member] = step.state
        for action in step.actions:
            match action:
                case SendOnLink(to, message):
                    decoded = decode_untrusted(encode(message))
                    assert decoded == message
                    check_message(member, message)  # what it raises bans an honest member
                    if isinstance(message, Propose):
                        self.epoch = message.epoch
                    if to in HONEST:
                        self.under_way.append((member, to, message))
                case Install():
                    passed = agreement.pass_time(step.state, self.facts[member], now=NOW)
                    self._take(member, passed)
                case _:
                    pass

    def deliver(self) -> None:
        """Of an honest one, all is taken."""
        while self.under_way:
            sender, to, message = self.under_way.popleft()
            self._take(to, self._received(to, sender, message))

    def beat(self) -> None:
        """Everyone sends a heartbeat, and time passes."""
        for member in HONEST:
            state, facts = self.states[member], self.facts[member]
            beat = heartbeat_of(state, facts, NOW)
            assert decode_untrusted(encode(beat)) == beat
            for other in HONEST:
                if other != member:
                    self.under_way.append((member, other, beat))
        self.deliver()
        for member in HONEST:
            step = agreement.pass_time(self.states[member], self.facts[member], now=NOW)
            self._take(member, step)
        self.deliver()


def new_mesh(base: View = BASE, *, idle: bool = False) -> HonestMembers:
    """`idle`: their ranks are in no op."""
    ops = [] if idle else [running(4)]
    reports = {
        member: tuple(
            make_report(roster, {trainer.id: ops}, fenced=False)
            for roster in base.rosters
            for trainer in roster.trainers_at(member)
        )
        for member in HONEST
    }
    others = {ANNA: (BERT, CARA), BERT: (ANNA, CARA)}
    return HonestMembers(
        {m: all_hearing_each_other(m, base, *others[m]) for m in HONEST},
        {m: Facts(reports=partial(reports.__getitem__, m)) for m in HONEST},
    )


# --- whatever somebody may send

SIZES = st.sampled_from([MAX_TRAINERS, 0, 1, 40, MAX_TRAINERS])
NUMBERS = st.sampled_from([0, 1, 4, LARGEST])
IDS = st.sampled_from([2, 2, 2, 0, 1, 5, LARGEST]).map(TrainerId)
OPS = NUMBERS.map(OpNumber)
JOBS = st.sampled_from([DIGITS, FACES, JobName("x"), LONGEST_JOB])
NAMES = st.sampled_from(["", "mac-c", LONGEST_NAME])
MANY_IDS = SIZES.map(lambda n: tuple(TrainerId(LARGEST - i) for i in range(n)))
VERDICTS = st.builds(
    Verdict,
    st.sampled_from(["RankLost", LONGEST_NAME]),
    st.sampled_from(["", "why", "x" * MAX_TEXT_BYTES, WIDE * MAX_TEXT_BYTES]),
    IDS.map(lambda id_: (id_,)) | MANY_IDS,
)
CALLS = st.sampled_from(
    [make_call(), make_call("sync"), make_call("gather"), make_call(LONGEST_NAME)]
)
OP_REPORTS = st.builds(
    OpReport,
    OPS,
    CALLS,
    completed=st.booleans(),
    verdict=st.none() | VERDICTS,
    contributors=MANY_IDS,
    holds=st.booleans(),
    is_root=st.booleans(),
)


def several(items: st.SearchStrategy[typing.Any], most: int = 2) -> st.SearchStrategy[typing.Any]:
    return st.lists(items, max_size=most).map(tuple)


def _many_waiting(count: int, job: JobName, *, apart: bool) -> tuple[Candidate, ...]:
    """All of one job, or each of its own."""
    return tuple(
        Candidate(JobName(f"{i:03}{job}"[:MAX_JOB_BYTES]) if apart else job, Slot(i), 1)
        for i in range(count)
    )


WAITING = st.builds(_many_waiting, st.sampled_from([0, 1, MAX_WAITING]), JOBS, apart=st.booleans())


def _many_ops(first: int, count: int, op: OpReport) -> tuple[OpReport, ...]:
    return tuple(
        msgspec.structs.replace(op, op=OpNumber(min(first + i, LARGEST - i))) for i in range(count)
    )


SEVERAL_OPS = several(OP_REPORTS) | st.builds(
    _many_ops, NUMBERS, st.sampled_from([2, 20]), OP_REPORTS
)


def _report_of_cara(*ops: OpReport) -> tuple[RankReport, ...]:
    return (RankReport(TrainerId(2), 0, ops),)


ALL_IDS = range(LARGEST - MAX_TRAINERS, LARGEST)
TOO_MUCH = st.builds(
    lambda count: _report_of_cara(*[completed(op, *ALL_IDS) for op in range(4, 4 + count)]),
    st.integers(4, 24),
)
"""More than a view holds, from some count on, in one job or in two together."""
LAST = st.just(_report_of_cara(completed(LARGEST, 0)))
"""The op after it has no number."""
RANKS = several(st.builds(RankReport, IDS, st.just(-1) | NUMBERS, SEVERAL_OPS)) | TOO_MUCH | LAST


def _many_ranks(count: int, op: OpReport) -> tuple[RankReport, ...]:
    return tuple(RankReport(TrainerId(LARGEST - i), 0, (op,)) for i in range(count))


def _about(roster: Roster, verdict: Verdict | None, op: OpNumber) -> ViewRequest:
    return ViewRequest(roster.job, roster.born, roster.number, verdict, op)


IT_IS_LOST = (_about(OURS, make_verdict("RankLost", 2), OpNumber(-1)),)
VIEW_REQUESTS = st.just(IT_IS_LOST) | several(
    st.builds(_about, st.sampled_from(BOTH.rosters), st.none() | VERDICTS, st.just(-1) | OPS),
    5,
)


OUTCOMES = several(st.builds(OpOutcome, OPS, MANY_IDS, MANY_IDS, st.none() | VERDICTS))


@st.composite
def brought(draw: st.DrawFn) -> View:
    """Dora's view, with a job in which anything may stand; some of its ranks may be elsewhere."""
    count, first = (
        draw(st.sampled_from([1, 2, 100, 400])),
        draw(st.sampled_from([0, LARGEST - 400])),
    )
    at = draw(st.sampled_from([(DORA,), (EMMA,), (DORA, EMMA)]))
    name = draw(NAMES)
    trainers = tuple(
        Trainer(TrainerId(first + i), at[i % len(at)], Slot(i), unsigned(name))
        for i in range(count)
    )
    lost = Trainer(TrainerId(first + count), DORA, Slot(0), unsigned(name))
    roster = Roster(
        job=draw(JOBS),
        born=make_epoch(2, DORA),
        number=2,
        trainers=trainers,
        primary=Primary(make_epoch(2, DORA), tuple(t.member for t in trainers)),
        next_id=TrainerId(draw(st.sampled_from([first + count + 1, LARGEST]))),
        terms=Terms(quorum=draw(st.sampled_from(["any", "majority"]))),
        outcomes=draw(OUTCOMES),
        lost_holders=(lost,) if draw(st.booleans()) else (),
        losses=draw(several(VERDICTS)),
    )
    said = unsigned(name)
    seats = (Seat(DORA, said, make_epoch(2, DORA), None), Seat(EMMA, said, make_epoch(2), None))
    return View(make_epoch(2, DORA), seats, (roster,))


def reports_on(view: View) -> st.SearchStrategy[typing.Any]:
    """On the first job of the view, and on its last one."""
    return st.tuples(
        *(
            st.builds(
                JobReport,
                job=st.just(roster.job),
                born=st.just(roster.born),
                number=st.just(roster.number),
                fenced=st.booleans(),
                ranks=RANKS | st.builds(_many_ranks, SIZES, OP_REPORTS),
            )
            for roster in dict.fromkeys((view.rosters[0], view.rosters[-1]))
        )
    )


def beats_of(view: View) -> st.SearchStrategy[Heartbeat]:
    """Whatever it says of its jobs and of the network, it hears all."""
    heard = {m.incarnation: MeasuredEdge(2**62, 2**32) for m in (*HONEST, CARA, DORA)}
    beat = make_heartbeat(view, *HONEST, CARA, DORA)
    return st.builds(
        partial(msgspec.structs.replace, beat, heard=heard),
        waiting=WAITING,
        view_requests=VIEW_REQUESTS,
        acting=st.booleans(),
    )


@examples(100)
@given(
    beats=beats_of(BOTH),
    jobs=reports_on(BOTH),
    waiting=WAITING,
    name=NAMES,
    idle=st.booleans(),
)
def test_whatever_a_member_with_a_seat_says_of_its_jobs(
    beats: Heartbeat,
    jobs: tuple[JobReport, ...],
    waiting: tuple[Candidate, ...],
    name: str,
    *,
    idle: bool,
) -> None:
    mesh = new_mesh(BOTH, idle=idle)
    for member in HONEST:
        mesh.tell(member, CARA, beats)
    mesh.beat()
    epoch = mesh.epoch or make_epoch(6)
    mesh.tell(ANNA, CARA, Flushed(epoch, unsigned(name), BOTH, jobs, waiting))
    mesh.beat()


@pytest.mark.slow
@examples(300)
@given(st.data())
def test_whatever_a_newcomer_says_of_its_view(data: st.DataObject) -> None:
    mesh, view = new_mesh(), data.draw(brought())
    beat = data.draw(beats_of(view))
    for member in HONEST:
        mesh.tell(member, CARA, make_heartbeat(BASE, *HONEST, DORA))
        mesh.tell(member, DORA, TellView(view))
        mesh.tell(member, DORA, beat)
    mesh.tell(ANNA, DORA, AskToJoin(view.epoch))
    mesh.beat()
    epoch, other = mesh.epoch or make_epoch(6), data.draw(brought())
    waiting = _many_waiting(2, other.rosters[0].job, apart=False)
    mesh.tell(ANNA, CARA, Flushed(epoch, unsigned("mac-c"), BASE, data.draw(reports_on(BASE))))
    reports = data.draw(reports_on(other))
    mesh.tell(ANNA, DORA, Flushed(epoch, unsigned(LONGEST_NAME), other, reports, waiting))
    mesh.beat()


# --- the seeds of what was found


def commits(mesh: HonestMembers, jobs: tuple[JobReport, ...] = ()) -> View:
    """Cara answers a proposal like this; the view that follows."""
    mesh.beat()
    assert mesh.epoch is not None
    mesh.tell(ANNA, CARA, Flushed(mesh.epoch, unsigned("mac-c"), BASE, jobs))
    view = mesh.states[ANNA].view
    assert view.epoch == mesh.epoch == mesh.states[BERT].view.epoch
    return view


def test_thousands_of_bytes_of_error_text_are_cut_where_they_are_made() -> None:
    verdict = Verdict("OpMismatch", "x" * 261_000)
    mesh = new_mesh()
    request = make_view_request(OURS, verdict, op=4)
    mesh.tell(ANNA, CARA, make_heartbeat(BASE, *HONEST, view_requests=[request]))
    (outcome,) = commits(mesh, (make_report(OURS, {2: [running(4)]}),)).rosters[0].outcomes
    assert outcome.verdict is not None
    assert len(outcome.verdict.message.encode()) == MAX_TEXT_BYTES


def test_a_view_names_no_more_losses_than_a_job_may_have_ranks() -> None:
    """A verdict takes six bytes and microseconds to read: a view could have had 40,000."""
    mesh = new_mesh()
    gone = [make_view_request(OURS, Verdict("", "", (TrainerId(i),))) for i in range(2, 1102)]
    assert nbytes_of(tuple(gone)) <= MAX_REQUESTS_BYTES
    mesh.facts[ANNA] = Facts(view_requests=tuple(gone[1000:]))
    mesh.tell(ANNA, CARA, make_heartbeat(BASE, *HONEST, view_requests=gone[:1000]))
    roster = commits(mesh).rosters[0]
    assert (roster.job, len(roster.losses)) == (OURS.job, MAX_TRAINERS)
    too_many = msgspec.structs.replace(roster, losses=(*roster.losses, Verdict("", "")))
    with pytest.raises(ProtocolError, match=f"length <= {MAX_TRAINERS}"):
        decode_untrusted(
            encode_unbounded(TellView(msgspec.structs.replace(BASE, rosters=(too_many,))))
        )


def test_an_op_with_the_highest_number_ends_its_job_and_no_other() -> None:
    """The next op, which the loss fails, has a number that no message may name."""
    mesh = new_mesh()
    report = make_report(OURS, {0: []}, fenced=False)
    mesh.facts = dict.fromkeys(HONEST, Facts(reports=lambda: (report,)))
    gone = make_view_request(OURS, make_verdict("RankLost", 2))
    mesh.tell(ANNA, CARA, make_heartbeat(BASE, *HONEST, view_requests=[gone]))
    last = completed(LARGEST, 0)
    assert [r.job for r in commits(mesh, (make_report(OURS, {2: [last]}),)).rosters] == [FACES]


def test_a_rank_that_reports_more_than_a_view_holds_ends_its_job_and_no_other() -> None:
    mesh = new_mesh()
    request = make_view_request(OURS, make_verdict(), op=4)
    mesh.tell(ANNA, CARA, make_heartbeat(BASE, *HONEST, view_requests=[request]))
    ops = [completed(op, *range(LARGEST - MAX_TRAINERS, LARGEST)) for op in range(4, 24)]
    view = commits(mesh, (make_report(OURS, {2: ops}),))
    assert [roster.job for roster in view.rosters] == [FACES]


def test_a_job_whose_last_agent_does_not_fence_it_ends() -> None:
    """All its ranks are lost, and the machine that holds their result names it still."""
    lost = make_trainer(1, CARA)
    outcome = make_outcome(4, 0, 1, holders=[1])
    spoilt = make_roster(EMMA, lost_holders=[lost], outcomes=[outcome], job=DIGITS)
    base = make_view(5, ANNA, BERT, CARA, EMMA, rosters=[spoilt, make_roster(*HONEST, job=FACES)])
    mesh = new_mesh(base)
    mesh.facts = dict.fromkeys(HONEST, Facts())
    mesh.tell(ANNA, CARA, make_heartbeat(base, *HONEST))
    mesh.beat()
    assert mesh.epoch is not None
    report = make_report(spoilt, {1: []}, fenced=False)
    mesh.tell(ANNA, CARA, Flushed(mesh.epoch, unsigned("mac-c"), base, (report,)))
    assert mesh.states[BERT].view.epoch == mesh.epoch
    assert [roster.job for roster in mesh.states[BERT].view.rosters] == [FACES]


def test_a_thousand_waiting_trainers_are_refused_at_the_one_who_says_so() -> None:
    many = tuple(make_waiting(1, slot) for slot in range(1000))
    assert not is_taken(CARA, make_heartbeat(BASE, waiting=many))
    assert is_taken(CARA, make_heartbeat(BASE, waiting=many[:MAX_WAITING]))
