"""Members that join: when they ask, and whom the leader admits with them (V2, V5, V9)."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from pmesh.core.values import MAX_JOBS, View
from pmesh.core.views.agreement import lose, pass_time
from pmesh.core.views.leader import propose
from pmesh.core.views.state import (
    JOIN_REQUEST_S,
    PATIENCE_S,
    Facts,
    MemberState,
    MemberStep,
    PendingJoin,
)
from pmesh.core.wire.views import AskToJoin, Heartbeat, Propose, TellView
from pmesh.ids import JobName, Member
from tests.core.views.circle import Circle, gathered
from tests.core.views.one_member import BERTS, NOW, TRIO, sent, told
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
    make_view,
    make_waiting,
)

ASKED = PendingJoin(NOW, whole=False)
ASKED_WHOLE = PendingJoin(NOW, whole=True)
FACTS = Facts()
WITHOUT_CARA = all_hearing_each_other(ANNA, TRIO, BERT)


class TestWhoAskedToJoin:
    DORAS = make_view(3, DORA)

    def leader(self, dora: View = DORAS, *heard: Member, asked_at: float = NOW) -> MemberState:
        peers = [
            make_peer(BERT, TRIO, make_heartbeat(TRIO, ANNA, DORA)),
            make_peer(DORA, dora, make_heartbeat(dora, *(heard or (ANNA, BERT)))),
        ]
        view = make_view(5, ANNA, BERT)
        state = make_state(ANNA, view, replace(peers[0], view=view), peers[1])
        return replace(state, joining={DORA: PendingJoin(asked_at, whole=False)})

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

    def test_may_bring_no_more_jobs_than_there_is_room_for(self) -> None:
        for count, expected in ((2, [ANNA, BERT, DORA]), (MAX_JOBS + 1, [])):
            jobs = [make_roster(DORA, job=JobName(f"job-{i}")) for i in range(count)]
            message = propose(self.leader(make_view(3, DORA, rosters=jobs)), FACTS, NOW)
            assert list(message.members if message else ()) == expected

    def test_must_still_be_linked(self) -> None:
        state = self.leader()
        alone = {node: peer for node, peer in state.peers.items() if node != DORA.node}
        assert propose(replace(state, peers=alone), FACTS, NOW) is None

    def test_is_no_newcomer_if_it_has_a_seat(self) -> None:
        state = replace(WITHOUT_CARA, joining={BERT: ASKED})
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

    def members(
        self,
        emma: View,
        *,
        dora: View = TWINS,
        heard: bool = True,
        asked: PendingJoin | None = ASKED,
        emma_asked: PendingJoin | None = None,
    ) -> tuple[Member, ...]:
        """Whom Anna, Bert and Cara would take in when Dora asks, and Emma mostly does not."""
        trio = (ANNA, BERT, CARA)
        peers = [make_peer(m, TRIO, make_heartbeat(TRIO, *trio, DORA, self.EMMA)) for m in trio[1:]]
        peers += [
            make_peer(DORA, dora, make_heartbeat(dora, *trio, self.EMMA)),
            make_peer(self.EMMA, emma, make_heartbeat(emma, *trio[heard is False :], DORA)),
        ]
        requests = {DORA: asked, self.EMMA: emma_asked}
        joining = {member: request for member, request in requests.items() if request}
        state = replace(make_state(ANNA, TRIO, *peers), joining=joining)
        message = propose(state, FACTS, NOW)
        return () if message is None else message.members[3:]

    def test_is_everyone_of_its_view(self) -> None:
        assert self.members(self.TWINS) == (DORA, self.EMMA)

    def test_is_nobody_of_another_view(self) -> None:
        assert self.members(make_view(4, self.EMMA)) == (DORA,)

    def test_is_nobody_who_does_not_hear_the_leader(self) -> None:
        assert self.members(self.TWINS, heard=False) == (DORA,)

    def test_is_nobody_who_has_a_seat(self) -> None:
        """It has gone another way; what it brings back is judged when it has lost the seat."""
        view = make_view(5, ANNA, BERT, CARA, self.EMMA)
        everyone = (*view.members, DORA)
        peers = [make_peer(m, view, make_heartbeat(view, *everyone)) for m in (BERT, CARA)]
        peers += [
            make_peer(m, self.TWINS, make_heartbeat(self.TWINS, *everyone))
            for m in (DORA, self.EMMA)
        ]
        message = propose(
            replace(make_state(ANNA, view, *peers), joining={DORA: ASKED}), FACTS, NOW
        )
        assert message is not None
        assert message.members == (ANNA, BERT, CARA, DORA)

    def test_is_nobody_while_none_of_them_asks(self) -> None:
        assert self.members(self.TWINS, asked=None) == ()

    def test_is_everyone_or_nobody_if_that_is_what_was_asked(self) -> None:
        """Else the job of the two would be torn, and one half of its work lost."""
        assert self.members(self.TWINS, asked=ASKED_WHOLE) == (DORA, self.EMMA)
        assert self.members(self.TWINS, asked=ASKED_WHOLE, heard=False) == ()
        assert self.members(make_view(4, self.EMMA), asked=ASKED_WHOLE) == ()

    def test_is_whoever_can_as_soon_as_one_of_the_view_has_waited_for_too_long(self) -> None:
        members = self.members(self.TWINS, asked=ASKED_WHOLE, emma_asked=ASKED)
        assert members == (DORA, self.EMMA)
        assert self.members(self.TWINS, asked=ASKED, emma_asked=ASKED_WHOLE, heard=False) == (DORA,)

    def test_is_not_torn_by_the_impatience_of_another_view(self) -> None:
        doras, emmas = make_view(3, DORA, make_member("f")), make_view(4, self.EMMA)
        members = self.members(emmas, dora=doras, asked=ASKED_WHOLE, emma_asked=ASKED)
        assert members == (self.EMMA,)

    def test_is_not_torn_by_an_impatience_of_long_ago(self) -> None:
        """Whoever is still impatient asks again."""
        trio = make_view(3, DORA, self.EMMA, make_member("f"))
        long_ago = PendingJoin(NOW - JOIN_REQUEST_S, whole=False)
        quartet = make_view(5, ANNA, BERT, CARA, make_member("g"))
        peers = [
            make_peer(m, trio, make_heartbeat(trio, ANNA, DORA, self.EMMA))
            for m in (DORA, self.EMMA)
        ]
        state = make_state(ANNA, quartet, *peers)
        for dora in (ASKED, long_ago):
            asked = replace(state, joining={DORA: dora, self.EMMA: ASKED_WHOLE})
            message = propose(asked, FACTS, NOW)
            assert message is not None
            assert message.members == ((ANNA, DORA, self.EMMA) if dora == ASKED else (ANNA,))


class TestTwoViewsThatMeet:
    """V9: links come one after the other, and the views merge in one step all the same."""

    EMMA = make_member("e")
    PAIR = DORA, EMMA

    def circle(self) -> Circle:
        """A trio and a pair that have not met."""
        circle = gathered(ANNA, BERT, CARA)
        for member in self.PAIR:
            circle.start(member)
        circle.link(*self.PAIR)
        circle.deliver_all()
        circle.pass_time(4.0)
        circle.agreed_view(self.PAIR)
        return circle

    def meet(self, circle: Circle) -> None:
        """All links but one."""
        for ours in (ANNA, BERT, CARA):
            for theirs in self.PAIR:
                if (ours, theirs) != (CARA, self.EMMA):
                    circle.link(ours, theirs)
        circle.deliver_all()

    def test_wait_for_the_last_link(self) -> None:
        circle = self.circle()
        self.meet(circle)
        circle.pass_time(PATIENCE_S - 0.4)
        assert circle.agreed_view(self.PAIR).members == self.PAIR
        circle.link(CARA, self.EMMA)
        circle.deliver_all()
        circle.pass_time(0.4)
        before = {view.members for view in circle.views.values()}
        assert set(circle.agreed_view().members) == {ANNA, BERT, CARA, *self.PAIR}
        assert not any(
            DORA in members and ANNA in members and self.EMMA not in members for members in before
        )

    def test_do_not_wait_for_ever(self) -> None:
        circle = self.circle()
        self.meet(circle)
        circle.pass_time(PATIENCE_S + 2.0)
        assert any(set(view.members) == {ANNA, BERT, CARA, DORA} for view in circle.views.values())


class TestAskingToJoin:
    BIG = make_view(5, ANNA, BERT)
    BEAT = make_heartbeat(BIG, DORA, acting=True)
    SECOND = make_peer(BERT, BIG, make_heartbeat(BIG, DORA))
    ALONE = make_state(DORA, make_view(9, DORA), SECOND)

    def meet(self, beat: Heartbeat, state: MemberState = ALONE) -> MemberStep:
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
        state = replace(state, joining={CARA: PendingJoin(NOW, whole=False)})
        ((to, message),) = sent(pass_time(state, Facts(), now=NOW))
        assert to == CARA
        assert isinstance(message, Propose)

    @pytest.mark.parametrize("whole", [False, True])
    def test_is_noted_by_who_is_asked(self, *, whole: bool) -> None:
        step = told(BERTS, DORA, AskToJoin(make_epoch(1, DORA), whole))
        assert step.state.joining == {DORA: PendingJoin(NOW, whole)}


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
