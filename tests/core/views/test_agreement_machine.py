"""Agents that exchange their own messages: plain histories, and a machine of three agents.

The machine runs whatever order of deliveries, cuts, pauses and restarts Hypothesis finds.
`Circle.take` holds I1, I2 and V1 against every step; a ProtocolError among honest agents is a
failure too. In the end the network heals, and all must come together in one view.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pmesh.core.values import Roster, Terms
from pmesh.core.views.bound import agreement_bound_s
from pmesh.core.views.quorum import may_run
from pmesh.core.views.state import FLUSH_DEADLINE_S, MOST_FAILURES, Facts, Install, MemberStep
from pmesh.core.wire.views import Candidate, Commit, Flushed, Propose
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, Slot
from tests.core.views.circle import HEARTBEAT_S, Circle, gathered
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    make_epoch,
    make_member,
    make_report,
    make_verdict,
    make_view,
    make_view_request,
    make_waiting,
    running,
)
from tests.worlds.examples import examples

NODES = [NodeId(letter * 32) for letter in (b"a", b"b", b"c")]
NODE = st.sampled_from(NODES)
PAIRS = list(itertools.permutations(NODES, 2))
PAIR = st.sampled_from(PAIRS)
QUORUM = st.sampled_from(["any", "majority"])
PAUSE_S = st.sampled_from([0.0, 0.2, 0.2, 0.5, 1.1, 2.1])
RECOVERY_S = agreement_bound_s(len(NODES), 0.0)


class ThreeAgents(RuleBasedStateMachine):
    """Each rule is one thing that can happen to an agent or a wire."""

    circle: Circle

    def __init__(self) -> None:
        super().__init__()
        self.starts = itertools.count(1)
        self.now_running: dict[NodeId, Member] = {}
        self.primaries: dict[tuple[JobName, Epoch], Epoch] = {}
        """The last roster that could run ops, of each job that asks for a majority."""
        self.restarts_left = 2  # more, and little else would happen

    @initialize(strangers=st.booleans())
    def begin(self, strangers: bool) -> None:  # noqa: FBT001 - Hypothesis passes it by name
        members = [self.next_start_of(node) for node in NODES]
        self.circle = Circle(*members) if strangers else gathered(*members)
        if strangers:
            self.circle.link_everyone()

    def next_start_of(self, node: NodeId) -> Member:
        member = Member(node, Incarnation(1000 + next(self.starts)))
        self.now_running[node] = member
        return member

    def members(self, pair: tuple[NodeId, NodeId]) -> tuple[Member, Member]:
        one, other = pair
        return self.now_running[one], self.now_running[other]

    @rule(after_s=PAUSE_S, counts=st.lists(st.integers(0, 3), min_size=6, max_size=6))
    def everyone_beats_and_some_messages_arrive(self, after_s: float, counts: list[int]) -> None:
        self.circle.now += after_s
        for member in self.now_running.values():
            self.circle.tick(member)
        for pair, count in zip(PAIRS, counts, strict=True):
            self.deliver_some(self.members(pair), count)

    @rule(node=NODE, after_s=PAUSE_S)
    def one_agent_beats(self, node: NodeId, after_s: float) -> None:
        self.circle.now += after_s
        self.circle.tick(self.now_running[node])

    @rule(pair=PAIR, count=st.integers(1, 10))
    def some_messages_arrive(self, pair: tuple[NodeId, NodeId], count: int) -> None:
        self.deliver_some(self.members(pair), count)

    def deliver_some(self, wire: tuple[Member, Member], count: int) -> None:
        for _ in range(min(count, len(self.circle.wires.get(wire, ())))):
            self.circle.deliver(*wire)

    @rule()
    def everything_arrives(self) -> None:
        self.circle.deliver_all()

    @precondition(lambda self: self.circle.carrying(Propose, Flushed, Commit))
    @rule(data=st.data())
    def a_link_that_carries_a_decision_breaks(self, data: st.DataObject) -> None:
        """... and is up again at once, so that neither end loses the other."""
        wire = data.draw(st.sampled_from(self.circle.carrying(Propose, Flushed, Commit)))
        self.circle.cut(*wire)
        self.circle.link(*wire)

    @rule(pair=PAIR, both_notice=st.booleans())
    def a_link_breaks(self, pair: tuple[NodeId, NodeId], *, both_notice: bool) -> None:
        one, other = self.members(pair)
        if (one, other) in self.circle.wires:
            self.circle.cut(one, other)
            self.circle.lose(one, other)
            if both_notice:
                self.circle.lose(other, one)

    @precondition(lambda self: len(self.circle.wires) < len(PAIRS))
    @rule()
    def all_links_come_up(self) -> None:
        self.circle.link_everyone()

    @precondition(lambda self: self.restarts_left)
    @rule(node=NODE)
    def an_agent_restarts(self, node: NodeId) -> None:
        self.circle.stop(self.now_running[node])
        self.circle.start(self.next_start_of(node))
        self.restarts_left -= 1

    @rule(node=NODE, wait_for=st.integers(1, 3), quorum=QUORUM)
    def a_trainer_waits(
        self, node: NodeId, wait_for: int, quorum: Literal["any", "majority"]
    ) -> None:
        job, terms = JobName(f"for {wait_for}"), Terms(quorum=quorum)
        self.circle.facts[self.now_running[node]] = Facts(
            waiting=(Candidate(job, Slot(0), wait_for, terms),)
        )

    @rule()
    def a_job_begins_on_all_that_asks_for_a_majority(self) -> None:
        for node in NODES:
            self.a_trainer_waits(node, len(NODES), "majority")
        self.circle.link_everyone()
        for _ in range(5):
            self.circle.pass_time(0.2)

    @precondition(lambda self: any(state.view.rosters for state in self.circle.states.values()))
    @rule(node=NODE)
    def an_op_times_out(self, node: NodeId) -> None:
        member = self.now_running[node]
        for roster in self.circle.view_of(member).rosters[:1]:
            report = make_report(roster, {t.id: [running(0)] for t in roster.trainers_at(member)})
            self.circle.facts[member] = Facts(
                view_requests=(make_view_request(roster, make_verdict(), op=0),),
                reports=partial(tuple, [report]),
            )

    @invariant()
    def an_agent_is_a_member_of_its_own_view(self) -> None:
        assert all(member in state.view.members for member, state in self.circle.states.items())

    @invariant()
    def who_waits_for_a_commit_has_promised_more_than_it_installed(self) -> None:
        for state in self.circle.states.values():
            assert (state.flushed_at is None) == (state.promised == state.view.epoch)

    @invariant()
    def a_view_has_one_roster_for_each_job(self) -> None:
        for view in self.circle.views.values():
            assert len({roster.job for roster in view.rosters}) == len(view.rosters)

    @invariant()
    def of_a_job_that_asks_for_a_majority_one_side_goes_on(self) -> None:
        """V10: ops run where all ranks know their roster to be in force, and have promised none."""
        running: dict[tuple[JobName, Epoch], Roster] = {}
        for state in self.circle.states.values():
            for roster in filter(self.may_run, state.view.rosters):
                first = running.setdefault((roster.job, roster.born), roster)
                assert first == roster, "two sides go on"
        for job, roster in running.items():
            assert roster.primary.epoch >= self.primaries.get(job, roster.primary.epoch), "undone"
            self.primaries[job] = roster.primary.epoch

    def may_run(self, roster: Roster) -> bool:
        hosts = [self.circle.states.get(trainer.member) for trainer in roster.trainers]
        asks = roster.terms.quorum == "majority"
        return asks and all(
            state is not None
            and state.flushed_at is None
            and roster in state.view.rosters
            and may_run(roster, state.primaries)
            for state in hosts
        )

    def teardown(self) -> None:
        if not hasattr(self, "circle"):
            return
        for member, facts in self.circle.facts.items():
            self.circle.facts[member] = Facts(waiting=facts.waiting)
        self.circle.recover(within_s=RECOVERY_S)


TestThreeAgents = ThreeAgents.TestCase
TestThreeAgents.settings = examples(60, stateful_step_count=50)


class TestTogether:
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
            (trainer,) = roster.trainers_at(member)
            report = make_report(roster, {trainer.id: [running(0)]}, fenced=False)
            circle.facts[member] = Facts(reports=partial(tuple, [report]))
        circle.facts[BERT] = replace(
            circle.facts[BERT],
            view_requests=(make_view_request(roster, make_verdict("OpTimedOut", 2), op=0),),
        )
        circle.pass_time(1.0)
        (settled,) = circle.agreed_view().rosters
        assert settled.number > roster.number
        assert [outcome.verdict for outcome in settled.outcomes] == [make_verdict("OpTimedOut", 2)]
        assert {m for m, fence in circle.fences if fence.jobs == (DIGITS,)} == set(circle.states)

    def test_a_proposal_that_its_leader_has_dropped_holds_nobody_up_however_patient_all_are(
        self,
    ) -> None:
        """V6: Bert and Cara had lost Anna, whom both hear again before Cara's answer is lost."""
        circle = gathered(ANNA, BERT, CARA)
        leader, second, third = circle.agreed_view().by_seniority
        for member, state in circle.states.items():
            circle.states[member] = replace(state, failures=MOST_FAILURES)
        for member in (second, third):
            circle.cut(leader, member)
            circle.lose(member, leader)
        circle.tick(third)
        circle.tick(second)
        while circle.states[third].flushed_at is None:
            heard = circle.wires[third, second]
            circle.deliver(*((third, second) if heard else (second, third)))
        for member in (second, third):
            circle.link(member, leader)
            circle.deliver_between(member, leader)
            circle.tick(member)
            circle.deliver_between(member, leader)
        circle.cut(second, third)
        circle.link(second, third)
        circle.recover(within_s=FLUSH_DEADLINE_S + 5 * HEARTBEAT_S)

    def test_a_restarted_leader_never_uses_an_epoch_again(self) -> None:
        """V1: without incarnations it would."""
        circle = gathered(ANNA, BERT)
        leader = circle.agreed_view().by_seniority[0]
        used = set(circle.views)
        circle.stop(leader)
        circle.start(Member(leader.node, Incarnation(leader.incarnation + 1000)))
        circle.recover(within_s=5.0)
        assert used < set(circle.views)


