"""V10: which side of a partition may go on, where a job asks for a majority.

Dynamic-linear voting (Jajodia and Mutchler, "Dynamic voting algorithms for maintaining the
consistency of a replicated database", 1990): a majority of the last roster that had a quorum, not
of the first. A restarted agent is another member, so it has no vote for what it has forgotten.
"""

from collections.abc import Collection, Iterable, Sequence

from pmesh.core.messages import Attempt, KnownPrimary
from pmesh.core.views import Primary, View
from pmesh.ids import Member

MAX_REMEMBERED = 32  # jobs that a member has fallen out of, and that may still go on


def has_quorum(primary: Primary, present: Collection[Member], attempts: Iterable[Attempt]) -> bool:
    """Whether those present may form the next primary roster.

    Args:
        primary: the last roster that had a quorum; nobody present knows a later one.
        present: who has flushed for this view.
        attempts: views that somebody here has promised and not seen: any of these may have been
            installed elsewhere, and have gone on without us. Machines without a rank had no vote.
    """
    possible = [
        [voter for voter in primary.voters if voter in attempt.members]
        for attempt in attempts
        if attempt.epoch > primary.epoch
    ]
    return all(_is_majority(present, voters) for voters in [primary.voters, *possible])


def remember(
    known: Iterable[KnownPrimary],
    attempts: Sequence[Attempt],
    before: View,
    after: View,
    me: Member,
) -> tuple[KnownPrimary, ...]:
    """What a member knows of primary rosters once it has installed `after`.

    A job that ends in our own line of views is over, if a majority has seen that. One that we have
    fallen out of, or whose last rank among us has left, may go on elsewhere.
    """
    goes_on = after.previous_epoch_of(me) == before.epoch
    running = {(roster.job, roster.born) for roster in after.rosters}
    over = {
        (roster.job, roster.born)
        for roster in before.rosters
        if goes_on and roster.quorate and has_quorum(roster.primary, after.members, attempts)
    } - running
    latest = {(k.job, k.born): k for k in known if (k.job, k.born) not in over}
    for roster in after.rosters:
        primary = KnownPrimary(roster.job, roster.born, roster.primary.epoch)
        other = latest.get((roster.job, roster.born), primary)
        if roster.terms.quorum == "majority" and other.epoch <= primary.epoch:
            latest[roster.job, roster.born] = primary  # never an earlier one: that is overtaken
    return tuple(sorted(latest.values(), key=lambda k: k.epoch)[-MAX_REMEMBERED:])


def unresolved(
    attempts: Iterable[Attempt], primaries: Sequence[KnownPrimary], view: View
) -> tuple[Attempt, ...]:
    """The attempts that may still matter: all rosters with a quorum may be older.

    Who led an attempt and is in our view has shown what it had installed.
    """
    oldest = min((known.epoch for known in primaries), default=None)
    return tuple(
        attempt
        for attempt in attempts
        if oldest is not None and attempt.epoch > oldest and attempt.leader not in view.members
    )


def _is_majority(present: Collection[Member], voters: Sequence[Member]) -> bool:
    """More than half; of two equal halves that of the most senior, who comes first.

    Nobody can have gone on where nobody had a vote.
    """
    twice = 2 * sum(voter in present for voter in voters)
    tied = twice == len(voters)
    return twice > len(voters) or (tied and (not voters or voters[0] in present))
