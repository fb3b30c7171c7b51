import errno
import fcntl
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from socket import AddressFamily
from types import SimpleNamespace

import psutil
import pytest
import trio
import trio.testing

from pmesh.core.links.addresses import InterfaceKind, LocalAddress
from pmesh.core.wire.link import Address
from pmesh.net.links import hardware, interfaces
from pmesh.net.links.interfaces import (
    UNKNOWN,
    AddressWatch,
    InterfaceReader,
    local_address_of,
    reachable_at,
    remote_address_of,
)
from tests.net.links.links import tcp_streams
from tests.worlds.faults import Faults
from tests.worlds.system import be_on

MAC_PORTS = """
Hardware Port: Thunderbolt 1
Device: en1
Ethernet Address: 00:00:00:00:00:05

Hardware Port: Thunderbolt 2
Device: en2
Ethernet Address: 00:00:00:00:00:06

Hardware Port: Ethernet Adapter (en4)
Device: en4
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Thunderbolt Ethernet Slot 1
Device: en8
Ethernet Address: 00:00:00:00:00:02

Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 00:00:00:00:00:03

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:00:00:00:04

VLAN Configurations
===================
"""

Fake = Callable[..., None]


def an_address(host: str, netmask: str | None) -> SimpleNamespace:
    family = AddressFamily.AF_INET6 if ":" in host else AddressFamily.AF_INET
    return SimpleNamespace(family=family, address=host, netmask=netmask)


@pytest.fixture
def fake_system(monkeypatch: pytest.MonkeyPatch, faults: Faults, tmp_path: Path) -> Fake:
    """A system with these interfaces, each up and with one v4 address unless told otherwise."""

    def fake(
        *names: str, macos: bool = False, flags: str = "up", isup: bool = True, speed: int = 0
    ) -> None:
        stats = {name: SimpleNamespace(isup=isup, flags=flags, speed=speed) for name in names}
        addresses = {name: [an_address("10.1.2.3", "255.255.0.0")] for name in names}
        faults.pretend(psutil, "net_if_stats", lambda: stats)
        faults.pretend(psutil, "net_if_addrs", lambda: addresses)
        be_on(monkeypatch, "darwin" if macos else "linux")

    monkeypatch.setattr(hardware, "_SYS_CLASS_NET", tmp_path)
    return fake


def read_addresses() -> tuple[LocalAddress, ...]:
    return InterfaceReader().read()


def local(host: str, kind: InterfaceKind = "wired") -> LocalAddress:
    return LocalAddress(interface="en0", host=host, prefix_bits=24, kind=kind)


LOOPBACK = local("127.0.0.1", "loopback")
V4, V6 = local("192.168.1.5"), local("fd00::5")
VPN = LocalAddress(interface="utun3", host="100.64.0.5", prefix_bits=32, kind="vpn")


