"""How a member handles messages, losses, time and its own sleep: V2, V5, V6, V8, V9."""

from dataclasses import replace

import msgspec
import pytest

from pmesh.core.values import View
from pmesh.core.views.agreement import (
    StallGuard,
    first_state,
    lose,
    pass_time,
    receive,
    wake,
)
from pmesh.core.views.leader import highest_counter
from pmesh.core.views.state import (
    BACK_OFF_S,
    FLUSH_DEADLINE_S,
    NOTICE_S,
    PATIENCE_S,
    SKIP_S,
    UNREAD_S,
    Facts,
    MemberState,
    MemberStep,
    Peer,
    SendOnLink,
    Skip,
    needs_epoch,
)
from pmesh.core.wire.link import Leaving
from pmesh.core.wire.views import AskView, Heartbeat, Propose, Refuse, Superseded, TellView, Veto
from pmesh.ids import Incarnation, Member
from tests.core.views.circle import gathered
from tests.core.views.one_member import (
    BERTS,
    CARA_GONE,
    CARA_LOST_ANNA,
    GONE_ON,
    NOW,
    TRIO,
    commit,
    installed,
    promising,
    sent,
    told,
)
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DORA,
    FACES,
    all_hearing_each_other,
    make_epoch,
    make_flushed,
    make_heartbeat,
    make_member,
    make_peer,
    make_proposal,
    make_roster,
    make_seat,
    make_state,
    make_view,
    make_waiting,
    said_by,
)


def test_a_process_that_has_just_started_is_alone_in_a_view_of_its_own() -> None:
    state = first_state(ANNA, said_by(ANNA), now=7.0)
    assert state.view == View.of_one(ANNA, said_by(ANNA), make_epoch(1, ANNA))
    assert (state.promised, state.highest_counter) == (state.view.epoch, 1)
    assert (state.installed_at, state.flushed_at) == (7.0, None)


def test_two_processes_of_one_node_never_begin_with_the_same_epoch() -> None:
    again = make_member("a", incarnation=99)
    first, second = (first_state(m, said_by(m), now=0.0).promised for m in (ANNA, again))
    assert first != second


