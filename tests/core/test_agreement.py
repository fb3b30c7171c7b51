"""How a member answers what it hears: V1 to V6, I1 and I2 of the design, one by one."""

from dataclasses import replace

import pytest

from pmesh.core.agreement import first_state, hear, lose, pass_time
from pmesh.core.messages import (
    AgreementMessage,
    AskToJoin,
    AskView,
    Commit,
    Flushed,
    Heartbeat,
    Leaving,
    Propose,
    Refuse,
    Superseded,
    TellView,
    Veto,
)
from pmesh.core.standing import (
    BACK_OFF_S,
    FLUSH_DEADLINE_S,
    JOIN_REQUEST_S,
    PATIENCE_S,
    SKIP_S,
    Facts,
    Fence,
    Install,
    Peer,
    Send,
    State,
    Step,
)
from pmesh.core.views import View
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, Member
from tests.core.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    FACES,
    all_hearing_each_other,
    make_concern,
    make_epoch,
    make_flushed,
    make_heartbeat,
    make_member,
    make_peer,
    make_proposal,
    make_report,
    make_roster,
    make_state,
    make_verdict,
    make_view,
    make_waiting,
    running,
)
from tests.core.circle import Circle, gathered

NOW = 100.0
TRIO = make_view(5, ANNA, BERT, CARA)
BERTS = all_hearing_each_other(BERT, TRIO, ANNA, CARA)
"""Bert in peace, with Anna who leads and Cara who comes after him."""


def told(
    state: State, sender: Member, message: AgreementMessage, *, facts: Facts | None = None
) -> Step:
    return hear(state, sender, message, facts or Facts(), now=NOW)


def sent(step: Step) -> list[tuple[Member, AgreementMessage]]:
    return [(action.to, action.message) for action in step.actions if isinstance(action, Send)]


def installed(step: Step) -> list[View]:
    return [action.view for action in step.actions if isinstance(action, Install)]


def commit(view: View) -> Commit:
    """The commit of a view whose ring is in order of node id: all edges cost the same."""
    return Commit(view, tuple(tuple(20 * (a != b) for b in view.seats) for a in view.seats))


def promising(counter: int = 6, leader: Member = ANNA) -> State:
    """Bert, who has promised this epoch and waits for its commit."""
    return told(BERTS, leader, make_proposal(leader, counter, TRIO, *TRIO.members)).state


def test_a_process_that_has_just_started_is_alone_in_a_view_of_its_own() -> None:
    state = first_state(ANNA, "mac-a", now=7.0)
    assert state.view == View.of_one(ANNA, "mac-a", make_epoch(1, ANNA))
    assert (state.promised, state.highest_counter) == (state.view.epoch, 1)
    assert (state.installed_at, state.flushed_at) == (7.0, None)


def test_two_processes_of_one_node_never_begin_with_the_same_epoch() -> None:
    again = make_member("a", incarnation=99)
    first, second = (first_state(m, "mac-a", now=0.0).promised for m in (ANNA, again))
    assert first != second


