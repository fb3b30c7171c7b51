"""The mesh gets a new key: all members end with one, whoever was away or cut off meanwhile."""

from dataclasses import replace
from functools import partial

import msgspec
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.config import Listen
from pmesh.agent.home import load_mesh_key
from pmesh.agent.mesh import findings, keyring
from pmesh.agent.mesh.keyring import FORMER_S, MAX_FORMER, Keyring, load_keys
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.keys import MeshKey, NodeKey, namespace_tag
from pmesh.core.identity.removals import MAX_REMOVALS, sign_removal
from pmesh.core.identity.rotations import Rotation, check_rotation_untrusted, sign_rotation
from pmesh.core.values import Removal
from pmesh.core.wire.session import Refused
from pmesh.errors import MeshKeyMismatch, PeerUnreachable, PmeshError
from pmesh.ids import MAX_COUNTER, NodeId
from pmesh.members import agent as members_agent
from pmesh.members.agent import ADOPT_EVERY_S, CHECKS, Members
from pmesh.members.wire import RemoveMachine, RotateKey, TellRotation
from pmesh.net.links.discovery import AgentFound, Discovered, minute_of_now
from tests.members.machines import (
    ask,
    key_of,
    meet,
    news,
    one_key,
    question,
    remove,
    removed,
    rotate,
)
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import together, until
from tests.worlds.village import MESH, village
from tests.worlds.village_ops import events_of, reduce_all

pytestmark = pytest.mark.usefixtures("threads_run_at_once")

STRANGER = NodeKey.from_seed(b"s" * 32)


