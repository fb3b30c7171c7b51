"""Whom a leader takes in: who asked, and who comes along with it (V2, V5, V9)."""

from dataclasses import replace

from pmesh.core.proposals import propose
from pmesh.core.standing import JOIN_REQUEST_S, Facts, State
from pmesh.core.views import View
from pmesh.ids import Member
from tests.core.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    all_hearing_each_other,
    make_heartbeat,
    make_member,
    make_peer,
    make_state,
    make_view,
    make_waiting,
)

NOW = 100.0
FACTS = Facts()
TRIO = make_view(5, ANNA, BERT, CARA)
WITHOUT_CARA = all_hearing_each_other(ANNA, TRIO, BERT)


class TestWhoAskedToJoin:
    DORAS = make_view(3, DORA)

    def leader(self, dora: View = DORAS, *heard: Member, asked_at: float = NOW) -> State:
        peers = [
            make_peer(BERT, TRIO, make_heartbeat(TRIO, ANNA, DORA)),
            make_peer(DORA, dora, make_heartbeat(dora, *(heard or (ANNA, BERT)))),
        ]
        view = make_view(5, ANNA, BERT)
        state = make_state(ANNA, view, replace(peers[0], view=view), peers[1])
        return replace(state, joining={DORA: asked_at})

    def test_is_taken_in_as_a_newcomer(self) -> None:
        message = propose(self.leader(), FACTS, NOW)
        assert message is not None
        assert message.members == (ANNA, BERT, DORA)
        assert message.continuing == (ANNA, BERT)

    def test_must_have_asked_lately(self) -> None:
        state = self.leader(asked_at=NOW - JOIN_REQUEST_S)
        assert propose(state, FACTS, NOW) is None
        assert propose(state, FACTS, NOW - 0.1) is not None

    def test_must_come_from_a_lighter_view(self) -> None:
        heavier = make_view(4, DORA, make_member("e"), make_member("f"))
        assert propose(self.leader(heavier), FACTS, NOW) is None

    def test_must_hear_the_leader(self) -> None:
        assert propose(self.leader(self.DORAS, BERT), FACTS, NOW) is None

    def test_must_hear_the_other_members(self) -> None:
        assert propose(self.leader(self.DORAS, ANNA), FACTS, NOW) is None

    def test_must_still_be_linked(self) -> None:
        state = self.leader()
        alone = {node: peer for node, peer in state.peers.items() if node != DORA.node}
        assert propose(replace(state, peers=alone), FACTS, NOW) is None

    def test_is_no_newcomer_if_it_has_a_seat(self) -> None:
        state = replace(WITHOUT_CARA, joining={BERT: NOW})
        message = propose(state, FACTS, NOW)
        assert message is not None
        assert message.members == (ANNA, BERT)

    def test_may_bring_the_trainer_that_a_job_lacks(self) -> None:
        state = self.leader()
        beat = make_heartbeat(self.DORAS, ANNA, BERT, waiting=[make_waiting(2)])
        peers = {**state.peers, DORA.node: make_peer(DORA, self.DORAS, beat)}
        message = propose(replace(state, peers=peers), Facts(waiting=(make_waiting(2),)), NOW)
        assert message is not None
        assert message.jobs == (DIGITS,)


class TestWhoComesAlong:
    """V9: with one who asked, all whom we hear of its view, so that their job comes whole."""

    EMMA = make_member("e")
    TWINS = make_view(3, DORA, EMMA)

    def members(self, emma: View, *, heard: bool = True, asked: bool = True) -> tuple[Member, ...]:
        """Whom Anna, Bert and Cara would take in when Dora asks, and Emma does not."""
        trio = (ANNA, BERT, CARA)
        peers = [make_peer(m, TRIO, make_heartbeat(TRIO, *trio, DORA, self.EMMA)) for m in trio[1:]]
        peers += [
            make_peer(DORA, self.TWINS, make_heartbeat(self.TWINS, *trio, self.EMMA)),
            make_peer(self.EMMA, emma, make_heartbeat(emma, *trio[heard is False :], DORA)),
        ]
        state = replace(make_state(ANNA, TRIO, *peers), joining={DORA: NOW} if asked else {})
        message = propose(state, FACTS, NOW)
        return () if message is None else message.members[3:]

    def test_is_everyone_of_its_view(self) -> None:
        assert self.members(self.TWINS) == (DORA, self.EMMA)

    def test_is_nobody_of_another_view(self) -> None:
        assert self.members(make_view(4, self.EMMA)) == (DORA,)

    def test_is_nobody_who_does_not_hear_the_leader(self) -> None:
        assert self.members(self.TWINS, heard=False) == (DORA,)

    def test_is_nobody_while_none_of_them_asks(self) -> None:
        assert self.members(self.TWINS, asked=False) == ()
