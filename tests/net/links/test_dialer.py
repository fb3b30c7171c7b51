import contextlib
import errno
import gc
import socket
import weakref
from collections.abc import AsyncIterator

import psutil
import pytest
import trio
import trio.testing

from pmesh.core.links.addresses import LocalAddress
from pmesh.core.wire.link import Address
from pmesh.errors import LocalNetworkDenied, PeerUnreachable
from pmesh.net.links import dialer
from pmesh.net.links.dialer import AT_ONCE, DIAL_TIMEOUT_S, Connect, dial, dial_any
from tests.worlds.faults import Faults
from tests.worlds.system import be_on


@pytest.fixture
async def listening() -> AsyncIterator[Address]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        yield Address("127.0.0.1", listener.socket.getsockname()[1])


@pytest.fixture
async def refusing() -> AsyncIterator[Address]:
    """A port that is bound, so that nobody else gets it, and on which nobody listens."""
    with trio.socket.socket() as bound:
        await bound.bind(("127.0.0.1", 0))
        yield Address("127.0.0.1", bound.getsockname()[1])


def fail_with(*numbers: int) -> Connect:
    """The way in which trio reports that all attempts failed."""

    async def connect(_host: str, _port: int) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        raise OSError("all failed") from ExceptionGroup(
            "all failed", [OSError(number, "why") for number in numbers]
        )

    return connect


async def never(_host: str, _port: int) -> trio.SocketStream:
    await trio.sleep_forever()
    raise AssertionError


async def test_a_connection_is_made_without_delay(listening: Address) -> None:
    async with await dial(listening) as stream:
        assert stream.getsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY)


async def test_a_refused_connection_says_what_to_do(refusing: Address) -> None:
    with pytest.raises(PeerUnreachable, match=f"127.0.0.1:{refusing.port} refuses.*'pmesh up'"):
        await dial(refusing)


async def test_no_thread_to_look_up_a_name_is_one_dial_that_failed() -> None:
    async def no_thread(_host: str, _port: int) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("can't start new thread")

    with pytest.raises(PeerUnreachable, match="can't start new thread"):
        await dial(Address("mac-mini.local", 1), connect=no_thread)


@pytest.mark.parametrize("host", ["no such host", "x" * 70 + ".local", "nul\0", "é" * 100, ""])
async def test_a_host_that_can_not_be_is_unreachable(host: str) -> None:
    with pytest.raises(PeerUnreachable):
        await dial(Address(host, 1), timeout_s=60)


class RefusedSocket:
    """A socket that connects to nobody, and remembers what was asked of it."""

    def __init__(self, refuses: int | None = None) -> None:
        self.refuses = refuses
        self.options: list[tuple[int, int, int | bytes]] = []
        self.bound: tuple[str | int, ...] | None = None
        self.closed = False

    def __call__(self, family: int, _: int) -> "RefusedSocket":
        self.family = family
        return self

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        if self.refuses is not None:
            raise OSError(self.refuses, "no")
        self.options.append((level, option, value))

    async def bind(self, address: tuple[str | int, ...]) -> None:
        await trio.lowlevel.checkpoint()
        self.bound = address

    async def connect(self, _: object) -> None:
        await trio.lowlevel.checkpoint()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    def close(self) -> None:
        self.closed = True


NUMBER, INTERFACE = socket.if_nameindex()[0]


def own_address(host: str, interface: str = INTERFACE) -> LocalAddress:
    return LocalAddress(interface=interface, host=host, prefix_bits=64, kind="wired")


@pytest.mark.parametrize(
    ("macos", "host", "via", "option"),
    [
        (True, "169.254.7.8", "169.254.7.7", (socket.IPPROTO_IP, 25, NUMBER)),
        (True, f"fe80::8%{INTERFACE}", "fe80::7", (socket.IPPROTO_IPV6, 125, NUMBER)),
        (False, "169.254.7.8", "169.254.7.7", (socket.SOL_SOCKET, 25, INTERFACE.encode())),
    ],
)
async def test_the_packets_of_a_dial_leave_by_its_interface(
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    *,
    macos: bool,
    host: str,
    via: str,
    option: tuple[int, int, int | bytes],
) -> None:
    fake = RefusedSocket()
    be_on(monkeypatch, "darwin" if macos else "linux")
    faults.instead(trio.socket, "socket", fake)
    with pytest.raises(PeerUnreachable, match="refuses connections"):
        await dial(Address(host, 7), via=own_address(via))
    assert fake.options == [option]
    assert fake.closed


