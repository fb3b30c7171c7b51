"""`pmesh up`: from options to a running agent, in the foreground or not."""

import functools
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import trio

from pmesh.agent.config import Settings, as_environment, load_settings
from pmesh.agent.home import hold_home, open_home
from pmesh.agent.key_files import NODE_KEY_BYTES, load_node_key
from pmesh.agent.limits import raise_open_files
from pmesh.agent.logs import set_up_logs
from pmesh.cli.detach import start_detached
from pmesh.cli.keys import find_mesh_key
from pmesh.cli.signals import ending_signals
from pmesh.cli.terminal import announce, complain, dropping_lines
from pmesh.client.home import home_directory, socket_path
from pmesh.core.identity import MeshKey, NodeKey

LOG_NAME = "agent.log"


def bring_up(home: Path | None, flags: Mapping[str, object], *, detach: bool) -> int:
    """Run the agent, or start one in the background; returns the exit code."""
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
    with hold_home(settings.home):  # refused here, not in a log, if an agent runs already
        _keys(settings)  # and a new mesh key is shown here
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
    """Run the agent until it ends, or cancel it at the first signal; returns the exit code.

    A second signal meets the default handlers again, so that it ends a process which hangs.
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
