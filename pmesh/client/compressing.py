"""One compressed call: which scheme it takes, and what its buckets come to."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pmesh.client.buckets import plan_buckets, read
from pmesh.client.calls import Arrays, Collective, Compression, LastOp, run_collective
from pmesh.client.compressed_ops import (
    Piece,
    Summed,
    add_in_ring,
    add_one_bit,
    add_random_k,
    add_top_k,
    add_uncompressed,
)
from pmesh.client.feedback import Feedback, Memory
from pmesh.client.low_rank import add_low_rank
from pmesh.client.op_session import OpSession
from pmesh.client.orders import Order
from pmesh.client.preparing import prepare_twins
from pmesh.client.shares import Shares, Told, tell
from pmesh.client.trees import digest
from pmesh.client.trials import Trials
from pmesh.compression.schemes import (
    Auto,
    OneBit,
    PowerSGD,
    RandomK,
    RingScheme,
    Scheme,
    TopK,
    spec,
)
from pmesh.core.session import World

ALONE = "alone: nothing is sent"


def run_compressed(
    session: OpSession,
    order: Order,
    wanted: Collective,
    arrays: Arrays,
    feedback: Feedback,
) -> tuple[list[object], LastOp | None]:
    """Run the ops; returns the leaves of the result, and what it came to (None: nothing to do)."""
    compression = wanted.compression
    if compression is None or not arrays.leaves:
        return run_collective(session, order, wanted, arrays)
    if len(session.world.trainers) == 1:
        leaves, last = run_collective(session, order, wanted, arrays)
        return leaves, last and replace(last, why=ALONE)
    memory = feedback.of(compression.scheme.model, arrays)
    call = _Call(session, wanted, compression, arrays, feedback, memory)
    if not all(isinstance(each, RingScheme) for each in call.allowed):
        prepare_twins(memory.count, wait=isinstance(compression.scheme, Auto))
    shares = call.tell() if call.must_tell else None
    picked = call.pick(shares)
    began_ns = time.perf_counter_ns()
    results, summed = call.run(picked, shares)
    call.succeeded(picked, time.perf_counter_ns() - began_ns)
    session.show_compression(picked.shown(compression.why))
    clipped = sum(each.clipped for each in summed)
    feedback.note_clipped(clipped, picked.name)
    done = summed[-1].done
    last = LastOp.among(done.op, order.seen(done.world), 4 * memory.count)
    return results, replace(
        last,
        compression=picked.name,
        why=picked.why or compression.why,
        compressed_bytes=sum(each.nbytes for each in summed) if picked.scheme else 0,
        residual_norm=memory.norm() if compression.feeds_back else None,
        clipped=clipped,
    )


@dataclass(frozen=True, slots=True)
class _Picked:
    """What one call takes."""

    scheme: Scheme | None
    why: str = ""
    trials: Trials | None = None
    """It is a trial of these."""

    @property
    def name(self) -> str:
        """The scheme's, for people and for the other ranks."""
        return "none" if self.scheme is None else spec(self.scheme)

    def shown(self, why: str) -> str:
        """For `pmesh status`, which is told only when it changes."""
        if self.trials is not None:
            return "auto(): each is tried in turn"
        return f"{self.name}: {self.why or why}".rstrip(": ")