class TestAHeartbeat:
    def test_shows_where_a_peer_stands(self) -> None:
        beat = make_heartbeat(TRIO, BERT, ANNA)
        step = told(BERTS, CARA, beat)
        assert step.state.peers[CARA.node] == Peer(member=CARA, heartbeat=beat, view=TRIO)

    def test_of_an_unknown_view_makes_one_ask_for_it(self) -> None:
        doras = make_view(3, DORA)
        beat = make_heartbeat(doras, BERT)
        step = told(BERTS, DORA, beat)
        assert sent(step) == [(DORA, AskView(doras.epoch))]
        assert DORA.node not in step.state.peers
        assert told(step.state, DORA, TellView(doras)).state.peers[DORA.node] == make_peer(
            DORA, doras, beat
        )

    def test_of_an_unknown_view_is_not_placed_by_another_view(self) -> None:
        beat = make_heartbeat(make_view(3, DORA), BERT)
        state = told(BERTS, DORA, beat).state
        after = told(state, DORA, TellView(make_view(2, DORA))).state
        assert DORA.node not in after.peers
        assert after.unplaced == {DORA.node: beat}

    def test_of_a_view_that_was_told_before_needs_no_question(self) -> None:
        doras = make_view(3, DORA)
        state = told(BERTS, DORA, TellView(doras)).state
        assert sent(told(state, DORA, make_heartbeat(doras, BERT))) == []

    def test_of_a_view_that_only_another_peer_has_shown_is_asked_for(self) -> None:
        """What that one has shown under this epoch may be forged."""
        doras = make_view(3, DORA)
        state = replace(
            BERTS, peers={**BERTS.peers, DORA.node: make_peer(DORA, doras, make_heartbeat(doras))}
        )
        emma = make_member("e")
        step = told(state, emma, make_heartbeat(doras))
        assert emma.node not in step.state.peers
        assert sent(step) == [(emma, AskView(doras.epoch))]

    def test_of_a_view_that_we_have_left_since_needs_no_question(self) -> None:
        """Whoever installs a view first still hears from the others that they are in the last."""
        beat = make_heartbeat(TRIO, BERT, ANNA)
        state = replace(told(BERTS, CARA, beat).state, view=make_view(6, BERT, previous=TRIO.epoch))
        step = told(state, CARA, beat)
        assert sent(step) == []
        assert step.state.peers[CARA.node].view == TRIO

    def test_raises_the_counter_that_the_next_proposal_must_exceed(self) -> None:
        """V1: a fresh counter above all seen."""
        step = told(BERTS, CARA, make_heartbeat(TRIO, BERT, promised=make_epoch(40)))
        assert highest_counter(step.state) == 40

    def test_shows_a_commit_that_was_lost_on_the_way(self) -> None:
        """V6: its leader shows it, or if that is gone whoever has it."""
        view = make_view(6, ANNA, BERT, CARA, previous=TRIO.epoch)
        state = told(promising(6), ANNA, TellView(view)).state
        assert installed(told(state, ANNA, make_heartbeat(view, BERT))) == [view]
        rest = {CARA.node: BERTS.peers[CARA.node]}
        bereft = replace(promising(6), peers=rest, quiet_until=NOW + 9)
        state = told(bereft, CARA, TellView(view)).state
        assert installed(told(state, CARA, make_heartbeat(view, BERT))) == [view]

    def test_shows_no_commit_in_the_name_of_a_leader_who_is_there(self) -> None:
        """A member could make one up, and install it before the true one comes."""
        view = make_view(6, ANNA, BERT, CARA, previous=TRIO.epoch)
        state = told(promising(6), CARA, TellView(view)).state
        assert installed(told(state, CARA, make_heartbeat(view, BERT))) == []

    def test_shows_no_commit_in_our_own_name(self) -> None:
        """V6: a member can make up what comes of a proposal that it got."""
        state = lose(CARA_LOST_ANNA, ANNA.node, "closed", Facts(), now=NOW).state
        assert state.proposal is not None
        counter = state.proposal.message.epoch.counter
        view = make_view(counter, BERT, CARA, previous=TRIO.epoch)
        assert view.epoch == state.promised
        state = told(state, CARA, TellView(view)).state
        assert installed(told(state, CARA, make_heartbeat(view, BERT))) == []

    def test_shows_no_commit_to_one_who_has_promised_more(self) -> None:
        view = make_view(6, ANNA, BERT, CARA, previous=TRIO.epoch)
        state = told(promising(7), CARA, TellView(view)).state
        assert installed(told(state, CARA, make_heartbeat(view, BERT))) == []

    def test_of_the_line_that_went_on_without_us_leaves_us_alone(self) -> None:
        """V2: with a view of one's own above all that was promised."""
        state = promising(12)
        for member in (CARA, ANNA):
            state = told(state, member, TellView(GONE_ON)).state
            step = told(state, member, make_heartbeat(GONE_ON, BERT))
            assert installed(step) == [] or member == ANNA
            state = step.state
        (alone,) = installed(step)
        assert alone == View.of_one(BERT, said_by(BERT), make_epoch(13, BERT))
        assert step.state.promised == alone.epoch

    @pytest.mark.parametrize(
        ("sender", "view"),
        [
            pytest.param(
                ANNA, make_view(4, ANNA, CARA, previous=make_epoch(3)), id="a lower epoch"
            ),
            pytest.param(ANNA, make_view(9, ANNA, BERT, previous=TRIO.epoch), id="we have a seat"),
            pytest.param(DORA, make_view(9, ANNA, DORA, previous=TRIO.epoch), id="of a stranger"),
            pytest.param(ANNA, make_view(9, ANNA, CARA, previous=make_epoch(4)), id="another line"),
        ],
    )
    def test_of_another_view_proves_nothing_by_itself(self, sender: Member, view: View) -> None:
        state = told(BERTS, sender, TellView(view)).state
        assert installed(told(state, sender, make_heartbeat(view, BERT))) == []


