"""What no honest member would send is refused before it touches a state."""

import msgspec
import pytest

from pmesh.core.values import Primary, Roster, Seat, View
from pmesh.core.views.validation import check_message, check_view
from pmesh.core.wire.link import (
    AgreementMessage,
    AskToJoin,
    Commit,
    Flushed,
    Heartbeat,
    OpReport,
    Propose,
    Superseded,
    TellView,
)
from pmesh.errors import ProtocolError
from pmesh.ids import Member
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DORA,
    make_call,
    make_epoch,
    make_flushed,
    make_heartbeat,
    make_member,
    make_outcome,
    make_proposal,
    make_report,
    make_roster,
    make_seat,
    make_trainer,
    make_view,
    make_waiting,
    running,
)
from tests.worlds.one_member import TRIO, commit

ROSTER = make_roster(ANNA, BERT)
RESTARTED = make_member("b", incarnation=99)


def view_with(roster: Roster) -> View:
    return make_view(9, ANNA, BERT, CARA, rosters=[roster])


def seated(*seats: Seat) -> View:
    return View(make_epoch(9), seats)


@pytest.mark.parametrize(
    ("view", "why"),
    [
        pytest.param(make_view(9, ANNA, BERT, leader=DORA), "leader has no seat", id="leader"),
        pytest.param(make_view(9, ANNA, BERT, BERT), "appears twice", id="a seat twice"),
        pytest.param(make_view(9, ANNA, BERT, RESTARTED), "appears twice", id="a node twice"),
        pytest.param(seated(make_seat(ANNA, 10)), "later view", id="admitted later"),
        pytest.param(seated(make_seat(ANNA, 1, make_epoch(9))), "later view", id="previous"),
        pytest.param(make_view(4, ANNA, BERT, rosters=[ROSTER]), "later view", id="roster number"),
        pytest.param(make_view(9, ANNA, BERT, rosters=[ROSTER] * 2), "one job", id="a job twice"),
        pytest.param(view_with(make_roster()), "without trainers", id="an empty roster"),
        pytest.param(
            view_with(make_roster(ANNA, BERT, ids=[1, 1])), "one number", id="an id twice"
        ),
        pytest.param(view_with(make_roster(DORA)), "no seat", id="all trainers elsewhere"),
        pytest.param(
            view_with(make_roster(ANNA, born=make_epoch(7))), "before its job", id="born later"
        ),
        pytest.param(
            view_with(make_roster(ANNA, primary=Primary(make_epoch(10), ()))),
            "quorum from a later",
            id="a quorum from later",
        ),
        pytest.param(
            view_with(make_roster(ANNA, outcomes=[make_outcome(1, 0), make_outcome(1, 0)])),
            "outcomes of one op",
            id="an op that ends twice",
        ),
        pytest.param(
            view_with(make_roster(ANNA, lost_holders=[make_trainer(0, BERT)])),
            "one number",
            id="a rank that is a lost holder too",
        ),
        pytest.param(
            view_with(msgspec.structs.replace(ROSTER, next_id=1)), "not yet assigned", id="next id"
        ),
        pytest.param(
            view_with(
                msgspec.structs.replace(
                    ROSTER, trainers=(make_trainer(0, ANNA), make_trainer(1, ANNA))
                )
            ),
            "on one connection",
            id="a slot twice",
        ),
    ],
)
def test_a_view_that_no_leader_could_have_committed_is_refused(view: View, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        check_view(view)


def test_a_view_with_a_job_that_was_not_fenced_everywhere_keeps_its_lost_trainer() -> None:
    """V3: it waits for the next view (seed 60142)."""
    check_view(view_with(make_roster(ANNA, DORA)))


def test_a_view_with_a_job_whose_lost_holder_is_no_member_any_more_is_taken() -> None:
    check_view(view_with(make_roster(ANNA, BERT, lost_holders=[make_trainer(2, DORA)])))


JUNIOR = make_proposal(BERT, 6, TRIO, BERT, ANNA)


@pytest.mark.parametrize(
    ("sender", "message", "why"),
    [
        pytest.param(
            BERT,
            make_heartbeat(make_view(5, BERT), promised=make_epoch(4)),
            "below the installed epoch",
            id="a promise below its view",
        ),
        pytest.param(DORA, TellView(TRIO), "without its sender", id="a view of others"),
        pytest.param(DORA, Superseded(TRIO), "without its sender", id="a proof of others"),
        pytest.param(BERT, make_proposal(ANNA, 6, TRIO, ANNA, BERT), "another's", id="a name"),
        pytest.param(ANNA, make_proposal(ANNA, 5, TRIO, ANNA), "below its base", id="no higher"),
        pytest.param(ANNA, make_proposal(ANNA, 6, TRIO, ANNA, BERT, BERT), "twice", id="twice"),
        pytest.param(
            ANNA,
            make_proposal(ANNA, 6, TRIO, ANNA, continuing=[ANNA, BERT]),
            "omits a member",
            id="continuing, yet no member",
        ),
        pytest.param(
            ANNA,
            make_proposal(ANNA, 6, TRIO, ANNA, DORA),
            "continues a stranger",
            id="a newcomer that continues",
        ),
        pytest.param(BERT, JUNIOR, "most senior", id="a junior that leads its senior"),
        pytest.param(
            ANNA,
            make_proposal(ANNA, 6, TRIO, ANNA, BERT, continuing=[]),
            "most senior",
            id="nobody continues",
        ),
        pytest.param(
            BERT,
            make_flushed(BERT, TRIO, epoch=make_epoch(5)),
            "already installed",
            id="a promise of the view that it has",
        ),
        pytest.param(
            BERT,
            make_flushed(BERT, TRIO, jobs=[make_report(ROSTER, {0: []})] * 2),
            "one job",
            id="a job reported twice",
        ),
        pytest.param(
            BERT,
            make_flushed(BERT, TRIO, jobs=[make_report(ROSTER, {1: [running(3), running(3)]})]),
            "one op",
            id="an op reported twice",
        ),
        pytest.param(
            BERT,
            make_flushed(BERT, TRIO, waiting=[make_waiting(2), make_waiting(3)]),
            "wait",
            id="a connection that waits twice",
        ),
        pytest.param(BERT, commit(TRIO), "another's name", id="a commit in another's name"),
        pytest.param(
            ANNA,
            commit(make_view(6, ANNA, ANNA)),
            "appears twice",
            id="a commit of an impossible view",
        ),
        pytest.param(ANNA, Commit(TRIO, ((0, 0),) * 3), "costs", id="costs of another size"),
    ],
)
def test_a_message_that_no_honest_member_would_send_is_refused(
    sender: Member, message: AgreementMessage, why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        check_message(sender, message)


def test_a_rank_reported_twice_is_refused() -> None:
    report = make_report(ROSTER, {1: [OpReport(running(3).op, make_call())]})
    twice = msgspec.structs.replace(report, ranks=report.ranks * 2)
    with pytest.raises(ProtocolError, match="one rank"):
        check_message(BERT, make_flushed(BERT, TRIO, jobs=[twice]))


@pytest.mark.parametrize(
    "message",
    [
        make_heartbeat(TRIO, BERT),
        TellView(TRIO),
        make_proposal(ANNA, 6, TRIO, ANNA, BERT, DORA, continuing=[ANNA, BERT]),
        make_flushed(ANNA, TRIO, jobs=[make_report(ROSTER, {0: [running(3)]})]),
        commit(TRIO),
        AskToJoin(make_epoch(3)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_honest_members_send_is_taken(
    message: Heartbeat | TellView | Propose | Flushed | Commit | AskToJoin,
) -> None:
    check_message(ANNA, message)
