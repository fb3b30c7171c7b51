"""Links between whole agents: which one stays, what its end means, who is turned away."""

import socket
from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh import links as links_module
from pmesh.agent.mesh.bans import BANNED_S, MAX_BANNED, Bans
from pmesh.core.identity.keys import NodeKey
from pmesh.core.wire.channels import Channels, Message
from pmesh.core.wire.lanes import AskResult
from pmesh.core.wire.link import Address
from pmesh.core.wire.views import AskView, Commit, TellView
from pmesh.errors import NodeKeyCopied, PeerUnreachable, PmeshError
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, OpNumber, TrainerId, short_node
from pmesh.net.links.dialer import dial
from tests.agent.mesh.paths import close_path, link_to, new_link, path_set, path_to, socket_of
from tests.worlds.builders import make_roster, make_view
from tests.worlds.control import change_received
from tests.worlds.faults import Faults
from tests.worlds.trainer import together, until
from tests.worlds.village import Machine, Village, village
from tests.worlds.village_ops import events_of, kinds_of_events

RESET = b"\x01\0\0\0\0\0\0\0"  # SO_LINGER: closing resets


class OnNoChannel(Message, frozen=True, tag=1):
    channel = 99


def deaf(message: Message) -> None:
    """A link's `send` that sends nothing."""


def refusals(machine: Machine) -> list[PmeshError]:
    return [r.error for r in machine.agent.peers.targets.refusals.values()]


def linked(*machines: Machine) -> bool:
    return all(len(m.agent.peers.links) == len(machines) - 1 for m in machines)


async def test_one_address_is_enough_to_meet_everyone(clock: MockClock) -> None:
    async with village(clock, 4) as here:
        await until(lambda: linked(*here.machines))
        assert len({tuple(m.names) for m in here.machines}) == 1


