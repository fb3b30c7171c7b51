"""What members know of each other, and what is asked of them."""

from collections.abc import Callable, Sequence

import trio

from pmesh.core.identity.certificates import issue_credentials
from pmesh.core.identity.keys import MeshKey, NodeKey, namespace_tag
from pmesh.core.identity.rotations import Rotation
from pmesh.ids import NodeId
from pmesh.members.wire import (
    AskMembers,
    KeyRotated,
    MachineTold,
    MemberRow,
    MemberRows,
    RemoveMachine,
    RotateKey,
)
from pmesh.net.links.renewal import ask_for_rotation
from pmesh.net.links.tls import TlsContexts
from simulation.wire import AnyReply, AnyRequest
from tests.worlds.trainer import until
from tests.worlds.village import Machine, Village
from tests.worlds.village_ops import events_of


async def ask(here: Village, machine: Machine, request: AnyRequest) -> AnyReply:
    return await (await here.trainer(machine)).ask(request)


async def rows(here: Village, machine: Machine) -> dict[str, MemberRow]:
    reply = await ask(here, machine, AskMembers())
    assert isinstance(reply, MemberRows)
    return {row.name: row for row in reply.rows}


async def remove(here: Village, by: Machine, name: str, *, undo: bool = False) -> MachineTold:
    reply = await ask(here, by, RemoveMachine(name, not undo))
    assert isinstance(reply, MachineTold), reply
    return reply


def knows_all(machine: Machine, count: int) -> Callable[[], bool]:
    """Whether it has met so many others, and they have said their versions."""
    return lambda: (
        len(known := machine.agent.register.known) == count
        and all(each.version for each in known.values())
    )


def removed(machine: Machine) -> set[NodeId]:
    entries = machine.agent.register.removals.values()
    return {entry.node for entry in entries if entry.out}


def news(machine: Machine) -> list[str]:
    return [event.text for event in events_of(machine) if event.kind == "machine removed"]


def key_of(machine: Machine) -> MeshKey:
    return machine.agent.keyring.mesh_key


def one_key(machines: Sequence[Machine]) -> Callable[[], bool]:
    return lambda: len({key_of(machine) for machine in machines}) == 1


async def meet(*machines: Machine) -> None:
    """All know all others."""
    count = len(machines) - 1
    await until(lambda: all(knows_all(machine, count)() for machine in machines))


async def rotate(here: Village, by: Machine, *without: str) -> KeyRotated:
    reply = await ask(here, by, RotateKey(without))
    assert isinstance(reply, KeyRotated), reply
    return reply


async def question(machine: Machine, key: MeshKey, node_key: NodeKey) -> Rotation:
    """What a machine that has this key and this node key gets when it asks for a later one."""
    stream = await trio.open_tcp_stream("127.0.0.1", machine.port)
    contexts = TlsContexts.of(issue_credentials(key, node_key))
    return await ask_for_rotation(
        stream, tag=namespace_tag(key), contexts=contexts, trusts=lambda _: True
    )
