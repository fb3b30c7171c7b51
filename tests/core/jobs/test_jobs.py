"""The jobs of one agent, as trainers come and go, views are installed and heartbeats arrive."""

from collections.abc import Iterable

import msgspec
import pytest

from pmesh.core.jobs import jobs as engine
from pmesh.core.jobs.jobs import LEAVE_GRACE_S, LEFT, JobsState, WaitingTrainer
from pmesh.core.jobs.rank import RankState
from pmesh.core.values import Roster, Terms, Trainer, View, nbytes_of
from pmesh.core.views.state import MemberState, Peer
from pmesh.core.wire.calls import Call
from pmesh.core.wire.views import MAX_REQUESTS_BYTES, Candidate, RankProgress
from pmesh.ids import Slot
from tests.worlds.builders import (
    BERT,
    DIGITS,
    FACES,
    make_epoch,
    make_heartbeat,
    make_roster,
    make_seat,
    make_state,
    make_waiting,
    unsigned,
)
from tests.worlds.ranks import (
    BARRIER,
    ME,
    ONE,
    OTHER,
    RESULT,
    THIRD,
    ZERO,
    A,
    RunsByItself,
    rank_of,
    roster,
    trainer,
)

Waiter = WaitingTrainer[RankState[str]]
GATHER = Call("gather", "float32", (), root=1)
Here = JobsState[Waiter, RankState[str]]
SelfRunning = WaitingTrainer[RunsByItself]
THERE = Trainer(OTHER, BERT, Slot(0), unsigned("b"))
APART = roster(2, trainers=[trainer(ME), THERE])
"""One of its ranks is here, the other at Bert's."""


def view_of(*rosters: Roster) -> View:
    seats = tuple(make_seat(member) for member in (A, BERT))
    return View(make_epoch(3, A), seats, rosters)


def told_by_bert(view: View, *progress: RankProgress, waiting: Iterable[Candidate] = ()) -> Peer:
    beat = msgspec.structs.replace(make_heartbeat(view, A, waiting=waiting), progress=progress)
    return Peer(member=BERT, heartbeat=beat, view=view)


def jobs_here(*, min_peers: int = 0, alone_from: float = 0.0) -> Here:
    def make_rank(first: Roster, at: Trainer, _: Waiter) -> RankState[str]:
        return RankState[str](first, at)

    return JobsState(A, make_rank, min_peers=min_peers, alone_from=alone_from)


def make_waiter() -> Waiter:
    return WaitingTrainer(job=DIGITS, wait_for=2, terms=Terms())


def begun(first: Roster, *, count: int = 1) -> tuple[Here, MemberState]:
    """The job has begun with so many trainers here."""
    here, view = jobs_here(), view_of(first)
    for _ in range(count):
        here.add(make_waiter())
    state = make_state(A, view, told_by_bert(view))
    assert len(here.follow(state, view, 0.0).begun) == count
    return here, state


def test_who_waits_is_told_and_has_a_rank_once_the_job_begins() -> None:
    here, waiter = jobs_here(), make_waiter()
    here.add(waiter)
    state = make_state(A, view_of())
    assert here.known(state, 0.0).waiting == (make_waiting(2),)
    installed = here.follow(state, view_of(APART), 0.0)
    (rank,) = here.ranks
    assert installed.begun == ((waiter, rank),)
    assert waiter.rank is rank
    assert not here.known(state, 0.0).waiting
    assert not here.follow(state, view_of(APART), 0.0).begun


def test_who_waits_for_one_job_goes_on_waiting_if_a_view_gives_its_place_to_another() -> None:
    """As a leader that lies may."""
    here, waiter = jobs_here(), make_waiter()
    here.add(waiter)
    faces = msgspec.structs.replace(APART, job=FACES)
    state = make_state(A, view_of())
    assert not here.follow(state, view_of(faces), 0.0).begun
    (request,) = here.known(state, 0.0).view_requests
    assert request.job == FACES
    assert here.known(state, 0.0).waiting == (make_waiting(2),)
    (begun_now,) = here.follow(state, view_of(APART), 0.0).begun
    assert begun_now[0] is waiter


def test_who_waits_for_a_job_to_begin_is_not_let_in_before_its_sync_if_it_has_begun() -> None:
    here, view = jobs_here(), view_of(make_roster(BERT))
    here.add(WaitingTrainer(job=DIGITS, wait_for=2, terms=Terms(), begins=True))
    assert here.known(make_state(A, view_of()), 0.0).waiting == (make_waiting(2),)
    assert not here.known(make_state(A, view), 0.0).waiting
    here.add(make_waiter())
    assert here.known(make_state(A, view), 0.0).waiting == (make_waiting(2, 1),)


