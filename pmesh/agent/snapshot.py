"""Collects the status of this agent, which `pmesh status` shows."""

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from operator import attrgetter
from typing import NamedTuple

import msgspec
import trio

from pmesh import native
from pmesh.agent import schema
from pmesh.agent.jobs.driver import Jobs
from pmesh.agent.mesh.dial_targets import Refusal, TargetKey
from pmesh.agent.mesh.findings import Findings
from pmesh.agent.mesh.links import Link
from pmesh.agent.mesh.membership import Membership
from pmesh.agent.mesh.peers import Peers
from pmesh.agent.schema import OTHER_MESH, Status, name_peer
from pmesh.core.jobs.op_times import DURATIONS_S, SIZES, DurationCounts
from pmesh.core.jobs.reports import NotFinite, shown_number
from pmesh.core.links.reasons import USUAL_MBIT_S, why_slow
from pmesh.core.topology.graph import edge_between
from pmesh.core.values import Roster, Seat
from pmesh.core.views.quorum import is_in_force
from pmesh.core.wire import aead
from pmesh.core.wire.link import PROTOCOL_VERSION, Address, Hello, PeerInterface
from pmesh.errors import (
    MeshKeyMismatch,
    NodeKeyCopied,
    PeerUnreachable,
    PmeshError,
    ProtocolVersionMismatch,
)
from pmesh.ids import JobName, Member, NodeId, Slot, node_text
from pmesh.net.links.acceptor import DoorCounters
from pmesh.net.links.discovery import AgentFound
from pmesh.net.links.hardware import able_mbit_s


class _Waiter(NamedTuple):
    """A waiting trainer on any machine of the view."""

    job: JobName
    wait_for: int
    shown: schema.NewcomerStatus


def describe_jobs(membership: Membership, jobs: Jobs, *, me: Member) -> Iterator[schema.JobStatus]:
    """Yield the jobs that run, and those for which trainers on any machine wait."""
    waiters: dict[JobName, list[_Waiter]] = {}
    for waiter in _waiters(membership, jobs, me):
        waiters.setdefault(waiter.job, []).append(waiter)
    for roster in membership.view.rosters:
        newcomers = tuple(waiter.shown for waiter in waiters.pop(roster.job, []))
        in_force = is_in_force(roster, membership.state.primaries)
        yield _job(roster, newcomers, jobs, in_force=in_force)
    for job, waiting in waiters.items():
        yield schema.JobStatus(
            name=job,
            state="waiting",
            wait_for=max(waiter.wait_for for waiter in waiting),
            ranks=(),
            newcomers=tuple(waiter.shown for waiter in waiting),
        )


def _waiters(membership: Membership, jobs: Jobs, me: Member) -> Iterator[_Waiter]:
    inside = {(t.member, t.slot) for roster in membership.view.rosters for t in roster.trainers}
    for seat in membership.view.seats:
        for job, slot, wait_for, program in _waiting_at(seat.member, membership, jobs, me):
            if (seat.member, slot) not in inside:  # a heartbeat may be older than the view
                node, name = node_text(seat.member.node), membership.names.of_seat(seat)
                shown = schema.NewcomerStatus(node=node, name=name, program=program)
                yield _Waiter(job, wait_for, shown)


def _waiting_at(
    member: Member, membership: Membership, jobs: Jobs, me: Member
) -> Iterator[tuple[JobName, Slot, int, str | None]]:
    if member == me:
        for waiter in jobs.waiters.values():
            yield waiter.job, waiter.slot, waiter.wait_for, waiter.program
        return
    peer = membership.state.peers.get(member.node)
    for waiting in peer.heartbeat.waiting if peer is not None else ():
        yield waiting.job, waiting.slot, waiting.wait_for, None


def _job(
    roster: Roster, newcomers: tuple[schema.NewcomerStatus, ...], jobs: Jobs, *, in_force: bool
) -> schema.JobStatus:
    ranks, terms = tuple(_ranks(roster, jobs)), roster.terms
    state, reason = _state_of_job(roster, in_force=in_force)
    speed, now = jobs.speeds.get((roster.job, roster.born)), trio.current_time()
    return schema.JobStatus(
        name=roster.job,
        state=state,
        wait_for=None,
        ranks=ranks,
        newcomers=newcomers,
        roster=roster.number,
        step=max(rank.step for rank in ranks),
        steps_per_s=None if speed is None else _rounded(speed.steps.per_s(now)),
        ops_per_s=None if speed is None else _rounded(speed.ops.per_s(now)),
        stable=min(rank.completed for rank in ranks),
        terms=schema.TermsStatus(
            min_ranks=terms.min_ranks, on_loss=terms.on_loss, quorum=terms.quorum
        ),
        losses=tuple(verdict.message for verdict in roster.losses),
        reason=reason,
        comparison=_last_comparison(roster, jobs),
    )


