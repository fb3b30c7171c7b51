"""V10: which side of a partition may continue if the job requires a majority.

Dynamic-linear voting (Jajodia and Mutchler, "Dynamic voting algorithms for maintaining the
consistency of a replicated database", 1990): a roster needs a majority of the last roster that had
a quorum, not of the first. A restarted agent is a new member, so it cannot vote on what it forgot.

A vote alone lets no op run: a voter may never install the view, and vote again elsewhere. Ops run
once the roster is *in force*: of each set of voters that its vote needed, a majority is known to
have installed its view. A vote needs the voters of the previous roster; unless that one is known to
be in force, it also needs all the voters that the previous vote needed. As in Paxos (Lamport, "The
part-time parliament", 1998) the flush answer is the promise, and the install the acceptance.

Why two sides never run. Suppose two rosters are in force, and neither follows from the other. Let P
be the last roster that both follow from. On each line take the first roster after P that is in
force; let A be the one of these two that was voted on earlier. Every vote from P up to these two
needed a majority of P's voters. The other line has a roster X that was voted on after A, and whose
predecessor was voted on before A. A majority of P's voters installed A's view and a majority
promised X's, so one voter did both. It did not install A's view after the promise (V1, I2). So it
installed it before and said so in its answer to X; but a roster gets no vote if its voters know of
a later one.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from pmesh.core.values import Roster, View
from pmesh.core.wire.views import KnownPrimary
from pmesh.ids import Epoch, Member

MAX_REMEMBERED = 32  # jobs that a member dropped out of and that may still run

Voters = tuple[Member, ...]


def may_run(roster: Roster, known: Collection[KnownPrimary]) -> bool:
    """True if, as far as is known, the ops of the roster may run."""
    return roster.quorate and is_in_force(roster, known)


def is_in_force(roster: Roster, known: Collection[KnownPrimary]) -> bool:
    """True if the last roster with a quorum, this one or an earlier one, is known to be in force.

    A job's first roster is in force from the start, and so is any that needs no majority.
    """
    return not roster.primary.needed or _primary_of(roster, in_force=True) in known


def needed_voters(roster: Roster, known: Collection[KnownPrimary]) -> tuple[Voters, ...]:
    """Return the sets of voters; the next roster needs a majority of each, as far as is known."""
    earlier = () if is_in_force(roster, known) else roster.primary.needed
    return tuple(dict.fromkeys((roster.primary.voters, *earlier)))


def has_majorities(present: Collection[Member], needed: Iterable[Voters]) -> bool:
    """True if the members present are a majority of each set of voters."""
    return all(_is_majority(present, voters) for voters in needed)


def remember(known: Iterable[KnownPrimary], view: View) -> tuple[KnownPrimary, ...]:
    """Return the primary rosters that a member knows once it has installed the view.

    They include those of jobs that it dropped out of: its vote is valid only if it remembers with
    which voters they continued.
    """
    latest = {(k.job, k.born): k for k in known}
    running: set[tuple[object, ...]] = set()
    for roster in view.rosters:
        if roster.terms.quorum == "majority":
            primary = _primary_of(roster)
            other = latest.get((roster.job, roster.born))
            running.add((roster.job, roster.born))
            if other is None or other.epoch < primary.epoch:
                latest[roster.job, roster.born] = primary
    others = sorted((k for run, k in latest.items() if run not in running), key=_epoch_of)
    here = (k for run, k in latest.items() if run in running)
    return tuple(sorted([*others[-MAX_REMEMBERED:], *here], key=_epoch_of))


def confirm(
    known: tuple[KnownPrimary, ...],
    view: View,
    installed: Mapping[Member, Epoch],
    reported: Collection[KnownPrimary],
) -> tuple[KnownPrimary, ...]:
    """Return the primary rosters that a member knows, given the views that members installed.

    Args:
        known: the primary rosters that it knew before.
        view: the view that it installed itself.
        installed: the last view that each member is known to have installed.
        reported: the rosters that others know to be in force.
    """
    for roster in view.rosters:
        if is_in_force(roster, known):
            continue
        primary = roster.primary
        there = [member for member, epoch in installed.items() if epoch == primary.epoch]
        confirmed = _primary_of(roster, in_force=True)
        if confirmed in reported or has_majorities(there, primary.needed):
            before = _primary_of(roster)
            known = tuple(confirmed if k == before else k for k in known)
    return known


def _primary_of(roster: Roster, *, in_force: bool = False) -> KnownPrimary:
    return KnownPrimary(roster.job, roster.born, roster.primary.epoch, in_force)


def _epoch_of(known: KnownPrimary) -> Epoch:
    return known.epoch


def _is_majority(present: Collection[Member], voters: Sequence[Member]) -> bool:
    """True for more than half, or for the half that includes the most senior (first) voter."""
    twice = 2 * sum(voter in present for voter in voters)
    return twice > len(voters) or (twice == len(voters) and any(v in present for v in voters[:1]))
