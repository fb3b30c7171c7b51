"""Events: numbered, bounded, sent to the listener, documented; and those of a view change."""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pmesh.agent.changes import describe_change, describe_reordered
from pmesh.agent.events import (
    EVENTS_SCHEMA_VERSION,
    KEPT,
    MAX_NAMES,
    MAX_TEXT,
    PAGE_BYTES,
    Event,
    EventLog,
    EventPage,
    News,
    decode_events,
    encode_events,
)
from pmesh.agent.schema import json_schema
from pmesh.core.jobs.jobs import LEFT
from pmesh.core.topology.graph import Graph, measured_graph
from pmesh.core.values import OpOutcome, Primary, Roster, Seat, Terms, Trainer, Verdict, View
from pmesh.core.wire.control import AgentEvents
from pmesh.core.wire.session import MAX_SESSION_MESSAGE_BYTES, encode
from pmesh.core.wire.views import RELAYED, MeasuredEdge
from pmesh.errors import UsageError
from pmesh.ids import (
    Epoch,
    Incarnation,
    JobName,
    Member,
    NodeId,
    OpNumber,
    Slot,
    TrainerId,
    node_text,
)
from tests.worlds.builders import unsigned

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "events.schema.json"
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
ME = Member(NodeId(b"a" * 32), Incarnation(0xBEEF))


class ManualClocks:
    """Both clocks, moved by hand."""

    now_s = 100.0
    wall = NOON


def event_log(
    clock: ManualClocks | None = None, listener: Callable[[Event], None] = lambda _: None
) -> EventLog:
    at = clock or ManualClocks()
    return EventLog(
        ME, "studio", clock=lambda: at.now_s, wall_clock=lambda: at.wall, listener=listener
    )


def test_an_event_has_a_number_two_times_and_what_it_is_about() -> None:
    clock = ManualClocks()
    events = event_log(clock)
    clock.now_s += 2.5
    clock.wall -= timedelta(days=1)  # somebody has set the clock
    events.note(
        "ring stood still",
        "job 'digits': the ring stood still for 0.134 s",
        job=JobName("digits"),
        op=OpNumber(17),
        names=("mini", "air"),
        duration_s=0.134,
    )
    assert events.since(-1).events == (
        Event(
            number=0,
            time=NOON - timedelta(days=1),
            uptime_s=2.5,
            kind="ring stood still",
            text="job 'digits': the ring stood still for 0.134 s",
            job=JobName("digits"),
            op=OpNumber(17),
            names=("mini", "air"),
            duration_s=0.134,
        ),
    )


def test_a_page_says_whose_events_they_are_and_what_comes_next() -> None:
    events = event_log()
    assert (events.since(-1).events, events.since(-1).next) == ((), 0)
    events.note("agent started", "studio is up")
    page = events.since(-1)
    assert (page.node, page.name, page.next) == (node_text(ME.node), "studio", 1)
    assert page.incarnation == "000000000000beef"


def test_who_listens_hears_each_event_and_whether_a_person_wants_to() -> None:
    heard: list[Event] = []
    events = event_log(listener=heard.append)
    events.note("op rerun", "op 3 runs again")
    events.add(News(kind="peer lost", text="mini is gone"))
    assert [(e.number, e.text, e.is_announced) for e in heard] == [
        (0, "op 3 runs again", False),
        (1, "mini is gone", True),
    ]


def test_no_text_of_others_controls_a_terminal_or_begins_a_line() -> None:
    events = event_log()
    events.note("peer lost", "mac\x1b]0;x\x07 is gone: ok\nring: mac-1 alone")
    assert events.since(-1).events[0].text == "mac�]0;x� is gone: ok ring: mac-1 alone"


@given(count=st.integers(0, 2 * KEPT + 1), after=st.integers(-3, 2 * KEPT + 3))
def test_the_last_thousand_events_are_kept_and_told_from_any_number_on(
    count: int, after: int
) -> None:
    events = event_log()
    for number in range(count):
        events.note("view", str(number))
    kept = range(max(0, count - KEPT), count)
    told = [(e.number, e.text) for e in events.since(after).events]
    assert told == [(number, str(number)) for number in kept if number > after]


