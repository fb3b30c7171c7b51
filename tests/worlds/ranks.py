"""Rosters, calls and failures of a job with two or three trainers."""

from collections.abc import Sequence

from pmesh.core.jobs.rank import RankState
from pmesh.core.values import OpOutcome, Primary, Roster, Trainer, Verdict
from pmesh.core.wire.calls import Call
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, OpNumber, Slot, TrainerId
from tests.worlds.builders import unsigned

A = Member(NodeId(bytes([1]) * 32), Incarnation(1))
BARRIER = Call("barrier", "float32", (0,))
ME, OTHER, THIRD = (TrainerId(i) for i in range(3))
FAILED = Verdict("OpTimedOut", "too late", (OTHER,))
ZERO, ONE = OpNumber(0), OpNumber(1)
RESULT = "a result"


def trainer(number: TrainerId, enters: OpNumber = ZERO) -> Trainer:
    return Trainer(number, A, Slot(number), unsigned(f"mac-{number}"), enters)


def roster(
    number: int,
    *outcomes: OpOutcome,
    trainers: Sequence[Trainer] = (trainer(ME), trainer(OTHER)),
    lost_holders: Sequence[Trainer] = (),
) -> Roster:
    born = Epoch(2, *A)
    return Roster(
        JobName("digits"),
        born,
        number,
        tuple(trainers),
        Primary(born, (A,)),
        TrainerId(9),
        outcomes=outcomes,
        lost_holders=tuple(lost_holders),
    )


def failed(op: OpNumber, verdict: Verdict = FAILED) -> OpOutcome:
    return OpOutcome(op, (ME, OTHER), verdict=verdict)


class RunsByItself(RankState[str]):
    """A rank that runs barriers without being asked, until it is recalled."""

    serves = True
    _ended: OpNumber | None = None

    def end_ops(self, last: OpNumber) -> None:
        """Ops up to the last one begin and end, and nobody is told."""
        assert self.serves
        self._ended = last

    def catch_up(self) -> None:
        if self._ended is not None:
            last, self._ended = self._ended, None
            self.complete_barriers(last, BARRIER, RESULT)

    def recall(self) -> None:
        super().recall()
        self.serves = False


def rank_of(*outcomes: OpOutcome, enters: OpNumber = ZERO) -> RankState[str]:
    me = trainer(ME, enters)
    return RankState(roster(2, *outcomes, trainers=[me, trainer(OTHER)]), me)
