"""The links and paths between whole agents."""

from pmesh.agent.mesh.links import Link, LivePath
from tests.worlds.trainer import until
from tests.worlds.village import Machine


def live_to(machine: Machine, other: Machine) -> Link:
    return machine.agent.peers.links[other.key.node]


def path_to(machine: Machine, other: Machine) -> LivePath:
    (live,) = live_to(machine, other).paths.values()
    return live


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
