"""Serves the page and its updates by HTTP, with Python's own server: one thread a connection.

It sends three files and a stream of server-sent events, to a few browsers. That needs no framework,
and what it loads costs 4 MB; prometheus-client serves `pmesh metrics` by the same classes.
"""

import hmac
import ipaddress
import socket
import socketserver
import threading
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final, cast
from urllib.parse import parse_qs, urlsplit

from pmesh.cli.dashboard.board import Board

MOST_CONNECTIONS: Final = 32  # each has a thread; a browser keeps one open for each page
SILENCE_S: Final = 10.0  # of a browser that sends its request, or that takes no more data

PAGE: Final = "page.html"
FILES: Final[Mapping[str, str]] = MappingProxyType(
    {PAGE: "text/html", "page.css": "text/css", "page.js": "text/javascript"}
)
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing is loaded from elsewhere, no text becomes markup, and no other page frames this one."""
HEADERS: Final = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),  # the address may have a token
    ("Cache-Control", "no-store"),
)


def why_refused(host: str, query: str, token: str | None) -> str | None:
    """Say why a request gets no answer; None if it gets one.

    Args:
        host: Its header Host. Without a token it must be a name of this machine alone. Else a page
            of a stranger, whose name leads here for a moment (DNS rebinding), could read all.
        query: Of its address.
        token: What the query must have; None on loopback.
    """
    if token is not None:
        shown = parse_qs(query).get("token", [""])[0]
        same = hmac.compare_digest(shown.encode(), token.encode())  # in constant time
        return None if same else "Open the link that 'pmesh dashboard' has printed."
    with suppress(ValueError):  # it is no name of a host
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or is_loopback(name):
            return None
    return "Without --token, this page opens as http://localhost only."


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches this address; no name of a machine counts."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


class DashboardServer(socketserver.ThreadingTCPServer):
    """Listens from its construction on; `serve_forever` answers.

    Raises OSError if it can't listen there.
    """

    allow_reuse_address = True
    daemon_threads = True  # a browser that holds a connection open does not hold up the end
    block_on_close = False

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        board: Board,
        token: str | None,
    ) -> None:
        self.address_family = family
        self.board = board
        self.token = token
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the library
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - likewise
        try:
            with suppress(OSError):  # the browser has gone, or is silent
                self.finish_request(request, client_address)
        finally:
            self.shutdown_request(request)
            self._room.release()


class _Handler(BaseHTTPRequestHandler):
    timeout = SILENCE_S

    @property
    def _of(self) -> DashboardServer:
        return cast("DashboardServer", self.server)

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, b"This is no address.\n")
            return
        refused = why_refused(self.headers.get("Host", ""), url.query, self._of.token)
        name = url.path.removeprefix("/") or PAGE
        if refused is not None and (name == PAGE or name not in FILES):
            self._answer(HTTPStatus.FORBIDDEN, f"{refused}\n".encode())
        elif name == "updates":
            self._stream()
        elif name in FILES:
            data = files("pmesh.cli.dashboard").joinpath(name).read_bytes()
            self._answer(HTTPStatus.OK, data, FILES[name])
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"There is nothing here but the page: /\n")

    def _answer(self, code: HTTPStatus, data: bytes, kind: str = "text/plain") -> None:
        self._begin(code, kind, ("Content-Length", str(len(data))))
        self.wfile.write(data)

    def _begin(self, code: HTTPStatus, kind: str, *more: tuple[str, str]) -> None:
        self.send_response(code)
        for name, value in (("Content-Type", f"{kind}; charset=utf-8"), *more, *HEADERS):
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
        self._begin(HTTPStatus.OK, "text/event-stream")
        self._of.board.stream(self.wfile.write)

    def version_string(self) -> str:
        return "pmesh"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - likewise
        """Log nothing: an address may have the token."""
