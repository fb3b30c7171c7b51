"""Messages that are refused; what a leader may cost the others; nobody disturbs others' jobs.

No member can use the epoch counters up, and who was led astray comes back.
"""

from dataclasses import replace

import msgspec
import pytest

from pmesh.core.values import Primary, Roster, Seat, View
from pmesh.core.views.agreement import pass_time
from pmesh.core.views.leader import highest_counter, known_view_requests, propose
from pmesh.core.views.limits import (
    BROKEN,
    BROKEN_WINDOW_S,
    HELD_UP_S,
    PACE,
    SOUND,
    STEP,
    TOLERATED,
    WINDOW_S,
    check_message,
    check_view,
    is_led_astray,
    who_holds_up,
)
from pmesh.core.views.state import (
    GOOD_ROUND_TRIP_S,
    UNREAD_S,
    Facts,
    MemberState,
    Peer,
    Promise,
    Proposal,
    Skip,
)
from pmesh.core.wire.views import (
    AgreementMessage,
    AskToJoin,
    Commit,
    Flushed,
    Heartbeat,
    OpReport,
    Propose,
    Refuse,
    Superseded,
    TellView,
    Veto,
)
from pmesh.errors import ProtocolError
from pmesh.ids import MAX_COUNTER, Member
from tests.core.views.one_member import BERTS, NOW, TRIO, commit, sent, told
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DORA,
    FACES,
    all_hearing_each_other,
    make_call,
    make_epoch,
    make_flushed,
    make_heartbeat,
    make_member,
    make_outcome,
    make_peer,
    make_proposal,
    make_report,
    make_roster,
    make_seat,
    make_state,
    make_trainer,
    make_verdict,
    make_view,
    make_view_request,
    make_waiting,
    running,
)

HEARTBEAT_S = 0.2
WAITING = Facts(waiting=(make_waiting(1),))


def promises(leader: Member, count: int, *, over_s: float, broken: bool = False) -> MemberState:
    """Bert, who has made so many promises to the leader, the last one just now."""
    made = tuple(Promise(NOW - over_s * n / count, leader, broken) for n in reversed(range(count)))
    return replace(BERTS, promised_to=made)


class TestTheLeader:
    def test_makes_no_more_proposals_in_a_while_than_it_should(self) -> None:
        leads = all_hearing_each_other(ANNA, TRIO, BERT, CARA)
        hurried = replace(leads, promised_to=(Promise(NOW, ANNA),) * PACE)
        assert propose(leads, WAITING, NOW) is not None
        assert propose(hurried, WAITING, NOW) is None
        assert propose(hurried, WAITING, NOW + WINDOW_S) is not None

    @pytest.mark.parametrize(
        ("ended_s_ago", "lasted_s", "lasts_s"),
        [(1, 1, 2), (1, 16, 32), (31, 32, 32), (33, 16, 1)],
    )
    def test_leaves_out_for_ever_longer_who_does_not_answer(
        self, ended_s_ago: float, lasted_s: float, lasts_s: float
    ) -> None:
        asking = make_proposal(BERT, 6, TRIO, BERT, CARA)
        leads = replace(
            all_hearing_each_other(BERT, TRIO, CARA),
            skipped={CARA: Skip(NOW - ended_s_ago, lasted_s)},
            proposal=Proposal(message=asking, answers={}, made_at=NOW - 64 * UNREAD_S),
        )
        after = pass_time(leads, Facts(), now=NOW).state
        assert after.skipped[CARA] == Skip(NOW + lasts_s, lasts_s)


