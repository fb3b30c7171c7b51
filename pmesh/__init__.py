"""pmesh turns the Macs and Linux boxes at home into one training cluster."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from pmesh.errors import (
    AgentNotRunning,
    AgentStopped,
    GroupBroken,
    HistorySuperseded,
    JobRunning,
    MeshClosed,
    NetworkError,
    NonFiniteGradients,
    NotEnoughRanks,
    OpMismatch,
    OpTimedOut,
    PeerError,
    PmeshError,
    RankLost,
    RemoteCallFailed,
    RosterChanged,
    RunError,
    TooManyCalls,
    UnsupportedArray,
    UnsupportedCompression,
    UsageError,
)
from pmesh.installed import installed_version, warn_of_namesake

if TYPE_CHECKING:
    __version__: str

    from pmesh.client.calls.queue import Handle
    from pmesh.client.checkpoints.checkpoints import Checkpoints
    from pmesh.client.collective.bucketed import LastOp
    from pmesh.client.connect import connect
    from pmesh.client.elastic.compare import Compared
    from pmesh.client.group import Group
    from pmesh.client.local_updates import LocalUpdates, Nesterov
    from pmesh.client.mesh import DeviceMesh, Mesh
    from pmesh.compression.schemes import (
        BF16,
        FP16,
        INT8,
        Auto,
        OneBit,
        PowerSGD,
        RandomK,
        TopK,
    )
    from pmesh.core.ops.shard import Shard
    from pmesh.p2p.client.calls import ANY
    from pmesh.rpc.client.calls import RemoteCall, RemoteObject, Rpc
    from pmesh.store.client import Store

__all__ = [
    "ANY",
    "BF16",
    "FP16",
    "INT8",
    "AgentNotRunning",
    "AgentStopped",
    "Auto",
    "Checkpoints",
    "Compared",
    "DeviceMesh",
    "Group",
    "GroupBroken",
    "Handle",
    "HistorySuperseded",
    "JobRunning",
    "LastOp",
    "LocalUpdates",
    "Mesh",
    "MeshClosed",
    "Nesterov",
    "NetworkError",
    "NonFiniteGradients",
    "NotEnoughRanks",
    "OneBit",
    "OpMismatch",
    "OpTimedOut",
    "PeerError",
    "PmeshError",
    "PowerSGD",
    "RandomK",
    "RankLost",
    "RemoteCall",
    "RemoteCallFailed",
    "RemoteObject",
    "RosterChanged",
    "Rpc",
    "RunError",
    "Shard",
    "Store",
    "TooManyCalls",
    "TopK",
    "UnsupportedArray",
    "UnsupportedCompression",
    "UsageError",
    "__version__",
    "connect",
]

_LATER = MappingProxyType(
    {
        "ANY": "pmesh.p2p.client.calls",
        **dict.fromkeys(
            ("Auto", "BF16", "FP16", "INT8", "OneBit", "PowerSGD", "RandomK", "TopK"),
            "pmesh.compression.schemes",
        ),
        "Checkpoints": "pmesh.client.checkpoints.checkpoints",
        "Compared": "pmesh.client.elastic.compare",
        "DeviceMesh": "pmesh.client.mesh",
        "Group": "pmesh.client.group",
        "Handle": "pmesh.client.calls.queue",
        "LastOp": "pmesh.client.collective.bucketed",
        **dict.fromkeys(("LocalUpdates", "Nesterov"), "pmesh.client.local_updates"),
        "Mesh": "pmesh.client.mesh",
        **dict.fromkeys(("RemoteCall", "RemoteObject", "Rpc"), "pmesh.rpc.client.calls"),
        "Shard": "pmesh.core.ops.shard",
        "Store": "pmesh.store.client",
        "connect": "pmesh.client.connect",
    }
)
"""Imported when first asked for: `pmesh status` needs no numpy, nor does who imports one module."""


warn_of_namesake(__path__[0])


def __dir__() -> list[str]:
    return [*__all__, "errors"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return installed_version()
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_LATER[name]), name)
    globals()[name] = found
    return found
