"""The paths of a link between whole agents: which is used, and what is told of it."""

import socket
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import NoReturn

import pytest
import trio
from msgspec import structs
from structlog.testing import capture_logs
from trio.testing import MockClock

from pmesh.agent.events import Event
from pmesh.agent.mesh import peers, reach
from pmesh.agent.mesh.links import LivePath, live_path
from pmesh.agent.mesh.path_keeper import PathKeeper
from pmesh.agent.mesh.peers import REDIAL_S
from pmesh.agent.mesh.probing import PathBandwidth
from pmesh.core.links.addresses import BoundAddress, LocalAddress
from pmesh.core.links.paths import PathKey, Way
from pmesh.core.wire.link import Address, PeerInterface
from pmesh.errors import PeerUnreachable
from pmesh.net.links.interfaces import AddressWatch
from pmesh.net.links.path import Path
from tests.agent.mesh.paths import link_to, new_link, path_set, path_to
from tests.worlds.faults import Faults
from tests.worlds.trainer import until
from tests.worlds.village import Machine, village
from tests.worlds.village_ops import events_of


@pytest.fixture
def many_interfaces(faults: Faults) -> None:
    """Each connection has two interfaces of its own."""
    numbers: defaultdict[str, int] = defaultdict(int)

    def numbered(path: Path, *args: object, **facts: object) -> LivePath:
        live: LivePath = live_path(path, *args, **facts)  # type: ignore[arg-type]
        name = f"eth{numbers[path.ours.name]}"
        numbers[path.ours.name] += 1
        live.key = PathKey(name, name)
        return live

    faults.pretend(peers, "live_path", numbered)


def events_of_kind(machine: Machine, kind: str) -> list[Event]:
    return [event for event in events_of(machine) if event.kind == kind]


async def add_path(machine: Machine, other: Machine) -> LivePath:
    link = link_to(machine, other)
    before = set(link.paths)
    loopback = socket.if_indextoname(1)
    own = LocalAddress(interface=loopback, host="127.0.0.1", prefix_bits=8, kind="wired")
    await machine.agent.peers.dial_way(Way(PathKey("eth1", "eth1"), own, other.address))
    await until(lambda: len(link_to(other, machine).paths) == len(link.paths))
    (new,) = set(link.paths) - before
    return link.paths[new]


