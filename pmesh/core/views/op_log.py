"""What one rank knows of its ops: started, ended, stable; the flush answer is read off it.

Frozen values and functions; the op's own task writes, the agreement reads.
"""

from collections.abc import Iterable, Mapping

import msgspec

from pmesh.core.values import OpOutcome
from pmesh.core.wire.calls import Call
from pmesh.core.wire.views import OpReport, RankReport
from pmesh.ids import OpNumber, TrainerId

NONE_YET = -1
"""The mark before op 0."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Ops of one rank; every op up to `stable` has ended at all ranks and is forgotten (O2)."""

    stable: int = NONE_YET
    ops: Mapping[OpNumber, OpReport] = msgspec.field(default_factory=dict[OpNumber, OpReport])

    @property
    def started(self) -> int:
        """The highest op started."""
        return max(self.ops, default=self.stable)

    @property
    def ended(self) -> int:
        """Every op up to this one has ended, well or badly."""
        mark = self.stable
        while (op := self.ops.get(OpNumber(mark + 1))) and (op.completed or op.verdict):
            mark += 1
        return mark


def start(ledger: Ledger, op: OpNumber, call: Call, *, is_root: bool = False) -> Ledger:
    """The trainer has called the op, perhaps as a broadcast's root."""
    report = OpReport(op, call, is_root=is_root)
    return Ledger(stable=ledger.stable, ops={**ledger.ops, op: report})


def complete(
    ledger: Ledger, op: OpNumber, contributors: tuple[TrainerId, ...], *, holds: bool = True
) -> Ledger:
    """The op's result, made of what these have given, stands here if it is for this rank."""
    report = msgspec.structs.replace(
        ledger.ops[op], completed=True, contributors=contributors, holds=holds
    )
    return Ledger(stable=ledger.stable, ops={**ledger.ops, op: report})


def pass_barriers(
    ledger: Ledger, last: OpNumber, call: Call, contributors: tuple[TrainerId, ...]
) -> Ledger:
    """All ops up to the last have completed, and none ended before all ranks had started it.

    So those before the last are stable (O2).
    """
    if last <= ledger.started:
        raise ValueError(f"op {last} after op {ledger.started}")
    report = OpReport(last, call, completed=True, contributors=contributors)
    return Ledger(stable=last - 1, ops={last: report})


def fail(ledger: Ledger, outcome: OpOutcome) -> Ledger:
    """The op has failed, here as everywhere; it keeps its number (O3)."""
    op = outcome.op
    report = msgspec.structs.replace(
        ledger.ops[op],
        completed=False,
        verdict=outcome.verdict,
        contributors=outcome.contributors,
    )
    return Ledger(stable=ledger.stable, ops={**ledger.ops, op: report})


def apply_failures(ledger: Ledger, outcomes: Iterable[OpOutcome]) -> Ledger:
    """Note what a view change has failed, also of ops that had ended here (I5)."""
    for outcome in outcomes:
        if outcome.verdict is not None and outcome.op in ledger.ops:
            ledger = fail(ledger, outcome)
    return ledger


def stabilize(ledger: Ledger, mark: int) -> Ledger:
    """Every op up to `mark` has ended at all ranks: outputs may be reused."""
    mark = min(mark, ledger.ended)
    if mark <= ledger.stable:
        return ledger
    return Ledger(stable=mark, ops={op: r for op, r in ledger.ops.items() if op > mark})


def report(ledger: Ledger, trainer: TrainerId) -> RankReport:
    """This rank's part of a flush answer (V3): the set of ops, not only the last."""
    ops = tuple(ledger.ops[op] for op in sorted(ledger.ops))
    return RankReport(trainer, ledger.stable, ops)