@pytest.mark.parametrize("after", [2**63 - 1, 2**100, -(2**100)])
def test_a_number_beyond_all_events_is_no_harm(after: int) -> None:
    events = event_log()
    events.note("view", "one")
    assert len(events.since(after).events) == (after < 0)


def test_no_page_exceeds_what_a_session_may_carry_and_asking_again_gives_the_rest() -> None:
    events = event_log()
    for number in range(KEPT):
        names = tuple("🐍" * 64 for _ in range(MAX_NAMES + 36))
        events.note("view", f"{number} " + "\x1b" * 10 * MAX_TEXT, names=names)
    told: list[Event] = []
    while not told or told[-1].number + 1 < KEPT:
        page = events.since(told[-1].number if told else -1)
        assert page.next == KEPT
        assert len(encode(AgentEvents(encode_events(page)))) < MAX_SESSION_MESSAGE_BYTES
        told += page.events
        assert len(encode_events(page)) > PAGE_BYTES or told[-1].number == KEPT - 1
    assert [event.number for event in told] == list(range(KEPT))
    assert {len(event.text) for event in told} == {MAX_TEXT}
    assert {len(event.names) for event in told} == {MAX_NAMES}
    assert told[0].text.endswith("…")


def test_events_survive_their_json() -> None:
    events = event_log()
    events.note("peer joined", "mini joined", names=("mini",))
    page = events.since(-1)
    assert decode_events(encode_events(page)) == page
    (event,) = json.loads(encode_events(page))["events"]
    assert event["time"] == "2026-11-22T12:00:00Z"
    assert event["kind"] == "peer joined"


def test_the_schema_in_the_reference_is_current() -> None:
    assert REFERENCE.read_bytes() == json_schema(EventPage), "run: python tools/status_schema.py"


def test_a_field_of_a_later_pmesh_is_ignored() -> None:
    page = event_log().since(-1)
    later = json.loads(encode_events(page)) | {"news": 1}
    assert decode_events(msgspec.json.encode(later)) == page


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"schema": 1}'])
def test_another_schema_says_what_to_do(data: bytes) -> None:
    with pytest.raises(UsageError, match=rf"\({EVENTS_SCHEMA_VERSION}\).*restart the agent"):
        decode_events(data)


A, B, C, D = (Member(NodeId(bytes([i]) * 32), Incarnation(i)) for i in (1, 2, 3, 4))
NAMES = {A: "studio", B: "mini (2)", C: "air", D: "cube"}
DIGITS = JobName("digits")
name_of = attrgetter("name")


def view(*members: Member, counter: int = 1, rosters: tuple[Roster, ...] = ()) -> View:
    epoch = Epoch(counter, *A)
    seats = tuple(Seat(member, unsigned(NAMES[member]), epoch, None) for member in members)
    return View(epoch, seats, rosters)


def trainer(number: int, member: Member, enters: int = 0) -> Trainer:
    return Trainer(TrainerId(number), member, Slot(0), unsigned(NAMES[member]), OpNumber(enters))


def roster(*trainers: Trainer, number: int = 2, born: int = 2, next_id: int = 2) -> Roster:
    epoch = Epoch(born, *A)
    voters = tuple(t.member for t in trainers)
    return Roster(DIGITS, epoch, number, trainers, Primary(epoch, voters), TrainerId(next_id))


TWO = roster(trainer(0, A), trainer(1, B))


def told(before: Roster | None, after: Roster | None, *, counter: int = 9) -> list[News]:
    """What is told of a job whose roster changes."""
    old, new = ((r,) if r else () for r in (before, after))
    change = view(A, B, rosters=old), view(A, B, counter=counter, rosters=new)
    return list(describe_change(*change, {}, me=A, name_of=name_of))


def texts(news: Iterator[News]) -> list[str]:
    return [one.text for one in news]


def kinds_and_texts(news: list[News]) -> list[tuple[str, str]]:
    return [(one.kind, one.text) for one in news]


