"""The mesh gets a new key, and a machine's disk has no room for it."""

import tempfile
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.home import load_mesh_key
from pmesh.agent.mesh import keyring
from pmesh.agent.mesh.keyring import latest_key
from pmesh.core.wire.session import Refused
from pmesh.errors import KeyFileError
from pmesh.members.agent import ADOPT_EVERY_S
from pmesh.members.wire import RotateKey
from tests.members.machines import (
    ask,
    key_of,
    meet,
    removed,
    rotate,
)
from tests.worlds.faults import Faults, Real
from tests.worlds.village import MESH, village
from tests.worlds.village_ops import events_of

pytestmark = pytest.mark.usefixtures("threads_run_at_once")


async def test_a_disk_that_becomes_full_in_between_has_the_new_key_all_the_same(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines

        faults.fail(keyring, "store_mesh_key", KeyFileError("no space left"))
        await rotate(here, one)
        assert key_of(one) == latest_key(one.settings.home, MESH) != MESH


async def test_a_disk_that_is_full_keeps_the_old_key_in_use(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)
        faults.instead(tempfile, "mkstemp", _full)

        refused = await ask(here, one, RotateKey())

        assert isinstance(refused, Refused)
        assert "can't write" in refused.verdict.message
        assert key_of(one) == key_of(two) == MESH
        refused = await ask(here, one, RotateKey(("nobody",)))
        assert isinstance(refused, Refused)
        assert "no machine is called 'nobody'" in refused.verdict.message


async def test_a_key_that_a_full_disk_has_no_room_for_removes_nobody(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 3) as here:
        one, two, leaves = here.machines
        await meet(one, two, leaves)

        with faults.instead(tempfile, "mkstemp", _full):
            refused = await ask(here, one, RotateKey(("mac-2",)))

        assert isinstance(refused, Refused)
        assert "can't write" in refused.verdict.message
        await trio.sleep(5)
        assert not removed(one)
        assert not removed(two)
        assert leaves.key.node in one.agent.peers.links
        assert (await rotate(here, one, "mac-2")).removed == ("mac-2",)


async def test_a_key_for_which_a_disk_has_no_room_is_taken_once_it_has(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await meet(one, two)
        link = two.agent.peers.links[one.key.node]

        def full_at_two(real: Real, *, dir: Path, prefix: str) -> object:  # noqa: A002 - its name
            return _full() if dir == two.settings.home else real(dir=dir, prefix=prefix)

        with faults.around(tempfile, "mkstemp", full_at_two):
            await rotate(here, one)
            await trio.sleep(10 * ADOPT_EVERY_S)
            assert key_of(two) == MESH
        await trio.sleep(ADOPT_EVERY_S + 1)

        assert load_mesh_key(two.settings.home) == key_of(two) == key_of(one)
        assert two.agent.peers.links[one.key.node] is link
        changed = [event.text for event in events_of(two) if event.kind == "key changed"]
        can_t_take = "mac-0 has changed the mesh key, and this machine can't take it yet: can't"
        assert changed[0].startswith(can_t_take)
        assert changed[1:] == ["mac-0 has changed the mesh key, and this machine has the new one"]


def _full(*_: object, **__: object) -> object:
    raise OSError(28, "No space left on device")
