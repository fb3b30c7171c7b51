"""What members know of each other, and what is asked of them."""

from collections.abc import Callable

from pmesh.ids import NodeId
from pmesh.members.wire import AskMembers, MachineTold, MemberRow, MemberRows, RemoveMachine
from simulation.wire import AnyReply, AnyRequest
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
        len(known := machine.agent._register.known) == count  # noqa: SLF001
        and all(each.version for each in known.values())
    )


def removed(machine: Machine) -> set[NodeId]:
    entries = machine.agent._register.removals.values()  # noqa: SLF001
    return {entry.node for entry in entries if entry.out}


def news(machine: Machine) -> list[str]:
    return [event.text for event in events_of(machine) if event.kind == "machine removed"]
