"""Drives the agreement: sends heartbeats, passes messages to the core, and hands out new views.

Each input is handled between two awaits of the event loop: facts are read, the core decides, and
its actions are carried out before another task runs. So a fence holds from the instant of the
flush answer (V3).
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from threading import Thread
from typing import Literal, Protocol

import msgspec
import structlog
import trio

from pmesh.agent.mesh.load import LoadMeter, MachineLoad
from pmesh.agent.mesh.names import MachineNames
from pmesh.agent.mesh.probing import Probing
from pmesh.core.identity.names import Claim, check_name_untrusted, claims_of
from pmesh.core.links import health
from pmesh.core.links.clocks import PeerClock, Reading
from pmesh.core.links.health import WIRED, Condition, Health, Thresholds
from pmesh.core.topology.graph import UNKNOWN, Graph, Heard, measured_graph
from pmesh.core.values import MAX_MEMBERS, SignedName, View
from pmesh.core.views import agreement, leader, limits
from pmesh.core.views.agreement import StallGuard
from pmesh.core.views.limits import is_led_astray
from pmesh.core.views.state import (
    Facts,
    FenceJobs,
    Install,
    MemberState,
    MemberStep,
    SendOnLink,
    heartbeat_of,
    is_vouched_for,
)
from pmesh.core.wire.channels import Message
from pmesh.core.wire.views import RELAYED, AgreementMessage, Heartbeat, MeasuredEdge, TellView
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, JobName, Member, NodeId
from pmesh.net.links.acceptor import HANDSHAKE_INTERVAL_S
from pmesh.net.sessions.processes import Stall, sleep_in_step

HEARTBEAT_S = 0.2  # a fifth of the shortest silence that means anything
REST_HEARTBEAT_S = 0.4  # while nothing moves: still five before a peer is gone
RESTS_AFTER_S = 5.0  # by cable a peer is gone long before: an op that has stopped learns why
TICK_S = 0.1  # half a heartbeat: silence is judged no later than this
DOUBT_S = WIRED.gone_after_s / 2  # V8: after a stall this long, a peer may have given us up
NEW_CLAIMS = 2 * MAX_MEMBERS  # those of a view, and ranks that it has lost: 11 ms of verifying
NEW_CLAIMS_PER_S = 4 / HANDSHAKE_INTERVAL_S  # an honest agent accepts new machines, and dials some
MAX_LOST_CONTACTS = 256  # whoever has the mesh key can invent nodes
_log = structlog.get_logger()


class Follower(Protocol):
    """Supplies the facts and carries out the decisions (`pmesh.agent.jobs.driver`)."""

    @property
    def moved_at(self) -> float:
        """When bytes of the local jobs were last seen to have moved."""
        ...

    def facts(self) -> Facts:
        """Return what the local jobs have and want; without round trips."""
        ...

    def fence(self, jobs: tuple[JobName, ...]) -> None:
        """Deliver nothing more of these jobs until the next install (V3)."""
        ...

    def doubt(self) -> None:
        """Deliver nothing of any job until `trust` (V8)."""
        ...

    def trust(self) -> None:
        """Deliver again: our view is still that of all members (V8)."""
        ...

    def vouch(self) -> None:
        """Note that this agent has looked for a stall of its own, and judged it (V8)."""
        ...

    def install(self, view: View) -> None: ...

    def lost(self, member: Member) -> None:
        """Forget what a peer has caused here: it is gone."""
        ...

    def marked(self, member: Member, heartbeat: Heartbeat) -> None:
        """Take from a peer's heartbeat how far its ranks have come."""
        ...


