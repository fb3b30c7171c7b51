"""V10: which side of a partition may go on, where a job asks for a majority.

Dynamic-linear voting (Jajodia and Mutchler, "Dynamic voting algorithms for maintaining the
consistency of a replicated database", 1990): a majority of the last roster that had a quorum, not
of the first. A restarted agent is another member, so it has no vote for what it has forgotten.

A vote alone lets no op run: who has voted may never install the view, and vote again elsewhere. Ops
run once the roster is *in force*: of each set of voters that its vote needed, a majority has been
seen to have installed its view. A vote needs the voters of the roster before it; where nobody knows
that one to be in force, also all that its own vote needed. As in Paxos (Lamport, "The part-time
parliament", 1998) the flush answer is the promise, and the install the acceptance.

Why two sides never run. Let two rosters be in force, neither of which follows from the other, and P
the last roster that both follow from. On either line take the first after P to be in force, and of
these two let A be the one that was voted on earlier. All votes on both lines, from P to there,
needed a majority of P's voters. On the other line there is a roster X that was voted on later than
A, as the next of one earlier than A. Of P's voters a majority has installed A's view, a majority
has promised X's, so one has done both. It can't have installed A's after the promise (V1, I2). So
it had before, and has said so in its answer; but a roster does not get a vote whose voters know of
a later one.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from pmesh.core.values import Roster, View
from pmesh.core.wire.link import KnownPrimary
from pmesh.ids import Epoch, Member

MAX_REMEMBERED = 32  # jobs that a member has fallen out of, and that may still go on

Voters = tuple[Member, ...]


def may_run(roster: Roster, known: Collection[KnownPrimary]) -> bool:
    """Whether the ops of a roster may run, by what is known."""
    return roster.quorate and is_in_force(roster, known)


def is_in_force(roster: Roster, known: Collection[KnownPrimary]) -> bool:
    """Whether the last roster with a quorum is known to be in force: this one, or what it follows.

    A job's first is from the beginning, and any is where nobody asks for a majority.
    """
    return not roster.primary.needed or _primary_of(roster, in_force=True) in known


def needed_voters(roster: Roster, known: Collection[KnownPrimary]) -> tuple[Voters, ...]:
    """The voters of whom a majority each is needed to go on from this roster, by what is known."""
    earlier = () if is_in_force(roster, known) else roster.primary.needed
    return tuple(dict.fromkeys((roster.primary.voters, *earlier)))


def has_majorities(present: Collection[Member], needed: Iterable[Voters]) -> bool:
    """Whether those present are a majority of each of these voters."""
    return all(_is_majority(present, voters) for voters in needed)


def remember(known: Iterable[KnownPrimary], view: View) -> tuple[KnownPrimary, ...]:
    """What a member knows of primary rosters once it has installed the view.

    Also of jobs that it has fallen out of: what makes its vote one is not to have forgotten with
    whom they have gone on.
    """
    latest = {(k.job, k.born): k for k in known}
    running: set[tuple[object, ...]] = set()
    for roster in view.rosters:
        if roster.terms.quorum == "majority":
            primary = _primary_of(roster)
            other = latest.get((roster.job, roster.born))
            running.add((roster.job, roster.born))
            if other is None or other.epoch < primary.epoch:  # an earlier one is overtaken
                latest[roster.job, roster.born] = primary
    others = sorted((k for run, k in latest.items() if run not in running), key=_epoch_of)
    here = (k for run, k in latest.items() if run in running)
    return tuple(sorted([*others[-MAX_REMEMBERED:], *here], key=_epoch_of))


def confirm(
    known: tuple[KnownPrimary, ...],
    view: View,
    installed: Mapping[Member, Epoch],
    told: Collection[KnownPrimary],
) -> tuple[KnownPrimary, ...]:
    """What a member knows of primary rosters once it has seen who has installed which view.

    Args:
        known: what it has known.
        view: what it has installed itself.
        installed: which view each member has installed, as far as it has been seen.
        told: what others know to be in force.
    """
    for roster in view.rosters:
        if is_in_force(roster, known):
            continue
        primary = roster.primary
        there = [member for member, epoch in installed.items() if epoch == primary.epoch]
        confirmed = _primary_of(roster, in_force=True)
        if confirmed in told or has_majorities(there, primary.needed):
            before = _primary_of(roster)
            known = tuple(confirmed if k == before else k for k in known)
    return known


def _primary_of(roster: Roster, *, in_force: bool = False) -> KnownPrimary:
    return KnownPrimary(roster.job, roster.born, roster.primary.epoch, in_force)


def _epoch_of(known: KnownPrimary) -> Epoch:
    return known.epoch


def _is_majority(present: Collection[Member], voters: Sequence[Member]) -> bool:
    """More than half; of two equal halves that of the most senior, who comes first."""
    twice = 2 * sum(voter in present for voter in voters)
    return twice > len(voters) or (twice == len(voters) and any(v in present for v in voters[:1]))
