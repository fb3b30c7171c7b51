"""One compressed call: which scheme it takes, and the sum of each of its buckets.

The ranks first exchange their weights exactly, in a small op. So the weight of a rank that is lost
later can be left out of the mean.
"""

import math
import struct
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pmesh.client.collective.bucketed import (
    Arrays,
    Collective,
    LastOp,
    checked_total,
    read,
    run_collective,
)
from pmesh.client.collective.buckets import plan_buckets
from pmesh.client.collective.guard import culprits_of, given_by, run_guarded, without
from pmesh.client.feedback.kernels import (
    BucketSum,
    Summed,
    add_in_ring,
    add_low_rank,
    add_one_bit,
    add_random_k,
    add_top_k,
    add_uncompressed,
)
from pmesh.client.feedback.memory import Feedback, Memory, Trials
from pmesh.client.session.rows import exchange_rows
from pmesh.client.session.session import TrainerSession
from pmesh.client.trees.arrays import digest
from pmesh.compression.schemes import (
    Auto,
    OneBit,
    PowerSGD,
    RandomK,
    RingScheme,
    Scheme,
    TopK,
    scheme_of,
    spec,
)
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.errors import UnsupportedCompression
from pmesh.ids import TrainerId

NONE = "none"
_ADDED = ("sum", "mean")
_ROUND_THE_RING = ("", "ring")


@dataclass(frozen=True, slots=True)
class Compression:
    """How a call's values are compressed."""

    scheme: Scheme
    feeds_back: bool
    """True if the next call adds what this one leaves out."""
    why: str = ""
    """The reason for the scheme, if the call did not name it."""


def chosen(
    named: Scheme | str | None, arrays: Arrays, *, reduction: str, strategy: str
) -> Compression | None:
    """Return the compression of an all-reduce; None if nothing is compressed.

    Args:
        named: the scheme that the call names.
        arrays: the values.
        reduction: how they are reduced.
        strategy: the strategy that the call names; empty for any.

    Raises:
        UnsupportedCompression: the scheme is invalid, or does not fit the call; says what does.
    """
    if named is None or named == NONE:
        return None
    scheme = scheme_of(named)
    if reduction not in _ADDED:
        raise UnsupportedCompression(f"what is compressed is added: sum or mean, not {reduction!r}")
    _check_dtypes(arrays)
    if not _supports(scheme, strategy):
        raise UnsupportedCompression(
            f"{type(scheme).__name__} goes round the ring: strategy is 'auto' or 'ring', "
            f"not {strategy!r}"
        )
    return Compression(scheme, feeds_back=scheme.error_feedback is True)


def chosen_for_gradients(
    named: Scheme | str | None, default: str, arrays: Arrays, *, strategy: str
) -> Compression | None:
    """Return the compression of an average of gradients.

    The agent's default is for gradients only: training tolerates that they are less exact, and the
    next call adds what was left out of this one. If the call names a strategy that the default does
    not support, nothing is compressed.

    Args:
        named: the scheme that the call names.
        default: the agent's scheme, for calls that name none.
        arrays: the gradients.
        strategy: the strategy that the call names; empty for any.

    Raises:
        UnsupportedCompression: as for `chosen`.
    """
    why = ""
    if named is None and default and _supports(scheme_of(default), strategy):
        named, why = default, "the default of this machine's agent"
    compression = chosen(named, arrays, reduction="mean", strategy=strategy)
    if compression is None:
        return None
    return Compression(compression.scheme, compression.scheme.feeds_back, why)


def _supports(scheme: Scheme, strategy: str) -> bool:
    return strategy in _ROUND_THE_RING or isinstance(scheme, RandomK | PowerSGD)


def _check_dtypes(arrays: Arrays) -> None:
    for path, leaf in zip(arrays.tree.paths, arrays.leaves, strict=True):
        if leaf.wire not in ("float32", "float64"):
            raise UnsupportedCompression(
                f"{path + ': ' if path else ''}float32, float16, bfloat16 and float64 (as float32) "
                f"can be compressed, not {leaf.dtype}"
            )


