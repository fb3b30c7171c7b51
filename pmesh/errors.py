"""The tree of errors. Each class names whose fault it is, and its message says what to do.

PmeshError
├── UsageError        your fault: a call, an option or a file
├── PeerError         another machine's fault: its key, version or identity
├── NetworkError      a fault of the network, or of the permission to use it
├── RunError          no one's fault: machines and trainers come and go
└── ProtocolError     bytes that no pmesh would send; never reaches a user's script
"""

from typing import ClassVar

from pmesh.texts import printable


class PmeshError(Exception):
    """The base of all errors that pmesh raises on purpose.

    Catch it to catch all others.
    See docs/how-to/troubleshooting.md#not-for-scripts-to-catch.
    """

    fault: ClassVar[str] = "pmesh"
    """The party at fault: 'caller', 'peer', 'network', 'run' or 'pmesh'."""

    def __str__(self) -> str:
        """Return the message as one printable line: other machines may have written parts of it."""
        return printable(super().__str__())


class UsageError(PmeshError):
    """A call, an option or a file of yours needs a change.

    See the message.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """

    fault = "caller"


class ConfigError(UsageError):
    """An option, a variable or a line of `config.toml` is not valid.

    Change it; the message says where it is.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """


class KeyFileError(UsageError):
    """Others can read a key file, or it contains no key.

    Run the command in the message.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """


class AgentNotRunning(UsageError):
    """No agent listens at this home's socket.

    `pmesh up`; if the agent has another home, give the script that one, by `home=` or
    `PMESH_HOME`.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """


class AgentAlreadyRunning(UsageError):
    """This home already has an agent.

    Use that agent, stop it with `pmesh down`, or give another `--home`.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """


class PortTaken(UsageError):
    """Another program listens on the port.

    `pmesh up --listen HOST:PORT` with another port.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """


class UnsupportedArray(UsageError, TypeError):
    """The call does not take this value, dtype or reduction.

    Convert it to what the call takes, as with `numpy.array(x)`. Also a `TypeError`.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """


class UnsupportedCompression(UsageError, ValueError):
    """A compression, or an option of one, does not exist or does not apply to these values.

    The message says what is allowed. Also a `ValueError`.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """


class OpMismatch(UsageError):
    """The ranks made different calls as the same op: other shapes, or another order.

    The message has what differs. Use the same script on all machines.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """


class JobRunning(UsageError):
    """The job of this name runs and never calls `mesh.sync`, in which newcomers enter.

    Wait until it has ended, choose another name, or call `mesh.sync` at the top of its loop.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """


class MeshClosed(UsageError):
    """A call came after `close()`, or after the session had ended.

    Call `pmesh.connect()` again.
    See docs/how-to/troubleshooting.md#yours-to-change-usageerror.
    """


class PeerError(PmeshError):
    """Another machine must change something.

    See the message.
    See docs/how-to/troubleshooting.md#another-machines-peererror.
    """

    fault = "peer"


class MeshKeyMismatch(PeerError):
    """The other side holds another mesh key.

    `pmesh invite` on one; on the other `pmesh down`, then `pmesh join --replace --up` with
    the code.
    See docs/how-to/troubleshooting.md#another-machines-peererror.
    """


class ProtocolVersionMismatch(PeerError):
    """The other side speaks another version of the protocol.

    Install the same version of pmesh on both.
    See docs/how-to/troubleshooting.md#another-machines-peererror.
    """


class NodeKeyCopied(PeerError):
    """Two running machines have one node key: a home directory was copied.

    On the copy: `mv ~/.pmesh/node_key ~/.pmesh/node_key.bad`, then `pmesh up`.
    See docs/how-to/troubleshooting.md#another-machines-peererror.
    """


class MachineRemoved(PeerError):
    """A member has removed this machine, or the other one, from the mesh.

    `pmesh remove --undo NAME` on another machine lets it in again.
    See docs/how-to/troubleshooting.md#another-machines-peererror.
    """


