"""A barrier whose rank 0 finds out who does not come, and tells the others; in gloo's words."""

import time

import numpy as np

from pmesh.client.calls.point_to_point import MAX_TAG
from pmesh.client.group import Collectives
from pmesh.errors import OpTimedOut, PmeshError

_TAG = MAX_TAG  # a program's own messages may have it, too, but what for?
_LOOKS_S = 0.01  # it is called to find errors, not often


def monitored_barrier(calls: Collectives, seconds: float, *, wait_all_ranks: bool) -> None:
    """Wait until every rank has called this.

    It is made of messages, so a rank that does not come gets no error for its next op, and the
    others may try again.

    Args:
        calls: of the group.
        seconds: how long; at most 0: not at all.
        wait_all_ranks: name all that have not come, not the first one.

    Raises:
        OpTimedOut: on rank 0 with the ranks that have not come; on those that have, with its words.
        RankLost: on rank 0 at once, and its words on the others.
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
        time.sleep(_LOOKS_S)
    lost = [e for e in failed.values() if not isinstance(e, OpTimedOut)]
    late = sorted(failed)[: None if wait_all_ranks else 1]
    error: PmeshError | None = lost[0] if lost else None
    if late and not lost:
        ranks = f"Rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        error = OpTimedOut(f"{ranks} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms")
    text = np.frombuffer(str(error or "").encode(), np.uint8)
    told = [
        calls.send(text, rank, _TAG, seconds, async_op=True)
        for rank in others
        if rank not in failed
    ]
    if not lost:  # else some of them may not have come, and can be told once they do
        for each in told:
            each.wait()
    if error is not None:
        raise error


def _report(calls: Collectives, seconds: float) -> None:
    try:
        calls.send(np.empty(0, np.uint8), 0, _TAG, seconds)
        # Rank 0 may have come later, and says at the end of its time who has not.
        failure = calls.recv(0, _TAG, 2 * seconds).tobytes().decode()
    except OpTimedOut as e:
        failure = str(e)
    if failure:
        raise OpTimedOut(
            f"Rank {calls.rank} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0: {failure}"
        )