class Share(NamedTuple):
    """What one rank contributes to a call besides its values."""

    weight: float = 1.0
    step: int = 0
    """The step of its memory."""
    trials: int = 0
    """See `Trials.compare`."""
    took_ns: int = 0
    left_out: bool = False
    """True if its values are NaN or infinite; its weight is 0 then."""

    def to_row(self) -> list[int]:
        """Return the share as int64 values; the first has the bits of the weight."""
        (bits,) = struct.unpack("<q", struct.pack("<d", self.weight))
        return [bits, self.step, self.trials, self.took_ns]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> "Share":
        """Return the share that `to_row` has described."""
        (weight,) = struct.unpack("<d", struct.pack("<q", row[0]))
        step, trials, took_ns = row[1:4]
        return cls(weight, step, trials, took_ns)


@dataclass(frozen=True, slots=True)
class SharesOfRanks:
    """The shares of all ranks, in the ring's order."""

    of: dict[TrainerId, Share]

    def factor(self, world: World) -> float | None:
        """Return the factor for this rank's values in a plain mean; None for 1.

        Raises:
            UsageError: the weights add up to 0; all ranks raise it.
        """
        total = checked_total(self._total(self.of))
        factor = self.of[world.trainers[world.rank]].weight * len(self.of) / total
        return None if factor == 1 else factor

    def correction(self, world: World) -> float:
        """Return the factor for a mean over these ranks, if others were lost since the exchange.

        Raises:
            UsageError: the weights of the ranks that are left add up to 0; all ranks raise it.
        """
        if set(world.trainers) == set(self.of):
            return 1.0
        total = checked_total(self._total(world.trainers))
        return self._total(self.of) * len(world.trainers) / (len(self.of) * total)

    def _total(self, trainers: Collection[TrainerId]) -> float:
        return sum(share.weight for trainer, share in self.of.items() if trainer in trainers)


ALONE = "alone: nothing is sent"


def run_compressed(
    session: TrainerSession,
    wanted: Collective,
    compression: Compression,
    arrays: Arrays,
    feedback: Feedback,
) -> tuple[list[object], LastOp | None]:
    """Run the ops; return the leaves of the result, and the last op (None if there are none)."""
    if not arrays.leaves:
        return run_collective(session, wanted, arrays)
    if len(session.world.trainers) == 1:
        run = run_collective if wanted.on_nonfinite == "keep" else run_guarded
        leaves, last = run(session, wanted, arrays)
        return leaves, last and replace(last, why=ALONE)
    memory = feedback.of(compression.scheme.model, arrays)
    feedback.give_back(session)
    call = _FeedbackCall(session, wanted, compression, arrays, feedback, memory)
    shares = call.exchange_shares() if call.has_shares else None
    picked = call.pick(shares)
    began_ns = time.perf_counter_ns()
    results, summed = call.run(picked, shares)
    call.succeeded(picked, time.perf_counter_ns() - began_ns)
    session.show_compression(picked.shown(compression.why))
    clipped = sum(each.clipped for each in summed)
    feedback.note_clipped(clipped, picked.name)
    done = summed[-1].done
    left_out = [who for who, share in shares.of.items() if share.left_out] if shares else ()
    last = without(LastOp.among(done.op, done.world, 4 * memory.count), left_out, done.world)
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
    """The scheme that one call takes, and why."""

    scheme: Scheme | None
    why: str = ""
    trials: Trials | None = None
    """The trials, if this call is one of them."""

    @property
    def name(self) -> str:
        """The name of the scheme, for people and for the other ranks."""
        return "none" if self.scheme is None else spec(self.scheme)

    def shown(self, why: str) -> str:
        """Return the text for `pmesh status`."""
        if self.trials is not None:
            return "auto(): each is tried in turn"
        return f"{self.name}: {self.why or why}".rstrip(": ")


