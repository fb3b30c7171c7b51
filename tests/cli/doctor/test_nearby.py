"""Real sockets on loopback: who answers by mDNS, and what becomes of few and of many bytes."""

import contextlib
import errno
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import trio
from zeroconf import DNSIncoming  # type: ignore[attr-defined]

from pmesh.cli.doctor import nearby
from pmesh.cli.doctor.nearby import (
    FEW_BYTES,
    LISTEN_S,
    QUESTIONS,
    Heard,
    interface_to,
    listen,
    try_machines,
)
from pmesh.core.identity import advertisement as adverts
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.keys import AdvertisementKey, MeshKey, NodeKey
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.wire.link import Address
from pmesh.errors import LocalNetworkDenied
from pmesh.ids import Incarnation, NodeId
from tests.worlds.faults import Faults

LOOPBACK = LocalAddress(interface="lo", host="127.0.0.1", prefix_bits=8, kind="loopback")
LINK_LOCAL = LocalAddress(interface="lo", host="fe80::1", prefix_bits=64, kind="wired")
KEY = AdvertisementKey.of(MeshKey(bytes(range(32))))
NODE_KEY = NodeKey.from_seed(bytes(range(32)))
AD = Advertisement(
    tag=KEY.tag,
    node=NODE_KEY.node,
    incarnation=Incarnation(1),
    port=24160,
    name="mac-1",
    hosts=("10.0.0.1",),
)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="its loopback takes multicast")


def packet(ad: Advertisement) -> bytes:
    """As zeroconf sends one: a name of ours, and the entries of a TXT record."""
    entries = adverts.encode(ad, NODE_KEY, KEY)
    texts = [name + b"=" + value for name, value in entries.items()]
    return b"\0\0\x84\0" + b"_pmesh" + b"".join(bytes([len(text)]) + text for text in texts)


def test_a_question_is_a_packet_that_zeroconf_would_send() -> None:
    read = [DNSIncoming(each) for each in QUESTIONS]
    assert [each.questions[0].name for each in read] == [
        "_pmesh._tcp.local.",
        "_services._dns-sd._udp.local.",
    ]
    assert all(each.is_query() and len(each.questions) == 1 for each in read)


@on_linux
async def test_an_announcement_is_heard_and_ends_the_wait(faults: Faults) -> None:
    faults.instead(nearby, "_ask", lambda _: announce())

    def announce() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            here = socket.inet_aton("127.0.0.1")
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, here)
            for each in (b"another program's", packet(AD), b"_pmesh forged"):
                sender.sendto(each, ("224.0.0.251", 5353))

    heard = await listen(KEY, [LOOPBACK], [NODE_KEY.node], least_s=0.0)
    assert heard.agents[NODE_KEY.node] == AD
    assert heard.error == ""


@on_linux
@pytest.mark.parametrize(
    ("expected", "waits_s", "asks"), [([], nearby.STRANGERS_S, 3), ([NODE_KEY.node], LISTEN_S, 6)]
)
async def test_who_is_expected_is_waited_for_longer_and_asked_again(
    expected: list[NodeId],
    waits_s: float,
    asks: int,
    faults: Faults,
    autojump_clock: trio.abc.Clock,
) -> None:
    asked: list[float] = []
    faults.instead(nearby, "_ask", lambda _: asked.append(trio.current_time()))
    began = trio.current_time()
    heard = await listen(None, [LOOPBACK], expected)
    assert not heard.error
    assert len(asked) == asks
    assert trio.current_time() - began == pytest.approx(waits_s, abs=nearby.LOOK_EVERY_S)
    del autojump_clock


async def test_a_system_that_lets_nobody_ask_is_an_error_in_words(faults: Faults) -> None:
    faults.instead(nearby, "_open_listeners", lambda _: ())
    faults.fail(nearby, "_ask", OSError(errno.EHOSTUNREACH, "No route to host"))
    heard = await listen(KEY, [LOOPBACK], [])
    assert heard.error == "No route to host"


@on_linux
async def test_an_interface_that_takes_no_question_does_not_keep_the_others_silent() -> None:
    not_ours = replace(LOOPBACK, host="203.0.113.1")
    assert not (await listen(KEY, [not_ours, LOOPBACK], [], least_s=0.0)).error
    assert (await listen(KEY, [not_ours], [], least_s=0.0)).error


class SocketWithPackets(contextlib.nullcontext["SocketWithPackets"]):
    """A socket that has these packets, and then no more."""

    def __init__(self, *packets: tuple[bytes, str]) -> None:
        super().__init__(self)
        self._packets = iter(packets)

    async def recvfrom(self, _: int) -> tuple[bytes, tuple[str, int]]:
        found = next(self._packets, None)
        if found is None:
            await trio.sleep_forever()
            raise AssertionError
        return found[0], (found[1], 5353)


async def heard_of(faults: Faults, *packets: tuple[bytes, str]) -> Heard:
    """What this machine, 10.0.0.1, hears from them."""
    with (
        faults.instead(nearby, "_open_listeners", lambda _: [SocketWithPackets(*packets)]),
        faults.skip(nearby, "_ask"),
    ):
        return await listen(KEY, [replace(LOOPBACK, host="10.0.0.1")], [], least_s=0.1)


async def test_only_the_packets_of_others_say_that_others_are_there(faults: Faults) -> None:
    heard = await heard_of(faults, (b"a question", "10.0.0.1"), (b"a printer", "fe80::7%en0"))
    assert heard.hosts == {"fe80::7"}
    assert heard.agents == {}


