"""The links and paths between whole agents."""

from collections.abc import Callable
from typing import Any

import trio

from pmesh.agent.containment import Containment
from pmesh.agent.mesh.links import Link, LivePath
from pmesh.core.links.addresses import BoundAddress
from pmesh.core.links.paths import RELAYED
from pmesh.errors import PeerUnreachable
from pmesh.net.links.path import Path
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import until
from tests.worlds.village import Machine


def link_to(machine: Machine, other: Machine) -> Link:
    return machine.agent.peers.links[other.key.node]


def path_to(machine: Machine, other: Machine) -> LivePath:
    (live,) = link_to(machine, other).paths.values()
    return live


def new_link(machine: Machine, other: Machine) -> Link:
    """A link over the same path, of which its agent does not know."""
    contain = Containment(machine.agent.event_log, clock=trio.current_time).contain
    return Link(path_to(machine, other), contain=contain)


async def close_path(machine: Machine, other: Machine) -> None:
    """End the only path, and wait for another."""
    before = path_to(machine, other)
    await before.path.aclose()
    for one, two in ((machine, other), (other, machine)):
        await until(lambda o=one, t=two: before not in path_set(o, t))  # type: ignore[misc]
        await until(lambda o=one, t=two: bool(path_set(o, t)))  # type: ignore[misc]


def path_set(machine: Machine, other: Machine) -> set[LivePath]:
    link = machine.agent.peers.links.get(other.key.node)
    return set() if link is None else set(link.paths.values())


def reached_over(machine: Machine, other: Machine) -> str | None:
    """The kind of the path over which messages go; None if there is no link."""
    link = machine.agent.peers.links.get(other.key.node)
    return None if link is None or link.current is None else link.current.kind


def socket_of(path: Path) -> Any:  # noqa: ANN401 - trio's own, which has no type
    """The TCP connection of a path, for what only the system does to one."""
    return path._wire.stream.socket  # type: ignore[attr-defined] # noqa: SLF001


def build_wall(one: Machine, other: Machine) -> Callable[[], None]:
    """Neither can dial the other, until what is returned is called."""
    walls = Faults()

    def refuse(machine: Machine, far: Machine) -> None:
        async def dial(real: Real, addresses: tuple[BoundAddress, ...]) -> object:
            if any(address.port == far.port for address, _ in addresses):
                raise PeerUnreachable("there is a wall")
            return await real(addresses)

        walls.around(machine.agent.peers, "_dial", dial)

    refuse(one, other)
    refuse(other, one)
    return walls.undo


async def part(one: Machine, other: Machine) -> None:
    """Let the two reach each other over a third only."""
    await trio.sleep(1)  # a link that ends sooner has been refused
    build_wall(one, other)
    await path_to(one, other).path.aclose()
    await until(lambda: reached_over(one, other) == reached_over(other, one) == RELAYED)