@pytest.mark.parametrize(
    ("host", "via", "bound"),
    [
        ("10.0.0.9", "10.0.0.5", ("10.0.0.5", 0)),
        (f"fe80::8%{INTERFACE}", "fe80::7", ("fe80::7", 0, 0, NUMBER)),
    ],
)
async def test_an_old_linux_that_refuses_gets_the_source_address(
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    host: str,
    via: str,
    bound: tuple[str | int, ...],
) -> None:
    fake = RefusedSocket(refuses=errno.EPERM)
    be_on(monkeypatch, "linux")
    faults.instead(trio.socket, "socket", fake)
    with pytest.raises(PeerUnreachable, match="refuses connections"):
        await dial(Address(host, 7), via=own_address(via))
    assert fake.bound == bound


async def test_an_interface_that_is_gone_reaches_nobody(listening: Address) -> None:
    with pytest.raises(PeerUnreachable, match="can't be reached"):
        await dial(listening, via=own_address("127.0.0.1", "gone9"))


@pytest.mark.skipif(not psutil.LINUX, reason="macOS is faked above")
async def test_a_dial_that_is_bound_connects_without_delay(listening: Address) -> None:
    async with await dial(listening, via=own_address("127.0.0.1", "lo")) as stream:
        assert stream.getsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY)
        assert stream.getsockopt(socket.SOL_SOCKET, 25, 16).rstrip(b"\0") == b"lo"