async def test_all_that_are_here_have_the_new_key_and_jobs_go_on(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        await meet(one, two, three)
        trainers = await here.job(one, two, three)
        epoch = one.agent.membership.view.epoch

        reply = await rotate(here, one)

        assert (reply.told, reply.away, reply.removed) == (("mac-1", "mac-2"), (), ())
        await until(lambda: one_key(here.machines)() and key_of(three) != MESH)
        await reduce_all(trainers)
        assert one.agent.membership.view.epoch == epoch
        for machine in here.machines:
            assert load_mesh_key(machine.settings.home) == key_of(one)
            invited_with = machine.agent._kernel.mesh_key()  # noqa: SLF001
            assert invited_with == key_of(one)
        changed = [event.text for event in events_of(two) if event.kind == "key changed"]
        assert changed == ["mac-0 has changed the mesh key, and this machine has the new one"]

        late = here.new_machine("late", peers=[two.address], mesh=key_of(one))
        await late.start()
        await here.settle(*here.machines)
        old = here.new_machine("old", peers=[two.address])
        await old.start()
        await trio.sleep(20)
        assert old.names == ["old"]
        assert key_of(old) == MESH


async def test_who_was_away_gets_the_key_when_it_is_back_and_starts_with_the_old_one(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        one, two, away = here.machines
        await meet(one, two, away)
        await away.stop()
        await until(lambda: len(one.agent.peers.links) == 1)
        reply = await rotate(here, one)
        assert (reply.told, reply.away) == (("mac-1",), ("mac-2",))
        await until(one_key([one, two]))

        began = trio.current_time()
        await away.start()  # with the old key: as `PMESH_KEY` still has it
        await until(one_key(here.machines))
        await here.settle(*here.machines)

        assert trio.current_time() - began < 2.0
        assert load_mesh_key(away.settings.home) == key_of(one)
        given = [event.text for event in events_of(one) if event.kind == "key changed"]
        assert given[-1] == "mac-2 was away, and gets the latest mesh key"
        await away.stop()
        await away.start()
        assert key_of(away) == key_of(one)


async def test_who_missed_two_rotations_gets_the_latest_key(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, away = here.machines
        await meet(one, away)
        await away.stop()
        for _ in range(2):
            await rotate(here, one)

        await away.start()

        await until(one_key(here.machines))
        await here.settle(one, away)
        assert away.agent.keyring.rotation == one.agent.keyring.rotation


async def test_two_rotations_at_once_end_in_one_key(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        await meet(one, two, three)

        await together(partial(rotate, here, one), partial(rotate, here, two))

        await until(one_key(here.machines))
        await here.settle(*here.machines)
        rotations = {machine.agent.keyring.rotation for machine in here.machines}
        assert len({None if each is None else each.number for each in rotations}) == 1


async def test_a_machine_that_one_of_two_rotations_at_once_leaves_out_is_not_entitled(
    clock: MockClock,
) -> None:
    """Both are typed on the same machine."""
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)

        await together(partial(rotate, here, one), partial(rotate, here, one, "mac-1"))

        rotation = one.agent.keyring.rotation
        assert rotation is not None
        assert (rotation.number, rotation.entitled) == (2, (one.key.node,))


async def test_who_dials_nobody_by_itself_asks_a_member_that_dials_it(clock: MockClock) -> None:
    """Where only the others have `--peer`, and there is no multicast."""
    async with village(clock, 3) as here:
        away, one, two = here.machines
        for machine in here.machines:
            machine.settings = replace(machine.settings, listen=Listen("127.0.0.1", machine.port))
        await meet(*here.machines)
        await away.stop()
        await until(lambda: len(one.agent.peers.links) == 1)
        await rotate(here, one)
        await until(one_key([one, two]))

        await away.start()

        await until(one_key(here.machines))
        await here.settle(*here.machines)


async def test_two_sides_of_a_partition_that_both_rotated_end_in_one_key(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)
        await two.stop()
        await until(lambda: not one.agent.peers.links)
        await rotate(here, one)
        await one.stop()
        two.settings = replace(two.settings, peers=())
        await two.start()
        await rotate(here, two)
        assert key_of(two) != key_of(one)

        one.settings = replace(one.settings, peers=(two.address,))
        await one.start()
        two.agent.peers.targets.aim_at(one.address)

        await until(one_key(here.machines))
        await here.settle(one, two)


async def test_an_agent_that_was_killed_in_the_middle_has_one_of_both_keys(
    clock: MockClock, faults: Faults
) -> None:
    """The file that counts is written, `mesh_key` is not."""
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)

        killed = faults.fail(keyring, "store_mesh_key", OSError("killed"))
        members = [one.key.node, two.key.node]
        rotation = sign_rotation(one.key, MeshKey(b"n" * 32), members, before=None)
        with pytest.raises(OSError, match="killed"):
            await one.agent.keyring.adopt(rotation)
        assert key_of(one) == MESH
        port = one.port
        await one.stop()
        killed.end()

        one.settings = replace(one.settings, listen=Listen("127.0.0.1", port))
        await one.start()

        assert key_of(one) == b"n" * 32
        await until(one_key(here.machines))
        await here.settle(one, two)


async def test_a_new_key_is_announced_and_members_with_an_old_one_are_found(
    clock: MockClock, faults: Faults
) -> None:
    on_air: dict[NodeId, Advertisement] = {}

    async def discover(
        own: Advertisement, *, found: trio.MemorySendChannel[Discovered], **_: object
    ) -> None:
        on_air[own.node] = replace(own, hosts=("127.0.0.1",), minute=minute_of_now())
        known: dict[NodeId, Advertisement] = {own.node: on_air[own.node]}
        async with found:
            while True:
                for node, theirs in list(on_air.items()):
                    if known.get(node) != theirs:
                        known[node] = theirs
                        await found.send(AgentFound(advertisement=theirs))
                await trio.sleep(0.1)

    faults.instead(findings, "discover", discover)
    async with village(clock, 0) as here:
        one, two = [here.new_machine(name, mdns=True) for name in ("mac-0", "mac-1")]
        await one.start()
        await two.start()
        await meet(one, two)
        await here.settle(one, two)
        await two.stop()
        del on_air[two.key.node]
        await until(lambda: not one.agent.peers.links)
        await rotate(here, one)
        await until(lambda: on_air[one.key.node].tag == namespace_tag(key_of(one)))

        await two.start()

        await until(one_key([one, two]))
        await here.settle(one, two)
        assert {theirs.tag for theirs in on_air.values()} == {namespace_tag(key_of(one))}
        assert not any("another mesh key" in line for line in two.lines)


# --- who gets nothing


async def test_a_removed_machine_gets_no_key(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, gone = here.machines
        await meet(one, two, gone)

        reply = await rotate(here, one, "mac-2")

        assert (reply.told, reply.removed) == (("mac-1",), ("mac-2",))
        await until(one_key([one, two]))
        assert news(two) == ["mac-2 was removed from the mesh by mac-0"]
        await trio.sleep(20)
        assert key_of(gone) == MESH
        assert not gone.agent.peers.links
        for machine in (one, two):
            with pytest.raises(PmeshError):
                await question(machine, MESH, gone.key)


async def test_who_asks_for_a_key_without_itself_removes_nobody(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)

        refused = await ask(here, one, RotateKey(("mac-1", "mac-0")))

        assert isinstance(refused, Refused)
        assert "can't remove itself" in refused.verdict.message
        assert not removed(one)
        assert one.key.node in two.agent.peers.links
        assert key_of(one) == MESH


@pytest.mark.parametrize("fills", [True, False], ids=["the list", "its own entry"])
async def test_who_uses_up_the_numbers_of_removals_is_left_out_all_the_same(
    clock: MockClock,
    fills: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """It holds the mesh key, so it can invent node keys that sign."""
    async with village(clock, 3) as here:
        one, two, thief = here.machines
        await meet(one, two, thief)
        about = [NodeId(bytes([255 - n]) * 32) for n in range(MAX_REMOVALS)]
        last = {node: Removal(node, MAX_COUNTER - 1, False, node, bytes(64)) for node in about}  # noqa: FBT003
        last[thief.key.node] = msgspec.structs.replace(last[about[0]], node=thief.key.node)
        lies = [sign_removal(STRANGER, node, last, out=True) for node in about]
        if not fills:
            last[thief.key.node] = msgspec.structs.replace(last[thief.key.node], out=True)
            lies = [sign_removal(STRANGER, thief.key.node, last, out=False)]
        for machine in (one, two):
            machine.agent.register.take_untrusted(lies)

        reply = await rotate(here, one, "mac-2")

        assert reply.told == ("mac-1",)
        assert "mac-2" in reply.removed
        await until(lambda: one_key([one, two])() and key_of(one) != MESH)
        await trio.sleep(20)
        assert key_of(thief) == MESH
        assert not thief.agent.peers.links


async def test_who_was_removed_after_the_rotation_gets_no_key(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, away = here.machines
        await meet(one, away)
        await away.stop()
        await rotate(here, one)
        for _ in range(3):
            assert (await question(one, MESH, away.key)).key == key_of(one)
        told = [event.text for event in events_of(one) if "was away" in event.text]
        assert told == ["mac-1 was away, and gets the latest mesh key"]
        await remove(here, one, "mac-1")

        with pytest.raises(PeerUnreachable):
            await question(one, MESH, away.key)


async def test_the_old_key_alone_gets_nothing(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)
        rotation = await rotate(here, one)
        assert rotation.told == ("mac-1",)
        await until(one_key(here.machines))

        with pytest.raises((PeerUnreachable, MeshKeyMismatch)):
            await question(one, MESH, STRANGER)
        with pytest.raises((PeerUnreachable, MeshKeyMismatch)):
            await question(one, MeshKey(b"x" * 32), two.key)
        assert (await question(one, MESH, two.key)).key == key_of(one)


async def test_who_knows_only_the_old_key_can_give_no_other(clock: MockClock) -> None:
    """A machine that was away takes a key only from a node that it knew before."""
    async with village(clock, 1) as here:
        (one,) = here.machines
        thief = here.new_machine("thief", key=STRANGER)
        await thief.start()
        members = [one.key.node, STRANGER.node]
        rotation = sign_rotation(STRANGER, MeshKey(b"t" * 32), members, before=None)
        await thief.agent.keyring.adopt(rotation)

        assert not await one.agent.renewals.ask([thief.address])
        assert key_of(one) == MESH


async def test_a_machine_whose_handshake_began_with_the_old_key_gets_no_link(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)
        late = here.new_machine("late", peers=[one.address])
        proven, go_on = trio.Event(), trio.Event()
        peers = one.agent.peers

        async def admit_later(admit: Real, *arguments: object, **options: object) -> None:
            proven.set()
            await go_on.wait()
            await admit(*arguments, **options)

        begun: list[object] = []
        faults.pretend(peers, "_begin", lambda live, **_: begun.append(live))
        faults.around(peers, "_admit", admit_later)
        await late.start()
        await proven.wait()
        await rotate(here, one)
        go_on.set()
        await trio.sleep(5)

        assert not begun
        assert key_of(late) == MESH


async def test_a_machine_that_the_rotation_does_not_name_loses_its_link(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        await meet(one, two, three)
        members = [one.key.node, two.key.node]
        rotation = sign_rotation(one.key, MeshKey(b"n" * 32), members, before=None)

        one.agent.peers.links[two.key.node].send(TellRotation(rotation))

        await until(lambda: key_of(one) == key_of(two) == b"n" * 32)
        await until(lambda: not three.agent.peers.links)
        assert key_of(three) == MESH


async def test_a_member_that_rotates_without_end_makes_others_change_seldom(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)
        faults.skip(two.part(Members), "_pass_on")
        adopted: list[int] = []

        async def count(adopt: Real, rotation: Rotation, **options: object) -> object:
            adopted.append(rotation.number)
            return await adopt(rotation, **options)

        faults.around(one.agent.keyring, "adopt", count)
        members, before = [one.key.node, two.key.node], None
        for number in range(50):
            key = MeshKey(bytes([number]) * 32)
            before = sign_rotation(two.key, key, members, before=before)
            two.agent.peers.links[one.key.node].send(TellRotation(before))
        await until(lambda: bool(adopted))
        await trio.sleep(ADOPT_EVERY_S + 1)
        assert len(adopted) == 2
        assert adopted[-1] == 50


async def test_a_key_for_others_does_not_take_the_place_of_one_for_us(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        await meet(one, two, three)
        before = None
        for _ in range(10):  # of the first one alone, a while after which the next one may come
            before = sign_rotation(three.key, MeshKey(b"x" * 32), [], before=before)
            three.agent.peers.links[two.key.node].send(TellRotation(before))
        await trio.sleep(ADOPT_EVERY_S / 5)

        await rotate(here, one)

        await trio.sleep(ADOPT_EVERY_S + 1)
        assert key_of(two) == key_of(one) != MESH


async def test_many_rotations_are_checked_a_few_at_a_time_and_the_latest_is_taken(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)
        for machine in (one, two):  # only what this test sends is checked, and only by one
            faults.skip(machine.part(Members), "_pass_on")
        checked: list[int] = []

        def check(rotation: Rotation) -> None:
            checked.append(rotation.number)
            check_rotation_untrusted(rotation)

        faults.instead(members_agent, "check_rotation_untrusted", check)
        with faults.skip(one.part(Members), "poll"):
            members, before = [one.key.node, two.key.node], None
            for number in range(3 * CHECKS):
                key = MeshKey(bytes([number]) * 32)
                before = sign_rotation(two.key, key, members, before=before)
                two.agent.peers.links[one.key.node].send(TellRotation(before))
            await trio.sleep(2)
            assert len(checked) <= CHECKS
        await until(lambda: key_of(one) == key)
        assert len(checked) <= CHECKS + 1


async def test_who_sends_a_rotation_that_nobody_has_signed_loses_its_link(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)
        rotation = sign_rotation(two.key, MeshKey(b"n" * 32), [one.key.node], before=None)
        forged = Rotation(7, rotation.key, rotation.entitled, rotation.by, rotation.signature)

        two.agent.peers.links[one.key.node].send(TellRotation(forged))

        await until(lambda: two.key.node not in one.agent.peers.links)
        assert key_of(one) == MESH


async def test_an_earlier_key_that_a_member_says_again_is_not_taken(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)
        await rotate(here, one)
        await until(one_key(here.machines))
        earlier = two.agent.keyring.rotation
        assert earlier is not None
        await rotate(here, one)
        await until(lambda: one_key(here.machines)() and key_of(one) != earlier.key)

        two.agent.peers.links[one.key.node].send(TellRotation(earlier))
        await trio.sleep(ADOPT_EVERY_S + 1)

        assert one_key(here.machines)()
        assert key_of(one) != earlier.key


async def test_where_a_member_has_used_up_all_numbers_the_key_is_given_by_hand(
    clock: MockClock,
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        last = Rotation(MAX_COUNTER - 1, MESH, (), STRANGER.node, bytes(64))
        await one.agent.keyring.adopt(sign_rotation(STRANGER, MESH, [], before=last))

        refused = await ask(here, one, RotateKey())

        assert isinstance(refused, Refused)
        assert "used up the numbers of rotations; give the mesh a key by" in refused.verdict.message
        assert load_keys(one.settings.home, MeshKey(b"h" * 32)).rotation is None


async def test_a_key_of_a_removed_machine_is_not_taken(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, gone = here.machines
        await meet(one, two, gone)
        await remove(here, one, "mac-2")
        members = [machine.key.node for machine in here.machines]
        rotation = sign_rotation(gone.key, MeshKey(b"n" * 32), members, before=None)

        two.agent.peers.links[one.key.node].send(TellRotation(rotation))
        await trio.sleep(2)

        assert key_of(one) == MESH


# --- the ring of keys


async def test_former_keys_are_forgotten_after_ninety_days_and_beyond_eight(
    clock: MockClock,
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        now = [1000.0]
        keyring = Keyring(one.settings.home, MESH, one.key, wall_clock=lambda: now[0])
        rotation: Rotation | None = None
        for number in range(MAX_FORMER + 2):
            key = MeshKey(bytes([number]) * 32)
            rotation = sign_rotation(one.key, key, [], before=rotation)
            assert await keyring.adopt(rotation)
        assert rotation is not None
        assert not await keyring.adopt(rotation)
        assert len(keyring.ways()) == 1 + MAX_FORMER
        assert keyring.former_contexts(namespace_tag(MESH)) is None
        assert keyring.former_contexts(namespace_tag(MeshKey(bytes([8]) * 32))) is not None

        now[0] += FORMER_S + 1
        assert len(keyring.ways()) == 1
        assert keyring.former_contexts(namespace_tag(MeshKey(bytes([8]) * 32))) is None
        assert load_keys(one.settings.home, MeshKey(b"o" * 32)).rotation is None
        assert repr(rotation) == "Rotation(number=10)"


async def test_a_removal_that_is_undone_gives_the_key_again(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, back = here.machines
        await meet(one, back)
        await rotate(here, one, "mac-1")
        await ask(here, one, RemoveMachine("mac-1", out=False))

        reply = await rotate(here, one)
        assert reply.away == ("mac-1",)

        await until(one_key([one, back]))
        await here.settle(one, back)


async def test_who_says_the_same_key_anew_parts_no_others(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        await meet(one, two, three)
        await rotate(here, one)
        await until(one_key(here.machines))
        links = [dict(machine.agent.peers.links) for machine in (one, two)]
        anew = sign_rotation(three.key, key_of(one), [], before=one.agent.keyring.rotation)

        for machine in (one, two):
            three.agent.peers.links[machine.key.node].send(TellRotation(anew))

        await until(lambda: one.agent.keyring.rotation == two.agent.keyring.rotation == anew)
        await trio.sleep(2)
        assert links == [dict(machine.agent.peers.links) for machine in (one, two)]