class TestAProposalIsAnswered:
    PROPOSAL = make_proposal(ANNA, 6, TRIO, ANNA, BERT, CARA)

    def test_with_a_promise_and_what_the_member_has_installed(self) -> None:
        step = told(BERTS, ANNA, self.PROPOSAL)
        answer = make_flushed(BERT, TRIO, epoch=make_epoch(6))
        assert step.actions == (Fence(()), Send(ANNA, answer))
        assert (step.state.promised, step.state.flushed_at) == (make_epoch(6), NOW)
        assert step.state.highest_counter == 6

    def test_with_who_waits_here(self) -> None:
        facts = Facts(waiting=(make_waiting(3),))
        ((_, answer),) = sent(told(BERTS, ANNA, self.PROPOSAL, facts=facts))
        assert isinstance(answer, Flushed)
        assert answer.waiting == facts.waiting

    def test_with_a_fence_before_the_answer_around_the_jobs_it_names(self) -> None:
        """V3, and V7: the other job runs on."""
        digits, faces = make_roster(ANNA, BERT), make_roster(BERT, job=FACES)
        reports = [make_report(r, {0: [running(3)]}, fenced=False) for r in (digits, faces)]
        proposal = make_proposal(ANNA, 6, TRIO, ANNA, BERT, jobs=[DIGITS])
        fence, answer = told(BERTS, ANNA, proposal, facts=Facts(reports=tuple(reports))).actions
        assert fence == Fence((DIGITS,))
        assert isinstance(answer, Send)
        assert isinstance(answer.message, Flushed)
        assert [(r.job, r.fenced) for r in answer.message.jobs] == [(DIGITS, True), (FACES, False)]

    def test_with_a_fence_around_every_job_if_its_base_is_another_view(self) -> None:
        """Which jobs are concerned was judged by rosters that may not be ours."""
        elsewhere = replace(BERTS, view=make_view(4, *TRIO.members))
        base = make_view(5, *TRIO.members, previous=make_epoch(4))
        report = make_report(make_roster(BERT), {0: []}, fenced=False)
        step = told(
            replace(elsewhere, promised=make_epoch(4)),
            ANNA,
            make_proposal(ANNA, 6, base, *TRIO.members),
            facts=Facts(reports=(report,)),
        )
        assert step.actions[0] == Fence((DIGITS,))

    def test_once_if_it_comes_twice(self) -> None:
        state = told(BERTS, ANNA, self.PROPOSAL).state
        assert told(state, ANNA, self.PROPOSAL) == Step(state)

    def test_with_a_promise_to_whoever_has_the_higher_epoch(self) -> None:
        """V1: a later promise replaces the earlier one, and ends an attempt of one's own."""
        leading = lose(BERTS, ANNA.node, "closed", Facts(), now=NOW).state
        assert leading.proposal is not None
        step = told(leading, CARA, make_proposal(CARA, 9, TRIO, BERT, CARA))
        assert step.state.promised == make_epoch(9, CARA)
        assert step.state.proposal is None

    @pytest.mark.parametrize("counter", [5, 7])
    def test_with_a_refusal_that_carries_the_promise_if_that_is_higher(self, counter: int) -> None:
        """V1: a proposal must exceed the promise, not only what is installed."""
        state = promising(8)
        step = told(state, ANNA, make_proposal(ANNA, counter, TRIO, *TRIO.members))
        assert sent(step) == [(ANNA, Refuse(make_epoch(counter), make_epoch(8)))]
        assert step.state == state

    def test_with_proof_for_a_proposer_that_the_line_left_behind(self) -> None:
        """V2: Dora still counts Bert as hers, but his view has neither her nor hers before it."""
        doras = make_view(4, DORA, BERT)
        step = told(BERTS, DORA, make_proposal(DORA, 9, doras, DORA, BERT))
        assert sent(step) == [(DORA, Superseded(TRIO))]
        assert step.state == BERTS

    def test_for_a_proposer_out_of_view_that_has_gone_on_from_it(self) -> None:
        """V2: its base records our epoch as our last."""
        base = make_view(6, DORA, BERT, previous=TRIO.epoch)
        step = told(BERTS, DORA, make_proposal(DORA, 9, base, DORA, BERT))
        assert step.state.promised == make_epoch(9, DORA)

    def test_with_a_veto_if_it_passes_over_a_senior_who_is_heard(self) -> None:
        step = told(BERTS, CARA, make_proposal(CARA, 6, TRIO, CARA, BERT))
        assert sent(step) == [(CARA, Veto(make_epoch(6, CARA)))]
        assert step.state == BERTS

    def test_without_a_veto_if_that_senior_is_not_heard(self) -> None:
        state = all_hearing_each_other(BERT, TRIO, CARA)
        step = told(
            replace(state, quiet_until=NOW + 9), CARA, make_proposal(CARA, 6, TRIO, CARA, BERT)
        )
        assert step.state.promised == make_epoch(6, CARA)

    def test_without_a_veto_if_that_senior_has_gone_another_way(self) -> None:
        elsewhere = make_view(7, ANNA, DORA)
        anna = make_peer(ANNA, elsewhere, make_heartbeat(elsewhere, BERT))
        cara = BERTS.peers[CARA.node]
        state = replace(make_state(BERT, TRIO, anna, cara), quiet_until=NOW + 9)
        step = told(state, CARA, make_proposal(CARA, 8, TRIO, CARA, BERT))
        assert step.state.promised == make_epoch(8, CARA)

    def test_without_a_veto_if_the_senior_who_is_passed_over_is_oneself(self) -> None:
        """One who asks to lead the others does not lack a leader."""
        step = told(BERTS, CARA, make_proposal(CARA, 6, TRIO, CARA, BERT, ANNA))
        assert step.state.promised == make_epoch(6, CARA)

    def test_by_a_newcomer_if_the_view_that_takes_it_in_is_heavier(self) -> None:
        anna = make_peer(ANNA, TRIO, make_heartbeat(TRIO, DORA))
        proposal = make_proposal(ANNA, 6, TRIO, ANNA, DORA, continuing=[ANNA])
        step = told(make_state(DORA, make_view(3, DORA), anna), ANNA, proposal)
        assert step.state.promised == make_epoch(6)

    def test_and_soon_forgotten_if_its_leader_is_not_heard(self) -> None:
        """V6: its commit may never come."""
        state = told(make_state(CARA, TRIO), ANNA, self.PROPOSAL).state
        assert state.promised == make_epoch(7, CARA)

    def test_with_a_veto_by_a_newcomer_whose_own_view_is_heavier(self) -> None:
        """V9."""
        alone = make_state(DORA, make_view(3, DORA))
        base = make_view(2, ANNA)
        step = told(alone, ANNA, make_proposal(ANNA, 6, base, ANNA, DORA, continuing=[ANNA]))
        assert sent(step) == [(ANNA, Veto(make_epoch(6)))]

    @pytest.mark.parametrize(
        ("sender", "proposal"),
        [
            pytest.param(CARA, PROPOSAL, id="in another's name"),
            pytest.param(
                make_member("a", incarnation=99), PROPOSAL, id="in the name of a former process"
            ),
            pytest.param(ANNA, make_proposal(ANNA, 6, TRIO, ANNA, CARA), id="not meant for us"),
        ],
    )
    def test_with_a_protocol_error_if_no_honest_leader_would_send_it(
        self, sender: Member, proposal: Propose
    ) -> None:
        with pytest.raises(ProtocolError, match="in another's name, or sent to one whom it leaves"):
            told(BERTS, sender, proposal)


