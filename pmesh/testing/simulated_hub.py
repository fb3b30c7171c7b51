"""Where the ranks of a simulated mesh meet: each op is computed once all of them have called it.

A compressed all-reduce gives the bits that a real ring gives, hop after hop.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import NamedTuple, cast

import numpy as np

from pmesh.client.link.p2p_session import Arrived
from pmesh.client.link.session import error_of
from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import Codec, codec_of
from pmesh.core.ops.coded import coded_chunks, draw_key, hop_terms, ring_codec_name
from pmesh.core.ops.reductions import WIRE_DTYPES, Values, accumulate, finish
from pmesh.core.values import Verdict
from pmesh.core.wire.link import Envelope
from pmesh.core.wire.local import StartOp
from pmesh.errors import PmeshError
from pmesh.ids import OpNumber, TrainerId


@dataclass(frozen=True, slots=True)
class Coded:
    """One rank's part."""

    own: Float32s
    residual: Float32s | None = None
    residual_out: Float32s | None = None
    """Written."""


def reduce_coded(
    codec: Codec, ranks: Sequence[Coded], *, reduction: str, op: int
) -> tuple[Float32s, list[int]]:
    """The result, the same for all ranks, and how many values each has clipped.

    Args:
        codec: what encodes at every hop.
        ranks: in ring order; of one rank alone nothing is encoded.
        reduction: sum or mean.
        op: its number, for codecs that draw lots.
    """
    size, count = len(ranks), len(ranks[0].own)
    result, clipped = np.empty(count, np.float32), [0] * size
    if size == 1:
        add_residual(ranks[0], result)
        return result, clipped
    for chunk, pieces in enumerate(coded_chunks(size=size, count=count, codec=codec)):
        for piece in pieces:
            values, arrived = slice(piece.begin, piece.begin + piece.length), None
            for hop in range(size):
                rank = (chunk + hop) % size
                mine, outgoing = ranks[rank], np.empty(piece.nbytes, np.uint8)
                terms = hop_terms(codec, reduction, size=size, owner=hop == size - 1)
                clipped[rank] += codec.hop(
                    arrived,
                    mine.own[values],
                    outgoing,
                    own_scale=terms.own_scale,
                    divisor=terms.divisor,
                    residual=None if mine.residual is None else mine.residual[values],
                    residual_out=None if mine.residual_out is None else mine.residual_out[values],
                    draw=draw_key(op=op, rank=rank, begin=piece.begin, codec=codec),
                )
                arrived = outgoing
            assert arrived is not None  # noqa: S101 - there are at least two hops
            codec.decode(arrived, result[values])
    return result, clipped


def add_residual(alone: Coded, result: Float32s) -> None:
    """What a rank that is alone gets: nothing is encoded, and nothing is owed any more."""
    np.add(alone.own, 0 if alone.residual is None else alone.residual, out=result)
    if alone.residual_out is not None:
        alone.residual_out.fill(0)


@dataclass(frozen=True, slots=True)
class Given:
    """What one rank has called."""

    request: StartOp
    values: Values
    """Its own copy."""
    residual: Float32s | None = None
    """Likewise."""
    residual_out: Float32s | None = None
    """Written before any rank has the result."""


class Got(NamedTuple):
    """What an op has come to for one rank."""

    values: Values
    trainers: tuple[TrainerId, ...]
    """Who was in it."""
    clipped: int


@dataclass(slots=True)
class _Op:
    given: dict[TrainerId, Given] = field(default_factory=dict[TrainerId, Given])
    verdict: Verdict | None = None
    ended: tuple[TrainerId, ...] = ()
    """Who was in it."""
    coded: tuple[Float32s, list[int]] | None = None
    """Of a compressed all-reduce: computed once, for all."""


@dataclass(slots=True, eq=False)
class Transit:
    """One send or one receive."""

    wanted: tuple[TrainerId, ...]
    """Whom it may meet."""
    tag: int
    deadline: float
    envelope: Envelope | None = None
    """Of a send."""
    data: "Values | None" = None
    met: Arrived | None = None
    failed: PmeshError | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has met its other side, or can't any more."""
        return self.met is not None or self.failed is not None


