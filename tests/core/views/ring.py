"""Agents with the ranks of one job, whose view changes a test makes by hand, and I3 and I4.

There are no messages, lanes or clocks: an op completes at a rank when all ranks of its roster have
called it under that roster's number; a view change asks whom it likes, and reaches whom it likes.
The decisions are the core's own: `proposals.decide`, and the ledger.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pmesh.core.values import Roster, Terms, Trainer, Verdict, View
from pmesh.core.views import op_log as ledgers
from pmesh.core.views.leader import begin, collect, decide
from pmesh.core.views.op_log import Ledger
from pmesh.core.views.outcomes import outcome_of
from pmesh.core.views.rosters import is_same_history
from pmesh.core.views.state import Facts, MemberState
from pmesh.core.wire.calls import Call
from pmesh.core.wire.views import Candidate, Flushed, JobReport, Propose, ViewRequest
from pmesh.ids import Epoch, Member, OpNumber, Slot, TrainerId
from tests.worlds.builders import DIGITS, make_call, make_verdict, said_by

TIMED_OUT = make_verdict("OpTimedOut")
Contributors = tuple[TrainerId, ...]


def call_of(op: OpNumber, root: int) -> Call:
    """The script: a sync, a broadcast from rank 0, and two all-reduces, and so on."""
    if op % 4 == 0:
        return make_call("sync")
    return Call("broadcast", "float32", (3,), root=root) if op % 4 == 1 else make_call()


@dataclass(kw_only=True)
class RingRank:
    """A trainer with what its agent knows of it."""

    trainer: Trainer
    roster: Roster
    ledger: Ledger
    world: Contributors
    """O5: who rank i is, as the trainer sees it."""
    alive: bool = True
    timed_out: bool = False
    results: dict[OpNumber, object] = field(default_factory=dict)
    """Retained until they are stable (O2)."""
    told: dict[OpNumber, tuple[object, Contributors]] = field(default_factory=dict)
    """What the trainer has of each op: a value or a verdict, and the contributors."""

    @property
    def id(self) -> TrainerId:
        return self.trainer.id

    @property
    def in_ring(self) -> bool:
        return self.trainer in self.roster.trainers

    @property
    def running(self) -> OpNumber | None:
        op = OpNumber(self.ledger.started)
        return op if self.ledger.ended < op else None

    @property
    def call(self) -> Call:
        return self.ledger.ops[OpNumber(self.ledger.started)].call


@dataclass(kw_only=True)
class RingAgent:
    """One process of one machine."""

    me: Member
    view: View
    fenced: bool = False
    promised: Epoch | None = None
    ranks: list[RingRank] = field(default_factory=list)
    waiting: list[Candidate] = field(default_factory=list)
    next_slot: int = 0

    @property
    def roster(self) -> Roster | None:
        return self.view.roster_of(DIGITS)


class RingWorld:
    """All agents that live."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.counter = 1
        self.agents: dict[Member, RingAgent] = {}
        self.given: dict[tuple[Epoch, int, OpNumber], dict[TrainerId, Call]] = {}
        """Who has called an op under a roster's number: their segments are on the lanes."""
        self.parents: dict[tuple[Epoch, Epoch], tuple[Epoch, Epoch] | None] = {}
        for member in members:
            self.start(member)

    # Agents and trainers come and go

    def start(self, member: Member) -> None:
        view = View.of_one(member, said_by(member), Epoch(1, *member))
        self.agents[member] = RingAgent(me=member, view=view)

    def kill(self, member: Member) -> None:
        del self.agents[member]

    def connect(self, member: Member, wait_for: int, terms: Terms) -> None:
        agent = self.agents[member]
        agent.waiting.append(Candidate(DIGITS, Slot(agent.next_slot), wait_for, terms))
        agent.next_slot += 1

    def ranks(self) -> Iterator[tuple[RingAgent, RingRank]]:
        for agent in self.agents.values():
            for rank in agent.ranks:
                yield agent, rank

    # Ops

    def call(self, rank: RingRank, call: Call) -> None:
        rank.ledger = ledgers.start(rank.ledger, OpNumber(rank.ledger.started + 1), call)
        rank.timed_out = False

    def may_call(self, rank: RingRank) -> bool:
        return rank.alive and rank.in_ring and rank.running is None

    def next_call(self, rank: RingRank) -> Call:
        return call_of(OpNumber(rank.ledger.started + 1), root=rank.world[0] if rank.world else -1)

    def give(self) -> None:
        """Whoever has called an op and may run it sends its share."""
        for agent, rank in self.ranks():
            op = rank.running
            if op is None or agent.fenced or not rank.in_ring or not rank.roster.quorate:
                continue
            if self.lets_in(agent, rank):
                continue
            if outcome_of(rank.roster, op) is None and self.root_lives(rank):
                key = (rank.roster.born, rank.roster.number, op)
                self.given.setdefault(key, {})[rank.id] = rank.call

    def lets_in(self, agent: RingAgent, rank: RingRank) -> bool:
        """O6: a sync waits for the view that lets in those who wait."""
        here = (self.agents[m] for m in agent.view.members if m in self.agents)
        return rank.call.kind == "sync" and any(other.waiting for other in here)

    def root_lives(self, rank: RingRank) -> bool:
        return rank.call.root < 0 or rank.roster.rank_of(TrainerId(rank.call.root)) is not None

    def end_if_possible(self, agent: RingAgent, rank: RingRank) -> bool:
        """The op under way ends at this rank, if it can: it has failed, is fetched, or is run."""
        op = rank.running
        if op is None or agent.fenced or not rank.in_ring:
            return False
        outcome = outcome_of(rank.roster, op)
        if outcome is not None and outcome.verdict is not None:
            rank.ledger = ledgers.fail(rank.ledger, outcome)
            self.tell(rank, op, outcome.verdict, outcome.contributors)
            return True
        if outcome is not None:
            return self.fetch(rank, op, outcome.holders, outcome.contributors)
        return self.run(rank, op)

    def fetch(
        self, rank: RingRank, op: OpNumber, holders: Contributors, contributors: Contributors
    ) -> bool:
        """O2: the result comes from a holder that has followed the same view."""
        living = [
            other
            for _, other in self.ranks()
            if other.id in holders and other.roster == rank.roster
        ]
        for holder in living:
            assert op in holder.results or op <= holder.ledger.stable, "a holder without the result"
            if op in holder.results:
                assert holder.told[op][1] == contributors, "I3: other contributors"
                self.complete(rank, op, holder.results[op], contributors)
                return True
        return False

    def run(self, rank: RingRank, op: OpNumber) -> bool:
        self.give()
        roster, call = rank.roster, rank.call
        given = self.given.get((roster.born, roster.number, op), {})
        needed = (TrainerId(call.root),) if call.root >= 0 else roster.ids
        if rank.id not in given or any(given.get(id_) != call for id_ in needed):
            return False
        self.complete(rank, op, (call.kind, op, roster.number, needed), roster.ids)
        return True

    def complete(
        self, rank: RingRank, op: OpNumber, result: object, contributors: Contributors
    ) -> None:
        rank.ledger = ledgers.complete(rank.ledger, op, contributors)
        rank.results[op] = result
        self.tell(rank, op, result, contributors)

    def tell(self, rank: RingRank, op: OpNumber, end: object, contributors: Contributors) -> None:
        rank.told[op] = end, contributors
        rank.world = contributors

    def stabilize(self, rank: RingRank) -> None:
        """O2: it hears how far the others have come."""
        progress = [self.mark_of(rank.roster, trainer) for trainer in rank.roster.trainers]
        mark = min(progress, default=-1)
        if rank.running is not None:
            mark = min(mark, rank.running - 1)
        rank.ledger = ledgers.stabilize(rank.ledger, mark)
        rank.results = {op: r for op, r in rank.results.items() if op > rank.ledger.stable}

    def mark_of(self, roster: Roster, trainer: Trainer) -> int:
        for _, rank in self.ranks():
            if rank.trainer == trainer and rank.roster.born == roster.born:
                return rank.ledger.ended
        return trainer.enters - 1

    # View changes

    def view_requests(self, agent: RingAgent, *, newcomers: bool) -> Iterator[ViewRequest]:
        """What an agent wants settled."""
        for rank in agent.ranks:
            roster, op = rank.roster, rank.running
            given = self.given.get((roster.born, roster.number, op or OpNumber(0)), {})
            verdict: Verdict | None = None
            if not rank.in_ring:
                continue
            if not rank.alive:
                verdict, op = make_verdict("RankLost", rank.id), OpNumber(-1)
            elif op is None:
                continue
            elif len(set(given.values())) > 1:
                verdict = Verdict("OpMismatch", f"op {op}")
            elif not self.root_lives(rank):
                verdict = Verdict("RankLost", f"the root of op {op}")
            elif rank.timed_out:
                verdict = TIMED_OUT
            elif not (newcomers and rank.call.kind == "sync"):
                continue
            yield ViewRequest(roster.job, roster.born, roster.number, verdict, op)

    def flush(self, member: Member, epoch: Epoch) -> Flushed:
        """V1 and V3."""
        agent = self.agents[member]
        agent.fenced, agent.promised = True, epoch
        reports: dict[Epoch, JobReport] = {}
        for rank in agent.ranks:
            roster, told = rank.roster, ledgers.report(rank.ledger, rank.id)
            before = reports.get(roster.born)
            ranks = (*(before.ranks if before else ()), told)
            reports[roster.born] = JobReport(
                DIGITS, roster.born, roster.number, fenced=True, ranks=ranks
            )
        jobs, waiting = tuple(reports.values()), tuple(agent.waiting)
        return Flushed(epoch, said_by(member), agent.view, jobs, waiting)

    def propose(self, leader: Member, others: Iterable[Member]) -> View:
        """All of them flush, and the leader decides; nobody has installed it yet."""
        self.counter += 1
        epoch = Epoch(self.counter, *leader)
        members = (leader, *others)
        answers = {member: self.flush(member, epoch) for member in members}
        newcomers = any(self.agents[member].waiting for member in members)
        view_requests = [
            c for m in members for c in self.view_requests(self.agents[m], newcomers=newcomers)
        ]
        state = MemberState(
            me=leader,
            said=said_by(leader),
            view=self.agents[leader].view,
            promised=epoch,
            highest_counter=epoch.counter,
        )
        message = Propose(epoch, state.view, members, members, ())
        state = begin(state, message, answers[leader], 0.0)
        for member, answer in answers.items():
            state = collect(state, member, answer)
        commit = decide(state, Facts(view_requests=tuple(view_requests)))
        assert commit is not None
        return commit.view

    def install(self, member: Member, view: View) -> None:
        """V1: if it is still what the member has promised."""
        agent = self.agents[member]
        if agent.promised != view.epoch or view.epoch <= agent.view.epoch:
            return
        agent.view, agent.fenced = view, False
        roster = agent.roster
        agent.ranks = [
            rank
            for rank in agent.ranks
            if roster is not None and is_same_history(rank.roster, roster, rank.trainer)
        ]
        if roster is not None:
            for rank in agent.ranks:
                self.follow(rank, roster)
            for trainer in roster.trainers_at(member):
                self.begin_if_new(agent, roster, trainer)

    def follow(self, rank: RingRank, roster: Roster) -> None:
        if roster.number == rank.roster.number:
            return
        rank.roster = roster
        rank.ledger = ledgers.apply_failures(rank.ledger, roster.outcomes)
        for outcome in roster.outcomes:
            if outcome.verdict is not None and outcome.op in rank.told:
                rank.told[outcome.op] = outcome.verdict, outcome.contributors  # I5: told late
                rank.results.pop(outcome.op, None)

    def begin_if_new(self, agent: RingAgent, roster: Roster, trainer: Trainer) -> None:
        if any(rank.trainer == trainer for rank in agent.ranks):
            return
        slots = [waiting.slot for waiting in agent.waiting]
        assert trainer.slot in slots, "a trainer enters that does not wait"
        agent.waiting = [w for w in agent.waiting if w.slot != trainer.slot]
        rank = RingRank(
            trainer=trainer,
            roster=roster,
            ledger=Ledger(stable=trainer.enters - 1),
            world=() if trainer.enters else roster.ids,
        )
        agent.ranks.append(rank)

    # Invariants

    def check_results(self) -> None:
        """I3 and I4: ranks of one history have one end of each op, and one list of contributors."""
        seen: dict[tuple[Roster, OpNumber], tuple[object, Contributors]] = {}
        for _, rank in self.ranks():
            for op, end in rank.told.items():
                assert seen.setdefault((rank.roster, op), end) == end, f"I3: op {op} differs"
