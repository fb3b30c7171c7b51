"""PowerSGD over a whole tree: two all-reduces, of all P's with what goes uncompressed, then of Q's.

After Vogels et al. 2019, algorithms 1 and 2; the arithmetic is in `pmesh.compression.power_sgd`.
"""

from typing import cast

import numpy as np

from pmesh.client.compressed_ops import Piece, Summed, inverse
from pmesh.client.feedback import Memory
from pmesh.client.session import Done
from pmesh.compression import power_sgd, random_k
from pmesh.compression.arrays import Float32s
from pmesh.compression.matrices import Plan, plan_matrices
from pmesh.compression.schemes import PowerSGD


def add_low_rank(piece: Piece, scheme: PowerSGD, memory: Memory | None) -> Summed:
    """Both are means over who takes part in them; a rank may be lost between the two.

    Args:
        piece: the whole tree.
        scheme: the options.
        memory: where the power iteration goes on; None: it begins anew.
    """
    shapes = [piece.leaves[index].values.shape for index in piece.bucket.leaves]
    plan = plan_matrices(shapes, rank=scheme.rank, min_rate=scheme.min_rate)
    key = random_k.draw_key(0, piece.label, piece.step, piece.number)
    begin = _begin(memory, piece.spec, plan, key)
    own = piece.own()
    region = cast("Float32s", piece.session.input_values("float32", plan.p_count, room_bytes=0))
    power_sgd.compress(plan, own, begin, region, **piece.kernel_residuals())
    first = piece.run_op("all_reduce", "float32", plan.p_count, reduction="mean")
    p = cast("Float32s", first.values.copy())  # the agent's, and read-only
    power_sgd.orthogonalize(plan, p)
    second, q = first, begin  # where nothing pays there are no Q's
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


def _begin(memory: Memory | None, spec: str, plan: Plan, key: int) -> Float32s:
    """Where the power iteration begins: where it has ended, if there is a last time."""
    warm = None if memory is None else memory.warm.get(spec)
    if warm is not None and warm.size == plan.q_count:
        return warm
    fresh = np.zeros(plan.q_count, np.float32)
    power_sgd.warm_up(plan, fresh, key=key)
    return fresh


def _factor(piece: Piece, done: Done) -> float:
    """What the mean over those who took part in an op is to be multiplied by."""
    if piece.reduction == "sum":
        return float(len(done.world.trainers))
    return piece.correction(done.world)