def _last_comparison(roster: Roster, jobs: Jobs) -> schema.ComparisonStatus | None:
    """Return what the rank that is known to have compared last has found."""
    marks = (jobs.progress.of(roster, trainer) for trainer in roster.ids)
    found = [mark.comparison for mark in marks if mark is not None and mark.comparison is not None]
    if not found:
        return None
    last = max(found, key=attrgetter("op"))
    return schema.ComparisonStatus(**msgspec.structs.asdict(last))


def _state_of_job(roster: Roster, *, in_force: bool) -> tuple[schema.JobState, str | None]:
    if not roster.quorate:
        return "no_quorum", "the ranks here are not a majority of those that last had one"
    if not in_force:  # V10
        return "no_quorum", "no majority is known to have agreed to the last change"
    count, wanted = len(roster.trainers), roster.terms.min_ranks
    if count < wanted:
        return "below_min_ranks", f"it has {count} of at least {wanted} ranks (min_ranks)"
    return "running", None


def _ranks(roster: Roster, jobs: Jobs) -> Iterator[schema.RankStatus]:
    job, names = (roster.job, roster.born), jobs.membership.names
    here = {r.id: r for r in jobs.ranks if (r.roster.job, r.roster.born) == job}
    for rank, trainer in enumerate(roster.trainers):
        mark = jobs.progress.of(roster, trainer.id)
        seat = jobs.membership.view.seat_of(trainer.member)
        yield schema.RankStatus(
            rank=rank,
            trainer=trainer.id,
            node=node_text(trainer.member.node),
            name=roster.name_of(trainer) if seat is None else names.of_seat(seat),
            started=-1 if mark is None else mark.started,
            completed=-1 if mark is None else mark.completed,
            step=0 if mark is None else mark.step,
            own_percent=None if mark is None else _known(mark.own_percent),
            share_percent=None if mark is None else _known(mark.share_percent),
            reports={} if mark is None else _shown(mark.reports),
            stopped=mark is not None and mark.stopped,
            program=here[trainer.id].program if trainer.id in here else None,
            compression=here[trainer.id].compression if trainer.id in here else None,
        )