def test_the_circle_itself_sees_what_it_is_there_to_see() -> None:
    """A test that can't fail is a defect."""
    circle = Circle(ANNA, BERT)
    state = circle.states[ANNA]
    with pytest.raises(AssertionError, match="V1"):
        circle.take(ANNA, MemberStep(replace(state, promised=make_epoch(0))))
    with pytest.raises(AssertionError, match="I2: only upwards"):
        circle.take(ANNA, MemberStep(state, (Install(state.view),)))
    with pytest.raises(AssertionError, match="I2: only where"):
        circle.take(ANNA, MemberStep(state, (Install(make_view(9, BERT)),)))
    promised = replace(state, promised=make_epoch(9))
    circle.states[ANNA] = promised
    with pytest.raises(AssertionError, match="V1: nothing below"):
        circle.take(ANNA, MemberStep(promised, (Install(make_view(8, ANNA)),)))
    circle = Circle(ANNA, BERT)
    with pytest.raises(AssertionError, match="V2"):
        circle.take(ANNA, MemberStep(state, (Install(make_view(8, ANNA, previous=make_epoch(7))),)))
    circle.views[make_epoch(8)] = make_view(8, ANNA)
    with pytest.raises(AssertionError, match="I1"):
        circle.take(ANNA, MemberStep(state, (Install(make_view(8, ANNA, BERT)),)))
