"""A simulated trainer: joins a job, calls op after op, and leaves when the job has failed."""

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from pmesh.core.messages import Call
from pmesh.core.views import Roster, Verdict
from pmesh.ids import JobName, OpNumber, Rank, Slot
from pmesh.testing.lane_messages import OpResult
from pmesh.testing.timeline import Timeline

if TYPE_CHECKING:
    from pmesh.testing.jobs import LocalJob

FATAL = ("RankLost", "HistorySuperseded")
"""Errors after which a job does not go on; after the others the trainer calls its next op."""

LONG_THOUGHT_S = 6.0
"""Longer than an op may take."""

ASLEEP_S = 0.1
"""How often a trainer of a sleeping machine looks whether it is awake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the trainers of a job behave."""

    job: JobName
    wait_for: int
    think_s: float = 0.3
    """At most this long a trainer computes between two ops."""
    in_flight: int = 1
    """How many ops it has under way at once."""
    mistakes: float = 0.0
    """The share of ops that a rank calls in another shape than the others."""
    pauses: float = 0.0
    """The share of ops before which a rank computes for longer than an op may take."""
    until_s: float = math.inf
    """From then on they make no mistakes and no pauses, and do not leave."""
    ops: int = 1000
    """After this many ops a trainer leaves, and comes back."""


class Trainer:
    """One training process; the calls it makes follow from its job, rank and op number."""

    def __init__(self, timeline: Timeline, random: Random, slot: Slot, habits: Habits) -> None:
        self.slot = slot
        self.habits = habits
        self.alive = True
        self.job: LocalJob | None = None
        self.rank = Rank(-1)
        self._timeline = timeline
        self._random = random
        self._seed = random.getrandbits(40)
        self._next = 0
        self._under_way: set[OpNumber] = set()
        self._thinking = False

    @property
    def waiting(self) -> bool:
        """Whether it waits for its job to begin."""
        return self.alive and self.job is None

    def begin(self, job: "LocalJob", rank: Rank) -> None:
        """`connect` returns."""
        self.job, self.rank = job, rank
        self._think()

    def ended(self, op: OpNumber, outcome: OpResult | Verdict) -> None:
        """A call returns or raises."""
        self._under_way.discard(op)
        if isinstance(outcome, Verdict) and outcome.error in FATAL:
            self.leave()
        elif self.alive:
            self._think()

    def leave(self) -> None:
        """The process ends, in order or not; its agent sees the same."""
        if self.alive:
            self.alive = False
            if self.job is not None:
                self.job.changed()

    def value(self, op: OpNumber) -> int:
        """What it puts into the op: no two trainers or ops put in the same."""
        return self._seed * 10_000 + op

    def _think(self) -> None:
        if self._thinking or len(self._under_way) >= self.habits.in_flight:
            return
        self._thinking = True
        delay = self._random.random() * self.habits.think_s
        if self._misbehaves(self.habits.pauses):
            delay += LONG_THOUGHT_S
        self._timeline.after(delay, self._call)

    def _call(self) -> None:
        if not self.alive or self.job is None:
            return
        if self.job.asleep:  # the whole machine is
            self._timeline.after(ASLEEP_S, self._call)
            return
        self._thinking = False
        if self._next < self.habits.ops or self._timeline.now > self.habits.until_s:
            op = OpNumber(self._next)
            self._next += 1
            self._under_way.add(op)
            mistaken = self._misbehaves(self.habits.mistakes)
            self.job.start(self.rank, op, call_of(op, self.job.roster, mistaken=mistaken))
            self._think()
        elif not self._under_way:
            self.leave()

    def _misbehaves(self, share: float) -> bool:
        return chance(self._random, share) and self._timeline.now < self.habits.until_s


def call_of(op: OpNumber, roster: Roster, *, mistaken: bool) -> Call:
    """Each fourth op is a broadcast, with a root that varies; the others are all-reduces."""
    shape = (8 + mistaken,)
    if op % 4 == 3:  # noqa: PLR2004 - the fourth
        return Call("broadcast", "float32", shape, root=7 * op % len(roster.trainers))
    return Call("all_reduce", "float32", shape, reduction="sum")


def chance(random: Random, share: float) -> bool:
    """Whether a draw falls into the share, between 0 and 1."""
    return random.random() < share
