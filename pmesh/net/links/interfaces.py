"""The addresses of this machine's interfaces, and of the two ends of a connection."""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from socket import AddressFamily
from typing import Final, Protocol, cast

import psutil
import trio

from pmesh.core.links.addresses import LocalAddress, interface_of
from pmesh.core.wire.link import Address
from pmesh.net.links.hardware import Hardware, has_carrier, read_hardware

SO_BINDTODEVICE: Final = 25  # socket(7) of Linux; Python has no name for it elsewhere

UNKNOWN: Final = Address("unknown", 0)
"""The address of a stream in memory, or of one that is no longer connected."""


def local_address_of(stream: trio.abc.Stream) -> Address:
    """Return the connection's own end; its scope is the interface to which Linux has bound it.

    Linux takes a packet for any of its addresses at any interface.
    """
    address, interface = _ask(stream, "getsockname"), _bound_interface(stream)
    return (
        Address(f"{address.host.partition('%')[0]}%{interface}", address.port)
        if interface
        else address
    )


def remote_address_of(stream: trio.abc.Stream) -> Address:
    return _ask(stream, "getpeername")


def _ask(stream: trio.abc.Stream, question: str) -> Address:
    """Ask the socket of the stream; a test's stream with an address has a `socket` too."""
    try:
        name: object = getattr(getattr(stream, "socket", None), question)()
        if not isinstance(name, tuple):  # AF_UNIX: a path
            return UNKNOWN
        host, port, *ipv6 = cast("tuple[str, int, int, int]", name)
        scope = ipv6[1] if ipv6 else 0
        return Address(f"{host}%{socket.if_indextoname(scope)}" if scope else host, port)
    except (AttributeError, OSError):  # no socket; not connected, or its interface is gone
        return UNKNOWN


def _bound_interface(stream: trio.abc.Stream) -> str:
    """Return the interface to which a connection is bound; "" if to none, or on macOS."""
    try:
        bound: socket.socket = getattr(stream, "socket")  # noqa: B009 - not every stream has one
        name = bound.getsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, 16)
    except (AttributeError, OSError):
        return ""
    return name.rstrip(b"\0").decode()


POLL_S: Final = 5.0  # where the system does not tell of changes, and after it gave no answer
SETTLE_S: Final = 0.05  # one cable makes a dozen messages

# Interfaces that lead to no other machine at home, on macOS and on Linux.
_UNREAL: Final = re.compile(
    r"(awdl|llw|ap|anpi|gif|stf|pktap|feth|vmenet|vmnet|bridge[1-9]\d\d"
    r"|docker|br-|veth|virbr|vnet|vnic|vboxnet|lxdbr|lxcbr|incusbr|podman|cni|flannel|cali"
    r"|dummy|ifb)[\w-]*"
)
_VPN: Final = re.compile(r"(utun|ipsec|tun|tap|wg|tailscale|zt)[\w-]*")
_OF_INTERFACES: Final = frozenset({0xC, 0xD, 0xE})  # macOS: RTM_NEWADDR, RTM_DELADDR, RTM_IFINFO
_GROUPS: Final = 0x1 | 0x10 | 0x100  # Linux: RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR


class _Stats(Protocol):
    """What psutil says of an interface."""

    @property
    def flags(self) -> str: ...
    @property
    def speed(self) -> int: ...


class InterfaceReader:
    """Reads the addresses of the interfaces that may be used; remembers what their hardware is."""

    def __init__(self, *, only: Collection[str] = (), never: Collection[str] = ()) -> None:
        """`only`: these alone, whatever they are; `never`: not these, also if `only` names them."""
        self._only = only
        self._never = never
        self._hardware: Mapping[str, Hardware] = {}

    def read(self) -> tuple[LocalAddress, ...]:
        """Return the addresses of all real interfaces and VPNs that are up, and loopback.

        Blocks briefly; on macOS for half a second when an interface has come up.
        """
        stats = psutil.net_if_stats()
        addresses = {
            interface: found
            for interface, found in psutil.net_if_addrs().items()
            if interface in stats
            and self._uses(interface)
            and stats[interface].isup
            and has_carrier(interface)
        }
        if not addresses.keys() <= self._hardware.keys():
            self._hardware = read_hardware(addresses)
        # Forget the others: the next cable may be of another kind.
        self._hardware = {interface: self._hardware[interface] for interface in addresses}
        return tuple(
            own
            for interface, found in sorted(addresses.items())
            for address in found
            if address.family in (AddressFamily.AF_INET, AddressFamily.AF_INET6)
            for own in self._local(interface, address.address, address.netmask, stats[interface])
        )

    def _local(
        self, interface: str, scoped: str, netmask: str | None, stats: _Stats
    ) -> Iterator[LocalAddress]:
        host, hardware = scoped.partition("%")[0], self._hardware[interface]
        ip, kind = ipaddress.ip_address(host), hardware.kind
        if ip.is_loopback:
            kind = "loopback"
        elif _VPN.fullmatch(interface) or "pointopoint" in stats.flags.split(","):
            if ip.is_link_local:
                return  # it leads nowhere: macOS has several such tunnels of its own
            kind = "vpn"  # or a modem
        yield LocalAddress(
            interface=interface,
            host=host,
            prefix_bits=_prefix_bits(host, netmask),
            kind=kind,
            speed_mbit_s=hardware.speed_mbit_s or stats.speed,
        )

    def _uses(self, interface: str) -> bool:
        if interface in self._never:
            return False
        return interface in self._only if self._only else not _UNREAL.fullmatch(interface)