class TestBeingSuperseded:
    def test_leaves_one_alone_with_the_jobs_that_are_all_its_own(self) -> None:
        own, shared = make_roster(BERT), make_roster(ANNA, BERT, job=FACES)
        state = replace(CARA_GONE, view=make_view(5, *TRIO.members, rosters=[own, shared]))
        (alone,) = installed(told(state, ANNA, Superseded(GONE_ON)))
        assert alone.members == (BERT,)
        assert alone.rosters == (own,)

    @pytest.mark.parametrize("leader", [ANNA, CARA, DORA])
    def test_is_not_believed_of_one_while_others_stay(self, leader: Member) -> None:
        members = dict.fromkeys((leader, CARA))
        view = View(make_epoch(9, leader), tuple(make_seat(m, 3, TRIO.epoch) for m in members))
        assert told(BERTS, CARA, Superseded(view)) == MemberStep(BERTS)
        state = told(BERTS, CARA, TellView(view)).state
        assert installed(told(state, CARA, make_heartbeat(view, BERT))) == []

    def test_said_by_a_liar_parts_the_liar_from_the_others(self) -> None:
        view = View(make_epoch(9, CARA), (make_seat(CARA, 3, TRIO.epoch),))
        annas = all_hearing_each_other(ANNA, TRIO, BERT, CARA)
        annas = told(annas, CARA, TellView(view)).state
        ((to, proposal),) = sent(told(annas, CARA, make_heartbeat(view, ANNA, BERT)))
        assert to == BERT
        assert isinstance(proposal, Propose)
        assert proposal.members == (ANNA, BERT)

    def test_happens_to_one_who_has_slept_through_several_views(self) -> None:
        later = View(
            make_epoch(9), (make_seat(ANNA, 1, make_epoch(8)), make_seat(CARA, 3, make_epoch(8)))
        )
        (alone,) = installed(told(CARA_GONE, ANNA, Superseded(later)))
        assert alone.members == (BERT,)

    def test_does_not_happen_while_somebody_goes_on_with_us(self) -> None:
        """Anna may have been cut off, and have gone on by herself."""
        view = make_view(9, ANNA, previous=make_epoch(8))
        assert told(BERTS, ANNA, Superseded(view)) == MemberStep(BERTS)
        assert [v.members for v in installed(told(CARA_GONE, ANNA, Superseded(view)))] == [(BERT,)]

    def test_does_not_happen_by_one_who_has_been_taken_in_anew(self) -> None:
        """She had fallen out as well."""
        seat = make_seat(ANNA, 7, make_epoch(8))
        view = View(make_epoch(9, DORA), (make_seat(DORA, 1, make_epoch(8)), seat))
        assert installed(told(CARA_GONE, ANNA, Superseded(view))) == []


class TestARefusal:
    def leading(self) -> MemberState:
        """Bert, who leads since Anna is lost, and waits for Cara's answer."""
        return lose(CARA_LOST_ANNA, ANNA.node, "closed", Facts(), now=NOW).state

    def test_ends_the_attempt_and_keeps_quiet_for_a_moment(self) -> None:
        state = self.leading()
        assert state.proposal is not None
        epoch = state.proposal.message.epoch
        after = told(state, CARA, Refuse(epoch, make_epoch(30, CARA))).state
        assert after.proposal is None
        assert NOW <= after.quiet_until <= NOW + BACK_OFF_S
        assert after.highest_counter == 30

    def test_is_followed_by_an_attempt_above_the_promise(self) -> None:
        """V1."""
        state = self.leading()
        after = told(state, CARA, Refuse(state.promised, make_epoch(30, CARA))).state
        step = pass_time(after, Facts(), now=NOW + BACK_OFF_S)
        assert step.state.promised == make_epoch(31, BERT)

    def test_by_veto_ends_the_attempt_too(self) -> None:
        state = self.leading()
        after = told(state, CARA, Veto(state.promised)).state
        assert after.proposal is None
        assert after.highest_counter == state.highest_counter

    def test_of_an_earlier_attempt_only_tells_the_promise(self) -> None:
        state = self.leading()
        after = told(state, CARA, Refuse(make_epoch(2, BERT), make_epoch(30, CARA))).state
        assert after == replace(state, highest_counter=30)

    def test_of_nothing_that_was_proposed_changes_nothing(self) -> None:
        assert told(BERTS, CARA, Veto(make_epoch(2, BERT))) == MemberStep(BERTS)

    @pytest.mark.parametrize(("before", "times"), [(0, 1), (3, 8), (4, 16), (9, 20)])
    def test_keeps_quiet_for_twice_as_long_each_time(self, before: int, times: int) -> None:
        """V11: others may hear for seconds yet whom it leaves out, and would veto each attempt."""
        once = told(self.leading(), CARA, Veto(self.leading().promised)).state
        assert once.refusals == 1
        often = replace(self.leading(), refusals=before)
        after = told(often, CARA, Veto(often.promised)).state
        waits_s = (once.quiet_until - NOW) * times
        assert after.quiet_until == pytest.approx(NOW + waits_s)

    def test_is_forgotten_with_the_next_view(self) -> None:
        waits = replace(promising(6), refusals=3)
        assert told(waits, ANNA, commit(make_view(6, *TRIO.members))).state.refusals == 0

    def test_makes_two_leaders_wait_differently(self) -> None:
        """Or they would refuse each other for ever."""

        def quiet_s(incarnation: int) -> float:
            me = Member(BERT.node, Incarnation(incarnation))
            view = make_view(5, ANNA, me, CARA)
            all_well = all_hearing_each_other(me, view, ANNA, CARA)
            noticed = told(all_well, CARA, make_heartbeat(view, me)).state
            state = lose(noticed, ANNA.node, "", Facts(), now=NOW).state
            return told(state, CARA, Veto(state.promised)).state.quiet_until - NOW

        waits = {quiet_s(incarnation) for incarnation in range(1, 40)}
        assert len(waits) > 30
        assert all(0 <= wait <= BACK_OFF_S for wait in waits)


