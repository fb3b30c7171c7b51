"""What has happened: numbered, bounded, told to who listens, and documented."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.agent.status.events import (
    EVENTS_SCHEMA_VERSION,
    KEPT,
    MAX_NAMES,
    MAX_TEXT,
    PAGE_BYTES,
    Event,
    EventLog,
    News,
    decode_events,
    encode_events,
    events_schema,
)
from pmesh.core.wire.local import MAX_SESSION_MESSAGE_BYTES, Events, encode
from pmesh.errors import UsageError
from pmesh.ids import Incarnation, JobName, Member, NodeId, OpNumber, node_text

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "events.schema.json"
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
ME = Member(NodeId(b"a" * 32), Incarnation(0xBEEF))


class Clock:
    """Both clocks, moved by hand."""

    now_s = 100.0
    wall = NOON


def event_log(
    clock: Clock | None = None, listener: Callable[[Event], None] = lambda _: None
) -> EventLog:
    at = clock or Clock()
    return EventLog(
        ME, "studio", clock=lambda: at.now_s, wall_clock=lambda: at.wall, listener=listener
    )


def test_an_event_has_a_number_two_times_and_what_it_is_about() -> None:
    clock = Clock()
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
    events.tell(News(kind="peer lost", text="mini is gone"))
    assert [(e.number, e.text, e.is_announced) for e in heard] == [
        (0, "op 3 runs again", False),
        (1, "mini is gone", True),
    ]


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
        assert len(encode(Events(encode_events(page)))) < MAX_SESSION_MESSAGE_BYTES
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
    assert REFERENCE.read_bytes() == events_schema(), "run: python tools/status_schema.py"


def test_a_field_of_a_later_pmesh_is_ignored() -> None:
    page = event_log().since(-1)
    later = json.loads(encode_events(page)) | {"news": 1}
    assert decode_events(msgspec.json.encode(later)) == page


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"schema": 1}'])
def test_another_schema_says_what_to_do(data: bytes) -> None:
    with pytest.raises(UsageError, match=rf"\({EVENTS_SCHEMA_VERSION}\).*restart the agent"):
        decode_events(data)