async def test_where_no_descriptor_is_left_addresses_stay_and_are_looked_at_later(
    autojump_clock: trio.testing.MockClock,
) -> None:
    del autojump_clock
    no_file = OSError(errno.EMFILE, "Too many open files")
    no_thread = RuntimeError("can't start new thread")
    readings: Iterator[tuple[LocalAddress, ...] | Exception] = iter(
        [(V4,), no_file, no_thread, (V4, V6)]
    )

    def read() -> tuple[LocalAddress, ...]:
        found = next(readings)
        if isinstance(found, Exception):
            raise found
        return found

    watch = AddressWatch(read=read, open_notices=lambda: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        assert watch.current == (V4,)
        assert await watch.changed_from((V4,)) == (V4, V6)
        nursery.cancel_scope.cancel()


def test_this_machine_has_its_loopback_address() -> None:
    found = {address.host: address for address in read_addresses()}
    assert (found["127.0.0.1"].kind, found["127.0.0.1"].prefix_bits) == ("loopback", 8)


@pytest.mark.parametrize(
    "name",
    ["awdl0", "llw0", "bridge100", "docker0", "br-1f2e", "veth12ab", "virbr0", "vnic0", "podman0"],
)
def test_interfaces_that_lead_to_no_machine_at_home_are_left_out(
    fake_system: Fake, name: str
) -> None:
    fake_system(name)
    assert read_addresses() == ()


@pytest.mark.parametrize("name", ["en0", "bridge0", "eth0", "enp3s0", "wlan0", "thunderbolt0"])
def test_real_interfaces_are_kept(fake_system: Fake, name: str) -> None:
    fake_system(name)
    assert [address.interface for address in read_addresses()] == [name]


def test_interfaces_that_are_down_are_left_out(fake_system: Fake) -> None:
    fake_system("eth0", isup=False)
    assert read_addresses() == ()


@pytest.mark.parametrize(
    ("name", "flags"), [("utun3", "up"), ("wg0", "up"), ("ppp0", "up,pointopoint")]
)
def test_a_tunnel_is_a_vpn_and_has_no_link_local_neighbours(
    fake_system: Fake, faults: Faults, name: str, flags: str
) -> None:
    fake_system(name, flags=flags)
    found = [an_address("10.1.2.3", "255.255.0.0"), an_address("fe80::1", "ffff::")]
    faults.instead(psutil, "net_if_addrs", lambda: {name: found})
    assert [(own.host, own.kind) for own in read_addresses()] == [("10.1.2.3", "vpn")]


def test_an_interface_says_its_speed(fake_system: Fake) -> None:
    fake_system("eth0", speed=2500)
    assert [own.speed_mbit_s for own in read_addresses()] == [2500]


def test_the_user_may_name_interfaces_that_are_used_alone_or_not_at_all(fake_system: Fake) -> None:
    fake_system("docker0", "eth0", "eth1")

    def names(**rules: tuple[str, ...]) -> list[str]:
        return [own.interface for own in InterfaceReader(**rules).read()]

    assert names(only=("docker0", "eth1")) == ["docker0", "eth1"]
    assert names(never=("eth0",)) == ["eth1"]
    assert names(only=("eth0", "eth1"), never=("eth0",)) == ["eth1"]


def test_an_interface_that_vanishes_while_it_is_read_is_left_out(
    fake_system: Fake, faults: Faults
) -> None:
    fake_system("eth0")
    faults.instead(psutil, "net_if_stats", dict)
    assert read_addresses() == ()


def test_scopes_and_masks_are_read_and_other_families_ignored(
    fake_system: Fake, faults: Faults
) -> None:
    fake_system("eth0")
    found = [
        an_address("fe80::1%eth0", "ffff:ffff:ffff:ffff::"),
        an_address("10.0.0.1", None),
        SimpleNamespace(family=-1, address="00:11:22:33:44:55", netmask=None),
    ]
    faults.instead(psutil, "net_if_addrs", lambda: {"eth0": found})
    assert [(a.host, a.prefix_bits) for a in read_addresses()] == [
        ("fe80::1", 64),
        ("10.0.0.1", 32),
    ]


def test_linux_tells_the_kind_of_an_interface(fake_system: Fake, tmp_path: Path) -> None:
    (tmp_path / "wlan0" / "phy80211").mkdir(parents=True)
    fake_system("eth0", "thunderbolt0", "wlan0")
    assert [address.kind for address in read_addresses()] == ["wired", "thunderbolt", "wifi"]


@pytest.mark.parametrize(
    ("lanes", "speed", "expected"),
    [("2\n", "20.0 Gb/s\n", 40000), ("2\n", "40.0 Gb/s\n", 80000), ("", "", 0)],
)
def test_linux_tells_the_speed_of_a_thunderbolt_cable(
    fake_system: Fake, tmp_path: Path, lanes: str, speed: str, expected: int
) -> None:
    host = tmp_path / "devices" / "0-1"
    service = host / "0-1.0"
    service.mkdir(parents=True)
    (host / "tx_lanes").write_text(lanes)
    (host / "tx_speed").write_text(speed)
    (tmp_path / "thunderbolt0").mkdir()
    (tmp_path / "thunderbolt0" / "device").symlink_to(service)
    (tmp_path / "br0" / "brif" / "thunderbolt0").mkdir(parents=True)
    fake_system("thunderbolt0", "br0")
    found = [(own.kind, own.speed_mbit_s) for own in read_addresses()]
    assert found == [("thunderbolt", expected)] * 2  # the bridge is what its only member is


def test_a_bridge_with_another_member_is_wired(fake_system: Fake, tmp_path: Path) -> None:
    for member in ("thunderbolt0", "eth0"):
        (tmp_path / "br0" / "brif" / member).mkdir(parents=True)
    fake_system("br0")
    assert [own.kind for own in read_addresses()] == ["wired"]


MAC_THUNDERBOLT = """{"SPThunderboltDataType": [
    {"_name": "thunderboltusb4_bus_0", "receptacle_1_tag": {
        "current_speed_key": "40 Gb/s", "receptacle_id_key": "1",
        "receptacle_status_key": "receptacle_connected"}},
    {"_name": "thunderboltusb4_bus_1", "receptacle_1_tag": {
        "current_speed_key": "Up to 120 Gb/s", "receptacle_id_key": "2",
        "receptacle_status_key": "receptacle_no_devices_connected"}},
    {"_name": "another"}
]}"""
MAC_BRIDGE = """bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmember: en1 flags=3<LEARNING,DISCOVER>
\tmember: en2 flags=3<LEARNING,DISCOVER>
\tmedia: <unknown type>
\tstatus: active
"""


class MacCommands:
    """What the commands of macOS print, and what its ioctl says of an interface's medium."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said = {"networksetup": MAC_PORTS, "system_profiler": MAC_THUNDERBOLT}
        self.bridges = {"bridge0": MAC_BRIDGE}
        self.asked: list[str] = []
        self.unplugged: set[str] = set()
        self.without_medium: set[str] = set()
        monkeypatch.setattr(subprocess, "run", self._run)
        monkeypatch.setattr(fcntl, "ioctl", self._ioctl)

    def _run(self, command: tuple[str, ...], **_: object) -> SimpleNamespace:
        name = command[0].rpartition("/")[2]
        self.asked.append(name)
        said = self.bridges.get(command[1], "") if name == "ifconfig" else self.said[name]
        return SimpleNamespace(stdout=said)

    def _ioctl(self, _: object, code: int, request: bytes) -> bytes:
        assert (code, len(request)) == (0xC02C6938, 44)  # its size is part of the code
        name = request[:16].rstrip(b"\0").decode()
        if name in self.without_medium:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        status = 1 if name in self.unplugged else 3
        return request[:24] + status.to_bytes(4, sys.byteorder) + request[28:]


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> MacCommands:
    return MacCommands(monkeypatch)


def test_macos_tells_the_kind_of_an_interface(fake_system: Fake, mac: MacCommands) -> None:
    fake_system("bridge0", "bridge1", "en0", "en1", "en4", "en5", "en8", macos=True)
    kinds = {own.interface: (own.kind, own.speed_mbit_s) for own in read_addresses()}
    assert kinds == {
        "bridge0": ("thunderbolt", 40000),  # as its only cable
        "bridge1": ("wired", 0),
        "en0": ("wifi", 0),
        "en1": ("thunderbolt", 40000),
        "en4": ("wired", 0),
        "en5": ("wired", 0),
        "en8": ("wired", 0),
    }
    assert mac.asked == ["networksetup", "system_profiler", "ifconfig", "ifconfig"]


def test_macos_is_asked_again_only_when_an_interface_comes_up(
    fake_system: Fake, mac: MacCommands
) -> None:
    reader = InterfaceReader()
    for names, asked in [
        (("en0", "en1"), 1),
        (("en0",), 1),  # a loss is known at once
        (("en0", "en1"), 2),  # perhaps with another cable
        (("en0", "en1"), 2),
    ]:
        fake_system(*names, macos=True)
        reader.read()
        assert mac.asked.count("networksetup") == asked


def test_a_bridge_that_macos_does_not_describe_has_the_kind_of_its_port(
    fake_system: Fake, mac: MacCommands
) -> None:
    mac.bridges.clear()
    fake_system("bridge0", macos=True)
    assert [own.kind for own in read_addresses()] == ["thunderbolt"]


def test_macos_says_that_a_cable_was_pulled(fake_system: Fake, mac: MacCommands) -> None:
    mac.unplugged.add("en4")
    mac.without_medium.add("en8")
    fake_system("en0", "en4", "en8", macos=True)
    assert [own.interface for own in read_addresses()] == ["en0", "en8"]


@pytest.mark.parametrize(
    "error", [FileNotFoundError("networksetup"), subprocess.TimeoutExpired("networksetup", 5)]
)
@pytest.mark.usefixtures("mac")
def test_without_an_answer_every_interface_counts_as_wired(
    fake_system: Fake, faults: Faults, error: Exception
) -> None:
    faults.fail(subprocess, "run", error)
    fake_system("en0", macos=True)
    assert [address.kind for address in read_addresses()] == ["wired"]


def test_an_answer_that_is_no_json_says_no_speed(fake_system: Fake, mac: MacCommands) -> None:
    mac.said["system_profiler"] = "no"
    fake_system("en1", macos=True)
    assert [(own.kind, own.speed_mbit_s) for own in read_addresses()] == [("thunderbolt", 0)]


@pytest.mark.parametrize(
    ("listen_host", "expected"),
    [
        ("", (V4, V6)),
        ("0.0.0.0", (V4,)),  # noqa: S104 - nothing is bound
        ("::", (V6,)),
        ("192.168.1.5", (V4,)),
        ("fd00::5%en0", (V6,)),
        ("127.0.0.1", (LOOPBACK,)),
        ("192.168.1.6", ()),
    ],
)
def test_others_reach_the_addresses_at_which_the_agent_listens(
    listen_host: str, expected: tuple[LocalAddress, ...]
) -> None:
    assert reachable_at((LOOPBACK, V4, V6), listen_host=listen_host) == expected


def test_loopback_counts_where_there_is_nothing_else_but_a_vpn() -> None:
    assert reachable_at((LOOPBACK,), listen_host="") == (LOOPBACK,)
    assert reachable_at((LOOPBACK, VPN), listen_host="") == (LOOPBACK, VPN)
    assert reachable_at((LOOPBACK, VPN, V4), listen_host="") == (VPN, V4)


@pytest.mark.parametrize(
    ("listen_host", "only", "expected"),
    [
        ("", (), (V4,)),
        ("", ("utun3", "en0"), (V4, VPN)),
        ("100.64.0.5", (), (VPN,)),
    ],
)
async def test_a_vpn_is_used_and_announced_only_if_the_user_has_named_it(
    listen_host: str, only: tuple[str, ...], expected: tuple[LocalAddress, ...]
) -> None:
    watch = AddressWatch(listen_host, only=only, read=lambda: (V4, VPN))
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        assert VPN in watch.current
        assert watch.announced == expected
        nursery.cancel_scope.cancel()


async def test_without_a_rule_every_connection_is_kept() -> None:
    assert AddressWatch().uses(stream_from(("10.0.0.9", 1)))
    assert not AddressWatch(never=["en0"]).uses(stream_from(("10.0.0.9", 1)))


class FakeRouteSocket:
    def __init__(self, *kind: int) -> None:
        self.kind = kind
        self.bound: tuple[int, int] | None = None

    def setblocking(self, blocking: bool) -> None:  # noqa: FBT001 - socket's own
        assert not blocking

    def bind(self, address: tuple[int, int]) -> None:
        self.bound = address


@pytest.mark.parametrize(("macos", "bound"), [(False, (0, 0x111)), (True, None)])
def test_the_system_tells_of_interfaces_on_a_socket(
    monkeypatch: pytest.MonkeyPatch, faults: Faults, *, macos: bool, bound: tuple[int, int] | None
) -> None:
    be_on(monkeypatch, "darwin" if macos else "linux")
    faults.instead(socket, "socket", FakeRouteSocket)
    notices: object = interfaces.open_notices()
    assert isinstance(notices, FakeRouteSocket)
    assert notices.kind == (socket.AF_ROUTE, socket.SOCK_RAW)
    assert notices.bound == bound


def test_a_system_may_refuse_the_socket(faults: Faults) -> None:
    faults.fail(socket, "socket", OSError(errno.EAFNOSUPPORT, "not here"))
    assert interfaces.open_notices() is None


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The end at which the system writes, and that which a watch reads (macOS)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    theirs.setblocking(False)  # noqa: FBT003 - as above
    be_on(monkeypatch, "darwin")
    yield ours, theirs
    ours.close()


def notice(kind: int) -> bytes:
    return bytes([8, 0, 5, kind, 0, 0, 0, 0])


async def test_what_the_system_tells_is_read_at_once(
    autojump_clock: trio.testing.MockClock, notices: tuple[socket.socket, socket.socket]
) -> None:
    system, ours = notices
    looks = iter([(V4,), (V4, V6)])
    watch = AddressWatch(read=lambda: next(looks), open_notices=lambda: ours)
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        for kind in (0x1, 0xC, 0xE):  # a route, an address, an interface
            system.send(notice(kind))
        assert await watch.changed_from((V4,)) == (V4, V6)
        nursery.cancel_scope.cancel()
    assert autojump_clock.current_time() < interfaces.POLL_S


async def test_what_concerns_no_interface_is_not_read(
    autojump_clock: trio.testing.MockClock, notices: tuple[socket.socket, socket.socket]
) -> None:
    system, ours = notices
    looks = iter([(V4,)])  # a second would raise
    watch = AddressWatch(read=lambda: next(looks), open_notices=lambda: ours)
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        system.send(notice(0x1))
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert autojump_clock.autojump_threshold == 0


async def test_after_more_notices_than_fit_the_addresses_are_read(
    autojump_clock: trio.testing.MockClock,
    notices: tuple[socket.socket, socket.socket],
) -> None:
    del autojump_clock
    system, theirs = notices
    looks = iter([(V4,), (V4, V6)])

    class Overflowing(socket.socket):
        def recv(self, *options: int) -> bytes:
            super().recv(*options)
            raise OSError(errno.ENOBUFS, "No buffer space available")

    overflowing = Overflowing(fileno=theirs.detach())
    watch = AddressWatch(read=lambda: next(looks), open_notices=lambda: overflowing)
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        system.send(notice(0x1))
        assert await watch.changed_from((V4,)) == (V4, V6)
        nursery.cancel_scope.cancel()


async def test_where_the_system_tells_nothing_changes_are_noticed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    looks = iter([(V4,), (V4,), (V4, V6)])
    watch = AddressWatch(read=lambda: next(looks, (V4, V6)), open_notices=lambda: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        assert watch.current == (V4,)
        assert await watch.changed_from(()) == (V4,)
        assert await watch.changed_from((V4,)) == (V4, V6)
        assert trio.current_time() >= 2 * interfaces.POLL_S
        nursery.cancel_scope.cancel()
    assert autojump_clock.autojump_threshold == 0


@dataclass
class BoundSocket:
    name: object = ""

    def getsockopt(self, level: int, option: int, buffersize: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, interfaces.SO_BINDTODEVICE)
        return bytes(buffersize)

    def getpeername(self) -> object:
        if isinstance(self.name, OSError):
            raise self.name
        return self.name


def stream_from(name: object) -> trio.abc.HalfCloseableStream:
    stream, _ = trio.testing.memory_stream_pair()
    stream.socket = BoundSocket(name)  # type: ignore[attr-defined]
    return stream


async def test_both_ends_of_a_connection_have_an_address() -> None:
    async with tcp_streams() as (dialled, accepted):
        assert remote_address_of(dialled) == local_address_of(accepted)
        assert local_address_of(accepted).host == "127.0.0.1"
        assert remote_address_of(accepted) == local_address_of(dialled)


def test_a_link_local_address_says_its_interface() -> None:
    index, interface = socket.if_nameindex()[0]
    stream = stream_from(("fe80::1", 5, 0, index))
    assert remote_address_of(stream) == Address(f"fe80::1%{interface}", 5)
    assert str(remote_address_of(stream)) == f"[fe80::1%{interface}]:5"


def test_an_interface_that_is_gone_gives_no_address() -> None:
    """Nor does a system without a descriptor, which it takes to ask for the name."""
    assert remote_address_of(stream_from(("fe80::1", 5, 0, 2**30))) == UNKNOWN


def test_a_global_address_has_no_scope() -> None:
    assert remote_address_of(stream_from(("2001:db8::1", 5, 0, 0))) == Address("2001:db8::1", 5)


@pytest.mark.parametrize("name", ["", OSError("not connected")])
def test_what_has_no_address_is_unknown(name: object) -> None:
    assert remote_address_of(stream_from(name)) == UNKNOWN
    assert remote_address_of(trio.testing.memory_stream_pair()[0]) == UNKNOWN