class Hub:
    """One job, or one group, of threads."""

    def __init__(self, size: int) -> None:
        self.changed = Condition()
        self.came: list[TrainerId] = []
        """In order; some may be lost since."""
        self.ranks: list[TrainerId] = []
        """Those who are not."""
        self.lost = ""
        """Who was lost last, and why; empty: nobody."""
        self.transits: list[tuple[TrainerId, Transit]] = []
        """Sends and receives that have not met yet, and whose they are; in order."""
        self._size = size
        self._ops: dict[int, _Op] = {}

    def join(self, me: TrainerId, timeout_s: float) -> bool:
        """Wait until as many have come as there are to be; False: not in time, and it is undone."""
        with self.changed:
            self.came = sorted([*self.came, me])
            self.ranks = sorted([*self.ranks, me])
            self.changed.notify_all()
            if self.changed.wait_for(lambda: len(self.came) >= self._size, timeout_s):
                return True
            self.came = [other for other in self.came if other != me]
            self.ranks = [other for other in self.ranks if other != me]
            return False

    def lose(self, rank: TrainerId, why: str) -> None:
        """A rank is gone: what the others wait for, or call later, fails with RankLost."""
        with self.changed:
            if rank in self.ranks:
                self.ranks.remove(rank)
                self.lost = self.lost or f"rank {rank} is lost: {why}"
                self.changed.notify_all()

    def run(self, number: OpNumber, me: TrainerId, given: Given) -> Got:
        """This rank's result of an op.

        Raises:
            PmeshError: the op has failed, on all ranks alike.
        """
        deadline = time.monotonic() + given.request.timeout_s
        with self.changed:
            op = self._ops.setdefault(number, _Op())
            op.given[me] = given
            self._settle(number, op)
            left_s = max(0.0, deadline - time.monotonic())
            self.changed.wait_for(lambda: bool(op.ended) or bool(self.lost), left_s)
            if not op.ended:
                self._fail(number, op)
            if op.verdict is not None:
                raise error_of(op.verdict)
            given_in_order = [op.given[rank] for rank in op.ended]
            rank = op.ended.index(me)
            if given.request.call.kind == "all_reduce" and _codec_name(given):
                op.coded = op.coded or _reduced_by_codec(number, given_in_order)
                result, clipped = op.coded
                return Got(result.copy(), op.ended, clipped[rank])
        return Got(result_of(given_in_order, rank), op.ended, 0)

    def _settle(self, number: OpNumber, op: _Op) -> None:
        if op.ended or self.lost or not set(self.ranks) <= op.given.keys():
            return
        op.ended = tuple(self.ranks)
        calls = {rank: op.given[rank].request.call for rank in self.ranks}
        if len(set(calls.values())) > 1:
            said = "; ".join(f"rank {rank}: {call}" for rank, call in calls.items())
            op.verdict = Verdict("OpMismatch", f"op {number} differs: {said}")
        self.changed.notify_all()

    def _fail(self, number: OpNumber, op: _Op) -> None:
        """One verdict for all, also for those who call it later."""
        op.ended = tuple(op.given)
        if self.lost:
            op.verdict = Verdict("RankLost", f"op {number}: {self.lost}")
        else:
            call = next(iter(op.given.values())).request
            late = ", ".join(f"rank {rank}" for rank in self.ranks if rank not in op.given)
            text = f"op {number} ({call.call}) did not end within {call.timeout_s:g} s: "
            op.verdict = Verdict("OpTimedOut", f"{text}not started by {late}")
        self.changed.notify_all()


def result_of(given: Sequence[Given], rank: int) -> Values:
    """What a rank gets of an op, flat and its own; summed in the order of ranks.

    Args:
        given: by rank.
        rank: whose result.
    """
    request = given[rank].request
    kind, root = request.call.kind, request.call.root
    values = [one.values for one in given]
    result: Values = np.empty(0, WIRE_DTYPES[request.wire_dtype])
    match kind:
        case "broadcast":
            result = values[root].copy()
        case "reduce" if rank != root:
            pass
        case "all_reduce" | "reduce":
            result = _reduced(request.call.reduction, values)
        case "reduce_scatter":
            result = _cut(_reduced(request.call.reduction, values), request.parts)[rank].copy()
        case "scatter":
            result = _cut(values[root], given[root].request.parts)[rank].copy()
        case "all_to_all":
            result = np.concatenate([_cut(one.values, one.request.parts)[rank] for one in given])
        case "gather" if rank != root:
            pass
        case _ if kind != "barrier":  # all_gather, gather and the tables
            result = np.concatenate(values)
        case _:
            pass
    return result


def _codec_name(given: Given) -> str:
    return ring_codec_name(given.request.call.compression)


def _reduced_by_codec(number: OpNumber, given: Sequence[Given]) -> tuple[Float32s, list[int]]:
    ranks = [Coded(cast("Float32s", one.values), one.residual, one.residual_out) for one in given]
    codec, call = codec_of(_codec_name(given[0])), given[0].request.call
    return reduce_coded(codec, ranks, reduction=call.reduction, op=number)


def _reduced(reduction: str, values: Sequence[Values]) -> Values:
    def add(total: Values, more: Values) -> Values:
        accumulate(reduction, total, more)
        return total

    total = functools.reduce(add, values[1:], values[0].copy())
    finish(reduction, total, len(values))
    return total


def _cut(values: Values, parts: Sequence[int]) -> list[Values]:
    return list(np.split(values, np.cumsum(parts)[:-1].tolist()))