class TestTheOthers:
    def test_take_only_so_many_proposals_of_it(self) -> None:
        proposal = make_proposal(ANNA, 6, TRIO, *TRIO.members)
        few = promises(ANNA, TOLERATED - 1, over_s=WINDOW_S / 2)
        slow = promises(ANNA, TOLERATED, over_s=2 * WINDOW_S)
        of_another = promises(CARA, TOLERATED, over_s=WINDOW_S / 2)
        for state in few, slow, of_another:
            assert told(state, ANNA, proposal).state.promised == proposal.epoch
        with pytest.raises(ProtocolError, match="more than 128 proposals in 2 s"):
            told(promises(ANNA, TOLERATED, over_s=WINDOW_S / 2), ANNA, proposal)

    def test_take_only_so_many_that_come_to_nothing(self) -> None:
        proposal = make_proposal(ANNA, 6, TRIO, *TRIO.members)
        few = promises(ANNA, BROKEN - 1, over_s=BROKEN_WINDOW_S / 2, broken=True)
        assert told(few, ANNA, proposal).state.promised == proposal.epoch
        with pytest.raises(ProtocolError, match="24 proposals without a commit in 60 s"):
            told(promises(ANNA, BROKEN, over_s=BROKEN_WINDOW_S / 2, broken=True), ANNA, proposal)

    def test_remember_which_came_to_nothing(self) -> None:
        first, second = (make_proposal(ANNA, n, TRIO, *TRIO.members) for n in (6, 7))
        left_waiting = told(told(BERTS, ANNA, first).state, ANNA, second).state
        assert [p.broken for p in left_waiting.promised_to] == [True, False]
        view = make_view(6, *TRIO.members, previous=TRIO.epoch)
        installed = told(told(BERTS, ANNA, first).state, ANNA, commit(view)).state
        kept = told(installed, ANNA, make_proposal(ANNA, 7, view, *view.members)).state
        assert [p.broken for p in kept.promised_to] == [False, False]


class TestAViewIsOwed:
    """By whoever leads, to all who have promised it something."""

    def wait(
        self,
        state: MemberState,
        seconds: float,
        *,
        step_s: float = HEARTBEAT_S,
        timeout_s: float = 0.0,
        begin: float = NOW,
    ) -> MemberState:
        now = begin
        while now < begin + seconds:
            now += step_s
            state = pass_time(state, Facts(timeout_s=timeout_s), now=now).state
        return state

    def blamed(self, state: MemberState) -> Member | None:
        debt = who_holds_up(state)
        return None if debt is None else debt.leader

    def test_to_us(self) -> None:
        flushed = told(BERTS, ANNA, make_proposal(ANNA, 6, TRIO, *TRIO.members)).state
        assert who_holds_up(self.wait(flushed, HELD_UP_S - 1)) is None
        assert self.blamed(self.wait(flushed, HELD_UP_S + 1)) == ANNA

    def test_after_longer_while_the_network_is_slow(self) -> None:
        flushed = told(BERTS, ANNA, make_proposal(ANNA, 6, TRIO, *TRIO.members)).state
        slow_s = 2 * (HELD_UP_S - 2)
        slow = self.wait(flushed, slow_s, timeout_s=2 * GOOD_ROUND_TRIP_S)
        assert self.blamed(slow) is None
        assert self.blamed(self.wait(slow, 1, begin=NOW + slow_s)) is None
        assert self.blamed(self.wait(slow, 3, begin=NOW + slow_s)) == ANNA

    def test_to_another(self) -> None:
        needs = make_heartbeat(TRIO, ANNA, BERT, needs_epoch=True)
        others = {**BERTS.peers, CARA.node: make_peer(CARA, TRIO, needs)}
        assert self.blamed(self.wait(replace(BERTS, peers=others), HELD_UP_S + 1)) == ANNA

    def test_by_nobody_in_peace_and_never_by_ourselves(self) -> None:
        assert who_holds_up(self.wait(BERTS, HELD_UP_S + 1)) is None
        needs = make_heartbeat(TRIO, ANNA, CARA, needs_epoch=True)
        leads = all_hearing_each_other(ANNA, TRIO, BERT, CARA)
        leads = replace(leads, peers={**leads.peers, BERT.node: make_peer(BERT, TRIO, needs)})
        assert pass_time(leads, Facts(), now=NOW).state.debt is None

    def test_while_we_are_awake(self) -> None:
        flushed = told(BERTS, ANNA, make_proposal(ANNA, 6, TRIO, *TRIO.members)).state
        assert who_holds_up(self.wait(flushed, 3 * HELD_UP_S, step_s=HELD_UP_S)) is None

    def test_until_it_comes(self) -> None:
        flushed = told(BERTS, ANNA, make_proposal(ANNA, 6, TRIO, *TRIO.members)).state
        view = make_view(6, *TRIO.members, previous=TRIO.epoch)
        assert told(self.wait(flushed, 5), ANNA, commit(view)).state.debt is None


