"""Tries every way to another machine, for `pmesh ping`."""

import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec
import trio

from pmesh.agent.mesh.links import Link, LivePath
from pmesh.agent.mesh.peers import Peers
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.links.paths import PathKey, Way
from pmesh.core.links.reasons import why_used
from pmesh.core.wire.control import Pinged, WayTried
from pmesh.errors import PeerUnreachable, PmeshError, UsageError
from pmesh.ids import NodeId

TRY_S = 3.0  # a lost SYN is sent again after 1 s


async def ping(
    name: str,
    peers: Peers,
    tell: Callable[[WayTried], Awaitable[None]],
    *,
    local: Sequence[LocalAddress],
) -> Pinged:
    """Try every way to a machine at once; those that answer stay, as paths of the link.

    Args:
        name: The machine, as in the view.
        peers: The links of this agent.
        tell: Is called for each way, as soon as it has answered or can't.
        local: This machine's addresses.

    Raises:
        UsageError: No other machine has this name.
        PeerUnreachable: There is no link to it now.
    """
    link = _link_to(name, peers)
    ways = {way.key: way for way in link.ways(local)}
    answered: set[PathKey] = set()
    async with trio.open_nursery() as nursery:

        async def try_one(key: PathKey) -> None:
            way = ways.get(key)
            tried = await _try(link, key, way, peers.dial_way)
            if tried.rtt_ms is not None:
                answered.add(key)
            elif way is not None and _is_beside_the_point(way, answered):
                return
            await tell(tried)

        for key in dict.fromkeys((*link.paths, *ways)):
            nursery.start_soon(try_one, key)
        leading = {key.interface for key in (*link.paths, *ways)}
        for interface in dict.fromkeys(own.interface for own in local):
            alike = [own for own in local if own.interface == interface]
            if interface not in leading and alike[0].kind != "loopback":
                await tell(_of_another_network(link, alike))
    return _result(link)


def _link_to(name: str, peers: Peers) -> Link:
    known = _known(peers)
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "no other machine is here"
        raise UsageError(f"no other machine is called {name!r}; {there}")
    link = peers.links.get(known[name])
    if link is None:
        raise PeerUnreachable(f"there is no link to {name} now; 'pmesh doctor' says why")
    return link


async def _try(
    link: Link, key: PathKey, way: Way | None, dial: Callable[[Way], Awaitable[None]]
) -> WayTried:
    why_not, trip_s = f"no answer in {TRY_S:g} s", None
    with trio.move_on_after(TRY_S):
        try:
            if key not in link.paths and way is not None:
                await dial(way)
            live = link.paths.get(key)
            if live is None:
                why_not = "the connection was not kept, or left by another interface"
            else:
                trip_s = await live.measure_round_trip_s()
        except PmeshError as e:
            why_not = str(e)
    live = link.paths.get(key)
    tried = WayTried(
        interface=key.interface,
        remote=key.remote,
        kind="" if way is None else way.own.kind,
        address="" if way is None else str(way.address),
        rtt_ms=None if trip_s is None else round(trip_s * 1e3, 3),
        why_not="" if trip_s is not None else why_not,
    )
    return tried if live is None else _with_facts(tried, live)


def _is_beside_the_point(way: Way, answered: Iterable[PathKey]) -> bool:
    """Return True for a way between two networks, as both of its ends answer to others.

    The addresses of IPv6 that begin with fe80 don't tell networks apart.
    """
    ends = {key.interface for key in answered}, {key.remote for key in answered}
    return way.own.is_link_local_v6 and way.key.interface in ends[0] and way.key.remote in ends[1]


def _with_facts(tried: WayTried, live: LivePath) -> WayTried:
    address = ""  # of one that is relayed, the peer's end has none
    if live.relay is None:
        there = live.path.remote_address if live.dialled is None else live.dialled[0]
        address = tried.address or str(there)
    return msgspec.structs.replace(
        tried,
        kind=live.kind,
        address=address,
        speed_mbit_s=live.speed_mbit_s,
        mbit_s=live.mbit_s,
    )


def _of_another_network(link: Link, alike: Sequence[LocalAddress]) -> WayTried:
    """Return why an interface leads to none of the peer's addresses."""
    networks = (ipaddress.ip_network((own.host, own.prefix_bits), strict=False) for own in alike)
    where = ", ".join(dict.fromkeys(map(str, networks)))
    why_not = f"{link.peer.name} has no address in {where}"
    return WayTried(interface=alike[0].interface, kind=alike[0].kind, why_not=why_not)


def _result(link: Link) -> Pinged:
    current = link.current
    if current is None:
        return Pinged()
    states = {state.key: state for state in link.states()}
    used = states.pop(current.key)
    why = why_used(used, tuple(states.values()))
    return Pinged(interface=current.key.interface, remote=current.key.remote, why=why)


def _known(peers: Peers) -> dict[str, NodeId]:
    """The other machines that are in the view or linked, by name."""
    names, seats = peers.membership.names, peers.membership.view.seats
    linked = {names.of(node, link.peer.name): node for node, link in peers.links.items()}
    members = {seat.member.node: names.of_seat(seat) for seat in seats}
    members.pop(peers.membership.state.me.node, None)
    outside = {name: node for name, node in linked.items() if node not in members}
    return outside | {name: node for node, name in members.items()}
