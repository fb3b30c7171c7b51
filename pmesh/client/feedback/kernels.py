"""What each scheme does with the values of one bucket: its arithmetic and its ops, in order.

A rank's residual survives a failed op: each kernel writes the new residual beside the old one, and
they are swapped when the last op of the bucket is done (O9).

PowerSGD runs over a whole tree in two all-reduces: first of all P's and of what is not compressed,
then of the Q's (Vogels et al. 2019, algorithms 1 and 2; the arithmetic is in
`pmesh.compression.power_sgd`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np

from pmesh.client.collective.bucketed import fill
from pmesh.client.collective.buckets import Bucket
from pmesh.client.feedback.memory import Feedback, Memory
from pmesh.client.session.arenas import Residuals
from pmesh.client.session.session import Done, TrainerSession
from pmesh.client.trees.arrays import Leaf
from pmesh.compression import one_bit, power_sgd, random_k, top_k
from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.codecs import codec_of
from pmesh.compression.power_sgd import PowerSGDPlan, plan_matrices
from pmesh.compression.schemes import PowerSGD, RandomK, TopK
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSum:
    """One bucket of a call, and how it is added up."""

    session: TrainerSession
    feedback: Feedback
    leaves: Sequence[Leaf]
    bucket: Bucket
    label: str
    """The call's label, the same on all ranks (I5)."""
    spec: str
    reduction: str
    """Either sum or mean."""
    strategy: str
    factor: float | None
    """The factor for this rank's values; None for 1."""
    correction: Callable[[World], float]
    """Returns the factor for a mean over the ranks that are left."""
    residuals: Residuals | None
    step: int
    """How often such values have been compressed, the same on all ranks."""
    number: int
    """The number of the bucket in its call."""
    timeout_s: float

    @property
    def count(self) -> int:
        """The number of values."""
        return self.bucket.count

    def fill(self, region: Values) -> None:
        """Write this rank's values, times their factor, into a region."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinite
            fill(self.bucket, self.leaves, region, self.factor)

    @property
    def only_leaf(self) -> Leaf | None:
        """The only array, if it is one of float32: then the kernels may work in its memory."""
        if len(self.bucket.leaves) != 1:
            return None
        leaf = self.leaves[self.bucket.leaves[0]]
        return leaf if leaf.values.dtype == np.float32 else None

    def own(self) -> Float32s:
        """Return this rank's values, read-only, and only until `room` is called."""
        leaf = self.only_leaf
        if leaf is not None and self.factor is None and leaf.values.flags.c_contiguous:
            return cast("Float32s", leaf.values.reshape(-1))
        values = self.feedback.scratch(self.count)
        self.fill(values)
        return values

    def room(self) -> Float32s:
        """Return memory for the result: fresh if it becomes the user's array, else reused."""
        leaf = self.only_leaf
        if leaf is not None and not leaf.rebuild_copies:
            return np.empty(self.count, np.float32)
        return self.feedback.scratch(self.count)

    def kernel_residuals(self) -> dict[str, Float32s | None]:
        """Return the residuals as keyword arguments for the kernels."""
        if self.residuals is None:
            return {"residual": None, "residual_out": None}
        return {
            "residual": self.residuals.committed.values,
            "residual_out": self.residuals.attempt.values,
        }

    def commit(self) -> None:
        """Commit the new residual, once all ops are done."""
        if self.residuals is not None:
            self.residuals.swap()

    def run_op(
        self,
        kind: str,
        dtype: str,
        count: int,
        *,
        reduction: str = "",
        residuals: Residuals | None = None,
    ) -> Done:
        """Run an op on the values in the session's input."""
        call = Call(
            kind,
            dtype,
            (count,),
            reduction,
            tree=self.label,
            compression=self.spec,
            strategy=self.strategy,
        )
        return self.session.run_op(
            call, dtype, count, timeout_s=self.timeout_s, residuals=residuals
        )


class Summed(NamedTuple):
    """The sum, or mean, of one bucket."""

    values: Float32s
    """The values; read them before the next call."""
    divisor: float | None
    """The divisor of the values, the same on all ranks; None for 1."""
    done: Done
    """The last op."""
    nbytes: int
    """The size of this rank's compressed values."""
    clipped: int = 0
    in_room: bool = False
    """True if the values are in the memory of `BucketSum.room`; an only array may keep that."""


def add_uncompressed(piece: BucketSum) -> Summed:
    """Run an ordinary all-reduce, which adds what was left out before, and leaves nothing out."""
    region = piece.session.input_values("float32", piece.count, room_bytes=0)
    piece.fill(region)
    if piece.residuals is not None:
        np.add(region, piece.residuals.values, out=region)
        piece.residuals.attempt.values.fill(0)
    plain = replace(piece, spec="")
    done = plain.run_op("all_reduce", "float32", piece.count, reduction=piece.reduction)
    piece.commit()
    values = cast("Float32s", done.values)
    return Summed(values, inverse(piece.correction(done.world)), done, values.nbytes)


def add_in_ring(piece: BucketSum) -> Summed:
    """Run an all-reduce in which the agents compress at every hop (`pmesh.core.ops.coded`)."""
    region = piece.session.input_values("float32", piece.count, room_bytes=0)
    piece.fill(region)
    done = piece.run_op(
        "all_reduce",
        "float32",
        piece.count,
        reduction=piece.reduction,
        residuals=piece.residuals,
    )
    nbytes = codec_of(piece.spec).wire_bytes(piece.count)
    divisor = inverse(piece.correction(done.world))
    return Summed(cast("Float32s", done.values), divisor, done, nbytes, done.clipped)