class TestACommitIsInstalled:
    VIEW = make_view(6, ANNA, BERT, CARA, previous=TRIO.epoch)

    def test_if_its_epoch_is_what_was_promised(self) -> None:
        step = told(promising(6), ANNA, commit(self.VIEW))
        assert step.actions == (Install(self.VIEW),)
        assert (step.state.view, step.state.flushed_at) == (self.VIEW, None)
        assert (step.state.installed_at, step.state.highest_counter) == (NOW, 6)

    def test_not_if_more_has_been_promised_since(self) -> None:
        """V1."""
        state = promising(7)
        assert told(state, ANNA, commit(self.VIEW)) == Step(state)

    def test_not_if_nothing_has_been_promised(self) -> None:
        """V1: whoever commits it has no answer of ours."""
        assert told(BERTS, ANNA, commit(self.VIEW)) == Step(BERTS)

    def test_not_again_if_it_comes_twice(self) -> None:
        """I2."""
        state = told(promising(6), ANNA, commit(self.VIEW)).state
        assert told(state, ANNA, commit(self.VIEW)) == Step(state)

    def test_and_forgets_what_it_has_settled(self) -> None:
        state = replace(
            promising(6),
            joining={CARA: NOW, DORA: NOW},
            losses={CARA: "closed", DORA: "closed"},
        )
        after = told(state, ANNA, commit(self.VIEW)).state
        assert after.joining == {DORA: NOW}
        assert after.losses == {CARA: "closed"}

    @pytest.mark.parametrize(
        ("sender", "message", "why"),
        [
            pytest.param(CARA, commit(VIEW), "another's name", id="of another leader"),
            pytest.param(ANNA, commit(make_view(6, ANNA, CARA)), "leaves out", id="without us"),
            pytest.param(ANNA, Commit(VIEW, ()), "costs do not fit", id="without costs"),
            pytest.param(ANNA, Commit(VIEW, ((0, 0, 0),) * 2), "do not fit", id="a row missing"),
            pytest.param(ANNA, Commit(VIEW, ((0, 0),) * 3), "do not fit", id="a column missing"),
            pytest.param(
                ANNA,
                commit(make_view(6, BERT, ANNA, CARA, leader=ANNA)),
                "ring does not follow",
                id="in another ring order",
            ),
        ],
    )
    def test_with_a_protocol_error_if_no_honest_leader_would_send_it(
        self, sender: Member, message: Commit, why: str
    ) -> None:
        with pytest.raises(ProtocolError, match=why):
            told(promising(6), sender, message)


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

    def test_of_a_view_that_another_peer_has_shown_needs_no_question(self) -> None:
        doras = make_view(3, DORA)
        state = replace(
            BERTS, peers={**BERTS.peers, DORA.node: make_peer(DORA, doras, make_heartbeat(doras))}
        )
        emma = make_member("e")
        assert told(state, emma, make_heartbeat(doras)).state.peers[emma.node].view == doras

    def test_raises_the_counter_that_the_next_proposal_must_exceed(self) -> None:
        """V1: a fresh counter above all seen."""
        step = told(BERTS, CARA, make_heartbeat(TRIO, BERT, promised=make_epoch(40)))
        assert step.state.highest_counter == 40

    def test_shows_a_commit_that_was_lost_on_the_way(self) -> None:
        """V6: who has it hands it on."""
        view = make_view(6, ANNA, BERT, CARA, previous=TRIO.epoch)
        state = told(promising(6), CARA, TellView(view)).state
        step = told(state, CARA, make_heartbeat(view, BERT))
        assert installed(step) == [view]

    def test_shows_no_commit_to_one_who_has_promised_more(self) -> None:
        view = make_view(6, ANNA, BERT, CARA, previous=TRIO.epoch)
        state = told(promising(7), CARA, TellView(view)).state
        assert installed(told(state, CARA, make_heartbeat(view, BERT))) == []

    def test_of_the_line_that_went_on_without_us_leaves_us_alone(self) -> None:
        """V2: with a view of one's own above all that was promised."""
        view = make_view(9, ANNA, CARA, previous=TRIO.epoch)
        state = told(promising(12), ANNA, TellView(view)).state
        step = told(state, ANNA, make_heartbeat(view, BERT))
        (alone,) = installed(step)
        assert alone == View.of_one(BERT, "mac-b", make_epoch(13, BERT))
        assert step.state.promised == alone.epoch

    @pytest.mark.parametrize(
        ("sender", "view"),
        [
            pytest.param(ANNA, make_view(4, ANNA, CARA, previous=TRIO.epoch), id="a lower epoch"),
            pytest.param(ANNA, make_view(9, ANNA, BERT, previous=TRIO.epoch), id="we have a seat"),
            pytest.param(DORA, make_view(9, ANNA, DORA, previous=TRIO.epoch), id="of a stranger"),
            pytest.param(ANNA, make_view(9, ANNA, CARA, previous=make_epoch(4)), id="another line"),
        ],
    )
    def test_of_another_view_proves_nothing_by_itself(self, sender: Member, view: View) -> None:
        state = told(BERTS, sender, TellView(view)).state
        assert installed(told(state, sender, make_heartbeat(view, BERT))) == []