async def test_a_flood_of_announcements_costs_so_many_signatures_and_no_more(
    faults: Faults,
) -> None:
    faults.limit(nearby, "MAX_READ", 2)
    forged = (b"_pmesh forged", "10.0.0.9")
    heard = await heard_of(faults, forged, forged, (packet(AD), "10.0.0.2"))
    assert heard.agents == {}
    heard = await heard_of(faults, forged, (packet(AD), "10.0.0.2"))
    assert heard.agents == {NODE_KEY.node: AD}


@on_linux
async def test_questions_go_to_the_group_from_its_port() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as got:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            got.setsockopt(socket.SOL_SOCKET, option, 1)
        got.bind(("224.0.0.251", 5353))
        member = socket.inet_aton("224.0.0.251") + socket.inet_aton("127.0.0.1")
        got.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        got.settimeout(5)
        await listen(None, [LOOPBACK], [], least_s=0.0)
        asked = [(question, ("127.0.0.1", 5353)) for question in QUESTIONS]
        while got.recvfrom(9000) not in asked:  # of another program; without ours it times out
            pass


@on_linux
def test_an_interface_without_ipv4_is_asked_by_ipv6() -> None:
    networks = [*nearby._networks([LINK_LOCAL])]  # noqa: SLF001 - where the sockets are opened
    assert [(each.family, each.group) for each in networks] == [
        (socket.AF_INET6, ("ff02::fb", 5353, 0, socket.if_nametoindex("lo")))
    ]
    assert [each.host for each in nearby._networks([LOOPBACK, LINK_LOCAL])] == ["127.0.0.1"]  # noqa: SLF001 - as above


Serve = Callable[[trio.SocketStream], Awaitable[None]]


async def closes(stream: trio.SocketStream) -> None:
    await stream.receive_some(FEW_BYTES)
    await stream.aclose()


async def says_something(stream: trio.SocketStream) -> None:
    await stream.send_all(b"SSH-2.0\n")
    await trio.sleep_forever()


async def says_nothing(stream: trio.SocketStream) -> None:
    del stream
    await trio.sleep_forever()


async def gets_no_large_packet(stream: trio.SocketStream) -> None:
    """As if these had vanished on the way."""
    got = await stream.receive_some(FEW_BYTES + 1)
    if len(got) > FEW_BYTES:
        await trio.sleep_forever()
    await stream.aclose()


@pytest.mark.parametrize(
    ("serve", "state"),
    [
        (closes, "answers"),
        (says_something, "answers"),
        (says_nothing, "is silent"),
        (gets_no_large_packet, "large packets vanish"),
    ],
)
async def test_few_and_many_bytes_tell_a_hole_from_an_agent_that_hangs(
    serve: Serve, state: str, faults: Faults
) -> None:
    faults.limit(nearby, "REACT_S", 0.3)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        tried = await try_machines({"m": [Address("127.0.0.1", port)]}, [LOOPBACK])
        nursery.cancel_scope.cancel()
    assert (tried["m"].address, tried["m"].state) == (f"127.0.0.1:{port}", state)


async def test_a_machine_that_was_busy_once_has_no_hole(faults: Faults) -> None:
    faults.limit(nearby, "REACT_S", 0.3)
    turns = iter([says_nothing, closes, closes])

    async def serve(stream: trio.SocketStream) -> None:
        await next(turns)(stream)

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        address = Address(*listener.socket.getsockname()[:2])
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        tried = await try_machines({"m": [address]}, [LOOPBACK])
        nursery.cancel_scope.cancel()
    assert tried["m"].state == "answers"


async def test_why_nobody_is_reached_is_told(faults: Faults) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        port = closed.getsockname()[1]
        machines = {"off": [Address("127.0.0.1", port)], "nowhere": []}
        tried = await try_machines(machines, [LOOPBACK])
    assert tried["off"].state == tried["nowhere"].state == "unreachable"
    assert "refuses connections" in tried["off"].error
    assert "no address" in tried["nowhere"].error

    faults.fail(nearby, "dial_any", LocalNetworkDenied("macOS does not let this program talk"))
    tried = await try_machines({"m": [Address("127.0.0.1", 1)]}, [LOOPBACK])
    assert tried["m"].state == "denied"


async def test_a_machine_that_answers_nothing_is_not_waited_for_any_longer(
    faults: Faults, autojump_clock: trio.abc.Clock
) -> None:
    faults.hang(nearby, "dial_any")
    tried = await try_machines({"m": [Address("127.0.0.1", 1)]}, [LOOPBACK])
    assert tried["m"].error == "no answer in 5 s"
    del autojump_clock


async def test_a_name_is_looked_up() -> None:
    assert await nearby.look_up(Address("127.0.0.1", 7)) == (Address("127.0.0.1", 7),)
    assert Address("127.0.0.1", 7) in await nearby.look_up(Address("localhost", 7))


async def test_a_name_stays_if_nobody_has_it(
    faults: Faults, autojump_clock: trio.abc.Clock
) -> None:
    async def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown")

    async def slow(*_: object, **__: object) -> None:
        await trio.sleep_forever()

    for answer in (unknown, slow):
        faults.instead(trio.socket, "getaddrinfo", answer)
        assert await nearby.look_up(Address("mac.local", 7)) == (Address("mac.local", 7),)
    del autojump_clock


def test_the_system_tells_by_which_interface_it_would_send() -> None:
    assert interface_to("127.0.0.1", [LOOPBACK]) == LOOPBACK
    assert interface_to("127.0.0.1", []) is None
    assert interface_to("256.0.0.1", [LOOPBACK]) is None
