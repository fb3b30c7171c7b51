"""A simulated agent: drives the real agreement as the real agent does, on simulated time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from pmesh.core import agreement
from pmesh.core.messages import (
    PROTOCOL_VERSION,
    AskResult,
    Commit,
    Heartbeat,
    Hello,
    KnownPeers,
    LinkMessage,
    OfferLane,
    TellView,
    Waiting,
    decode_untrusted,
    encode,
)
from pmesh.core.standing import Facts, Fence, Install, Send, State, Step, heartbeat_of
from pmesh.core.views import Roster, View
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, OpNumber, Rank, Slot
from pmesh.testing.jobs import LocalJob
from pmesh.testing.lane_messages import (
    LaneMessage,
    Retained,
    age,
    decode_lane_message,
    encode_lane_message,
)
from pmesh.testing.network import Network
from pmesh.testing.timeline import Timeline
from pmesh.testing.trainers import Habits, Trainer, chance

if TYPE_CHECKING:
    from pmesh.testing.invariants import Invariants

HEARTBEAT_S = 0.2
GONE_AFTER_S = 2.0
"""Silence after which a peer is gone (`pmesh.core.health`, WIRED)."""

STALL_S = GONE_AFTER_S / 2
"""V8: a stall of our own of this length is not held against others."""

BACK_AFTER_S = 1.0
"""On average this long after its trainer has left, a machine starts another."""

REDIAL_S = 1.0
"""How often a peer that is gone is dialled."""


@dataclass(slots=True)
class _Link:
    member: Member
    heard_at: float


class Agent:
    """One process start of one node."""

    def __init__(
        self,
        number: int,
        member: Member,
        *,
        timeline: Timeline,
        network: Network,
        random: Random,
        invariants: "Invariants",
        habits: tuple[Habits, ...],
        peers: Mapping[int, int],
        note: Callable[[int, str], None],
    ) -> None:
        self.number = number
        self.name = f"node-{number}"
        self.state: State = agreement.first_state(member, self.name, now=timeline.now)
        self.jobs: dict[JobName, LocalJob] = {}
        self.before_commit: Callable[[Agent], None] | None = None
        """Called when this agent is about to send a commit: where faults hurt most."""
        self._timeline = timeline
        self._network = network
        self._random = random
        self._invariants = invariants
        self._note = note
        self._habits = habits
        self._peers = peers
        """The other hosts' numbers, each with the round trip to it in microseconds."""
        self._links: dict[int, _Link] = {}
        self._dialled_at: dict[int, float] = {}
        self._round_trips: dict[Incarnation, int] = {}
        self._trainers: dict[Slot, Trainer] = {}
        self._early: list[LaneMessage] = []
        self._facts: Facts | None = None
        self._shown: Heartbeat | None = None
        self._stepping = False
        self._running = True
        self._ticked_at = timeline.now
        invariants.installed(member, self.state.view)
        network.attach(number, self)
        timeline.after(random.random() * HEARTBEAT_S, self._tick)

    # --- what others read

    @property
    def now(self) -> float:
        """Simulated time."""
        return self._timeline.now

    @property
    def asleep(self) -> bool:
        """Whether the machine sleeps."""
        return self._network.is_frozen(self.number)

    @property
    def greeting(self) -> bytes:
        """The Hello."""
        return encode(Hello(PROTOCOL_VERSION, self.state.me, self.name))

    @property
    def trainers(self) -> tuple[Trainer, ...]:
        """The training processes that are connected to this agent."""
        return tuple(trainer for trainer in self._trainers.values() if trainer.alive)

    def crash(self) -> None:
        """The process is killed, and the trainers' connections with it."""
        self._running = False
        self._network.detach(self.number)
        for trainer in self.trainers:
            trainer.leave()

    def drop(self, peer: int) -> None:
        """The connection with a peer breaks, as if a router had forgotten it."""
        self._network.close(self.number, peer)
        self.disconnected(peer)

    # --- what the network brings

    def connected(self, peer: int, greeting: bytes) -> None:
        """A link is up."""
        hello = decode_untrusted(greeting)
        assert isinstance(hello, Hello)  # noqa: S101 - the network brings what `greeting` gave
        old = self._links.pop(peer, None)
        if old is not None:
            self._break_lanes(old)
            if old.member != hello.member:  # V6: the redial has met another incarnation
                self._lose(old, "it has restarted")
        self._links[peer] = _Link(hello.member, self.now)
        self._round_trips[hello.member.incarnation] = self._peers[peer]
        self._tell(hello.member, TellView(self.state.view))
        self._tell(hello.member, self._heartbeat())

    def unreachable(self, peer: int) -> None:
        """A dial has failed."""
        link = self._links.pop(peer, None)
        if link is not None:
            self._lose(link, "its connection is closed and a redial failed")

    def disconnected(self, peer: int) -> None:
        """V6: the end of a connection means gone only if a redial at once fails."""
        link = self._links.get(peer)
        if link is not None:
            self._break_lanes(link)
            self._dial(peer)

    def received(self, peer: int, channel: str, data: bytes) -> None:
        """A message has arrived, on the link or on a job's lane."""
        if channel != "link":
            self._receive_on_lane(decode_lane_message(data))
            return
        link = self._links.get(peer)
        if link is None:
            return
        link.heard_at = self.now
        self._receive_on_link(link.member, decode_untrusted(data))

    def _receive_on_link(self, sender: Member, message: LinkMessage) -> None:
        match message:
            case AskResult():
                self._answer(message)
            case Hello() | OfferLane() | KnownPeers():
                raise AssertionError(f"no simulated agent sends {message}")
            case _:
                self._perform(
                    agreement.hear(self.state, sender, message, self._known(), now=self.now)
                )

    def _receive_on_lane(self, message: LaneMessage) -> None:
        job = self.jobs.get(message.job)
        by = age(message, None if job is None else job.roster)
        if by > 0:
            self._early.append(message)
        elif job is not None and by == 0:
            job.receive(message)

    # --- what the agreement wants done

    def _perform(self, step: Step) -> None:
        self.state = step.state
        for action in step.actions:
            match action:
                case Send():
                    if isinstance(action.message, Commit) and self.before_commit is not None:
                        self.before_commit(self)
                    if not self._running:
                        return
                    self._tell(action.to, action.message)
                case Fence():
                    self._note(self.number, f"fences {action.jobs} for {self.state.promised[0]}")
                    for name in action.jobs:
                        if name in self.jobs:
                            self.jobs[name].fence()
                case Install():
                    self._install(action.view)
        self._invariants.promised(self.state.me, self.state.promised)
        self._show()

    def _install(self, view: View) -> None:
        self._note(self.number, describe(view))
        self._invariants.installed(self.state.me, view)
        for name, job in list(self.jobs.items()):
            roster = view.roster_of(name)
            if roster is None or roster.born != job.roster.born or _left_out(job, roster):
                del self.jobs[name]
                job.supersede()
        for roster in view.rosters:
            ranks = roster.ranks_of(self.state.me)
            if roster.job in self.jobs:
                self.jobs[roster.job].install(roster)
            elif ranks and not set(ranks) <= roster.lost_ranks:
                self._begin(roster, ranks)
        self._facts = None
        for job in list(self.jobs.values()):
            self._invariants.agree(job)
        early, self._early = self._early, []
        for message in early:
            self._receive_on_lane(message)

    def _begin(self, roster: Roster, ranks: tuple[Rank, ...]) -> None:
        trainers = {rank: self._trainers[roster.trainers[rank].slot] for rank in ranks}
        job = self.jobs[roster.job] = LocalJob(self, roster, trainers)
        for rank, trainer in trainers.items():
            trainer.begin(job, rank)

    # --- time

    def _tick(self) -> None:
        if not self._running:
            return
        self._timeline.after(HEARTBEAT_S * (0.9 + 0.2 * self._random.random()), self._tick)
        if self.asleep:
            return
        if self.now - self._ticked_at > STALL_S:
            for link in self._links.values():
                link.heard_at = self.now
        self._ticked_at = self.now
        for peer, link in list(self._links.items()):
            if self.now - link.heard_at > GONE_AFTER_S:
                self._network.close(self.number, peer)
                del self._links[peer]
                self._break_lanes(link)
                self._lose(link, f"silent for {GONE_AFTER_S} s")
        for peer in self._peers:
            if peer not in self._links and self.now - self._dialled_at.get(peer, -9.0) > REDIAL_S:
                self._dial(peer)
        self._employ()
        for job in list(self.jobs.values()):
            job.stabilize(self._stable_mark(job.roster))
            job.pass_time()
        self._perform(agreement.pass_time(self.state, self._known(), now=self.now))
        self._beat()

    def _employ(self) -> None:
        """Each job that this machine takes part in has its trainer; one that ended comes back."""
        for habits in self._habits:
            employed = any(trainer.habits is habits for trainer in self.trainers)
            if not employed and chance(self._random, HEARTBEAT_S / BACK_AFTER_S):
                slot = Slot(len(self._trainers))
                self._trainers[slot] = Trainer(self._timeline, self._random, slot, habits)
                self.facts_changed()

    # --- what a job needs

    def facts_changed(self) -> None:
        """What is reported, or wanted, is no longer what it was: others hear of it at once."""
        self._facts = None
        if not self._stepping:
            self._stepping = True
            self._timeline.after(0.0, self._show_later)

    def send_on_lane(self, to: Member, message: LaneMessage) -> None:
        """To a rank's agent, which may be this one."""
        data = encode_lane_message(message)
        if to == self.state.me:
            self._network.send(self.number, self.number, f"lane {message.job}", data)
        for peer, link in self._links.items():
            if link.member == to:
                self._network.send(self.number, peer, f"lane {message.job}", data)

    def ask_result(self, roster: Roster, op: OpNumber, holder: Rank, to_rank: Rank) -> None:
        """Ask the holder's agent for the op's retained result (O2)."""
        ask = AskResult(roster.job, roster.born, roster.number, op, holder, to_rank)
        host = roster.trainers[holder].member
        if host == self.state.me:
            self._timeline.after(0.0, self._answer, ask)
        else:
            self._tell(host, ask)

    def op_ended(self, job: LocalJob, rank: Rank, op: OpNumber) -> None:
        """An op has ended at a local rank."""
        self._note(self.number, f"{job.roster.job} op {op} at rank {rank}: {job.ends[rank, op]}")
        self._invariants.ended(job, rank, op)

    def _answer(self, ask: AskResult) -> None:
        job = self.jobs.get(ask.job)
        if job is None or (job.roster.born, job.roster.number) != (ask.born, ask.number):
            return  # we, or they, have not yet installed the view; they ask again
        kept = job.retained(ask.holder, ask.op)
        if kept is None:
            self._invariants.lost_result(job, ask)
            return
        retained = Retained(ask.job, ask.born, ask.number, ask.to_rank, ask.op, *kept)
        self.send_on_lane(job.roster.trainers[ask.to_rank].member, retained)

    # --- what we know, and say

    def _known(self) -> Facts:
        if self._facts is None:
            jobs = self.jobs.values()
            self._facts = Facts(
                reports=tuple(job.report() for job in jobs),
                waiting=tuple(
                    Waiting(trainer.habits.job, trainer.slot, trainer.habits.wait_for)
                    for trainer in self.trainers
                    if trainer.waiting and self.state.view.roster_of(trainer.habits.job) is None
                ),
                concerns=tuple(concern for job in jobs for concern in job.concerns()),
                marks=tuple(marks for job in jobs for marks in job.marks()),
                round_trips=self._round_trips,
            )
        return self._facts

    def _stable_mark(self, roster: Roster) -> int:
        """O2: the op up to which all ranks say that they have ended; of this very roster."""
        ended = {
            marks.rank: marks.completed for marks in self._known().marks if marks.job == roster.job
        }
        for peer in self.state.peers.values():
            theirs = peer.view.roster_of(roster.job)
            if theirs is not None and theirs.born == roster.born:
                for marks in peer.heartbeat.marks:
                    if marks.job == roster.job and marks.number == roster.number:
                        ended[marks.rank] = marks.completed
        return min(ended.get(Rank(rank), -1) for rank in range(len(roster.trainers)))

    def _heartbeat(self) -> Heartbeat:
        return heartbeat_of(self.state, self._known(), self.now)

    def _show_later(self) -> None:
        self._stepping = False
        if self._running and not self.asleep:
            self._show()

    def _show(self) -> None:
        """A heartbeat at once whenever it says anything new; marks ride on the regular ones."""
        beat, shown = self._heartbeat(), self._shown
        if shown is None or _content(beat) != _content(shown):
            self._beat(beat)

    def _beat(self, beat: Heartbeat | None = None) -> None:
        self._shown = beat or self._heartbeat()
        data = encode(self._shown)
        for peer in self._links:
            self._network.send(self.number, peer, "link", data)

    def _tell(self, to: Member, message: LinkMessage) -> None:
        for peer, link in self._links.items():
            if link.member == to:
                self._network.send(self.number, peer, "link", encode(message))

    def _dial(self, peer: int) -> None:
        self._dialled_at[peer] = self.now
        self._network.dial(self.number, peer)

    def _lose(self, link: _Link, why: str) -> None:
        self._note(self.number, f"loses {link.member.node.hex()[-1:]}: {why}")
        step = agreement.lose(self.state, link.member.node, why, self._known(), now=self.now)
        self._perform(step)

    def _break_lanes(self, link: _Link) -> None:
        for job in self.jobs.values():
            job.lane_broke(link.member)