class TestALostPeer:
    def test_is_forgotten_but_for_the_reason(self) -> None:
        state = told(BERTS, CARA, TellView(make_view(7, CARA))).state
        state = told(state, CARA, make_heartbeat(make_view(8, CARA))).state
        after = lose(state, CARA.node, "silent for 2.0 s", Facts(), now=NOW).state
        assert CARA.node not in {*after.peers, *after.shown, *after.unplaced}
        assert after.losses == {CARA: "silent for 2.0 s"}

    def test_that_was_never_heard_leaves_no_trace(self) -> None:
        assert lose(BERTS, DORA.node, "closed", Facts(), now=NOW) == MemberStep(BERTS)

    def test_that_led_is_followed_by_the_next_in_line(self) -> None:
        step = lose(CARA_LOST_ANNA, ANNA.node, "closed", Facts(), now=NOW)
        assert sent(step) == [(CARA, make_proposal(BERT, 6, TRIO, BERT, CARA))]

    def test_that_led_is_missed_by_all_before_another_leads(self) -> None:
        """Who still hears it would veto; mostly it notices a moment later, and says so."""
        alone = lose(BERTS, ANNA.node, "closed", Facts(), now=NOW)
        assert sent(alone) == []
        step = told(alone.state, CARA, make_heartbeat(TRIO, BERT))
        assert sent(step) == [(CARA, make_proposal(BERT, 6, TRIO, BERT, CARA))]

    def test_that_led_is_followed_after_a_moment_by_one_whom_it_alone_no_longer_hears(self) -> None:
        alone = lose(BERTS, ANNA.node, "closed", Facts(), now=NOW).state
        assert pass_time(alone, Facts(), now=NOW + NOTICE_S - 0.01) == MemberStep(alone)
        step = pass_time(alone, Facts(), now=NOW + NOTICE_S)
        assert sent(step) == [(CARA, make_proposal(BERT, 6, TRIO, BERT, CARA))]

    def test_that_led_is_followed_by_nobody_else(self) -> None:
        caras = all_hearing_each_other(CARA, TRIO, ANNA, BERT)
        assert lose(caras, ANNA.node, "closed", Facts(), now=NOW).actions == ()

    def test_is_not_waited_for_nor_kept_at_the_cost_of_who_knew_of_the_loss_before(self) -> None:
        """V5 keeps Cara, the more senior, when Dora no longer hears her. But Cara has gone."""
        view = make_view(5, ANNA, BERT, CARA, DORA)
        annas = all_hearing_each_other(ANNA, view, BERT, CARA, DORA)
        doubting = told(annas, DORA, make_heartbeat(view, ANNA, BERT))
        assert doubting.state.proposal is not None
        assert doubting.state.proposal.message.members == (ANNA, BERT, CARA)
        step = lose(doubting.state, CARA.node, "closed", Facts(), now=NOW)
        proposal = make_proposal(ANNA, 7, view, ANNA, BERT, DORA)
        assert sent(step) == [(BERT, proposal), (DORA, proposal)]

    def test_leaves_the_last_one_in_a_view_of_its_own_at_once(self) -> None:
        duo = make_view(5, ANNA, BERT)
        step = lose(all_hearing_each_other(BERT, duo, ANNA), ANNA.node, "x", Facts(), now=NOW)
        (view,) = installed(step)
        assert view.members == (BERT,)
        assert view.previous_epoch_of(BERT) == duo.epoch

    def test_is_waited_for_no_longer(self) -> None:
        """Its answer can't come: a proposal that counts on it is withdrawn and made anew."""
        leading = lose(CARA_LOST_ANNA, ANNA.node, "closed", Facts(), now=NOW).state
        step = lose(leading, CARA.node, "closed", Facts(), now=NOW)
        (view,) = installed(step)
        assert view.members == (BERT,)
        assert view.epoch > leading.promised


