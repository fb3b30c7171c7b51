"""A stolen machine has the old mesh key and its own node key, and was left out of a rotation."""

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh import keyring
from pmesh.core.identity.certificates import issue_credentials
from pmesh.core.identity.keys import MeshKey, namespace_tag
from pmesh.core.identity.names import sign_name
from pmesh.core.identity.rotations import Rotation, sign_rotation, supersedes
from pmesh.core.wire.framing import RENEWAL_BYTES
from pmesh.core.wire.link import PROTOCOL_VERSION, Address, Hello
from pmesh.errors import KeyFileError, MeshKeyMismatch, PmeshError
from pmesh.ids import Incarnation, Member, NodeId
from pmesh.members.agent import ADOPT_EVERY_S
from pmesh.members.wire import TellRotation
from pmesh.net.links.path import shake_hands
from pmesh.net.links.renewal import give_rotation
from pmesh.net.links.tls import TlsContexts
from tests.members.machines import key_of, meet, one_key, question, rotate
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import until
from tests.worlds.village import MESH, Machine, village
from tests.worlds.village_ops import events_of

pytestmark = pytest.mark.usefixtures("threads_run_at_once")


def of_a_thief(thief: Machine, *others: Machine) -> Rotation:
    """A rotation to a key that it has made, with a number far above all others."""
    nodes = [machine.key.node for machine in (thief, *others)]
    before = Rotation(10**6, MESH, (), thief.key.node, bytes(64))
    return sign_rotation(thief.key, MeshKey(b"t" * 32), nodes, before=before)


def replayed(_: Machine, __: Machine, before: Rotation) -> Rotation:
    """The last one that named the thief, whose key it has."""
    return before


def forged(thief: Machine, honest: Machine, before: Rotation) -> Rotation:
    """Its own, to a key that it has made, with a higher number than any."""
    members = [thief.key.node, honest.key.node]
    later = Rotation(10**6, before.key, before.entitled, before.by, before.signature)
    return sign_rotation(thief.key, MeshKey(b"t" * 32), members, before=later)


def altered(_: Machine, __: Machine, before: Rotation) -> Rotation:
    """That of a member, with a higher number."""
    return Rotation(10**6, before.key, before.entitled, before.by, before.signature)


