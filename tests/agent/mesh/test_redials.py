"""What the end of a link means: a redial, a restart, or a loss with its reason."""

import socket

import pytest
import trio
from trio.testing import MockClock

from pmesh.core.wire.link import Address
from pmesh.errors import NodeKeyCopied
from tests.agent.mesh.test_peers import RESET, deaf, linked, live_to, refusals
from tests.worlds.trainer import until
from tests.worlds.village import Machine, Village, village


def end_without_a_word(machine: Machine) -> None:
    """Its sockets are closed, as after a kill; `Machine.kill` may still say that it leaves."""
    machine._scope.cancel()  # noqa: SLF001


@pytest.mark.parametrize("order", [1, -1])
async def test_of_two_dials_at_the_same_instant_both_ends_keep_the_same(
    clock: MockClock, order: int
) -> None:
    async with village(clock, 0) as here:
        one, two = [here.new_machine(name) for name in ("one", "two")][::order]
        await one.start()
        await two.start()
        for machine, other in ((one, two), (two, one)):
            machine.agent.peers.found(other.key.node, (other.address,))
        await here.settle(one, two)
        await trio.sleep(3)
        small, large = sorted([one, two], key=lambda m: m.key.node)
        assert live_to(small, large).dialled == large.address
        assert live_to(large, small).dialled is None
        assert not any("is gone" in line for machine in (one, two) for line in machine.lines)


async def test_a_connection_that_breaks_is_dialled_again_and_nobody_is_gone(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        before = live_to(one, two)
        live_to(two, one).link._wire.stream.socket.setsockopt(  # type: ignore[attr-defined] # noqa: SLF001
            socket.SOL_SOCKET, socket.SO_LINGER, RESET
        )
        live_to(two, one).link._wire.stream.socket.close()  # type: ignore[attr-defined] # noqa: SLF001
        await until(lambda: one.agent.peers.links.get(two.key.node) not in {None, before})
        await trio.sleep(3)
        assert linked(one, two)
        assert not any("is gone" in line for machine in (one, two) for line in machine.lines)


async def test_who_refuses_the_redial_is_gone_with_both_reasons(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        port = one.port
        end_without_a_word(one)
        await until(lambda: two.names == ["mac-1"])
        (gone,) = [line for line in two.lines if "is gone" in line]
        assert gone == (
            "mac-0 is gone: its connection was closed, and a redial failed "
            f"(127.0.0.1:{port} refuses connections; does 'pmesh up' run there?)"
        )


async def test_who_does_not_answer_the_redial_in_a_second_is_gone(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and says nothing
            live_to(two, one).dialled = Address("127.0.0.1", silent.getsockname()[1])
            began = trio.current_time()
            end_without_a_word(one)
            await until(lambda: "mac-0 is gone: its connection was closed" in two.lines)
            assert 1 <= trio.current_time() - began < 1.5


async def test_a_redial_that_meets_another_incarnation_is_a_restart(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        again = here.new_machine("again", key=one.key)
        await again.start()
        live_to(two, one).dialled = again.address
        end_without_a_word(one)
        await here.settle(two, again)
        assert "mac-0 is gone: it was restarted" in two.lines
        assert not refusals(two)


async def newcomer_before_the_old_link_has_ended(here: Village) -> Machine:
    """The second machine is frozen, and its next process has just met the first."""
    one, two = here.machines
    live_to(two, one).link.send = deaf  # type: ignore[method-assign]
    again = here.new_machine("again", peers=[one.address], key=two.key)
    await again.start()
    await until(lambda: one.key.node in again.agent.peers.links)
    assert live_to(one, two).link.peer.name == "mac-1"  # which may still show that it lives
    return again


async def test_an_old_link_that_ends_in_its_proof_of_life_makes_way_at_once(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        again = await newcomer_before_the_old_link_has_ended(here)
        began = trio.current_time()
        end_without_a_word(two)
        await until(
            lambda: any(v.link.peer.name == "again" for v in one.agent.peers.links.values())
        )
        assert trio.current_time() - began < 0.5
        await here.settle(one, again)
        assert not any(isinstance(e, NodeKeyCopied) for e in refusals(one))


async def test_an_agent_that_ends_during_a_proof_of_life_closes_the_new_link_too(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, _ = here.machines
        again = await newcomer_before_the_old_link_has_ended(here)
        link = live_to(again, one).link
        began = trio.current_time()
        end_without_a_word(one)
        await until(lambda: again.agent.peers.links.get(one.key.node) is None)
        assert trio.current_time() - began < 0.5
        assert link._closed  # noqa: SLF001