def reachable_at(
    addresses: Iterable[LocalAddress], *, listen_host: str
) -> tuple[LocalAddress, ...]:
    """Return those at which a listener bound to this IP address ("" for all) can be reached.

    Loopback counts only if it was requested, or if there is nothing else but VPNs.
    """
    host = listen_host.partition("%")[0]
    if host in {"", "0.0.0.0", "::"}:  # noqa: S104 - asked, not bound
        version = {"": None, "0.0.0.0": 4, "::": 6}[host]  # noqa: S104 - as above
        heard = [a for a in addresses if version in {None, ipaddress.ip_address(a.host).version}]
        others = [address for address in heard if address.kind != "loopback"]
        return tuple(heard if all(address.kind == "vpn" for address in others) else others)
    return tuple(address for address in addresses if address.host == host)


def open_notices() -> socket.socket | None:
    """Open a socket on which the system tells of changes of interfaces; None if it has none."""
    try:
        # On Linux this is a netlink socket of the family of routes (rtnetlink(7)).
        notices = socket.socket(socket.AF_ROUTE, socket.SOCK_RAW)
    except OSError:
        return None
    notices.setblocking(False)  # noqa: FBT003 - socket's own
    if not psutil.MACOS:
        notices.bind((0, _GROUPS))
    return notices


class AddressWatch:
    """The addresses that this agent uses, kept up to date by `run`."""

    def __init__(
        self,
        listen_host: str = "",
        *,
        only: Collection[str] = (),
        never: Collection[str] = (),
        read: Callable[[], tuple[LocalAddress, ...]] | None = None,
        open_notices: Callable[[], socket.socket | None] = open_notices,
    ) -> None:
        """`only` and `never` are names of interfaces, as for `InterfaceReader`."""
        self.current: tuple[LocalAddress, ...] = ()
        self.is_restricted = bool(only or never)
        """True if there are interfaces that the agent must not use."""
        self.knows_arrivals = False
        """True if a connection that came by an interface in use is always bound to it (Linux)."""
        self._listen_host = listen_host
        self._only = only
        self._open_notices = open_notices
        self._read = read or InterfaceReader(only=only, never=never).read
        self._changed = trio.Event()

    @property
    def announced(self) -> tuple[LocalAddress, ...]:
        """Those that others are told: no VPN, unless the user has named it or its address."""
        return tuple(
            own
            for own in self.current
            if own.kind != "vpn" or own.interface in self._only or own.host == self._listen_host
        )

    def uses(self, stream: trio.abc.Stream) -> bool:
        """True if a connection that was accepted may be kept: it came by an interface in use."""
        if not self.is_restricted:
            return True
        end = local_address_of(stream)
        if self.knows_arrivals and "%" not in end.host:
            return False
        return interface_of(end, local=self.current) is not None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the addresses when the system tells of a change, or every 5 s if it can't."""
        with contextlib.ExitStack() as opened:
            notices = self._open_notices()
            if notices is not None:
                opened.callback(notices.close)
            await self._poll()
            task_status.started()
            while True:
                if notices is None:
                    await trio.sleep(POLL_S)
                else:
                    await _wait_for_notice(notices)
                await self._poll_until_answered()

    async def changed_from(self, seen: tuple[LocalAddress, ...]) -> tuple[LocalAddress, ...]:
        """Return the current addresses as soon as they differ from those."""
        while self.current == seen:
            await self._changed.wait()
        return self.current

    async def _poll_until_answered(self) -> None:
        while True:
            try:
                return await self._poll()
            except (OSError, RuntimeError):  # no descriptor or thread is left now
                await trio.sleep(POLL_S)

    async def _poll(self) -> None:
        found = await trio.to_thread.run_sync(self._read)
        addresses = reachable_at(found, listen_host=self._listen_host)
        if addresses != self.current:
            self.current = addresses
            self._changed.set()
            self._changed = trio.Event()


async def _wait_for_notice(notices: socket.socket) -> None:
    """Return at the first that concerns an interface, but no sooner than 50 ms after the last."""
    await trio.sleep(SETTLE_S)
    while True:
        await trio.lowlevel.wait_readable(notices)
        if _read_notices(notices):
            return


def _read_notices(notices: socket.socket) -> bool:
    """Read all that have come; return True if one may concern an interface."""
    found = False
    while True:
        try:
            message = notices.recv(65536)
        except BlockingIOError:
            return found
        except OSError:  # ENOBUFS: too many came
            return True
        # macOS tells of routes and of neighbours too: <net/route.h>, rtm_type.
        found |= not psutil.MACOS or message[3] in _OF_INTERFACES


def _prefix_bits(host: str, netmask: str | None) -> int:
    """Return the length of the mask; that of a single address if the system gives no mask."""
    if netmask is None:
        return ipaddress.ip_address(host).max_prefixlen
    return int(ipaddress.ip_address(netmask)).bit_count()
