"""A barrier that reports the missing ranks, with gloo's error messages."""

import time

import numpy as np

from pmesh.client.calls.point_to_point import MAX_TAG
from pmesh.client.group import Collectives
from pmesh.errors import OpTimedOut, PmeshError

_TAG = MAX_TAG  # a program may use this tag too, but is unlikely to
_POLL_S = 0.01  # coarse, since the barrier is for finding errors


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
