"""The environment of each rank: what scripts of torchrun and mlx.launch expect, and ours.

torch: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
mlx: https://ml-explore.github.io/mlx/build/html/usage/distributed.html
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, assert_never

from pmesh.core.values import MAX_TRAINERS
from pmesh.errors import ProtocolError, UsageError
from pmesh.ids import NodeId, PathName
from pmesh.launches.wire.engines import Engine
from pmesh.launches.wire.messages import BeginRanks, PrepareLaunch, RankGroup, Variable

LOOPBACK: Final = "127.0.0.1"
MAX_RDMA_RANKS: Final = 64  # the table of their devices grows with the square

# What the loader, the C library, a shell, or a Python before its first module obeys in *every*
# program of the machine. What one language or one program heeds (PYTHONPATH, NODE_OPTIONS,
# PERL5LIB, PATH) is the business of whoever gives the command.
_LOADERS = ("LD_", "DYLD_")
_REFUSED = frozenset(
    {
        *("GCONV_PATH", "GLIBC_TUNABLES"),
        *("BASH_ENV", "BASHOPTS", "ENV", "IFS", "PS4", "SHELLOPTS", "ZDOTDIR"),
        *("PYTHONEXECUTABLE", "PYTHONHOME", "PYTHONPLATLIBDIR", "__PYVENV_LAUNCHER__"),
    }
)


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


def environment_of(
    inherited: Mapping[str, str], settings: Mapping[str, str], asked: Iterable[Variable]
) -> dict[str, str]:
    """Return all variables of a process of a launch. Every such environment is made here.

    Args:
        inherited: The agent's own, of which the mesh key and the agent's settings are left out.
        settings: What this machine sets by itself.
        asked: What a message has brought; it comes last, so it may change the others.

    Raises:
        UsageError: One of those that were asked for may not be set.

    >>> environment_of({"HOME": "/home/anna", "PMESH_KEY": "secret"}, {}, [])
    {'HOME': '/home/anna'}
    """
    variables = {variable.name: variable.value for variable in asked}
    refusal = why_not_set(variables)
    if refusal:
        raise UsageError(refusal)
    own = {name: value for name, value in inherited.items() if not name.startswith("PMESH_")}
    return {**own, **settings, **variables}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlace:
    """One machine that runs ranks, as it has described itself."""

    node: NodeId
    ranks: Sequence[int]
    ports: Sequence[int] = ()
    ways: Mapping[NodeId, tuple[str, str]]
    """By other machine: its address as reached from here, and the interface here."""

    def host_of(self, other: NodeId) -> str:
        """Return where another machine is reached from this one."""
        return LOOPBACK if other == self.node else self.ways.get(other, ("", ""))[0]


def unreachable(engine: Engine, places: Sequence[LaunchPlace]) -> tuple[NodeId, NodeId] | None:
    """Return two neighbours without the IPv4 addresses that the engine needs; None if all have."""
    if engine == "pmesh":
        return None
    for before, here in zip(places, (*places[1:], places[0]), strict=True):
        for one, other in ((before, here), (here, places[0])):
            if not one.host_of(other.node):
                return one.node, other.node
    return None


def begin_messages(
    launch: PathName, generation: int, places: Sequence[LaunchPlace]
) -> Mapping[NodeId, BeginRanks]:
    """Return what each machine needs to know to start its ranks."""
    groups = tuple(
        _group(place, before, places)
        for before, place in zip((places[-1], *places[:-1]), places, strict=True)
    )
    return {
        place.node: BeginRanks(launch, generation, index, groups, place.host_of(places[0].node))
        for index, place in enumerate(places)
    }


def _group(place: LaunchPlace, before: LaunchPlace, places: Sequence[LaunchPlace]) -> RankGroup:
    count = len(place.ranks)
    interfaces = tuple(place.ways.get(other.node, ("", ""))[1] for other in places)
    return RankGroup(count, before.host_of(place.node), tuple(place.ports[:count]), interfaces)


def ranks_untrusted(prepare: PrepareLaunch, begin: BeginRanks) -> range:
    """Return the ranks that this machine is to start. Raises ProtocolError if they can't be."""
    counts = [group.count for group in begin.groups]
    if begin.group >= len(counts) or sum(counts) > MAX_TRAINERS:
        raise ProtocolError("a launch began with ranks that it can't have")
    if counts[begin.group] != prepare.ranks:
        raise ProtocolError("a launch began with other ranks than it was prepared for")
    if prepare.terms.engine == "jaccl" and sum(counts) > MAX_RDMA_RANKS:
        raise ProtocolError("a launch began with more ranks than its engine takes")
    is_bare = not any(group.ports or group.interfaces for group in begin.groups)
    if not (is_bare and prepare.terms.engine == "pmesh") and any(
        len(group.ports) != group.count or len(group.interfaces) != len(counts)
        for group in begin.groups
    ):
        raise ProtocolError("a launch began without ports or interfaces")
    first = sum(counts[: begin.group])
    return range(first, first + prepare.ranks)


