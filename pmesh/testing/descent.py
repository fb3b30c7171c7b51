"""V10 over a whole history: the rosters of a job that had a quorum lie on one line of descent."""

from collections.abc import Mapping
from itertools import pairwise

from pmesh.core.views import Roster, View
from pmesh.ids import Epoch, JobName, Member
from pmesh.testing.violations import Violation


class Descent:
    """From which views each view comes, and who has installed it."""

    def __init__(self) -> None:
        self._parents: dict[Epoch, set[Epoch]] = {}
        self._installed: dict[Epoch, set[Member]] = {}
        self._primaries: dict[tuple[JobName, Epoch], dict[Epoch, tuple[Member, ...]]] = {}
        """Of each run of a job that asks for a majority: the views with a quorum, and whose
        trainers are in them."""
        self._last_primary: dict[tuple[Member, JobName], Epoch] = {}

    def installed(self, member: Member, view: View, last: Mapping[Member, View]) -> None:
        """A member installs a view; `last` is what each member had installed until now."""
        self._installed.setdefault(view.epoch, set()).add(member)
        parents = self._parents.setdefault(view.epoch, set())
        if view.epoch.leader == member.node:  # all are flushed, and have installed nothing since
            parents |= {last[m].epoch for m in view.members if m in last}
        for roster in view.rosters:
            if roster.terms.quorum == "majority" and roster.quorate:
                self._note_primary(member, view, roster)

    def _note_primary(self, member: Member, view: View, roster: Roster) -> None:
        before = self._last_primary.get((member, roster.job))
        if before is not None:
            self._parents[view.epoch].add(before)
        self._last_primary[member, roster.job] = view.epoch
        voters = tuple(dict.fromkeys(trainer.member for trainer in roster.trainers))
        self._primaries.setdefault((roster.job, roster.born), {})[view.epoch] = voters

    def check(self) -> None:
        """Of two views with a quorum that all their trainers' agents installed, one is above."""
        for run, views in self._primaries.items():
            full = sorted(e for e, voters in views.items() if set(voters) <= self._installed[e])
            for low, high in pairwise(full):
                if low not in self._ancestors(high):
                    raise Violation(f"V10: {run}: two primaries, {low} and {high}")

    def _ancestors(self, epoch: Epoch) -> set[Epoch]:
        found, todo = set[Epoch](), [epoch]
        while todo:
            for parent in self._parents.get(todo.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    todo.append(parent)
        return found
