"""Real mDNS between real instances; on loopback alone, so that no other machine takes part."""

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from zeroconf import ServiceInfo
from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

from pmesh.core.identity import advertisement as adverts
from pmesh.core.identity.advertisement import Advertisement, encode, host_name, instance_name
from pmesh.core.identity.keys import AdvertisementKey, MeshKey, NodeKey
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.ids import Incarnation
from pmesh.net.links import discovery, packet_filter
from pmesh.net.links.discovery import (
    AgentFound,
    Deaf,
    Discovered,
    DiscoverySettings,
    Gone,
    discover,
)
from pmesh.net.links.interfaces import AddressWatch
from pmesh.net.links.packet_filter import DiscoveryCounters
from tests.worlds.faults import Faults

MESH = AdvertisementKey.of(MeshKey(b"m" * 32))
OTHER_MESH = AdvertisementKey.of(MeshKey(b"o" * 32))
LOOPBACK = LocalAddress(interface="lo", host="127.0.0.1", prefix_bits=8, kind="loopback")
SETTINGS = DiscoverySettings(minute=lambda: 5, move_again_s=0.0)
TIMEOUT_S = 15.0  # a hang fails; usually it takes a tenth of a second


@pytest.fixture(autouse=True)
def service_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of other programs and of other test runs on this machine are not heard."""
    service_type = f"_pmesh-{os.getpid()}._tcp.local."
    monkeypatch.setattr(adverts, "SERVICE_TYPE", service_type)
    monkeypatch.setattr(discovery, "SERVICE_TYPE", service_type)


@dataclass
class Discoverer:
    own: Advertisement
    heard: trio.MemoryReceiveChannel[Discovered]

    async def next_event(self) -> Discovered:
        with trio.fail_after(TIMEOUT_S):
            return await self.heard.receive()

    async def hears(self, expected: Discovered) -> None:
        """Read what is reported until this."""
        while await self.next_event() != expected:
            pass


class MovableAddresses(AddressWatch):
    """A watch that a test moves by hand."""

    def __init__(self, *addresses: LocalAddress) -> None:
        super().__init__("127.0.0.1", read=lambda: self._real)
        self._real = addresses

    async def become(self, *addresses: LocalAddress) -> None:
        self._real = addresses
        await self._poll()


def advertisement(
    number: int,
    *,
    incarnation: int = 1,
    tag: bytes = MESH.tag,
    protocol: int = PROTOCOL_VERSION,
) -> Advertisement:
    return Advertisement(
        tag=tag,
        node=key(number).node,
        incarnation=Incarnation(incarnation),
        port=1000 + number,
        name=f"mac-{number}",
        protocol=protocol,
        hosts=("127.0.0.1",) if protocol == PROTOCOL_VERSION else (),
        minute=5 if protocol == PROTOCOL_VERSION else 1,
    )


def key(number: int) -> NodeKey:
    return NodeKey.from_seed(b"discovery tests, node number %03d" % number)


def found(theirs: Advertisement) -> AgentFound:
    return AgentFound(advertisement=theirs)


@asynccontextmanager
async def running(
    own: Advertisement,
    number: int,
    *,
    watch: AddressWatch | None = None,
    mesh: AdvertisementKey = MESH,
    counters: DiscoveryCounters | None = None,
    nameplate: discovery.Nameplate | None = None,
    settings: DiscoverySettings = SETTINGS,
) -> AsyncIterator[Discoverer]:
    send, receive = trio.open_memory_channel[Discovered](0)
    watch = watch or MovableAddresses(LOOPBACK)
    async with receive, trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        await nursery.start(
            partial(
                discover,
                own,
                node_key=key(number),
                key=mesh,
                watch=watch,
                found=send,
                counters=counters or DiscoveryCounters(),
                nameplate=nameplate,
                settings=settings,
            )
        )
        yield Discoverer(own, receive)
        nursery.cancel_scope.cancel()


async def test_two_agents_find_each_other_and_a_goodbye_is_heard() -> None:
    first, second = advertisement(1), advertisement(2)
    async with running(first, 1) as one:
        async with running(second, 2) as two:
            await two.hears(found(first))
            await one.hears(found(second))
        await one.hears(Gone(node=second.node))


async def test_other_meshes_and_other_versions_are_reported_too() -> None:
    stranger = advertisement(4, tag=OTHER_MESH.tag)
    newer = advertisement(5, protocol=PROTOCOL_VERSION + 1)
    async with (
        running(advertisement(3), 3) as one,
        running(stranger, 4, mesh=OTHER_MESH),
        running(newer, 5),
    ):
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
    faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    liar, honest = advertisement(8), advertisement(10)

    def forge(own: Advertisement, node_key: NodeKey, key: AdvertisementKey) -> dict[bytes, bytes]:
        entries = encode(own, node_key, key)
        return entries | {b"port": b"6666"} if own == liar else entries

    faults.instead(adverts, "encode", forge)
    async with running(liar, 8), running(advertisement(9), 9) as one, running(honest, 10):
        events = [await one.next_event()]
        while found(honest) not in events:
            events.append(await one.next_event())
    assert liar.node not in {e.advertisement.node for e in events if isinstance(e, AgentFound)}
    gc.collect()  # asyncio logs a task's unread exception when the task is collected
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_an_agent_without_addresses_waits_for_one() -> None:
    nowhere = MovableAddresses()
    theirs = advertisement(12)
    async with running(advertisement(11), 11) as one:
        send, receive = trio.open_memory_channel[Discovered](0)
        async with receive, trio.open_nursery() as nursery:
            await nursery.start(nowhere.run)
            nursery.start_soon(
                partial(
                    discover,
                    theirs,
                    node_key=key(12),
                    key=MESH,
                    watch=nowhere,
                    found=send,
                    counters=DiscoveryCounters(),
                    settings=SETTINGS,
                )
            )
            await trio.testing.wait_all_tasks_blocked()
            await nowhere.become(LOOPBACK)
            await one.hears(found(theirs))
            await nowhere.become()
            await one.hears(Gone(node=theirs.node))
            nursery.cancel_scope.cancel()


async def test_when_the_system_refuses_the_user_is_told_and_it_is_tried_again() -> None:
    refusals = [OSError("Address in use"), OSError("Address in use")]

    def refuse_twice(*, interfaces: list[str]) -> AsyncZeroconf:
        if refusals:
            raise refusals.pop()
        return AsyncZeroconf(interfaces=interfaces)

    settings = replace(SETTINGS, retry_s=0.01, open_zeroconf=refuse_twice)
    async with (
        running(advertisement(13), 13, settings=settings) as one,
        running(advertisement(14), 14),
    ):
        await one.hears(Deaf(reason="no mDNS: Address in use; use --peer"))
        await one.hears(found(advertisement(14)))


async def test_who_does_not_answer_after_a_change_of_addresses_is_gone() -> None:
    settings = replace(SETTINGS, settle_s=0.3)
    watch = MovableAddresses(LOOPBACK)
    mover, theirs = advertisement(15), advertisement(16)
    async with (
        running(mover, 15, watch=watch, settings=settings) as one,
        running(advertisement(23), 23) as observer,
    ):
        async with running(theirs, 16):
            await one.hears(found(theirs))
            await observer.hears(found(mover))
            await watch.become()
            await observer.hears(Gone(node=mover.node))  # from now on it hears no goodbye
        await watch.become(LOOPBACK)
        await one.hears(Gone(node=theirs.node))


async def test_a_cable_that_comes_and_goes_does_not_keep_the_agent_silent() -> None:
    opened: list[AsyncZeroconf] = []

    def open_one(**options: Any) -> AsyncZeroconf:  # noqa: ANN401 - zeroconf's own
        opened.append(AsyncZeroconf(**options))
        return opened[-1]

    settings = replace(SETTINGS, move_again_s=1e6, open_zeroconf=open_one)
    watch, flaps, theirs = (
        MovableAddresses(LOOPBACK),
        replace(LOOPBACK, speed_mbit_s=10),
        advertisement(28),
    )
    async with running(advertisement(27), 27, watch=watch, settings=settings) as one:
        for now in ((flaps,), (replace(flaps, interface="other9"),), (LOOPBACK,)):
            await watch.become(*now)
        async with running(theirs, 28):
            await one.hears(found(theirs))
    assert len(opened) == 1


async def test_with_our_tag_and_without_our_key_one_is_counted_and_not_reported() -> None:
    impostor, honest = advertisement(24), advertisement(25)
    lacks_key, counters = AdvertisementKey(MESH.tag, b"guessed"), DiscoveryCounters()
    async with running(advertisement(26), 26, counters=counters) as one:
        async with running(impostor, 24, mesh=lacks_key), running(honest, 25):
            await one.hears(found(honest))
            with trio.fail_after(TIMEOUT_S):
                while not counters.forged:  # noqa: ASYNC110 - counted in another thread
                    await trio.sleep(0.01)
        assert await one.next_event() == Gone(node=honest.node)


async def test_of_other_meshes_as_many_are_reported_as_can_be_shown() -> None:
    settings = replace(SETTINGS, max_found=1)
    counters = DiscoveryCounters()
    others = [advertisement(number, tag=OTHER_MESH.tag) for number in (18, 19)]
    async with running(advertisement(17), 17, counters=counters, settings=settings) as one:
        async with running(others[0], 18, mesh=OTHER_MESH):
            await one.hears(found(others[0]))
            async with running(others[1], 19, mesh=OTHER_MESH):
                with trio.fail_after(TIMEOUT_S):
                    while not counters.not_shown:  # noqa: ASYNC110 - as above
                        await trio.sleep(0.01)
        assert await one.next_event() == Gone(node=others[0].node)


async def test_of_too_many_of_our_mesh_the_last_are_kept() -> None:
    """A member may announce what does not exist; who comes after it is found all the same."""
    settings = replace(SETTINGS, max_found=1, new_found_s=0.0)
    first, second = advertisement(28), advertisement(29)
    async with running(advertisement(27), 27, settings=settings) as one, running(first, 28):
        await one.hears(found(first))
        async with running(second, 29):
            await one.hears(found(second))
        await one.hears(Gone(node=second.node))


async def test_a_member_can_announce_only_so_many_machines_a_minute() -> None:
    settings = replace(SETTINGS, max_found=1)
    first, second = advertisement(35), advertisement(36)
    async with running(advertisement(37), 37, settings=settings) as one:
        async with running(first, 35):
            await one.hears(found(first))
            async with running(second, 36) as two:
                await two.next_event()
        assert await one.next_event() == Gone(node=first.node)


async def test_what_zeroconf_keeps_is_thrown_away_but_for_the_agents_that_are_known() -> None:
    settings = replace(SETTINGS, max_cached_names=0, look_s=0.05)
    counters = DiscoveryCounters()
    theirs, late = advertisement(31), advertisement(32)
    async with running(advertisement(30), 30, counters=counters, settings=settings) as one:
        async with running(theirs, 31):
            await one.hears(found(theirs))
            with trio.fail_after(TIMEOUT_S):
                while counters.purges < 3:  # noqa: ASYNC110 - as above
                    await trio.sleep(0.01)
            async with running(late, 32):
                await one.hears(found(late))
            await one.hears(Gone(node=late.node))
        await one.hears(Gone(node=theirs.node))


async def test_an_advertisement_is_renewed_with_the_minute() -> None:
    minutes = iter(range(5, 10_000))
    settings = replace(SETTINGS, minute=lambda: next(minutes), renew_s=0.0, browse_again_s=0.1)
    seen: set[int] = set()
    async with (
        running(advertisement(33), 33) as one,
        running(advertisement(34), 34, settings=settings),
    ):
        while len(seen) < 2:
            event = await one.next_event()
            assert isinstance(event, AgentFound)
            seen.add(event.advertisement.minute)


async def test_browsing_again_reports_nothing_twice(faults: Faults) -> None:
    settings = replace(SETTINGS, browse_again_s=0.02)
    first, second, third = advertisement(20), advertisement(21), advertisement(22)
    async with (
        running(first, 20, settings=settings) as one,
        running(second, 21, settings=settings),
    ):
        await one.hears(found(second))
        browsed_again, token = trio.Event(), trio.lowlevel.current_trio_token()
        browsers: list[AsyncServiceBrowser] = []

        def browse(*args: Any, **options: Any) -> AsyncServiceBrowser:  # noqa: ANN401 - handed on
            browsers.append(AsyncServiceBrowser(*args, **options))
            if len(browsers) == 10:  # both agents' browsers
                token.run_sync_soon(browsed_again.set)
            return browsers[-1]

        faults.instead(discovery, "AsyncServiceBrowser", browse)
        with trio.fail_after(TIMEOUT_S):
            await browsed_again.wait()
        async with running(third, 22):
            assert await one.next_event() == found(third)


async def test_a_slow_reader_gets_the_latest_event_of_each_agent() -> None:
    endpoint = discovery._LatestEvents()  # noqa: SLF001 - what bounds its memory
    for number in range(1000):
        endpoint.put("x", Deaf(reason=str(number)))
    send, receive = trio.open_memory_channel[Discovered](0)
    async with send, receive, trio.open_nursery() as nursery:
        nursery.start_soon(endpoint.deliver, send)
        assert await receive.receive() == Deaf(reason="999")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.WouldBlock):
            receive.receive_nowait()
        nursery.cancel_scope.cancel()


async def test_v6_is_spoken_only_at_interfaces_without_v4() -> None:
    number, name = socket.if_nameindex()[0]
    v6 = LocalAddress(interface=name, host="fe80::1", prefix_bits=64, kind="wired")
    same = LocalAddress(interface=name, host="10.1.2.3", prefix_bits=24, kind="wired")
    other = replace(same, interface="other9")
    opened: list[object] = []

    def open_on_loopback(*, interfaces: object) -> AsyncZeroconf:
        opened.append(interfaces)
        return AsyncZeroconf(interfaces=["127.0.0.1"])

    listener = replace(advertisement(1), port=0)
    settings = replace(SETTINGS, open_zeroconf=open_on_loopback)
    for addresses in ((v6, same), (v6, other), (v6,)):
        watch = AddressWatch(read=partial(tuple, addresses))
        async with running(listener, 1, watch=watch, settings=settings):
            pass
    assert opened == [["10.1.2.3"], ["10.1.2.3"], [number], [number]]


async def test_names_on_the_network_are_those_of_the_node() -> None:
    own, opened = advertisement(1), list[AsyncZeroconf]()

    def open_one(**options: Any) -> AsyncZeroconf:  # noqa: ANN401 - zeroconf's own
        opened.append(AsyncZeroconf(**options))
        return opened[-1]

    async with running(own, 1, settings=replace(SETTINGS, open_zeroconf=open_one)):
        (service,) = opened[0].zeroconf.registry.async_get_service_infos()
    assert (service.name, service.server) == (instance_name(own.node), host_name(own.node))
    assert service.type == adverts.SERVICE_TYPE


async def test_the_number_on_the_nameplate_is_announced_and_taken_back() -> None:
    nameplate = discovery.Nameplate()
    ada, nobody = advertisement(91), replace(advertisement(92), port=0)
    anybody = AdvertisementKey(b"", b"")
    async with running(ada, 91, nameplate=nameplate):
        async with running(nobody, 92, mesh=anybody) as here:
            await here.hears(found(ada))
            nameplate.show(7)
            await here.hears(found(replace(ada, invitation=7)))
        nameplate.show(0)
        async with running(nobody, 92, mesh=anybody) as here:  # one that comes later
            await here.hears(found(ada))


async def test_a_number_that_is_shown_while_the_agent_is_registered_is_announced() -> None:
    nameplate = discovery.Nameplate()
    ada, nobody = advertisement(98), replace(advertisement(99), port=0)

    async def show() -> None:
        nameplate.show(7)
        await trio.testing.wait_all_tasks_blocked()

    class Shows(AsyncZeroconf):
        async def async_register_service(self, *args: Any, **named: Any) -> Any:  # noqa: ANN401 - as above
            register: Any = super().async_register_service
            sent: object = await register(*args, **named)
            trio.from_thread.run(show)
            await asyncio.sleep(0)  # the loop hears of it
            return sent

    settings = replace(SETTINGS, open_zeroconf=Shows)
    async with (
        running(ada, 98, nameplate=nameplate, settings=settings),
        running(nobody, 99, mesh=AdvertisementKey(b"", b"")) as here,
    ):
        await here.hears(found(replace(ada, invitation=7)))


async def test_a_number_is_announced_again_after_answers_that_were_put_off() -> None:
    nameplate = discovery.Nameplate()
    send, updated = trio.open_memory_channel[None](99)

    class UpdateTeller(AsyncZeroconf):
        async def async_update_service(self, info: ServiceInfo) -> Any:  # noqa: ANN401 - as above
            trio.from_thread.run_sync(send.send_nowait, None)
            update: Any = super().async_update_service
            return await update(info)

    settings = replace(SETTINGS, look_s=0.01, open_zeroconf=UpdateTeller)
    async with running(advertisement(100), 100, nameplate=nameplate, settings=settings):
        for number in (7, 0):
            nameplate.show(number)
            with trio.fail_after(TIMEOUT_S):
                for _ in range(3):
                    await updated.receive()


async def test_of_records_that_come_within_a_second_the_last_counts(faults: Faults) -> None:
    """As when zeroconf brings an answer that it had put off between two announcements."""
    faults.limit(packet_filter, "REPEATS_PER_S", 99.0)  # each comes at several sockets
    ada = advertisement(101)
    sent = list[AsyncZeroconf]()

    def announce() -> None:
        for invitation, ttl in ((7, 4500), (0, 4500), (7, 4400)):  # zeroconf drops equal packets
            of_now = replace(ada, invitation=invitation)
            info = ServiceInfo(
                adverts.SERVICE_TYPE,
                instance_name(ada.node),
                port=ada.port,
                properties=encode(of_now, key(101), MESH),
                server=host_name(ada.node),
                parsed_addresses=["127.0.0.1"],
            )
            zeroconf = sent[0].zeroconf
            zeroconf.async_send(zeroconf.generate_service_broadcast(info, ttl))

    class Says(AsyncZeroconf):
        def __init__(self, **options: Any) -> None:  # noqa: ANN401 - as above
            super().__init__(**options)
            sent.append(self)

    own, settings = replace(advertisement(102), port=0), replace(SETTINGS, open_zeroconf=Says)
    listening = advertisement(103)
    async with (
        running(own, 102, settings=settings) as speaker,
        running(listening, 103, settings=replace(SETTINGS, look_s=0.01)) as here,
    ):
        await speaker.hears(found(listening))  # so its zeroconf runs
        loop = sent[0].zeroconf.loop
        assert loop is not None
        loop.call_soon_threadsafe(announce)
        await here.hears(found(replace(ada, invitation=7)))


async def test_with_port_0_it_only_listens() -> None:
    ada, bob, nobody = advertisement(93), advertisement(94), replace(advertisement(95), port=0)
    other = AdvertisementKey(b"", b"")
    async with running(ada, 93) as there, running(nobody, 95, mesh=other) as here:
        await here.hears(found(ada))
        async with running(bob, 94):
            assert await there.next_event() == found(bob)