@dataclass(frozen=True, slots=True)
class _FeedbackCall:
    session: TrainerSession
    wanted: Collective
    compression: Compression
    arrays: Arrays
    feedback: Feedback
    memory: Memory

    @property
    def allowed(self) -> tuple[Scheme, ...]:
        """The schemes that the call may take."""
        scheme = self.compression.scheme
        return scheme.schemes if isinstance(scheme, Auto) else (scheme,)

    @property
    def averages(self) -> bool:
        """True if the call averages gradients, with weights."""
        return self.wanted.weight is not None

    @property
    def guards(self) -> bool:
        """True if gradients that are NaN or infinite are not kept."""
        return self.wanted.on_nonfinite != "keep"

    @property
    def has_shares(self) -> bool:
        """True if the ranks must exchange something first."""
        return self.averages or isinstance(self.compression.scheme, RandomK | Auto)

    @property
    def label(self) -> str:
        """A label that is equal on two ranks only if their calls and options are (I5)."""
        what = "average_gradients" if self.averages else "all_reduce"
        same = [self.arrays.digest(), repr(self.compression), self.wanted.reduction]
        if self.guards:
            same.append(self.wanted.on_nonfinite)
        return f"{what} {digest(same)}"

    def exchange_shares(self) -> SharesOfRanks:
        """Exchange the shares of all ranks, and continue with the highest step.

        Raises:
            NonFiniteGradients: as `wanted.on_nonfinite` says; all ranks raise it.
        """
        weight = 1.0 if self.wanted.weight is None else self.wanted.weight
        trials = self.memory.trials
        done_trials, took_ns = trials.latest() if trials else (0, 0)
        own = Share(weight, self.memory.step, done_trials, took_ns)
        row, name = own.to_row(), spec(self.compression.scheme)
        if self.guards:
            row.append(int(given_by(self.arrays, weight)))
        name = name if "(" in name else f"{name}()"  # so that no ring codec compresses these
        call = Call("exchange", "int64", (len(row),), tree=self.label, compression=name)
        rows, done = exchange_rows(self.session, row, call, timeout_s=self.wanted.timeout_s)
        trainers = self.session.world.trainers
        of = dict(zip(trainers, map(Share.of_row, rows), strict=True))
        if self.guards:
            given = [rows[place][-1] for place in self.session.places]
            for rank in culprits_of(given, done.world.names, self.wanted.on_nonfinite):
                culprit = done.world.trainers[rank]
                of[culprit] = of[culprit]._replace(weight=0.0, left_out=True)
        shares = SharesOfRanks(of)
        self.memory.step = max(each.step for each in shares.of.values())
        return shares

    def pick(self, shares: SharesOfRanks | None) -> _Picked:
        """Pick the scheme, the same on all ranks."""
        scheme = self.compression.scheme
        starts = [each.start_step for each in self.allowed if isinstance(each, PowerSGD)]
        if self.averages and self.memory.step < max(starts, default=0):
            return _Picked(None, f"uncompressed before step {max(starts)}")
        if not isinstance(scheme, Auto) or shares is None:
            return _Picked(scheme)
        return self._pick_by_trial(scheme, shares)

    def _pick_by_trial(self, auto: Auto, shares: SharesOfRanks) -> _Picked:
        ways = (None, *auto.schemes)
        trials = self.memory.trials
        if trials is None or trials.ways != len(ways):
            trials = self.memory.trials = Trials((), len(ways))
        trials.compare({who: (each.trials, each.took_ns) for who, each in shares.of.items()})
        if trials.are_over:
            picked = ways[trials.winner(auto.min_gain)]
            return _Picked(picked, _comparison(ways, trials.best_ns()))
        return _Picked(ways[trials.next_way], f"trial {trials.progress()}", trials)

    def run(
        self, picked: _Picked, shares: SharesOfRanks | None
    ) -> tuple[list[object], list[Summed]]:
        """Add up bucket by bucket; return the leaves of the result, and the sum of each bucket."""
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
            piece = BucketSum(
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
                step=self.memory.step if self.has_shares else 0,
                number=number,
                timeout_s=self.wanted.timeout_s,
            )
            came = self._add(piece, picked.scheme)
            for index, array in _arrays_of(piece, came):
                results[index] = array
            summed.append(came)
        return results, summed

    def _add(self, piece: BucketSum, scheme: Scheme | None) -> Summed:
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
        """Note that all ops have succeeded here, and so on all ranks."""
        self.memory.step += 1
        if picked.trials is not None:
            picked.trials.note(took_ns)


def _arrays_of(piece: BucketSum, came: Summed) -> Iterable[tuple[int, object]]:
    """Return the user's arrays, each with its index."""
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
    """Describe what each way took, for a person.

    >>> _comparison((None, OneBit()), (60_000_000, 21_000_000))
    'tried on these ranks: none 60 ms, onebit() 21 ms'
    """
    names = ["none" if way is None else spec(way) for way in ways]
    pairs = zip(names, best_ns, strict=True)
    return "tried on these ranks: " + ", ".join(f"{name} {ns / 1e6:.3g} ms" for name, ns in pairs)
