"""The driver of an agent's jobs: it carries out what `pmesh.core.jobs.jobs` decides.

It follows the views (`pmesh.agent.mesh.membership.Follower`), and gives ops lanes and memory.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

import msgspec
import trio

from pmesh.agent.config import AgentSettings
from pmesh.agent.containment import Tasks
from pmesh.agent.events import EventLog
from pmesh.agent.jobs.ranks import LocalRank, sum_of
from pmesh.agent.jobs.retained import ResultServer
from pmesh.agent.jobs.together import Meetings, attempt_of
from pmesh.agent.lanes.rendezvous import LaneKey, LaneRendezvous
from pmesh.agent.mesh.membership import Follower, Membership
from pmesh.core.jobs import jobs
from pmesh.core.jobs.jobs import LEFT, JobsState
from pmesh.core.jobs.op_times import DurationCounts, EndedMessage, RankTimes
from pmesh.core.jobs.progress import of_job
from pmesh.core.jobs.speed import Speed
from pmesh.core.links.health import WIRED
from pmesh.core.ops.kinds import KINDS, nbytes_of
from pmesh.core.values import Roster, Trainer, View
from pmesh.core.views.state import Facts
from pmesh.core.wire.lanes import AskResult, LaneMessage, OfferLane, RestLane, Splice
from pmesh.core.wire.trainer import Connect, StartOp
from pmesh.core.wire.views import Heartbeat, RankProgress
from pmesh.ids import Epoch, JobName, Member, OpNumber, TrainerId
from pmesh.net.sessions.arena_pools import SessionArenas
from pmesh.net.sessions.processes import ProcessExits

ENDED_RANKS: Final = 16  # whose latest ops are kept, at most 12 MB


@dataclass(slots=True, kw_only=True)
class WaitingRank(jobs.WaitingTrainer[LocalRank]):
    """A trainer that waits for its job to begin."""

    program: str
    arenas: SessionArenas
    joined: trio.Event = field(default_factory=trio.Event)


EndedOp: TypeAlias = tuple[LocalRank, StartOp | EndedMessage, float, float, float, bool]
"""An op or a message that has ended: when it began and ended, how long its rank waited in the
middle of records, all in seconds of the event loop's clock; and whether it has failed."""


class JobSpeed:
    """How fast a job trains: in steps, if it calls `sync` in each, and in ops."""

    def __init__(self) -> None:
        self.steps, self.ops = Speed(), Speed()

    def note(self, marks: Collection[RankProgress], now: float) -> None:
        """Note how far the job's ranks are known to have come."""
        self.steps.note(max((mark.step for mark in marks), default=0), now)
        self.ops.note(max((mark.completed for mark in marks), default=-1), now)


def _run_of(roster: Roster) -> tuple[JobName, Epoch]:
    return roster.job, roster.born


def _make_rank(roster: Roster, trainer: Trainer, waiter: WaitingRank) -> LocalRank:
    return LocalRank(roster, trainer, waiter.arenas, waiter.program)


