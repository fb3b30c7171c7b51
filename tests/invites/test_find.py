"""How the machine that invites is found, and what is said if it is not."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.config import AgentSettings
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.keys import NodeKey
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.wire.link import Address
from pmesh.errors import PeerUnreachable, UsageError
from pmesh.ids import Incarnation
from pmesh.invites.cli import find
from pmesh.invites.cli.find import find_inviter
from pmesh.net.links.discovery import AgentFound, Deaf, Discovered, Gone
from tests.worlds.faults import Faults

KEY = NodeKey.from_seed(b"k" * 32)
SETTINGS = AgentSettings(home=Path("x"), name="mac-2")


def agent(
    number: int, *, invitation: int = 0, hosts: tuple[str, ...] = ("127.0.0.1",)
) -> Advertisement:
    return Advertisement(
        tag=b"t" * 8,
        node=NodeKey.from_seed(bytes([number]) * 32).node,
        incarnation=Incarnation(1),
        port=1,
        name=f"mac-{number}",
        hosts=hosts,
        invitation=invitation,
    )


Finds: TypeAlias = trio.MemorySendChannel[Discovered]


def found(advertisement: Advertisement) -> AgentFound:
    return AgentFound(advertisement=advertisement)


def hear(monkeypatch: pytest.MonkeyPatch, *events: Discovered) -> None:
    """Let mDNS find this, and nothing more."""

    async def discover(own: Advertisement, **options: object) -> None:
        assert own.port == 0  # so that nothing is announced
        channel = options["found"]
        assert isinstance(channel, trio.MemorySendChannel)
        for event in events:
            await channel.send(event)
        await trio.sleep_forever()

    monkeypatch.setattr(find, "discover", discover)
    monkeypatch.setattr(find, "OTHERS_S", 0.0)


@asynccontextmanager
async def listening() -> AsyncGenerator[tuple[int, list[str]]]:
    """A port on loopback, and who has connected to it."""
    callers: list[str] = []

    async def serve(stream: trio.SocketStream) -> None:
        callers.append(str(stream.socket.getpeername()[0]))
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        yield listeners[0].socket.getsockname()[1], callers
        nursery.cancel_scope.cancel()


async def finds(number: int = 7) -> trio.SocketStream:
    return await find_inviter(number, SETTINGS, KEY, look_s=0.05)


async def test_the_one_that_announces_the_number_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening() as (port, _):
        inviter = replace(agent(1, invitation=7), port=port)
        others = agent(2), agent(3, invitation=8)
        hear(monkeypatch, *map(found, (*others, inviter)))
        async with await finds() as stream:
            assert stream.socket.getpeername()[:2] == ("127.0.0.1", port)


async def test_after_an_answer_of_before_the_code_the_next_one_is_waited_for(
    autojump_clock: MockClock,  # noqa: ARG001 - it is the clock
    faults: Faults,
) -> None:
    inviter = agent(1, invitation=7, hosts=())  # so that it is not dialled

    async def discover(_: Advertisement, *, found: Finds, **options: object) -> None:
        del options
        for invitation in (7, 0):
            await found.send(AgentFound(advertisement=replace(inviter, invitation=invitation)))
        await trio.sleep(2 * find.OTHERS_S)
        await found.send(AgentFound(advertisement=inviter))

    faults.pretend(find, "discover", discover)
    with pytest.raises(PeerUnreachable, match="mac-1 runs another version"):
        await find_inviter(7, SETTINGS, KEY)


async def test_an_address_that_refuses_does_not_keep_it_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening() as (port, _):
        hosts = ("127.0.0.2", "fe80::1", "127.0.0.1")
        hear(monkeypatch, found(replace(agent(1, invitation=7, hosts=hosts), port=port)))
        async with await finds():
            pass


async def test_one_whose_only_cable_is_pulled_as_it_is_found_can_t_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hear(monkeypatch, found(agent(1, invitation=7, hosts=("fe80::1",))))
    pulled = replace(SETTINGS, interfaces=("pulled0",))
    with pytest.raises(PeerUnreachable, match="mac-1 was found, but can't be reached: the cable"):
        await find_inviter(7, pulled, KEY, look_s=0.05)


async def test_several_that_announce_the_number_are_named_and_none_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever is tried has a guess: who announces every number would have one at each code."""
    async with listening() as (port, callers):
        two = [replace(agent(each, invitation=7), port=port) for each in (2, 1)]
        hear(monkeypatch, *map(found, two))
        with pytest.raises(
            UsageError, match="several machines announce the number 7: mac-1, mac-2"
        ):
            await finds()
        assert callers == []


NOBODY: dict[str, tuple[list[Discovered], str]] = {
    "nothing": (
        [],
        r"no machine that runs pmesh was found in 0.05 s: check that both machines are",
    ),
    "no invitation": (
        [found(agent(2)), found(agent(1))],
        r"in 0.05 s; pmesh runs on mac-1, mac-2: check that the code is not older than ten minutes",
    ),
    "another number": (
        [found(agent(1, invitation=8))],
        r"with the number 7 was found; mac-1 has 8: check the code",
    ),
    "one that was withdrawn": (
        [found(agent(1, invitation=7)), found(agent(1))],
        r"pmesh runs on mac-1",
    ),
    "one that is gone": (
        [found(agent(1, invitation=7)), Gone(node=agent(1).node)],
        r"no machine that runs pmesh was found",
    ),
    "no mDNS": ([Deaf(reason="no mDNS: port 5353 is taken")], r"invites: no mDNS: port 5353 is"),
}


@pytest.mark.parametrize("heard", NOBODY)
async def test_if_none_is_found_the_error_says_what_to_check(
    heard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, why = NOBODY[heard]
    hear(monkeypatch, *events)
    with pytest.raises(PeerUnreachable, match=why) as caught:
        await finds()
    assert str(caught.value).endswith("or name its address: pmesh join CODE --peer HOST:PORT")


async def test_one_that_can_not_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hear(monkeypatch, found(agent(1, invitation=7)))
    with pytest.raises(
        PeerUnreachable, match=r"mac-1 was found, but can't be reached: 127.0.0.1:1"
    ):
        await finds()


async def test_one_of_another_version_has_no_addresses_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hear(monkeypatch, found(agent(1, invitation=7, hosts=())))
    with pytest.raises(PeerUnreachable, match="mac-1 runs another version of pmesh"):
        await finds()


def test_link_local_addresses_are_dialled_by_each_interface_after_the_others() -> None:
    local = [
        LocalAddress(interface=name, host="10.0.0.9", prefix_bits=24, kind="wired")
        for name in ("en0", "en1", "en0")
    ]
    inviter = agent(1, hosts=("fe80::1", "10.0.0.1"))
    assert find.ways_to(inviter, local) == [
        [Address("10.0.0.1", 1)],
        [Address("fe80::1%en0", 1), Address("fe80::1%en1", 1)],
    ]