def _shown(reports: Mapping[str, float]) -> dict[str, float | NotFinite]:
    return {name: shown_number(value) for name, value in reports.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The parts of the agent from which its status is collected."""

    version: str
    me: Member
    name: str
    compression: str
    uptime_s: float
    hello: Hello
    membership: Membership
    peers: Peers
    jobs: Jobs
    p2p_bytes: tuple[int, int]
    """Of messages between ranks, sent and received at the sockets."""
    findings: Findings
    door: DoorCounters
    turned_away: schema.TurnedAwayStatus
    loop_lag_s: float


def take_snapshot(sources: Sources) -> Status:
    epoch = sources.membership.view.epoch
    return Status(
        schema=schema.SCHEMA_VERSION,
        version=sources.version,
        protocol=PROTOCOL_VERSION,
        pid=os.getpid(),
        uptime_s=sources.uptime_s,
        node=schema.NodeStatus(
            id=node_text(sources.me.node),
            name=sources.name,
            compression=sources.compression or None,
            without_native=native.why_missing() or None,
            slow_encryption=aead.WHY_SLOW or None,
            incarnation=f"{sources.me.incarnation:016x}",
            addresses=_texts(sources.hello.addresses),
        ),
        view=schema.ViewStatus(
            epoch=schema.EpochStatus(
                counter=epoch.counter,
                leader=node_text(epoch.leader),
                incarnation=f"{epoch.incarnation:016x}",
            ),
            leader=node_text(epoch.leader),
            members=tuple(
                _member(rank, seat, sources)
                for rank, seat in enumerate(sources.membership.view.seats)
            ),
            edges=tuple(_edges(sources.membership)),
        ),
        peers=tuple(describe_peers(sources.peers, sources.findings)),
        jobs=tuple(describe_jobs(sources.membership, sources.jobs, me=sources.me)),
        traffic=_traffic(sources),
        loop_lag_ms=round(sources.loop_lag_s * 1e3, 3),
        door=schema.DoorStatus(**asdict(sources.door)),
        turned_away=sources.turned_away,
        held_off=tuple(_held_off(sources.membership, sources.peers)),
        op_durations=tuple(describe_durations(sources.jobs.durations)),
        duration_bounds_s=DURATIONS_S,
    )


def describe_durations(durations: DurationCounts) -> Iterator[schema.OpDurationsStatus]:
    """Yield how long ops took, by kind and size, the smallest first."""
    for kind, size in sorted(durations.by_kind):
        found = durations.by_kind[kind, size]
        yield schema.OpDurationsStatus(
            kind=kind,
            up_to_bytes=SIZES[size] if size < len(SIZES) else None,
            counts=tuple(found.counts),
            total_s=round(found.total_s, 6),
        )


def _texts(addresses: tuple[Address, ...]) -> tuple[str, ...]:
    return tuple(str(address) for address in addresses)


def _member(rank: int, seat: Seat, sources: Sources) -> schema.MemberStatus:
    node, name = seat.member.node, sources.membership.names.of_seat(seat)
    load = sources.membership.load_of(seat.member)
    cpu_percent, memory_percent = _known(load.cpu_percent), _known(load.memory_percent)
    if seat.member == sources.me:
        return schema.MemberStatus(
            id=node_text(node),
            name=name,
            rank=rank,
            health="self",
            rtt_ms=None,
            addresses=_texts(sources.hello.addresses),
            cpu_percent=cpu_percent,
            memory_percent=memory_percent,
        )
    health, live = sources.membership.health_of(node), sources.peers.links.get(node)
    trip = None if health is None else health.round_trip_s
    jitter = None if health is None else sqrt(health.round_trip_variance_s2)
    path = None if live is None else live.current
    paths = [] if live is None else list(_paths(live, trip, sources))
    return schema.MemberStatus(
        id=node_text(node),
        name=name,
        rank=rank,
        health="gone" if health is None else health.condition.value,
        rtt_ms=_milliseconds(trip),
        addresses=() if live is None else _texts(live.peer.addresses),
        interface=None if path is None else path.key.interface or None,
        jitter_ms=None if trip is None or jitter is None else round(jitter * 1e3, 3),
        silence_s=None if health is None else round(health.longest_silence_s, 1),
        loss_percent=None if path is None else paths[0].loss_percent,
        mbit_s=sources.membership.probing.settled_mbit_s(seat.member) or None,
        cpu_percent=cpu_percent,
        memory_percent=memory_percent,
        paths=tuple(paths),
    )


def _paths(link: Link, trip_s: float | None, sources: Sources) -> Iterator[schema.PathStatus]:
    """Yield the paths of a link, the current one first; `trip_s` is its messages' round trip."""
    now, ours = trio.current_time(), sources.hello.interfaces
    current = link.current
    both = zip(link.paths.values(), link.states(), strict=True)
    for live, state in sorted(both, key=lambda pair: (pair[0] is not current, pair[1].rank)):
        in_use = live is current
        carries = in_use or sources.jobs.rendezvous.paths.carries(*live.hosts)
        silent = state.silence_s(now) >= live.thresholds.degraded_after_s
        path_trip_s = live.health.round_trip_s or (trip_s if in_use else None)
        yield schema.PathStatus(
            interface=live.key.interface or None,
            remote=live.key.remote,
            kind=live.kind or None,
            use="silent" if silent else "in use" if carries else "standby",
            speed_mbit_s=live.speed_mbit_s or None,
            mbit_s=state.measured_mbit_s or None,
            rtt_ms=_milliseconds(path_trip_s),
            loss_percent=_percent(live.path.loss),
            slow=why_slow(
                state,
                in_use=in_use,
                ours=ours,
                theirs=link.peer.interfaces,
                able_mbit_s=_able_mbit_s(live.key.interface, ours),
            ),
        )


def _able_mbit_s(interface: str, ours: Iterable[PeerInterface]) -> int:
    """Return what the cable can do, but only of one that looks slow: the port is asked."""
    usual = USUAL_MBIT_S["wired"]
    slow = any(
        own.name == interface and own.kind == "wired" and 0 < own.speed_mbit_s < usual
        for own in ours
    )
    return able_mbit_s(interface) if slow else 0


def _held_off(membership: Membership, peers: Peers) -> Iterator[schema.HeldOffStatus]:
    """V11: Yield whom the leader does not let back in yet."""
    now = trio.current_time()
    for member, flaps in membership.state.flaps.items():
        live = peers.links.get(member.node)
        back_in_s = flaps.held_off_until - now
        if live is None or live.member != member or membership.view.seat_of(member) is not None:
            continue
        if back_in_s > 0:
            yield schema.HeldOffStatus(
                id=node_text(member.node),
                name=membership.names.of(member.node, live.peer.name),
                losses=flaps.left(now),
                back_in_s=round(back_in_s, 1),
            )


def _edges(membership: Membership) -> Iterator[schema.EdgeStatus]:
    ring = membership.view.members
    if len(ring) == 1:
        return
    heard = membership.heard
    for one, other in itertools.pairwise((*ring, ring[0])):
        edge = edge_between(one, other, heard)
        yield schema.EdgeStatus(
            sender=node_text(one.node),
            receiver=node_text(other.node),
            rtt_ms=_milliseconds(edge.round_trip_us / 1e6 or None),
            mbit_s=max(edge.mbit_s, 0) or None,
        )


def _known(percent: int) -> int | None:
    return None if percent < 0 else percent


def _rounded(per_s: float | None) -> float | None:
    return None if per_s is None else round(per_s, 3)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _percent(share: float | None) -> float | None:
    return None if share is None else round(share * 100, 2)


def describe_peers(peers: Peers, findings: Findings) -> Iterator[schema.PeerStatus]:
    """Yield all known agents: linked, wanted, refused, or of another mesh or version."""
    shown: set[NodeId] = set()
    for node, live in peers.links.items():
        shown.add(node)
        hello = live.peer
        yield schema.PeerStatus(
            id=node_text(node),
            name=peers.membership.names.of(node, hello.name),
            state="linked",
            addresses=_texts(hello.addresses),
            protocol=hello.protocol,
        )
    foreign = tuple(findings.foreign_here())
    for found in foreign:
        shown.add(found.advertisement.node)
        yield _foreign(found, other_mesh=findings.is_of_other_mesh(found))
    targets = peers.targets
    others = {
        address
        for found in foreign
        if findings.is_of_other_mesh(found)
        for address in found.advertisement.addresses
    }
    for refusal in _each_once(targets.refusals, others):
        whom = refusal.node
        if whom is None or whom not in shown or isinstance(refusal.error, NodeKeyCopied):
            yield _refused(refusal, None if whom is None else peers.membership.names.known(whom))
        if whom is not None:
            shown.add(whom)
    for key, addresses in targets.wanted.items():
        whom = targets.node_of(key)
        if whom not in shown and key not in targets.refusals:
            name = None if whom is None else peers.membership.names.known(whom)
            yield schema.PeerStatus(
                id=None if whom is None else node_text(whom),
                name=name,
                state="connecting",
                addresses=_texts(addresses),
                reason=None if name is None else "it was here before, and is dialled again",
            )


def _each_once(
    refusals: Mapping[TargetKey, Refusal], others: Collection[Address]
) -> Iterator[Refusal]:
    """Yield the refusals without those of machines of another mesh that are shown already.

    Such a machine has no node id before TLS is over: mDNS names it by its addresses, `--peer` by
    one of them, and a connection that it has opened by its host.
    """
    dialled = {
        address
        for address, refusal in refusals.items()
        if isinstance(address, Address) and isinstance(refusal.error, MeshKeyMismatch)
    }
    hosts = {_unscoped(address.host) for address in (*others, *dialled)}
    for key, refusal in refusals.items():
        mismatch = isinstance(refusal.error, MeshKeyMismatch)
        came = isinstance(key, str) and _unscoped(key) in hosts
        if not (mismatch and (came or refusal.address in others)):
            yield refusal


def _unscoped(host: str) -> str:
    return host.partition("%")[0]


def describe_unlinked(peers: Peers, findings: Findings, *, own_name: str) -> tuple[str, ...]:
    """Return a line for each agent that was found and is not linked: its name, and why."""
    return tuple(
        f"{name_peer(peer, own_name)} is not linked: {peer.reason}"
        for peer in describe_peers(peers, findings)
        if peer.state != "linked" and peer.reason is not None
    )


def _foreign(found: AgentFound, *, other_mesh: bool) -> schema.PeerStatus:
    theirs = found.advertisement
    reason = (
        OTHER_MESH
        if other_mesh
        else f"it speaks protocol {theirs.protocol}, this machine {PROTOCOL_VERSION}; "
        "install the same version of pmesh on both"
    )
    return schema.PeerStatus(
        id=node_text(theirs.node),
        name=theirs.name,
        state="other_mesh_key" if other_mesh else "other_version",
        addresses=_texts(theirs.addresses),
        reason=reason,
        protocol=theirs.protocol,
    )


def _refused(refusal: Refusal, name: str | None) -> schema.PeerStatus:
    return schema.PeerStatus(
        id=None if refusal.node is None else node_text(refusal.node),
        name=name,
        state=_state_of(refusal.error),
        addresses=(str(refusal.address),),
        reason=(
            OTHER_MESH
            if isinstance(refusal.error, MeshKeyMismatch)
            else f"{type(refusal.error).__name__}: {refusal.error}"
        ),
    )


def _state_of(error: PmeshError) -> schema.PeerState:
    match error:
        case MeshKeyMismatch():
            return "other_mesh_key"
        case ProtocolVersionMismatch():
            return "other_version"
        case NodeKeyCopied():
            return "node_key_copied"
        case PeerUnreachable():
            return "unreachable"
        case _:
            return "refused"


def _traffic(sources: Sources) -> schema.TrafficStatus:
    control, envelopes = sources.peers.control_bytes, sources.p2p_bytes
    ops = sources.jobs.traffic
    return schema.TrafficStatus(
        control_sent_bytes=control[0],
        control_received_bytes=control[1],
        data_sent_bytes=ops[0] + envelopes[0],
        data_received_bytes=ops[1] + envelopes[1],
    )
