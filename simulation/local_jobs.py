"""All jobs of one simulated agent: carries out what `pmesh.core.jobs.jobs` says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pmesh.core.jobs import jobs
from pmesh.core.jobs.attempt import timed_out
from pmesh.core.jobs.jobs import JobsState
from pmesh.core.values import Roster, Terms, Trainer, Verdict, View
from pmesh.core.views.state import Facts
from pmesh.core.wire.lanes import AskResult
from pmesh.core.wire.views import Heartbeat
from pmesh.ids import JobName, Member, OpNumber
from simulation import ops
from simulation.lane_messages import LaneMessage, age
from simulation.ranks import SimulatedOp, SimulatedRank
from simulation.repeats import RepeatedCalls

if TYPE_CHECKING:
    from simulation.agents import SimulatedAgent


@dataclass(slots=True, kw_only=True)
class SimulatedWaiting(jobs.WaitingTrainer[SimulatedRank]):
    """A trainer that waits for its job to begin, or to enter it."""

    value: Callable[[OpNumber], int]
    joined: Callable[[SimulatedRank], None]
    repeats: bool
    """Whether its rank may run by itself what its trainer calls again."""


class LocalJobs(JobsState[SimulatedWaiting, SimulatedRank]):
    """The jobs of one agent."""

    def __init__(self, host: "SimulatedAgent") -> None:
        super().__init__(host.state.me, self._new_rank)
        self._host = host
        self._early: list[LaneMessage] = []

    def _new_rank(
        self, roster: Roster, trainer: Trainer, waiter: SimulatedWaiting
    ) -> SimulatedRank:
        rank = SimulatedRank(self._host, self, roster, trainer, waiter.value)
        rank.repeats = RepeatedCalls(rank) if waiter.repeats else None
        return rank

    # --- trainers come and go

    def enlist(
        self,
        job: JobName,
        wait_for: int,
        terms: Terms,
        value: Callable[[OpNumber], int],
        joined: Callable[[SimulatedRank], None],
        *,
        repeats: bool = False,
    ) -> SimulatedWaiting:
        """A trainer waits for its job to begin, or to enter it."""
        waiter = SimulatedWaiting(
            job=job,
            wait_for=wait_for,
            terms=terms,
            value=value,
            joined=joined,
            repeats=repeats,
        )
        self.add(waiter)
        self._host.facts_changed()
        return waiter

    def withdraw(self, waiter: SimulatedWaiting) -> None:
        """The trainer no longer waits; if the job begins all the same, its rank is lost."""
        self.waiters.pop(waiter.slot, None)
        if waiter.rank is not None:
            self.depart(waiter.rank, "is lost: its trainer left")
        self._host.facts_changed()

    def depart(self, rank: SimulatedRank, why: str) -> None:
        """The trainer is gone, or has been stopped for too long: the others go on without it."""
        self.leave(rank, why, self._host.now)

    # --- what the agreement reads and decides

    def facts(self) -> Facts:
        """What the local jobs want and have; without round trips."""
        return self.known(self._host.state, self._host.now)

    def trust(self) -> None:
        """V8: our view is still everybody's; what waited behind the fence is delivered."""
        super().trust()
        for rank in list(self.ranks):
            ops.unhindered(rank)

    def install(self, view: View) -> tuple[SimulatedRank, ...]:
        """The view is in force; those are returned whose op under way must begin anew."""
        for rank in self.ranks:
            roster = view.roster_of(rank.roster.job)
            if roster is not None and roster != rank.roster:
                self._host.roster_settled(rank, roster)
        installed = self.follow(self._host.state, view, self._host.now)
        for waiter, rank in installed.begun:
            self._host.rank_began(rank)
            waiter.joined(rank)
        self._host.facts_changed()
        return installed.ended + installed.renumbered

    def marked(self, member: Member, heartbeat: Heartbeat) -> None:
        """A peer has reported how far its ranks have come."""
        self.hear(self._host.state, member, heartbeat)

    def poll(self) -> None:
        """At every tick: check what no message reports."""
        for rank in self.ranks:
            rank.patience_s = self._host.lane_patience_s(rank)
            if rank.repeats is not None:
                rank.repeats.vouch()
        passed = self.pass_time(self._host.state, self._host.now)
        if passed.ended:
            self._host.facts_changed()
        for rank in list(self.ranks):
            ops.pass_time(rank)

    # --- lanes

    def receive(self, message: LaneMessage) -> None:
        """A lane has brought a message."""
        by = age(message, self._host.state.view.roster_of(message.job))
        if by > 0:
            self._early.append(message)
        elif by == 0:
            for rank in self.ranks:
                if (rank.id, rank.roster.job) == (message.receiver, message.job):
                    ops.receive(rank, message)

    def receive_early(self) -> None:
        """V4: what came before its view is due now, or still early, or late by now."""
        early, self._early = self._early, []
        for message in early:
            self.receive(message)

    def asked_of(self, ask: AskResult) -> SimulatedRank | None:
        """Who is asked for a result; None while one side lacks the other's view."""
        asked = (ask.job, ask.born, ask.number, ask.holder)
        return next((r for r in self.ranks if _identity(r) == asked), None)

    def lane_broke(self, peer: Member) -> None:
        """A connection with another agent is lost."""
        for rank in self.ranks:
            ops.lane_broke(rank, peer)

    # --- what surrounds an op

    def newcomers(self, rank: SimulatedRank) -> int:
        """How many trainers wait to enter the job."""
        return self.newcomers_to(self._host.state, rank.roster.job, self._host.now)

    def timed_out(self, rank: SimulatedRank, op: SimulatedOp) -> Verdict:
        """Why an op has not ended by its deadline."""
        return timed_out(rank, op, self.progress, self.newcomers(rank))


def _identity(rank: SimulatedRank) -> tuple[object, ...]:
    return rank.roster.job, rank.roster.born, rank.roster.number, rank.id
