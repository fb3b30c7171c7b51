"""The addresses that a machine advertises, and the order in which to dial those of another."""

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final, Literal, TypeAlias

from pmesh.core.wire.link import MAX_ADDRESSES, Address, PeerInterface

InterfaceKind: TypeAlias = Literal["thunderbolt", "wired", "wifi", "loopback", "vpn"]

MAX_DIALLED: Final = 16  # a peer may claim thousands; a Mac with every port in use has about ten

_PREFERENCE: Final[dict[InterfaceKind, int]] = {
    "loopback": 0,  # the peer is on this machine
    "thunderbolt": 1,
    "wired": 2,
    "wifi": 3,
    "vpn": 5,  # on top of one of the others, and perhaps by way of another country
}
_ROUTED: Final = 4  # behind a router, or a host name: after all direct neighbours

_IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Rank: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAddress:
    """An address of one of this machine's own interfaces."""

    interface: str
    host: str
    """An IP address without a scope."""
    prefix_bits: int
    """The number of leading bits that the interface's direct neighbours share with it."""
    kind: InterfaceKind
    speed_mbit_s: int = 0
    """What the system says of the interface, which may be more than it carries; 0 if unknown."""

    @property
    def is_link_local_v6(self) -> bool:
        """True if it needs a scope, the name of the interface."""
        return _is_link_local_v6(ipaddress.ip_address(self.host))

    def reaches(self, host: str) -> bool:
        """True if the IP address (without a scope) is a direct neighbour on this interface.

        It may come from a peer, and be none.
        """
        network = ipaddress.ip_network((self.host, self.prefix_bits), strict=False)
        try:
            return ipaddress.ip_address(host) in network
        except ValueError:
            return False


BoundAddress: TypeAlias = tuple[Address, LocalAddress | None]
"""An address to dial, and one of the interface over which to dial it; None if any will do."""


def announced_addresses(local: Iterable[LocalAddress], *, port: int) -> tuple[Address, ...]:
    """Return the first 64 addresses for this machine's Hello, the best interface first.

    They have no scopes: `%en0` names an interface of this machine only.
    """
    ordered = sorted(local, key=_rank)
    return tuple(dict.fromkeys(Address(own.host, port) for own in ordered))[:MAX_ADDRESSES]


def announced_interfaces(local: Iterable[LocalAddress]) -> tuple[PeerInterface, ...]:
    """Return this machine's interfaces for its Hello, with at most 64 addresses."""
    found: dict[str, PeerInterface] = {}
    for own in tuple(local)[:MAX_ADDRESSES]:
        known = found.get(own.interface)
        hosts = (own.host,) if known is None else (*known.hosts, own.host)
        found[own.interface] = PeerInterface(own.interface, own.kind, own.speed_mbit_s, hosts)
    return tuple(found.values())


def in_dialling_order(
    addresses: Iterable[Address], *, local: Sequence[LocalAddress], bind_all: bool = False
) -> tuple[BoundAddress, ...]:
    """Return at most 16 ways to dial a peer's addresses, the best kind of interface first.

    A direct neighbour is dialled on each interface that reaches it, as its address may be in use on
    several networks: 169.254.0.0/16 and fe80::/64 are on every cable. Addresses on no local network
    come later, in the given order. Those that this machine has too lead here, so they are left out
    if the peer has others: programs with virtual machines give every machine the same one.

    Args:
        addresses: Of the peer; a scope in one would be the peer's, and is replaced by ours.
        local: The addresses of the interfaces that may be used.
        bind_all: True if others may not: then each address is bound to one of them.
    """
    theirs = _elsewhere(tuple(addresses), local)
    ranked = [way for address in theirs for way in _ways_to(address, local, bind_all=bind_all)]
    ranked.sort(key=lambda way: way[0])
    distinct: dict[object, BoundAddress] = {}
    for _, (address, via) in ranked:
        key = address, None if via is None else (via.interface, _version(via))
        distinct.setdefault(key, (address, via))
    return tuple(distinct.values())[:MAX_DIALLED]


def interface_of(end: Address, *, local: Iterable[LocalAddress]) -> LocalAddress | None:
    """Return an address of the interface that a connection uses; None if it is not known.

    Args:
        end: The connection's own end. A scope in it is the interface, whatever has the address.
        local: This machine's addresses.
    """
    host, _, scope = end.host.partition("%")
    at_end = (own for own in local if (own.interface == scope if scope else own.host == host))
    return next(at_end, None)


def interfaces_that_share_a_network(local: Sequence[LocalAddress]) -> frozenset[str]:
    """Return the interfaces that have a network in common with another: two cables to one switch.

    IPv6 link-local networks don't count, as each address of theirs names its interface.
    """
    return frozenset(
        one.interface
        for one, other in permutations(local, 2)
        if one.interface != other.interface
        and not one.is_link_local_v6
        and (one.reaches(other.host) or other.reaches(one.host))
    )


def _rank(own: LocalAddress) -> _Rank:
    return _PREFERENCE[own.kind], -own.speed_mbit_s


def _elsewhere(
    addresses: tuple[Address, ...], local: Sequence[LocalAddress]
) -> tuple[Address, ...]:
    """Return the addresses that are not ours too; all of them if the peer is on this machine."""
    ours = {own.host for own in local}
    others = tuple(a for a in addresses if str(_ip_address(a.host)) not in ours)
    return others or addresses


def _ways_to(
    address: Address, local: Sequence[LocalAddress], *, bind_all: bool
) -> Iterator[tuple[_Rank, BoundAddress]]:
    ip = _ip_address(address.host)
    if ip is None:
        yield from _routed(address, local, bind_all=bind_all)
        return
    if ip.is_unspecified or ip.is_multicast:
        return
    if _is_link_local_v6(ip):
        for own in local:
            if own.is_link_local_v6:
                scoped = Address(f"{ip}%{own.interface}", address.port)
                yield _rank(own), (scoped, own)
        return
    plain = Address(str(ip), address.port)
    direct = [own for own in local if own.reaches(str(ip))]
    here = [own for own in direct if own.kind == "loopback" or own.host == str(ip)]
    if here:  # on this machine: its packets use no interface but loopback
        yield min(map(_rank, here)), (plain, None)
        return
    for own in direct:
        yield _rank(own), (plain, own)
    if len(direct) != 1:  # two on one switch: the system may answer over the other (ARP)
        yield from _routed(plain, local, bind_all=bind_all)


def _routed(
    address: Address, local: Sequence[LocalAddress], *, bind_all: bool
) -> Iterator[tuple[_Rank, BoundAddress]]:
    if not bind_all:
        yield (_ROUTED, 0), (address, None)
        return
    ip = _ip_address(address.host)
    for own in local:
        if own.kind != "loopback" and (ip is None or ip.version == _version(own)):
            yield (_ROUTED, _PREFERENCE[own.kind]), (address, own)


def _version(own: LocalAddress) -> int:
    return ipaddress.ip_address(own.host).version


def _is_link_local_v6(ip: _IpAddress) -> bool:
    return ip.version == 6 and ip.is_link_local  # noqa: PLR2004 - IP version 6


def _ip_address(host: str) -> _IpAddress | None:
    """Return the IP address without its scope; None for a host name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