@pytest.mark.parametrize(
    ("min_peers", "alone_from", "member_count", "waits"),
    [(0, 0.0, 1, True), (0, 9.0, 1, False), (0, 9.0, 2, True), (2, 0.0, 2, False)],
)
def test_no_job_begins_before_an_agent_has_looked_for_its_mesh(
    min_peers: int, alone_from: float, member_count: int, *, waits: bool
) -> None:
    here = jobs_here(min_peers=min_peers, alone_from=alone_from)
    here.add(make_waiter())
    view = msgspec.structs.replace(view_of(), seats=view_of().seats[:member_count])
    state = make_state(A, view)
    assert bool(here.known(state, 5.0).waiting) == waits
    assert here.newcomers_to(state, DIGITS, 5.0) == waits


def test_newcomers_are_those_who_wait_elsewhere_and_have_no_place_yet() -> None:
    view = view_of(APART)
    waiting = [make_waiting(2, slot) for slot in (0, 1)] + [make_waiting(2, 2, FACES)]
    state = make_state(A, view, told_by_bert(view, waiting=waiting))
    here = jobs_here()
    assert here.waiting_at(state, DIGITS) == {A: 0, BERT: 1}  # slot 0 is in it by our view
    assert here.newcomers_to(state, DIGITS, 0.0) == 1
    assert here.newcomers_to(state, FACES, 0.0) == 1


def test_who_waits_for_more_than_a_members_share_of_the_view_finds_no_room() -> None:
    here, full = jobs_here(), make_roster(*[A] * 400, job=FACES)
    state = make_state(A, view_of(full))
    waiter = make_waiter()
    here.add(waiter)
    assert not here.lacks_room(make_state(A, view_of()), waiter, 0.0)
    assert here.lacks_room(state, waiter, 0.0)
    assert here.newcomers_to(state, DIGITS, 0.0) == 0


def test_a_view_with_far_more_trainers_than_live_here_makes_no_heartbeat_too_large() -> None:
    """A leader may invent them; what is not asked for now is once these are settled."""
    here, view = jobs_here(), view_of(make_roster(*[A] * 1000))
    state = make_state(A, view)
    here.follow(state, view, 0.0)
    requests = here.known(state, 0.0).view_requests
    assert nbytes_of(requests) <= MAX_REQUESTS_BYTES
    assert 200 < len(requests) < 1000


def test_a_trainer_that_gave_up_while_its_job_began_is_lost() -> None:
    here, state = jobs_here(), make_state(A, view_of(APART))
    for _ in range(2):
        here.follow(state, view_of(APART), 0.0)
        (view_request,) = here.known(state, 0.0).view_requests
        assert view_request.verdict is not None
        assert (view_request.verdict.error, view_request.verdict.trainers) == ("RankLost", (ME,))
    here.follow(state, view_of(), 0.0)
    assert not here.known(state, 0.0).view_requests


def test_ranks_of_one_job_are_reported_together() -> None:
    here, state = begun(roster(2), count=2)
    known = here.known(state, 0.0)
    (report,) = known.reports()
    assert [rank.trainer for rank in report.ranks] == [ME, OTHER]
    assert len(known.progress) == 2
    assert here.neighbour(here.ranks[0], OTHER) is here.ranks[1]
    assert here.neighbour(here.ranks[0], THIRD) is None


def test_behind_a_fence_are_the_jobs_of_a_proposal_and_all_while_an_agent_doubts() -> None:
    here, _ = begun(APART)
    (rank,) = here.ranks
    here.fence((FACES,))
    assert not rank.fences
    here.fence((DIGITS,))
    here.doubt()
    assert rank.fences == {"view change", "own stall"}
    here.trust()
    assert rank.fences == {"view change"}


def test_a_rank_that_begins_while_its_agent_doubts_is_fenced() -> None:
    here = jobs_here()
    here.doubt()
    here.add(make_waiter())
    here.follow(make_state(A, view_of(APART)), view_of(APART), 0.0)
    assert here.ranks[0].fences == {"own stall"}


