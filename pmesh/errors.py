"""The one tree of errors. Each says whose fault it is, and its message says what to do.

PmeshError
├── UsageError        yours: a call, an option or a file
├── PeerError         another machine's: its key, its version, its identity
├── NetworkError      the network's, or the system's permission to use it
├── RunError          nobody's: machines and trainers come and go
└── ProtocolError     bytes that no pmesh would send; never reaches a user's script
"""

from typing import ClassVar


class PmeshError(Exception):
    """Everything that pmesh raises on purpose."""

    fault: ClassVar[str] = "pmesh"
    """Whose fault: 'caller', 'peer', 'network', 'run' or 'pmesh'."""


class UsageError(PmeshError):
    """A call, an option or a file of yours needs a change."""

    fault = "caller"


class ConfigError(UsageError):
    """An option, environment variable or line of config.toml that can't be used."""


class KeyFileError(UsageError):
    """A key file that others can read, or that does not hold a key."""


class AgentNotRunning(UsageError):
    """No agent listens at this home's socket."""


class AgentAlreadyRunning(UsageError):
    """This home has an agent already."""


class PortTaken(UsageError):
    """Another program listens at the port."""


class UnsupportedArray(UsageError, TypeError):
    """A value, dtype or reduction that this collective has no meaning for."""


class UnsupportedCompression(UsageError, ValueError):
    """A compression, or an option of one, that does not exist, or has no meaning for these values.

    Also a ValueError, which is what Python raises for such options.
    """


class OpMismatch(UsageError):
    """Ranks called one op with different kind, shape, dtype, reduction or compression."""


class JobRunning(UsageError):
    """The job has its ranks already; nobody enters while it runs."""


class MeshClosed(UsageError):
    """A call on a mesh after its `close()`."""


class PeerError(PmeshError):
    """Another machine must change something."""

    fault = "peer"


class MeshKeyMismatch(PeerError):
    """The other side holds another mesh key."""


class ProtocolVersionMismatch(PeerError):
    """The other side speaks another version of the protocol."""


class NodeKeyCopied(PeerError):
    """Two live machines hold one node key: a home directory was copied."""


class NetworkError(PmeshError):
    """The network, or the system's permission to use it."""

    fault = "network"


class PeerUnreachable(NetworkError):
    """A connection could not be made, or did not get through the handshake in time."""


class LocalNetworkDenied(NetworkError):
    """macOS does not let this program talk to the local network."""


class LaneBroken(NetworkError):
    """A data connection ended, or a record on it was forged or garbled."""


class RunError(PmeshError):
    """Nobody's fault: what happens when machines and trainers come and go."""

    fault = "run"


class NotEnoughRanks(RunError):
    """Fewer trainers than asked for came in time."""


class RankLost(RunError):
    """A rank of the job is gone."""


class RosterChanged(RunError):
    """A rank was lost in an op whose result depends on who takes part, as a gather's does (O4)."""


class GroupBroken(RunError):
    """A group has lost a rank, or its job has ended: make another group of those who are left."""


class OpTimedOut(RunError, TimeoutError):
    """An op did not end within its time."""


class HistorySuperseded(RunError):
    """Another history of this job goes on; this one has ended."""


class AgentStopped(RunError):
    """The local agent went away while the trainer was connected."""


class ProtocolError(PmeshError):
    """Bytes that no pmesh would send; the one error of every `_untrusted` function."""

    fault = "peer"
