"""Who gets room in a view, and what goes if there is too little."""

import pytest

from pmesh.core.values import (
    MAX_JOB_BYTES,
    MAX_JOBS,
    MAX_MEMBERS,
    MAX_ROSTERS_BYTES,
    MAX_TEXT_BYTES,
    MAX_TRAINERS,
    Roster,
    Verdict,
    nbytes_of,
)
from pmesh.core.views.limits import check_view
from pmesh.core.views.room import ADMITTED_BYTES, admit, fit, fit_answer
from pmesh.core.wire.channels import MAX_MESSAGE_BYTES, encode
from pmesh.core.wire.views import MAX_WAITING, Candidate, OpReport
from pmesh.errors import ProtocolError
from pmesh.ids import (
    MAX_NAME,
    Incarnation,
    JobName,
    Member,
    NodeId,
    OpNumber,
    Slot,
    TrainerId,
)
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DORA,
    make_call,
    make_flushed,
    make_outcome,
    make_report,
    make_roster,
    make_view,
    make_waiting,
    running,
)

LONGEST_NAME = "\N{CAT FACE}" * MAX_NAME
OURS = make_roster(ANNA, BERT, CARA)
BASE = make_view(5, ANNA, BERT, CARA, rosters=[OURS])


def trainers_of(*jobs: str) -> tuple[Candidate, ...]:
    return tuple(Candidate(JobName(job), Slot(i), 1) for i, job in enumerate(jobs))


def test_one_members_waiting_trainers_displace_nobody_elses() -> None:
    many = trainers_of(*(f"{i:03}".ljust(MAX_JOB_BYTES, "j") for i in range(MAX_WAITING)))
    waiting = {ANNA: trainers_of("z"), CARA: many}
    admitted = admit((), waiting, {ANNA: "mac-a", CARA: LONGEST_NAME})
    assert admitted[ANNA] == waiting[ANNA]
    assert 0 < len(admitted[CARA]) < MAX_WAITING
    assert admitted[CARA] == many[: len(admitted[CARA])]  # the others come later, in this order


def test_all_trainers_that_an_agent_serves_find_room() -> None:
    waiting = {ANNA: trainers_of(*["digits"] * MAX_WAITING)}
    assert admit((), waiting, {ANNA: "mac-mini"}) == waiting


def test_all_members_together_are_admitted_no_more_than_a_view_holds() -> None:
    members = [Member(NodeId(bytes([i]) * 32), Incarnation(2**62 + i)) for i in range(MAX_MEMBERS)]
    waiting = dict.fromkeys(members, trainers_of(*["digits"] * MAX_WAITING))
    admitted = admit((), waiting, dict.fromkeys(members, "mac"))
    counts = {len(theirs) for theirs in admitted.values()}
    assert 0 < min(counts) == max(counts) - 1
    roster = make_roster(*(m for m, theirs in admitted.items() for _ in theirs))
    assert roster.lasting_bytes <= ADMITTED_BYTES


def test_there_is_a_most_of_jobs_and_of_ranks() -> None:
    full = [make_roster(ANNA, job=JobName(f"{i}")) for i in range(MAX_JOBS)]
    assert admit(full, {BERT: trainers_of("new")}, {BERT: ""}) == {BERT: ()}


def big(job: str, *members: Member, texts: int = 0, number: int = 5) -> Roster:
    """A roster with so many losses, each with the longest text."""
    losses = [Verdict("RankLost", "x" * MAX_TEXT_BYTES, (TrainerId(i),)) for i in range(texts)]
    return make_roster(*members, job=JobName(job), losses=losses, number=number)


def test_where_there_is_room_a_view_keeps_all_its_jobs_as_they_are() -> None:
    rosters = [big("a", ANNA, texts=20), big("b", CARA, texts=20)]
    assert fit(rosters, {}) == tuple(rosters)


def test_where_there_is_none_texts_get_short() -> None:
    a, b = fit([big("a", ANNA, CARA, texts=50), big("b", CARA)], {})
    assert {len(loss.message) for loss in a.losses} == {62}
    assert b == big("b", CARA)


def lost(job: str, *members: Member, holders: int) -> Roster:
    """A roster that a view change has made large, in what can't be shortened."""
    outcomes = [make_outcome(op, *range(1000, 1000 + holders)) for op in range(2, 34)]
    return make_roster(*members, job=JobName(job), outcomes=outcomes)


def test_where_even_that_is_not_enough_the_jobs_of_who_uses_most_end() -> None:
    honest = lost("honest", ANNA, CARA, holders=100)  # which Cara has entered, too
    caras = [lost(f"cara-{i}", CARA, holders=90) for i in range(12)]
    rosters = sorted([honest, *caras], key=lambda roster: roster.job)
    kept = fit(rosters, {roster.job: roster for roster in rosters})
    assert honest in kept
    assert sum(roster.nbytes for roster in kept) <= MAX_ROSTERS_BYTES
    assert list(kept) == sorted(kept, key=lambda roster: roster.job)


def test_of_jobs_that_a_newcomer_brings_all_counts() -> None:
    ours = [lost("ours", ANNA, BERT, holders=300)]
    theirs = lost("theirs", DORA, holders=900)
    assert fit([*ours, theirs], {roster.job: roster for roster in ours}) == tuple(ours)


def test_a_flush_answer_gives_up_the_texts_and_who_waits_before_it_is_too_large() -> None:
    failed = OpReport(OpNumber(4), make_call(), verdict=Verdict("RankLost", "x" * 9000))
    ran = running(5)
    report = make_report(OURS, {i: [failed, ran] for i in range(200)})
    answer = make_flushed(ANNA, BASE, jobs=[report], waiting=[make_waiting(1)])
    assert nbytes_of(answer) > MAX_MESSAGE_BYTES
    fitting = fit_answer(answer)
    assert fitting.waiting == ()
    assert fitting.jobs[0].ranks[0].ops[1] == ran
    encode(fitting)
    assert fit_answer(fitting) is fitting


def test_a_view_that_is_too_large_is_refused() -> None:
    roster = lost("large", ANNA, holders=MAX_TRAINERS)
    with pytest.raises(ProtocolError, match="rosters of"):
        check_view(make_view(5, ANNA, rosters=[roster]))