class NetworkError(PmeshError):
    """The network failed, or the system does not permit its use.

    See the message.
    See docs/how-to/troubleshooting.md#the-networks-networkerror.
    """

    fault = "network"


class PeerUnreachable(NetworkError):
    """A connection could not be made, or did not complete the handshake in time.

    Check that the machine is awake and runs `pmesh up`, and check its firewall.
    See docs/how-to/troubleshooting.md#the-networks-networkerror.
    """


class LocalNetworkDenied(NetworkError):
    """macOS may be keeping this program from the local network.

    Allow it.
    See docs/how-to/troubleshooting.md#the-networks-networkerror.
    """


class LaneBroken(NetworkError):
    """A data connection ended, or a record on it was forged or corrupt.

    If it happens again, check the cable or the Wi-Fi.
    See docs/how-to/troubleshooting.md#the-networks-networkerror.
    """


class RunError(PmeshError):
    """Machines and trainers come and go.

    Raised itself if the state that `sync` received differs from the one sent: call `mesh.sync`.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """

    fault = "run"


class NotEnoughRanks(RunError):
    """Fewer trainers than required came in time; at `connect`, fewer than `wait_for`.

    Start the script on the machines that the message names, with the same `job` and `wait_for`,
    or wait longer. Also raised if an op waited too long for `min_ranks` or a quorum, or a
    newcomer for the others' `sync`.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """


class RankLost(RunError):
    """A rank of the job, which the message names, is lost.

    Continue: the job does. Only with `on_loss="raise"`, or if it was the root of a call or the
    other side of a message.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """


class RosterChanged(RunError):
    """A rank was lost in a call that gives each rank something of its own, as `gather`.

    Call again: `mesh.size` and `mesh.names` say which ranks are left.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """


class NonFiniteGradients(RunError):
    """Gradients are NaN or infinite, and `average_gradients` was told to watch for that.

    The message names the ranks. Leave out this step on all ranks, or let `on_nonfinite="skip"`
    leave out those ranks; look at their data.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        """Take the ranks whose gradients they are; none if only the sum is too large."""
        super().__init__(message)
        self.ranks = ranks


class GroupBroken(RunError):
    """A group has lost a rank, or its job has ended.

    Make another group of the remaining ranks.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """


class RemoteCallFailed(RunError):
    """A function that `mesh.rpc` called on another rank has raised an exception there.

    `kind`, `reason` and `remote_traceback` say which, and where.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """

    def __init__(
        self, message: str, *, kind: str = "", reason: str = "", remote_traceback: str = ""
    ) -> None:
        """Keep only what is printable: another machine has written it."""
        super().__init__(message)
        self.kind = printable(kind)
        """The class of the exception, such as `ValueError`."""
        self.reason = printable(reason)
        """Its message."""
        self.remote_traceback = "\n".join(map(printable, remote_traceback.split("\n")))
        """Its traceback on the other rank, in several lines."""
        if remote_traceback:
            self.add_note(self.remote_traceback)


class TooManyCalls(RunError):
    """A rank did not take a call of `mesh.rpc`, since as many wait there as it has room for.

    Wait for some of your calls and call again, or let it serve more by `mesh.rpc.serve`.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """


class OpTimedOut(RunError, TimeoutError):
    """An op did not complete within its timeout.

    The message names the ranks that did not call. Also a `TimeoutError`.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """


class HistorySuperseded(RunError):
    """The job continued without this rank: it was cut off, asleep or stopped for too long.

    `mesh.sync` brings it back; a script that calls it at the top of its loop gets no error, unless
    it has asked for it by `on_superseded="raise"`.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """


class AgentStopped(RunError):
    """The agent on this machine ended, or does not answer.

    Run the command in the message; the next `mesh.sync` returns to the job.
    See docs/how-to/troubleshooting.md#nobodys-runerror.
    """


class ProtocolError(PmeshError):
    """Bytes arrived that no pmesh sends; it never reaches a script.

    If it does, report it.
    See docs/how-to/troubleshooting.md#not-for-scripts-to-catch.
    """

    fault = "peer"
