"""A simulated trainer: connects, calls op after op, stops, dies, and comes back by a sync."""

import math
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from pmesh.core.jobs.jobs import LEFT
from pmesh.core.values import Terms, Verdict
from pmesh.core.wire.calls import Call
from pmesh.ids import JobName, OpNumber
from simulation import ops
from simulation.local_jobs import LocalJobs, SimulatedWaiting
from simulation.network import Timeline
from simulation.ops import OP_TIMEOUT_S
from simulation.ranks import SimulatedRank

if TYPE_CHECKING:
    from simulation.agents import SimulatedAgent

POLL_S = 0.1
"""How often a trainer that stands still checks whether it may go on."""

STRAGGLER_AFTER_S = 3.0
"""How long the others bear a trainer whose process is stopped."""

USUAL_KINDS = (
    *("sync", "all_reduce", "broadcast", "barrier"),
    *("sync", "collect", "broadcast", "all_gather"),
)
REPEATED_KINDS = (
    *("sync", "all_reduce", "all_reduce", "all_gather"),
    *("broadcast", "all_reduce", "all_reduce", "barrier"),
)

PATIENCE = 1.5
"""How many times as long as an op a trainer waits for its job to begin, and thinks at the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the trainers of a job behave."""

    job: JobName
    wait_for: int
    terms: Terms = field(default_factory=Terms)
    comes_back: bool = True
    """Whether it syncs when the others have gone on without it; else it ends."""
    think_s: float = 0.3
    """At most this long a trainer computes between two ops."""
    mistakes: float = 0.0
    """The share of ops that a rank calls in another shape than the others."""
    pauses: float = 0.0
    """The share of ops before which a rank computes for longer than an op may take."""
    until_s: float = math.inf
    """From then on they make no mistakes and no pauses, and do not leave."""
    ops: int = 1000
    """After this many ops a trainer leaves, and comes back."""
    kinds: tuple[str, ...] = USUAL_KINDS
    """What it calls, over and over."""
    repeats: bool = False
    """Whether its agent lets a thread answer what it calls again."""
    op_timeout_s: float = OP_TIMEOUT_S