def add_top_k(piece: BucketSum, scheme: TopK) -> Summed:
    """Collect the k largest values of each rank; all add them up in the order of ranks (I3)."""
    k = top_k.kept(piece.count, scheme.ratio)
    nbytes = top_k.wire_bytes(piece.count, k, compact=scheme.compact)

    def compress(own: Float32s, wire: Bytes) -> None:
        top_k.compress(own, wire, k=k, compact=scheme.compact, **piece.kernel_residuals())

    def accumulate(wire: Bytes, into: Float32s) -> None:
        top_k.accumulate(wire, into, k=k, compact=scheme.compact)

    return _add_collected(piece, nbytes, compress, accumulate)


def add_one_bit(piece: BucketSum) -> Summed:
    """Collect the signs of each rank, with mean magnitudes; all add them up as for TopK."""

    def compress(own: Float32s, wire: Bytes) -> None:
        one_bit.compress(own, wire, **piece.kernel_residuals())

    return _add_collected(piece, one_bit.wire_bytes(piece.count), compress, one_bit.accumulate)


def add_random_k(piece: BucketSum, scheme: RandomK) -> Summed:
    """Run an ordinary all-reduce of k values, at random indices, the same on all ranks."""
    k = top_k.kept(piece.count, scheme.ratio)
    key = random_k.draw_key(scheme.seed, piece.label, piece.step, piece.number)
    indices = random_k.draw_indices(piece.count, k, key)
    region = cast("Float32s", piece.session.input_values("float32", k, room_bytes=0))
    own = piece.own()
    random_k.compress(own, indices, region, **piece.kernel_residuals())
    done = piece.run_op("all_reduce", "float32", k, reduction=piece.reduction)
    out = piece.room()
    random_k.decompress(cast("Float32s", done.values), indices, out)
    piece.commit()
    return Summed(out, inverse(piece.correction(done.world)), done, 4 * k, in_room=True)


def _add_collected(
    piece: BucketSum,
    nbytes: int,
    compress: Callable[[Float32s, Bytes], None],
    accumulate: Callable[[Bytes, Float32s], None],
) -> Summed:
    wire = cast("Bytes", piece.session.input_values("uint8", nbytes, room_bytes=0))
    compress(piece.own(), wire)
    done = piece.run_op("collect", "uint8", nbytes)
    total = piece.room()
    total.fill(0)
    for payload in done.values.reshape(-1, nbytes):
        try:
            accumulate(cast("Bytes", payload), total)
        except ValueError as e:  # all ranks have the same bytes, so all raise it
            raise RunError(f"a rank has sent what is not {piece.spec}: {e}") from e
    piece.commit()
    ranks = len(done.world.trainers) if piece.reduction == "mean" else 1
    divisor = inverse(piece.correction(done.world) / ranks)
    return Summed(total, divisor, done, nbytes, in_room=True)


def inverse(factor: float) -> float | None:
    """Return the divisor for a factor; None for 1."""
    return None if factor == 1 else 1 / factor


def add_low_rank(piece: BucketSum, scheme: PowerSGD, memory: Memory | None) -> Summed:
    """Run two all-reduces, each a mean over its ranks, as a rank may be lost between the two.

    Args:
        piece: the whole tree.
        scheme: the options.
        memory: has the last power iteration, which is continued; None to start a new one.
    """
    shapes = [piece.leaves[index].values.shape for index in piece.bucket.leaves]
    plan = plan_matrices(shapes, rank=scheme.rank, min_rate=scheme.min_rate)
    key = random_k.draw_key(0, piece.label, piece.step, piece.number)
    begin = _begin(memory, piece.spec, plan, key)
    own = piece.own()
    region = cast("Float32s", piece.session.input_values("float32", plan.p_count, room_bytes=0))
    power_sgd.compress(plan, own, begin, region, **piece.kernel_residuals())
    first = piece.run_op("all_reduce", "float32", plan.p_count, reduction="mean")
    p = cast("Float32s", first.values.copy())  # the result lies in the agent's read-only memory
    power_sgd.orthogonalize(plan, p)
    second, q = first, begin  # if no matrix is worth it, there are no Q's
    if plan.q_count:
        left = own if piece.residuals is None else piece.residuals.attempt.values
        region = cast("Float32s", piece.session.input_values("float32", plan.q_count, room_bytes=0))
        power_sgd.project(plan, left, p, region)
        second = piece.run_op("all_reduce", "float32", plan.q_count, reduction="mean")
        q = cast("Float32s", second.values.copy())
    factor = _factor(piece, second)
    p[plan.rest_start :] *= np.float32(_factor(piece, first) / factor)
    out = piece.room()
    power_sgd.decompress(plan, p, q, out, residual_out=piece.kernel_residuals()["residual_out"])
    piece.commit()
    if memory is not None:
        power_sgd.warm_up(plan, q, key=key)
        memory.warm[piece.spec] = q
    nbytes = 4 * (plan.p_count + plan.q_count)
    return Summed(out, inverse(factor), second, nbytes, in_room=True)


def _begin(memory: Memory | None, spec: str, plan: PowerSGDPlan, key: int) -> Float32s:
    """Return the start of the power iteration: its last result, or a random one."""
    warm = None if memory is None else memory.warm.get(spec)
    if warm is not None and warm.size == plan.q_count:
        return warm
    fresh = np.zeros(plan.q_count, np.float32)
    power_sgd.warm_up(plan, fresh, key=key)
    return fresh


def _factor(piece: BucketSum, done: Done) -> float:
    if piece.reduction == "sum":
        return float(len(done.world.trainers))
    return piece.correction(done.world)
