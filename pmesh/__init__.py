"""pmesh turns the Macs and Linux boxes at home into one training cluster."""

from pmesh.client.calls import LastOp
from pmesh.client.mesh import Mesh, connect
from pmesh.errors import (
    AgentNotRunning,
    AgentStopped,
    HistorySuperseded,
    JobRunning,
    MeshClosed,
    NetworkError,
    NotEnoughRanks,
    OpMismatch,
    OpTimedOut,
    PeerError,
    PmeshError,
    RankLost,
    RunError,
    UnsupportedArray,
    UsageError,
)

__all__ = [
    "AgentNotRunning",
    "AgentStopped",
    "HistorySuperseded",
    "JobRunning",
    "LastOp",
    "Mesh",
    "MeshClosed",
    "NetworkError",
    "NotEnoughRanks",
    "OpMismatch",
    "OpTimedOut",
    "PeerError",
    "PmeshError",
    "RankLost",
    "RunError",
    "UnsupportedArray",
    "UsageError",
    "connect",
]