class _Contact:
    """What this agent measures about one linked peer."""

    def __init__(
        self, member: Member, thresholds: Thresholds, now: float, before: Health | None
    ) -> None:
        self.member = member
        self.health: Health = health.begin(thresholds, now=now, before=before)
        self.relayed = False
        self.mbit_s = 0
        """The settled bandwidth from the peer, looked up before each heartbeat."""
        self.last_sent_us = 0
        self.last_heard_at = now
        self.clock = PeerClock()
        self._claims: dict[Claim, None] = {}
        self._more_claims, self._since = float(NEW_CLAIMS), now

    def check_names_untrusted(self, message: AgreementMessage, now: float) -> None:
        """Raise ProtocolError if the peer gives a machine a name that its node has not signed.

        A peer can't make us verify many: an honest one meets no more machines than shake hands
        with it, and what others do to our memory does not count, as each peer has its own.
        """
        new = claims_of(self.member, message) - self._claims.keys()
        earned = (now - self._since) * NEW_CLAIMS_PER_S
        self._more_claims = min(NEW_CLAIMS, self._more_claims + earned) - len(new)
        self._since = now
        if self._more_claims < 0:
            raise ProtocolError("the names of more machines than it can have met")
        for member, said in new:
            check_name_untrusted(member, said)
        self._claims |= dict.fromkeys(new)
        for oldest in list(self._claims)[: max(0, len(self._claims) - NEW_CLAIMS)]:
            del self._claims[oldest]


