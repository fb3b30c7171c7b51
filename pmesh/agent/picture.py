"""Takes the picture of this agent that `pmesh status` shows."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pmesh.agent import status
from pmesh.agent.jobs import Jobs
from pmesh.agent.jobs_picture import describe_jobs
from pmesh.agent.mail import MailRoom
from pmesh.agent.membership import Membership
from pmesh.agent.peers import Peers
from pmesh.agent.status import Status
from pmesh.agent.strangers import Strangers
from pmesh.agent.targets import Refusal
from pmesh.core.messages import PROTOCOL_VERSION, Address, Hello
from pmesh.core.views import Seat
from pmesh.errors import (
    MeshKeyMismatch,
    NodeKeyCopied,
    PeerUnreachable,
    PmeshError,
    ProtocolVersionMismatch,
)
from pmesh.ids import Member, NodeId, node_text
from pmesh.net.door import DoorCounters
from pmesh.net.interfaces import AddressWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the picture is taken of."""

    version: str
    me: Member
    name: str
    compression: str
    uptime_s: float
    hello: Hello
    membership: Membership
    peers: Peers
    jobs: Jobs
    mail: MailRoom
    strangers: Strangers
    door: DoorCounters
    turned_away: status.TurnedAwayStatus
    watch: AddressWatch
    loop_lag_s: float


def take_picture(sources: Sources) -> Status:
    """The agent as it stands at this instant."""
    epoch = sources.membership.view.epoch
    return Status(
        schema=status.SCHEMA_VERSION,
        version=sources.version,
        protocol=PROTOCOL_VERSION,
        pid=os.getpid(),
        uptime_s=sources.uptime_s,
        node=status.NodeStatus(
            id=node_text(sources.me.node),
            name=sources.name,
            compression=sources.compression or None,
            incarnation=f"{sources.me.incarnation:016x}",
            addresses=_texts(sources.hello.addresses),
        ),
        view=status.ViewStatus(
            epoch=status.EpochStatus(
                counter=epoch.counter,
                leader=node_text(epoch.leader),
                incarnation=f"{epoch.incarnation:016x}",
            ),
            leader=node_text(epoch.leader),
            members=tuple(
                _member(rank, seat, sources)
                for rank, seat in enumerate(sources.membership.view.seats)
            ),
        ),
        peers=tuple(_peers(sources)),
        jobs=tuple(describe_jobs(sources.membership, sources.jobs, me=sources.me)),
        traffic=_traffic(sources),
        loop_lag_ms=round(sources.loop_lag_s * 1e3, 3),
        door=status.DoorStatus(**asdict(sources.door)),
        turned_away=sources.turned_away,
    )


def _texts(addresses: tuple[Address, ...]) -> tuple[str, ...]:
    return tuple(str(address) for address in addresses)


def _member(rank: int, seat: Seat, sources: Sources) -> status.MemberStatus:
    node = seat.member.node
    if seat.member == sources.me:
        return status.MemberStatus(
            id=node_text(node),
            name=seat.name,
            rank=rank,
            health="self",
            rtt_ms=None,
            addresses=_texts(sources.hello.addresses),
        )
    health, live = sources.membership.health_of(node), sources.peers.links.get(node)
    trip = None if health is None else health.round_trip_s
    return status.MemberStatus(
        id=node_text(node),
        name=seat.name,
        rank=rank,
        health="gone" if health is None else health.condition.value,
        rtt_ms=None if trip is None else round(trip * 1e3, 3),
        addresses=() if live is None else _texts(live.link.peer.addresses),
        interface=None if live is None else _interface(live.link.local_address, sources),
    )


def _interface(local: Address, sources: Sources) -> str | None:
    host = local.host.partition("%")[0]
    return next((own.interface for own in sources.watch.current if own.host == host), None)


def _peers(sources: Sources) -> Iterator[status.PeerStatus]:
    """Whoever was seen: linked, wanted, refused, or of another mesh or version."""
    shown: set[NodeId] = set()
    for node, live in sources.peers.links.items():
        shown.add(node)
        hello = live.link.peer
        yield status.PeerStatus(
            id=node_text(node),
            name=hello.name,
            state="linked",
            addresses=_texts(hello.addresses),
            protocol=hello.protocol,
        )
    for node, found in sources.strangers.seen.items():
        shown.add(node)
        yield _stranger(found.advertisement.node, sources)
    targets = sources.peers.targets
    for refusal in targets.refusals.values():
        whom = refusal.node
        if whom is None or whom not in shown or isinstance(refusal.error, NodeKeyCopied):
            yield _refused(refusal)
        if whom is not None:
            shown.add(whom)
    for key, addresses in targets.wanted.items():
        whom = targets.node_of(key)
        if whom not in shown and key not in targets.refusals:
            yield status.PeerStatus(
                id=None if whom is None else node_text(whom),
                name=None,
                state="connecting",
                addresses=_texts(addresses),
            )


def _stranger(node: NodeId, sources: Sources) -> status.PeerStatus:
    found = sources.strangers.seen[node]
    theirs = found.advertisement
    other_mesh = sources.strangers.is_of_other_mesh(found)
    reason = (
        "it holds another mesh key; if it should be one of yours, run 'pmesh key set' on it and "
        "paste what 'pmesh key show' prints here"
        if other_mesh
        else f"it speaks protocol {theirs.protocol}, this machine {PROTOCOL_VERSION}; "
        "install the same version of pmesh on both"
    )
    return status.PeerStatus(
        id=node_text(node),
        name=theirs.name,
        state="other_mesh_key" if other_mesh else "other_version",
        addresses=_texts(theirs.addresses),
        reason=reason,
        protocol=theirs.protocol,
    )


def _refused(refusal: Refusal) -> status.PeerStatus:
    return status.PeerStatus(
        id=None if refusal.node is None else node_text(refusal.node),
        name=None,
        state=_state_of(refusal.error),
        addresses=(str(refusal.address),),
        reason=f"{type(refusal.error).__name__}: {refusal.error}",
    )


def _state_of(error: PmeshError) -> status.PeerState:
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


def _traffic(sources: Sources) -> status.TrafficStatus:
    control, letters = sources.peers.control_bytes, sources.mail.traffic
    ops = sources.jobs.traffic
    return status.TrafficStatus(
        control_sent_bytes=control[0],
        control_received_bytes=control[1],
        data_sent_bytes=ops[0] + letters[0],
        data_received_bytes=ops[1] + letters[1],
    )
