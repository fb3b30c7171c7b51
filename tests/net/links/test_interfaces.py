import errno
import socket
import struct
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
from pmesh.net.links import interfaces
from pmesh.net.links.interfaces import (
    UNKNOWN,
    AddressWatch,
    local_address_of,
    loss_of,
    reachable_at,
    read_addresses,
    remote_address_of,
)

MAC_PORTS = """
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
def fake_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    """A system with these interfaces, each up and with one v4 address unless told otherwise."""

    def fake(*names: str, macos: bool = False, flags: str = "up", isup: bool = True) -> None:
        stats = {name: SimpleNamespace(isup=isup, flags=flags) for name in names}
        addresses = {name: [an_address("10.1.2.3", "255.255.0.0")] for name in names}
        monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
        monkeypatch.setattr(psutil, "MACOS", macos)

    monkeypatch.setattr(interfaces, "_SYS_CLASS_NET", tmp_path)
    interfaces._kinds.cache_clear()  # noqa: SLF001 - what the real system said
    yield fake
    interfaces._kinds.cache_clear()  # noqa: SLF001 - what the fake one said


def local(host: str, kind: InterfaceKind = "wired") -> LocalAddress:
    return LocalAddress(interface="en0", host=host, prefix_bits=24, kind=kind)


LOOPBACK = local("127.0.0.1", "loopback")
V4, V6 = local("192.168.1.5"), local("fd00::5")


async def test_where_no_descriptor_is_left_addresses_stay_and_are_looked_at_later(
    autojump_clock: trio.testing.MockClock,
) -> None:
    del autojump_clock
    no_file = OSError(errno.EMFILE, "Too many open files")
    readings: Iterator[tuple[LocalAddress, ...] | OSError] = iter([(V4,), no_file, (V4, V6)])

    def read() -> tuple[LocalAddress, ...]:
        found = next(readings)
        if isinstance(found, OSError):
            raise found
        return found

    watch = AddressWatch(read=read)
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
    ["awdl0", "llw0", "utun3", "bridge100", "docker0", "br-1f2e", "veth12ab", "virbr0", "tun0"],
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


def test_interfaces_that_are_down_or_lead_into_a_tunnel_are_left_out(fake_system: Fake) -> None:
    fake_system("eth0", isup=False)
    assert read_addresses() == ()
    fake_system("ppp0", flags="up,pointopoint")
    assert read_addresses() == ()


def test_an_interface_that_vanishes_while_it_is_read_is_left_out(
    fake_system: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_system("eth0")
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    assert read_addresses() == ()


def test_scopes_and_masks_are_read_and_other_families_ignored(
    fake_system: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_system("eth0")
    found = [
        an_address("fe80::1%eth0", "ffff:ffff:ffff:ffff::"),
        an_address("10.0.0.1", None),
        SimpleNamespace(family=-1, address="00:11:22:33:44:55", netmask=None),
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": found})
    assert [(a.host, a.prefix_bits) for a in read_addresses()] == [
        ("fe80::1", 64),
        ("10.0.0.1", 32),
    ]


def test_linux_tells_the_kind_of_an_interface(fake_system: Fake, tmp_path: Path) -> None:
    (tmp_path / "wlan0" / "phy80211").mkdir(parents=True)
    fake_system("eth0", "thunderbolt0", "wlan0")
    assert [address.kind for address in read_addresses()] == ["wired", "thunderbolt", "wifi"]


def test_macos_tells_the_kind_of_an_interface(
    fake_system: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout=MAC_PORTS)

    monkeypatch.setattr(subprocess, "run", run)
    fake_system("bridge0", "en0", "en4", "en5", "en8", macos=True)
    assert [a.kind for a in read_addresses()] == ["thunderbolt", "wifi", *["wired"] * 3]
    read_addresses()
    assert asked == [["/usr/sbin/networksetup", "-listallhardwareports"]]  # once: it takes 50 ms


@pytest.mark.parametrize(
    "error", [FileNotFoundError("networksetup"), subprocess.TimeoutExpired("networksetup", 5)]
)
def test_without_an_answer_every_interface_counts_as_wired(
    fake_system: Fake, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    fake_system("en0", macos=True)
    assert [address.kind for address in read_addresses()] == ["wired"]


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


def test_loopback_counts_where_there_is_nothing_else() -> None:
    assert reachable_at((LOOPBACK,), listen_host="") == (LOOPBACK,)


async def test_a_change_of_addresses_is_noticed(autojump_clock: trio.testing.MockClock) -> None:
    looks = iter([(V4,), (V4,), (V4, V6)])
    watch = AddressWatch(read=lambda: next(looks, (V4, V6)))
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        assert watch.current == (V4,)
        assert await watch.changed_from(()) == (V4,)
        assert await watch.changed_from((V4,)) == (V4, V6)
        assert trio.current_time() >= 2 * interfaces.POLL_S
        nursery.cancel_scope.cancel()
    assert autojump_clock.autojump_threshold == 0


@dataclass
class FakeSocket:
    name: object = ""
    counters: bytes = b""

    def getsockopt(self, level: int, option: int, buffersize: int) -> bytes:
        assert (level, option) in {(socket.IPPROTO_TCP, 11), (socket.IPPROTO_TCP, 0x106)}
        return self.counters[:buffersize]

    def getpeername(self) -> object:
        if isinstance(self.name, OSError):
            raise self.name
        return self.name


def stream_from(name: object, counters: bytes = b"") -> trio.abc.HalfCloseableStream:
    stream, _ = trio.testing.memory_stream_pair()
    stream.socket = FakeSocket(name, counters)  # type: ignore[attr-defined]
    return stream


async def test_both_ends_of_a_connection_have_an_address() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with (
        listener,
        await trio.open_tcp_stream("127.0.0.1", port) as dialled,
        await listener.accept() as accepted,
    ):
        assert (
            remote_address_of(dialled) == local_address_of(accepted) == Address("127.0.0.1", port)
        )
        assert remote_address_of(accepted) == local_address_of(dialled)


def test_a_link_local_address_says_its_interface() -> None:
    index, interface = socket.if_nameindex()[0]
    stream = stream_from(("fe80::1", 5, 0, index))
    assert remote_address_of(stream) == Address(f"fe80::1%{interface}", 5)
    assert str(remote_address_of(stream)) == f"[fe80::1%{interface}]:5"


def test_a_global_address_has_no_scope() -> None:
    assert remote_address_of(stream_from(("2001:db8::1", 5, 0, 0))) == Address("2001:db8::1", 5)


@pytest.mark.parametrize("name", ["", OSError("not connected")])
def test_what_has_no_address_is_unknown(name: object) -> None:
    assert remote_address_of(stream_from(name)) == UNKNOWN
    assert remote_address_of(trio.testing.memory_stream_pair()[0]) == UNKNOWN


def counters(layout: str, *values: int) -> bytes:
    return struct.pack(layout, *values).ljust(512, b"\xff")


@pytest.mark.parametrize(
    ("platform", "told", "loss"),
    [
        ("linux", counters("=100xI52xI", 12, 1200), 0.01),
        ("linux", counters("=100xI52xI", 0, 1200), 0.0),
        ("linux", counters("=100xI52xI", 12, 199), None),
        ("linux", counters("=100xI52xI", 12, 1200)[:104], None),  # before Linux 4.6
        ("darwin", counters("=56xQ40xQ", 1200, 24), 0.02),
        ("win32", counters("=100xI52xI", 12, 1200), None),
    ],
)
def test_the_loss_of_a_connection_is_what_the_system_has_sent_again(
    platform: str, told: bytes, loss: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert loss_of(stream_from("", told)) == loss


async def test_a_connection_within_a_machine_loses_nothing_and_one_in_memory_has_no_loss() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with (
        listener,
        await trio.open_tcp_stream("127.0.0.1", port) as dialled,
        await listener.accept() as accepted,
    ):
        assert loss_of(dialled) is None
        for _ in range(300):
            await dialled.send_all(b"x")
            assert await accepted.receive_some(1) == b"x"
        loss = loss_of(dialled)
        assert loss is not None
        assert loss < 0.05
    assert loss_of(dialled) is None
    assert loss_of(trio.testing.memory_stream_pair()[0]) is None