class Membership:
    """One agent's standing among its peers."""

    def __init__(
        self,
        me: Member,
        said: SignedName,
        *,
        names: MachineNames,
        follower: Follower,
        send: Callable[[Member, Message], None],
        drop: Callable[[NodeId, str], None],
        ban: Callable[[NodeId, str], None],
        installed: Callable[[View, View, Mapping[Member, str]], None],
        noticed: Callable[[Literal["peer silent", "loss noticed"], str], None],
        led_astray: Callable[[], None],
        probing: Probing,
    ) -> None:
        self.state: MemberState = agreement.first_state(me, said, now=trio.current_time())
        self.names = names
        names.follow(self.state.view)
        self._follower = follower
        self.send = send
        self._drop = drop
        self._ban = ban
        self._installed = installed
        self._noticed = noticed
        self._led_astray = led_astray
        self._contacts: dict[NodeId, _Contact] = {}
        self._lost_contacts: dict[NodeId, _Contact] = {}
        self.probing = probing
        self._losses: dict[Member, str] = {}
        self._inputs: deque[Callable[[Facts, float], MemberStep]] = deque()
        self._draining = False
        self._reported: object = None
        self._stall_guard = StallGuard()
        self._load_meter = LoadMeter()

    @property
    def view(self) -> View:
        return self.state.view

    def health_of(self, node: NodeId) -> Health | None:
        contact = self._contacts.get(node)
        return None if contact is None else contact.health

    def round_trips_s(self, members: Iterable[Member]) -> dict[Member, float]:
        """Return the least round trips to those of the members that have been measured.

        What the processes of busy machines add says nothing about the edge: by a cable it is what
        the system has measured, if that is less.
        """
        found: dict[Member, float] = {}
        for member in members:
            health = self.health_of(member.node)
            if health is not None and health.round_trip_s is not None:
                least_s = self.probing.least_round_trip_s(member)
                found[member] = min(health.least_round_trip_s, least_s or math.inf)
        return found

    def clock_of(self, node: NodeId) -> tuple[Reading, ...]:
        """Return what a peer's clock has shown lately; nothing while it is unknown."""
        contact = self._contacts.get(node)
        return () if contact is None else contact.clock.readings

    def load_of(self, member: Member) -> MachineLoad:
        """Return how busy the machine of a member is, as its last heartbeat says."""
        if member == self.state.me:
            return self._load_meter.load
        peer = self.state.peers.get(member.node)
        if peer is None or peer.member != member:
            return MachineLoad()
        return MachineLoad(peer.heartbeat.cpu_percent, peer.heartbeat.memory_percent)

    @property
    def heard(self) -> Heard:
        """What all members have measured of their edges, from all heartbeats."""
        return leader.reports(self.state, self._facts())

    def edges_among(self, members: Iterable[Member]) -> Graph:
        """Return the graph of these members, from all heartbeats."""
        return measured_graph(members, self.heard)

    def reported_mbit_s(self, member: Member) -> int:
        """Return the bandwidth from here to a peer, as it reports it; 0 while it is unknown."""
        peer = self.state.peers.get(member.node)
        edge = (
            UNKNOWN
            if peer is None
            else peer.heartbeat.heard.get(self.state.me.incarnation, UNKNOWN)
        )
        return max(0, edge.mbit_s)

    def is_relayed(self, member: Member) -> bool:
        """Return True if another member forwards to this one (V5)."""
        contact = self._contacts.get(member.node)
        return contact is not None and contact.relayed

    def hears(self, node: NodeId) -> Collection[Incarnation]:
        """Return whom a peer hears; nobody if the peer itself is silent."""
        peer = self.state.peers.get(node)
        if peer is None or self.is_silent(node):
            return ()
        return peer.heartbeat.heard.keys() - set(peer.heartbeat.silent)

    def is_silent(self, node: NodeId) -> bool:
        """Return True if a peer has been silent for long."""
        return node in self._silent()

    def link_up(self, member: Member, thresholds: Thresholds, *, relayed: bool = False) -> None:
        """Start or continue contact with a peer over a new link, which a third may forward."""
        contact = self._contacts.get(member.node)
        if contact is not None and contact.member != member:
            self.lose(member.node, "it was restarted")
        if contact is None or contact.member != member:
            lost = self._lost_contacts.pop(member.node, None)
            before = lost.health if lost is not None and lost.member == member else None
            contact = _Contact(member, thresholds, trio.current_time(), before)
            self._contacts[member.node] = contact
            if len(self._contacts) > 1:  # two machines have one ring, and nobody forwards
                _prepare_graphs()
        contact.relayed = relayed
        self._measure(contact)
        self.send(member, TellView(self.state.view))
        self._send_heartbeat([contact])

    def path_changed(
        self, node: NodeId, thresholds: Thresholds, least_s: float, *, relayed: bool
    ) -> None:
        """Judge the peer by the path over which it is now reached.

        Args:
            node: The peer's.
            thresholds: Of its kind.
            least_s: Its least round trip; 0 if it was not measured.
            relayed: Whether another member forwards.
        """
        contact = self._contacts.get(node)
        if contact is not None:
            contact.relayed = relayed
            contact.health = msgspec.structs.replace(
                contact.health,
                thresholds=thresholds,
                least_round_trip_s=least_s or contact.health.least_round_trip_s,
            )
            self._measure(contact)

    def lose(self, node: NodeId, why: str) -> None:
        """Treat the peer as gone; the caller closes its link if there still is one."""
        contact = self._contacts.pop(node, None)
        if contact is not None:
            self._lost_contacts[node] = contact
            if len(self._lost_contacts) > MAX_LOST_CONTACTS:
                del self._lost_contacts[next(iter(self._lost_contacts))]
            self.probing.forget(contact.member)
            self._follower.lost(contact.member)
            if contact.member in self.view.members:
                self._losses[contact.member] = why
            self._noticed("loss noticed", f"{self.name_of(node)} is lost: {why}")
            self._step(lambda facts, now: agreement.lose(self.state, node, why, facts, now=now))

    def receive(self, member: Member, message: AgreementMessage) -> None:
        """Handle a peer's message. Raises ProtocolError if no honest member would send it."""
        contact = self._contacts.get(member.node)
        if contact is None or contact.member != member:
            return  # a late message on a link that was given up
        now, round_trip_s = trio.current_time(), None
        contact.check_names_untrusted(message, now)
        if isinstance(message, Heartbeat):
            contact.last_sent_us, contact.last_heard_at = message.sent_us, now
            round_trip_s = health.measure_round_trip_s(
                now_us=_microseconds(now), echo_us=message.echo_us, held_us=message.held_us
            )
            if round_trip_s is not None:
                contact.clock.note_untrusted(
                    now_us=_microseconds(now), sent_us=message.sent_us, round_trip_s=round_trip_s
                )
        contact.health = health.heard_from(
            contact.health, now=now, round_trip_s=round_trip_s
        ).health
        self._step(
            lambda facts, now: agreement.receive(self.state, member, message, facts, now=now)
        )
        if isinstance(message, Heartbeat):
            self._doubt(self._stall_guard.receive(self.state, member, message))
            self._follower.marked(member, message)

    def reevaluate(self) -> None:
        """Decide again, as a fact has changed."""
        for contact in self._contacts.values():
            self._measure(contact)
        self._step(lambda facts, now: agreement.pass_time(self.state, facts, now=now))

    @property
    def pace_s(self) -> float:
        """How often to send heartbeats, and to check deadlines."""
        return REST_HEARTBEAT_S if self.rests else HEARTBEAT_S

    @property
    def tick_s(self) -> float:
        """How often to judge silence; a peer that is late ends the quiet long before it is gone."""
        return REST_HEARTBEAT_S if self.rests else TICK_S

    @property
    def is_quiet(self) -> bool:
        """Whether no job runs or is about to, and all peers are healthy and in our view."""
        return not self.state.view.rosters and self.rests

    @property
    def rests(self) -> bool:
        """As `is_quiet`, or jobs run but have moved nothing for a while.

        A peer need not know: what it thinks of silence stays the same.
        """
        state = self.state
        return (
            not (state.view.rosters and self._has_moved_lately())
            and not self._stall_guard.unconfirmed
            and state.flushed_at is None
            and len(state.peers) == len(self._contacts)
            and all(
                peer.view.epoch == state.view.epoch and not peer.heartbeat.waiting
                for peer in state.peers.values()
            )
            and all(c.health.condition is Condition.HEALTHY for c in self._contacts.values())
            and not self._follower.facts().waiting  # last, as it costs most
        )

    def _has_moved_lately(self) -> bool:
        """A view counts as well: its jobs begin, or go on, at once."""
        moved_at = max(self.state.installed_at, self._follower.moved_at)
        return trio.current_time() < moved_at + RESTS_AFTER_S

    def beat(self) -> None:
        self._send_heartbeat(self._contacts.values())

    async def run(self) -> None:
        while True:
            self.reevaluate()
            self._load_meter.measure(trio.current_time())
            self.beat()
            self.probing.ask(*self._training_peers())
            if is_led_astray(self.state, now=trio.current_time()):
                self._led_astray()
            await sleep_in_step(self.pace_s)

    def _training_peers(self) -> tuple[set[Member], set[Member]]:
        """Return the direct peers that train with one of ours, and whom of them ours send to next.

        What another member forwards is not measured: the ring avoids it however fast it is (V5).
        """
        me, found, following = self.state.me, set[Member](), set[Member]()
        for roster in self.view.rosters:
            ring = [trainer.member for trainer in roster.trainers]
            if me in ring:
                found.update(ring)
                following.update(ring[i] for i in range(len(ring)) if ring[i - 1] == me)
        direct = (c.member for c in self._contacts.values() if not c.relayed)
        return found.intersection(direct), following

    def judge(self, stall: Stall) -> None:
        """Judge the silence of all peers, without counting our own stall."""
        now = trio.current_time()
        silent = self._silent()
        deaf = len(silent) == len(self._contacts) > 1
        if stall.total_s >= DOUBT_S:
            self._doubt(agreement.wake(self.state, now_us=_microseconds(now)))
            self.beat()  # the answers confirm our view
        self._follower.vouch()
        for node, contact in list(self._contacts.items()):
            forgiven = health.forgive_stall(contact.health, stalled_s=stall.total_s, now=now)
            vouched = is_vouched_for(self.state, node, silent)
            step = health.pass_time(forgiven, now=now, vouched=vouched, deaf=deaf)
            contact.health = step.health
            if step.changed_to is Condition.SUSPECT:
                name, silence_s = self.name_of(node), now - contact.health.last_heard
                _log.warning("peer is silent", peer=name)
                self._noticed("peer silent", f"{name} has been silent for {silence_s:.1f} s")
            if step.changed_to is Condition.GONE:
                self._drop(node, f"silent for {now - contact.health.last_heard:.1f} s")
        debt = limits.who_holds_up(self.state)
        if debt is not None:
            self._ban(debt.leader.node, f"it made no view for {now - debt.since:.0f} s")

    def _doubt(self, after: StallGuard) -> None:
        """V8: deliver nothing while we don't know whether the others have gone on without us."""
        doubted, self._stall_guard = bool(self._stall_guard.unconfirmed), after
        if after.unconfirmed and not doubted:
            self._follower.doubt()
        if doubted and not after.unconfirmed:
            self._follower.trust()

    def name_of(self, node: NodeId) -> str:
        seats = (self.names.of_seat(s) for s in self.view.seats if s.member.node == node)
        return next(seats, "a stranger")

    def _step(self, decide: Callable[[Facts, float], MemberStep]) -> None:
        """Queue an input, as an action may cause another input while it is carried out."""
        self._inputs.append(decide)
        if self._draining:
            return
        self._draining = True
        try:
            known: Facts | None = None
            while self._inputs:
                known = self._advance(self._inputs.popleft())
        finally:
            self._draining = False
            self._inputs.clear()
        if self._reported != (urgent := self._urgent(known or self._follower.facts())):
            self._reported = urgent
            self.beat()

    def _advance(self, decide: Callable[[Facts, float], MemberStep]) -> Facts | None:
        """Take one step; return the facts that led to it, unless an action has changed them."""
        before, facts = self.state, self._facts()
        step = decide(facts, trio.current_time())
        self.state = step.state
        for action in step.actions:
            match action:
                case SendOnLink(to, message):
                    self.send(to, message)
                case FenceJobs(jobs):
                    self._follower.fence(jobs)
                case Install(view):
                    after = self._stall_guard.install(before, view)
                    if after.unconfirmed:
                        self._doubt(after)  # before anything can be delivered in this view
                    self.names.follow(view)
                    self._follower.install(view)
                    self._doubt(after)
                    self._installed(before.view, view, self._losses)
                    self._losses = {m: w for m, w in self._losses.items() if m in view.members}
                    self.reevaluate()  # after this step, because the facts have changed
        return facts if all(isinstance(action, SendOnLink) for action in step.actions) else None

    @property
    def edges(self) -> dict[Incarnation, MeasuredEdge]:
        """What this agent has measured of the way to each peer."""
        return {
            contact.member.incarnation: MeasuredEdge(_least_us(contact.health), contact.mbit_s)
            for contact in self._contacts.values()
        }

    def _measure(self, contact: _Contact) -> None:
        # V5: the ring avoids an edge over which another member forwards.
        measured = RELAYED if contact.relayed else self.probing.settled_mbit_s(contact.member)
        contact.mbit_s = measured

    def _facts(self) -> Facts:
        return replace(
            self._follower.facts(),
            edges=self.edges,
            timeout_s=max((c.health.timeout_s for c in self._contacts.values()), default=0.0),
            silent=tuple(self._contacts[node].member.incarnation for node in self._silent()),
        )

    def _silent(self) -> list[NodeId]:
        contacts = self._contacts.items()
        return [node for node, c in contacts if c.health.condition is Condition.SUSPECT]

    def _urgent(self, facts: Facts) -> object:
        """Return the parts of a heartbeat that are sent at once when they change.

        A promise is none: the leader has the answer to its proposal, and the view, which comes
        within milliseconds, tells the others.
        """
        beat = heartbeat_of(self.state, facts, trio.current_time())
        heard, promised = dict.fromkeys(beat.heard, UNKNOWN), beat.view
        return msgspec.structs.replace(
            beat, heard=heard, promised=promised, flushed=False, progress=(), silent=()
        )

    def _send_heartbeat(self, contacts: Iterable[_Contact]) -> None:
        now = trio.current_time()
        beat, load = heartbeat_of(self.state, self._facts(), now), self._load_meter.load
        for contact in list(contacts):
            told = msgspec.structs.replace(
                beat,
                cpu_percent=load.cpu_percent,
                memory_percent=load.memory_percent,
                sent_us=_microseconds(now),
                echo_us=contact.last_sent_us,
                held_us=_microseconds(now - contact.last_heard_at),
            )
            self.send(contact.member, told)


def _prepare_graphs() -> None:
    """Begin to import networkx, which would hold up the event loop for 0.1 s when it is needed."""
    if "networkx" not in sys.modules:
        Thread(target=import_module, args=("networkx",), daemon=True).start()


def _least_us(health: Health) -> int:
    """Return the least round trip, as tensors may queue before it; 0 until it is measured."""
    return 0 if health.round_trip_s is None else max(1, _microseconds(health.least_round_trip_s))


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
