"""Starts agents and trainers in 20 ms: forks of a process that has imported everything already.

A campaign kills and restarts a thousand of them; importing them anew would take 1.5 s of two cores
each time. What runs in the fork is the command itself, `pmesh up` or the training script. Linux.

    python -m tools.chaos.warm FD     in a host of the lab; FD is a socket to the campaign
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
from typing import Any, Literal, NoReturn

import msgspec

from tools.virtual_lan import Host

MAX_ORDER_BYTES = 64 * 1024
# What `pmesh up` imports only when it runs, and what the trainers are.
IMPORTED = ("pmesh.agent.run", "pmesh.cli.app", "tools.chaos.trainer", "tools.chaos.digits")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork shall become; its output goes to the descriptor that comes with the order."""

    kind: Literal["agent", "trainer"]
    arguments: tuple[str, ...]
    """Of `pmesh`; or the trainer's module and its options."""
    environment: dict[str, str]
    patch: str = ""
    """Source that runs first."""


class WarmStart:
    """A host's forking process, seen from the campaign."""

    def __init__(self, host: Host, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(30.0)
        with theirs:
            self._process = subprocess.Popen(
                host.command([sys.executable, "-m", "tools.chaos.warm", str(theirs.fileno())]),
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is the campaign's, which then ends us
            )

    def start(self, order: Order, output: int) -> int:
        """The pid of a new process that does this and writes to `output`."""
        socket.send_fds(self._socket, [msgspec.msgpack.encode(order)], [output])
        answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the warm start has died; its traceback is above")
        return int(answer)

    def close(self) -> None:
        """End it; what it has started is the lab's to end."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()
        self._process.wait()


def serve(orders: socket.socket) -> None:
    """Fork for each order, until the campaign has gone."""
    for module in IMPORTED:
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
            _become(msgspec.msgpack.decode(message, type=Order), outputs[0])
        os.close(outputs[0])
        orders.send(str(pid).encode())


def _reap(*_: Any) -> None:  # noqa: ANN401 - a signal handler's
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(order: Order, output: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # Anew: what they know of the warm process's own output, such as that it can seek, is wrong.
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115 - they are descriptors, and stay open
    os.environ.clear()
    os.environ.update(order.environment)
    code = 1
    try:
        exec(order.patch, {})  # noqa: S102 - the campaign's own source
        code = _run(order)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:  # noqa: BLE001 - the process ends here, and says why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(order: Order) -> int:
    if order.kind == "agent":
        sys.argv = ["pmesh", *order.arguments]
        importlib.import_module("pmesh.cli").main()
        return 0
    module, options = order.arguments
    sys.argv = [f"{module.rpartition('.')[2]}.py"]
    code: int = importlib.import_module(module).main(options)
    return code


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
