"""Every way to another machine is tried, as `pmesh ping` asks."""

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh import peers
from pmesh.agent.mesh.links import Link
from pmesh.agent.mesh.ping import TRY_S
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.links.paths import RELAYED, PathKey, Way
from pmesh.core.wire.control import AskPing, Pinged, WayTried
from pmesh.core.wire.session import Refused
from pmesh.errors import PeerUnreachable
from tests.agent.mesh.paths import link_to, part, path_to
from tests.worlds.faults import Faults
from tests.worlds.trainer import TrainerClient, until
from tests.worlds.village import Machine, village


async def ping(machine: Machine, name: str) -> tuple[list[WayTried], Pinged | Refused]:
    program = await TrainerClient.open(machine.settings.home)
    reply = await program.ask(AskPing(name))
    ways: list[WayTried] = []
    while isinstance(reply, WayTried):
        ways.append(reply)
        reply = await program.receive()
    await program.die()
    assert isinstance(reply, (Pinged, Refused))
    return ways, reply


CABLE = LocalAddress(interface="en5", host="10.0.0.1", prefix_bits=24, kind="wired")


def offer_a_way(other: Machine, monkeypatch: pytest.MonkeyPatch) -> Way:
    """A way that is no path yet; only tests that replace `dial_way` let it lead anywhere."""
    way = Way(PathKey("en5", "en0"), CABLE, other.address)
    monkeypatch.setattr(Link, "ways", lambda *_: (way,))
    return way


async def test_a_path_that_is_there_is_asked_for_its_round_trip(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        for machine, other in ((one, two), (two, one)):
            (way,), pinged = await ping(machine, other.settings.name)
            assert way.rtt_ms is not None
            assert (way.kind, way.why_not) == ("loopback", "")
            assert way.address.startswith("127.0.0.1:")
            used = Pinged(interface=way.interface, remote=way.remote, why="no other way answers")
            assert pinged == used
        assert len(link_to(one, two).paths) == 1


async def test_a_way_that_answers_stays_as_a_path(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        way, link = offer_a_way(two, monkeypatch), link_to(one, two)
        (live,) = link.paths.values()
        live.key, live.speed_mbit_s = way.key, 1000
        link.paths.clear()

        async def dial_way(asked: Way) -> None:
            await trio.lowlevel.checkpoint()
            link.paths[asked.key] = live

        faults.instead(one.agent.peers, "dial_way", dial_way)
        (new,), _ = await ping(one, "mac-1")
        assert new.rtt_ms is not None
        assert (new.interface, new.remote, new.address) == ("en5", "en0", str(two.address))
        assert new.speed_mbit_s == 1000


async def test_a_way_that_can_not_be_dialled_says_why(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        offer_a_way(two, monkeypatch)

        async def refuse(_: Way) -> None:
            await trio.lowlevel.checkpoint()
            raise PeerUnreachable("10.0.0.2:1 refuses connections")

        async def leave_elsewhere(_: Way) -> None:
            await trio.lowlevel.checkpoint()

        async def vanish(_: Way) -> None:
            await trio.sleep_forever()

        for dial, why in (
            (refuse, "10.0.0.2:1 refuses connections"),
            (leave_elsewhere, "the connection was not kept, or left by another interface"),
            (vanish, f"no answer in {TRY_S:g} s"),
        ):
            faults.instead(one.agent.peers, "dial_way", dial)
            ways, pinged = await ping(one, "mac-1")
            (way,) = [tried for tried in ways if tried.interface == "en5"]
            assert (way.kind, way.rtt_ms, way.why_not) == ("wired", None, why)
            assert isinstance(pinged, Pinged)


async def test_a_link_local_way_to_an_end_that_has_not_answered_is_shown(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        (key,) = link_to(one, two).paths
        local = replace(CABLE, host="fe80::1", prefix_bits=64)

        faults.hang(one.agent.peers, "dial_way")
        for ends in ((key.interface, "en0"), ("en5", key.remote)):
            way = Way(PathKey(*ends), local, two.address)
            faults.instead(Link, "ways", lambda *_, way=way: (way,))
            tried, _ = await ping(one, "mac-1")
            assert [t.rtt_ms is None for t in tried] == [False, True]


async def test_an_interface_that_leads_nowhere_names_its_networks(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, _ = here.machines
        watch = one.agent.watch  # as if a cable was there
        watch.current = (*watch.current, CABLE, replace(CABLE, host="fe80::1", prefix_bits=64))
        ways, _ = await ping(one, "mac-1")
        assert [(way.interface, way.kind, way.why_not) for way in ways if not way.remote] == [
            ("en5", "wired", "mac-1 has no address in 10.0.0.0/24, fe80::/64")
        ]


async def test_a_name_that_nobody_has_is_refused_with_those_that_there_are(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        for name in ("mac-9", "mac-0"):  # nobody; the machine itself
            ways, refused = await ping(one, name)
            assert not ways
            assert isinstance(refused, Refused)
            text = f"no other machine is called {name!r}; there are mac-1"
            assert (refused.verdict.error, refused.verdict.message) == ("UsageError", text)
        await two.stop()
        await until(lambda: one.names == ["mac-0"])
        _, refused = await ping(one, "mac-1")
        assert isinstance(refused, Refused)
        assert refused.verdict.message.endswith("; no other machine is here")


async def test_a_machine_without_a_link_is_refused(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, _ = here.machines
        one.agent.peers.links.clear()
        _, refused = await ping(one, "mac-1")
        assert isinstance(refused, Refused)
        assert refused.verdict.error == "PeerUnreachable"


async def test_a_link_between_two_paths_uses_none(clock: MockClock, faults: Faults) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        faults.hang(peers, "dial_any")  # as V6 does then
        one.agent.peers.end_path(link_to(one, two), path_to(one, two), "it is silent")
        _, pinged = await ping(one, "mac-1")
        assert pinged == Pinged()


async def test_a_relayed_path_has_no_address(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        _, one, other = here.machines
        await part(one, other)
        for machine, name in ((one, other.settings.name), (other, one.settings.name)):
            ways, _ = await ping(machine, name)
            [relayed] = [way for way in ways if way.kind == RELAYED]
            assert (relayed.address, relayed.mbit_s) == ("", 0)
            assert relayed.rtt_ms is not None