def test_a_view_renumbers_a_rank_or_ends_it() -> None:
    here, state = begun(APART)
    (rank,) = here.ranks
    later = msgspec.structs.replace(APART, number=3)
    assert here.follow(state, view_of(later), 0.0).renumbered == (rank,)
    assert not here.follow(state, view_of(later), 0.0).renumbered
    assert here.follow(state, view_of(), 0.0).ended == (rank,)
    assert not here.ranks
    assert rank.over is not None
    assert "fell out of its view" in rank.over.message


def test_another_run_under_the_same_name_ends_the_older_rank() -> None:
    """V9."""
    here, state = begun(APART)
    (rank,) = here.ranks
    other = msgspec.structs.replace(APART, born=make_epoch(9, BERT), number=9, trainers=(THERE,))
    assert here.follow(state, view_of(other), 0.0).ended == (rank,)
    assert rank.over is not None
    assert "goes on without this rank" in rank.over.message


def test_a_loss_is_told_at_once_and_a_leave_in_order_after_a_grace() -> None:
    here, state = begun(APART)
    (rank,) = here.ranks
    rank.start(ZERO, BARRIER)
    rank.complete(ZERO, RESULT, (ME, OTHER))
    assert not here.leave(rank, LEFT, 5.0)
    assert not here.pass_time(state, 5.0 + LEAVE_GRACE_S / 2).leaving
    assert here.pass_time(state, 5.0 + LEAVE_GRACE_S).leaving == (rank,)
    assert rank.view_request is not None
    assert rank.view_request.verdict is not None
    assert rank.view_request.verdict.message == "rank 0 (mac-0) has left the job"
    assert not here.leave(rank, "is lost: its trainer died", 7.0)  # it is told already
    # A view that did not know of it is told again.
    later = msgspec.structs.replace(APART, number=3)
    assert here.follow(state, view_of(later), 8.0).leaving == (rank,)


def test_a_rank_that_leaves_stays_until_an_op_that_is_bound_to_it_has_ended_everywhere() -> None:
    here, state = begun(APART)
    (rank,) = here.ranks
    rank.start(ZERO, GATHER)
    rank.complete(ZERO, RESULT, (ME, OTHER))
    assert not here.leave(rank, LEFT, 5.0)
    assert not here.pass_time(state, 5.0 + 60 * LEAVE_GRACE_S).leaving
    rank.stabilize(ZERO)
    assert here.pass_time(state, 5.0 + 61 * LEAVE_GRACE_S).leaving == (rank,)


def test_who_dies_has_no_grace() -> None:
    here, _ = begun(APART)
    here.ranks[0].start(ZERO, BARRIER)
    assert here.leave(here.ranks[0], "is lost: its trainer died", 0.0)


def mark_of(ended: int = 0, print_: int = 1, *, stopped: bool = False) -> RankProgress:
    return RankProgress(DIGITS, 2, OTHER, 0, ended, print_, -1, stopped)


def test_a_heartbeat_tells_what_is_stable_and_whose_process_is_stopped() -> None:
    here, state = begun(APART)
    (rank,) = here.ranks
    rank.start(ZERO, BARRIER)
    rank.complete(ZERO, RESULT, (ME, OTHER))
    mark = mark_of(stopped=True, print_=rank.fingerprint)
    beat = told_by_bert(view_of(APART), mark).heartbeat
    heard = here.hear(state, BERT, beat)
    assert (heard.stops, heard.differs) == ((mark,), False)
    assert rank.ledger.stable == 0
    assert not here.hear(state, BERT, beat).stops  # it is known


def begun_by_itself() -> tuple[JobsState[SelfRunning, RunsByItself], MemberState, RunsByItself]:
    """The job has begun with one trainer here, whose rank runs ops by itself."""
    here = JobsState[SelfRunning, RunsByItself](A, lambda first, at, _: RunsByItself(first, at))
    here.add(WaitingTrainer(job=DIGITS, wait_for=2, terms=Terms()))
    view = view_of(APART)
    state = make_state(A, view, told_by_bert(view))
    ((_, rank),) = here.follow(state, view, 0.0).begun
    return here, state, rank


def test_a_heartbeat_says_how_far_a_rank_has_come_that_runs_ops_by_itself() -> None:
    here, state, rank = begun_by_itself()
    rank.end_ops(ONE)
    known = here.known(state, 0.0)
    assert [mark.completed for mark in known.progress] == [ONE]
    assert rank.serves
    (report,) = known.reports()  # which only a flush asks for
    assert [op.op for op in report.ranks[0].ops] == [ONE]
    assert not rank.serves


