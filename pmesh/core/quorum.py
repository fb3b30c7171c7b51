"""V10: which side of a partition may go on, where a job asks for a majority.

Dynamic-linear voting (Jajodia and Mutchler, "Dynamic voting algorithms for maintaining the
consistency of a replicated database", 1990): a majority of the last roster that had a quorum, not
of the first. A restarted agent is another member, so it has no vote for what it has forgotten.
"""

from collections.abc import Collection, Iterable, Sequence

from pmesh.core.messages import Attempt
from pmesh.core.views import Primary
from pmesh.ids import Epoch, Member


def has_quorum(
    primary: Primary, present: Collection[Member], attempts: Iterable[Attempt], epoch: Epoch
) -> bool:
    """Whether those present may form the next primary roster, in the view `epoch`.

    Args:
        primary: the last roster that had a quorum.
        present: who has flushed for this view.
        attempts: views that somebody of them has promised and not seen: any of these may have been
            installed elsewhere, and have gone on without us.
        epoch: of this attempt itself, which counts for nothing.
    """
    unresolved = [
        attempt.members
        for attempt in attempts
        if attempt.epoch > primary.epoch
        and attempt.epoch != epoch
        and Member(attempt.epoch.leader, attempt.epoch.incarnation) not in present
    ]
    return all(_is_majority(present, voters) for voters in [primary.voters, *unresolved])


def _is_majority(present: Collection[Member], voters: Sequence[Member]) -> bool:
    """More than half; of two equal halves that of the most senior, who comes first."""
    twice = 2 * sum(voter in present for voter in voters)
    return twice > len(voters) or (twice == len(voters) and voters[0] in present)