@pytest.mark.parametrize("knows", [True, False], ids=["known", "pushed out of the list"])
@pytest.mark.parametrize("tells", [replayed, forged, altered])
async def test_a_stolen_machine_gets_no_link_and_no_key_and_can_give_none(
    clock: MockClock,
    tells: Callable[[Machine, Machine, Rotation], Rotation],
    knows: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Also where its removal is not known any more: before it was removed, it filled the list."""
    async with village(clock, 3) as here:
        one, two, thief = here.machines
        await meet(one, two, thief)
        await rotate(here, one)
        await until(one_key(here.machines))
        old, before = key_of(thief), thief.agent.keyring.rotation
        assert before is not None
        await rotate(here, two, "mac-2")
        await until(lambda: one_key([one, two])() and key_of(one) != old)
        ours = one.agent.keyring.rotation
        await thief.stop()
        for machine in () if knows else (one, two):
            machine.agent.register.removals.clear()

        for key in (MESH, old):
            contexts = TlsContexts.of(issue_credentials(key, thief.key))
            me = Member(thief.key.node, Incarnation(7))
            hello = Hello(PROTOCOL_VERSION, me, sign_name(thief.key, me, "mac-2"))
            for machine in (one, two):
                stream = await trio.open_tcp_stream("127.0.0.1", machine.port)
                greet = partial(shake_hands, stream, server_side=False, hello=lambda _: hello)  # noqa: B023 - at once
                with pytest.raises(MeshKeyMismatch):
                    await greet(contexts=contexts)
                with pytest.raises(PmeshError):
                    await question(machine, key, thief.key)

        told: list[NodeId] = []

        def tell(node: NodeId) -> Rotation:
            told.append(node)
            return tells(thief, one, before)

        async def answer(stream: trio.SocketStream) -> None:
            first = await stream.receive_some(RENEWAL_BYTES)
            with contextlib.suppress(PmeshError):
                await give_rotation(
                    stream,
                    first,
                    contexts={namespace_tag(old): contexts}.get,
                    rotation_for=tell,
                    authenticated=lambda: None,
                )

        listeners = await here.nursery.start(trio.serve_tcp, answer, 0)
        address = Address("127.0.0.1", listeners[0].socket.getsockname()[1])
        for machine in (one, two):
            assert not await machine.agent.renewals.ask([address])
            assert machine.agent.keyring.rotation == ours
            assert thief.key.node not in machine.agent.peers.links
        assert told == [one.key.node, two.key.node]


async def test_a_key_of_a_thief_that_waits_for_the_disk_is_not_taken_after_its_removal(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 3) as here:
        one, two, thief = here.machines
        await meet(one, two, thief)
        waits, go_on = trio.Event(), trio.Event()

        async def wait(adopt: Real, rotation: Rotation, **options: object) -> object:
            if rotation.by == thief.key.node:
                waits.set()
                await go_on.wait()
            return await adopt(rotation, **options)

        faults.around(one.agent.keyring, "adopt", wait)
        thief.agent.peers.links[one.key.node].send(TellRotation(of_a_thief(thief, one, two)))
        await waits.wait()
        await rotate(here, one, "mac-2")
        go_on.set()
        await trio.sleep(2 * ADOPT_EVERY_S)

        rotation = one.agent.keyring.rotation
        assert rotation is not None
        assert rotation.by == one.key.node
        assert thief.key.node not in rotation.entitled


async def test_a_key_of_a_thief_that_another_member_has_taken_is_replaced(
    clock: MockClock,
) -> None:
    """The thief tells one member a number that is far above all others, just before."""
    async with village(clock, 4) as here:
        one, two, three, thief = here.machines
        await meet(*here.machines)
        await two.agent.keyring.adopt(of_a_thief(thief, one, two, three))

        await rotate(here, one, "mac-3")

        await until(one_key([one, two, three]))
        rotation = one.agent.keyring.rotation
        assert rotation is not None
        assert rotation.by == one.key.node
        assert thief.key.node not in rotation.entitled
        assert key_of(one) not in {MESH, b"t" * 32}
        changed = [event.text for event in events_of(one) if event.kind == "key changed"]
        assert (
            "a removed machine has, or had made, the key that others took; so this machine has "
            "changed it again"
        ) in changed


async def test_of_two_rotations_at_once_the_one_that_leaves_a_machine_out_counts(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        one, two, thief = here.machines
        await meet(*here.machines)
        await rotate(here, one, "mac-2")
        ours = one.agent.keyring.rotation
        assert ours is not None
        everybody = [machine.key.node for machine in here.machines]
        keys = (MeshKey(bytes([n]) * 32) for n in range(256))
        at_once = (sign_rotation(two.key, key, everybody, before=None) for key in keys)
        theirs = next(each for each in at_once if supersedes(each, ours))

        two.agent.peers.links[one.key.node].send(TellRotation(theirs))

        await trio.sleep(2 * ADOPT_EVERY_S)
        rotation = one.agent.keyring.rotation
        assert rotation == two.agent.keyring.rotation
        assert rotation is not None
        assert thief.key.node not in rotation.entitled
        assert rotation.key not in {ours.key, theirs.key}


async def test_a_key_of_a_thief_is_replaced_once_the_disk_has_room(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 3) as here:
        one, two, thief = here.machines
        await meet(*here.machines)
        await rotate(here, one, "mac-2")
        await until(one_key([one, two]))
        with faults.fail(keyring, "write_private", KeyFileError("no space left")):
            two.agent.peers.links[one.key.node].send(TellRotation(of_a_thief(thief, one, two)))
            await trio.sleep(3 * ADOPT_EVERY_S)
        await trio.sleep(2 * ADOPT_EVERY_S)

        assert one_key([one, two])()
        rotation = two.agent.keyring.rotation
        assert rotation is not None
        assert (rotation.number, rotation.by) == (10**6 + 2, one.key.node)