class TestBeingSuperseded:
    VIEW = make_view(9, ANNA, CARA, previous=TRIO.epoch)

    def test_leaves_one_alone_with_the_jobs_that_are_all_its_own(self) -> None:
        own, shared = make_roster(BERT), make_roster(ANNA, BERT, job=FACES)
        state = replace(BERTS, view=make_view(5, *TRIO.members, rosters=[own, shared]))
        (alone,) = installed(told(state, ANNA, Superseded(self.VIEW)))
        assert alone.members == (BERT,)
        assert alone.rosters == (own,)

    def test_is_not_believed_without_proof(self) -> None:
        other_line = make_view(9, ANNA, CARA, previous=make_epoch(3))
        assert told(BERTS, ANNA, Superseded(other_line)) == Step(BERTS)


class TestARefusal:
    def leading(self) -> State:
        """Bert, who leads since Anna is lost, and waits for Cara's answer."""
        return lose(BERTS, ANNA.node, "closed", Facts(), now=NOW).state

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
        assert told(BERTS, CARA, Veto(make_epoch(2, BERT))) == Step(BERTS)

    def test_makes_two_leaders_wait_differently(self) -> None:
        """Or they would refuse each other for ever."""

        def quiet_s(incarnation: int) -> float:
            me = Member(BERT.node, Incarnation(incarnation))
            view = make_view(5, ANNA, me, CARA)
            state = lose(
                all_hearing_each_other(me, view, ANNA, CARA), ANNA.node, "", Facts(), now=NOW
            ).state
            return told(state, CARA, Veto(state.promised)).state.quiet_until - NOW

        waits = {quiet_s(incarnation) for incarnation in range(1, 40)}
        assert len(waits) > 30
        assert all(0 <= wait <= BACK_OFF_S for wait in waits)


