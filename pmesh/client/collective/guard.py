"""Gradients that are NaN or infinite: all ranks notice, name the rank, and do the same.

One such value makes the mean NaN or infinite, and the mean has the same bits on all ranks. So each
rank looks at the mean, and asks no other as long as it is finite. If it is not, the ranks tell each
other, in one small op, whose gradients are to blame. A compressed mean may hide such a value: there
the ranks tell it along with their weights, before they send any.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import get_args

import numpy as np

from pmesh.client.collective.bucketed import (
    Arrays,
    Collective,
    LastOp,
    OnNonfinite,
    run_collective,
)
from pmesh.client.session.rows import exchange_rows
from pmesh.client.session.session import TrainerSession
from pmesh.client.trees.arrays import Leaf
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.errors import NonFiniteGradients, UsageError
from pmesh.ids import Rank, TrainerId

_EXPONENT = np.uint16(0x7F80)  # of bfloat16: all ones for infinity and NaN

_logger = logging.getLogger("pmesh")


class Given(IntEnum):
    """What a rank has to give to an average."""

    NOTHING = 0
    """Its weight is 0, so its gradients are not read."""
    FINITE = 1
    NONFINITE = 2
    """One of its gradients is NaN or infinite."""


def check_mode(mode: object) -> None:
    """Raise UsageError if `on_nonfinite` can't be this."""
    if mode not in get_args(OnNonfinite):
        raise UsageError(f"on_nonfinite is one of {get_args(OnNonfinite)}, not {mode!r}")


def all_finite(values: Values) -> bool:
    """Return True if no value is NaN or infinite, in one pass as long as the sum is finite."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def _is_finite(leaf: Leaf) -> bool:
    if leaf.dtype == "bfloat16":
        return not ((leaf.values & _EXPONENT) == _EXPONENT).any()
    return all_finite(leaf.values)


def given_by(arrays: Arrays, weight: float | None) -> Given:
    """Return what this rank has to give; MLX's gradients are evaluated for that."""
    if weight == 0:
        return Given.NOTHING
    finite = all(map(_is_finite, arrays.evaluated().leaves))
    return Given.FINITE if finite else Given.NONFINITE


def culprits_of(given: Sequence[int], names: Sequence[str], mode: OnNonfinite) -> tuple[Rank, ...]:
    """Return the ranks whose gradients are left out, with a warning; none if all are finite.

    Args:
        given: what each rank has to give, as `Given`.
        names: the machine of each.
        mode: what to do, "raise" or "skip".

    Raises:
        NonFiniteGradients: with "raise"; with "skip" if no rank is left that has something to give.
    """
    culprits = tuple(Rank(rank) for rank, own in enumerate(given) if own == Given.NONFINITE)
    if not culprits:
        return ()
    who = " and ".join(f"rank {rank} ({names[rank]})" for rank in culprits)
    text = f"the gradients of {who} are NaN or infinite"
    if mode == "raise":
        raise NonFiniteGradients(f"{text}; no rank gets a mean", culprits)
    if Given.FINITE not in given:
        raise NonFiniteGradients(f"{text}, and no other rank has gradients", culprits)
    _logger.warning("%s; they are left out of the mean", text)
    return culprits


@dataclass(frozen=True, slots=True)
class Watch:
    """Looks at what comes out of the ops of a call."""

    suspects: set[TrainerId] = field(default_factory=set[TrainerId])
    """The ranks that took part where a value is NaN or infinite."""

    def look(self, values: Values, world: World) -> None:
        """Look at the result of an op."""
        if not all_finite(values):
            self.suspects.update(world.trainers)


def run_guarded(
    session: TrainerSession, wanted: Collective, arrays: Arrays
) -> tuple[list[object], LastOp | None]:
    """Do as `run_collective`; if the mean is not finite, do what `wanted.on_nonfinite` says.

    Raises:
        NonFiniteGradients: see `culprits_of`; or each rank's gradients are finite, but not the sum.
    """
    left_out: set[TrainerId] = set()
    while True:
        watch = Watch()
        results, last = run_collective(session, wanted, arrays, watch.look)
        if last is None or not watch.suspects:
            return results, last and without(last, left_out, session.ranks)
        call = Call("exchange", "int64", (1,), tree=f"finite {wanted.on_nonfinite}")
        row = [int(given_by(arrays, wanted.weight))]
        rows, done = exchange_rows(session, row, call, timeout_s=wanted.timeout_s)
        world = done.world
        given = [rows[place][0] for place in session.places]
        culprits = culprits_of(given, world.names, wanted.on_nonfinite)
        if not culprits and watch.suspects.issubset(world.trainers):
            raise NonFiniteGradients(
                "the mean is infinite, although the gradients of each rank are finite: their sum "
                "is too large for float32"
            )
        # Without a culprit it is a rank that was lost meanwhile: the others average once more.
        left_out.update(world.trainers[rank] for rank in culprits)
        if world.rank in culprits:
            wanted = replace(wanted, weight=0.0)


def check_alone(wanted: Collective, arrays: Arrays, world: World) -> None:
    """Raise NonFiniteGradients if this rank is alone, and its gradients are not finite."""
    if wanted.on_nonfinite != "keep":
        given = [Given.NOTHING] * len(world.names)
        given[world.rank] = given_by(arrays, wanted.weight)
        culprits_of(given, world.names, wanted.on_nonfinite)


def without(last: LastOp, left_out: Collection[TrainerId], world: World) -> LastOp:
    """Return the facts about an op whose result has nothing of these ranks."""
    if not left_out:
        return last
    kept = [rank for rank in last.contributors if world.trainers[rank] not in left_out]
    return replace(last, contributors=tuple(kept), names=tuple(last.names[rank] for rank in kept))
