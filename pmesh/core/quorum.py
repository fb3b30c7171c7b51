"""V10: which side of a partition may go on, where a job asks for a majority.

Dynamic-linear voting (Jajodia and Mutchler, "Dynamic voting algorithms for maintaining the
consistency of a replicated database", 1990): a majority of the last roster that had a quorum, not
of the first. A restarted agent is another member, so it has no vote for what it has forgotten.
"""

from collections.abc import Collection, Iterable, Sequence

from pmesh.core.messages import Attempt
from pmesh.core.views import Primary
from pmesh.ids import Member


def has_quorum(primary: Primary, voting: Collection[Member], attempts: Iterable[Attempt]) -> bool:
    """Whether those voting may form the next primary roster.

    Args:
        primary: the last roster that had a quorum.
        voting: who has flushed for this view, and has a rank in the job.
        attempts: views that somebody here has promised and not seen: any of these may have been
            installed elsewhere, and have gone on without us. Machines without a rank had no vote.
    """
    unresolved = [
        [voter for voter in primary.voters if voter in attempt.members]
        for attempt in attempts
        if attempt.epoch > primary.epoch
    ]
    return all(_is_majority(voting, voters) for voters in [primary.voters, *unresolved])


def _is_majority(voting: Collection[Member], voters: Sequence[Member]) -> bool:
    """More than half; of two equal halves that of the most senior, who comes first.

    Nobody can have gone on where nobody had a vote.
    """
    twice = 2 * sum(voter in voting for voter in voters)
    tied = twice == len(voters)
    return twice > len(voters) or (tied and (not voters or voters[0] in voting))
