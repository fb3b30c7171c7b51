"""Looks at the network: who is heard by mDNS, whose port answers, which route leads there.

mDNS is asked and heard by sockets of our own, which are bound to the group: so no unicast packet
of the agent's is taken away. A port is tried with bytes that no pmesh sends, as an agent closes
such a connection at once: first many of them, then few, which tell a hole for large packets from an
agent that does not react.
"""

import contextlib
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

import trio

from pmesh.cli.doctor.rules.network import Outcome
from pmesh.cli.doctor.rules.nftables import MDNS_GROUP, MDNS_PORT
from pmesh.core.identity.advertisement import (
    SERVICE_TYPE,
    Advertisement,
    read_packet_untrusted,
)
from pmesh.core.identity.keys import AdvertisementKey
from pmesh.core.links.addresses import BoundAddress, LocalAddress, in_dialling_order
from pmesh.core.wire.link import Address
from pmesh.errors import LocalNetworkDenied, NetworkError, PeerUnreachable
from pmesh.ids import NodeId
from pmesh.net.links.dialer import dial, dial_any

LISTEN_S: Final = (
    4.0  # an answer comes after 120 ms, or a second after the one before; more if busy
)
STRANGERS_S: Final = 2.0  # so long we wait for those of whom nobody knows
ASK_EVERY_S: Final = 0.7
LOOK_EVERY_S: Final = 0.05
DIAL_S: Final = 1.5  # a lost SYN is sent again after 1 s
LOOK_UP_S: Final = 2.0  # of a name that nobody has, the system says so after 5 s
TRY_S: Final = 5.0  # for all that is tried with a machine
DIALLED: Final = 6  # ways to each machine, the best first
REACT_S: Final = 1.0  # an agent closes such a connection within milliseconds
MANY_BYTES: Final = 32 * 1024  # some packets of 9,000 bytes
FEW_BYTES: Final = 16
MAX_READ: Final = 256  # announcements whose signatures are checked
_GROUP_V6: Final = "ff02::fb"
_NO_MESH: Final = AdvertisementKey(b"", b"")

_Done = TypeVar("_Done")
State: TypeAlias = Outcome | Literal["denied"]


@dataclass(slots=True)
class Heard:
    """What came by mDNS."""

    agents: dict[NodeId, Advertisement] = field(default_factory=dict[NodeId, Advertisement])
    """The latest announcement of each, also of this machine's agent and of other meshes."""
    hosts: set[str] = field(default_factory=set[str])
    """The addresses of other machines from which anything came."""
    error: str = ""
    """Why nothing could be asked."""


def question(name: str) -> bytes:
    """Return an mDNS packet that asks for all instances of a service (RFC 6762, section 5.2)."""
    labels = name.rstrip(".").split(".")
    coded = b"".join(bytes([len(label)]) + label.encode() for label in labels)
    pointers_of_the_internet = b"\0\x0c\0\x01"
    return bytes((0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0)) + coded + b"\0" + pointers_of_the_internet


QUESTIONS: Final = question(SERVICE_TYPE), question("_services._dns-sd._udp.local.")
"""The second is answered by printers and televisions: so multicast is known to work."""


async def listen(
    key: AdvertisementKey | None,
    local: Sequence[LocalAddress],
    expected: Collection[NodeId],
    *,
    least_s: float = STRANGERS_S,
) -> Heard:
    """Ask by mDNS who is there; return what was heard when nobody is missing, or after 4 s.

    Args:
        key: The mesh's, if it is known: announcements with its tag must be made with it.
        local: The addresses whose interfaces are used.
        expected: Those that should be heard.
        least_s: How long to wait for others even if all of these were heard.
    """
    heard, ours = Heard(), {own.host for own in local}
    with contextlib.ExitStack() as opened:
        try:
            listeners = [opened.enter_context(each) for each in _open_listeners(local)]
            _ask(local)
        except OSError as e:
            heard.error = e.strerror or str(e)
            return heard
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(_read, listener, key or _NO_MESH, ours, heard)
            began = asked = trio.current_time()
            with trio.move_on_after(LISTEN_S):
                while trio.current_time() < began + least_s or not heard.agents.keys() >= {
                    *expected
                }:
                    await trio.sleep(LOOK_EVERY_S)
                    if trio.current_time() >= asked + ASK_EVERY_S:
                        asked = trio.current_time()
                        with contextlib.suppress(OSError):  # the cable was pulled meanwhile
                            _ask(local)
            nursery.cancel_scope.cancel()
    return heard


async def _read(
    listener: trio.socket.SocketType, key: AdvertisementKey, ours: set[str], heard: Heard
) -> None:
    count = 0
    while count < MAX_READ:
        packet, sender = await listener.recvfrom(9000)
        host = str(sender[0]).partition("%")[0]
        if host not in ours:
            heard.hosts.add(host)
        if b"_pmesh" in packet:
            count += 1
            found = read_packet_untrusted(packet, key=key)
            if found is not None:
                heard.agents[found.node] = found


class _Network(NamedTuple):
    """An interface, as the sockets of one version of IP name it."""

    host: str
    number: int
    family: socket.AddressFamily

    @property
    def group(self) -> tuple[str, int] | tuple[str, int, int, int]:
        if self.family == socket.AF_INET:
            return MDNS_GROUP, MDNS_PORT
        return _GROUP_V6, MDNS_PORT, 0, self.number


def _networks(local: Iterable[LocalAddress]) -> Iterator[_Network]:
    """Yield where the agent asks, too: at v4 addresses, and at v6 where an interface has no v4."""
    have_v4 = {own.interface for own in local if ":" not in own.host}
    for own in local:
        number = socket.if_nametoindex(own.interface)
        if ":" not in own.host:
            yield _Network(own.host, number, socket.AF_INET)
        elif own.interface not in have_v4 and own.is_link_local_v6:
            yield _Network(own.host, number, socket.AF_INET6)


