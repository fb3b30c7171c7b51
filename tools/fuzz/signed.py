"""Who has a place in the mesh: removals and rotations that a member has signed, or not.

A member may remove others and give the mesh another key, which parts whomever it likes. So these
remove only machines that do not exist, and no key is for an honest one: nothing may come of them.
"""

from msgspec.structs import replace

from pmesh.core.identity.keys import MeshKey
from pmesh.core.identity.removals import MAX_REMOVALS, sign_removal
from pmesh.core.identity.rotations import Rotation, sign_rotation
from pmesh.core.values import Removal
from pmesh.ids import MAX_COUNTER, NodeId
from pmesh.members.wire import TellRemovals, TellRotation
from tools.fuzz.life import LiarsLife

NUMBERS = (1, 2, 1000, MAX_COUNTER)
ROTATIONS = (1, 2, 1000, MAX_COUNTER)


async def remove(life: LiarsLife) -> None:
    """As many removals of nobody as there may be, undone ones, and forged ones of the others."""

    def entry(node: NodeId, *, out: bool) -> Removal:
        before = Removal(node, life.dice.choice(NUMBERS) - 1, not out, node, bytes(64))
        return sign_removal(life.key, node, {node: before}, out=out)

    nobody = (NodeId(life.some(32)) for _ in range(MAX_REMOVALS))
    many = tuple(entry(node, out=life.dice.random() < 0.9) for node in nobody)  # noqa: PLR2004
    undone = tuple(entry(other.node, out=False) for other in life.others)
    forged = tuple(replace(each, out=True) for each in undone)
    own = Removal(life.key.node, MAX_COUNTER, False, life.key.node, bytes(64))  # noqa: FBT003
    for removals in (many, undone, many[1:], life.dice.choice((forged, (own,)))):
        await life.send([TellRemovals("0.1", removals)])


async def rotate(life: LiarsLife) -> None:
    """Rotations that name nobody else, also back to former keys, and one that nobody has signed."""
    number = life.dice.choice(ROTATIONS)
    former = [key for key in life.mesh_keys if key != life.mesh_keys[-1]]
    for key in (*former, MeshKey(life.some(32))):
        before = Rotation(number - 1, key, (), life.key.node, bytes(64))
        mine = life.dice.choice(((), (life.key.node,)))
        await life.send([TellRotation(sign_rotation(life.key, key, mine, before=before))])
    everybody = tuple(other.node for other in life.others)
    forged = Rotation(number, MeshKey(life.some(32)), everybody, life.key.node, bytes(64))
    await life.send([TellRotation(forged)])
