"""`pmesh up`: starts an agent in the foreground or the background."""

import functools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import trio

from pmesh.agent.config import Settings, as_environment, load_settings
from pmesh.agent.home import NODE_KEY_BYTES, hold_home, load_node_key, open_home, open_own_file
from pmesh.agent.limits import raise_open_files
from pmesh.agent.logs import set_up_logs
from pmesh.cli.keys import find_mesh_key
from pmesh.cli.terminal import announce, complain, dropping_lines, ending_signals, say
from pmesh.client.control import ask_status
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.errors import AgentNotRunning, AgentStopped
from pmesh.paths import home_directory, socket_path

START_TIMEOUT_S = 15.0  # imports on a slow, cold disk take 5 s
_POLL_INTERVAL_S = 0.05


def start_detached(
    command: Sequence[str], *, environment: Mapping[str, str], socket: Path, log: Path
) -> int:
    """Start the command in its own session, and return 0 when an agent answers at the socket.

    Its output is appended to the log. If it fails to start, print its output and return its exit
    code.

    Raises:
        AgentStopped: It neither answered nor ended, and was killed.
        ConfigError: The log can't be written, or is not this user's own.
    """
    descriptor = open_own_file(log, os.O_APPEND)
    with open(descriptor, "wb") as output:  # noqa: PTH123 - a descriptor has no path
        begin = os.fstat(descriptor).st_size
        process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = log.read_bytes()[begin:].decode(errors="replace")
            sys.stderr.write(said)
            if not said:  # on a full disk not even the reason can be written
                complain(f"the agent ended and could not log why in {log}; 'pmesh up' shows it")
            return process.returncode or 1  # an agent that ends with 0 has not started either
        if _answers(socket):
            process.returncode = 0  # Popen would warn that nobody waits for the process
            say(f"The agent is running: pid {process.pid}, log {log}")
            return 0
        time.sleep(_POLL_INTERVAL_S)
    process.kill()
    process.wait()
    raise AgentStopped(f"the agent did not start within {START_TIMEOUT_S:g} s; see {log}")


def _answers(socket: Path) -> bool:
    try:
        ask_status(socket, timeout_s=1.0)
    except (AgentNotRunning, AgentStopped):
        return False
    return True


LOG_NAME = "agent.log"


def bring_up(home: Path | None, flags: Mapping[str, object], *, detach: bool) -> int:
    """Run the agent, or start one in the background, and return the exit code."""
    directory = open_home(home_directory(home))
    settings = load_settings(
        directory, flags=flags, environment=os.environ, host_name=socket.gethostname()
    )
    return _start_in_background(settings) if detach else _run_here(settings)


def _run_here(settings: Settings) -> int:
    from pmesh.agent.run import run_agent  # noqa: PLC0415 - 0.3 s that other commands don't need

    complaint = raise_open_files()
    if complaint is not None:
        complain(complaint)
    log = dropping_lines(sys.stderr)
    set_up_logs(level=settings.log_level, as_json=settings.log_json, stream=log)
    with hold_home(settings.home):
        mesh_key, node_key = _keys(settings)
        return trio.run(
            run_until_signal, functools.partial(run_agent, settings, mesh_key, node_key, announce)
        )


def _start_in_background(settings: Settings) -> int:
    with hold_home(settings.home):  # if an agent runs already, fail here and not in a log
        _keys(settings)  # print a new mesh key here and not in a log
    others = {key: value for key, value in os.environ.items() if not key.startswith("PMESH_")}
    return start_detached(
        [sys.executable, "-m", "pmesh.cli", "up"],
        environment=others | as_environment(settings),
        socket=socket_path(settings.home),
        log=settings.home / LOG_NAME,
    )


def _keys(settings: Settings) -> tuple[MeshKey, NodeKey]:
    entropy = secrets.token_bytes(NODE_KEY_BYTES)
    return find_mesh_key(settings), load_node_key(settings.home, entropy=entropy)


async def run_until_signal(agent: Callable[[], Awaitable[None]]) -> int:
    """Run the agent until it ends, or cancel it at the first signal; return the exit code.

    The second signal meets the default handlers, so that it ends a process that hangs.
    """
    code = 0

    async def await_signal(task_status: trio.TaskStatus[None]) -> None:
        nonlocal code
        with trio.open_signal_receiver(*ending_signals()) as signals:
            task_status.started()
            number = await anext(aiter(signals))
        code = 128 + number if number == signal.SIGINT else 0
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(await_signal)
        await agent()
        nursery.cancel_scope.cancel()
    return code
