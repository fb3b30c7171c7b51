"""One job through whatever Hypothesis does to its machines: I3 and I4 hold, and it goes on."""

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pmesh.core.values import Terms
from pmesh.ids import Incarnation, Member, NodeId
from tests.core.views.ring import RingAgent, RingRank, RingWorld
from tests.worlds.builders import make_call
from tests.worlds.examples import examples

NODES = [NodeId(letter * 32) for letter in (b"a", b"b", b"c", b"d")]
NODE = st.sampled_from(NODES)
Picks = list[bool]
Ends = tuple[Picks, Picks]
PICKS = st.lists(st.booleans(), min_size=6, max_size=6)
ENDS = st.tuples(PICKS, PICKS)
WHICH = st.integers(0, 7)
LOST = st.sampled_from([None, None, *NODES])
TERMS = st.sampled_from([Terms(), Terms(), Terms(on_loss="raise")])


class OneJob(RuleBasedStateMachine):
    """Each rule is one thing that can happen to an agent, a trainer or a view."""

    world: RingWorld

    def __init__(self) -> None:
        super().__init__()
        self.starts = itertools.count(1)
        self.now_running: dict[NodeId, Member] = {}
        self.kills_left = 3
        self.trainers_left = 5

    @initialize(terms=TERMS, twins=st.booleans())
    def begin(self, terms: Terms, twins: bool) -> None:  # noqa: FBT001 - by name
        self.terms = terms
        members = [self.next_start_of(node) for node in NODES]
        self.world = RingWorld(members)
        for member in [*members[:3], *members[:1] * twins]:
            self.world.connect(member, 3 + twins, terms)
        self.change(members, members)

    def next_start_of(self, node: NodeId) -> Member:
        member = Member(node, Incarnation(1000 + next(self.starts)))
        self.now_running[node] = member
        return member

    def change(self, members: list[Member], reached: list[Member]) -> None:
        view = self.world.propose(members[0], members[1:])
        for member in reached:
            self.world.install(member, view)

    def chosen(self, picks: Picks) -> list[tuple[RingAgent, RingRank]]:
        """Some of the ranks; those whom no pick is about are not."""
        return [found for found, pick in zip(self.world.ranks(), picks, strict=False) if pick]

    # Ops

    @rule(then=ENDS)
    def ops_are_called_and_some_get_through(self, then: Ends) -> None:
        """All come to the same op; some end it, call the next one, and may end that too."""
        self.step()
        self.call([True] * len(then[0]))
        for ended in then:
            self.end(ended)
            self.call(ended)

    def call(self, callers: Picks) -> None:
        for _, rank in self.chosen(callers):
            if self.world.may_call(rank):
                self.world.call(rank, self.world.next_call(rank))
        self.world.give()

    def end(self, ended: Picks) -> None:
        for agent, rank in self.chosen(ended):
            self.world.end_if_possible(agent, rank)

    @rule(ended=PICKS, hearing=PICKS)
    def some_ops_end_and_some_hear_what_is_stable(self, ended: Picks, hearing: Picks) -> None:
        self.end(ended)
        for _, rank in self.chosen(hearing):
            self.world.stabilize(rank)

    @rule(which=WHICH, then=ENDS)
    def a_trainer_calls_something_else(self, which: int, then: Ends) -> None:
        self.step()
        ready = [rank for _, rank in self.world.ranks() if self.world.may_call(rank) and rank.world]
        if ready:
            self.world.call(ready[which % len(ready)], make_call(shape=(7,)))
        self.ops_are_called_and_some_get_through(then)

    @rule(which=WHICH)
    def an_op_times_out(self, which: int) -> None:
        waiting = [rank for _, rank in self.world.ranks() if rank.running is not None]
        if waiting:
            waiting[which % len(waiting)].timed_out = True

    # Machines

    @precondition(lambda self: self.trainers_left)
    @rule(node=NODE, then=ENDS)
    def a_trainer_connects(self, node: NodeId, then: Ends) -> None:
        self.trainers_left -= 1
        self.world.connect(self.now_running[node], 1, self.terms)
        self.ops_are_called_and_some_get_through(then)

    @rule(which=WHICH, then=ENDS)
    def a_trainer_dies(self, which: int, then: Ends) -> None:
        self.ops_are_called_and_some_get_through(then)
        alive = [rank for _, rank in self.world.ranks() if rank.alive]
        if len(alive) > 1:
            alive[which % len(alive)].alive = False

    @precondition(lambda self: self.kills_left)
    @rule(node=NODE, then=ENDS)
    def an_agent_restarts(self, node: NodeId, then: Ends) -> None:
        self.ops_are_called_and_some_get_through(then)
        self.kills_left -= 1
        self.world.kill(self.now_running[node])
        self.world.start(self.next_start_of(node))

    @rule(first=WHICH, lost=LOST, reached=PICKS)
    def most_agree_on_a_view_and_some_of_them_hear_of_it(
        self, first: int, lost: NodeId | None, reached: Picks
    ) -> None:
        members = [m for m in self.everyone_from(first) if m.node != lost]
        self.change(members, [m for m, pick in zip(members, reached, strict=False) if pick])

    @rule(first=WHICH, lost=LOST, then=ENDS)
    def most_agree_on_a_view(self, first: int, lost: NodeId | None, then: Ends) -> None:
        members = [m for m in self.everyone_from(first) if m.node != lost]
        self.change(members, members)
        self.ops_are_called_and_some_get_through(then)

    @rule(first=WHICH, then=ENDS)
    def two_halves_agree_each_on_a_view(self, first: int, then: Ends) -> None:
        self.ops_are_called_and_some_get_through(then)
        everyone = self.everyone_from(first)
        for half in (everyone[:2], everyone[2:]):
            self.change(half, half)

    def everyone_from(self, first: int) -> list[Member]:
        members = list(self.now_running.values())
        first %= len(members)
        return members[first:] + members[:first]

    # Invariants

    @invariant()
    def ranks_of_one_history_have_one_end_of_each_op(self) -> None:
        if hasattr(self, "world"):
            self.world.check_results()

    def step(self) -> None:
        """Every op that can end does, and all hear of it."""
        self.world.give()
        ended = True
        while ended:
            ends = [self.world.end_if_possible(agent, rank) for agent, rank in self.world.ranks()]
            ended = any(ends)
        for _, rank in self.world.ranks():
            self.world.stabilize(rank)

    def teardown(self) -> None:
        """The faults stop: everybody comes together, and the job goes on for all who are in it."""
        if not hasattr(self, "world"):
            return
        members = list(self.now_running.values())
        for _ in range(4):  # one history goes on, and the ops under way are settled
            self.change(members, members)
            self.step()
        goal = 9 + max((rank.ledger.started for _, rank in self.world.ranks()), default=0)
        for _ in range(15):
            self.change(members, members)
            self.call([rank.ledger.started < goal for _, rank in self.world.ranks()])
            self.step()
            self.world.check_results()
        for agent, rank in self.world.ranks():
            if rank.alive:
                assert rank.in_ring, agent
                assert rank.ledger.ended == goal, "liveness"
        if any(rank.alive for _, rank in self.world.ranks()):
            assert not any(agent.waiting for agent in self.world.agents.values())


TestOneJob = OneJob.TestCase
TestOneJob.settings = examples(60, stateful_step_count=30)
