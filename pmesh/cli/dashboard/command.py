"""`pmesh dashboard`: asks the agent in the main thread, and serves the page in others."""

import errno
import secrets
import socket
import threading
import time
from pathlib import Path

from pmesh.agent.host_port import host_port_text, parse_host_port
from pmesh.agent.schema import decode_status
from pmesh.cli.dashboard.board import Board
from pmesh.cli.dashboard.server import DashboardServer, is_loopback
from pmesh.cli.event_reader import Reader
from pmesh.client.control import ask_status
from pmesh.errors import ConfigError, PortTaken
from pmesh.home_paths import home_directory
from pmesh.terminal.lines import say


def serve_dashboard(home: Path | None, listen: str, *, with_token: bool) -> int:
    """Serve until Ctrl-C, whether or not an agent runs.

    Raises:
        PortTaken: Another program listens there.
        ConfigError: `listen` is no HOST:PORT, or not of this machine, or open to others and
            without a token.
    """
    directory = home_directory(home)
    try:
        host, port = parse_host_port(listen)
    except ValueError as e:
        raise ConfigError(f"--listen: {e}") from e
    token = secrets.token_urlsafe(16) if with_token else None
    board = Board(
        lambda: decode_status(ask_status(directory)), Reader(directory).read, time.monotonic
    )
    with _listen(host, port, board, token) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        say(f"The mesh of {directory}: {link(host, server.port, token)}")
        try:
            board.watch()
        finally:
            server.shutdown()
    return 0


def _listen(host: str, port: int, board: Board, token: str | None) -> DashboardServer:
    try:
        family, *_, found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        address = str(found[0])
        if token is None and not is_loopback(address):
            raise ConfigError(
                f"others could read the page at {host_port_text(host, port)}; add --token, and it "
                "opens only by the link that is then printed"
            )
        return DashboardServer(family, (address, port), board, token)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} is taken: choose another one with --listen") from e
        raise ConfigError(f"can't listen at {host}: {e.strerror or e}") from e


def link(host: str, port: int, token: str | None) -> str:
    """Return the address of the page, as a browser takes it.

    >>> link("127.0.0.1", 9478, None), link("::1", 80, "x")
    ('http://127.0.0.1:9478/', 'http://[::1]:80/?token=x')
    """
    where = host_port_text(host or socket.gethostname(), port)
    return f"http://{where}/" + ("" if token is None else f"?token={token}")
