"""The environment of each rank: what scripts of torchrun and mlx.launch expect, and ours.

torch: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
mlx: https://ml-explore.github.io/mlx/build/html/usage/distributed.html
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from pmesh.core.wire.launches import Engine, RankPart, Variable
from pmesh.ids import NodeId

LOOPBACK: Final = "127.0.0.1"

_LOADERS = ("LD_", "DYLD_")
_REFUSED = frozenset({"BASH_ENV", "ENV", "GCONV_PATH", "IFS", "PYTHONHOME", "SHELLOPTS"})


def why_not_set(names: Iterable[str]) -> str:
    """Return why a launch may not set one of these variables; "" if it may set all.

    >>> why_not_set(["EPOCHS", "LD_PRELOAD"])
    "LD_PRELOAD may not be set: it changes which code the machine's own programs load"
    >>> why_not_set(["PMESH_HOME"])
    'PMESH_HOME may not be set: pmesh sets it'
    >>> why_not_set(["EPOCHS", "PYTHONPATH"])
    ''
    """
    for name in names:
        if name.startswith(_LOADERS) or name in _REFUSED:
            what = "it changes which code the machine's own programs load"
            return f"{name} may not be set: {what}"
        if name.startswith("PMESH_"):
            return f"{name} may not be set: pmesh sets it"
    return ""


def own_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank inherits of the agent: all but the mesh key and the agent's settings.

    >>> own_environment({"HOME": "/home/anna", "PMESH_KEY": "secret"})
    {'HOME': '/home/anna'}
    """
    return {name: value for name, value in inherited.items() if not name.startswith("PMESH_")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One machine that runs ranks, as it has described itself."""

    node: NodeId
    ranks: Sequence[int]
    ports: Sequence[int] = ()
    ways: Mapping[NodeId, tuple[str, str]]
    """By other machine: its address as reached from here, and the interface here."""

    def host_of(self, other: NodeId) -> str:
        """Return where another machine is reached from this one."""
        return LOOPBACK if other == self.node else self.ways.get(other, ("", ""))[0]


def unreachable(engine: Engine, places: Sequence[Place]) -> tuple[NodeId, NodeId] | None:
    """Return two neighbours without the IPv4 addresses that the engine needs; None if all have."""
    if engine == "pmesh":
        return None
    for before, here in zip(places, (*places[1:], places[0]), strict=True):
        for one, other in ((before, here), (here, places[0])):
            if not one.host_of(other.node):
                return one.node, other.node
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all ranks of one generation share."""

    engine: Engine
    job: str
    launch: str
    generation: int
    restarts: int
    places: Sequence[Place]

    @property
    def world_size(self) -> int:
        return sum(len(place.ranks) for place in self.places)


def parts_of(run: Run, node: NodeId) -> tuple[RankPart, ...]:
    """Return the ranks of one machine with their environment."""
    (place,) = (place for place in run.places if place.node == node)
    return tuple(_part(run, place, rank) for rank in place.ranks)


def _part(run: Run, place: Place, rank: int) -> RankPart:
    match run.engine:
        case "pmesh":
            variables, files = _pmesh(run), dict[str, str]()
        case "gloo" | "nccl":
            variables, files = _torch(run, place, rank), {}
        case "mlx-ring":
            variables, files = {"MLX_RANK": str(rank)}, {"MLX_HOSTFILE": _ring_hosts(run)}
        case "jaccl":
            variables, files = _jaccl(run, place, rank), {"MLX_IBV_DEVICES": _rdma_devices(run)}
        case _:
            assert_never(run.engine)
    return RankPart(rank, _settings(variables), _settings(files))


def _settings(values: Mapping[str, str]) -> tuple[Variable, ...]:
    return tuple(Variable(name, value) for name, value in values.items())


def _pmesh(run: Run) -> dict[str, str]:
    return {"PMESH_JOB": run.job, "PMESH_WAIT_FOR": str(run.world_size)}


def _torch(run: Run, place: Place, rank: int) -> dict[str, str]:
    first = run.places[0]
    group = run.places.index(place)
    after = run.places[(group + 1) % len(run.places)]
    interface = place.ways.get(after.node, ("", ""))[1]
    variables = {
        "RANK": rank,
        "LOCAL_RANK": place.ranks.index(rank),
        "WORLD_SIZE": run.world_size,
        "LOCAL_WORLD_SIZE": len(place.ranks),
        "GROUP_RANK": group,
        "GROUP_WORLD_SIZE": len(run.places),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": run.world_size,
        "MASTER_ADDR": place.host_of(first.node),
        "MASTER_PORT": first.ports[0],
        "TORCHELASTIC_RUN_ID": run.launch,
        "TORCHELASTIC_RESTART_COUNT": run.generation,
        "TORCHELASTIC_MAX_RESTARTS": run.restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if interface:
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {name: str(value) for name, value in variables.items()}


def _ring_hosts(run: Run) -> str:
    """Where each rank listens: at the address by which the rank before it reaches its machine."""
    order = [(place, index) for place in run.places for index in range(len(place.ranks))]
    hosts: list[list[str]] = []
    for (before, _), (place, index) in zip((order[-1], *order[:-1]), order, strict=True):
        hosts.append([f"{before.host_of(place.node)}:{place.ports[index]}"])
    return json.dumps(hosts)


def _jaccl(run: Run, place: Place, rank: int) -> dict[str, str]:
    first = run.places[0]
    coordinator = f"{place.host_of(first.node)}:{first.ports[0]}"
    return {"MLX_RANK": str(rank), "MLX_JACCL_COORDINATOR": coordinator}


def _rdma_devices(run: Run) -> str:
    """For each rank a row: the RDMA device that leads to each other rank, None for itself.

    macOS calls the device of the interface en5 `rdma_en5`.
    """
    order = [(place, rank) for place in run.places for rank in place.ranks]
    return json.dumps(
        [
            [None if rank == other else _rdma_device(place, there.node) for there, other in order]
            for place, rank in order
        ]
    )


def _rdma_device(place: Place, to: NodeId) -> str | None:
    interface = place.ways.get(to, ("", ""))[1]
    return f"rdma_{interface}" if interface else None
