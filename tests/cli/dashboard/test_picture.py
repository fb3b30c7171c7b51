"""What the page is sent of a status and of events."""

import sys
from datetime import UTC, datetime

import msgspec
import pytest

from pmesh.agent.events import Event, EventKind
from pmesh.agent.schema import EdgeStatus, JobStatus, RankStatus, Status
from pmesh.charts.rules.history import ChartReading
from pmesh.charts.rules.readings import OPS, STEPS
from pmesh.cli.dashboard.picture import (
    line_of,
    picture_of,
    readings_of,
)
from tests.worlds.fake_status_agent import IDS, SNAPSHOT

EVIL = "m\x1b]0;you\x07\x9b2J\npmesh: \u202e:boom:"
SHOWN = "m�]0;you��2J pmesh: �:boom:"


def rank(number: int, **more: object) -> RankStatus:
    told = {"rank": number, "trainer": number, "node": IDS[number], "name": f"mac-{number + 1}"}
    return msgspec.convert(told | {"started": 9, "completed": 8} | more, RankStatus)


def job(*ranks: RankStatus, **more: object) -> JobStatus:
    told = {"name": "digits", "state": "running", "wait_for": None, "newcomers": ()}
    return JobStatus(ranks=ranks, **(told | more))  # type: ignore[arg-type]  # as it is


def with_jobs(*jobs: JobStatus) -> Status:
    return msgspec.structs.replace(SNAPSHOT, jobs=jobs)


def test_machines_have_their_speed_to_the_next_and_their_share() -> None:
    edges = tuple(
        EdgeStatus(sender=IDS[place], receiver=IDS[(place + 1) % 3], rtt_ms=1.0, mbit_s=speed)
        for place, speed in enumerate((9400, None, 940))
    )
    view = msgspec.structs.replace(SNAPSHOT.view, edges=edges)
    jobs = (job(rank(0, share_percent=75), rank(1, share_percent=25)),)
    picture = picture_of(msgspec.structs.replace(SNAPSHOT, view=view, jobs=jobs))
    machines = picture.machines
    assert [machine.name for machine in machines] == ["mac-1", "mac-2", "studio"]
    assert [machine.next_mbit_s for machine in machines] == [9400, None, 940]
    assert [machine.share_percent for machine in machines] == [75, 25, None]
    assert [(machine.here, machine.leads) for machine in machines] == [
        (True, True),
        (False, False),
        (False, False),
    ]
    assert [machine.way for machine in machines] == ["", "wired en0", "wired en0"]
    assert picture.is_well


def test_what_is_wrong_is_said_without_the_marks_of_a_terminal() -> None:
    linked = msgspec.structs.replace(SNAPSHOT.peers[0], state="linked", reason="none")
    peers = (linked, *SNAPSHOT.peers)
    picture = picture_of(msgspec.structs.replace(SNAPSHOT, peers=peers))
    assert "mac-2: en0 here runs at 100 Mbit/s" in picture.troubles
    assert not any("none" in trouble for trouble in picture.troubles)
    assert picture.troubles[-1] == "next�[2J-door is not linked: holds another mesh key"
    gone = msgspec.structs.replace(SNAPSHOT.view.members[1], health="gone")
    view = msgspec.structs.replace(SNAPSHOT.view, members=(SNAPSHOT.view.members[0], gone))
    assert not picture_of(msgspec.structs.replace(SNAPSHOT, view=view)).is_well


def test_a_job_has_its_sentence_its_ranks_and_who_waits() -> None:
    stopped, waiting = picture_of(SNAPSHOT).jobs
    assert stopped.headline == "Job digits stands still with 2 ranks: it has 2 of the 3"
    assert (stopped.is_well, stopped.newcomers) == (False, ["stu�dio"])
    assert [one.machine for one in stopped.ranks] == ["mac-1", "mac-2"]
    assert stopped.ranks[1].remarks == "its process is stopped: the others wait"
    assert (waiting.is_well, waiting.newcomers) == (True, ["mac-1"])


def test_the_slowest_rank_is_named_and_its_row_says_so() -> None:
    (shown,) = picture_of(with_jobs(job(rank(0, own_percent=40), rank(1, own_percent=90)))).jobs
    assert shown.headline.endswith("slowest: mac-2")
    assert shown.pace == "slowest: mac-2 computes 90 %, others wait 50 %"
    assert [one.remarks for one in shown.ranks] == ["", "the others wait for it in each step"]
    parts = [(r.computing_percent, r.waiting_percent, r.network_percent) for r in shown.ranks]
    assert parts == [(40, 50, 10), (90, 0, 10)]


def test_a_step_is_not_split_while_one_rank_is_unknown() -> None:
    ranks = [rank(0, own_percent=50), rank(1)]
    (shown,) = picture_of(with_jobs(job(*ranks))).jobs
    assert shown.ranks[0].computing_percent is None


def test_what_ranks_report_is_shown_for_each_and_charted_as_the_mean_of_the_finite() -> None:
    ranks = (
        rank(0, reports={"loss": 0.25, "accuracy": 0.912345}),
        rank(1, reports={"loss": 0.75}),
        rank(2, reports={"loss": "nan", "grad": "inf"}),
    )
    status = with_jobs(job(*ranks, step=7, steps_per_s=9.5, ops_per_s=19.0))
    (shown,) = picture_of(status).jobs
    assert [one.reports for one in shown.ranks] == [
        {"loss": "0.25", "accuracy": "0.9123"},
        {"loss": "0.75"},
        {"loss": "nan", "grad": "inf"},
    ]
    assert [*readings_of(status)] == [
        ChartReading("digits", STEPS, 9.5),
        ChartReading("digits", "loss", 0.5),
        ChartReading("digits", "accuracy", 0.912345),
    ]


def test_a_job_that_never_syncs_is_charted_by_its_ops_and_odd_numbers_are_not_charted() -> None:
    ranks = (
        rank(0, reports={"loss": "inf", "huge": sys.float_info.max}),
        rank(1, reports={"loss": 4.0, "huge": sys.float_info.max}),
        rank(2, reports={"huge": sys.float_info.max}),
    )
    status = with_jobs(job(*ranks, ops_per_s=3.0), job(name="new", steps_per_s=None))
    assert [*readings_of(status)] == [
        ChartReading("digits", OPS, 3.0),
        ChartReading("digits", "loss", 4.0),
    ]


@pytest.mark.parametrize(
    ("kind", "mood"), [("rank lost", "bad"), ("peer joined", "good"), ("view", "")]
)
def test_an_event_has_its_time_its_text_and_its_mood(kind: EventKind, mood: str) -> None:
    at = datetime(2026, 11, 28, 12, tzinfo=UTC)
    line = line_of(Event(number=0, time=at, uptime_s=1.0, kind=kind, text=EVIL))
    assert (line.time, line.kind, line.text, line.mood) == (at.isoformat(), kind, SHOWN, mood)


def test_texts_of_others_do_not_change_the_direction_of_the_page() -> None:
    evil = EVIL.replace("\n", " ")
    members = tuple(msgspec.structs.replace(m, name=evil) for m in SNAPSHOT.view.members)
    view = msgspec.structs.replace(SNAPSHOT.view, members=members)
    ranks = (rank(0, name=evil, reports={evil: "nan"}),)
    status = msgspec.structs.replace(with_jobs(job(*ranks, name=evil, reason=evil)), view=view)
    text = msgspec.json.encode(picture_of(status)).decode()
    assert SHOWN in text
    assert all(c.isprintable() for c in text)
