"""What becomes of an op whose holders all go away before everyone has its result."""

import msgspec

from pmesh.core.messages import Call, Flushed, JobReport, OpReport, RankReport
from pmesh.core.rosters import jobs_to_settle, next_rosters, outcome_of
from pmesh.core.views import OpOutcome, Roster, Seat, Trainer, Verdict, View
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, OpNumber, Rank, Slot

A, B, C = (Member(NodeId(bytes([n]) * 32), Incarnation(n)) for n in (1, 2, 3))
JOB, OP, SLOT = JobName("digits"), OpNumber(3), Slot(0)
BORN, NOW, NEXT = (Epoch(counter, *A) for counter in (2, 3, 4))
LEFT = Verdict("RankLost", "rank 1 (b) is lost: its trainer left", (Rank(1),))
ROSTER = Roster(
    JOB,
    BORN,
    NOW.counter,
    tuple(Trainer(member, SLOT) for member in (A, B, C)),
    ("a", "b", "c"),
    (OpOutcome(OP, holders=(Rank(1),)),),
    (LEFT,),
)
"""Rank 1's trainer has left; its agent holds the result of the op that the others lack."""

VIEW = View(NOW, tuple(Seat(member, "x", BORN, BORN) for member in (A, B, C)), (ROSTER,))


def test_a_job_is_settled_when_the_agent_of_a_lost_rank_takes_the_last_result_along() -> None:
    assert jobs_to_settle(VIEW, (A, C), (), {}) == (JOB,)


def test_a_job_is_left_alone_while_one_holder_of_each_result_is_there() -> None:
    assert jobs_to_settle(VIEW, (A, B, C), (), {}) == ()


def test_the_op_then_fails_at_all_ranks_with_what_the_job_was_lost_for() -> None:
    def answer(member: Member, rank: int) -> Flushed:
        ops = (OpReport(OP, Call("barrier", "float32", ())),)
        report = JobReport(
            JOB, BORN, NOW.counter, fenced=True, ranks=(RankReport(Rank(rank), ops),)
        )
        return Flushed(Epoch(4, *A), member.node.hex()[:2], VIEW, (report,))

    answers = {A: answer(A, 0), C: answer(C, 2)}
    (after,) = next_rosters(
        VIEW,
        NEXT,
        ring=(A, C),
        continuing=(A, C),
        answers=answers,
        concerns=(),
        reasons={},
    )
    assert after.number == NEXT.counter
    assert outcome_of(after, OP) == OpOutcome(OP, verdict=LEFT)
    assert jobs_to_settle(View(NEXT, VIEW.seats[::2], (after,)), (A, C), (), {}) == ()


def test_a_job_is_not_brought_along_without_the_agent_that_holds_a_result() -> None:
    """Its agent came earlier, alone, and gave the job up: it would be asked in vain."""
    base = View(Epoch(5, *B), (Seat(B, "b", Epoch(5, *B), None),))
    answers = {
        B: Flushed(Epoch(6, *B), "b", base, ()),
        A: Flushed(Epoch(6, *B), "a", VIEW, ()),
        C: Flushed(Epoch(6, *B), "c", VIEW, ()),
    }

    def brought_along(outcomes: tuple[OpOutcome, ...]) -> tuple[Roster, ...]:
        view = View(NOW, VIEW.seats, (msgspec.structs.replace(ROSTER, outcomes=outcomes),))
        told = {
            m: msgspec.structs.replace(a, view=view) if m != B else a for m, a in answers.items()
        }
        return next_rosters(
            base,
            Epoch(6, *B),
            ring=(A, B, C),
            continuing=(B,),
            answers=told,
            concerns=(),
            reasons={},
        )

    assert brought_along(ROSTER.outcomes) == ()
    assert [r.job for r in brought_along((OpOutcome(OP, holders=(Rank(1), Rank(2))),))] == [JOB]
