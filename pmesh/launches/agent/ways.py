"""How this machine reaches another one without pmesh, as engines of other launchers do."""

import ipaddress

import msgspec

from pmesh.agent.mesh.links import Link, bare_host, hosts_of
from pmesh.launches.wire.messages import Interface


def best_way(link: Link) -> tuple[str, str] | None:
    """Return an IPv4 address of the peer on the best path, and the interface here; None if none."""
    live = link.current
    if live is None:
        return None
    interface = live.key.interface if live.relay is None else ""
    for host in (
        bare_host(live.path.remote_address),
        *sorted(live.hosts[1]),
        *sorted(hosts_of(link.peer)),
    ):
        if _is_ipv4(host):
            return host, interface if _is_interface(interface) else ""
    return None


def _is_ipv4(host: str) -> bool:
    """Return True for an address; a member may announce any text as its host."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _is_interface(name: str) -> bool:
    try:
        msgspec.convert(name, Interface)
    except msgspec.ValidationError:
        return False
    return True
