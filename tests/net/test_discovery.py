"""Real mDNS between real instances; on loopback alone, so that no other machine takes part."""

import gc
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

from pmesh.core import advertisement as adverts
from pmesh.core.addresses import LocalAddress
from pmesh.core.advertisement import Advertisement, encode, host_name, instance_name
from pmesh.core.identity import NodeKey
from pmesh.core.messages import Address
from pmesh.ids import Incarnation
from pmesh.net import discovery
from pmesh.net.discovery import Deaf, Discovered, Found, Gone, discover
from pmesh.net.interfaces import AddressWatch

LOOPBACK = LocalAddress(interface="lo", host="127.0.0.1", prefix_bits=8, kind="loopback")
TIMEOUT_S = 15.0  # a hang fails; usually it takes a tenth of a second


@pytest.fixture(autouse=True)
def service_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of other programs and of other test runs on this machine are not heard."""
    service_type = f"_pmesh-{os.getpid()}._tcp.local."
    monkeypatch.setattr(adverts, "SERVICE_TYPE", service_type)
    monkeypatch.setattr(discovery, "SERVICE_TYPE", service_type)


@dataclass
class Agent:
    own: Advertisement
    heard: trio.MemoryReceiveChannel[Discovered]

    async def next_event(self) -> Discovered:
        with trio.fail_after(TIMEOUT_S):
            return await self.heard.receive()

    async def hears(self, expected: Discovered) -> None:
        """Read what is reported until this."""
        while await self.next_event() != expected:
            pass


class Addresses(AddressWatch):
    """A watch that a test moves by hand."""

    def __init__(self, *addresses: LocalAddress) -> None:
        super().__init__("127.0.0.1", read=lambda: self._real)
        self._real = addresses

    async def become(self, *addresses: LocalAddress) -> None:
        self._real = addresses
        await self._look()


def advertisement(
    number: int, *, incarnation: int = 1, tag: bytes = b"meshmesh", protocol: int = 1
) -> Advertisement:
    return Advertisement(
        tag=tag,
        node=key(number).node,
        incarnation=Incarnation(incarnation),
        port=1000 + number,
        name=f"mac-{number}",
        protocol=protocol,
    )


def key(number: int) -> NodeKey:
    return NodeKey.from_seed(b"discovery tests, node number %03d" % number)


def found(theirs: Advertisement) -> Found:
    return Found(advertisement=theirs, addresses=(Address("127.0.0.1", theirs.port),))


@asynccontextmanager
async def running(
    own: Advertisement, number: int, *, watch: AddressWatch | None = None
) -> AsyncIterator[Agent]:
    send, receive = trio.open_memory_channel[Discovered](0)
    watch = watch or Addresses(LOOPBACK)
    async with receive, trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        await nursery.start(partial(discover, own, node_key=key(number), watch=watch, found=send))
        yield Agent(own, receive)
        nursery.cancel_scope.cancel()


async def test_two_agents_find_each_other_and_a_goodbye_is_heard() -> None:
    first, second = advertisement(1), advertisement(2)
    async with running(first, 1) as one:
        async with running(second, 2) as two:
            await two.hears(found(first))
            await one.hears(found(second))
        await one.hears(Gone(node=second.node))


async def test_other_meshes_and_other_versions_are_reported_too() -> None:
    stranger = advertisement(4, tag=b"stranger")
    newer = advertisement(5, protocol=2)
    async with running(advertisement(3), 3) as one, running(stranger, 4), running(newer, 5):
        awaited: set[Discovered] = {found(stranger), found(newer)}
        while awaited:
            awaited -= {await one.next_event()}


async def test_a_restart_and_a_copied_key_show_as_another_incarnation() -> None:
    async with running(advertisement(6), 6) as one:
        async with running(advertisement(7, incarnation=1), 7):
            await one.hears(found(advertisement(7, incarnation=1)))
        async with running(advertisement(7, incarnation=2), 7):
            await one.hears(found(advertisement(7, incarnation=2)))
        async with running(advertisement(6, incarnation=2), 6):
            await one.hears(found(advertisement(6, incarnation=2)))


async def test_a_forged_advertisement_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    liar, honest = advertisement(8), advertisement(10)

    def forge(own: Advertisement, node_key: NodeKey) -> dict[bytes, bytes]:
        entries = encode(own, node_key)
        return entries | {b"port": b"6666"} if own == liar else entries

    monkeypatch.setattr(adverts, "encode", forge)
    async with running(liar, 8), running(advertisement(9), 9) as one, running(honest, 10):
        events = [await one.next_event()]
        while found(honest) not in events:
            events.append(await one.next_event())
    assert liar.node not in {e.advertisement.node for e in events if isinstance(e, Found)}
    gc.collect()  # asyncio logs a task's unread exception when the task is collected
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_an_agent_without_addresses_waits_for_one() -> None:
    nowhere = Addresses()
    theirs = advertisement(12)
    async with running(advertisement(11), 11) as one:
        send, receive = trio.open_memory_channel[Discovered](0)
        async with receive, trio.open_nursery() as nursery:
            await nursery.start(nowhere.run)
            nursery.start_soon(
                partial(discover, theirs, node_key=key(12), watch=nowhere, found=send)
            )
            await trio.testing.wait_all_tasks_blocked()
            await nowhere.become(LOOPBACK)
            await one.hears(found(theirs))
            await nowhere.become()
            await one.hears(Gone(node=theirs.node))
            nursery.cancel_scope.cancel()


async def test_when_the_system_refuses_the_user_is_told_and_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "RETRY_S", 0.01)
    refusals = [OSError("Address in use"), OSError("Address in use")]

    def refuse_twice(*, interfaces: list[str]) -> AsyncZeroconf:
        if refusals:
            raise refusals.pop()
        return AsyncZeroconf(interfaces=interfaces)

    monkeypatch.setattr(discovery, "AsyncZeroconf", refuse_twice)
    async with running(advertisement(13), 13) as one, running(advertisement(14), 14):
        await one.hears(Deaf(reason="no mDNS: Address in use; use --peer"))
        await one.hears(found(advertisement(14)))


async def test_who_does_not_answer_after_a_change_of_addresses_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "SETTLE_S", 0.3)
    watch = Addresses(LOOPBACK)
    mover, theirs = advertisement(15), advertisement(16)
    async with running(mover, 15, watch=watch) as one, running(advertisement(23), 23) as observer:
        async with running(theirs, 16):
            await one.hears(found(theirs))
            await observer.hears(found(mover))
            await watch.become()
            await observer.hears(Gone(node=mover.node))  # from now on it hears no goodbye
        await watch.become(LOOPBACK)
        await one.hears(Gone(node=theirs.node))


async def test_a_flood_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MAX_INSTANCES", 1)
    async with running(advertisement(17), 17) as one:
        async with running(advertisement(18), 18), running(advertisement(19), 19):
            first = await one.next_event()
            assert isinstance(first, Found)
        assert await one.next_event() == Gone(node=first.advertisement.node)


async def test_browsing_again_reports_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "BROWSE_AGAIN_S", 0.02)
    first, second, third = advertisement(20), advertisement(21), advertisement(22)
    async with running(first, 20) as one, running(second, 21):
        await one.hears(found(second))
        browsed_again, token = trio.Event(), trio.lowlevel.current_trio_token()
        browsers: list[AsyncServiceBrowser] = []

        def browse(*args: Any, **options: Any) -> AsyncServiceBrowser:  # noqa: ANN401 - handed on
            browsers.append(AsyncServiceBrowser(*args, **options))
            if len(browsers) == 10:  # both agents' browsers
                token.run_sync_soon(browsed_again.set)
            return browsers[-1]

        monkeypatch.setattr(discovery, "AsyncServiceBrowser", browse)
        with trio.fail_after(TIMEOUT_S):
            await browsed_again.wait()
        async with running(third, 22):
            assert await one.next_event() == found(third)


async def test_a_slow_reader_gets_the_latest_event_of_each_agent() -> None:
    mailbox = discovery._Mailbox()  # noqa: SLF001 - what bounds its memory
    for number in range(1000):
        mailbox.put("x", Deaf(reason=str(number)))
    send, receive = trio.open_memory_channel[Discovered](0)
    async with send, receive, trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.deliver, send)
        assert await receive.receive() == Deaf(reason="999")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.WouldBlock):
            receive.receive_nowait()
        nursery.cancel_scope.cancel()


def test_v6_is_spoken_only_where_there_is_no_v4() -> None:
    number, name = socket.if_nameindex()[0]
    v6 = LocalAddress(interface=name, host="fe80::1", prefix_bits=64, kind="wired")
    assert discovery._sockets_for((v6, LOOPBACK)) == ["127.0.0.1"]  # noqa: SLF001 - pure, but ours
    assert discovery._sockets_for((v6,)) == [number]  # noqa: SLF001 - likewise


def test_names_on_the_network_are_those_of_the_node() -> None:
    service = discovery._service(advertisement(1), {}, (LOOPBACK,))  # noqa: SLF001 - likewise
    node = advertisement(1).node
    assert (service.name, service.server) == (instance_name(node), host_name(node))
    assert service.type == adverts.SERVICE_TYPE
