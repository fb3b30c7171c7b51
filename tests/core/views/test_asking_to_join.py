"""When a member of a lighter view asks to be taken in, and with whom: V9 of the design."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from pmesh.core.views.agreement import lose, pass_time
from pmesh.core.views.state import JOIN_REQUEST_S, PATIENCE_S, Facts, JoinRequest, MemberState, Step
from pmesh.core.wire.link import AskToJoin, Heartbeat, Propose, TellView
from pmesh.ids import Member
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DORA,
    make_epoch,
    make_heartbeat,
    make_member,
    make_peer,
    make_state,
    make_view,
)
from tests.worlds.one_member import BERTS, NOW, TRIO, sent, told


class TestAskingToJoin:
    BIG = make_view(5, ANNA, BERT)
    BEAT = make_heartbeat(BIG, DORA, acting=True)
    SECOND = make_peer(BERT, BIG, make_heartbeat(BIG, DORA))
    ALONE = make_state(DORA, make_view(9, DORA), SECOND)

    def meet(self, beat: Heartbeat, state: MemberState = ALONE) -> Step:
        state = told(state, ANNA, TellView(self.BIG)).state
        return told(state, ANNA, beat)

    def test_is_asked_of_the_leader_of_a_heavier_view(self) -> None:
        step = self.meet(self.BEAT)
        assert sent(step) == [(ANNA, AskToJoin(self.ALONE.view.epoch, whole=True))]
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
        cara, emma, finn = (
            make_peer(m, bigger, make_heartbeat(bigger, DORA, acting=m == CARA))
            for m in bigger.members
        )
        anna = make_peer(ANNA, self.BIG, self.BEAT)
        state = make_state(DORA, make_view(9, DORA), anna, self.SECOND, cara, emma, finn)
        assert [to for to, _ in sent(pass_time(state, Facts(), now=NOW))] == [CARA]

    def test_waits_while_a_proposal_of_ours_is_out(self) -> None:
        anna = make_peer(ANNA, self.BIG, self.BEAT)
        cara = make_peer(CARA, make_view(1, CARA), make_heartbeat(make_view(1, CARA), DORA))
        state = make_state(DORA, make_view(9, DORA), anna, self.SECOND, cara)
        state = replace(state, joining={CARA: JoinRequest(NOW, whole=False)})
        ((to, message),) = sent(pass_time(state, Facts(), now=NOW))
        assert to == CARA
        assert isinstance(message, Propose)

    @pytest.mark.parametrize("whole", [False, True])
    def test_is_noted_by_who_is_asked(self, *, whole: bool) -> None:
        step = told(BERTS, DORA, AskToJoin(make_epoch(1, DORA), whole))
        assert step.state.joining == {DORA: JoinRequest(NOW, whole)}


class TestComingWhole:
    """V9: together with all who go on with us, or the job that runs among us is torn."""

    EMMA = make_member("e")
    TWINS = make_view(4, DORA, EMMA)
    ALL = frozenset({ANNA, BERT, CARA})

    def doras(
        self, *, emma_hears: Iterable[Member] = ALL, cara_hears: Iterable[Member] = (DORA, EMMA)
    ) -> MemberState:
        """Dora, who is in a view with Emma and has met the trio that Anna leads."""
        pair = (DORA, self.EMMA)
        return make_state(
            DORA,
            self.TWINS,
            make_peer(ANNA, TRIO, make_heartbeat(TRIO, *pair, acting=True)),
            make_peer(BERT, TRIO, make_heartbeat(TRIO, *pair)),
            make_peer(CARA, TRIO, make_heartbeat(TRIO, *cara_hears)),
            make_peer(self.EMMA, self.TWINS, make_heartbeat(self.TWINS, DORA, *emma_hears)),
        )

    @staticmethod
    def asks(state: MemberState, now: float = NOW) -> bool | None:
        """Whether whole; None if she does not ask."""
        messages = [message for _, message in sent(pass_time(state, Facts(), now=now))]
        return messages[0].whole if messages and isinstance(messages[0], AskToJoin) else None

    def test_is_asked_for_at_once_if_all_hear_each_other(self) -> None:
        assert self.asks(self.doras()) is True

    def test_waits_until_the_others_of_our_view_hear_them(self) -> None:
        assert self.asks(self.doras(emma_hears=(ANNA, BERT))) is None

    def test_waits_until_they_hear_the_others_of_our_view(self) -> None:
        assert self.asks(self.doras(cara_hears=(DORA,))) is None

    def test_waits_for_a_member_of_theirs_whom_nobody_here_has_met(self) -> None:
        state = self.doras()
        met = {node: peer for node, peer in state.peers.items() if node != CARA.node}
        assert self.asks(replace(state, peers=met)) is None

    def test_does_not_wait_for_one_who_does_not_go_on_with_us(self) -> None:
        state = self.doras()
        alone = {node: peer for node, peer in state.peers.items() if node != self.EMMA.node}
        # That Emma is gone is a view change of Dora's own, first; here it can't be made yet.
        state = replace(state, peers=alone, quiet_until=NOW + 9)
        assert self.asks(state) is True

    def test_is_given_up_when_patience_ends(self) -> None:
        met = pass_time(self.doras(emma_hears=(ANNA,)), Facts(), now=NOW).state
        assert met.met_at == NOW
        assert self.asks(met, NOW + PATIENCE_S - 0.01) is None
        assert self.asks(met, NOW + PATIENCE_S) is False

    def test_is_still_asked_for_when_it_can_be_after_all(self) -> None:
        state = replace(self.doras(), met_at=NOW - 2 * PATIENCE_S)
        assert self.asks(state) is True

    def test_is_waited_for_anew_with_each_meeting(self) -> None:
        met = pass_time(self.doras(emma_hears=(ANNA,)), Facts(), now=NOW).state
        parted = lose(met, ANNA.node, "closed", Facts(), now=NOW + 1).state
        assert parted.met_at is None
        again = replace(parted, peers=met.peers)
        assert self.asks(again, NOW + PATIENCE_S) is None

    def test_is_waited_for_from_the_first_moment_of_the_clock_on(self) -> None:
        met = pass_time(self.doras(emma_hears=(ANNA,)), Facts(), now=0.0).state
        assert self.asks(met, PATIENCE_S) is False