@dataclass(frozen=True, slots=True)
class _Call:
    session: OpSession
    wanted: Collective
    compression: Compression
    arrays: Arrays
    feedback: Feedback
    memory: Memory

    @property
    def allowed(self) -> tuple[Scheme, ...]:
        """What it may take."""
        scheme = self.compression.scheme
        return scheme.schemes if isinstance(scheme, Auto) else (scheme,)

    @property
    def averages(self) -> bool:
        """Whether it is of gradients, with weights."""
        return self.wanted.weight is not None

    @property
    def must_tell(self) -> bool:
        """Whether the ranks have something to agree on first."""
        return self.averages or isinstance(self.compression.scheme, RandomK | Auto)

    @property
    def label(self) -> str:
        """Alike on two ranks only if they call the same with the same options (I5)."""
        what = "average_gradients" if self.averages else "all_reduce"
        same = [self.arrays.digest(), repr(self.compression), self.wanted.reduction]
        return f"{what} {digest(same)}"

    def tell(self) -> Shares:
        """Hear from all ranks, and go on with the step of the one that has come furthest."""
        weight = 1.0 if self.wanted.weight is None else self.wanted.weight
        trials = self.memory.trials
        told = Told(weight, self.memory.step, *(trials.tells() if trials else ()))
        shares = tell(
            self.session,
            told,
            label=self.label,
            spec=spec(self.compression.scheme),
            timeout_s=self.wanted.timeout_s,
        )
        self.memory.step = max(each.step for each in shares.told)
        return shares

    def pick(self, shares: Shares | None) -> _Picked:
        """What all ranks take."""
        scheme = self.compression.scheme
        starts = [each.start_step for each in self.allowed if isinstance(each, PowerSGD)]
        if self.averages and self.memory.step < max(starts, default=0):
            return _Picked(None, f"uncompressed before step {max(starts)}")
        if not isinstance(scheme, Auto) or shares is None:
            return _Picked(scheme)
        return self._pick_by_trial(scheme, shares)

    def _pick_by_trial(self, auto: Auto, shares: Shares) -> _Picked:
        ways = (None, *auto.schemes)
        trials = self.memory.trials
        if trials is None or trials.ways != len(ways):
            trials = self.memory.trials = Trials((), len(ways))
        trials.hear(shares.trainers, [(each.trials, each.took_ns) for each in shares.told])
        if trials.are_over:
            picked = ways[trials.winner(auto.min_gain)]
            return _Picked(picked, _comparison(ways, trials.best_ns()))
        return _Picked(ways[trials.next_way], f"trial {trials.progress()}", trials)

    def run(self, picked: _Picked, shares: Shares | None) -> tuple[list[object], list[Summed]]:
        """Bucket by bucket; the leaves of the result, and what each bucket came to."""
        whole = isinstance(picked.scheme, PowerSGD)
        buckets = plan_buckets(
            self.arrays.leaves,
            bucket_bytes=math.inf if whole else self.wanted.bucket_bytes,
            wire="float32",
        )
        keeps = self.compression.feeds_back and bool(picked.scheme or self.memory.residuals)
        if keeps:
            counts = tuple(bucket.count for bucket in buckets)
            in_ring = isinstance(picked.scheme, RingScheme)
            self.memory.divide(counts, self.session, in_arenas=in_ring)
        factor = shares.factor(self.session.world) if shares and self.averages else None
        results: list[object] = [None] * len(self.arrays.leaves)
        summed: list[Summed] = []
        for number, bucket in enumerate(buckets):
            piece = Piece(
                session=self.session,
                feedback=self.feedback,
                leaves=self.arrays.leaves,
                bucket=bucket,
                label=self.label,
                spec=picked.name,
                reduction="mean" if self.averages else self.wanted.reduction,
                strategy=self.wanted.strategy,
                factor=factor,
                correction=shares.correction if shares and self.averages else _no_correction,
                residuals=self.memory.residuals[number] if keeps else None,
                step=self.memory.step if self.must_tell else 0,
                number=number,
                timeout_s=self.wanted.timeout_s,
            )
            came = self._add(piece, picked.scheme)
            for index, array in _arrays_of(piece, came):
                results[index] = array
            summed.append(came)
        return results, summed

    def _add(self, piece: Piece, scheme: Scheme | None) -> Summed:
        if not piece.count:
            scheme = None
        match scheme:
            case None:
                came = add_uncompressed(piece)
            case TopK():
                came = add_top_k(piece, scheme)
            case RandomK():
                came = add_random_k(piece, scheme)
            case OneBit():
                came = add_one_bit(piece)
            case PowerSGD():
                goes_on = self.averages or self.compression.feeds_back
                came = add_low_rank(piece, scheme, self.memory if goes_on else None)
            case _:
                came = add_in_ring(piece)
        return came

    def succeeded(self, picked: _Picked, took_ns: int) -> None:
        """All ops are done, here and so on all ranks."""
        self.memory.step += 1
        if picked.trials is not None:
            picked.trials.tried(took_ns)


def _arrays_of(piece: Piece, came: Summed) -> Iterable[tuple[int, object]]:
    """The user's arrays, each with its index."""
    leaf = piece.only_leaf
    if leaf is None or not came.in_room:
        return read(piece.bucket, piece.leaves, came.values, came.divisor)
    if came.divisor is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            np.divide(came.values, np.float32(came.divisor), out=came.values)
    return [(piece.bucket.leaves[0], leaf.rebuild(came.values.reshape(leaf.values.shape)))]


def _no_correction(_: World) -> float:
    return 1.0


def _comparison(ways: Sequence[Scheme | None], best_ns: Sequence[int]) -> str:
    """What each way took, for a person.

    >>> _comparison((None, OneBit()), (60_000_000, 21_000_000))
    'tried on these ranks: none 60 ms, onebit() 21 ms'
    """
    names = ["none" if way is None else spec(way) for way in ways]
    pairs = zip(names, best_ns, strict=True)
    return "tried on these ranks: " + ", ".join(f"{name} {ns / 1e6:.3g} ms" for name, ns in pairs)
