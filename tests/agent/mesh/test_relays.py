"""Agents of which two can't reach each other, but both reach a third."""

import itertools

import msgspec
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh import probing
from pmesh.agent.mesh.links import LivePath
from pmesh.agent.mesh.relays import LINGER_S, MAX_OPENING, RELAY_AFTER_S
from pmesh.core.links.health import LONGEST_SILENCE_S
from pmesh.core.links.paths import LONGEST_RELAYED_S, RELAYED
from pmesh.core.links.relaying import MAX_RELAYED, WINDOW_BYTES, Onward
from pmesh.core.topology.graph import measured_graph
from pmesh.core.wire.relays import MAX_RELAYED_BYTES, Relay
from pmesh.core.wire.views import MeasuredEdge
from pmesh.ids import Incarnation, Member, NodeId
from tests.agent.mesh.paths import build_wall, link_to, part, reached_over
from tests.worlds.faults import Faults
from tests.worlds.trainer import until
from tests.worlds.village import Machine, village

FAST = MeasuredEdge(100, 10_000)


def swallow(live: LivePath) -> None:
    """From now on all packets vanish that are sent on the path."""
    live.path.send_packet = lambda packet: None  # type: ignore[method-assign]  # noqa: ARG005


async def test_two_that_lose_their_link_come_together_over_a_third(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        _, one, other = here.machines
        await part(one, other)
        await here.settle(*here.machines)
        assert reached_over(one, other) == RELAYED
        assert one.agent.peers.reach.probed_paths_to(link_to(one, other).member) == ()


async def test_a_link_whose_only_path_falls_silent_goes_on_over_a_third(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        _, one, other = here.machines
        epoch = one.agent.membership.view.epoch
        await trio.sleep(1)
        build_wall(one, other)
        for machine, far in ((one, other), (other, one)):
            for live in link_to(machine, far).paths.values():
                swallow(live)
        await until(lambda: reached_over(one, other) == reached_over(other, one) == RELAYED)
        await trio.sleep(2 * LONGEST_SILENCE_S)
        assert {machine.agent.membership.view.epoch for machine in here.machines} == {epoch}
        assert any("mac-2 is reached over mac-0 (relayed)" in line for line in one.lines)


async def test_a_direct_path_takes_over_and_the_relayed_one_ends(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        between, one, other = here.machines
        await trio.sleep(1)
        break_down = build_wall(one, other)
        (live,) = link_to(one, other).paths.values()
        await live.path.aclose()
        await until(lambda: reached_over(one, other) == reached_over(other, one) == RELAYED)
        link = link_to(one, other)
        assert len(between.agent.peers.relays.forwarding) == 1
        break_down()
        await until(lambda: RELAYED not in {reached_over(one, other), reached_over(other, one)})
        await trio.sleep(LINGER_S + LONGEST_RELAYED_S)
        assert link_to(one, other) is link
        assert link.is_direct
        assert len(link.paths) == 1
        assert len(between.agent.peers.relays.forwarding) == 0


async def test_who_leaves_says_so_over_a_relayed_path_too(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        _, one, other = here.machines
        await part(one, other)
        await here.settle(*here.machines)
        await one.stop()
        await until(lambda: any("mac-1 is gone: its agent was stopped" in x for x in other.lines))


async def test_when_the_one_between_is_gone_the_two_are_apart(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        between, one, other = here.machines
        await part(one, other)
        await between.kill()
        await until(lambda: len(one.names) == len(other.names) == 1)


async def test_who_sends_more_than_its_window_loses_nothing_but_that_connection(
    clock: MockClock,
) -> None:
    """What exceeds it may be from an earlier connection of that number, which another end gave."""
    async with village(clock, 3) as here:
        between, one, other = here.machines
        forwarded = list[Relay]()
        forward = between.agent.peers.relays.forwarding.forward

        def watched(sender: NodeId, message: Relay, *, reachable: bool) -> Onward | None:
            onward = forward(sender, message, reachable=reachable)
            if onward is not None and onward.message.data:
                forwarded.append(onward.message)
            return onward

        between.agent.peers.relays.forwarding.forward = watched  # type: ignore[method-assign]
        flood = Relay(other.key.node, 99, to_forward=True, data=bytes(MAX_RELAYED_BYTES))
        sender = one if one.key.node < other.key.node else other
        flood = msgspec.structs.replace(flood, far=max(one.key.node, other.key.node))
        for _ in range(5 * WINDOW_BYTES // MAX_RELAYED_BYTES):
            link_to(sender, between).send(flood)
        await trio.sleep(1)
        assert sum(len(message.data) for message in forwarded) == WINDOW_BYTES
        assert between.agent.peers.broken_links == 0
        assert len(one.names) == len(other.names) == 3


async def test_nobody_is_reached_who_is_not_whom_the_path_was_to_lead_to(clock: MockClock) -> None:
    async with village(clock, 4) as here:
        between, *others = here.machines
        one, other, decoy = sorted(others, key=lambda machine: machine.key.node)
        await trio.sleep(1)
        build_wall(one, other)

        def misdirect(sender: NodeId, message: Relay, *, reachable: bool) -> Onward:
            assert reachable
            to, source = (
                (decoy, one) if sender == one.key.node else (one, other)  # as if from the other
            )
            onward = msgspec.structs.replace(message, far=source.key.node, to_forward=False)
            return Onward(to.key.node, onward)

        between.agent.peers.relays.forwarding.forward = misdirect  # type: ignore[method-assign]
        decoy.agent.peers.relays.forwarding.forward = forward_nothing  # type: ignore[method-assign, assignment]
        (live,) = link_to(one, other).paths.values()
        await live.path.aclose()
        await trio.sleep(10 * RELAY_AFTER_S)
        assert reached_over(one, other) is None
        assert len(link_to(one, decoy).paths) == 1


def forward_nothing(_: NodeId, message: Relay, *, reachable: bool) -> None:
    assert reachable
    assert message.to_forward


async def test_the_connections_over_one_member_are_limited(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, other = here.machines
        for number in range(MAX_RELAYED + 4):
            stranger = NodeId(bytes(31) + bytes([number]))
            link_to(one, other).send(Relay(stranger, 1, data=b"\x16"))  # of a TLS handshake
        await trio.sleep(1)
        assert len(other.agent.peers.relays.streams) == MAX_RELAYED


async def test_a_peer_that_hears_many_who_do_not_exist_causes_few_connections(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, other = here.machines
        link = link_to(one, other)
        invented = [
            Member(NodeId(b"\xff" * 31 + bytes([n])), Incarnation(n + 1)) for n in range(60)
        ]
        for member in invented:
            link.introduce(member)
        heard = {member.incarnation for member in invented}
        forwarding = other.agent.peers.relays.forwarding
        faults.skip(forwarding, "forward")
        faults.instead(one.agent.membership, "hears", lambda _: heard)
        most = 0
        for _ in range(20):
            await trio.sleep(1)
            most = max(most, len(one.agent.peers.relays.streams))
        assert most == MAX_OPENING


async def test_the_ring_goes_around_two_that_are_linked_over_a_third(clock: MockClock) -> None:
    async with village(clock, 4) as here:
        _, one, *others = here.machines
        neighbour = next(other for other in others if are_neighbours(one, other))
        epoch = one.agent.membership.view.epoch
        await part(one, neighbour)
        await until(lambda: one.agent.membership.view.epoch != epoch and len(one.names) == 4)
        await here.settle(*here.machines)
        assert not are_neighbours(one, neighbour)


def are_neighbours(one: Machine, other: Machine) -> bool:
    """Whether an edge of a ring of four joins them."""
    places = [one.names.index(machine.settings.name) for machine in (one, other)]
    return (places[0] - places[1]) % 2 == 1


async def test_another_forwards_if_the_first_does_not(clock: MockClock) -> None:
    async with village(clock, 4) as here:
        first, one, other, second = here.machines
        await part(one, other)
        link, lazy = link_to(one, other), link_to(one, other).relay
        assert lazy is not None
        machine = first if first.key.node == lazy.node else second
        machine.agent.peers.relays.forwarding.forward = forward_nothing  # type: ignore[method-assign, assignment]
        await until(lambda: link.current is not None and link.current.relay not in {lazy, None})
        assert link_to(one, other) is link


@pytest.mark.parametrize("place", [0, 3])
async def test_the_one_with_the_fastest_edges_forwards(
    clock: MockClock, faults: Faults, place: int
) -> None:
    async with village(clock, 4) as here:
        _, one, other, _ = here.machines
        opens, far = sorted((one, other), key=lambda machine: machine.key.node)
        fast = here.machines[place]
        membership = opens.agent.membership
        heard = {link_to(opens, fast).member: {membership.state.me.incarnation: FAST}}
        faults.instead(membership, "edges_among", lambda members: measured_graph(members, heard))
        await part(one, other)
        relay = link_to(opens, far).relay
        assert relay is not None
        assert relay.node == fast.key.node


@pytest.mark.slow
async def test_what_is_relayed_counts_once_and_is_not_measured_by_probes(
    clock: MockClock, faults: Faults
) -> None:
    faults.limit(probing, "PROBE_EVERY_S", 30.0)
    async with village(clock, 3) as here:
        one, middle, other = here.machines
        await part(one, other)
        await here.job(*here.machines)
        await trio.sleep(probing.PROBE_EVERY_S)
        agents = [machine.agent.membership for machine in here.machines]
        measured = {
            frozenset((a.state.me, b.state.me))
            for a, b in itertools.permutations(agents, 2)
            if a.probing.settled_mbit_s(b.state.me)
        }
        assert measured == {frozenset((agents[1].state.me, agents[at].state.me)) for at in (0, 2)}
        sent_before, _ = one.agent.peers.control_bytes
        current = link_to(one, middle).current
        assert current is not None
        at_the_socket = current.path.bytes_sent
        await trio.sleep(probing.PROBE_EVERY_S)
        sent, _ = one.agent.peers.control_bytes
        assert sent - sent_before == current.path.bytes_sent - at_the_socket > 0