class Jobs(JobsState[WaitingRank, LocalRank]):
    """The jobs of one agent."""

    def __init__(
        self,
        me: Member,
        tasks: Tasks,
        event_log: EventLog,
        settings: AgentSettings,
        *,
        membership: Callable[[Follower], Membership],
        rendezvous: Callable[[Callable[[LaneKey], bool]], LaneRendezvous],
    ) -> None:
        """Make the membership that this follows, and the lanes that `awaits_lane` asks for."""
        alone_from = trio.current_time() + settings.find_others_s
        super().__init__(me, _make_rank, min_peers=settings.min_peers, alone_from=alone_from)
        self.membership = membership(self)
        self.rendezvous = rendezvous(self.awaits_lane)
        self.event_log = event_log
        self.exits = ProcessExits()
        self.results = ResultServer(tasks, self.ranks, self)
        self.meetings = Meetings()
        self.speeds: dict[tuple[JobName, Epoch], JobSpeed] = {}
        """The speed of each job of the view, whether it has ranks here or not."""
        self.ended_ops: list[EndedOp] = []
        """Those that are not noted yet; always the same list."""
        self._durations = DurationCounts()
        self._ended_traffic = (0, 0)
        self._ended_times: deque[RankTimes] = deque(maxlen=ENDED_RANKS)

    # --- trainers come and go (`pmesh.agent.jobs.session`)

    def enlist(
        self, request: Connect, arenas: SessionArenas, *, begins: bool = False
    ) -> WaitingRank:
        """Add a trainer that waits for its job to begin, as `begins` says, or to enter it."""
        waiter = WaitingRank(
            job=JobName(request.job),
            wait_for=request.wait_for,
            program=request.program,
            arenas=arenas,
            terms=request.terms,
            place=request.place,
            begins=begins,
        )
        self.add(waiter)
        self.reevaluate()
        return waiter

    def withdraw(self, waiter: WaitingRank) -> None:
        """Remove a trainer that waits no longer; if its job has begun, its rank is lost."""
        self.waiters.pop(waiter.slot, None)
        if waiter.rank is not None:
            self.depart(waiter.rank, "is lost: its trainer left")
        self.reevaluate()

    def depart(self, rank: LocalRank, why: str) -> None:
        """Note that a trainer is gone, or was stopped for too long: its job goes on without it."""
        if self.leave(rank, why, trio.current_time()):
            self._report_losses([rank])

    def waiting_for(self, job: JobName) -> dict[Member, int]:
        """Return how many trainers wait for the job at each member of the view."""
        return self.waiting_at(self.membership.state, job)

    def has_no_room_for(self, waiter: WaitingRank) -> bool:
        """Return whether the view has no room for a trainer that waits here."""
        return self.lacks_room(self.membership.state, waiter, trio.current_time())

    # --- what the agreement reads and decides

    @property
    def moved_at(self) -> float:
        """When bytes of the local ranks were last seen to have moved."""
        return max((rank.lanes.moved_at for rank in self.ranks), default=0.0)

    def facts(self) -> Facts:
        """Return what the local jobs want and have."""
        return self.known(self.membership.state, trio.current_time())

    def install(self, view: View) -> None:
        """Follow a view that is in force: jobs begin, go on under another number, or end."""
        installed = self.follow(self.membership.state, view, trio.current_time())
        for rank in installed.ended:
            self._forget(rank)
        for rank in installed.renumbered:
            rank.note_losses()
            self.meetings.forget(rank.roster.job, below=rank.roster.number)
            rank.lanes.begin(rank.roster, self.rendezvous)
        for waiter, rank in installed.begun:
            rank.lanes.begin(rank.roster, self.rendezvous)
            waiter.joined.set()
        self._report_losses(installed.leaving)
        self.results.answer_early()

    def lost(self, member: Member) -> None:
        """Drop all that a peer has asked for and that waits here: the peer is gone."""
        self.results.forget(member)
        self.rendezvous.lose(member)

    def awaits_lane(self, edge: LaneKey) -> bool:
        """Return whether a lane leads to a local rank, under that rank's current roster."""
        ends = (rank for rank in self.ranks if rank.id == edge.receiver)
        return any(rank.lanes.edge(edge.sender, rank.id, edge.op) == edge for rank in ends)

    def marked(self, member: Member, heartbeat: Heartbeat) -> None:
        """Note what a peer's heartbeat says of its ranks, and which views it has installed."""
        heard = self.hear(self.membership.state, member, heartbeat)
        for mark in heard.stops:
            self.note_stop(mark)
        if heard.differs:
            self.reevaluate()

    def note_stop(self, mark: RankProgress) -> None:
        """Record that a trainer's process, here or elsewhere, was stopped or runs again."""
        roster = self.membership.view.roster_of(mark.job)
        if roster is None:
            return
        name = f"job {mark.job!r}: the process of {roster.describe(mark.trainer)}"
        if mark.stopped:
            text = f"{name} has been stopped; the others wait for it"
            self.event_log.note("trainer stopped", text, job=mark.job)
        else:
            self.event_log.note("trainer continued", f"{name} runs again", job=mark.job)

    def poll(self) -> None:
        """Check, with each heartbeat, what no message reports."""
        for rank in self.ranks:
            rank.recall()  # to know, too, how fast its lanes are, and what its trainer keeps
            rank.lanes.note_traffic()
            self._note_bandwidths(rank)
            attempt = attempt_of(rank.roster, OpNumber(rank.ledger.started))
            rank.moved = sum(rank.lanes.traffic) + self.meetings.taken(attempt)
            rank.patience_s = self._patience_s(rank)
        self._note_speeds()
        self._note_ops()
        passed = self.pass_time(self.membership.state, trio.current_time())
        for rank in passed.ended:
            self._forget(rank)
        self._report_losses(passed.leaving)
        if passed.stuck:
            self.reevaluate()

    def _note_speeds(self) -> None:
        now = trio.current_time()
        for rank in self.ranks:
            own_percent = rank.own_time.percent(now)
            rank.own_percent = -1 if own_percent is None else own_percent
        rosters = self.membership.view.rosters
        self.speeds = {at: self.speeds.get(at) or JobSpeed() for at in map(_run_of, rosters)}
        for roster in rosters:
            known = (self.progress.of(roster, trainer) for trainer in roster.ids)
            marks = [mark for mark in known if mark is not None]
            self.speeds[_run_of(roster)].note(marks, now)

    def _note_bandwidths(self, rank: LocalRank) -> None:
        for sender, hosts, mbit_s in rank.lanes.measure_mbit_s():
            trainer = rank.roster.trainer(sender)
            if trainer is not None and trainer.member != self.me:
                self.membership.probing.note(trainer.member, hosts, mbit_s)

    def _patience_s(self, rank: LocalRank) -> float:
        """Return how long the neighbour on the slower link may be silent before it is gone."""
        peers = () if rank.rank is None else rank.neighbours()
        known = [h for peer in peers if (h := self.membership.health_of(peer.member.node))]
        return max((h.gone_after_s for h in known), default=WIRED.gone_after_s)

    def _report_losses(self, ranks: Iterable[LocalRank]) -> None:
        """Record all losses before the leader is asked, whose view may come at once."""
        leaving = [
            (r.roster.job, r.view_request.verdict) for r in ranks if r.view_request is not None
        ]
        for job, verdict in leaving:
            text = "" if verdict is None else verdict.message
            if not text.endswith(LEFT):  # that is no loss: the view says "rank left"
                self.event_log.note("loss noticed", f"job {job!r}: {text}", job=job)
        if leaving:
            self.reevaluate()

    def _forget(self, rank: LocalRank) -> None:
        """Clean up after a rank that has ended here."""
        self._ended_traffic = sum_of(self._ended_traffic, rank.lanes.traffic)
        self._note_ops()
        self._ended_times.append(rank.times)
        if all(other.roster.job != rank.roster.job for other in self.ranks):
            self.rendezvous.forget(rank.roster.job, below=rank.roster.number + 1)
            self.meetings.forget(rank.roster.job, below=rank.roster.number + 1)

    def vouch(self) -> None:
        """V8: let the library answer calls for another second."""
        for rank in self.ranks:
            if rank.repeats is not None:
                rank.repeats.vouch()

    # --- a group rests

    def rest(self, rank: LocalRank) -> None:
        """Ask the receivers of a rank's lanes to close them until its next op."""
        roster = rank.roster
        for receiver in rank.lanes.ask_to_rest(self.rendezvous):
            trainer = roster.trainer(receiver)
            if trainer is not None:
                self._send_rest(
                    trainer.member,
                    RestLane(roster.job, roster.born, roster.number, rank.id, receiver),
                )

    def receive(self, member: Member, message: LaneMessage) -> None:
        """Handle a member's message about lanes."""
        match message:
            case OfferLane() | Splice():
                self.rendezvous.accept(member, message)
            case RestLane():
                self.rest_lane(member, message)
            case AskResult():
                self.results.answer(member, message)
            case _:
                assert_never(message)

    def rest_lane(self, member: Member, message: RestLane) -> None:
        """Answer a lane's sender, which asks to close it, or take the receiver's answer."""
        if message.agreed is None:
            rank = self._end_of_lane(member, message, message.receiver, message.sender)
            if rank is not None:
                rank.recall()
            agreed = (
                rank is not None
                and rank.running is None
                and not rank.fences  # V4: a view that comes may keep this lane
                and rank.lanes.agree_to_rest(message.sender, self.rendezvous)
            )
            self._send_rest(member, msgspec.structs.replace(message, agreed=agreed))
        else:
            rank = self._end_of_lane(member, message, message.sender, message.receiver)
            if rank is not None:
                rank.lanes.answered(
                    message.receiver, agreed=message.agreed, rendezvous=self.rendezvous
                )

    def _end_of_lane(
        self, member: Member, message: RestLane, own: TrainerId, peer: TrainerId
    ) -> LocalRank | None:
        """Return the local rank at one end of a lane, if the other end is at that member."""
        run = message.job, message.born, message.number
        for rank in self.ranks:
            roster, trainer = rank.roster, rank.roster.trainer(peer)
            if (roster.job, roster.born, roster.number) == run and rank.id == own:
                return rank if trainer is not None and trainer.member == member else None
        return None

    def _send_rest(self, member: Member, message: RestLane) -> None:
        if member == self.me:
            self.rest_lane(member, message)
        else:
            self.membership.send(member, message)

    # --- what surrounds an op

    def reevaluate(self) -> None:
        """Tell the agreement that a fact has changed."""
        self.membership.reevaluate()

    def beat(self) -> None:
        """Send the others at once how far our ranks have come."""
        self.stabilize()
        self.membership.beat()

    def ask(self, member: Member, message: AskResult) -> None:
        """Send the member a request for a result."""
        self.membership.send(member, message)

    def round_trips_s(self, members: Iterable[Member]) -> dict[Member, float]:
        """Return the least round trip to each of these members that has been measured."""
        return self.membership.round_trips_s(members)

    def recall_others(self, rank: LocalRank) -> None:
        """Have the other ranks here make the call in Python, too, so that all meet there."""
        for other in of_job(self.ranks, rank.roster):
            if other is not rank:
                other.recall()

    def newcomers(self, rank: LocalRank) -> int:
        """Return how many trainers wait to enter the job."""
        now = trio.current_time()
        return self.newcomers_to(self.membership.state, rank.roster.job, now)

    def runs_without_sync(self, job: JobName) -> bool:
        """O6: return whether the job runs ops but has never called `sync`, so none can enter it."""
        roster = self.membership.view.roster_of(job)
        return roster is not None and self.progress.show_no_sync(roster)

    @property
    def times(self) -> Iterator[RankTimes]:
        """The latest ops of the ranks here, and of those that have ended."""
        self._note_ops()
        yield from self._ended_times
        yield from (rank.times for rank in self.ranks)

    @property
    def durations(self) -> DurationCounts:
        """How long the ops of all ranks of this agent took."""
        self._note_ops()
        return self._durations

    def _note_ops(self) -> None:
        """Note the ops that have ended since the last time.

        Some hundred at once, with all of this in the processor's caches: right after each op it
        took several times as long.
        """
        for rank in self.ranks:
            rank.catch_up()
        for rank, what, began, end, received_s, failed in self.ended_ops:
            peer = tag = -1
            if isinstance(what, EndedMessage):
                kind, nbytes, op, peer, tag = what
            else:
                kind, op = what.call.kind, what.op
                if kind not in KINDS:
                    continue  # nobody has looked at the call: an earlier failure answered it (I5)
                nbytes = nbytes_of(what)
                if not failed:
                    self._durations.note(kind, nbytes, end - began)
            place = rank.rank
            rank.times.rank, rank.times.pid = -1 if place is None else place, rank.pid
            rank.times.note(
                op,
                kind,
                nbytes,
                began_s=began,
                took_s=end - began,
                receiving_s=received_s,
                completed=not failed,
                peer=peer,
                tag=tag,
            )
        self.ended_ops.clear()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of tensor data sent and received at the sockets since the agent's start."""
        total = self._ended_traffic
        for rank in self.ranks:
            total = sum_of(total, rank.lanes.traffic)
        return total

    def close(self) -> None:
        """Close all lanes, as the agent ends."""
        for rank in self.ranks:
            rank.lanes.close()
        self.rendezvous.close()