@pytest.mark.parametrize(
    ("concerned", "counts"),
    [
        (make_roster(ANNA, BERT), True),
        (make_roster(ANNA, CARA, lost_holders=[make_trainer(7, BERT)]), True),
        (make_roster(ANNA, CARA), False),
    ],
)
def test_only_who_takes_part_in_a_job_can_have_it_settled(
    concerned: Roster, *, counts: bool
) -> None:
    view_request = make_view_request(concerned, make_verdict(), op=4)
    view = make_view(5, ANNA, BERT, CARA, rosters=[concerned])
    beat = make_heartbeat(view, ANNA, CARA, view_requests=[view_request])
    leads = all_hearing_each_other(ANNA, view, BERT, CARA)
    leads = replace(leads, peers={**leads.peers, BERT.node: make_peer(BERT, view, beat)})
    assert known_view_requests(leads, Facts()) == (view_request,) * counts


def test_of_a_job_that_we_do_not_know_anybody_may_speak() -> None:
    view_request = make_view_request(make_roster(DORA, job=FACES), make_verdict(), op=4)
    beat = make_heartbeat(TRIO, ANNA, CARA, view_requests=[view_request])
    leads = replace(
        all_hearing_each_other(ANNA, TRIO, CARA), peers={BERT.node: make_peer(BERT, TRIO, beat)}
    )
    assert known_view_requests(leads, Facts()) == (view_request,)


ROSTER = make_roster(ANNA, BERT)
AT_WORK = make_view(5, ANNA, BERT, CARA, rosters=[ROSTER])
BUSY = all_hearing_each_other(BERT, AT_WORK, ANNA, CARA)
ALONE = make_state(BERT, make_view(1, BERT))


@pytest.mark.parametrize("counter", [6 + STEP, SOUND, MAX_COUNTER])
def test_a_view_with_jobs_follows_a_counter_only_in_steps(counter: int) -> None:
    far = make_epoch(counter, CARA)
    with pytest.raises(ProtocolError, match="which no honest member reaches"):
        told(BUSY, CARA, make_heartbeat(AT_WORK, BERT, promised=far))
    further = make_epoch(min(counter + STEP, MAX_COUNTER))
    with pytest.raises(ProtocolError, match="which no honest member reaches"):
        told(BUSY, ANNA, Propose(further, AT_WORK, (ANNA, BERT), (ANNA, BERT), ()))
    with pytest.raises(ProtocolError, match="which no honest member reaches"):
        told(BUSY, CARA, Refuse(AT_WORK.epoch, far))


def test_a_step_is_followed() -> None:
    near = make_epoch(5 + STEP, CARA)
    state = told(BUSY, CARA, make_heartbeat(AT_WORK, BERT, promised=near)).state
    assert highest_counter(state) == 5 + STEP
    refused = told(BUSY, ANNA, Refuse(AT_WORK.epoch, near)).state
    assert highest_counter(refused) == 5 + STEP


def test_who_lies_to_a_leader_lifts_it_by_a_step_at_most_and_its_followers_take_that() -> None:
    near = make_epoch(5 + STEP, CARA)
    leader = all_hearing_each_other(ANNA, AT_WORK, BERT, CARA)
    for _ in range(3):
        leader = told(leader, CARA, make_heartbeat(AT_WORK, ANNA, promised=near)).state
    assert highest_counter(leader) <= 6 + STEP
    proposal = make_proposal(ANNA, 6 + STEP, AT_WORK, ANNA, BERT)
    assert told(BUSY, ANNA, proposal).state.promised == make_epoch(6 + STEP)


def test_what_a_newcomer_followed_does_not_count_in_the_view_that_it_enters() -> None:
    """Else the first view that it leads would be out of the others' reach."""
    newcomer = all_hearing_each_other(BERT, make_view(1, BERT), CARA)
    refused = told(newcomer, CARA, Refuse(TRIO.epoch, make_epoch(SOUND))).state
    assert highest_counter(refused) == SOUND
    entering = replace(refused, promised=make_epoch(6), flushed_at=NOW)
    entered = told(entering, ANNA, commit(make_view(6, ANNA, BERT))).state
    assert entered.highest_counter == 6


