"""Over many steps: what came out and what is still kept are, together, what went in."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import pytest

from pmesh.compression import one_bit, power_sgd, random_k, top_k
from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.power_sgd import PowerSGDPlan, plan_matrices

STEPS = 1000
COUNT = 240
SHAPES = [(12, 10), (5,), (3, 7, 5), (10,)]

ByRank = dict[int, Float32s]
"""float32[count] of each rank."""


class ReducedSum(NamedTuple):
    """What an all-reduce has come to."""

    out: Float32s
    given: Float32s
    """The exact sum, as float64, over those whose values are in `out`."""


class LossyReduce(Protocol):
    """One all-reduce among ranks, of which some are lost within it."""

    def __call__(
        self, own: ByRank, residuals: ByRank, *, step: int, lost: Collection[int]
    ) -> ReducedSum:
        """The sum over those who are left; replaces their residuals, and only theirs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ByTopK:
    k: int
    compact: bool

    def __call__(
        self, own: ByRank, residuals: ByRank, *, step: int, lost: Collection[int]
    ) -> ReducedSum:
        del step

        def compress(own: Float32s, wire: Bytes, before: Float32s, after: Float32s) -> None:
            top_k.compress(
                own, wire, k=self.k, compact=self.compact, residual=before, residual_out=after
            )

        def accumulate(wire: Bytes, into: Float32s) -> None:
            top_k.accumulate(wire, into, k=self.k, compact=self.compact)

        def wire_bytes(count: int) -> int:
            return top_k.wire_bytes(count, self.k, compact=self.compact)

        return _collected(
            own, residuals, lost, wire_bytes=wire_bytes, compress=compress, accumulate=accumulate
        )


def by_one_bit(own: ByRank, residuals: ByRank, *, step: int, lost: Collection[int]) -> ReducedSum:
    del step

    def compress(own: Float32s, wire: Bytes, before: Float32s, after: Float32s) -> None:
        one_bit.compress(own, wire, residual=before, residual_out=after)

    return _collected(
        own,
        residuals,
        lost,
        wire_bytes=one_bit.wire_bytes,
        compress=compress,
        accumulate=one_bit.accumulate,
    )