class SimulatedTrainer:
    """One training process, and its session with the agent (`pmesh.agent.jobs.session`)."""

    def __init__(
        self,
        timeline: Timeline,
        random: Random,
        host: "SimulatedAgent",
        jobs: LocalJobs,
        habits: Habits,
    ) -> None:
        self.habits = habits
        self.alive = True
        self.rank: SimulatedRank | None = None
        self._timeline = timeline
        self._random = random
        self._host = host
        self._jobs = jobs
        self._seed = random.getrandbits(40)
        self._waiter: SimulatedWaiting | None = None
        self._stopped_at: float | None = None
        self._enters = False
        """Its next op must be the sync in which it enters, or comes back."""
        self._calls = 0
        if host.state.view.roster_of(habits.job) is None:
            self._enlist()
        else:
            self._enters = True
            self._think()

    def __repr__(self) -> str:
        return f"<Trainer of {self.habits.job!r}, {self.rank}>"

    @property
    def waits(self) -> bool:
        """Whether it waits for its job to begin, or to enter it."""
        return self.alive and (self._waiter is not None or self._enters)

    # --- what goes wrong

    def die(self) -> None:
        """The process is killed, perhaps in the middle of a call."""
        self._end("is lost: its trainer died")

    def leave(self) -> None:
        """The process ends in order, between two calls."""
        self._end(LEFT)

    def lose_agent(self) -> None:
        """The agent has gone: so does the trainer."""
        self.alive = False

    def stop(self, duration_s: float) -> None:
        """SIGSTOP, and SIGCONT later; its agent runs on."""
        if self._stopped_at is None:
            self._stopped_at = self._host.now
            self._timeline.after(duration_s, self._continue)

    def poll(self) -> None:
        """Its agent checks its process."""
        rank, since = self.rank, self._stopped_at
        if rank is None or not self.alive:
            return
        if rank.stopped != (since is not None):
            rank.stopped = since is not None
            self._host.facts_changed()
        if since is not None and self._host.now - since >= STRAGGLER_AFTER_S:
            self._jobs.depart(rank, "is lost: its trainer has been stopped")

    # --- inside

    def _end(self, why: str) -> None:
        if not self.alive:
            return
        self.alive = False
        if self._waiter is not None:
            self._jobs.withdraw(self._waiter)
        if self.rank is not None:
            ops.abandon(self.rank)
            self._jobs.depart(self.rank, why)

    def _continue(self) -> None:
        self._stopped_at = None

    def _value(self, op: OpNumber) -> int:
        return self._seed * 10_000 + op

    def _enlist(self) -> None:
        if not self.alive:
            return
        habits = self.habits
        self._waiter = self._jobs.enlist(
            *(habits.job, habits.wait_for, habits.terms, self._value, self._joined),
            repeats=habits.repeats,
        )
        self._timeline.after(PATIENCE * habits.op_timeout_s, self._give_up, self._waiter)

    def _give_up(self, waiter: SimulatedWaiting) -> None:
        if not self.alive or self._waiter is not waiter:
            return
        if self._stands_still():
            self._timeline.after(POLL_S, self._give_up, waiter)
        else:
            self.leave()

    def _joined(self, rank: SimulatedRank) -> None:
        self.rank = rank
        rank.replied = self._replied
        if self._enters:
            rank.world = ()  # it learns who is in the job when the sync returns (O5)
            self._timeline.after(0.0, self._call_entering)
        else:
            self._waiter = None
            self._think()

    def _call_entering(self) -> None:
        self._waiter = None
        if self.alive:
            self._call_op()

    def _think(self) -> None:
        delay = self._random.random() * self.habits.think_s
        if self._misbehaves(self.habits.pauses):
            delay += PATIENCE * self.habits.op_timeout_s  # longer than an op may take
        self._timeline.after(delay, self._call)

    def _stands_still(self) -> bool:
        return self._host.asleep or self._stopped_at is not None

    def _call(self) -> None:
        if not self.alive:
            return
        if self._stands_still():
            self._timeline.after(POLL_S, self._call)
        elif self._calls >= self.habits.ops and self._timeline.now < self.habits.until_s:
            self.leave()
        elif self._enters:
            self._come_in()
        else:
            self._call_op()

    def _come_in(self) -> None:
        """O6: get a rank; what an earlier one has left behind serves on, until nobody asks."""
        self.rank = None
        self._enlist()

    def _call_op(self) -> None:
        rank = self.rank
        assert rank is not None  # noqa: S101 - it enters otherwise
        self._calls += 1
        mistaken = not self._enters and self._misbehaves(self.habits.mistakes)
        call = call_of(self.habits.kinds, rank.next_op, len(rank.world), mistaken=mistaken)
        rank.replied = self._replied
        ops.call_op(rank, call, self.habits.op_timeout_s)

    def _replied(self, error: Verdict | None) -> None:
        self._enters = error is not None and error.error == "HistorySuperseded"
        if self._enters and not self.habits.comes_back:
            self.leave()
        else:
            self._think()

    def _misbehaves(self, share: float) -> bool:
        return chance(self._random, share) and self._timeline.now < self.habits.until_s


def call_of(kinds: tuple[str, ...], op: OpNumber, size: int, *, mistaken: bool) -> Call:
    """Which op the script calls under this number, the same at all ranks unless it is mistaken."""
    kind = kinds[op % len(kinds)]
    shape = (8 + mistaken,)
    if kind == "broadcast":
        receivers = ((7 * op + 1) % size,) * (op % 8 == 6)  # noqa: PLR2004 - each second one
        return Call(kind, "float32", shape, root=7 * op % size, receivers=receivers)
    return Call(kind, "float32", shape, reduction="sum")


def chance(random: Random, share: float) -> bool:
    """Whether a draw falls into the share, between 0 and 1."""
    return random.random() < share