def test_a_refusal_by_one_who_is_not_heard_is_measured_by_our_own_view() -> None:
    state = told(BERTS, CARA, Refuse(TRIO.epoch, make_epoch(SOUND))).state
    assert state.highest_counter == SOUND
    unheard = replace(BUSY, peers={})
    with pytest.raises(ProtocolError):
        told(unheard, CARA, Refuse(TRIO.epoch, make_epoch(SOUND)))


def test_who_shows_a_view_without_jobs_is_not_heard_but_not_accused() -> None:
    """It may be honest, and led astray: it begins anew when it hears us."""
    astray = make_view(SOUND - 1, CARA)
    state = told(BUSY, CARA, TellView(astray)).state
    state = told(state, CARA, make_heartbeat(astray, BERT)).state
    assert CARA.node not in state.peers
    far = make_proposal(CARA, SOUND, astray, CARA, BERT, continuing=[CARA])
    assert sent(told(BUSY, CARA, far)) == [(CARA, Veto(far.epoch))]
    heard = replace(BUSY, peers={**BUSY.peers, CARA.node: idle_peer(astray)})
    refused = told(heard, CARA, Refuse(TRIO.epoch, make_epoch(SOUND))).state
    assert refused.highest_counter == 5


def idle_peer(view: View) -> Peer:
    return make_peer(CARA, view, make_heartbeat(view, BERT))


def shown(state: MemberState, view: View) -> MemberState:
    """The state after the leader of a view has shown it, and says that it has it."""
    known = told(state, ANNA, TellView(view)).state
    return told(known, ANNA, make_heartbeat(view, BERT)).state


def test_a_view_without_jobs_follows_any_sound_counter() -> None:
    assert highest_counter(shown(ALONE, make_view(SOUND, ANNA))) == SOUND
    assert highest_counter(shown(ALONE, make_view(SOUND + 1, ANNA))) == 1


def test_a_newcomer_follows_a_mesh_with_jobs_beyond() -> None:
    at_work = [make_roster(ANNA, CARA)]
    mesh = make_view(MAX_COUNTER // 2, ANNA, CARA, rosters=at_work)
    assert highest_counter(shown(ALONE, mesh)) == MAX_COUNTER // 2
    base = make_view(MAX_COUNTER // 2 - 1, ANNA, CARA, rosters=at_work)
    proposal = make_proposal(ANNA, MAX_COUNTER // 2, base, ANNA, BERT, continuing=[ANNA])
    assert told(shown(ALONE, base), ANNA, proposal).state.promised.counter == MAX_COUNTER // 2
    with pytest.raises(ProtocolError):
        shown(ALONE, make_view(MAX_COUNTER // 2 + 1, ANNA, rosters=[make_roster(ANNA)]))


@pytest.mark.parametrize(
    ("state", "astray"),
    [
        pytest.param(ALONE, False, id="an ordinary counter"),
        pytest.param(replace(ALONE, promised=make_epoch(SOUND)), False, id="a sound one"),
        pytest.param(replace(ALONE, promised=make_epoch(SOUND + 1)), True, id="one beyond"),
        pytest.param(replace(BERTS, promised=make_epoch(SOUND + 1)), True, id="with others"),
        pytest.param(replace(BUSY, promised=make_epoch(SOUND + 1)), False, id="with a job"),
        pytest.param(
            replace(ALONE, promised=make_epoch(SOUND + 1), flushed_at=1.0),
            False,
            id="while a commit may come",
        ),
        pytest.param(
            replace(ALONE, promised=make_epoch(SOUND + 1), installed_at=NOW - 1),
            False,
            id="just after it has begun",
        ),
        pytest.param(
            replace(BUSY, view=make_view(1, BERT), promised=make_epoch(6 + STEP)),
            True,
            id="beyond the reach of others with a job",
        ),
        pytest.param(
            replace(BUSY, view=make_view(1, BERT), promised=make_epoch(5 + STEP)),
            False,
            id="within the reach of others with a job",
        ),
    ],
)
def test_who_was_led_astray_is_known_by_its_promise(state: MemberState, astray: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert is_led_astray(state, now=NOW) == astray


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
