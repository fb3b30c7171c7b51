"""A mesh of ranks in one process that adds up by one of the trainers' schemes, and loses ranks."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from pmesh.compression import one_bit, power_sgd, random_k, top_k
from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.power_sgd import Plan

ByRank = dict[int, Float32s]
"""float32[count] of each rank."""


class Sum(NamedTuple):
    """What an all-reduce has come to."""

    out: Float32s
    given: Float32s
    """The exact sum, as float64, over those whose values are in `out`."""


class Scheme(Protocol):
    """One all-reduce among ranks, of which some are lost within it."""

    def __call__(self, own: ByRank, residuals: ByRank, *, step: int, lost: Collection[int]) -> Sum:
        """The sum over those who are left; replaces their residuals, and only theirs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ByTopK:
    k: int
    compact: bool

    def __call__(self, own: ByRank, residuals: ByRank, *, step: int, lost: Collection[int]) -> Sum:
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


def by_one_bit(own: ByRank, residuals: ByRank, *, step: int, lost: Collection[int]) -> Sum:
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
) -> Sum:
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
    return Sum(total, exact_sum(own, set(own) - set(lost)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRandomK:
    k: int

    def __call__(self, own: ByRank, residuals: ByRank, *, step: int, lost: Collection[int]) -> Sum:
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
        return Sum(out, exact_sum(own, set(own) - set(lost)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPowerSGD:
    plan: Plan
    warm: dict[int, Float32s] = field(default_factory=dict[int, Float32s])
    """Each rank's Q's; all alike, but for one that is new."""

    def __call__(self, own: ByRank, residuals: ByRank, *, step: int, lost: Collection[int]) -> Sum:
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

    def _sum(self, own: ByRank, survivors: list[int], out: Float32s) -> Sum:
        """What goes uncompressed goes with the P's: who is lost after these is in it."""
        given = exact_sum(own, survivors)
        total = out * np.float32(len(survivors))
        for start, end in self.plan.rest:
            given[start:end] = exact_sum(own, own)[start:end]
            total[start:end] = out[start:end] * np.float32(len(own))
        return Sum(total, given)

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
