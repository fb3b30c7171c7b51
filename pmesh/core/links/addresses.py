"""The addresses that a machine advertises, and the order in which to dial those of another."""

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from pmesh.core.wire.link import MAX_ADDRESSES, Address, PeerInterface

InterfaceKind: TypeAlias = Literal["thunderbolt", "wired", "wifi", "loopback"]

MAX_DIALLED: Final = 16  # a peer may claim thousands; a Mac with every port in use has about ten

_PREFERENCE: Final[dict[InterfaceKind, int]] = {
    "loopback": 0,  # the peer is on this machine
    "thunderbolt": 1,
    "wired": 2,
    "wifi": 3,
}
_ROUTED: Final = len(_PREFERENCE)  # behind a router, or a host name: after all direct neighbours

_IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


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
    """As the system says; 0 if it does not."""

    @property
    def is_link_local_v6(self) -> bool:
        """True if it needs a scope, the name of the interface."""
        address = ipaddress.ip_address(self.host)
        return address.version == 6 and address.is_link_local  # noqa: PLR2004 - IP version 6

    def reaches(self, host: str) -> bool:
        """True if the IP address (without a scope) is a direct neighbour on this interface."""
        network = ipaddress.ip_network((self.host, self.prefix_bits), strict=False)
        return ipaddress.ip_address(host) in network


def announced_addresses(local: Iterable[LocalAddress], *, port: int) -> tuple[Address, ...]:
    """Return the first 64 addresses for this machine's Hello, the best kind of interface first.

    They have no scopes: `%en0` names an interface of this machine only.
    """
    ordered = sorted(local, key=lambda own: _PREFERENCE[own.kind])
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
    addresses: Iterable[Address], *, local: Sequence[LocalAddress]
) -> tuple[Address, ...]:
    """Return at most 16 of a peer's addresses to dial, the fastest kind of interface first.

    A link-local v6 address is tried on each interface that has one: a scope in it would be the
    sender's. Addresses on no local network come last, in the given order.
    """
    ranked = [pair for address in addresses for pair in _ways_to(address, local)]
    ranked.sort(key=lambda pair: pair[0])
    return tuple(dict.fromkeys(address for _, address in ranked))[:MAX_DIALLED]


def _ways_to(address: Address, local: Sequence[LocalAddress]) -> Iterator[tuple[int, Address]]:
    ip = _ip_address(address.host)
    if ip is None or ip.is_unspecified or ip.is_multicast:
        if ip is None:
            yield _ROUTED, address
        return
    if ip.version == 6 and ip.is_link_local:  # noqa: PLR2004 - IP version 6
        for own in local:
            if own.is_link_local_v6:
                scoped = Address(f"{ip}%{own.interface}", address.port)
                yield _PREFERENCE[own.kind], scoped
        return
    ranks = [_PREFERENCE[own.kind] for own in local if own.reaches(str(ip))]
    yield min(ranks, default=_ROUTED), Address(str(ip), address.port)


def _ip_address(host: str) -> _IpAddress | None:
    """Return the IP address without its scope; None for a host name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
