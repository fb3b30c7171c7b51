"""Which programs hold which ports of this machine, and which packages are installed."""

import contextlib
import errno
import socket
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from typing import Final

import psutil

from pmesh.cli.doctor.rules.here import OtherPackage
from pmesh.cli.doctor.rules.nftables import MDNS_PORT

_OUR_COMMAND: Final = "pmesh.cli"
_SHOWN: Final = 60  # characters of a program's command line


def can_listen(host: str, port: int) -> bool:
    """Return False if another program listens at this address, or at any of this machine's."""
    for each in (host,) if host else ("0.0.0.0", "::"):  # noqa: S104 - bound, and closed at once
        family = socket.AF_INET6 if ":" in each else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((each, port))
                probe.listen()
        except OSError as e:  # another error is no program, such as that of a machine without IPv6
            if e.errno == errno.EADDRINUSE:
                return False
    return True


def holder_of(port: int) -> int | None:
    """Return the pid of who listens at a port; None if the system does not tell this user."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and _port_of(connection.laddr) == port:
                return connection.pid
    return None


def program_text(pid: int | None) -> str:
    if pid is None:
        return ""
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(pid).cmdline()
        return f"pid {pid} ({' '.join(words)[:_SHOWN]})"
    return f"pid {pid}"


def listens_to_mdns(pid: int) -> bool:
    """Return False if this process has no socket at mDNS's port; True if that is not known."""
    try:
        connections = psutil.Process(pid).net_connections("udp")
    except psutil.Error:
        return True
    return any(_port_of(one.laddr) == MDNS_PORT for one in connections)


def find_other_packages(
    installed: Iterable[Distribution] | None = None,
) -> Iterator[OtherPackage]:
    """Yield the distributions of other projects that bring a package named pmesh."""
    for each in distributions() if installed is None else installed:
        name = _field(each, "Name")
        packages = (each.read_text("top_level.txt") or "").split()
        if name.lower() != "pmesh" and "pmesh" not in packages:
            continue
        if any(point.value.startswith(_OUR_COMMAND) for point in each.entry_points):
            continue
        yield OtherPackage(
            name=name,
            version=_field(each, "Version"),
            summary=_field(each, "Summary"),
            folder=str(each.locate_file("")),
        )


def _field(distribution: Distribution, name: str) -> str:
    try:
        fields = distribution.metadata
    except UnicodeDecodeError:  # of an author's name, in an old package
        return ""
    return (fields[name] or "") if name in fields else ""  # Python 3.12 warns of a missing one


def _port_of(address: object) -> int | None:
    """Return the port of an address; psutil has an empty tuple for none."""
    return getattr(address, "port", None)
