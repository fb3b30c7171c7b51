"""`pmesh bridge entrenar`: a trainer of the local agent whose gradients come from entrenar."""

import errno
import math
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

import trio

from pmesh.agent.host_port import host_port_text, parse_host_port
from pmesh.bridge.cli.serving import BridgeOptions, Job, serve
from pmesh.bridge.client import announce, mean_loss
from pmesh.bridge.rules import Layout
from pmesh.bridge.wire import MOST_FRAME_BYTES, Floats
from pmesh.client.connect import check_job, connect
from pmesh.client.control import ask_status
from pmesh.client.mesh import Mesh
from pmesh.errors import ConfigError, JobRunning, PortTaken
from pmesh.home_paths import home_directory
from pmesh.terminal.lines import complain, ending_signals, say
from pmesh.terminal.sizes import parse_size

T = TypeVar("T")


class MeshJob(Job):
    """A job of pmesh; its calls block, so each runs in a thread."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    async def begin(self) -> Layout | None:
        """Begin a step: return what the ranks average; None if no rank is left."""
        return await _in_a_thread(partial(announce, self._mesh, None))

    async def average(self, values: Floats, weight: float) -> Floats:
        """Average one part."""
        return await _in_a_thread(partial(self._mesh.average_gradients, values, weight))

    async def mean_loss(self, loss: float, rows: int) -> float:
        """Return the mean loss of all rows."""
        return await _in_a_thread(partial(mean_loss, self._mesh, loss, rows))


async def _in_a_thread(call: Callable[[], T]) -> T:
    """Run a call that blocks; if this is cancelled, nobody waits for the call any more."""
    return await trio.to_thread.run_sync(call, abandon_on_cancel=True)


def bridge_entrenar(
    home: Path | None,
    job: str,
    listen: str,
    *,
    workers: int,
    rows: int | None,
    wait_for: int,
    worker_timeout: float,
    timeout: float,
    max_frame: str,
) -> int:
    """Serve until the job or all workers have ended, or Ctrl-C; return the exit code.

    Raises:
        ConfigError: An option is not valid.
        PortTaken: Another program listens there.
        PmeshError: As for `pmesh.connect` and `serve`, or of the job.
    """
    directory = home_directory(home)
    try:
        host, port = parse_host_port(listen)
    except ValueError as e:
        raise ConfigError(f"--listen: {e}") from e
    options = _options(workers, rows, worker_timeout, timeout, max_frame)
    if wait_for < 2:  # noqa: PLR2004 - the bridge and a rank
        raise ConfigError(f"--wait-for counts the bridge, too: it is at least 2, not {wait_for}")
    check_job(job, wait_for)
    ask_status(directory)  # raises AgentNotRunning, before any worker comes
    meshes: list[Mesh] = []

    async def enter() -> Job:
        wanted = partial(connect, job, wait_for, timeout, directory)
        mesh = await _in_a_thread(wanted)
        meshes.append(mesh)
        if mesh.rank < 0:
            raise JobRunning(f"job {job!r} runs already; start the bridge before it begins")
        say(f"Job {job!r} begins with {mesh.size} ranks, of which this is rank {mesh.rank}.")
        return MeshJob(mesh)

    try:
        return trio.run(_serve_until_signal, host, port, enter, options)
    finally:
        for mesh in meshes:
            mesh.close()


def _options(
    workers: int, rows: int | None, worker_timeout: float, timeout: float, max_frame: str
) -> BridgeOptions:
    if workers < 1:
        raise ConfigError(f"--workers is at least 1, not {workers}")
    if rows is not None and rows < workers:
        raise ConfigError(f"--rows is at least the number of workers, {workers}, not {rows}")
    for name, seconds in (("worker-timeout", worker_timeout), ("timeout", timeout)):
        if not 0 < seconds < math.inf:
            raise ConfigError(f"--{name} is a number of seconds above 0, not {seconds:g}")
    most_frame = parse_size("--max-frame", max_frame, least=1024)
    if most_frame > MOST_FRAME_BYTES:
        raise ConfigError("--max-frame is less than 4GiB, which is all that a frame can have")
    return BridgeOptions(
        workers=workers, rows=rows, silence_s=worker_timeout, most_frame=most_frame, wait_s=timeout
    )


async def _serve_until_signal(
    host: str, port: int, enter: Callable[[], Awaitable[Job]], options: BridgeOptions
) -> int:
    listeners = await _listen(host, port)
    name, taken = listeners[0].socket.getsockname()[:2]
    say(f"Waits for {options.workers} workers of entrenar at {host_port_text(name, taken)}.")
    if not all(ip_address(each.socket.getsockname()[0]).is_loopback for each in listeners):
        complain("Whoever reaches this port can take part: it is neither encrypted nor has a key.")
    caught: list[int] = []

    async def await_signal(scope: trio.CancelScope) -> None:
        with trio.open_signal_receiver(*ending_signals()) as signals:
            async for number in signals:
                caught.append(number)
                scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(await_signal, nursery.cancel_scope)
        steps = await serve(listeners, enter, options)
        say(f"Ended after {steps} steps.")
        nursery.cancel_scope.cancel()
    if signal.SIGINT in caught:
        raise KeyboardInterrupt
    return 128 + caught[0] if caught else 0


async def _listen(host: str, port: int) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(port, host=host or None)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} is taken: choose another one with --listen") from e
        raise ConfigError(f"can't listen at {host}: {e.strerror or e}") from e
