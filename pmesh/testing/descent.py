"""V10 over a whole history: all rosters of a job under which ops have run lie on one line."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TypeAlias

from pmesh.core.views import Roster, View
from pmesh.ids import Epoch, JobName, Member
from pmesh.testing.violations import Violation

Run: TypeAlias = tuple[JobName, Epoch]
"""A job, from its beginning to its end."""


class Descent:
    """Of each job that asks for a majority: which roster with a quorum follows which."""

    def __init__(self) -> None:
        self._followed: dict[Run, dict[Epoch, set[Epoch]]] = {}
        self._running: dict[Run, set[Epoch]] = {}
        """Those under which ops have run, or might have."""

    def agreed(self, view: View, last: Mapping[Member, View]) -> None:
        """Somebody installs a view; `last` is what each member had installed until now."""
        for roster in view.rosters:
            followed = self._followed.setdefault(_run_of(roster), {})
            asks = roster.terms.quorum == "majority"
            if asks and roster.primary.epoch == view.epoch and view.epoch not in followed:
                # The first to install it: all are flushed, and have hardly installed another since.
                before = [last[m].roster_of(roster.job) for m in view.members if m in last]
                followed[view.epoch] = {b.primary.epoch for b in before if b and _may_be(b, roster)}

    def goes_on(self, roster: Roster) -> None:
        """Ops of the roster may run."""
        if roster.terms.quorum == "majority":
            self._running.setdefault(_run_of(roster), set()).add(roster.primary.epoch)

    def check(self) -> None:
        """Of two under which ops have run, the later one follows from the earlier one."""
        for run, epochs in self._running.items():
            for low, high in pairwise(sorted(epochs)):
                if low not in self._before(run, high):
                    raise Violation(f"V10: {run}: two sides have gone on, {low} and {high}")

    def _before(self, run: Run, epoch: Epoch) -> set[Epoch]:
        found, todo = set[Epoch](), [epoch]
        while todo:
            for earlier in self._followed[run].get(todo.pop(), ()):
                if earlier not in found:
                    found.add(earlier)
                    todo.append(earlier)
        return found


def _run_of(roster: Roster) -> Run:
    return roster.job, roster.born


def _may_be(before: Roster, roster: Roster) -> bool:
    """Whether a roster is the one that another has been voted on to follow."""
    return _run_of(before) == _run_of(roster) and before.primary.voters in roster.primary.needed[:1]