class TestDeadlines:
    """V6: nothing waits for ever."""

    LEADING = lose(CARA_LOST_ANNA, ANNA.node, "closed", Facts(), now=NOW).state
    """It has proposed a view with Cara."""

    @staticmethod
    def echoing(state: MemberState, member: Member, at: float) -> MemberState:
        """The member's last heartbeat answers one sent at this time."""
        peer = state.peers[member.node]
        beat = msgspec.structs.replace(peer.heartbeat, echo_us=round(at * 1e6))
        return replace(state, peers={**state.peers, member.node: replace(peer, heartbeat=beat)})

    def test_who_has_read_a_proposal_and_does_not_answer_in_time_is_left_out_for_a_while(
        self,
    ) -> None:
        leading = self.echoing(self.LEADING, CARA, NOW + 0.1)
        before = pass_time(leading, Facts(), now=NOW + FLUSH_DEADLINE_S - 0.01)
        assert before == MemberStep(leading)
        after = pass_time(leading, Facts(), now=NOW + FLUSH_DEADLINE_S).state
        assert after.skipped == {CARA: Skip(NOW + FLUSH_DEADLINE_S + SKIP_S, SKIP_S)}
        assert after.view.members == (BERT,)

    def test_who_has_not_read_it_is_waited_for(self) -> None:
        """V11: that is the network's fault, and its silence is judged elsewhere."""
        waiting = self.echoing(self.LEADING, CARA, NOW)
        assert pass_time(waiting, Facts(), now=NOW + UNREAD_S - 0.01).state == waiting
        assert CARA in pass_time(waiting, Facts(), now=NOW + UNREAD_S).state.skipped

    def test_who_does_not_hear_us_any_more_is_not_waited_for(self) -> None:
        peer = self.LEADING.peers[CARA.node]
        deaf = replace(peer, heartbeat=msgspec.structs.replace(peer.heartbeat, heard={}))
        state = replace(self.LEADING, peers={**self.LEADING.peers, CARA.node: deaf})
        assert CARA in pass_time(state, Facts(), now=NOW + FLUSH_DEADLINE_S).state.skipped

    @pytest.mark.parametrize(("timeout_s", "slower"), [(0.0, 1), (0.25, 1), (0.5, 2), (60.0, 4)])
    def test_deadlines_follow_the_round_trips(self, timeout_s: float, slower: float) -> None:
        """V11."""
        facts = Facts(timeout_s=timeout_s)
        deadline = NOW + slower * FLUSH_DEADLINE_S
        leading = self.echoing(self.LEADING, CARA, NOW + 0.1)
        leading = pass_time(leading, facts, now=NOW + 0.2).state
        assert not pass_time(leading, facts, now=deadline - 0.01).state.skipped
        assert CARA in pass_time(leading, facts, now=deadline).state.skipped

    def test_who_has_not_read_it_twice_is_waited_for_twice_as_long(self) -> None:
        """V11: however long messages take, one is answered in the end."""
        skipped = {CARA: Skip(NOW - 1, SKIP_S)}
        waiting = replace(self.echoing(self.LEADING, CARA, NOW), skipped=skipped)
        deadline = NOW + 2 * UNREAD_S
        assert pass_time(waiting, Facts(), now=deadline - 0.01).state == waiting
        after = pass_time(waiting, Facts(), now=deadline).state
        assert after.skipped == {CARA: Skip(deadline + 2 * SKIP_S, 2 * SKIP_S)}

    def test_patience_doubles_with_each_failure_and_halves_with_each_view(self) -> None:
        """V11."""
        waits = replace(promising(6), failures=3)
        assert not needs_epoch(waits, NOW + 8 * PATIENCE_S)
        assert needs_epoch(waits, NOW + 8 * PATIENCE_S + 0.1)
        assert told(waits, ANNA, commit(make_view(6, *TRIO.members))).state.failures == 2

    def test_a_promise_without_a_commit_is_a_failure_for_its_member_too(self) -> None:
        """V11."""
        waits = promising(6)
        again = make_proposal(ANNA, 7, waits.view, ANNA, BERT)
        soon = receive(waits, ANNA, again, Facts(), now=NOW + PATIENCE_S)
        late = receive(waits, ANNA, again, Facts(), now=NOW + PATIENCE_S + 0.1)
        assert (soon.state.failures, late.state.failures) == (0, 1)

    def test_who_promised_a_leader_that_fell_silent_asks_the_next_for_an_epoch(self) -> None:
        circle = gathered(ANNA, BERT, CARA)
        leader, *juniors = circle.agreed_view().by_seniority
        circle.facts[leader] = Facts(waiting=(make_waiting(1),))
        circle.tick(leader)
        for junior in juniors:
            while circle.states[junior].flushed_at is None:
                circle.deliver(leader, junior)
            circle.cut(leader, junior)
        for junior in juniors:
            circle.lose(junior, leader)
        del circle.states[leader]
        circle.pass_time(2 * PATIENCE_S)
        assert circle.agreed_view(juniors).members == tuple(sorted(juniors))

    def test_a_promise_is_kept_while_its_leader_is_heard(self) -> None:
        state = promising(6)
        assert pass_time(state, Facts(), now=NOW + PATIENCE_S).actions == ()


