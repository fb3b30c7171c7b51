"""The leader's half: whom it keeps, when it proposes, and what it commits."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.topology.graph import edge_cost
from pmesh.core.values import Seat, Terms, View
from pmesh.core.views.leader import begin, collect, decide, known_view_requests, propose, ring_order
from pmesh.core.views.state import (
    PATIENCE_S,
    Facts,
    MemberState,
    PendingJoin,
    Skip,
)
from pmesh.core.wire.views import Commit, Flushed, MeasuredEdge
from pmesh.ids import Incarnation, Member, node_text
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    all_hearing_each_other,
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
    make_view_request,
    make_waiting,
    running,
    said_by,
    unsigned,
)

NOW = 100.0
FACTS = Facts()
TRIO = make_view(5, ANNA, BERT, CARA)
IN_PEACE = all_hearing_each_other(ANNA, TRIO, BERT, CARA)
OTHERS = st.sampled_from([BERT, CARA, DORA])
WITHOUT_CARA = all_hearing_each_other(ANNA, TRIO, BERT)


class TestAProposalIsMade:
    def test_without_a_member_that_is_lost(self) -> None:
        message = propose(WITHOUT_CARA, FACTS, NOW)
        assert message == make_proposal(ANNA, 6, TRIO, ANNA, BERT)

    def test_naming_also_the_jobs_that_lack_a_quorum_and_not_for_them_alone(self) -> None:
        """V10: any view change might help them; to try for ever would help nobody."""
        waiting = make_roster(ANNA, terms=Terms(quorum="majority"), quorate=False)
        view = make_view(5, ANNA, BERT, CARA, rosters=[waiting])
        message = propose(all_hearing_each_other(ANNA, view, BERT), FACTS, NOW)
        assert message is not None
        assert message.jobs == (DIGITS,)
        assert propose(all_hearing_each_other(ANNA, view, BERT, CARA), FACTS, NOW) is None

    def test_naming_the_jobs_that_lose_a_rank(self) -> None:
        here, gone = make_roster(ANNA, BERT), make_roster(CARA, job=DIGITS)
        for roster, jobs in ((here, ()), (gone, (DIGITS,))):
            view = make_view(5, ANNA, BERT, CARA, rosters=[roster])
            message = propose(all_hearing_each_other(ANNA, view, BERT), FACTS, NOW)
            assert message is not None
            assert message.jobs == jobs

    def test_with_a_counter_above_all_that_were_seen(self) -> None:
        """V1: a fresh one for each attempt."""
        message = propose(replace(WITHOUT_CARA, highest_counter=41), FACTS, NOW)
        assert message is not None
        assert message.epoch == make_epoch(42, ANNA)

    def test_by_the_next_in_line_when_the_senior_is_lost(self) -> None:
        message = propose(all_hearing_each_other(BERT, TRIO, CARA), FACTS, NOW)
        assert message == make_proposal(BERT, 6, TRIO, BERT, CARA)

    def test_by_one_that_hears_nobody_any_more(self) -> None:
        assert propose(make_state(CARA, TRIO), FACTS, NOW) == make_proposal(CARA, 6, TRIO, CARA)

    @pytest.mark.parametrize("whose", [ANNA, BERT])
    def test_when_anyone_wants_an_op_settled(self, whose: Member) -> None:
        roster = make_roster(ANNA, BERT)
        view_request = make_view_request(roster, make_verdict(), op=3)
        view = make_view(5, ANNA, BERT, rosters=[roster])
        mine, theirs = ((view_request,), ()) if whose == ANNA else ((), (view_request,))
        bert = make_peer(BERT, view, make_heartbeat(view, ANNA, view_requests=theirs))
        message = propose(make_state(ANNA, view, bert), Facts(view_requests=mine), NOW)
        assert message == make_proposal(ANNA, 6, view, ANNA, BERT, jobs=[DIGITS])

    def test_when_a_job_can_begin(self) -> None:
        bert = make_peer(BERT, TRIO, make_heartbeat(TRIO, ANNA, waiting=[make_waiting(2)]))
        view = make_view(5, ANNA, BERT)
        state = make_state(ANNA, view, replace(bert, view=view))
        message = propose(state, Facts(waiting=(make_waiting(2),)), NOW)
        assert message == make_proposal(ANNA, 6, view, ANNA, BERT, jobs=[DIGITS])

    def test_again_when_a_member_was_left_flushed(self) -> None:
        """V6: it asks for a new epoch, with the same members."""
        view = make_view(5, ANNA, BERT)
        bert = make_peer(BERT, view, make_heartbeat(view, ANNA, needs_epoch=True))
        assert propose(make_state(ANNA, view, bert), FACTS, NOW) == make_proposal(
            ANNA, 6, view, ANNA, BERT
        )

    def test_again_when_a_member_missed_the_last_install_for_too_long(self) -> None:
        view = make_view(5, ANNA, BERT, previous=make_epoch(4))
        before = make_view(4, ANNA, BERT)
        bert = make_peer(BERT, before, make_heartbeat(before, ANNA))
        state = replace(make_state(ANNA, view, bert), installed_at=NOW)
        assert propose(state, FACTS, NOW + PATIENCE_S) is None
        assert propose(state, FACTS, NOW + PATIENCE_S + 0.1) is not None

    def test_again_when_an_own_attempt_came_to_nothing(self) -> None:
        state = replace(IN_PEACE, promised=make_epoch(6, ANNA), flushed_at=NOW, highest_counter=6)
        assert propose(state, FACTS, NOW) == make_proposal(ANNA, 7, TRIO, ANNA, BERT, CARA)

    def test_when_the_leader_that_was_promised_has_restarted(self) -> None:
        again = make_member("d", incarnation=99)
        peer = make_peer(again, make_view(1, again), make_heartbeat(make_view(1, again), ANNA))
        state = make_state(ANNA, make_view(5, ANNA), peer)
        state = replace(state, promised=make_epoch(7, DORA), flushed_at=NOW)
        assert propose(state, FACTS, NOW) is not None


class TestNoProposalIsMade:
    def test_in_peace(self) -> None:
        assert propose(IN_PEACE, FACTS, NOW) is None

    def test_by_one_who_hears_a_more_senior_member(self) -> None:
        assert propose(all_hearing_each_other(BERT, TRIO, ANNA), FACTS, NOW) is None

    def test_while_one_is_out(self) -> None:
        message = make_proposal(ANNA, 6, TRIO, ANNA, BERT)
        state = begin(WITHOUT_CARA, message, make_flushed(ANNA, TRIO), NOW)
        assert propose(state, FACTS, NOW) is None

    def test_in_the_quiet_time_after_a_refusal(self) -> None:
        state = replace(WITHOUT_CARA, quiet_until=NOW + 0.2)
        assert propose(state, FACTS, NOW + 0.1) is None
        assert propose(state, FACTS, NOW + 0.2) is not None

    def test_while_another_leader_that_was_promised_is_heard(self) -> None:
        dora = make_peer(DORA, make_view(6, DORA), make_heartbeat(make_view(6, DORA), ANNA))
        state = make_state(ANNA, make_view(5, ANNA), dora)
        state = replace(state, promised=make_epoch(7, DORA), flushed_at=NOW)
        assert propose(state, FACTS, NOW + PATIENCE_S) is None
        assert propose(state, FACTS, NOW + PATIENCE_S + 0.1) is not None
        assert propose(replace(state, peers={}), FACTS, NOW) is not None

    def test_while_the_leader_that_was_promised_has_not_yet_said_that_it_hears_us(self) -> None:
        """Its proposal overtakes the heartbeat: two that meet must not tear each other apart."""
        dora = make_peer(DORA, make_view(6, DORA), make_heartbeat(make_view(6, DORA)))
        bert = make_peer(BERT, make_view(4, BERT), make_heartbeat(make_view(4, BERT), ANNA))
        state = make_state(ANNA, make_view(5, ANNA), dora, bert)
        state = replace(
            state,
            promised=make_epoch(7, DORA),
            flushed_at=NOW,
            joining={BERT: PendingJoin(NOW, whole=True)},
        )
        assert propose(state, FACTS, NOW) is None


class TestTheCliqueIsKept:
    """V5: greedily, the most senior first."""

    def test_of_two_that_do_not_hear_each_other_the_senior_stays(self) -> None:
        bert = make_peer(BERT, TRIO, make_heartbeat(TRIO, ANNA))
        cara = make_peer(CARA, TRIO, make_heartbeat(TRIO, ANNA, BERT))
        message = propose(make_state(ANNA, TRIO, bert, cara), FACTS, NOW)
        assert message is not None
        assert message.members == message.continuing == (ANNA, BERT)

    def test_who_did_not_answer_is_left_out_for_a_while(self) -> None:
        state = replace(IN_PEACE, skipped={BERT: Skip(NOW + 1, 1)})
        message = propose(state, FACTS, NOW)
        assert message is not None
        assert message.members == (ANNA, CARA)
        assert propose(state, FACTS, NOW + 1) is None

    @given(st.sets(st.tuples(OTHERS, OTHERS).filter(lambda pair: pair[0] != pair[1])))
    def test_greedily_whoever_does_not_hear_whom(self, deaf: set[tuple[Member, Member]]) -> None:
        everyone = (ANNA, BERT, CARA, DORA)
        view = make_view(5, *everyone)
        beats = {
            a: make_heartbeat(view, *(b for b in everyone if b != a and (a, b) not in deaf))
            for a in everyone[1:]
        }
        state = make_state(ANNA, view, *(make_peer(m, view, b) for m, b in beats.items()))
        kept = [ANNA]
        for member in everyone[1:]:
            if not any((a, b) in deaf for k in kept for a, b in ((k, member), (member, k))):
                kept.append(member)
        message = propose(state, FACTS, NOW)
        assert (message.members if message else everyone) == tuple(kept)


class TestCollect:
    MESSAGE = make_proposal(ANNA, 9, TRIO, ANNA, BERT)
    BEGUN = begin(
        replace(WITHOUT_CARA, promised=MESSAGE.epoch), MESSAGE, make_flushed(ANNA, TRIO), NOW
    )
    ANSWER = make_flushed(BERT, TRIO)

    def test_a_proposal_begins_with_the_leaders_own_answer(self) -> None:
        proposal = self.BEGUN.proposal
        assert proposal is not None
        assert proposal.answers == {ANNA: make_flushed(ANNA, TRIO)}
        assert proposal.made_at == NOW

    def test_an_answer_is_noted(self) -> None:
        proposal = collect(self.BEGUN, BERT, self.ANSWER).proposal
        assert proposal is not None
        assert proposal.answers[BERT] == self.ANSWER

    def test_an_answer_to_no_proposal_changes_nothing(self) -> None:
        assert collect(WITHOUT_CARA, BERT, self.ANSWER) is WITHOUT_CARA

    def test_an_answer_to_an_earlier_proposal_changes_nothing(self) -> None:
        late = make_flushed(BERT, TRIO, epoch=make_epoch(8))
        assert collect(self.BEGUN, BERT, late) is self.BEGUN

    def test_an_answer_of_one_who_was_not_asked_changes_nothing(self) -> None:
        assert collect(self.BEGUN, CARA, self.ANSWER) is self.BEGUN

    def test_an_answer_after_a_promise_to_another_changes_nothing(self) -> None:
        """V1: our own epoch can't be committed any more."""
        promised = replace(self.BEGUN, promised=make_epoch(10, BERT))
        assert collect(promised, BERT, self.ANSWER) is promised