async def test_silence_ends_in_time(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(PeerUnreachable, match=r"10\.0\.0\.9:7 does not answer \(5 s\)"):
        await dial(Address("10.0.0.9", 7), connect=never)
    assert autojump_clock.current_time() == 5.0


@pytest.mark.parametrize("host", ["192.168.1.9", "fe80::9%en0", "mac-2.local"])
async def test_macos_without_the_permission_names_the_settings_pane(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    be_on(monkeypatch, "darwin")
    with pytest.raises(LocalNetworkDenied, match="Privacy & Security → Local Network"):
        await dial(Address(host, 1), connect=fail_with(errno.ECONNREFUSED, errno.EHOSTUNREACH))


@pytest.mark.parametrize(("macos", "host"), [(False, "192.168.1.9"), (True, "8.8.8.8")])
async def test_elsewhere_no_route_is_just_that(
    monkeypatch: pytest.MonkeyPatch, *, macos: bool, host: str
) -> None:
    be_on(monkeypatch, "darwin" if macos else "linux")
    with pytest.raises(PeerUnreachable, match=r"can't be reached: why$"):
        await dial(Address(host, 1), connect=fail_with(errno.EHOSTUNREACH))


async def test_an_address_is_not_named_once_more_as_python_writes_it() -> None:
    async def connect(_host: str, _port: int) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.ENETUNREACH, "Error connecting to ('8.8.8.8', 1): No route to host")

    with pytest.raises(PeerUnreachable) as caught:
        await dial(Address("8.8.8.8", 1), connect=connect)
    assert str(caught.value) == "8.8.8.8:1 can't be reached: No route to host"


async def test_after_a_refusal_the_next_address_is_dialled_at_once(
    listening: Address, autojump_clock: trio.testing.MockClock
) -> None:
    connect, refuse = trio.open_tcp_stream, fail_with(errno.ECONNREFUSED)

    async def refuse_or_connect(host: str, port: int) -> trio.SocketStream:
        return await (refuse if host == "10.0.0.9" else connect)(host, port)

    stream, address = await dial_any(
        [(Address("10.0.0.9", 1), None), (listening, None)], connect=refuse_or_connect
    )
    async with stream:
        assert address == (listening, None)
    assert autojump_clock.current_time() == 0


async def test_an_address_that_swallows_packets_costs_a_quarter_of_a_second(
    listening: Address, autojump_clock: trio.testing.MockClock
) -> None:
    connect = trio.open_tcp_stream

    async def swallow_or_connect(host: str, port: int) -> trio.SocketStream:
        return await (never if host == "10.0.0.9" else connect)(host, port)

    stream, address = await dial_any(
        [(Address("10.0.0.9", 1), None), (listening, None)], connect=swallow_or_connect
    )
    async with stream:
        assert address == (listening, None)
    assert autojump_clock.current_time() < 2 * dialer.STAGGER_S


async def test_of_two_that_connect_in_one_turn_one_is_closed(
    listening: Address, autojump_clock: trio.testing.MockClock
) -> None:
    streams: list[trio.SocketStream] = []
    really_connect = trio.open_tcp_stream

    async def connect(host: str, port: int) -> trio.SocketStream:
        with trio.CancelScope(shield=True):  # it has connected when the cancellation comes
            await trio.sleep_until(1.0)
            streams.append(await really_connect(host, port))
        return streams[-1]

    winner, _ = await dial_any([(listening, None), (listening, None)], connect=connect)
    assert len(streams) == 2
    assert [stream for stream in streams if stream.socket.fileno() >= 0] == [winner]
    await winner.aclose()
    assert autojump_clock.current_time() == 1.0


async def test_when_nobody_accepts_every_reason_is_told(refusing: Address) -> None:
    with pytest.raises(PeerUnreachable, match=r"refuses connections.*; no such host:1 can't"):
        await dial_any([(refusing, None), (Address("no such host", 1), None)])


@pytest.mark.parametrize(
    ("hosts", "where"),
    [
        (["10.0.0.2", "10.0.0.2"], "10.0.0.2:1"),
        (["10.0.0.2", "fe80::2%en0"], "10.0.0.2:1 (and [fe80::2%en0]:1)"),
        (["10.0.0.2", "fe80::2%en0", "10.1.0.2"], "10.0.0.2:1 (and 2 more addresses)"),
    ],
)
async def test_a_reason_that_holds_for_all_addresses_is_told_once(
    hosts: list[str], where: str
) -> None:
    addresses = [(Address(host, 1), None) for host in hosts]
    with pytest.raises(PeerUnreachable) as raised:
        await dial_any(addresses, connect=fail_with(errno.ECONNREFUSED))
    assert str(raised.value) == f"{where} refuses connections; does 'pmesh up' run there?"


async def test_when_one_may_have_been_denied_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be_on(monkeypatch, "darwin")
    with pytest.raises(LocalNetworkDenied, match=r"10\.0\.0\.9"):
        await dial_any(
            [(Address("10.0.0.9", 1), None), (Address("8.8.8.8", 1), None)],
            connect=fail_with(errno.EHOSTUNREACH),
        )


def test_an_address_is_described_as_a_person_writes_it() -> None:
    assert str(Address("fe80::1%en0", 24160)) == "[fe80::1%en0]:24160"
    assert str(Address("mac.local", 24160)) == "mac.local:24160"


async def test_four_addresses_at_once_are_dialled_at_most(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A machine may name many that do not exist; each attempt costs a descriptor."""
    under_way = most = 0

    async def connect(_host: str, _port: int) -> trio.SocketStream:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await trio.sleep_forever()
        finally:
            under_way -= 1
        raise AssertionError

    with pytest.raises(PeerUnreachable):
        await dial_any([(Address(f"10.0.0.{n}", 7), None) for n in range(16)], connect=connect)
    assert most == AT_ONCE
    assert autojump_clock.current_time() < 4 * DIAL_TIMEOUT_S + 1


class Refuser:
    """Notes why it fails in its own frame, as trio does."""

    async def __call__(self, _host: str, _port: int) -> trio.SocketStream:
        errors = list[OSError]()
        try:
            await trio.lowlevel.checkpoint()
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        except OSError as e:
            errors.append(e)
        raise OSError("all attempts failed") from ExceptionGroup("all", errors)


async def test_what_failed_attempts_held_does_not_wait_for_the_collector() -> None:
    """An agent dials what is not there for as long as it runs."""
    connect = Refuser()
    held = weakref.ref(connect)
    gc.disable()
    try:
        with contextlib.suppress(PeerUnreachable):
            await dial_any([(Address("127.0.0.1", 1), None)] * 2, connect=connect)
        del connect
        assert held() is None
    finally:
        gc.enable()
