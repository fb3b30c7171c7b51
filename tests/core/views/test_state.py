from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pmesh.core.topology.graph import UNKNOWN
from pmesh.core.views.state import (
    FLUSH_DEADLINE_S,
    JOIN_REQUEST_S,
    PATIENCE_S,
    Facts,
    MemberState,
    Peer,
    continuing_members,
    follows,
    hear_each_other,
    hears_me,
    heartbeat_of,
    is_vouched_for,
    needs_epoch,
)
from pmesh.core.wire.views import MeasuredEdge, RankProgress
from pmesh.ids import Incarnation, Member, TrainerId
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    all_hearing_each_other,
    make_epoch,
    make_heartbeat,
    make_member,
    make_peer,
    make_roster,
    make_state,
    make_verdict,
    make_view,
    make_view_request,
    make_waiting,
)

NOW = 100.0
TRIO = make_view(5, ANNA, BERT, CARA)


class TestHearsMe:
    """V5: healthy means that it hears me and says so."""

    def test_a_peer_that_says_so(self) -> None:
        bert = make_peer(BERT, TRIO, make_heartbeat(TRIO, ANNA))
        assert hears_me(make_state(ANNA, TRIO, bert), BERT)

    def test_not_a_peer_that_hears_only_others(self) -> None:
        bert = make_peer(BERT, TRIO, make_heartbeat(TRIO, CARA))
        assert not hears_me(make_state(ANNA, TRIO, bert), BERT)

    def test_not_a_peer_that_is_not_heard(self) -> None:
        assert not hears_me(make_state(ANNA, TRIO), BERT)

    def test_not_a_peer_that_heard_me_before_i_restarted(self) -> None:
        again = make_member("a", incarnation=99)
        bert = make_peer(BERT, TRIO, make_heartbeat(TRIO, ANNA))
        assert not hears_me(make_state(again, make_view(1, again), bert), BERT)

    def test_not_the_former_process_of_a_peer_that_has_restarted(self) -> None:
        again = make_member("b", incarnation=99)
        state = make_state(ANNA, TRIO, make_peer(again, TRIO, make_heartbeat(TRIO, ANNA)))
        assert hears_me(state, again)
        assert not hears_me(state, BERT)


class TestHearEachOther:
    """V5: both must say so, as far as their heartbeats tell."""

    def state(self, *, bert_hears_cara: bool, cara_hears_bert: bool) -> MemberState:
        bert = make_heartbeat(TRIO, ANNA, *[CARA] * bert_hears_cara)
        cara = make_heartbeat(TRIO, ANNA, *[BERT] * cara_hears_bert)
        return make_state(ANNA, TRIO, make_peer(BERT, TRIO, bert), make_peer(CARA, TRIO, cara))

    @pytest.mark.parametrize("bert_hears_cara", [False, True])
    @pytest.mark.parametrize("cara_hears_bert", [False, True])
    def test_two_peers_do_if_both_say_so(
        self, *, bert_hears_cara: bool, cara_hears_bert: bool
    ) -> None:
        state = self.state(bert_hears_cara=bert_hears_cara, cara_hears_bert=cara_hears_bert)
        assert hear_each_other(state, BERT, CARA) == (bert_hears_cara and cara_hears_bert)
        assert hear_each_other(state, CARA, BERT) == hear_each_other(state, BERT, CARA)

    def test_whom_i_hear_myself_needs_no_heartbeat_of_mine(self) -> None:
        state = self.state(bert_hears_cara=False, cara_hears_bert=False)
        assert hear_each_other(state, ANNA, BERT)
        assert hear_each_other(state, BERT, ANNA)

    def test_a_peer_that_i_do_not_hear_is_not_heard(self) -> None:
        assert not hear_each_other(all_hearing_each_other(ANNA, TRIO, BERT), BERT, CARA)
        assert not hear_each_other(all_hearing_each_other(ANNA, TRIO, BERT), ANNA, CARA)