def _open(family: socket.AddressFamily) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_DGRAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return opened


def _open_listeners(local: Sequence[LocalAddress]) -> list[trio.socket.SocketType]:
    return _at_each(local, _open_listener)


def _ask(local: Sequence[LocalAddress]) -> None:
    """Send the questions by each interface, from mDNS's port: else the answers are no multicast."""
    _at_each(local, _ask_at)


def _at_each(local: Sequence[LocalAddress], do: Callable[[_Network], _Done]) -> list[_Done]:
    """Do it on each network where the system lets us. Raises OSError if that is on none."""
    done, errors = list[_Done](), list[OSError]()
    for network in _networks(local):
        try:
            done.append(do(network))
        except OSError as e:
            errors.append(e)
    if errors and not done:
        raise errors[0]
    return done


def _open_listener(network: _Network) -> trio.socket.SocketType:
    opened = _open(network.family)
    try:
        opened.bind(network.group)
        if network.family == socket.AF_INET:
            member = socket.inet_aton(MDNS_GROUP) + socket.inet_aton(network.host)
            opened.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        else:
            group = socket.inet_pton(socket.AF_INET6, _GROUP_V6)
            member = group + network.number.to_bytes(4, sys.byteorder)
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
    except BaseException:
        opened.close()
        raise
    return trio.socket.from_stdlib_socket(opened)


def _ask_at(network: _Network) -> None:
    with _open(network.family) as sender:
        if network.family == socket.AF_INET:
            own = socket.inet_aton(network.host)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
            sender.bind((network.host, MDNS_PORT))
        else:
            at = socket.IPPROTO_IPV6
            sender.setsockopt(at, socket.IPV6_MULTICAST_IF, network.number)
            sender.setsockopt(at, socket.IPV6_MULTICAST_HOPS, 255)
            sender.bind((network.host, MDNS_PORT, 0, network.number))
        for packet in QUESTIONS:
            sender.sendto(packet, network.group)


async def look_up(address: Address) -> tuple[Address, ...]:
    """Return the IP addresses of a host name; the name itself if there are none within 2 s."""
    found: list[str] = []
    with trio.move_on_after(LOOK_UP_S), contextlib.suppress(OSError, UnicodeError):
        kind = socket.SOCK_STREAM
        answers = await trio.socket.getaddrinfo(address.host, address.port, type=kind)
        found = [str(answer[4][0]).partition("%")[0] for answer in answers]
    return tuple(Address(host, address.port) for host in found) or (address,)


class Tried(NamedTuple):
    """What came of dialling a machine."""

    address: str
    state: State
    error: str = ""


async def try_machines(
    machines: Mapping[str, Sequence[Address]], local: Sequence[LocalAddress]
) -> dict[str, Tried]:
    """Dial all of these at once, and return by the same keys what came of it. Takes 5 s at most."""
    found: dict[str, Tried] = {}

    async def try_one(key: str, addresses: Sequence[Address]) -> None:
        ways = in_dialling_order(addresses, local=local)[:DIALLED]
        named = ", ".join(str(address) for address, _ in ways)
        found[key] = Tried(named, "unreachable", f"no answer in {TRY_S:g} s")
        with trio.move_on_after(TRY_S):
            found[key] = await _try(ways, named)

    async with trio.open_nursery() as nursery:
        for key, addresses in machines.items():
            nursery.start_soon(try_one, key, addresses)
    return found


async def _try(ways: Sequence[BoundAddress], named: str) -> Tried:
    try:
        stream, used = await _dial_first(ways)
    except LocalNetworkDenied as e:
        return Tried(named, "denied", str(e))
    except NetworkError as e:
        return Tried(named, "unreachable", str(e))
    return Tried(str(used[0]), await _try_sizes(stream, used))


async def _dial_first(ways: Sequence[BoundAddress]) -> tuple[trio.SocketStream, BoundAddress]:
    """Return a connection over the first way that has one. Raises NetworkError."""
    if not ways:
        raise PeerUnreachable("it has no address that can be dialled from here")
    return await dial_any(ways, timeout_s=DIAL_S)


async def _try_sizes(stream: trio.SocketStream, used: BoundAddress) -> Outcome:
    if await _reacts(stream, MANY_BYTES):
        return "answers"
    if not await _reacts_at(used, FEW_BYTES):
        return "is silent"
    # Once more: a machine that was only busy has no hole.
    return "answers" if await _reacts_at(used, MANY_BYTES) else "large packets vanish"


async def _reacts_at(way: BoundAddress, nbytes: int) -> bool:
    address, via = way
    try:
        return await _reacts(await dial(address, via=via, timeout_s=DIAL_S), nbytes)
    except NetworkError:
        return False


async def _reacts(stream: trio.SocketStream, nbytes: int) -> bool:
    """Send bytes that no pmesh sends; return True if the other side closes, or says anything."""
    with trio.move_on_after(REACT_S):
        try:
            await stream.send_all(bytes(nbytes))
            await stream.receive_some(1)
        except trio.BrokenResourceError:
            pass
        finally:
            stream.socket.close()
        return True
    return False


def interface_to(host: str, local: Sequence[LocalAddress]) -> LocalAddress | None:
    """Return the address from which the system would send to a host; None if it has no route."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((host, MDNS_PORT))  # UDP: nothing is sent
            source = str(asked.getsockname()[0])
        except OSError:
            return None
    return next((own for own in local if own.host == source), None)
