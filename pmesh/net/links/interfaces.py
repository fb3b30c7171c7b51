"""The addresses of this machine's real interfaces, and the ends and losses of a connection."""

import contextlib
import ipaddress
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from socket import AddressFamily
from types import MappingProxyType
from typing import Final, NamedTuple, cast

import psutil
import trio

from pmesh.core.links.addresses import InterfaceKind, LocalAddress
from pmesh.core.wire.link import Address

UNKNOWN: Final = Address("unknown", 0)
"""The address of a stream in memory, or of one that is no longer connected."""


def local_address_of(stream: trio.abc.Stream) -> Address:
    return _ask(stream, "getsockname")


def remote_address_of(stream: trio.abc.Stream) -> Address:
    return _ask(stream, "getpeername")


def _ask(stream: trio.abc.Stream, question: str) -> Address:
    """Ask the socket of the stream; a test's stream with an address has a `socket` too."""
    try:
        name: object = getattr(getattr(stream, "socket", None), question)()
    except (AttributeError, OSError):  # no socket; no longer connected
        return UNKNOWN
    if not isinstance(name, tuple):  # AF_UNIX: a path
        return UNKNOWN
    host, port, *ipv6 = cast("tuple[str, int, int, int]", name)
    scope = ipv6[1] if ipv6 else 0
    return Address(f"{host}%{socket.if_indextoname(scope)}" if scope else host, port)


class _Counters(NamedTuple):
    """Where a system counts the segments of a connection."""

    option: int
    kind: str
    sent_at: int
    sent_again_at: int


MIN_SEGMENTS: Final = 200  # of fewer, one that was lost by chance would look like a bad line
_COUNTERS: Final = MappingProxyType(
    {
        # TCP_INFO, struct tcp_info: tcpi_data_segs_out (since Linux 4.6) and tcpi_total_retrans.
        "linux": _Counters(11, "=I", 156, 100),
        # TCP_CONNECTION_INFO, struct tcp_connection_info: tcpi_txpackets, tcpi_txretransmitpackets.
        "darwin": _Counters(0x106, "=Q", 56, 104),
    }
)
_COUNTERS_BYTES: Final = 256  # more than either struct has up to there


def loss_of(stream: trio.abc.Stream) -> float | None:
    """Return the share of the connection's segments that were sent again, from 0.0 to 1.0.

    None while fewer than 200 were sent, and where the system does not count them.
    """
    counters = _COUNTERS.get(sys.platform)
    if counters is None:
        return None
    option, kind, sent_at, sent_again_at = counters
    try:
        sock: socket.socket = getattr(stream, "socket")  # noqa: B009 - an abstract stream has none
        data = sock.getsockopt(socket.IPPROTO_TCP, option, _COUNTERS_BYTES)
        (sent,) = struct.unpack_from(kind, data, sent_at)
        (sent_again,) = struct.unpack_from(kind, data, sent_again_at)
    except (AttributeError, OSError, struct.error):  # no socket; closed; an older system
        return None
    return min(1.0, sent_again / sent) if sent >= MIN_SEGMENTS else None


POLL_S: Final = 5.0  # a delay that nobody notices after plugging in a cable

# Interfaces that lead to no other machine at home, on macOS and on Linux.
_UNREAL: Final = re.compile(
    r"(awdl|llw|utun|ap|anpi|gif|stf|ipsec|pktap|feth|vmenet|vmnet|bridge[1-9]\d\d"
    r"|docker|br-|veth|virbr|vnet|cni|flannel|cali|tun|tap|wg|tailscale|zt|dummy|ifb)[\w-]*"
)
_WIFI_PORT: Final = re.compile(r"Wi-?Fi|AirPort", re.IGNORECASE)
_NETWORKSETUP: Final = "/usr/sbin/networksetup"
_SYS_CLASS_NET: Final = Path("/sys/class/net")


def read_addresses() -> tuple[LocalAddress, ...]:
    """Return the addresses of all real interfaces that are up, and loopback. Blocks briefly."""
    stats = psutil.net_if_stats()
    addresses = {
        interface: found
        for interface, found in psutil.net_if_addrs().items()
        if interface in stats
        and stats[interface].isup
        and _is_real(interface, flags=stats[interface].flags.split(","))
    }
    kinds = _kinds(frozenset(addresses))
    return tuple(
        LocalAddress(
            interface=interface,
            host=address.address.partition("%")[0],
            prefix_bits=_prefix_bits(address.address, address.netmask),
            kind=_kind_of_address(address.address, kinds[interface]),
        )
        for interface, found in sorted(addresses.items())
        for address in found
        if address.family in (AddressFamily.AF_INET, AddressFamily.AF_INET6)
    )