class Settings(NamedTuple):
    """What an engine wants to find in the environment of a rank."""

    variables: Mapping[str, str]
    files: Mapping[str, str]
    """Contents, by the variable that is to hold the path of a file with it."""


def settings_of(prepare: PrepareLaunch, begin: BeginRanks, rank: int) -> Settings:
    """Return what one of the `ranks_untrusted` finds: names of ours, values that were checked."""
    match prepare.terms.engine:
        case "pmesh":
            job = {"PMESH_JOB": prepare.job, "PMESH_WAIT_FOR": _size(begin)}
            ours = job | {"PMESH_PLACE": str(rank)}
            if prepare.terms.backend is not None:
                ours["PMESH_BACKEND"] = prepare.terms.backend
            return Settings(_torch(prepare, begin, rank) | ours, {})
        case "gloo" | "nccl":
            return Settings(_torch(prepare, begin, rank), {})
        case "mlx-ring":
            return Settings({"MLX_RANK": str(rank)}, {"MLX_HOSTFILE": _ring_hosts(begin)})
        case "jaccl":
            coordinator = f"{begin.first_host}:{begin.groups[0].ports[0]}"
            variables = {"MLX_RANK": str(rank), "MLX_JACCL_COORDINATOR": coordinator}
            return Settings(variables, {"MLX_IBV_DEVICES": _rdma_devices(begin)})
        case _:
            assert_never(prepare.terms.engine)


def _size(begin: BeginRanks) -> str:
    return str(sum(group.count for group in begin.groups))


def _torch(prepare: PrepareLaunch, begin: BeginRanks, rank: int) -> dict[str, str]:
    """What torchrun sets. Our own engine may do without a path by IPv4, and then has no address."""
    index, groups = begin.group, begin.groups
    here = groups[index]
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - sum(group.count for group in groups[:index])),
        "WORLD_SIZE": _size(begin),
        "LOCAL_WORLD_SIZE": str(here.count),
        "GROUP_RANK": str(index),
        "GROUP_WORLD_SIZE": str(len(groups)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": _size(begin),
        "TORCHELASTIC_RUN_ID": begin.launch,
        "TORCHELASTIC_RESTART_COUNT": str(begin.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(prepare.terms.restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if begin.first_host and groups[0].ports:
        variables |= {"MASTER_ADDR": begin.first_host, "MASTER_PORT": str(groups[0].ports[0])}
    interface = here.interfaces[(index + 1) % len(groups)] if here.interfaces else ""
    if interface:
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return variables


def _ring_hosts(begin: BeginRanks) -> str:
    """Where each rank listens: at the address by which the rank before it reaches its machine."""
    hosts = [
        [f"{LOOPBACK if index else group.host}:{port}"]
        for group in begin.groups
        for index, port in enumerate(group.ports)
    ]
    return json.dumps(hosts)


def _rdma_devices(begin: BeginRanks) -> str:
    """For each rank a row: the RDMA device that leads to each other rank, None for itself.

    macOS calls the device of the interface en5 `rdma_en5`.
    """
    rows = [
        [
            f"rdma_{interface}" if interface else None
            for interface, other in zip(group.interfaces, begin.groups, strict=True)
            for _ in range(other.count)
        ]
        for group in begin.groups
        for _ in range(group.count)
    ]
    return json.dumps(rows)