def test_who_asks_for_a_view_is_shown_the_one_in_force() -> None:
    step = told(BERTS, CARA, AskView(make_epoch(3)))
    assert sent(step) == [(CARA, TellView(TRIO))]


def test_a_farewell_changes_nothing_until_the_link_ends() -> None:
    assert told(BERTS, CARA, Leaving()) == MemberStep(BERTS)


def test_the_commit_follows_the_last_answer_in_one_step() -> None:
    leading = lose(CARA_LOST_ANNA, ANNA.node, "closed", Facts(), now=NOW).state
    answer = make_flushed(CARA, TRIO, epoch=leading.promised)
    step = told(leading, CARA, answer)
    (view,) = installed(step)
    assert view.members == (BERT, CARA)
    assert sent(step) == [(CARA, commit(view))]
    assert isinstance(step.actions[0], SendOnLink), "the commit is on its way before it is in force"


AWAKE_US = 100_000_000
BOTH = make_view(5, ANNA, BERT)
ALL = make_view(6, ANNA, BERT, CARA, leader=CARA)
STATE = make_state(ANNA, BOTH)
WOKEN = wake(STATE, now_us=AWAKE_US)


def beat_of(view: View, *, echo_us: int = AWAKE_US) -> Heartbeat:
    return msgspec.structs.replace(make_heartbeat(view), echo_us=echo_us)


def test_every_other_member_is_asked() -> None:
    assert StallGuard(AWAKE_US, frozenset({BERT})) == WOKEN
    assert not wake(make_state(ANNA, make_view(5, ANNA)), now_us=AWAKE_US).unconfirmed


def test_only_a_fresh_answer_that_names_our_view_confirms_it() -> None:
    assert not WOKEN.receive(STATE, BERT, beat_of(BOTH)).unconfirmed
    assert WOKEN.receive(STATE, BERT, beat_of(BOTH, echo_us=AWAKE_US - 1)) == WOKEN
    assert WOKEN.receive(STATE, BERT, beat_of(ALL)) == WOKEN
    assert WOKEN.receive(STATE, CARA, beat_of(BOTH)) == WOKEN


def test_who_is_no_longer_of_the_view_need_not_confirm_it() -> None:
    promised_now = replace(STATE, promised=make_epoch(6), flushed_at=100.0)
    assert not WOKEN.install(promised_now, make_view(6, ANNA, CARA)).unconfirmed
    assert WOKEN.install(promised_now, ALL).unconfirmed == {BERT}


def test_a_view_that_was_promised_before_the_sleep_is_doubted_by_itself() -> None:
    """The others may have installed it and left it meanwhile (seed 224309)."""
    promised_before = replace(STATE, promised=ALL.epoch, flushed_at=99.9)
    assert WOKEN.install(promised_before, ALL).unconfirmed == {BERT, CARA}
    confirmed = StallGuard(AWAKE_US)
    assert confirmed.install(promised_before, ALL).unconfirmed == {BERT, CARA}
    assert StallGuard().install(promised_before, ALL) == StallGuard()
