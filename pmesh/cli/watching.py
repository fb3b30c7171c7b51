"""`pmesh status` and `pmesh down`: what the local agent is asked."""

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich.console import Console, RenderableType
from rich.live import Live

from pmesh.agent.status import decode_status
from pmesh.cli.report import render_status
from pmesh.cli.terminal import say
from pmesh.client.control import ask_status, stop_agent
from pmesh.client.home import home_directory, socket_path

WATCH_INTERVAL_S = 1.0
EXIT_TIMEOUT_S = 5.0


def show_status(home: Path | None, *, watch: bool, as_json: bool) -> int:
    """Print the agent's picture: once, or every second until Ctrl-C or the agent's end."""
    path = socket_path(home_directory(home))
    if as_json:
        _print_json(path, watch=watch)
        return 0
    console = Console(highlight=False)
    if not watch:
        console.print(render_status(decode_status(ask_status(path)), width=console.width))
    elif not console.is_terminal:  # where Live shows nothing before its end
        for picture in _pictures(path, console):
            console.print(picture)
    else:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            for picture in _pictures(path, console):
                live.update(picture, refresh=True)
    return 0


def _pictures(path: Path, console: Console) -> Iterator[RenderableType]:
    for beat in itertools.count():
        status = decode_status(ask_status(path))
        yield render_status(status, width=console.width, beat=beat)
        time.sleep(WATCH_INTERVAL_S)


def bring_down(home: Path | None) -> int:
    """Stop the agent, and return when its process has ended: its home is free then."""
    pid = stop_agent(socket_path(home_directory(home)))
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(EXIT_TIMEOUT_S)
    say(f"The agent has left the mesh (pid {pid}).")
    return 0


def _print_json(path: Path, *, watch: bool) -> None:
    while True:
        sys.stdout.write(ask_status(path).decode() + "\n")
        sys.stdout.flush()
        if not watch:
            return
        time.sleep(WATCH_INTERVAL_S)