def test_who_joins_is_named_with_the_ring_and_its_leader() -> None:
    news = list(describe_change(view(A), view(B, A, C), {}, me=A, name_of=name_of))
    assert kinds_and_texts(news) == [
        ("peer joined", "mini (2) joined"),
        ("peer joined", "air joined"),
        ("view", "ring: mini (2) → studio (this machine) → air → mini (2); leader studio"),
    ]
    assert [one.names for one in news] == [
        ("mini (2)",),
        ("air",),
        ("mini (2)", "studio", "air"),
    ]


def test_who_is_gone_is_named_with_the_reason_that_is_known() -> None:
    before = view(A, B, C)
    assert texts(
        describe_change(before, view(A), {B: "silent for 2.0 s"}, me=A, name_of=name_of)
    ) == [
        "mini (2) is gone: silent for 2.0 s",
        "air is gone: it continues without this machine",
        "alone: no other machine of this mesh is here",
    ]
    assert texts(describe_change(before, view(A, B), {}, me=A, name_of=name_of))[0] == (
        "air is gone: the others no longer hear it"
    )


def test_a_view_that_only_settles_ops_is_no_news() -> None:
    settled = replace(TWO, number=9, outcomes=(OpOutcome(OpNumber(3), TWO.ids, TWO.ids),))
    assert not told(TWO, TWO)
    assert not told(TWO, settled)


def test_a_ring_that_avoids_a_slow_edge_says_which_and_what_it_gains() -> None:
    slow, fast = MeasuredEdge(500, 94), MeasuredEdge(500, 940)
    four = [trainer(number, member) for number, member in enumerate((A, B, C, D))]
    before, after = (roster(*(four[i] for i in order)) for order in ((0, 1, 2, 3), (0, 2, 1, 3)))
    members = (A, B, C, D)

    def said(**speeds: MeasuredEdge) -> list[tuple[str, str]]:
        heard = {m: {o.incarnation: fast for o in members if o != m} for m in members}
        heard[A][B.incarnation] = heard[B][A.incarnation] = speeds.get("ab", fast)
        one, other = (view(A, B, C, D, rosters=(r,)) for r in (before, after))
        news = describe_reordered(
            one, other, lambda members: measured_graph(members, heard), name_of=name_of
        )
        return kinds_and_texts(list(news))

    gain = "job 'digits': its ring is 9.5x faster: mini (2) - studio at 94 Mbit/s is avoided"
    assert said(ab=slow) == [("view", gain)]
    (relayed,) = said(ab=MeasuredEdge(500, RELAYED))
    assert relayed[1].endswith("mini (2) - studio which is relayed is avoided")
    here = [roster(*(trainer(i, A) for i in order)) for order in ((0, 1), (1, 0))]
    one, other = (view(A, rosters=(r,)) for r in here)

    def alone(members: Iterable[Member]) -> Graph:
        return measured_graph(members, {})

    assert list(describe_reordered(one, other, alone, name_of=name_of)) == []
    assert said() == []  # ranks have changed places for another reason
    begun = view(A, rosters=(after,))
    assert list(describe_reordered(view(A), begun, alone, name_of=name_of)) == []


def test_a_job_begins_and_ends_and_another_run_of_it_begins() -> None:
    begun = roster(trainer(0, A), trainer(1, B), born=9, number=9)
    (begins,) = told(None, begun)
    assert (begins.kind, begins.text) == ("job began", "job 'digits' begins with 2 ranks")
    assert (begins.job, begins.names) == ("digits", ("studio", "mini (2)"))
    assert kinds_and_texts(told(TWO, None)) == [("job ended", "job 'digits' has ended")]
    assert [one.kind for one in told(TWO, begun)] == ["job began", "job ended"]


def test_a_job_that_ran_before_this_agent_came_has_not_just_begun() -> None:
    assert kinds_and_texts(told(None, TWO)) == [
        ("job found", "job 'digits' was running already, with 2 ranks")
    ]


def test_a_lost_rank_is_named_with_the_reason_that_the_view_gives() -> None:
    lost = Verdict("RankLost", "rank 1 (mini (2)) is lost: its trainer died", (TrainerId(1),))
    (loss,) = told(TWO, replace(TWO, number=9, trainers=TWO.trainers[:1], losses=(lost,)))
    assert loss.kind == "rank lost"
    assert loss.text == "job 'digits': rank 1 (mini (2)) is lost: its trainer died"
    assert (loss.job, loss.names) == ("digits", ("mini (2)",))


