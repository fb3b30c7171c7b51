"""O10: programs that make mistakes, catch the errors and go on, over agents that come and go."""

from collections.abc import Sequence
from random import Random

import pytest

from pmesh.core.jobs.call_count import COMPARE, MOST_COMPARED, CallCount
from pmesh.core.values import Verdict
from pmesh.core.wire.calls import Call
from pmesh.ids import OpNumber
from simulation import ops
from simulation.lane_messages import OpResult
from simulation.network import Timeline
from simulation.ranks import SimulatedRank
from tests.simulation.histories import agent_of, formed_cluster, ranks_of, run_until

CALLS, MISTAKEN = 40, 25
"""How many calls a program makes, and among which of them mistakes are."""
MISTAKES = 0.15
THINK_S = 0.05
SEEDS = 12


class CallingProgram:
    """Makes its calls one after the other, whatever becomes of each."""

    def __init__(
        self, rank: SimulatedRank, timeline: Timeline, script: int, random: Random
    ) -> None:
        self.count = CallCount()
        self.results: dict[int, bool] = {}
        """By the number of the call, whether it has succeeded."""
        self.over = False
        self._rank, self._timeline, self._script, self._random = rank, timeline, script, random
        self._left: list[Call] = []
        self._index, self._compared = 0, 0
        self._number = -1
        rank.value = self._value
        self._later()

    def _value(self, op: OpNumber) -> int:
        """What it puts into an op: who, which op, which call, and which of the call's ops."""
        return ((self._rank.id * 10_000 + op) * 1_000 + self.count.made) * 10 + self._index

    def _later(self) -> None:
        self._timeline.after(self._random.random() * THINK_S, self._begin)

    def _begin(self) -> None:
        if len(self.results) >= CALLS or self._rank.superseded is not None:
            self.over = True
            return
        self.count.begin()
        self._left = self._ops_of(self.count.made)
        self._index = self._compared = 0
        if self.count.doubtful:
            self._call(COMPARE)
        else:
            self._take_part()

    def _ops_of(self, made: int) -> list[Call]:
        """The ops of a call: alike on all ranks, but for mistakes, and often like the last ones."""
        script = Random(self._script * 1_000 + made)  # noqa: S311 - replays
        call = Call("all_reduce", "float32", (8,), "sum")
        if script.random() < 0.4:
            call = Call("broadcast", "float32", (8,), root=script.randrange(2))
        count = script.choice([1, 1, 2, 3])
        if made < MISTAKEN and self._random.random() < MISTAKES:
            barrier = Call("barrier", "float32", (0,), tree=f"a mistake of {self._rank.id}")
            return [barrier] * self._random.choice([1, 2])
        return [call] * count

    def _call(self, call: Call) -> None:
        self._number = self._rank.ledger.started + 1
        self._rank.replied = self._replied
        if call == COMPARE:
            self._compared += 1
        self.count.ops += 1
        ops.call_op(self._rank, call, 2.0)

    def _take_part(self) -> None:
        if self.count.why_skipped():
            self._end(succeeded=False)
        else:
            self._call(self._left.pop(0))

    def _replied(self, error: Verdict | None) -> None:
        comparing = self.count.doubtful
        if error is not None:
            again = error.error == "OpMismatch" and self._rank.ledger.started >= self._number
            if comparing and again and self._compared < MOST_COMPARED:
                self._call(COMPARE)
            else:
                self._end(succeeded=False)
            return
        values = self._given()
        if comparing:
            self.count.compared(max(value // 10 % 1_000 for value in values))
            self._take_part()
            return
        here = self._value(OpNumber(0)) % 10_000
        assert all(value % 10_000 == here for value in values), (self._rank, self._number, values)
        self._index += 1
        if self._left:
            self._call(self._left.pop(0))
        else:
            self._end(succeeded=True)

    def _given(self) -> Sequence[int]:
        """What the ranks have put into the op that has just ended here."""
        outcome = self._rank.ends[OpNumber(self._number)].outcome
        assert isinstance(outcome, OpResult)
        return outcome.values

    def _end(self, *, succeeded: bool) -> None:
        self.results[self.count.made] = succeeded
        if not succeeded:
            self.count.failed()
        self._later()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_call_meets_another_one_than_its_own(seed: int) -> None:
    random = Random(seed)  # noqa: S311 - replays
    size = random.choice([2, 2, 3, 4])
    cluster = formed_cluster(size, think_s=1e6, seed=seed)  # the trainers call nothing: we do
    ranks = [rank for _, rank in sorted(ranks_of(cluster).items())]
    programs = [
        CallingProgram(rank, cluster.timeline, seed, Random(seed * 100 + i))  # noqa: S311 - replays
        for i, rank in enumerate(ranks)
    ]
    if size > 2 and random.random() < 0.5:
        cluster.run_until(cluster.timeline.now + random.random())
        lost = ranks[-1]
        programs.remove(programs[-1])
        cluster.crash(agent_of(cluster, lost).number)
    run_until(cluster, lambda: all(program.over for program in programs), 200.0)
    assert any(not succeeded for p in programs for succeeded in p.results.values())
    for program in programs:
        last = range(CALLS - 4, CALLS + 1)
        assert all(program.results[made] for made in last), (seed, program.results)