def commit_of(
    state: MemberState, answers: Mapping[Member, Flushed], facts: Facts = FACTS, counter: int = 9
) -> Commit | None:
    """What the leader commits once these have answered its proposal to them."""
    message = make_proposal(state.me, counter, state.view, *answers)
    state = begin(replace(state, promised=message.epoch), message, answers[state.me], NOW)
    for member, answer in answers.items():
        state = collect(state, member, answer)
    return decide(state, facts)


def committed(state: MemberState, answers: Mapping[Member, Flushed], facts: Facts = FACTS) -> View:
    commit = commit_of(state, answers, facts)
    assert commit is not None
    return commit.view


class TestTheCommit:
    def test_machines_of_one_name_keep_it_and_get_the_start_of_their_ids_where_shown(self) -> None:
        answers = {
            member: msgspec.structs.replace(
                make_flushed(member, TRIO, waiting=(make_waiting(wait_for=3),)),
                said=unsigned("studio" if member == CARA else "mac"),
            )
            for member in (ANNA, BERT, CARA)
        }
        view = committed(IN_PEACE, answers)
        (roster,) = view.rosters
        apart = {
            ANNA.node: f"mac ({node_text(ANNA.node)[:4]})",
            BERT.node: f"mac ({node_text(BERT.node)[:4]})",
            CARA.node: "studio",
        }
        assert {seat.member: seat.said for seat in view.seats} == {
            member: answer.said for member, answer in answers.items()
        }
        assert roster.names == apart

    def test_waits_for_every_answer(self) -> None:
        message = make_proposal(ANNA, 9, TRIO, ANNA, BERT)
        state = begin(
            replace(WITHOUT_CARA, promised=message.epoch), message, make_flushed(ANNA, TRIO), NOW
        )
        assert decide(state, FACTS) is None
        assert decide(collect(state, BERT, make_flushed(BERT, TRIO)), FACTS) is not None

    def test_is_none_without_a_proposal(self) -> None:
        assert decide(IN_PEACE, FACTS) is None

    def test_keeps_the_seniority_of_who_continues_and_records_where_it_was(self) -> None:
        """V2: the previous epoch of each."""
        view = committed(IN_PEACE, {m: make_flushed(m, TRIO) for m in (ANNA, BERT, CARA)})
        assert view == View(
            make_epoch(9),
            tuple(
                Seat(member, said_by(member), make_epoch(i + 1), TRIO.epoch)
                for i, member in enumerate((ANNA, BERT, CARA))
            ),
        )

    def test_takes_a_name_as_its_machine_says_it_now(self) -> None:
        renamed = make_flushed(BERT, TRIO)
        answers = {
            ANNA: make_flushed(ANNA, TRIO),
            BERT: Flushed(renamed.epoch, unsigned("new"), TRIO, ()),
        }
        seat = committed(WITHOUT_CARA, answers).seat_of(BERT)
        assert seat is not None
        assert seat.name == "new"

    def test_admits_a_newcomer_with_its_own_epoch(self) -> None:
        dora = make_flushed(DORA, make_view(3, DORA))
        view = committed(WITHOUT_CARA, {ANNA: make_flushed(ANNA, TRIO), DORA: dora})
        assert view.seat_of(DORA) == Seat(DORA, said_by(DORA), make_epoch(9), None)
        assert view.by_seniority == (ANNA, DORA)

    def test_takes_for_a_newcomer_who_has_gone_another_way(self) -> None:
        """V2: a seat in the base is not enough: it must follow it."""
        elsewhere = make_flushed(BERT, make_view(7, BERT, DORA))
        view = committed(WITHOUT_CARA, {ANNA: make_flushed(ANNA, TRIO), BERT: elsewhere})
        assert view.seat_of(BERT) == Seat(BERT, said_by(BERT), make_epoch(9), None)

    def test_lets_continue_who_missed_the_base_but_was_in_the_view_before(self) -> None:
        base = make_view(5, ANNA, BERT, previous=make_epoch(4))
        before = make_view(4, ANNA, BERT)
        state = all_hearing_each_other(ANNA, base, BERT)
        answers = {ANNA: make_flushed(ANNA, base), BERT: make_flushed(BERT, before)}
        seat = committed(state, answers).seat_of(BERT)
        assert seat == Seat(BERT, said_by(BERT), make_epoch(2), before.epoch)

    def test_goes_on_from_the_highest_view_that_has_the_leader(self) -> None:
        """V2: the leader itself may have missed the last commit."""
        ahead = make_view(7, BERT, ANNA, previous=TRIO.epoch)
        answers = {ANNA: make_flushed(ANNA, TRIO), BERT: make_flushed(BERT, ahead)}
        view = committed(replace(WITHOUT_CARA, promises=(ahead.epoch,)), answers)
        assert view.by_seniority == (BERT, ANNA)
        assert view.previous_epoch_of(BERT) == ahead.epoch
        assert view.previous_epoch_of(ANNA) == TRIO.epoch

    @pytest.mark.parametrize(
        "ahead",
        [
            pytest.param(make_view(7, BERT, DORA), id="it has no seat for the leader"),
            pytest.param(make_view(7, BERT, ANNA, previous=make_epoch(2)), id="of another line"),
        ],
    )
    def test_does_not_go_on_from_a_higher_view_of_others(self, ahead: View) -> None:
        answers = {ANNA: make_flushed(ANNA, TRIO), BERT: make_flushed(BERT, ahead)}
        view = committed(replace(WITHOUT_CARA, promises=(ahead.epoch,)), answers)
        assert view.previous_epoch_of(BERT) is None

    @pytest.mark.parametrize("leader", [ANNA, BERT])
    def test_does_not_go_on_from_an_invented_view(self, leader: Member) -> None:
        """V2: nobody could have committed it without a promise of the leader's, or for the leader.

        Here that has promised one of its own, which came to nothing.
        """
        invented = make_view(7, BERT, ANNA, leader=leader, previous=TRIO.epoch)
        answers = {ANNA: make_flushed(ANNA, TRIO), BERT: make_flushed(BERT, invented)}
        view = committed(replace(WITHOUT_CARA, promises=(make_epoch(7, ANNA),)), answers)
        assert view.previous_epoch_of(BERT) is None

    def test_puts_the_ring_through_the_fast_edges(self) -> None:
        """A to B is slow: C and D sit between them."""
        everyone = (ANNA, BERT, CARA, DORA)
        view = make_view(5, *everyone)

        slow, fast = MeasuredEdge(500, 94), MeasuredEdge(500, 940)

        def measured(me: Member) -> dict[Incarnation, MeasuredEdge]:
            apart = {frozenset((ANNA, BERT)), frozenset((CARA, DORA))}
            others = [m for m in everyone if m != me]
            return {m.incarnation: slow if {me, m} in apart else fast for m in others}

        peers = [
            make_peer(
                m,
                view,
                msgspec.structs.replace(make_heartbeat(view), heard=measured(m)),
            )
            for m in everyone[1:]
        ]
        commit = commit_of(
            make_state(ANNA, view, *peers),
            {m: make_flushed(m, view) for m in everyone},
            Facts(edges=measured(ANNA)),
        )
        assert commit is not None
        assert commit.view.members == (ANNA, CARA, BERT, DORA)
        assert commit.costs[0] == (0, *map(edge_cost, (slow, fast, fast)))
        assert ring_order(commit.view.members, commit.costs) == commit.view.members

    def test_settles_the_jobs_with_what_everyone_wants(self) -> None:
        roster = make_roster(ANNA, BERT)
        view = make_view(5, ANNA, BERT, rosters=[roster])
        state = all_hearing_each_other(ANNA, view, BERT)
        answers = {
            m: make_flushed(m, view, jobs=[make_report(roster, {rank: [running(0)]})])
            for rank, m in enumerate((ANNA, BERT))
        }
        facts = Facts(view_requests=(make_view_request(roster, make_verdict(), op=0),))
        (after,) = committed(state, answers, facts).rosters
        assert after.number == 9
        assert [outcome.verdict for outcome in after.outcomes] == [make_verdict()]

    def test_says_why_a_rank_was_lost(self) -> None:
        roster = make_roster(ANNA, BERT)
        view = make_view(5, ANNA, BERT, rosters=[roster])
        state = replace(make_state(ANNA, view), losses={BERT: "silent for 2.0 s"})
        (after,) = committed(state, {ANNA: make_flushed(ANNA, view)}).rosters
        assert after.losses[0].message == "rank 1 (mac-b) is lost: silent for 2.0 s"


def test_concerns_come_in_one_order_whoever_was_heard_first() -> None:
    roster = make_roster(ANNA, BERT, CARA)
    mine, berts, caras = (make_view_request(roster, make_verdict(), op=i) for i in range(3))
    bert = make_peer(BERT, TRIO, make_heartbeat(TRIO, view_requests=[berts]))
    cara = make_peer(CARA, TRIO, make_heartbeat(TRIO, view_requests=[caras]))
    facts = Facts(view_requests=(mine,))
    for peers in ((bert, cara), (cara, bert)):
        assert known_view_requests(make_state(ANNA, TRIO, *peers), facts) == (mine, berts, caras)
