"""Ops that pmesh does not have, made of several of its calls: sparse sums, and monitored barriers.

Each rank of a sparse sum, as of the gradients of `torch.nn.Embedding(sparse=True)`, has different
entries: every rank gathers the entries of all ranks and adds them up. A monitored barrier reports
the missing ranks, with gloo's error messages.
"""

import time
from collections.abc import Sequence

import numpy as np

from pmesh.client.group import Collectives
from pmesh.errors import OpTimedOut, PmeshError
from pmesh.p2p.wire import MAX_TAG
from pmesh.torch.arguments import TorchReduction
from pmesh.torch.library import Tensor, torch

_TAG = MAX_TAG  # a program may use this tag too, but is unlikely to
_POLL_S = 0.01  # coarse, since the barrier is for finding errors


def is_sparse(x: Tensor) -> bool:
    """Return True for a tensor that lists its entries (COO)."""
    return bool(x.layout == torch.sparse_coo)


def sum_sparse(calls: Collectives, x: Tensor, reduction: TorchReduction, timeout_s: float) -> None:
    """Write the sum or the mean of all ranks' tensors into `x`. Each op has this timeout.

    All ranks add in the same order, so they have the same bits.

    Raises:
        ValueError: the reduction is neither sum nor mean, or the tensors differ in shape.
        PmeshError: as for `Collectives.all_gather_into`.
    """
    if reduction.name not in {"sum", "mean"}:
        raise ValueError(f"the backend 'pmesh' sums sparse tensors; it has no {reduction.name}")
    mine = x.detach().cpu().coalesce()
    indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
    form = torch.tensor([len(values), mine.sparse_dim(), *mine.shape])
    forms = _gather(calls, form, [len(form)] * calls.size, timeout_s)
    if any(other[1:].tolist() != form[1:].tolist() for other in forms):
        shapes = [tuple(other[2:].tolist()) for other in forms]
        raise ValueError(f"all_reduce: the sparse tensors of the ranks differ in shape: {shapes}")
    counts = [int(other[0]) for other in forms]
    entries = torch.cat(_gather(calls, indices, counts, timeout_s)).t()
    given = torch.cat(_gather(calls, values, counts, timeout_s))
    if reduction.factor is not None:
        given.mul_(reduction.factor)
    # Without the argument torch warns that it does not check; the ranks' tensors are valid.
    total = torch.sparse_coo_tensor(entries, given, mine.shape, check_invariants=False).coalesce()
    if reduction.name == "mean":
        total.values().div_(calls.size)
    reduction.finish(total.values(), calls.size)
    with torch.no_grad():
        x.copy_(total)  # a copy into x.detach() would not reach x: it replaces the entries


def _gather(
    calls: Collectives, rows: Tensor, counts: Sequence[int], timeout_s: float
) -> list[Tensor]:
    """Return the rows of each rank; `counts` has their numbers."""
    found = [torch.empty((count, *rows.shape[1:]), dtype=rows.dtype) for count in counts]
    calls.all_gather_into(found, rows, timeout_s)
    return found


def monitored_barrier(calls: Collectives, seconds: float, *, wait_all_ranks: bool) -> None:
    """Wait until every rank has called this.

    It consists of messages, not of an op. So the next op of a missing rank does not fail, and the
    other ranks may repeat the barrier.

    Args:
        calls: the collectives of the group.
        seconds: the timeout; with 0 or less it fails at once.
        wait_all_ranks: name all missing ranks in the error, not only the first.

    Raises:
        OpTimedOut: ranks are missing, or rank 0 lost a rank. Rank 0 names the missing ranks, and
            the other ranks repeat its message.
        RankLost: a rank is lost; rank 0 raises this at once.
        PmeshError: as for `send` and `recv`.
    """
    if seconds <= 0:
        raise OpTimedOut(f"Rank {calls.rank} timed out in monitoredBarrier after 0 ms")
    if calls.rank == 0:
        _collect(calls, seconds, wait_all_ranks=wait_all_ranks)
    else:
        _report(calls, seconds)


def _collect(calls: Collectives, seconds: float, *, wait_all_ranks: bool) -> None:
    others = range(1, calls.size)
    coming = {rank: calls.recv(rank, _TAG, seconds, async_op=True) for rank in others}
    failed: dict[int, PmeshError] = {}
    while coming and all(isinstance(e, OpTimedOut) for e in failed.values()):
        for rank in [rank for rank, handle in coming.items() if handle.done()]:
            try:
                coming.pop(rank).wait()
            except PmeshError as e:
                failed[rank] = e
        time.sleep(_POLL_S)
    lost = [e for e in failed.values() if not isinstance(e, OpTimedOut)]
    late = sorted(failed)[: None if wait_all_ranks else 1]
    error: PmeshError | None = lost[0] if lost else None
    if late and not lost:
        ranks = f"Rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        error = OpTimedOut(f"{ranks} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms")
    text = np.frombuffer(str(error or "").encode(), np.uint8)
    sends = [
        calls.send(text, rank, _TAG, seconds, async_op=True)
        for rank in others
        if rank not in failed
    ]
    if not lost:  # after a loss, ranks that have not called yet receive this when they do
        for each in sends:
            each.wait()
    if error is not None:
        raise error


def _report(calls: Collectives, seconds: float) -> None:
    try:
        calls.send(np.empty(0, np.uint8), 0, _TAG, seconds)
        # Rank 0 may have called later; it sends the result at the end of its own timeout.
        failure = calls.recv(0, _TAG, 2 * seconds).tobytes().decode()
    except OpTimedOut as e:
        failure = str(e)
    if failure:
        raise OpTimedOut(
            f"Rank {calls.rank} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0: {failure}"
        )