class TestALostPeer:
    def test_is_forgotten_but_for_the_reason(self) -> None:
        state = told(BERTS, CARA, TellView(make_view(7, CARA))).state
        state = told(state, CARA, make_heartbeat(make_view(8, CARA))).state
        after = lose(state, CARA.node, "silent for 2.0 s", Facts(), now=NOW).state
        assert CARA.node not in {*after.peers, *after.told, *after.unplaced}
        assert after.losses == {CARA: "silent for 2.0 s"}

    def test_that_was_never_heard_leaves_no_trace(self) -> None:
        assert lose(BERTS, DORA.node, "closed", Facts(), now=NOW) == Step(BERTS)

    def test_that_led_is_followed_by_the_next_in_line(self) -> None:
        step = lose(BERTS, ANNA.node, "closed", Facts(), now=NOW)
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


class TestDeadlines:
    """V6: nothing waits for ever."""

    def test_who_does_not_answer_in_time_is_left_out_for_a_while(self) -> None:
        leading = lose(BERTS, ANNA.node, "closed", Facts(), now=NOW).state
        before = pass_time(leading, Facts(), now=NOW + FLUSH_DEADLINE_S - 0.01)
        assert before == Step(leading)
        after = pass_time(leading, Facts(), now=NOW + FLUSH_DEADLINE_S).state
        assert after.skipped == {CARA: NOW + FLUSH_DEADLINE_S + SKIP_S}
        assert after.view.members == (BERT,)

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