class TestIsVouchedFor:
    """V12: a peer that another member hears is alive."""

    def state(self, *heard: Member, silent: tuple[Incarnation, ...] = ()) -> MemberState:
        """Bert hears these and so many of them are silent; Cara hears only Anna."""
        bert = msgspec.structs.replace(make_heartbeat(TRIO, ANNA, *heard), silent=silent)
        cara = make_peer(CARA, TRIO, make_heartbeat(TRIO, ANNA))
        return make_state(ANNA, TRIO, make_peer(BERT, TRIO, bert), cara)

    def test_by_a_member_that_hears_it(self) -> None:
        assert is_vouched_for(self.state(CARA), CARA.node, [CARA.node])

    def test_not_by_a_member_that_does_not_hear_it(self) -> None:
        assert not is_vouched_for(self.state(), CARA.node, [CARA.node])

    def test_not_by_a_member_to_which_it_is_silent_too(self) -> None:
        state = self.state(CARA, silent=(CARA.incarnation,))
        assert not is_vouched_for(state, CARA.node, [CARA.node])

    def test_not_by_a_member_that_is_silent_itself(self) -> None:
        assert not is_vouched_for(self.state(CARA), CARA.node, [BERT.node, CARA.node])

    def test_not_by_itself_nor_if_nothing_is_known_of_it(self) -> None:
        assert not is_vouched_for(self.state(CARA), BERT.node, [])
        assert not is_vouched_for(self.state(CARA), make_member("d").node, [])


class TestFollows:
    """V2: who is still of our line of views."""

    BEFORE = make_view(4, BERT, CARA)  # without me: only the epoch tells that it was ours
    VIEW = make_view(5, ANNA, BERT, previous=BEFORE.epoch)
    ELSEWHERE = make_view(7, BERT, DORA)

    def test_a_member_that_installed_the_same_view(self) -> None:
        assert follows(all_hearing_each_other(ANNA, self.VIEW, BERT), BERT, NOW)

    def test_a_member_that_is_still_in_the_view_before(self) -> None:
        bert = make_peer(BERT, self.BEFORE, make_heartbeat(self.BEFORE, promised=make_epoch(8)))
        assert follows(make_state(ANNA, self.VIEW, bert), BERT, NOW)

    def test_a_member_that_is_ahead_in_a_view_that_has_me(self) -> None:
        ahead = make_view(7, BERT, ANNA)
        bert = make_peer(BERT, ahead, make_heartbeat(ahead, ANNA))
        assert follows(make_state(ANNA, self.VIEW, bert), BERT, NOW)

    def test_not_a_member_that_went_on_without_me(self) -> None:
        bert = make_peer(BERT, self.ELSEWHERE, make_heartbeat(self.ELSEWHERE, ANNA))
        assert not follows(make_state(ANNA, self.VIEW, bert), BERT, NOW)

    def test_evidence_older_than_the_install_does_not_expel(self) -> None:
        """V5: just after an install a member's heartbeat may still be of before."""
        old = make_heartbeat(self.ELSEWHERE, ANNA, promised=make_epoch(5))
        bert = make_peer(BERT, self.ELSEWHERE, old)
        state = replace(make_state(ANNA, self.VIEW, bert), installed_at=NOW)
        assert follows(state, BERT, NOW + PATIENCE_S / 2)
        assert not follows(state, BERT, NOW + PATIENCE_S + 0.01)

    def test_evidence_newer_than_the_install_does(self) -> None:
        new = make_heartbeat(self.ELSEWHERE, ANNA, promised=make_epoch(6))
        state = make_state(ANNA, self.VIEW, make_peer(BERT, self.ELSEWHERE, new))
        assert not follows(replace(state, installed_at=NOW), BERT, NOW)


class TestContinuingMembers:
    def test_are_the_members_of_my_view_by_seniority(self) -> None:
        view = make_view(5, CARA, BERT, ANNA)
        assert continuing_members(all_hearing_each_other(ANNA, view, BERT, CARA), NOW) == (
            CARA,
            BERT,
            ANNA,
        )

    def test_always_include_me(self) -> None:
        assert continuing_members(make_state(ANNA, TRIO), NOW) == (ANNA,)

    def test_leave_out_who_is_not_heard(self) -> None:
        assert continuing_members(all_hearing_each_other(ANNA, TRIO, CARA), NOW) == (ANNA, CARA)

    def test_leave_out_who_is_heard_but_has_gone_another_way(self) -> None:
        elsewhere = make_view(7, BERT, DORA)
        bert = make_peer(BERT, elsewhere, make_heartbeat(elsewhere, ANNA))
        assert continuing_members(make_state(ANNA, TRIO, bert), NOW) == (ANNA,)

    def test_leave_out_strangers(self) -> None:
        dora = make_peer(DORA, make_view(1, DORA), make_heartbeat(make_view(1, DORA), ANNA))
        assert continuing_members(make_state(ANNA, TRIO, dora), NOW) == (ANNA,)


