"""Who has a place in the mesh: whole agents list, remove and let in again."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh import register as register_module
from pmesh.agent.mesh.bans import BANNED_S
from pmesh.agent.mesh.register import (
    KEEP_S,
    MAX_KNOWN,
    MOST_NEWS,
    RETRY_S,
    Records,
    load_records,
    store_records,
)
from pmesh.core.identity.keys import NodeKey
from pmesh.core.identity.removals import sign_removal
from pmesh.core.values import Removal
from pmesh.core.wire.session import Refused
from pmesh.errors import ConfigError, KeyFileError, MachineRemoved
from pmesh.ids import Member, NodeId, node_text, short_node
from pmesh.members.agent import CHECKS, Members
from pmesh.members.wire import (
    MachineTold,
    RemoveMachine,
    TellRemovals,
)
from tests.members.machines import ask, knows_all, news, remove, removed, rows
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import until
from tests.worlds.village import Machine, village
from tests.worlds.village_ops import RAISE, machine_of


def refusals(machine: Machine) -> list[str]:
    found = machine.agent.peers.targets.refusals.values()
    return [str(each.error) for each in found if isinstance(each.error, MachineRemoved)]


async def test_the_members_are_listed_with_what_is_known_of_them(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, _, three = here.machines
        await until(knows_all(one, 2))
        await three.stop()
        await until(lambda: len(one.agent.peers.links) == 1)

        found = await rows(here, one)

        assert list(found) == ["mac-0", "mac-1", "mac-2"]
        assert [row.state for row in found.values()] == ["here", "here", "away"]
        assert [row.me for row in found.values()] == [True, False, False]
        assert found["mac-2"].id == node_text(three.key.node)
        assert len({row.version for row in found.values()}) == 1
        assert 0 < found["mac-2"].first_seen <= found["mac-2"].last_seen


async def test_members_and_removals_are_known_after_a_restart(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        await until(knows_all(one, 2))
        await remove(here, one, "mac-2")
        for machine in (two, one):
            await machine.stop()

        await one.start()

        found = await rows(here, one)
        assert {name: row.state for name, row in found.items()} == {
            "mac-0": "here",
            "mac-1": "away",
            "mac-2": "removed",
        }
        assert found["mac-2"].removed_by == "mac-0"
        assert removed(one) == {three.key.node}
        assert set(load_records(one.settings.home).known) == {two.key.node, three.key.node}


async def test_a_removal_is_on_the_disk_before_it_is_confirmed_or_this_is_said(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        await until(knows_all(one, 2))
        home = one.settings.home

        assert (await remove(here, one, "mac-1")).unwritten == ""
        assert two.key.node in load_records(home).removals

        full = KeyFileError("can't write it: No space left on device; free some space")
        with faults.fail(register_module, "store_records", full):
            reply = await remove(here, one, "mac-2")
            assert reply.unwritten == "can't write it: No space left on device"
            await trio.sleep(KEEP_S / 2)
        assert three.key.node not in load_records(home).removals
        await trio.sleep(2 * RETRY_S)
        assert three.key.node in load_records(home).removals


async def test_who_is_removed_is_out_everywhere_and_is_told_by_whom(clock: MockClock) -> None:
    async with village(clock, 4) as here:
        one, two, three, gone = here.machines
        await until(lambda: all(knows_all(machine, 3)() for machine in here.machines))
        began = trio.current_time()

        reply = await remove(here, one, "mac-3")

        assert reply == MachineTold("mac-3", told=("mac-1", "mac-2"), away=())
        await until(lambda: not gone.agent.peers.links)
        await here.settle(one, two, three)
        assert trio.current_time() - began < 2.0
        for machine in (one, two, three):
            assert gone.key.node not in machine.agent.peers.links
            assert news(machine) == ["mac-3 was removed from the mesh by mac-0"]
        assert news(gone) == ["this machine was removed from the mesh by mac-0"]

        await trio.sleep(30)  # it dials them again and again, and they it
        assert not gone.agent.peers.links
        assert gone.names == ["mac-3"]
        assert news(gone) == ["this machine was removed from the mesh by mac-0"]
        assert {text.partition(";")[0] for text in refusals(gone)} == {
            "this machine was removed from the mesh by mac-0"
        }
        assert refusals(one)[0] == (
            "mac-3 was removed by mac-0; to let it in again, type on a member: "
            f"pmesh remove --undo {short_node(gone.key.node)}"
        )


async def test_the_others_name_the_removal_as_the_reason_of_the_loss(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, _ = here.machines
        trainers = await here.job(*here.machines, terms=RAISE)
        others = [t for t in trainers if machine_of(here, t).settings.name != "mac-2"]
        await remove(here, one, "mac-2")

        for trainer in others:
            verdict = await trainer.verdict_of(trainer.barrier())
            assert verdict.error == "RankLost"
            assert verdict.message.endswith("(mac-2) is lost: it was removed by mac-0")
        for machine in (one, two):
            assert "mac-2 is gone: it was removed by mac-0" in machine.lines


async def test_who_was_away_learns_of_a_removal_when_it_is_back(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, gone = here.machines
        await until(lambda: all(knows_all(machine, 2)() for machine in here.machines))
        await two.stop()
        await until(lambda: len(one.agent.peers.links) == 1)
        reply = await remove(here, one, "mac-2")
        assert reply == MachineTold("mac-2", told=(), away=("mac-1",))
        addresses = gone.address, one.address  # of the two, it may meet the removed one first
        two.settings = replace(two.settings, peers=addresses)

        await two.start()
        began = trio.current_time()
        await until(lambda: removed(two) == {gone.key.node})
        await here.settle(one, two)

        await until(lambda: not gone.agent.peers.links)
        assert trio.current_time() - began < 2.0


async def test_a_removal_that_is_undone_lets_the_machine_in_again(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, back = here.machines
        await until(lambda: all(knows_all(machine, 2)() for machine in here.machines))
        await remove(here, one, "mac-2")
        await here.settle(one, two)
        await until(lambda: bool(news(back)))  # the others may forgive it before it has heard

        await remove(here, two, short_node(back.key.node), undo=True)

        await here.settle(*here.machines)
        assert news(one)[-1] == "mac-2 may be a member again, says mac-1"
        await until(lambda: news(back)[-1] == "mac-1 has let this machine in again")
        assert (await rows(here, one))["mac-2"].state == "here"


@pytest.mark.parametrize(
    ("name", "out", "why"),
    [
        ("mac-0", True, "this machine can't remove itself; type it on another member, or"),
        ("mac-9", True, "no machine is called 'mac-9'; there are mac-0, mac-1"),
        ("mac-1", False, "mac-1 is not removed"),
    ],
)
async def test_what_makes_no_sense_is_refused_in_one_sentence(
    clock: MockClock,
    name: str,
    out: bool,  # noqa: FBT001 - a parameter of the test
    why: str,
) -> None:
    async with village(clock, 2) as here:
        one, _ = here.machines
        refused = await ask(here, one, RemoveMachine(name, out))
        assert isinstance(refused, Refused)
        assert refused.verdict.error == "UsageError"
        assert refused.verdict.message.startswith(why)
        assert not removed(one)


async def test_a_machine_that_is_removed_already_is_not_removed_twice(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, _ = here.machines
        await remove(here, one, "mac-1")
        refused = await ask(here, one, RemoveMachine("mac-1", out=True))
        assert isinstance(refused, Refused)
        assert refused.verdict.message == "mac-1 is removed already"


# --- what a member may send


def entries(key: NodeKey, count: int) -> tuple[Removal, ...]:
    nodes = [NodeId(bytes([1 + i // 250, i % 250]) * 16) for i in range(count)]
    return tuple(sign_removal(key, node, {}, out=True) for node in nodes)


def silence(machine: Machine) -> None:
    """Let a machine say nothing of removals by itself."""
    machine.part(Members)._pass_on = lambda: None  # type: ignore[method-assign] # noqa: SLF001


def say(machine: Machine, to: Machine, removals: tuple[Removal, ...]) -> None:
    """Let a machine send what it does not know itself."""
    link = machine.agent.peers.links[to.key.node]
    link.send(TellRemovals("0.1", removals))


async def test_many_removals_are_checked_a_few_at_a_time_and_all_are_taken(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        feature = one.part(Members)
        late = faults.skip(feature, "poll")
        two.agent.register.take_untrusted(entries(one.key, 200))
        await until(lambda: bool(removed(one)))
        assert len(removed(one)) <= CHECKS

        late.end()
        await until(lambda: len(removed(one)) == 200)
        assert two.key.node in one.agent.peers.links


@pytest.mark.parametrize("at", [0, 150])
async def test_who_sends_what_nobody_has_signed_loses_its_link(clock: MockClock, at: int) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        silence(two)
        forged = list(entries(two.key, 200))
        forged[at] = msgspec.structs.replace(forged[at], out=False)

        say(two, one, tuple(forged))

        await until(lambda: two.key.node not in one.agent.peers.links)
        assert one.agent.peers.broken_links == 1
        assert forged[at].node not in one.agent.register.removals
        await trio.sleep(BANNED_S)


async def test_a_member_that_changes_its_list_all_the_time_makes_others_send_little(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        await until(lambda: all(knows_all(machine, 2)() for machine in here.machines))
        heard = 0
        channel = Members.channel

        def count(real: Real, member: Member, data: bytes) -> None:
            nonlocal heard
            if member.node == one.key.node and data[0] == channel.number:
                heard += isinstance(channel.decode_untrusted(data), TellRemovals)
            real(member, data)

        faults.around(three.agent.channels, "receive_untrusted", count)
        for removal in entries(two.key, 50):
            say(two, one, (removal,))
        await until(lambda: len(removed(three)) == 50)
        assert heard <= 3


async def test_a_member_that_removes_machines_without_end_fills_no_list_of_events(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        await until(lambda: all(knows_all(machine, 2)() for machine in here.machines))
        two.agent.register.take_untrusted(entries(three.key, 200))  # of nobody
        await until(lambda: len(removed(one)) == 200)
        assert news(one) == []

        register = one.agent.register
        for number in range(100):
            said = sign_removal(two.key, three.key.node, register.removals, out=number % 2 == 0)
            register.take_untrusted([said])
        assert news(one)[0] == "mac-2 was removed from the mesh by mac-1"
        assert news(one)[-1].startswith("members remove machines, or let them in, more often than")
        assert len(news(one)) == MOST_NEWS + 1
        await trio.sleep(60)
        register.remove(one.key, three.key.node, out=True)
        assert news(one)[-1] == "mac-2 was removed from the mesh by mac-0"


async def test_a_member_that_changes_what_it_says_all_the_time_makes_others_write_seldom(
    clock: MockClock,
    faults: Faults,
    threads_run_at_once: None,  # noqa: ARG001 - a fixture
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await until(lambda: knows_all(one, 1)() and knows_all(two, 1)())
        written: list[Path] = []

        def count(home: Path, records: Records) -> None:
            written.append(home)
            store_records(home, records)

        faults.instead(register_module, "store_records", count)
        for number in range(100):
            link = two.agent.peers.links[one.key.node]
            link.send(TellRemovals(str(number), ()))
            await trio.sleep(0.1)
        assert 0 < written.count(one.settings.home) <= 12
        await trio.sleep(2)
        kept = load_records(one.settings.home).known[two.key.node]
        assert kept.version == "99"


async def test_the_list_of_members_is_bounded_and_forgets_removed_ones_first(
    clock: MockClock,
    faults: Faults,
) -> None:
    async with village(clock, 1) as here:
        register = here.machines[0].agent.register
        now = iter(range(1000, 2000))
        faults.instead(register, "_wall_clock", lambda: float(next(now)))
        nodes = [NodeId(i.to_bytes(32, "big")) for i in range(MAX_KNOWN + 2)]
        for node in nodes[:MAX_KNOWN]:
            register.see(node, "mac", [])
        register.take_untrusted(
            [sign_removal(NodeKey.from_seed(b"r" * 32), nodes[5], {}, out=True)]
        )

        register.see(nodes[MAX_KNOWN], "mac", [])
        register.see(nodes[MAX_KNOWN + 1], "mac", [])

        assert len(register.known) == MAX_KNOWN
        assert {nodes[0], nodes[5]}.isdisjoint(register.known)


@pytest.mark.parametrize("content", [b"no JSON", b'{"members": {"mac": 7}}', b"[]"])
def test_a_file_of_members_that_no_agent_has_written_is_named_with_what_to_type(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "members"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=f"mv {file} {file}.bad"):
        load_records(tmp_path)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read"):
        load_records(tmp_path)
