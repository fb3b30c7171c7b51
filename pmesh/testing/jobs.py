"""One agent's part of a running job: ledgers, attempts, the fence, retained results.

Everything that the agreement reads or writes is the real thing (`pmesh.core.ledger`, rosters,
outcomes); only the tensors are small: a rank's value goes round the ring as a token, and an op
completes at a rank once the tokens of all ranks have come by.
"""

from collections.abc import Mapping

from pmesh.core import ledger as ledgers
from pmesh.core.ledger import Ledger
from pmesh.core.messages import Call, Concern, JobReport, RankMarks
from pmesh.core.rosters import outcome_of
from pmesh.core.views import OpOutcome, Roster, Verdict
from pmesh.ids import Member, OpNumber, Rank
from pmesh.testing.job_host import JobHost
from pmesh.testing.lane_messages import LaneMessage, OpResult, Retained, Token
from pmesh.testing.trainers import Trainer

OP_TIMEOUT_S = 4.0
"""How long an attempt may take before its rank asks for a verdict."""


class LocalJob:
    """The ranks of one job whose trainers are connected to one agent."""

    def __init__(self, host: JobHost, roster: Roster, trainers: Mapping[Rank, Trainer]) -> None:
        self.roster = roster
        self.trainers = trainers
        self.ledgers: dict[Rank, Ledger] = {rank: Ledger() for rank in trainers}
        self.fenced = False
        self.ends: dict[tuple[Rank, OpNumber], OpResult | Verdict] = {}
        """How each op ended at each local rank, for ever: what the invariants are checked on."""
        self._host = host
        self._results: dict[tuple[Rank, OpNumber], OpResult] = {}
        self._tokens: dict[tuple[Rank, OpNumber], dict[Rank, Token]] = {}
        self._attempted: dict[tuple[Rank, OpNumber], float] = {}
        self._asked: dict[tuple[Rank, OpNumber], int] = {}
        self._held: list[tuple[Rank, OpNumber, OpResult]] = []
        self._troubles: dict[OpNumber, Verdict | None] = {}

    # --- what the agreement is told

    def report(self) -> JobReport:
        """This agent's part of a flush answer (V3); a rank whose trainer is gone still counts."""
        ranks = tuple(ledgers.report(self.ledgers[rank], rank) for rank in self.trainers)
        return JobReport(self.roster.job, self.roster.born, self.roster.number, self.fenced, ranks)

    def concerns(self) -> tuple[Concern, ...]:
        """What only a view change can settle."""
        roster = self.roster
        gone = [
            rank
            for rank, trainer in self.trainers.items()
            if not trainer.alive and rank not in roster.lost_ranks
        ]
        wanted: list[tuple[Verdict | None, int]] = [(_left(roster, rank), -1) for rank in gone]
        wanted += [
            (verdict, int(op))
            for op, verdict in sorted(self._troubles.items(), key=lambda item: item[0])
        ]
        return tuple(
            Concern(roster.job, roster.born, roster.number, verdict, op) for verdict, op in wanted
        )

    def marks(self) -> tuple[RankMarks, ...]:
        """How far each local rank has come."""
        return tuple(
            RankMarks(self.roster.job, self.roster.number, rank, ledger.started, ledger.ended)
            for rank, ledger in self.ledgers.items()
        )

    @property
    def asleep(self) -> bool:
        """Whether the machine sleeps."""
        return self._host.asleep

    def changed(self) -> None:
        """A trainer is gone."""
        self._host.facts_changed()

    # --- what the agreement decides

    def fence(self) -> None:
        """V3: from here on no end of an op reaches a trainer."""
        self.fenced = True
        self._host.facts_changed()

    def install(self, roster: Roster) -> None:
        """A view is in force; its roster is of the same birth as ours."""
        settled = roster.number > self.roster.number
        self.roster, self.fenced = roster, False
        held, self._held = self._held, []
        if settled:
            self._settle()
        else:
            for rank, op, result in held:
                self._complete(rank, op, result)
        for rank, op in self._open_ops():
            self._resume(rank, op)
        self._host.facts_changed()

    def supersede(self) -> None:
        """Another history of the job goes on: nothing more will end here."""
        for rank, trainer in self.trainers.items():
            verdict = Verdict("HistorySuperseded", "another history of this job goes on", (rank,))
            trainer.ended(OpNumber(-1), verdict)

    def stabilize(self, mark: int) -> None:
        """O2: every op up to `mark` has ended at all ranks; their results may be forgotten."""
        for rank, ledger in self.ledgers.items():
            after = ledgers.stabilize(ledger, mark)
            if after is not ledger:
                self.ledgers[rank] = after
                for op in range(ledger.stable + 1, after.stable + 1):
                    self._results.pop((rank, OpNumber(op)), None)
                self._host.facts_changed()

    # --- what the trainers call

    def start(self, rank: Rank, op: OpNumber, call: Call) -> None:
        """A trainer calls an op."""
        self.ledgers[rank] = ledgers.start(self.ledgers[rank], op, call)
        self._host.facts_changed()
        self._resume(rank, op)

    # --- what the lanes bring

    def receive(self, message: LaneMessage) -> None:
        """A message of this roster's number."""
        if isinstance(message, Retained):
            self._take_retained(message)
            return
        at = (message.to_rank, message.op)
        self._tokens.setdefault(at, {})[message.origin] = message
        if at in self._attempted:
            self._take(message)

    def retained(self, rank: Rank, op: OpNumber) -> tuple[Call, OpResult] | None:
        """The result that a survivor asks for, and of what call."""
        result = self._results.get((rank, op))
        return None if result is None else (self.ledgers[rank].ops[op].call, result)

    def lane_broke(self, peer: Member) -> None:
        """A connection with another agent is lost, and with it what was under way on a lane."""
        if any(trainer.member == peer for trainer in self.roster.trainers):
            for rank, op in self._open_ops():
                if (rank, op) in self._attempted:
                    self._trouble(op, None)  # no verdict: it wants new lanes, and runs again

    def pass_time(self) -> None:
        """Ask for a verdict on what takes too long (I6), and again for results that we lack."""
        for rank, op in self._open_ops():
            if self._host.now - self._attempted.get((rank, op), self._host.now) > OP_TIMEOUT_S:
                self._trouble(op, Verdict("OpTimedOut", f"op {op} at rank {rank}", (rank,)))
            if (rank, op) in self._asked and not self.fenced:
                self._ask(rank, op)

    # --- the op's own task

    def _open_ops(self) -> list[tuple[Rank, OpNumber]]:
        return [
            (rank, op)
            for rank, ledger in self.ledgers.items()
            for op, report in ledger.ops.items()
            if not (report.completed or report.verdict)
        ]

    def _settle(self) -> None:
        """The running attempts are cancelled; what was agreed on failures holds here too."""
        self._tokens, self._attempted, self._asked, self._troubles = {}, {}, {}, {}
        failed: list[tuple[Rank, OpNumber, Verdict]] = []
        for rank, ledger in self.ledgers.items():
            after = self.ledgers[rank] = ledgers.apply_failures(ledger, self.roster.outcomes)
            failed += [
                (rank, op, report.verdict)
                for op, report in after.ops.items()
                if report.verdict and report != ledger.ops[op]
            ]
        for rank, op, verdict in failed:  # all ranks first: they end together
            self.ends[rank, op] = verdict
        for rank, op, verdict in failed:
            self._end(rank, op, verdict)

    def _resume(self, rank: Rank, op: OpNumber) -> None:
        if self.fenced or (rank, op) in self._attempted or (rank, op) in self._asked:
            return  # behind the fence not even what was agreed before may reach a trainer (V3)
        outcome = outcome_of(self.roster, op)
        if outcome is None and self.roster.lost:
            outcome = OpOutcome(op, verdict=self.roster.lost[0])
        if outcome is None:
            self._attempt(rank, op)
        elif outcome.verdict is None:
            self._asked[rank, op] = -1
            self._ask(rank, op)
        else:
            self.ledgers[rank] = ledgers.fail(self.ledgers[rank], op, outcome.verdict)
            self._end(rank, op, outcome.verdict)

    def _attempt(self, rank: Rank, op: OpNumber) -> None:
        self._attempted[rank, op] = self._host.now
        call = self.ledgers[rank].ops[op].call
        own = self._token(rank, op, call)
        if call.kind == "broadcast" and call.root == rank:
            for other in range(len(self.roster.trainers)):
                if other != rank:
                    self._send(own, Rank(other))
            self._complete(rank, op, OpResult(self.roster.number, (own.value,)))
            return
        earlier = list(self._tokens.get((rank, op), {}).values())
        if call.kind == "all_reduce":
            self._tokens.setdefault((rank, op), {})[rank] = own
            earlier.insert(0, own)
        for token in earlier:
            self._take(token)

    def _token(self, rank: Rank, op: OpNumber, call: Call) -> Token:
        roster, value = self.roster, self.trainers[rank].value(op)
        return Token(roster.job, roster.born, roster.number, rank, op, rank, call, value)

    def _take(self, token: Token) -> None:
        """A token has come by, and this rank has called the op."""
        rank, op = token.to_rank, token.op
        call = self.ledgers[rank].ops[op].call if op in self.ledgers[rank].ops else token.call
        if token.call != call:  # O8: the first to see it asks for a verdict
            self._trouble(op, Verdict("OpMismatch", f"op {op}", (token.origin, rank)))
        elif call.kind == "broadcast":
            self._complete(rank, op, OpResult(self.roster.number, (token.value,)))
        else:
            following = Rank((rank + 1) % len(self.roster.trainers))
            if following != token.origin:
                self._send(token, following)
            tokens = self._tokens[rank, op]
            if len(tokens) == len(self.roster.trainers):
                values = tuple(tokens[Rank(i)].value for i in range(len(tokens)))
                self._complete(rank, op, OpResult(self.roster.number, values))

    def _take_retained(self, message: Retained) -> None:
        rank, op = message.to_rank, message.op
        report = self.ledgers[rank].ops.get(op)
        if report is None or (rank, op) not in self._asked:
            return  # an answer to an earlier ask has come already
        if message.call == report.call:
            self._complete(rank, op, message.result)
        else:
            self._trouble(op, Verdict("OpMismatch", f"op {op}", (rank,)))

    def _send(self, token: Token, to_rank: Rank) -> None:
        onward = Token(
            token.job,
            token.born,
            token.number,
            to_rank,
            token.op,
            token.origin,
            token.call,
            token.value,
        )
        self._host.send_on_lane(self.roster.trainers[to_rank].member, onward)

    def _ask(self, rank: Rank, op: OpNumber) -> None:
        """Each time another of the holders, so that one who is slow does not stop us."""
        outcome = outcome_of(self.roster, op)
        if outcome is not None and outcome.holders:
            self._asked[rank, op] += 1
            holder = outcome.holders[self._asked[rank, op] % len(outcome.holders)]
            self._host.ask_result(self.roster, op, holder, rank)

    def _complete(self, rank: Rank, op: OpNumber, result: OpResult) -> None:
        report = self.ledgers[rank].ops.get(op)
        if report is None or report.completed or report.verdict:
            return
        if self.fenced:
            self._held.append((rank, op, result))
            return
        self.ledgers[rank] = ledgers.complete(self.ledgers[rank], op)
        self._results[rank, op] = result
        self._end(rank, op, result)

    def _end(self, rank: Rank, op: OpNumber, outcome: OpResult | Verdict) -> None:
        self._troubles.pop(op, None)
        self.ends[rank, op] = outcome
        self._host.op_ended(self, rank, op)
        self._host.facts_changed()
        self.trainers[rank].ended(op, outcome)

    def _trouble(self, op: OpNumber, verdict: Verdict | None) -> None:
        if self._troubles.get(op) is None and (verdict or op not in self._troubles):
            self._troubles[op] = verdict
            self._host.facts_changed()


def _left(roster: Roster, rank: Rank) -> Verdict:
    name = roster.names[rank]
    return Verdict("RankLost", f"rank {rank} ({name}) is lost: its trainer left", (rank,))
