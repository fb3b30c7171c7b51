"""View changes of jobs: flush answers in, the next rosters out."""

from collections.abc import Iterable, Mapping

from pmesh.core.values import Roster, View
from pmesh.core.views.rosters import Change, next_rosters
from pmesh.core.wire.views import Flushed, JobReport, ViewRequest
from pmesh.ids import Member
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    make_epoch,
    make_flushed,
    make_report,
    make_roster,
    make_verdict,
    make_view,
    running,
)

NEXT = make_epoch(9)
TRIO = make_roster(ANNA, BERT, CARA)
TIMED_OUT = make_verdict("OpTimedOut", 1)


def settle(
    base: View,
    answers: Mapping[Member, Flushed],
    *,
    continuing: Iterable[Member] | None = None,
    view_requests: Iterable[ViewRequest] = (),
    reasons: Mapping[Member, str] | None = None,
) -> tuple[Roster, ...]:
    """The rosters of the next view; unless said otherwise, all who answered continue."""
    change = Change(
        epoch=NEXT,
        ring=tuple(answers),
        answers=answers,
        view_requests=tuple(view_requests),
        reasons=reasons or {},
    )
    kept = tuple(answers) if continuing is None else tuple(continuing)
    return next_rosters(base, change, continuing=kept)


def settle_trio(
    reports: Mapping[Member, JobReport | None], *view_requests: ViewRequest, roster: Roster = TRIO
) -> Roster:
    """The next roster of one job, by what each survivor reports of it."""
    base = make_view(5, ANNA, BERT, CARA, rosters=[roster])
    answers = {
        member: make_flushed(member, base, jobs=[report] if report else [])
        for member, report in reports.items()
    }
    (after,) = settle(base, answers, view_requests=view_requests)
    return after


def running_everywhere(op: int = 4, *, fenced: bool = True) -> dict[Member, JobReport | None]:
    return {
        member: make_report(TRIO, {rank: [running(op)]}, fenced=fenced)
        for rank, member in enumerate((ANNA, BERT, CARA))
    }
