"""What a leader may cost the others; and nobody disturbs a job of others."""

from dataclasses import replace

import pytest

from pmesh.core.agreement import pass_time
from pmesh.core.leading import (
    BROKEN,
    BROKEN_WINDOW_S,
    HELD_UP_S,
    PACE,
    TOLERATED,
    WINDOW_S,
    who_holds_up,
)
from pmesh.core.proposals import known_concerns, propose
from pmesh.core.standing import Facts, Promise, Proposal, Skip, State
from pmesh.core.views import Roster
from pmesh.errors import ProtocolError
from pmesh.ids import Member
from tests.core.builders import (
    ANNA,
    BERT,
    CARA,
    DORA,
    FACES,
    all_hearing_each_other,
    make_concern,
    make_heartbeat,
    make_peer,
    make_proposal,
    make_roster,
    make_trainer,
    make_verdict,
    make_view,
    make_waiting,
)
from tests.core.one_member import BERTS, NOW, TRIO, commit, told

HEARTBEAT_S = 0.2
WAITING = Facts(waiting=(make_waiting(1),))


def promises(leader: Member, count: int, *, over_s: float, broken: bool = False) -> State:
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
            proposal=Proposal(message=asking, answers={}, deadline=NOW),
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

    def wait(self, state: State, seconds: float, *, step_s: float = HEARTBEAT_S) -> State:
        now = NOW
        while now < NOW + seconds:
            now += step_s
            state = pass_time(state, Facts(), now=now).state
        return state

    def test_to_us(self) -> None:
        flushed = told(BERTS, ANNA, make_proposal(ANNA, 6, TRIO, *TRIO.members)).state
        assert who_holds_up(self.wait(flushed, HELD_UP_S - 1)) is None
        assert who_holds_up(self.wait(flushed, HELD_UP_S + 1)) == ANNA

    def test_to_another(self) -> None:
        needs = make_heartbeat(TRIO, ANNA, BERT, needs_epoch=True)
        others = {**BERTS.peers, CARA.node: make_peer(CARA, TRIO, needs)}
        assert who_holds_up(self.wait(replace(BERTS, peers=others), HELD_UP_S + 1)) == ANNA

    def test_by_nobody_in_peace_and_never_by_ourselves(self) -> None:
        assert who_holds_up(self.wait(BERTS, HELD_UP_S + 1)) is None
        needs = make_heartbeat(TRIO, ANNA, CARA, needs_epoch=True)
        leads = all_hearing_each_other(ANNA, TRIO, BERT, CARA)
        leads = replace(leads, peers={**leads.peers, BERT.node: make_peer(BERT, TRIO, needs)})
        assert pass_time(leads, Facts(), now=NOW).state.owed is None

    def test_while_we_are_awake(self) -> None:
        flushed = told(BERTS, ANNA, make_proposal(ANNA, 6, TRIO, *TRIO.members)).state
        assert who_holds_up(self.wait(flushed, 3 * HELD_UP_S, step_s=HELD_UP_S)) is None

    def test_until_it_comes(self) -> None:
        flushed = told(BERTS, ANNA, make_proposal(ANNA, 6, TRIO, *TRIO.members)).state
        view = make_view(6, *TRIO.members, previous=TRIO.epoch)
        assert told(self.wait(flushed, 5), ANNA, commit(view)).state.owed is None


@pytest.mark.parametrize(
    ("concerned", "counts"),
    [
        (make_roster(ANNA, BERT), True),
        (make_roster(ANNA, CARA, witnesses=[make_trainer(7, BERT)]), True),
        (make_roster(ANNA, CARA), False),
    ],
)
def test_only_who_takes_part_in_a_job_can_have_it_settled(
    concerned: Roster, *, counts: bool
) -> None:
    concern = make_concern(concerned, make_verdict(), op=4)
    view = make_view(5, ANNA, BERT, CARA, rosters=[concerned])
    beat = make_heartbeat(view, ANNA, CARA, concerns=[concern])
    leads = all_hearing_each_other(ANNA, view, BERT, CARA)
    leads = replace(leads, peers={**leads.peers, BERT.node: make_peer(BERT, view, beat)})
    assert known_concerns(leads, Facts()) == (concern,) * counts


def test_of_a_job_that_we_do_not_know_anybody_may_speak() -> None:
    concern = make_concern(make_roster(DORA, job=FACES), make_verdict(), op=4)
    beat = make_heartbeat(TRIO, ANNA, CARA, concerns=[concern])
    leads = replace(
        all_hearing_each_other(ANNA, TRIO, CARA), peers={BERT.node: make_peer(BERT, TRIO, beat)}
    )
    assert known_concerns(leads, Facts()) == (concern,)