class TestPromise:
    EPOCH = make_epoch(6, BERT)

    def promised(self, *peers: Peer, **changes: Any) -> MemberState:  # noqa: ANN401 - any field
        state = make_state(ANNA, TRIO, *peers)
        return replace(state, promised=self.EPOCH, flushed_at=NOW, **changes)

    def test_is_waited_for_until_patience_ends(self) -> None:
        assert not needs_epoch(self.promised(), NOW + PATIENCE_S)
        assert needs_epoch(self.promised(), NOW + PATIENCE_S + 0.01)

    @pytest.mark.parametrize(("timeout_s", "failures"), [(0.0, 99), (60.0, 0), (60.0, 99)])
    def test_is_never_waited_for_longer_than_half_a_minute(
        self, timeout_s: float, failures: int
    ) -> None:
        """Neither failures nor a peer that pretends to be slow prolong it further."""
        state = self.promised(timeout_s=timeout_s, failures=failures)
        assert not needs_epoch(state, NOW + 32.0)
        assert needs_epoch(state, NOW + 32.01)

    def test_to_a_leader_that_gathers_answers_is_waited_for(self) -> None:
        beat = make_heartbeat(TRIO, ANNA, promised=self.EPOCH)
        assert not needs_epoch(self.promised(make_peer(BERT, TRIO, beat)), NOW)

    def test_is_not_waited_for_once_its_leader_has_dropped_the_proposal(self) -> None:
        beat = make_heartbeat(TRIO, ANNA, promised=self.EPOCH, needs_epoch=True)
        assert needs_epoch(self.promised(make_peer(BERT, TRIO, beat)), NOW)

    def test_is_not_waited_for_once_its_leader_has_promised_more(self) -> None:
        beat = make_heartbeat(TRIO, ANNA, promised=make_epoch(7, CARA))
        assert needs_epoch(self.promised(make_peer(BERT, TRIO, beat)), NOW)

    def test_of_my_own_is_over_as_soon_as_i_have_no_proposal(self) -> None:
        """Nobody else can commit it."""
        mine = replace(self.promised(), promised=make_epoch(6, ANNA))
        assert needs_epoch(mine, NOW)


def test_who_has_promised_nothing_never_asks() -> None:
    assert not needs_epoch(make_state(ANNA, TRIO), NOW + 1000)


def test_a_leader_gives_up_on_answers_before_its_members_lose_patience() -> None:
    assert FLUSH_DEADLINE_S < PATIENCE_S
    assert JOIN_REQUEST_S < PATIENCE_S


class TestHeartbeat:
    def test_of_the_most_senior_says_that_it_acts(self) -> None:
        everyone = (ANNA, BERT, CARA)
        acting = {
            me: heartbeat_of(
                all_hearing_each_other(me, TRIO, *(m for m in everyone if m != me)), Facts(), NOW
            ).acting
            for me in everyone
        }
        assert acting == {ANNA: True, BERT: False, CARA: False}

    def test_of_the_next_in_line_says_so_when_the_senior_is_lost(self) -> None:
        state = all_hearing_each_other(BERT, TRIO, CARA)
        assert heartbeat_of(state, Facts(), NOW).acting

    def test_names_view_and_promise(self) -> None:
        epoch = make_epoch(8, BERT)
        state = replace(make_state(ANNA, TRIO), promised=epoch, flushed_at=NOW - 1)
        beat = heartbeat_of(state, Facts(), NOW)
        assert (beat.view, beat.promised) == (make_epoch(5), epoch)
        assert (beat.flushed, beat.needs_epoch) == (True, False)
        assert heartbeat_of(state, Facts(), NOW + PATIENCE_S).needs_epoch

    def test_in_peace_says_that_no_promise_is_open(self) -> None:
        beat = heartbeat_of(make_state(ANNA, TRIO), Facts(), NOW)
        assert (beat.flushed, beat.needs_epoch, beat.view) == (False, False, beat.promised)

    def test_tells_whom_i_hear_with_what_is_measured_of_the_way_there(self) -> None:
        state = all_hearing_each_other(ANNA, TRIO, BERT, CARA)
        edge = MeasuredEdge(730, 940)
        facts = Facts(edges={BERT.incarnation: edge, DORA.incarnation: MeasuredEdge(99)})
        beat = heartbeat_of(state, facts, NOW)
        assert beat.heard == {BERT.incarnation: edge, CARA.incarnation: UNKNOWN}

    def test_carries_what_the_agent_wants_and_how_far_its_ranks_are(self) -> None:
        roster = make_roster(ANNA)
        facts = Facts(
            waiting=(make_waiting(2),),
            view_requests=(make_view_request(roster, make_verdict()),),
            progress=(RankProgress(DIGITS, 5, TrainerId(0), started=4, completed=3),),
        )
        beat = heartbeat_of(make_state(ANNA, TRIO), facts, NOW)
        assert (beat.waiting, beat.view_requests, beat.progress) == (
            facts.waiting,
            facts.view_requests,
            facts.progress,
        )
