"""The tree of errors. Each class names whose fault it is, and its message says what to do.

PmeshError
├── UsageError        your fault: a call, an option or a file
├── PeerError         another machine's fault: its key, version or identity
├── NetworkError      a fault of the network, or of the permission to use it
├── RunError          no one's fault: machines and trainers come and go
└── ProtocolError     bytes that no pmesh would send; never reaches a user's script
"""

from typing import ClassVar


class PmeshError(Exception):
    """The base of all errors that pmesh raises on purpose."""

    fault: ClassVar[str] = "pmesh"
    """The party at fault: 'caller', 'peer', 'network', 'run' or 'pmesh'."""


class UsageError(PmeshError):
    """You must change a call, an option or a file."""

    fault = "caller"


class ConfigError(UsageError):
    """An option, environment variable or line of config.toml is invalid."""


class KeyFileError(UsageError):
    """Others can read a key file, or it does not hold a key."""


class AgentNotRunning(UsageError):
    """No agent listens at this home's socket."""


class AgentAlreadyRunning(UsageError):
    """An agent already runs for this home."""


class PortTaken(UsageError):
    """Another program listens on the port."""


class UnsupportedArray(UsageError, TypeError):
    """The collective does not support this value, dtype or reduction."""


class UnsupportedCompression(UsageError, ValueError):
    """A compression or one of its options does not exist, or does not support these values.

    It is also a ValueError, which Python raises for such options.
    """


class OpMismatch(UsageError):
    """Ranks called one op with a different kind, shape, dtype, reduction or compression."""


class JobRunning(UsageError):
    """The job already has its ranks; no trainer can enter while it runs."""


class MeshClosed(UsageError):
    """A mesh was called after its `close()`."""


class PeerError(PmeshError):
    """Another machine must change something."""

    fault = "peer"


class MeshKeyMismatch(PeerError):
    """The other side has a different mesh key."""


class ProtocolVersionMismatch(PeerError):
    """The other side speaks a different version of the protocol."""


class NodeKeyCopied(PeerError):
    """Two running machines have the same node key: a home directory was copied."""


class NetworkError(PmeshError):
    """The network failed, or the system does not permit its use."""

    fault = "network"


class PeerUnreachable(NetworkError):
    """A connection could not be made, or did not finish the handshake in time."""


class LocalNetworkDenied(NetworkError):
    """macOS does not let this program talk to the local network."""


class LaneBroken(NetworkError):
    """A data connection ended, or a record on it was forged or corrupted."""


class RunError(PmeshError):
    """No one's fault: machines and trainers come and go."""

    fault = "run"


class NotEnoughRanks(RunError):
    """Fewer trainers than required joined in time."""


class RankLost(RunError):
    """A rank of the job is gone."""


class RosterChanged(RunError):
    """A rank was lost in an op whose result depends on the participants, such as a gather (O4)."""


class GroupBroken(RunError):
    """A group lost a rank, or its job ended: make another group of the remaining ranks."""


class OpTimedOut(RunError, TimeoutError):
    """An op did not end within its timeout."""


class HistorySuperseded(RunError):
    """Another history of this job continues; this one has ended."""


class AgentStopped(RunError):
    """The local agent stopped while the trainer was connected."""


class ProtocolError(PmeshError):
    """Bytes that no pmesh would send; the only error that `_untrusted` functions raise."""

    fault = "peer"