async def test_a_link_that_ends_is_dialled_again_and_nobody_is_gone(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        epoch = one.agent.membership.view.epoch
        for machine, other in ((one, two), (two, one)):
            await trio.sleep(1)  # a link that ends sooner has been refused
            link = link_to(machine, other)
            await close_path(machine, other)
            assert link_to(machine, other) is link
        await trio.sleep(3)
        assert one.agent.membership.view.epoch == epoch


async def test_a_clean_leave_is_said_and_is_no_failure(clock: MockClock, faults: Faults) -> None:
    async with village(clock, 3) as here:
        *stay, leaver = here.machines
        await until(lambda: linked(*here.machines))
        faults.forbid(leaver.agent.peers, "_dial")
        await leaver.stop()
        await here.settle(*stay)
        for machine in stay:
            gone = [line for line in machine.lines if "is gone" in line]
            assert gone == ["mac-2 is gone: its agent was stopped"]
        await trio.sleep(3)
        assert len(stay[0].names) == 2


async def test_who_is_leaving_lets_nobody_in(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await one.agent.peers.leave()
        one.agent.peers.targets.aim_at(two.address)
        await trio.sleep(1)
        assert not one.agent.peers.links
        await until(lambda: two.names == ["mac-1"])


async def test_a_restarted_agent_is_a_newcomer(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        before = two.agent.membership.view.epoch
        await two.kill()
        await two.start()
        await until(lambda: len(one.names) == len(two.names) == 2)
        await here.settle(one, two)
        assert one.agent.membership.view.epoch > before
        assert not any(isinstance(e, NodeKeyCopied) for m in (one, two) for e in refusals(m))


async def test_a_restart_that_comes_before_the_old_link_has_ended_is_no_copy(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, _ = here.machines
        await newcomer_before_the_old_link_has_ended(here)
        await until(lambda: "again" in one.names)
        assert any("mac-1 is gone: it was restarted" in line for line in one.lines)
        assert not any(isinstance(e, NodeKeyCopied) for e in refusals(one))


async def test_a_copied_home_is_named_on_both_sides(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        copy = here.new_machine("copy", peers=[one.address], key=two.key)
        await copy.start()
        await until(lambda: any(isinstance(e, NodeKeyCopied) for e in refusals(one)))
        (error,) = [e for e in refusals(one) if isinstance(e, NodeKeyCopied)]
        assert "mac-1 (127.0.0.1:" in str(error)
        assert "copy (127.0.0.1:" in str(error)
        assert sorted(one.names) == ["mac-0", "mac-1"]


async def test_a_copy_that_meets_its_original_names_both(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        copy = here.new_machine("copy", peers=[one.address], key=one.key)
        await copy.start()
        await until(
            lambda: all(any(isinstance(e, NodeKeyCopied) for e in refusals(m)) for m in (one, copy))
        )


async def test_an_agent_that_dials_itself_is_no_copy(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        one.agent.peers.targets.aim_at(one.address)
        one.agent.peers.found(one.key.node, (one.address,))
        await trio.sleep(3)
        assert not refusals(one)
        assert not one.agent.peers.links
        assert not one.agent.peers.targets.wanted


async def test_a_silent_peer_is_gone_after_two_seconds(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        began = trio.current_time()
        link_to(two, one).send = deaf  # type: ignore[method-assign]
        await until(lambda: any("mac-1 is gone: silent for 2" in line for line in one.lines))
        assert 1.9 < trio.current_time() - began < 3


async def test_a_peer_that_is_dropped_without_a_link_is_lost_all_the_same(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        one.agent.peers.links.clear()
        one.agent.peers.drop(two.key.node, "silent for 2.0 s")
        await until(lambda: one.names == ["mac-0"])


async def test_a_peer_that_breaks_the_protocol_is_dropped_and_shown(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        link_to(two, one).send(OnNoChannel())
        gone = "mac-1 is gone: it broke the protocol: "
        await until(lambda: any(line.startswith(gone) for line in one.lines))
        await here.settle(one, two)  # it may try again, and then all is well
        assert not refusals(one)


async def test_the_end_of_a_link_that_was_replaced_loses_nobody(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        old, new = link_to(one, two), new_link(one, two)
        one.agent.peers.links[two.key.node] = new
        two.agent.stopped.set()
        await until(lambda: old.leaving)
        assert link_to(one, two) is new
        assert len(one.names) == 2
        assert not any("is gone" in line for line in one.lines)


async def test_who_has_gone_before_it_is_welcomed_is_no_trouble(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        with socket.create_server(("127.0.0.1", 0)) as server:
            caller = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        caller.close()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
        with pytest.raises(PmeshError):
            await one.agent.peers.welcome(stream, b"\x16\x03\x01", lambda: None)


async def test_a_reset_before_the_handshake_ends_nobody(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        for _ in range(3):
            stream = await dial(one.address)
            await stream.send_all(b"\x16\x03\x01\x01\x00\x01")
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            stream.socket.close()
        await until(lambda: one.door.pending == 0)
        two = here.new_machine("two", peers=[one.address])
        await two.start()
        await here.settle(one, two)


async def test_nobody_listens_at_an_address_that_was_asked_for(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        with socket.create_server(("127.0.0.1", 0)) as server:
            free = server.getsockname()[1]
        one.agent.peers.targets.aim_at(Address("127.0.0.1", free))
        await until(lambda: bool(refusals(one)))
        (error,) = refusals(one)
        assert isinstance(error, PeerUnreachable)
        assert "does 'pmesh up' run there?" in str(error)


async def test_addresses_that_lead_nowhere_are_not_dialled(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        one.agent.peers.found(NodeId(b"n" * 32), (Address("0.0.0.0", 1),))  # noqa: S104
        await until(lambda: bool(refusals(one)))
        assert "no usable address among 0.0.0.0:1" in str(refusals(one)[0])


async def test_another_mesh_key_is_named_on_both_sides(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        other = here.new_machine("other", peers=[one.address], mesh=b"o" * 32)
        await other.start()
        await until(lambda: bool(refusals(one)) and bool(refusals(other)))
        for machine in (one, other):
            assert "holds another mesh key" in str(refusals(machine)[0])


async def test_who_was_dialled_with_another_mesh_key_has_one_event_however_often(
    clock: MockClock,
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        other = here.new_machine("other", peers=[one.address], mesh=b"o" * 32)
        await other.start()
        await until(lambda: one.door.refused >= 3)
        (event,) = [event for event in events_of(one) if event.kind == "key refused"]
        assert event.text.startswith("a machine at 127.0.0.1 came with another mesh key")
        assert "key refused" not in kinds_of_events(other)


async def test_names_and_messages_for_members_without_a_link(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        peers = one.agent.peers
        stranger = Member(NodeId(b"s" * 32), Incarnation(1))
        me = one.agent.membership.state.me
        old = Member(two.key.node, Incarnation(1))
        assert peers.reach.name_of(me) == "mac-0"
        assert peers.reach.name_of(stranger) == short_node(stranger.node)
        assert peers.reach.name_of(old) == "mac-1"
        assert not peers.reach.we_dialled(stranger)
        epoch = Epoch(1, stranger.node, Incarnation(1))
        ask = AskResult(JobName("x"), epoch, 1, OpNumber(0), TrainerId(0), TrainerId(1))
        link_to(one, two).send(ask)  # of a job that nobody knows
        peers.reach.send(stranger, ask)
        peers.reach.send(old, ask)  # of an incarnation that is gone
        with pytest.raises(PeerUnreachable, match="no path to"):
            await peers.reach.dial_member(stranger)
        peers.reach.complain(stranger, PeerUnreachable("no"))


async def test_the_only_path_to_a_member_is_measured_and_in_use(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        link = link_to(one, two)
        (probed,) = one.agent.peers.reach.probed_paths_to(link.member)
        assert link.current is not None
        assert probed.in_use
        assert (probed.bandwidth, probed.hosts) == (link.current.bandwidth, link.current.hosts)
        assert link.carriers() == (link.current,)


async def test_jobs_run_on_while_a_link_is_replaced(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers = await here.job(one, two)
        x = np.ones(10, np.float32)
        for _ in range(3):
            results = await together(*[partial(t.reduce, x) for t in trainers])
            assert [r[0] for r in results] == [2.0, 2.0]
            await trio.sleep(1)  # a link that ends sooner has been refused
            await close_path(one, two)


async def test_a_node_found_by_name_is_dialled_and_bytes_are_counted(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        two = here.new_machine("two")
        await two.start()
        two.agent.peers.found(NodeKey.from_seed(one.key.seed).node, (one.address,))
        await here.settle(one, two)
        sent, received = two.agent.peers.control_bytes
        assert min(sent, received) > 1000
        await close_path(one, two)
        assert two.agent.peers.control_bytes > (sent, received)


def links_in_use(machine: Machine) -> set[NodeId]:
    return set(machine.agent.peers.links)


async def test_what_no_honest_member_would_send_is_answered_by_a_ban_that_grows(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        for _ in range(3):
            liar = link_to(two, one)
            liar.send(Commit(two.agent.membership.view, ()))
            await until(lambda: not links_in_use(one))
            gone_at = trio.current_time()
            while not links_in_use(one):  # noqa: ASYNC110 - as `until`, with more patience
                await trio.sleep(0.1)
        assert trio.current_time() - gone_at > 3 * BANNED_S
        await here.settle(one, two)


def test_who_behaves_for_five_minutes_is_banned_for_as_short_a_time_as_at_first() -> None:
    bans, node = Bans(), NodeId(b"a" * 32)
    assert bans.left_s(node, now=0.0) == 0.0
    bans.add(node, now=0.0)
    bans.add(node, now=BANNED_S)
    assert bans.left_s(node, now=BANNED_S) == 2 * BANNED_S
    bans.add(node, now=1000.0)
    assert bans.left_s(node, now=1000.0) == BANNED_S
    for number in range(2 * MAX_BANNED):
        bans.add(NodeId(number.to_bytes(32, "big")), now=1000.0)
    assert bans.left_s(node, now=1000.0) == 0.0


async def test_an_error_of_ours_ends_one_link_and_the_agent_goes_on(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines

        def stumble(channels: Channels, member: Member, message: Message) -> Message:
            is_ours = channels is one.agent.channels and member == two.agent.membership.state.me
            if is_ours and isinstance(message, AskView):
                raise ZeroDivisionError("of ours")
            return message

        change_received(monkeypatch, stumble)
        link_to(two, one).send(AskView(two.agent.membership.view.epoch))
        await until(lambda: two.key.node not in links_in_use(one))
        assert three.key.node in links_in_use(one)
        assert [line for line in one.lines if "internal error" in line or "inside pmesh" in line]
        await here.settle(*here.machines)


async def test_one_machine_that_makes_up_names_leaves_room_for_others(
    clock: MockClock, faults: Faults
) -> None:
    faults.limit(links_module, "MAX_LINKS_PER_ADDRESS", 1)
    async with village(clock, 2) as here:
        one, _ = here.machines
        third = here.new_machine("mac-2", peers=[one.address])
        await third.start()
        await until(lambda: any("gets no link" in str(error) for error in refusals(one)))
        assert len(links_in_use(one)) == 1


def end_without_a_word(machine: Machine) -> None:
    """Its sockets are closed, as after a kill; `Machine.kill` may still say that it leaves."""
    machine.agent.cancel()


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
        assert path_to(small, large).dialled == (large.address, None)
        assert path_to(large, small).dialled is None
        assert not any("is gone" in line for machine in (one, two) for line in machine.lines)


async def test_a_connection_that_breaks_is_dialled_again_and_nobody_is_gone(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        before = path_to(one, two)
        socket_of(path_to(two, one).path).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        socket_of(path_to(two, one).path).close()
        await until(lambda: bool(path_set(one, two)) and before not in path_set(one, two))
        await trio.sleep(3)
        assert linked(one, two)
        assert not any("is gone" in line for machine in (one, two) for line in machine.lines)


async def test_who_refuses_the_redial_is_gone_with_both_reasons(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        port, began = one.port, trio.current_time()
        end_without_a_word(one)
        await until(lambda: two.names == ["mac-1"])
        assert trio.current_time() - began < 1
        (gone,) = [line for line in two.lines if "is gone" in line]
        assert gone == (
            "mac-0 is gone: its connection was closed, and a redial failed: "
            f"127.0.0.1:{port} refuses connections; does 'pmesh up' run there?"
        )


@pytest.mark.parametrize(("round_trip_s", "waits_s"), [(0.0, 1), (0.6, 2.4), (30.0, 5)])
async def test_who_does_not_answer_the_redial_in_time_is_gone(
    clock: MockClock, round_trip_s: float, waits_s: float
) -> None:
    """V11: in a second, or in the four round trips that it takes where these are long."""
    async with village(clock, 2) as here:
        one, two = here.machines
        kind = path_to(two, one).thresholds
        two.agent.membership.path_changed(one.key.node, kind, round_trip_s, relayed=False)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and says nothing
            path_to(two, one).dialled = Address("127.0.0.1", silent.getsockname()[1]), None
            began = trio.current_time()
            end_without_a_word(one)
            await until(lambda: "mac-0 is gone: its connection was closed" in two.lines)
            assert waits_s <= trio.current_time() - began < waits_s + 0.5


async def test_a_redial_that_meets_another_incarnation_is_a_restart(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        again = here.new_machine("again", key=one.key)
        await again.start()
        path_to(two, one).dialled = again.address, None
        end_without_a_word(one)
        await here.settle(two, again)
        assert "mac-0 is gone: it was restarted" in two.lines
        assert not refusals(two)


async def newcomer_before_the_old_link_has_ended(here: Village) -> Machine:
    """The second machine is frozen, and its next process has just met the first."""
    one, two = here.machines
    link_to(two, one).send = deaf  # type: ignore[method-assign]
    again = here.new_machine("again", peers=[one.address], key=two.key)
    await again.start()
    await until(lambda: one.key.node in again.agent.peers.links)
    assert link_to(one, two).peer.name == "mac-1"  # which may still show that it lives
    return again


async def test_an_old_link_that_ends_in_its_proof_of_life_makes_way_at_once(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        again = await newcomer_before_the_old_link_has_ended(here)
        began = trio.current_time()
        end_without_a_word(two)
        await until(lambda: any(v.peer.name == "again" for v in one.agent.peers.links.values()))
        assert trio.current_time() - began < 0.5
        await here.settle(one, again)
        assert not any(isinstance(e, NodeKeyCopied) for e in refusals(one))


async def test_an_agent_that_ends_during_a_proof_of_life_closes_the_new_link_too(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, _ = here.machines
        again = await newcomer_before_the_old_link_has_ended(here)
        path = path_to(again, one).path
        began = trio.current_time()
        end_without_a_word(one)
        await until(lambda: again.agent.peers.links.get(one.key.node) is None)
        assert trio.current_time() - began < 0.5
        with pytest.raises(trio.ClosedResourceError):
            await path.receive()


async def test_a_message_that_is_too_large_is_our_own_error_and_the_link_stays(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        link, me = link_to(one, two), one.agent.membership.state.me
        too_large = TellView(make_view(1, me, rosters=[make_roster(*[me] * 4000)]))
        link.send(too_large)
        await here.job(one, two)
        assert link_to(one, two) is link
        (event,) = [e for e in events_of(one) if e.kind == "internal error"]
        assert event.text.startswith(f"a message to {two.settings.name} ended with an error")
        assert "a TellView of" in event.text