def test_a_rank_whose_script_has_ended_well_is_not_called_lost() -> None:
    left = Verdict("RankLost", f"rank 1 (mini (2)) {LEFT}", (TrainerId(1),))
    news = told(TWO, replace(TWO, number=9, trainers=TWO.trainers[:1], losses=(left,)))
    assert kinds_and_texts(news) == [
        ("rank left", "job 'digits': rank 1 (mini (2)) has left the job")
    ]


def test_a_rank_lost_in_a_view_that_was_skipped_is_named_too() -> None:
    (loss,) = told(TWO, replace(TWO, number=9, trainers=TWO.trainers[1:]))
    assert kinds_and_texts([loss]) == [("rank lost", "job 'digits': rank 0 (studio) is lost")]
    assert loss.names == ("studio",)


def test_who_enters_is_named_with_the_op() -> None:
    three = roster(*TWO.trainers, trainer(2, C, enters=40), number=9, next_id=3)
    (entry,) = told(TWO, three)
    assert kinds_and_texts([entry]) == [
        ("rank entered", "job 'digits': rank 2 (air) enters, as one of 3")
    ]
    assert (entry.job, entry.op, entry.names) == ("digits", 40, ("air",))


def test_one_lost_and_another_entered_at_once_are_both_named() -> None:
    after = roster(trainer(1, B), trainer(2, C, enters=40), number=9, next_id=3)
    assert [one.kind for one in told(TWO, after)] == ["rank lost", "rank entered"]


def test_quorum_and_least_number_of_ranks_are_told_when_they_flip() -> None:
    two = replace(TWO, terms=Terms(min_ranks=2))
    one = replace(two, number=9, trainers=two.trainers[:1], quorate=False)
    lost = [
        ("quorum lost", "job 'digits' waits: the ranks here are not a majority"),
        ("job waits", "job 'digits' waits: it has 1 rank, but needs 2"),
    ]
    assert kinds_and_texts(told(two, one))[1:] == lost
    assert kinds_and_texts(told(None, one))[1:] == lost
    back = roster(trainer(0, A), trainer(2, C, 40), number=12, next_id=3)
    assert kinds_and_texts(told(one, replace(back, terms=two.terms)))[1:] == [
        ("quorum regained", "job 'digits' has a majority again"),
        ("job goes on", "job 'digits' goes on with 2 ranks"),
    ]
    still = replace(one, number=12)
    assert not told(one, still)


FOUR = roster(trainer(0, A), trainer(1, B), trainer(2, C), trainer(3, D), next_id=4)


@pytest.mark.parametrize(
    "theirs",
    [
        replace(FOUR, number=8, trainers=FOUR.trainers[2:]),
        replace(FOUR, number=6, trainers=FOUR.trainers[2:]),  # settled before ours
        replace(FOUR, number=8, trainers=(trainer(4, C), trainer(5, D)), next_id=TrainerId(6)),
    ],
)
def test_another_history_of_a_job_is_no_loss_and_no_entry(theirs: Roster) -> None:
    ours = replace(FOUR, number=7, trainers=FOUR.trainers[:2])
    (news,) = told(ours, theirs)
    assert news.kind == "superseded"
    assert news.text == (
        "job 'digits' takes the other side's state; studio, mini (2) may return by mesh.sync()"
    )
    assert news.names == ("studio", "mini (2)")


def test_an_op_that_a_view_fails_is_told_once_with_its_verdict() -> None:
    verdict = Verdict("OpTimedOut", "rank 1 (mini (2)) has not called it", (TrainerId(1),))
    failed = (OpOutcome(OpNumber(3), TWO.ids, verdict=verdict),)
    after = replace(TWO, number=9, outcomes=failed)
    (news,) = told(TWO, after)
    assert (news.kind, news.op, news.names) == ("op failed", 3, ("mini (2)",))
    assert news.text == (
        "job 'digits': op 3 failed: OpTimedOut: rank 1 (mini (2)) has not called it"
    )
    assert not told(after, replace(after, number=12))