class TestAskingToJoin:
    BIG = make_view(5, ANNA, BERT)
    BEAT = make_heartbeat(BIG, DORA, acting=True)
    ALONE = make_state(DORA, make_view(9, DORA))

    def meet(self, beat: Heartbeat, state: State = ALONE) -> Step:
        state = told(state, ANNA, TellView(self.BIG)).state
        return told(state, ANNA, beat)

    def test_is_asked_of_the_leader_of_a_heavier_view(self) -> None:
        step = self.meet(self.BEAT)
        assert sent(step) == [(ANNA, AskToJoin(self.ALONE.view.epoch))]
        assert step.state.asked_to_join_at == NOW

    def test_is_repeated_but_not_with_every_heartbeat(self) -> None:
        state = self.meet(self.BEAT).state
        again = JOIN_REQUEST_S / 4
        assert pass_time(state, Facts(), now=NOW + again - 0.01).actions == ()
        assert len(pass_time(state, Facts(), now=NOW + again).actions) == 1

    @pytest.mark.parametrize(
        "beat",
        [
            pytest.param(make_heartbeat(BIG, DORA), id="it does not lead"),
            pytest.param(make_heartbeat(BIG, BERT, acting=True), id="it does not hear us"),
            pytest.param(make_heartbeat(BIG, DORA, acting=True, flushed=True), id="it is busy"),
        ],
    )
    def test_is_not_asked_of_one_who_could_not_take_us_in(self, beat: Heartbeat) -> None:
        assert sent(self.meet(beat)) == []

    def test_is_not_asked_of_a_lighter_view(self) -> None:
        trio = make_state(DORA, make_view(9, DORA, make_member("e"), make_member("f")))
        trio = replace(trio, quiet_until=NOW + 9)
        assert sent(self.meet(self.BEAT, trio)) == []

    def test_is_not_asked_of_a_view_that_has_us_already(self) -> None:
        view = make_view(5, ANNA, DORA, BERT)
        anna = make_peer(ANNA, view, make_heartbeat(view, DORA, acting=True))
        state = replace(make_state(DORA, make_view(4, DORA), anna), quiet_until=NOW + 9)
        assert sent(pass_time(state, Facts(), now=NOW)) == []

    def test_is_asked_of_the_heaviest(self) -> None:
        bigger = make_view(4, CARA, make_member("e"), make_member("f"))
        cara = make_peer(CARA, bigger, make_heartbeat(bigger, DORA, acting=True))
        anna = make_peer(ANNA, self.BIG, self.BEAT)
        state = make_state(DORA, make_view(9, DORA), anna, cara)
        assert [to for to, _ in sent(pass_time(state, Facts(), now=NOW))] == [CARA]

    def test_waits_while_a_proposal_of_ours_is_out(self) -> None:
        anna = make_peer(ANNA, self.BIG, self.BEAT)
        cara = make_peer(CARA, make_view(1, CARA), make_heartbeat(make_view(1, CARA), DORA))
        state = make_state(DORA, make_view(9, DORA), anna, cara)
        state = replace(state, joining={CARA: NOW})
        ((to, message),) = sent(pass_time(state, Facts(), now=NOW))
        assert to == CARA
        assert isinstance(message, Propose)

    def test_is_noted_by_who_is_asked(self) -> None:
        step = told(BERTS, DORA, AskToJoin(make_epoch(1, DORA)))
        assert step.state.joining == {DORA: NOW}


def test_who_asks_for_a_view_is_shown_the_one_in_force() -> None:
    step = told(BERTS, CARA, AskView(make_epoch(3)))
    assert sent(step) == [(CARA, TellView(TRIO))]


def test_a_farewell_changes_nothing_until_the_link_ends() -> None:
    assert told(BERTS, CARA, Leaving()) == Step(BERTS)


def test_the_commit_follows_the_last_answer_in_one_step() -> None:
    leading = lose(BERTS, ANNA.node, "closed", Facts(), now=NOW).state
    answer = make_flushed(CARA, TRIO, epoch=leading.promised)
    step = told(leading, CARA, answer)
    (view,) = installed(step)
    assert view.members == (BERT, CARA)
    assert sent(step) == [(CARA, commit(view))]
    assert isinstance(step.actions[0], Send), "the commit is on its way before it is in force"