def test_what_a_rank_has_run_by_itself_is_stable_once_the_others_have_ended_it() -> None:
    here, state, rank = begun_by_itself()
    rank.end_ops(ONE)
    mark = RankProgress(DIGITS, 2, OTHER, ONE, ONE)
    here.hear(state, BERT, told_by_bert(view_of(APART), mark).heartbeat)
    assert rank.ledger.stable == ONE
    assert not rank.results
    assert rank.serves


def test_what_a_mark_says_of_another_run_or_view_is_not_about_ours() -> None:
    here, state = begun(APART)
    beat = told_by_bert(view_of(APART), mark_of()).heartbeat
    for strange in (
        make_state(A, view_of(APART)),  # no such peer
        make_state(A, view_of(), told_by_bert(view_of(APART))),  # not our job any more
        make_state(A, view_of(APART), told_by_bert(view_of())),  # not theirs
    ):
        here.hear(strange, BERT, beat)
        assert here.progress.of(APART, OTHER) is None
    not_his = msgspec.structs.replace(mark_of(), trainer=ME)
    for strange_beat in (
        msgspec.structs.replace(beat, view=make_epoch(1)),
        msgspec.structs.replace(beat, progress=(not_his,)),
    ):
        here.hear(state, BERT, strange_beat)
    assert here.progress.of(APART, OTHER) is None


def test_calls_that_differ_are_told_to_the_leader_once() -> None:
    """I5."""
    here, state = begun(APART)
    (rank,) = here.ranks
    rank.start(ZERO, BARRIER)
    beat = told_by_bert(view_of(APART), mark_of(ended=-1)).heartbeat
    assert here.hear(state, BERT, beat).differs
    assert rank.view_request is not None
    assert not here.hear(state, BERT, beat).differs


@pytest.mark.parametrize(
    "trainers",
    [[trainer(ME)], [trainer(OTHER)], [trainer(ME), trainer(OTHER, ONE)]],
)
def test_only_those_who_are_in_an_op_are_compared(trainers: list[Trainer]) -> None:
    """Who has just entered has called nothing, and what a lost rank has called does not matter."""
    rank = rank_of()
    rank.start(ZERO, BARRIER)
    rank.roster = msgspec.structs.replace(rank.roster, trainers=tuple(trainers))
    assert not engine.compare_calls(rank, mark_of())


@pytest.mark.parametrize(("ours", "theirs", "differ"), [(1, 2, True), (0, 2, False), (1, 0, False)])
def test_what_has_been_taken_back_is_not_compared(ours: int, theirs: int, *, differ: bool) -> None:
    """I5: 0 stands for no call."""
    rank = rank_of()
    rank.start(ZERO, BARRIER)
    rank.fingerprint = ours
    assert engine.compare_calls(rank, mark_of(print_=theirs)) == differ


def test_ranks_on_one_machine_are_compared_as_time_passes() -> None:
    here, state = begun(roster(2), count=2)
    one, other = here.ranks
    one.start(ZERO, BARRIER)
    other.start(ZERO, msgspec.structs.replace(BARRIER, shape=(9,)))
    assert here.pass_time(state, 0.0).stuck
    assert one.view_request is not None
    assert not here.pass_time(state, 0.0).stuck


def test_lanes_that_stand_still_are_told_to_the_leader() -> None:
    """V6."""
    here, state = begun(APART)
    (rank,) = here.ranks
    rank.start(ZERO, BARRIER)
    here.progress.hear(mark_of(ended=-1, print_=rank.fingerprint))
    assert not here.pass_time(state, 0.0).stuck
    assert here.pass_time(state, rank.patience_s).stuck
    assert rank.view_request is not None
    assert (rank.view_request.verdict, rank.view_request.op) == (None, 0)


def test_a_lost_rank_ends_once_nobody_asks_for_its_results() -> None:
    here, state = begun(roster(2), count=2)
    rank = here.ranks[1]
    rank.start(ZERO, BARRIER)
    rank.complete(ZERO, RESULT, (ME, OTHER))
    without = roster(3, trainers=[trainer(ME)], lost_holders=[trainer(OTHER)])
    here.follow(state, view_of(without), 0.0)
    assert not here.pass_time(state, 0.0).ended
    rank.stabilize(0)
    assert here.pass_time(state, 0.0).ended == (rank,)
    assert rank.over == rank.why_superseded
    assert not rank.results