def _collected(
    own: ByRank,
    residuals: ByRank,
    lost: Collection[int],
    *,
    wire_bytes: Callable[[int], int],
    compress: Callable[[Float32s, Bytes, Float32s, Float32s], None],
    accumulate: Callable[[Bytes, Float32s], None],
) -> ReducedSum:
    """Everyone gets all payloads, and adds them up in rank order (I3)."""
    count = len(next(iter(own.values())))
    wires: dict[int, Bytes] = {}
    after: ByRank = {}
    for rank, values in own.items():
        wires[rank] = np.empty(wire_bytes(count), np.uint8)
        after[rank] = np.empty(count, np.float32)
        compress(values, wires[rank], residuals[rank], after[rank])
    total = np.zeros(count, np.float32)
    for rank in sorted(set(own) - set(lost)):
        accumulate(wires[rank], total)
        residuals[rank] = after[rank]
    return ReducedSum(total, exact_sum(own, set(own) - set(lost)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRandomK:
    k: int

    def __call__(
        self, own: ByRank, residuals: ByRank, *, step: int, lost: Collection[int]
    ) -> ReducedSum:
        count = len(next(iter(own.values())))
        key = random_k.draw_key(seed=1, job="test", op=step, bucket=0)
        indices = random_k.draw_indices(count, self.k, key)
        total = np.zeros(self.k, np.float32)
        for rank in sorted(set(own) - set(lost)):
            sent, after = np.empty(self.k, np.float32), np.empty(count, np.float32)
            random_k.compress(
                own[rank], indices, sent, residual=residuals[rank], residual_out=after
            )
            total += sent
            residuals[rank] = after
        out = np.empty(count, np.float32)
        random_k.decompress(total, indices, out)
        return ReducedSum(out, exact_sum(own, set(own) - set(lost)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPowerSGD:
    plan: PowerSGDPlan
    warm: dict[int, Float32s] = field(default_factory=dict[int, Float32s])
    """Each rank's Q's; all alike, but for one that is new."""

    def __call__(
        self, own: ByRank, residuals: ByRank, *, step: int, lost: Collection[int]
    ) -> ReducedSum:
        after = {rank: np.empty(self.plan.count, np.float32) for rank in own}
        firsts: list[Float32s] = []
        for rank, values in own.items():
            q, p = self._warm_q(rank, step), np.empty(self.plan.p_count, np.float32)
            power_sgd.compress(
                self.plan, values, q, p, residual=residuals[rank], residual_out=after[rank]
            )
            firsts.append(p)
        p = _mean(firsts)  # of all, and of those who are left the following
        power_sgd.orthogonalize(self.plan, p)
        survivors = sorted(set(own) - set(lost))
        seconds = []
        for rank in survivors:
            q = np.empty(self.plan.q_count, np.float32)
            power_sgd.project(self.plan, after[rank], p, q)
            seconds.append(q)
        q, out = _mean(seconds), np.empty(self.plan.count, np.float32)
        for rank in survivors:
            power_sgd.decompress(self.plan, p, q, out, residual_out=after[rank])
            residuals[rank] = after[rank]
            self.warm[rank] = q.copy()
            power_sgd.warm_up(self.plan, self.warm[rank], key=step)
        return self._sum(own, survivors, out)

    def _sum(self, own: ByRank, survivors: list[int], out: Float32s) -> ReducedSum:
        """What goes uncompressed goes with the P's: who is lost after these is in it."""
        given = exact_sum(own, survivors)
        total = out * np.float32(len(survivors))
        for start, end in self.plan.rest:
            given[start:end] = exact_sum(own, own)[start:end]
            total[start:end] = out[start:end] * np.float32(len(own))
        return ReducedSum(total, given)

    def _warm_q(self, rank: int, step: int) -> Float32s:
        if rank not in self.warm:
            self.warm[rank] = np.zeros(self.plan.q_count, np.float32)
            power_sgd.warm_up(self.plan, self.warm[rank], key=step)
        return self.warm[rank]


def exact_sum(arrays: ByRank, ranks: Collection[int]) -> Float32s:
    """In float64, which has room for it."""
    total: Float32s = np.sum([arrays[rank] for rank in ranks], axis=0, dtype=np.float64)
    return total


def _mean(arrays: list[Float32s]) -> Float32s:
    total = arrays[0].copy()
    for each in arrays[1:]:
        total += each
    return total / np.float32(len(arrays))


EXACT: dict[str, LossyReduce] = {
    "topk": ByTopK(k=12, compact=False),
    "topk compact": ByTopK(k=12, compact=True),
    "randomk": ByRandomK(k=24),
}
"""Those that only move values or cut bits off: sums of dyadic values have no rounding at all."""


def rounding(name: str) -> LossyReduce:
    """Those that compute means and products."""
    if name == "onebit":
        return by_one_bit
    plan = plan_matrices(SHAPES, rank=int(name[-1]), min_rate=1)
    assert plan.count == COUNT
    assert len(plan.matrices) == 2
    return ByPowerSGD(plan=plan)


ROUNDING = ["onebit", "powersgd 1", "powersgd 2"]


@dataclass(slots=True)
class FourRanks:
    """A job of four ranks, from its first step on."""

    scheme: LossyReduce
    ranks: set[int] = field(default_factory=lambda: set(range(4)))
    residuals: ByRank = field(
        default_factory=lambda: {rank: np.zeros(COUNT, np.float32) for rank in range(4)}
    )
    """Of those who were lost, too: what they had when they contributed for the last time."""
    given: Float32s = field(default_factory=lambda: np.zeros(COUNT, np.float64))
    came_out: Float32s = field(default_factory=lambda: np.zeros(COUNT, np.float64))
    largest: float = 0.0

    def step(self, number: int, *, lost: Collection[int] = ()) -> None:
        """Ranks have gradients of their own around a mean that is everyone's."""
        own: ByRank = {}
        for rank in sorted(self.ranks):
            rng = np.random.default_rng((number, rank))
            noise = rng.integers(-64, 65, COUNT) * np.linspace(0.05, 1, COUNT)
            own[rank] = (np.round(noise + np.arange(COUNT) % 7) / 64).astype(np.float32)
            values = own[rank] + self.residuals[rank]
            self.largest = max(self.largest, float(np.abs(values).max()))
        out, given = self.scheme(own, self.residuals, step=number, lost=lost)
        self.largest = max(self.largest, float(np.abs(out).max()))
        self.ranks -= set(lost)
        self.given += given
        self.came_out += out

    def join(self, rank: int) -> None:
        """A new rank begins with nothing kept."""
        self.ranks.add(rank)
        self.residuals[rank] = np.zeros(COUNT, np.float32)

    @property
    def kept(self) -> Float32s:
        """By all ranks that there were."""
        return exact_sum(self.residuals, self.residuals)


def run_to_the_end(scheme: LossyReduce, *, losses: bool) -> FourRanks:
    run = FourRanks(scheme)
    for number in range(STEPS):
        if losses and number == 500:
            run.join(4)
        run.step(number, lost={300: {1}, 700: {0, 4}}.get(number, ()) if losses else ())
    assert len(run.ranks) == (2 if losses else 4)
    return run


losses_or_not = pytest.mark.parametrize("losses", [False, True], ids=["whole", "with losses"])


@losses_or_not
@pytest.mark.parametrize("name", EXACT)
def test_not_a_bit_is_lost_between_what_went_in_and_what_came_out(
    name: str,
    losses: bool,  # noqa: FBT001 - a parameter
) -> None:
    run = run_to_the_end(EXACT[name], losses=losses)
    np.testing.assert_array_equal(run.given, run.came_out + run.kept)
    assert np.abs(run.given).max() > 300  # there was something to lose


@losses_or_not
@pytest.mark.parametrize("name", ROUNDING)
def test_no_more_is_lost_than_fp32_rounds_away(
    name: str,
    losses: bool,  # noqa: FBT001 - a parameter
) -> None:
    run = run_to_the_end(rounding(name), losses=losses)
    # In a step each of up to four ranks rounds when it adds its residual and when it subtracts what
    # came out, and the sum of what came out is rounded up to three times.
    roundings = STEPS * (2 * 4 + 3)
    allowed = roundings * 2.0**-24 * run.largest
    difference = np.abs(run.given - (run.came_out + run.kept)).max()
    assert difference <= allowed
    assert allowed < 0.001 * np.abs(run.given).max()


@pytest.mark.parametrize("name", [*EXACT, *ROUNDING])
def test_what_is_kept_does_not_grow(name: str) -> None:
    run = FourRanks(EXACT[name] if name in EXACT else rounding(name))
    for number in range(100):
        run.step(number)
    early = float(np.linalg.norm(run.kept))
    for number in range(100, 400):
        run.step(number)
    assert float(np.linalg.norm(run.kept)) < 1.5 * early
    assert np.abs(run.kept).max() < 0.2 * np.abs(run.given).max()
