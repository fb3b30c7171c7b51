"""What mDNS finds, sorted; and what `pmesh status` shows of it.

What an agent has refused is counted, and told once a minute while it is much.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.mesh import findings, peers
from pmesh.agent.mesh.findings import SHOWN_S
from pmesh.agent.mesh.turned_away import FEW, describe
from pmesh.agent.schema import PeerStatus, TurnedAwayStatus
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.keys import AdvertisementKey
from pmesh.core.links.dialing import GRACE_S, LONGEST_UNPROVEN_DELAY_S
from pmesh.core.wire.link import PROTOCOL_VERSION, Address
from pmesh.errors import (
    LocalNetworkDenied,
    MeshKeyMismatch,
    NodeKeyCopied,
    PeerUnreachable,
    PmeshError,
    ProtocolVersionMismatch,
)
from pmesh.ids import Incarnation, NodeId, node_text
from pmesh.net.links.discovery import AgentFound, Deaf, Discovered, Gone, minute_of_now
from tests.worlds.faults import Faults, InjectedFault, Real
from tests.worlds.trainer import RefusedError, until
from tests.worlds.village import MESH, Machine, Village, village
from tests.worlds.village_ops import snapshot_of

NODE = NodeId(b"n" * 32)
TAG = AdvertisementKey.of(MESH).tag
WHERE = Address("192.0.2.9", 24160)


def found(
    tag: bytes,
    *,
    protocol: int = PROTOCOL_VERSION,
    where: Address = WHERE,
    minute: int | None = None,
    node: NodeId = NODE,
) -> AgentFound:
    advertisement = Advertisement(
        tag=tag,
        node=node,
        incarnation=Incarnation(1),
        port=where.port,
        name="air",
        protocol=protocol,
        hosts=(where.host,),
        minute=minute_of_now() if minute is None else minute,
    )
    return AgentFound(advertisement=advertisement)


@dataclass
class Listener:
    """A machine that listens by mDNS, alone in its village."""

    here: Village
    one: Machine
    found: trio.MemorySendChannel[Discovered]

    async def discovers(self, finding: Discovered) -> None:
        await self.found.send(finding)
        await wait_all_tasks_blocked()


@asynccontextmanager
async def listening(clock: MockClock, name: str = "mac-0") -> AsyncGenerator[Listener]:
    channels = list[trio.MemorySendChannel[Discovered]]()

    async def discover(
        _: Advertisement, *, found: trio.MemorySendChannel[Discovered], **__: object
    ) -> None:
        channels.append(found)
        await trio.sleep_forever()

    with InjectedFault(findings, "discover", discover):
        async with village(clock, 0) as here:
            one = here.new_machine(name, mdns=True)
            await one.start()
            await wait_all_tasks_blocked()
            (found,) = channels
            async with found:
                yield Listener(here, one, found)


def shown(machine: Machine) -> list[PeerStatus]:
    return list(snapshot_of(machine).peers)


async def test_another_mesh_is_shown_and_never_dialled(clock: MockClock) -> None:
    async with listening(clock) as mdns:
        one = mdns.one
        await mdns.discovers(found(b"another!"))
        (peer,) = shown(one)
        assert (peer.state, peer.name, peer.id) == ("other_mesh_key", "air", node_text(NODE))
        assert "pmesh join --replace" in (peer.reason or "")
        assert not one.agent.peers.targets.wanted
        await mdns.discovers(Gone(node=NODE))
        assert not shown(one)


async def test_who_was_killed_and_announces_nothing_is_not_shown_for_long(clock: MockClock) -> None:
    """mDNS keeps the records of who says no goodbye for over an hour."""
    async with listening(clock) as mdns:
        await mdns.discovers(found(b"another!"))
        await trio.sleep(SHOWN_S - 1)
        await mdns.discovers(found(b"another!", minute=minute_of_now() + 8))
        await trio.sleep(SHOWN_S - 1)
        assert [peer.name for peer in shown(mdns.one)] == ["air"]
        await trio.sleep(1)
        assert not shown(mdns.one)


@pytest.mark.parametrize("host", ["192.0.2.9", "fe80::9%en0"])
async def test_a_machine_with_another_key_is_shown_once_however_many_ways_it_comes(
    clock: MockClock, host: str
) -> None:
    where = Address(host, 24160)
    async with listening(clock) as mdns:
        one = mdns.one
        targets, mismatch = one.agent.peers.targets, MeshKeyMismatch("it holds another")
        targets.refuse(host, mismatch, Address(host, 51234))  # it has dialled us
        assert len(shown(one)) == 1
        targets.refuse(where, mismatch, where)  # --peer
        assert [peer.addresses for peer in shown(one)] == [(str(where),)]
        targets.refuse("192.0.2.10", mismatch, Address("192.0.2.10", 51234))
        await mdns.discovers(found(b"another!", where=Address(host.partition("%")[0], 24160)))
        await mdns.discovers(found(b"another!", where=where))
        names = [(peer.name, peer.addresses[0]) for peer in shown(one)]
        assert names == [("air", str(where)), (None, "192.0.2.10:51234")]
        assert all("pmesh join --replace --up" in (peer.reason or "") for peer in shown(one))


async def test_who_begins_a_mesh_of_its_own_beside_another_is_told_at_once_and_once(
    clock: MockClock,
) -> None:
    async with listening(clock) as mdns:
        one = mdns.one
        await mdns.discovers(found(b"another!"))
        await trio.sleep(2)
        (line,) = [line for line in one.lines if "another mesh key" in line]
        assert line == (
            "air is here, but holds another mesh key, so this machine is in a mesh of its own; to "
            "join air, type there: pmesh invite; and here: pmesh down, then pmesh join --replace "
            "--up with the code"
        )


async def test_another_mesh_with_our_own_name_is_told_apart(clock: MockClock) -> None:
    async with listening(clock, "air") as mdns:
        await mdns.discovers(found(b"another!"))
        with pytest.raises(RefusedError) as refused:
            await (await mdns.here.trainer(mdns.one)).join("digits", 2, timeout_s=1.0)
        other = f"air ({node_text(NODE)[:4]}) is not linked: it holds another mesh key"
        assert other in refused.value.verdict.message


async def test_another_version_is_shown_with_both(clock: MockClock) -> None:
    async with listening(clock) as mdns:
        one = mdns.one
        await mdns.discovers(found(TAG, protocol=99))
        (peer,) = shown(one)
        assert peer.state == "other_version"
        assert f"it speaks protocol 99, this machine {PROTOCOL_VERSION}" in (peer.reason or "")
        assert not one.agent.peers.targets.wanted


async def test_one_of_ours_is_dialled_and_shown_as_what_came_of_it(
    clock: MockClock, faults: Faults
) -> None:
    may_dial = trio.Event()

    async def dial(real: Real, addresses: object) -> object:
        await may_dial.wait()
        return await real(addresses)

    faults.around(peers, "dial_any", dial)
    async with listening(clock) as mdns:
        one = mdns.one
        await mdns.discovers(found(TAG, where=Address("127.0.0.1", 1)))
        (peer,) = shown(one)
        assert (peer.state, peer.name, peer.id) == ("connecting", None, node_text(NODE))
        may_dial.set()
        await until(lambda: bool(one.agent.peers.targets.refusals))
        (peer,) = shown(one)
        assert peer.state == "unreachable"
        assert peer.reason is not None
        assert peer.reason.startswith("PeerUnreachable: 127.0.0.1:1 refuses")
        await mdns.discovers(Gone(node=NODE))
        await mdns.discovers(Gone(node=NodeId(b"x" * 32)))  # which nobody has found
        await trio.sleep(GRACE_S + LONGEST_UNPROVEN_DELAY_S)
        assert not one.agent.peers.targets.wanted


async def test_each_refusal_is_shown_as_what_it_is(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        errors: dict[str, PmeshError] = {
            "other_mesh_key": MeshKeyMismatch("it holds another"),
            "other_version": ProtocolVersionMismatch("it speaks another"),
            "unreachable": PeerUnreachable("it is off"),
            "refused": LocalNetworkDenied("macOS says no"),
        }
        for host, error in errors.items():
            one.agent.peers.targets.refuse(host, error, Address(host, 1))
        copied = NodeKeyCopied("a home was copied")
        one.agent.peers.targets.refuse(two.key.node, copied, Address("copy", 1))
        states = {peer.addresses[0]: peer.state for peer in shown(one) if peer.reason}
        expected = {f"{host}:1": host for host in errors} | {"copy:1": "node_key_copied"}
        assert states == expected
        linked = [peer for peer in shown(one) if peer.state == "linked"]
        assert [(peer.name, peer.id) for peer in linked] == [("mac-1", node_text(two.key.node))]
        one.agent.peers.targets.refuse(two.key.node, PeerUnreachable("a late dial"), WHERE)
        assert not [peer for peer in shown(one) if peer.reason == "PeerUnreachable: a late dial"]


async def test_deafness_is_said_once_for_each_reason_until_something_is_heard(
    clock: MockClock,
) -> None:
    async with listening(clock) as mdns:
        with capture_logs() as logs:
            for reason in ("port 5353 is taken", "port 5353 is taken", "no multicast"):
                await mdns.discovers(Deaf(reason=reason))
            await mdns.discovers(found(b"another!"))
            await mdns.discovers(Deaf(reason="no multicast"))
        reasons = [log["reason"] for log in logs if log["event"] == "discovery is deaf"]
        assert reasons == ["port 5353 is taken", "no multicast", "no multicast"]


async def test_a_stranger_that_is_given_our_mesh_key_is_dialled(clock: MockClock) -> None:
    async with listening(clock) as mdns:
        one = mdns.one
        await mdns.discovers(found(b"another!"))
        await mdns.discovers(found(TAG))
        assert [peer.state for peer in shown(one)] == ["connecting"]
        assert one.agent.peers.targets.wanted == {NODE: (WHERE,)}


async def test_a_replayed_advertisement_counts_only_where_nothing_else_is_known(
    clock: MockClock,
) -> None:
    """A machine whose clock is wrong by years is found all the same."""
    async with listening(clock) as mdns:
        one = mdns.one
        tag, elsewhere = TAG, Address("192.0.2.66", 24160)
        await mdns.discovers(found(tag, where=elsewhere, minute=7))
        assert one.agent.peers.targets.wanted == {NODE: (elsewhere,)}
        await mdns.discovers(found(tag))
        await mdns.discovers(found(tag, where=elsewhere, minute=7))
        assert one.agent.peers.targets.wanted == {NODE: (WHERE,)}


@pytest.mark.parametrize(("age_min", "dials"), [(0, 3), (600, 1)], ids=["fresh", "replayed"])
async def test_a_replayed_announcement_with_another_key_is_asked_once(
    clock: MockClock, age_min: int, dials: int
) -> None:
    """It may be of a member with a wrong clock that has a later key, so it is asked at all."""
    async with listening(clock) as mdns, trio.open_nursery() as nursery:
        two = mdns.here.new_machine("mac-1", peers=[mdns.one.address])
        await two.start()
        await mdns.here.settle(mdns.one, two)
        await two.stop()
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        dialled = 0

        async def refuse(stream: trio.SocketStream) -> None:
            nonlocal dialled
            dialled += 1
            await stream.aclose()

        nursery.start_soon(partial(trio.serve_listeners, refuse, [listener]))
        finding = found(
            b"another!",
            node=two.key.node,
            where=Address("127.0.0.1", listener.socket.getsockname()[1]),
            minute=minute_of_now() - age_min,
        )
        await mdns.discovers(finding)

        await trio.sleep(5)  # asked after 0, 1 and 3 s

        assert dialled == dials
        nursery.cancel_scope.cancel()


NOTHING = TurnedAwayStatus(
    connections=0,
    forged_announcements=0,
    foreign_announcements=0,
    broken_links=0,
    programs=0,
)


def told(now: TurnedAwayStatus, **hosts: int) -> str | None:
    return describe(NOTHING, now, hosts, interval_s=60.0)


def test_little_is_not_worth_a_line() -> None:
    assert told(NOTHING) is None
    assert told(msgspec.structs.replace(NOTHING, connections=FEW - 1)) is None


def test_a_member_that_broke_the_protocol_always_is() -> None:
    text = "turned away in the last 60 s: 1 link of a member that broke the protocol"
    assert told(msgspec.structs.replace(NOTHING, broken_links=1)) == text


def test_much_is_told_with_where_most_of_it_came_from() -> None:
    now = msgspec.structs.replace(NOTHING, connections=5000, forged_announcements=700, programs=3)
    assert told(now, a=3000, b=1500, c=400, d=100) == (
        "turned away in the last 60 s: 5000 connections of strangers (3000 from a, 1500 from b, "
        "400 from c), 700 forged announcements, 3 local programs"
    )


def test_only_what_came_since_the_last_look_counts() -> None:
    before = msgspec.structs.replace(NOTHING, foreign_announcements=90)
    after = msgspec.structs.replace(NOTHING, foreign_announcements=100)
    text = describe(before, after, {}, interval_s=60.0)
    assert text == "turned away in the last 60 s: 10 announcements of other meshes"


def lines_of(machine: Machine) -> list[str]:
    return [line for line in machine.lines if line.startswith("turned away")]


async def test_an_attack_is_one_line_a_minute_and_stands_in_the_status(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        for _ in range(2):
            for _ in range(10):
                async with await trio.open_tcp_stream("127.0.0.1", one.port) as stream:
                    await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
                    with pytest.raises((trio.BrokenResourceError, AssertionError)):
                        assert await stream.receive_some(1)
            await trio.sleep(61)
        await trio.sleep(300)
        line = "turned away in the last 60 s: 10 connections of strangers (10 from 127.0.0.1)"
        assert lines_of(one) == [line, line]
        snapshot = snapshot_of(one)
        assert snapshot.turned_away.connections == 20
