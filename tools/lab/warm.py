"""Programs that start in 20 ms, as forks of a process that has imported everything already.

A campaign kills and restarts a thousand of them; importing anew would take 1.5 s of two cores each
time. What runs in the fork is the program itself, `pmesh up` or the training script.

    python -m tools.lab.warm FD MODULE...     FD is a socket to the campaign
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

import msgspec

from tools.lab.net import LabHost

MAX_ORDER_BYTES = 64 * 1024


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork shall become; its output goes to the descriptor that comes with the order."""

    program: str
    """MODULE:FUNCTION; the function has no arguments, and may return an exit code."""
    arguments: tuple[str, ...]
    """In sys.argv, behind the program."""
    environment: dict[str, str]
    patch: str = ""
    """Source that runs first."""


class Warm:
    """A process that forks, seen from the campaign.

    Args:
        modules: What it imports.
        environment: Of itself, not of its forks.
        host: Where it runs, with all of its forks; None: on this machine.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], host: LabHost | None = None
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(120.0)  # until all is imported, on a busy machine
        with theirs:
            command = [sys.executable, "-m", "tools.lab.warm", str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                command if host is None else host.command(command),
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is the campaign's, which then ends us
            )

    @property
    def pid(self) -> int:
        """Its own; its forks have others."""
        return self._process.pid

    def start(self, order: ForkOrder) -> tuple[int, IO[str]]:
        """The pid of a new process that does this, and what it writes."""
        reading, writing = os.pipe()
        output = os.fdopen(reading, encoding="utf-8", errors="replace")
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(order)], [writing])
        finally:
            os.close(writing)
        answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the warm start has died; its traceback is above")
        return int(answer), output

    def close(self) -> None:
        """End it, but not its forks."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()
        self._process.wait()


def serve(orders: socket.socket, modules: Sequence[str]) -> None:
    """Fork for each order, until the campaign has gone."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that a fork's collector touches, and thereby copies, none of these pages
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        message, outputs, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            _become(msgspec.msgpack.decode(message, type=ForkOrder), outputs[0])
        os.close(outputs[0])
        orders.send(str(pid).encode())


def _reap(*_: Any) -> None:  # noqa: ANN401 - a signal handler's
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(order: ForkOrder, output: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # Anew: what they know of the warm process's own output, such as that it can seek, is wrong.
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115 - they are descriptors, and stay open
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [order.program, *order.arguments]
    module, _, function = order.program.partition(":")
    code: Any = 1
    try:
        exec(order.patch, {})  # noqa: S102 - the campaign's own source
        code = getattr(importlib.import_module(module), function)()
    except SystemExit as e:
        code = e.code
    except BaseException:  # noqa: BLE001 - the process ends here, and says why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
