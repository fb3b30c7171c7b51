"""A simulated agent: drives the real agreement as `pmesh.agent` does, on simulated time."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, assert_never

import msgspec

from pmesh.core.links import health
from pmesh.core.links.health import WIRED
from pmesh.core.values import OpOutcome, Roster, SignedName, View
from pmesh.core.views import agreement, limits
from pmesh.core.views.agreement import StallGuard
from pmesh.core.views.state import (
    Facts,
    FenceJobs,
    Install,
    MemberState,
    MemberStep,
    Peer,
    SendOnLink,
    heartbeat_of,
    is_vouched_for,
)
from pmesh.core.wire.lanes import AskResult
from pmesh.core.wire.link import PROTOCOL_VERSION, Hello
from pmesh.core.wire.views import AgreementMessage, Commit, Heartbeat, MeasuredEdge, TellView
from pmesh.ids import Epoch, Incarnation, Member, NodeId, OpNumber
from simulation import ops
from simulation.healing import Healing
from simulation.invariants import Violation
from simulation.lane_messages import LaneMessage, Retained, Token
from simulation.links import Links, Message, SimulatedLink, says_the_same
from simulation.local_jobs import LocalJobs
from simulation.network import Network, Timeline
from simulation.ranks import SimulatedRank
from simulation.trainers import Habits, SimulatedTrainer, chance

if TYPE_CHECKING:
    from simulation.invariants import Invariants


def describe(view: View) -> str:
    """A view in one line of a trace."""
    members = " ".join(f"{m.node[-1]}:{m.incarnation % 1000}" for m in view.by_seniority)
    rosters = " ".join(map(_describe_roster, view.rosters))
    return f"installs {_short(view.epoch)} [{members}] {rosters}"


def _describe_roster(roster: Roster) -> str:
    trainers = ",".join(f"{t.id}@{t.member.node[-1]}" for t in roster.trainers)
    lost_holders = "".join(f"+{t.id}@{t.member.node[-1]}" for t in roster.lost_holders)
    outcomes = ",".join(map(_describe_outcome, roster.outcomes))
    quorum = "" if roster.quorate else " no quorum"
    born = _short(roster.born)
    return f"{roster.job}#{roster.number} born {born} <{trainers}{lost_holders}>{quorum} {outcomes}"


def _describe_outcome(outcome: OpOutcome) -> str:
    ended = outcome.verdict.error if outcome.verdict else outcome.holders
    return f"{outcome.op}:{ended}/{outcome.contributors}"


def _short(epoch: Epoch) -> str:
    return f"{epoch.counter}.{epoch.leader[-1]}"


HEARTBEAT_S = 0.2
DOUBT_S = WIRED.gone_after_s / 2
"""V8: after a stall of our own of this length, somebody may have given us up."""

BACK_AFTER_S = 1.0
"""On average this long after its trainer has gone, a machine starts another."""


class SimulatedAgent:
    """One process start of one node."""

    def __init__(
        self,
        number: int,
        member: Member,
        *,
        timeline: Timeline,
        network: Network[Message],
        random: Random,
        invariants: "Invariants",
        healing: Healing,
        habits: tuple[Habits, ...],
        peers: Mapping[int, MeasuredEdge],
        note: Callable[[int, str], None],
    ) -> None:
        self.number = number
        self.name = f"node-{number}"
        said = SignedName(
            self.name, bytes(64)
        )  # the driver checks signatures, and is not simulated
        self.state: MemberState = agreement.first_state(member, said, now=timeline.now)
        self.before_commit: Callable[[SimulatedAgent], None] | None = None
        """Called when this agent is about to send a commit: where faults hurt most."""
        self.greeting = Hello(PROTOCOL_VERSION, member, said)
        self._timeline = timeline
        self._network = network
        self._random = random
        self._invariants = invariants
        self._healing = healing
        self._note = note
        self._habits = habits
        self._peers = peers
        """The other hosts' numbers, each with what is measured of the way to it; it may change."""
        self._links = Links(network, number)
        self._edges: dict[Incarnation, MeasuredEdge] = {}
        self.jobs = LocalJobs(self)
        self._trainers: list[SimulatedTrainer] = []
        self._facts: Facts | None = None
        self._shown: Heartbeat | None = None
        self._showing = False
        self._running = True
        self._stall_guard = StallGuard()
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
    def trainers(self) -> list[SimulatedTrainer]:
        """The training processes that are connected to this agent."""
        return [trainer for trainer in self._trainers if trainer.alive]

    def crash(self) -> None:
        """The process is killed, and the trainers' connections with it."""
        self._running = False
        self._network.detach(self.number)
        for trainer in self._trainers:
            trainer.lose_agent()

    def dismiss(self) -> None:
        """The user ends the trainers of this machine, and starts no others."""
        self._habits = ()
        for trainer in self.trainers:
            trainer.leave()

    def adopt(self, view: View, peers: Mapping[NodeId, Peer]) -> None:
        """Begin as a member of a view, as if it had been agreed on with these peers."""
        counter = view.epoch.counter
        self.state = replace(
            self.state, view=view, promised=view.epoch, highest_counter=counter, peers=peers
        )
        self._invariants.installed(self.state.me, view)

    def drop(self, peer: int) -> None:
        """The connection with a peer breaks, as if a router had forgotten it."""
        self._network.close(self.number, peer)
        self.disconnected(peer)

    def wake(self, slept_s: float) -> None:
        """The machine goes on; what has arrived is read after the stall has been noticed (V8)."""
        self._links.forgive(slept_s, self.now)
        long = slept_s >= DOUBT_S
        if long:
            self._invariants.slept(self.state.me, self.now - slept_s)
        self._network.thaw(self.number, self._doubt_all if long else None)

    # --- what the network brings

    def connected(self, peer: int, greeting: Message) -> None:
        """A link is up."""
        assert isinstance(greeting, Hello)  # noqa: S101 - the network brings what `greeting` gave
        old = self._links.remove(peer)
        if old is not None:
            self.jobs.lane_broke(old.member)
            if old.member != greeting.member:  # V6: the redial has met another incarnation
                self._lose(old, "it has restarted")
        self._links.add(peer, greeting.member, self.now)
        self._edges[greeting.member.incarnation] = self._peers[peer]
        self._links.send_control(greeting.member, TellView(self.state.view))
        self._links.send_control(greeting.member, self._heartbeat())

    def unreachable(self, peer: int) -> None:
        """A dial has failed."""
        link = self._links.remove(peer)
        if link is not None:
            self._lose(link, "its connection is closed and a redial failed")

    def disconnected(self, peer: int) -> None:
        """V6: the end of a connection means gone only if a redial at once fails."""
        link = self._links.get(peer)
        if link is not None:
            self.jobs.lane_broke(link.member)
            self._links.dial(peer, self.now)

    def received(self, peer: int, channel: str, message: Message) -> None:  # noqa: ARG002 - Host's
        """A message has arrived, on the link or on a job's lane."""
        if isinstance(message, Token | Retained):
            self.jobs.receive(message)
            return
        link = self._links.get(peer)
        if link is not None:
            link.health = health.heard_from(link.health, now=self.now).health
            self._receive_on_link(link, message)

    def _receive_on_link(self, link: SimulatedLink, message: Message) -> None:
        match message:
            case Heartbeat():
                self._measure(link, message)
                if self._is_new(link.member, message):
                    self._handle(link.member, message)
                self._doubt(self._stall_guard.receive(self.state, link.member, message))
                self.jobs.marked(link.member, message)
            case AskResult():
                self._answer(message)
            case _:
                assert isinstance(message, AgreementMessage)  # noqa: S101 - no others are sent
                self._handle(link.member, message)

    # --- what the agreement wants done

    def _is_new(self, sender: Member, beat: Heartbeat) -> bool:
        """Else nothing follows from it that the next tick would not do: it saves half the time."""
        peer = self.state.peers.get(sender.node)
        return (
            peer is None
            or peer.member != sender
            or self.state.flushed_at is not None  # V6: it may show the view; V11: its echo counts
            or not says_the_same(peer.heartbeat, beat)
        )

    def _measure(self, link: SimulatedLink, beat: Heartbeat) -> None:
        round_trip_s = health.measure_round_trip_s(
            now_us=round(self.now * 1e6), echo_us=beat.echo_us, held_us=beat.held_us
        )
        self._healing.measured(round_trip_s)
        step = health.heard_from(link.health, now=self.now, round_trip_s=round_trip_s)
        link.health = step.health
        link.sent_us, link.heard_at = beat.sent_us, self.now

    def _handle(self, sender: Member, message: AgreementMessage) -> None:
        self._perform(agreement.receive(self.state, sender, message, self._known(), now=self.now))

    def _perform(self, step: MemberStep) -> None:
        before = self.state
        self.state = step.state
        for action in step.actions:
            match action:
                case SendOnLink(to, message):
                    if isinstance(message, Commit) and self.before_commit is not None:
                        self.before_commit(self)
                    if not self._running:
                        return
                    self._links.send_control(to, message)
                case FenceJobs(jobs):
                    self._note(self.number, f"fences {jobs} for {self.state.promised[0]}")
                    self.jobs.fence(jobs)
                case Install(view):
                    self._install(before, view)
                case _:
                    assert_never(action)
        if self.state.primaries is not before.primaries:
            self._check_who_may_run()
        if any(isinstance(action, Install) for action in step.actions):
            self._timeline.after(0.0, self._reevaluate)
        if self.state is not before or step.actions:
            self._invariants.promised(self.state.me, self.state.promised)
            self._show()

    def _install(self, before: MemberState, view: View) -> None:
        self._note(self.number, describe(view))
        self._invariants.installed(self.state.me, view)
        after = self._stall_guard.install(before, view)
        if after.unconfirmed:
            self._doubt(after)
        again = self.jobs.install(view)
        self._facts = None
        for rank in self.jobs.ranks:
            self._invariants.agree(rank)
        self._doubt(after)
        for rank in again:
            ops.begin_attempt(rank)
        for rank in list(self.jobs.ranks):
            ops.unhindered(rank)
        self.jobs.receive_early()

    def _check_who_may_run(self) -> None:
        """V10: another roster is known to have a majority, or to be in force."""
        for rank in list(self.jobs.ranks):
            rank.learn(self.state.primaries)
            if rank.may_run:
                self._invariants.goes_on(rank)
                ops.unhindered(rank)

    def _doubt_all(self) -> None:
        self._doubt(agreement.wake(self.state, now_us=round(self.now * 1e6)))
        self._beat()

    def _doubt(self, after: StallGuard) -> None:
        """V8: deliver nothing while it is not known whether the others have gone on without us."""
        doubted, self._stall_guard = bool(self._stall_guard.unconfirmed), after
        if after.unconfirmed and not doubted:
            self.jobs.doubt()
        if doubted and not after.unconfirmed:
            self.jobs.trust()

    # --- time

    def _tick(self) -> None:
        if not self._running:
            return
        self._timeline.after(HEARTBEAT_S * (0.9 + 0.2 * self._random.random()), self._tick)
        if self.asleep:
            return
        silent = {member.node for member in self._links.silent()}
        for link in self._links.close_silent(
            self.now, lambda member: is_vouched_for(self.state, member.node, silent)
        ):
            self.jobs.lane_broke(link.member)
            self._lose(link, f"silent for {link.health.silence_s:.1f} s")
        self._links.dial_missing(self._peers, self.now)
        for peer, link in self._links.up.items():
            self._edges[link.member.incarnation] = self._peers[peer]
        self._links.relay_missing(self._peers, self.now)
        self._employ()
        for trainer in self.trainers:
            trainer.poll()
        self.jobs.poll()
        self._reevaluate()
        self._beat()
        if limits.who_holds_up(self.state):
            raise Violation(f"{self.number} blames its leader, which is honest")

    def _reevaluate(self) -> None:
        if self._running:
            self._perform(agreement.pass_time(self.state, self._known(), now=self.now))

    def _employ(self) -> None:
        """Each job that this machine takes part in gets its trainer back, sooner or later."""
        self._trainers = self.trainers
        for habits in self._habits:
            employed = any(trainer.habits is habits for trainer in self._trainers)
            if not employed and chance(self._random, HEARTBEAT_S / BACK_AFTER_S):
                trainer = SimulatedTrainer(self._timeline, self._random, self, self.jobs, habits)
                self._trainers.append(trainer)

    # --- what a job needs

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back in `delay_s` seconds, or when this machine is awake again."""
        self._timeline.after(delay_s, self._call_back, callback)

    def _call_back(self, callback: Callable[[], None]) -> None:
        if self._running and self.asleep:
            self.later(HEARTBEAT_S, callback)
        elif self._running:
            callback()

    def forget_facts(self) -> None:
        """What is reported is no longer what it was."""
        self._facts = None

    def facts_changed(self) -> None:
        """What is reported, or wanted, is no longer what it was: it is sent at once."""
        self.forget_facts()
        if not self._showing:
            self._showing = True
            self._timeline.after(0.0, self._show_later)

    def lane_patience_s(self, rank: SimulatedRank) -> float:
        """How long the peer at the slower of the two edges may be silent before it is gone."""
        peers = () if rank.rank is None else rank.neighbours()
        return self._links.gone_after_s([peer.member for peer in peers])

    def send_on_lane(self, to: Member, message: LaneMessage) -> None:
        """To a rank's agent, which may be this one."""
        channel = f"lane {message.job}"
        if to == self.state.me:
            self._network.send(self.number, self.number, channel, message)
        else:
            self._links.send(to, channel, message)

    def ask(self, to: Member, message: AskResult) -> None:
        """Ask a holder's agent, which may be this one, for a retained result (O2)."""
        if to == self.state.me:
            self._timeline.after(0.0, self._answer, message)
        else:
            self._links.send_control(to, message)

    def _answer(self, ask: AskResult) -> None:
        rank = self.jobs.asked_of(ask)
        if rank is None:
            return  # they ask again
        retained, asker = ops.serve(rank, ask), rank.roster.trainer(ask.receiver)
        if retained is None:
            self._invariants.lost_result(rank, ask)
        elif asker is not None:
            self.send_on_lane(asker.member, retained)

    # --- what the invariants see

    def rank_began(self, rank: SimulatedRank) -> None:
        """A trainer has entered its job."""
        self._invariants.began(rank)

    def op_called(self, rank: SimulatedRank, op: OpNumber) -> None:
        """A rank's trainer has called an op."""
        self._invariants.called(rank, op)

    def op_ended(self, rank: SimulatedRank, op: OpNumber) -> None:
        """An op has ended at a local rank."""
        self._note(self.number, f"{rank.roster.job} op {op} at {rank.id}: {rank.ends[op]}")
        self._invariants.ended(rank, op)

    def roster_settled(self, rank: SimulatedRank, after: Roster) -> None:
        """A rank is about to follow a roster of another number."""
        self._invariants.settled(rank, after, self.state.view)

    def superseded(self, rank: SimulatedRank) -> None:
        """A rank learns that the others go on without it."""
        self._note(self.number, f"{rank.roster.job}: {rank.id} is superseded")

    # --- what we know, and say

    def _known(self) -> Facts:
        if self._facts is None:
            self._facts = self.jobs.facts()
        silent = tuple(member.incarnation for member in self._links.silent())
        timeout_s = self._links.timeout_s
        return replace(self._facts, edges=self._edges, timeout_s=timeout_s, silent=silent)

    def _heartbeat(self) -> Heartbeat:
        return heartbeat_of(self.state, self._known(), self.now)

    def _show_later(self) -> None:
        self._showing = False
        if self._running and not self.asleep:
            self._show()

    def _show(self) -> None:
        """A heartbeat at once whenever it says anything new.

        Progress and promises ride on the regular ones.
        """
        beat, shown = self._heartbeat(), self._shown
        if shown is None or not says_the_same(
            shown, msgspec.structs.replace(beat, promised=shown.promised, flushed=shown.flushed)
        ):
            self._beat(beat)

    def _beat(self, beat: Heartbeat | None = None) -> None:
        beat = beat or self._heartbeat()
        self._shown = beat
        self._links.beat(beat, self.now)

    def _lose(self, link: SimulatedLink, why: str) -> None:
        self._note(self.number, f"loses {link.member.node.hex()[-1:]}: {why}")
        self._healing.begin(self.now)
        step = agreement.lose(self.state, link.member.node, why, self._known(), now=self.now)
        self._perform(step)