def reachable_at(
    addresses: Iterable[LocalAddress], *, listen_host: str
) -> tuple[LocalAddress, ...]:
    """Return where others can reach a listener bound to this IP address ("" for all).

    Loopback counts only if it was requested, or if there is nothing else.
    """
    host = listen_host.partition("%")[0]
    if host in {"", "0.0.0.0", "::"}:  # noqa: S104 - asked, not bound
        version = {"": None, "0.0.0.0": 4, "::": 6}[host]  # noqa: S104 - as above
        heard = [a for a in addresses if version in {None, ipaddress.ip_address(a.host).version}]
        real = [address for address in heard if address.kind != "loopback"]
        return tuple(real or heard)
    return tuple(address for address in addresses if address.host == host)


class AddressWatch:
    """The addresses at which this agent can be reached, kept up to date by `run`."""

    def __init__(
        self,
        listen_host: str = "",
        *,
        read: Callable[[], tuple[LocalAddress, ...]] = read_addresses,
    ) -> None:
        self.current: tuple[LocalAddress, ...] = ()
        self._listen_host = listen_host
        self._read = read
        self._changed = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Poll every 5 s, as the two systems have no common notification without privileges."""
        await self._poll()
        task_status.started()
        while True:
            await trio.sleep(POLL_S)
            with contextlib.suppress(OSError):  # no descriptor is left now; later one may be
                await self._poll()

    async def changed_from(self, seen: tuple[LocalAddress, ...]) -> tuple[LocalAddress, ...]:
        """Return the current addresses as soon as they differ from those."""
        while self.current == seen:
            await self._changed.wait()
        return self.current

    async def _poll(self) -> None:
        found = await trio.to_thread.run_sync(self._read)
        addresses = reachable_at(found, listen_host=self._listen_host)
        if addresses != self.current:
            self.current = addresses
            self._changed.set()
            self._changed = trio.Event()


def parse_hardware_ports(listing: str) -> dict[str, InterfaceKind]:
    r"""Return the kind of each device in `networksetup -listallhardwareports`.

    >>> parse_hardware_ports("Hardware Port: Wi-Fi\nDevice: en0\nEthernet Address: 00:00")
    {'en0': 'wifi'}
    """
    kinds: dict[str, InterfaceKind] = {}
    for port, device in re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)", listing, re.MULTILINE):
        if _WIFI_PORT.match(port):
            kinds[device] = "wifi"
        elif port.startswith("Thunderbolt") and "Ethernet" not in port:
            kinds[device] = "thunderbolt"  # "Thunderbolt Ethernet" is an adapter at 1 or 10 Gbit/s
        else:
            kinds[device] = "wired"
    return kinds


@lru_cache(maxsize=1)  # the subprocess takes 50 ms: run again only when the interfaces change
def _kinds(interfaces: frozenset[str]) -> Mapping[str, InterfaceKind]:
    known: Mapping[str, InterfaceKind]
    known = _macos_kinds() if psutil.MACOS else {name: _linux_kind(name) for name in interfaces}
    return {name: known.get(name, "wired") for name in interfaces}


def _macos_kinds() -> dict[str, InterfaceKind]:
    command = [_NETWORKSETUP, "-listallhardwareports"]
    try:
        listing = subprocess.run(  # noqa: S603 - a fixed command of the system's
            command, capture_output=True, check=True, encoding="utf-8", timeout=5
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}  # the kind only orders addresses and picks thresholds: all wired works too
    return parse_hardware_ports(listing)


def _linux_kind(interface: str) -> InterfaceKind:
    if interface.startswith("thunderbolt"):  # the name that the kernel's thunderbolt-net gives
        return "thunderbolt"
    return "wifi" if (_SYS_CLASS_NET / interface / "phy80211").exists() else "wired"


def _is_real(interface: str, *, flags: Sequence[str]) -> bool:
    # A point-to-point interface is a VPN or a modem.
    return not _UNREAL.fullmatch(interface) and "pointopoint" not in flags


def _kind_of_address(host: str, kind: InterfaceKind) -> InterfaceKind:
    return "loopback" if ipaddress.ip_address(host.partition("%")[0]).is_loopback else kind


def _prefix_bits(host: str, netmask: str | None) -> int:
    """Return the length of the mask; that of a single address if the system gives no mask."""
    version_bits = ipaddress.ip_address(host.partition("%")[0]).max_prefixlen
    if netmask is None:
        return version_bits
    return int(ipaddress.ip_address(netmask)).bit_count()