class TestTogether:
    """Agents that hear each other, by their own messages."""

    def test_two_who_meet_make_one_view(self) -> None:
        view = gathered(ANNA, BERT).agreed_view()
        assert set(view.members) == {ANNA, BERT}

    def test_many_who_meet_at_once_end_in_one_view(self) -> None:
        everyone = [make_member(letter) for letter in "abcdefgh"]
        assert len(gathered(*everyone).agreed_view().members) == len(everyone)

    def test_in_peace_no_view_follows_another(self) -> None:
        circle = gathered(ANNA, BERT, CARA)
        count = len(circle.views)
        circle.pass_time(30.0)
        assert len(circle.views) == count

    def test_the_others_go_on_when_one_is_lost_and_take_it_in_again(self) -> None:
        circle = gathered(ANNA, BERT, CARA)
        circle.stop(CARA)
        circle.deliver_all()
        assert set(circle.agreed_view().members) == {ANNA, BERT}
        again = make_member("c", incarnation=99)
        circle.start(again)
        view = circle.recover(within_s=2.0)
        assert view.by_seniority[-1] == again

    def test_two_halves_come_together_again(self) -> None:
        circle = gathered(ANNA, BERT, CARA, DORA)
        for one in (ANNA, BERT):
            for other in (CARA, DORA):
                circle.unlink(one, other)
        circle.pass_time(3.0)
        assert set(circle.view_of(ANNA).members) == {ANNA, BERT}
        assert set(circle.view_of(CARA).members) == {CARA, DORA}
        circle.recover(within_s=5.0)

    def test_of_two_who_are_cut_off_from_each_other_the_senior_stays(self) -> None:
        """V5: Bert hears both, and still only a clique is a view."""
        circle = gathered(ANNA, BERT, CARA)
        leader, second, third = circle.agreed_view().by_seniority
        circle.unlink(second, third)
        circle.pass_time(3.0)
        assert set(circle.agreed_view([leader, second]).members) == {leader, second}
        circle.recover(within_s=5.0)

    def test_a_job_begins_when_its_trainers_wait_and_fails_one_way_for_all(self) -> None:
        """O3: who timed out only asks; the commit tells everyone the same."""
        circle = gathered(ANNA, BERT, CARA)
        for member in circle.states:
            circle.facts[member] = Facts(waiting=(make_waiting(3),))
        circle.pass_time(1.0)
        (roster,) = circle.agreed_view().rosters
        for member in circle.states:
            (rank,) = roster.ranks_of(member)
            report = make_report(roster, {rank: [running(0)]}, fenced=False)
            circle.facts[member] = Facts(reports=(report,))
        circle.facts[BERT] = replace(
            circle.facts[BERT],
            concerns=(make_concern(roster, make_verdict("OpTimedOut", 2), op=0),),
        )
        circle.pass_time(1.0)
        (settled,) = circle.agreed_view().rosters
        assert settled.number > roster.number
        assert [outcome.verdict for outcome in settled.outcomes] == [make_verdict("OpTimedOut", 2)]
        assert {m for m, fence in circle.fences if fence.jobs == (DIGITS,)} == set(circle.states)

    def test_a_restarted_leader_never_uses_an_epoch_again(self) -> None:
        """V1: without incarnations it would."""
        circle = gathered(ANNA, BERT)
        leader = circle.agreed_view().by_seniority[0]
        used = set(circle.views)
        circle.stop(leader)
        circle.start(Member(leader.node, Incarnation(leader.incarnation + 1000)))
        circle.recover(within_s=5.0)
        assert used < set(circle.views)


def test_an_epoch_that_could_not_follow_is_never_installed() -> None:
    """I2, even if what was promised were forged: the last line of defence."""
    view = make_view(6, ANNA, CARA)
    state = replace(promising(6), view=make_view(4, ANNA, BERT))
    with pytest.raises(ProtocolError, match="a view that can't follow"):
        told(told(state, CARA, TellView(view)).state, CARA, make_heartbeat(view, BERT))
    same = replace(promising(6), view=make_view(6, *TRIO.members))
    with pytest.raises(ProtocolError, match="a view that can't follow"):
        told(same, ANNA, commit(same.view))


def test_the_circle_itself_sees_what_it_is_there_to_see() -> None:
    """A test that can't fail is a defect."""
    circle = Circle(ANNA, BERT)
    state = circle.states[ANNA]
    with pytest.raises(AssertionError, match="V1"):
        circle.take(ANNA, Step(replace(state, promised=make_epoch(0))))
    with pytest.raises(AssertionError, match="I2: only upwards"):
        circle.take(ANNA, Step(state, (Install(state.view),)))
    with pytest.raises(AssertionError, match="I2: only where"):
        circle.take(ANNA, Step(state, (Install(make_view(9, BERT)),)))
    promised = replace(state, promised=make_epoch(9))
    circle.states[ANNA] = promised
    with pytest.raises(AssertionError, match="V1: nothing below"):
        circle.take(ANNA, Step(promised, (Install(make_view(8, ANNA)),)))
    circle = Circle(ANNA, BERT)
    with pytest.raises(AssertionError, match="V2"):
        circle.take(ANNA, Step(state, (Install(make_view(8, ANNA, previous=make_epoch(7))),)))
    circle.views[make_epoch(8)] = make_view(8, ANNA)
    with pytest.raises(AssertionError, match="I1"):
        circle.take(ANNA, Step(state, (Install(make_view(8, ANNA, BERT)),)))