def node_of(number: int) -> NodeId:
    """The node id of a simulated host."""
    return NodeId(bytes(31) + bytes([number]))


def describe(view: View) -> str:
    """A view in one line of a trace."""
    members = " ".join(f"{m.node[-1]}:{m.incarnation % 1000}" for m in view.by_seniority)
    rosters = " ".join(
        f"{r.job}#{r.number} born {_short(r.born)} lost {sorted(r.lost_ranks)} "
        + ",".join(f"{o.op}:{o.verdict.error if o.verdict else o.holders}" for o in r.outcomes)
        for r in view.rosters
    )
    return f"installs {_short(view.epoch)} [{members}] {rosters}"


def _short(epoch: Epoch) -> str:
    return f"{epoch.counter}.{epoch.leader[-1]}"


def _left_out(job: LocalJob, roster: Roster) -> bool:
    """Another history of the job has lost our living ranks."""
    return any(
        rank in roster.lost_ranks and rank not in job.roster.lost_ranks and trainer.alive
        for rank, trainer in job.trainers.items()
    )


def _content(beat: Heartbeat) -> tuple[object, ...]:
    return (
        beat.view,
        beat.promised,
        beat.flushed,
        beat.acting,
        beat.needs_epoch,
        sorted(beat.heard),
        beat.waiting,
        beat.concerns,
    )