@pytest.mark.usefixtures("many_interfaces")
async def test_a_switch_to_another_path_is_told_once_the_peer_was_heard_there_with_how_long_it_took(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await trio.sleep(3)
        old = link_to(one, two).current
        assert old is not None
        new = await add_path(one, two)
        await trio.sleep(3)
        heard, before = old.last_heard, trio.current_time()
        await old.path.aclose()
        for machine in (one, two):
            await until(lambda m=machine: bool(events_of_kind(m, "path changed")))  # type: ignore[misc]
        (event,) = events_of_kind(one, "path changed")
        assert event.names == ("mac-1",)
        assert event.duration_s is not None
        assert before - heard <= event.duration_s <= trio.current_time() - heard
        assert event.text.startswith(f"mac-1 is reached over {new} after {event.duration_s:.2f} s")
        assert link_to(one, two).current is new
        assert event.text in one.lines


@pytest.mark.usefixtures("many_interfaces")
async def test_of_a_path_that_is_not_used_only_the_log_tells(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await trio.sleep(3)
        with capture_logs() as log:
            new = await add_path(one, two)
            await new.path.aclose()
            await until(lambda: len(link_to(two, one).paths) == 1)
        assert {line["event"] for line in log} == {"a path is there", "a path has ended"}
        assert not events_of_kind(one, "path changed")
        assert not events_of_kind(two, "path changed")


async def test_who_has_lost_its_last_path_is_dialled_at_all_its_addresses(
    clock: MockClock, faults: Faults
) -> None:
    async def dial_in_vain(_: object) -> None:
        await trio.sleep(REDIAL_S / 2)
        raise PeerUnreachable("a firewall")

    async with village(clock, 2) as here:
        one, two = here.machines
        await trio.sleep(1)  # a path that ends sooner has been refused
        link, lost = link_to(two, one), path_to(two, one)
        faults.instead(one.agent.peers, "_dial", dial_in_vain)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # where the pulled cable led
            lost.dialled = Address("127.0.0.1", silent.getsockname()[1]), None
            two.agent.peers.end_path(link, lost, "it is silent")
            await until(lambda: path_set(two, one) not in (set(), {lost}))
        assert link_to(two, one) is link
        assert not any("is gone" in line for line in one.lines + two.lines)


async def test_a_way_that_does_not_answer_holds_up_no_other_and_is_given_up_with_its_interface(
    clock: MockClock,
) -> None:
    began: list[tuple[str, float]] = []
    watch = AddressWatch(read=tuple)

    async def dial(way: Way) -> None:
        began.append((way.key.interface, round(trio.current_time() - start, 2)))
        if way.key.interface == "eth0":
            await trio.sleep_forever()
        raise PeerUnreachable("it refuses connections")

    async with village(clock, 2) as here, trio.open_nursery() as nursery:
        one, two = here.machines
        link = new_link(one, two)
        hosts = "10.0.0.2", "10.0.1.2"
        theirs = tuple(PeerInterface(host, "wired", 1000, (host,)) for host in hosts)
        link.update(structs.replace(link.peer, interfaces=theirs))
        both = watch.current = tuple(
            LocalAddress(interface=f"eth{n}", host=f"10.0.{n}.1", prefix_bits=24, kind="wired")
            for n in range(2)
        )
        keeper = PathKeeper(
            watch, is_quiet=lambda: True, dial=dial, lose=lambda *_: None, improved=lambda *_: None
        )
        start = trio.current_time()
        nursery.start_soon(partial(keeper.keep, link, second=False))
        await trio.sleep(3.5)
        eth1 = [("eth1", 0), ("eth1", 1), ("eth1", 3)]
        assert sorted(began) == [("eth0", 0), *eth1]
        for watch.current in (both[1:], both):
            link.update(link.peer)  # so that it looks
            await trio.sleep(0.8)
        assert sorted(began) == [("eth0", 0), ("eth0", 4.3), *eth1, ("eth1", 3.5), ("eth1", 4.3)]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("lasts_s", "dialled_s"),
    [
        (20.0, [20.0 * n for n in range(8)]),  # not for what was long ago
        (0.5, [0.0, 1.0, 3.0, 7.0, 15.0]),
    ],
)
async def test_a_path_that_does_not_last_is_dialled_after_growing_pauses_and_another_one_at_once(
    clock: MockClock, lasts_s: float, dialled_s: list[float]
) -> None:
    began: list[float] = []
    lost = trio.Event()

    async def dial(way: Way) -> None:
        began.append(round(trio.current_time() - start, 2))
        if len(began) == len(dialled_s):
            lost.set()
            await trio.sleep_forever()
        live = replace(path_to(one, two), key=way.key, since=trio.current_time())
        link.add(live)
        nursery.start_soon(lose, live)

    async def lose(live: LivePath) -> None:
        await trio.sleep(lasts_s)
        link.remove(live)

    async with village(clock, 2) as here, trio.open_nursery() as nursery:
        one, two = here.machines
        link, watch = new_link(one, two), AddressWatch(read=tuple)
        theirs = PeerInterface("eth1", "wired", 1000, ("10.0.1.2",))
        link.update(structs.replace(link.peer, interfaces=(theirs,)))
        watch.current = (
            LocalAddress(interface="eth1", host="10.0.1.1", prefix_bits=24, kind="wired"),
        )
        keeper = PathKeeper(
            watch, is_quiet=lambda: True, dial=dial, lose=lambda *_: None, improved=lambda *_: None
        )
        start = trio.current_time()
        nursery.start_soon(partial(keeper.keep, link, second=False))
        await lost.wait()
        assert began == dialled_s
        nursery.cancel_scope.cancel()


async def test_a_new_connection_goes_over_the_best_path_whoever_dialled_it(
    clock: MockClock, faults: Faults
) -> None:
    asked: list[tuple[BoundAddress, ...]] = []

    async def dial_in_vain(addresses: tuple[BoundAddress, ...]) -> NoReturn:
        asked.append(addresses)
        raise PeerUnreachable("not now")

    async with village(clock, 2) as here:
        one, two = here.machines
        link, accepted = link_to(one, two), path_to(one, two)
        await trio.sleep(1)  # by then it is steady
        assert accepted.dialled is None
        slow = replace(
            accepted,
            key=PathKey("wlan0", "wlan0"),
            kind="wifi",
            dialled=(Address("10.0.0.1", 1), None),
        )
        link.paths[slow.key] = slow
        faults.instead(reach, "dial_any", dial_in_vain)
        with pytest.raises(PeerUnreachable, match="not now"):
            await one.agent.peers.reach.dial_member(link.member)
        assert asked == [((Address("127.0.0.1", two.port), None), (Address("10.0.0.1", 1), None))]
        assert not one.agent.peers.reach.we_dialled(link.member)
        del link.paths[slow.key]


async def test_lanes_leave_a_path_of_a_worse_kind_when_a_better_one_is_taken(
    clock: MockClock, faults: Faults
) -> None:
    left: list[set[str]] = []
    async with village(clock, 2) as here:
        one, two = here.machines
        link, cable = link_to(one, two), path_to(one, two)

        def path_failed(ours: frozenset[str], _: frozenset[str], *, outranked: bool) -> None:
            assert outranked
            left.append(set(ours))

        faults.instead(one.agent.peers, "_path_failed", path_failed)
        for kind, host in (("wifi", "10.0.0.1"), (cable.kind, "10.0.1.1")):
            key, hosts = PathKey(host, host), (frozenset({host}), frozenset({host}))
            link.paths[key] = replace(cable, key=key, kind=kind, hosts=hosts)
        one.agent.peers.improved(link, "it is better")
        assert left == [{"10.0.0.1"}]
        link.paths = {cable.key: cable}


@pytest.mark.usefixtures("many_interfaces")
async def test_a_path_that_carries_far_less_than_it_claims_is_left_for_one_that_carries_more(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await trio.sleep(3)
        link = link_to(one, two)
        old, new = link.current, await add_path(one, two)
        assert old is not None
        for live, carried_mbit_s in ((old, 94), (new, 180)):
            live.speed_mbit_s = 1000
            live.bandwidth.note(carried_mbit_s, "data")
        await trio.sleep(3)
        assert link.current is old
        new.bandwidth = PathBandwidth(new.path.send, new.ask)
        new.bandwidth.note(190, "probe")
        await until(lambda: link.current is new)
        assert link.carriers()[0] is new
        theirs = link_to(two, one)  # it has measured nothing, but was told
        for path in theirs.paths.values():
            path.speed_mbit_s = 1000
        await until(lambda: theirs.current is theirs.paths[new.key])
        await until(lambda: bool(events_of_kind(one, "path changed")))
        old.bandwidth.note(94 / 1.3, "probe")
        await trio.sleep(3)
        assert link.current is new
