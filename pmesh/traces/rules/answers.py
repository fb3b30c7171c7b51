"""Which ops an agent tells one who asks, a few at a time."""

from collections.abc import Iterable
from itertools import islice

from pmesh.core.jobs.op_times import RankTimes
from pmesh.traces.wire import MOST_TIMES, AskOps, Cursor, RankOps


def is_of(job: str, asked: str) -> bool:
    """Return whether this is the job that was asked for, or a group of its ranks."""
    return job == asked or job.startswith(f"{asked}/")


def next_ops(ranks: Iterable[RankTimes], asked: AskOps, *, since_us: int) -> RankOps | None:
    """Return the next ops for one who asks; None if there are no more.

    Args:
        ranks: the ranks of this agent, in any order, each once.
        asked: the question.
        since_us: ops that ended before are not told.
    """
    after = asked.after
    seen = None if after is None else (after.job, after.run, after.trainer)
    for rank in sorted((r for r in ranks if is_of(r.job, asked.job)), key=lambda rank: rank.key):
        if seen is not None and rank.key < seen:
            continue
        count = after.count if after is not None and rank.key == seen else 0
        ops = list(islice(rank.after(count, since_us=since_us), MOST_TIMES))
        if ops:
            last, _ = ops[-1]
            times = tuple(op for _, op in ops)
            return RankOps(Cursor(*rank.key, last), rank.rank, rank.pid, times)
    return None
