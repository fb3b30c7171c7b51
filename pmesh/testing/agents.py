"""A simulated agent: drives the real agreement as the real agent does, on simulated time."""

from collections.abc import Callable, Mapping
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
    decode_untrusted,
    encode,
)
from pmesh.core.standing import Facts, Fence, Install, Send, State, Step, heartbeat_of
from pmesh.core.views import Roster, View
from pmesh.ids import Incarnation, JobName, Member, NodeId, OpNumber, Rank
from pmesh.testing.jobs import LocalJob
from pmesh.testing.lane_messages import (
    LaneMessage,
    Retained,
    decode_lane_message,
    encode_lane_message,
)
from pmesh.testing.links import Link, Links
from pmesh.testing.local_jobs import LocalJobs
from pmesh.testing.network import Network
from pmesh.testing.timeline import Timeline
from pmesh.testing.traces import describe
from pmesh.testing.trainers import Habits, Trainer

if TYPE_CHECKING:
    from pmesh.testing.invariants import Invariants

HEARTBEAT_S = 0.2
GONE_AFTER_S = 2.0
"""Silence after which a peer is gone (`pmesh.core.health`, WIRED)."""

STALL_S = GONE_AFTER_S / 2
"""V8: a stall of our own of this length is not held against others."""

BACK_AFTER_S = 1.0
"""On average this long after its trainer has left, a machine starts another."""


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
        self._links = Links(network, number)
        self._round_trips: dict[Incarnation, int] = {}
        self._local = LocalJobs(self, member)
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
        return self._local.trainers

    @property
    def jobs(self) -> dict[JobName, LocalJob]:
        """The running jobs that have ranks here."""
        return self._local.running

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
        old = self._links.remove(peer)
        if old is not None:
            self._break_lanes(old)
            if old.member != hello.member:  # V6: the redial has met another incarnation
                self._lose(old, "it has restarted")
        self._links.add(peer, hello.member, self.now)
        self._round_trips[hello.member.incarnation] = self._peers[peer]
        self._links.tell(hello.member, TellView(self.state.view))
        self._links.tell(hello.member, self._heartbeat())

    def unreachable(self, peer: int) -> None:
        """A dial has failed."""
        link = self._links.remove(peer)
        if link is not None:
            self._lose(link, "its connection is closed and a redial failed")

    def disconnected(self, peer: int) -> None:
        """V6: the end of a connection means gone only if a redial at once fails."""
        link = self._links.get(peer)
        if link is not None:
            self._break_lanes(link)
            self._links.dial(peer, self.now)

    def received(self, peer: int, channel: str, data: bytes) -> None:
        """A message has arrived, on the link or on a job's lane."""
        if channel != "link":
            self._local.receive(decode_lane_message(data))
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
                    self._links.tell(action.to, action.message)
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
        self._local.install(view)
        self._facts = None
        for job in list(self.jobs.values()):
            self._invariants.agree(job)
        self._local.receive_early()

    # --- time

    def _tick(self) -> None:
        if not self._running:
            return
        self._timeline.after(HEARTBEAT_S * (0.9 + 0.2 * self._random.random()), self._tick)
        if self.asleep:
            return
        if self.now - self._ticked_at > STALL_S:
            self._links.forgive(self.now)
        self._ticked_at = self.now
        for link in self._links.close_silent(self.now - GONE_AFTER_S):
            self._break_lanes(link)
            self._lose(link, f"silent for {GONE_AFTER_S} s")
        self._links.dial_missing(self._peers, self.now)
        share = HEARTBEAT_S / BACK_AFTER_S
        self._local.employ(self._habits, share, self._timeline, self._random)
        self._local.pass_time(self._known().marks, self.state.peers.values())
        self._perform(agreement.pass_time(self.state, self._known(), now=self.now))
        self._beat()

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
        self._links.send(to, f"lane {message.job}", data)

    def ask_result(self, roster: Roster, op: OpNumber, holder: Rank, to_rank: Rank) -> None:
        """Ask the holder's agent for the op's retained result (O2)."""
        ask = AskResult(roster.job, roster.born, roster.number, op, holder, to_rank)
        host = roster.trainers[holder].member
        if host == self.state.me:
            self._timeline.after(0.0, self._answer, ask)
        else:
            self._links.tell(host, ask)

    def op_ended(self, job: LocalJob, rank: Rank, op: OpNumber) -> None:
        """An op has ended at a local rank."""
        self._note(self.number, f"{job.roster.job} op {op} at rank {rank}: {job.ends[rank, op]}")
        self._invariants.ended(job, rank, op)

    def _answer(self, ask: AskResult) -> None:
        job = self._local.asked_of(ask)
        if job is None:
            return  # they ask again
        kept = job.retained(ask.holder, ask.op)
        if kept is None:
            self._invariants.lost_result(job, ask)
            return
        retained = Retained(ask.job, ask.born, ask.number, ask.to_rank, ask.op, *kept)
        self.send_on_lane(job.roster.trainers[ask.to_rank].member, retained)

    # --- what we know, and say

    def _known(self) -> Facts:
        if self._facts is None:
            self._facts = self._local.facts(self.state.view, self._round_trips)
        return self._facts

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
        self._links.tell_all(self._shown)

    def _lose(self, link: Link, why: str) -> None:
        self._note(self.number, f"loses {link.member.node.hex()[-1:]}: {why}")
        step = agreement.lose(self.state, link.member.node, why, self._known(), now=self.now)
        self._perform(step)

    def _break_lanes(self, link: Link) -> None:
        for job in self.jobs.values():
            job.lane_broke(link.member)


def node_of(number: int) -> NodeId:
    """The node id of a simulated host."""
    return NodeId(bytes(31) + bytes([number]))


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
