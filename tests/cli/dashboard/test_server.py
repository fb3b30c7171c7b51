"""Who gets the page, and what goes with it."""

import http.client
import json
import re
import socket
import threading
from contextlib import closing
from importlib.resources import files
from typing import Any

import pytest

from pmesh.cli import dashboard
from pmesh.cli.dashboard import server as module
from pmesh.cli.dashboard.server import FILES, HEADERS, DashboardServer, is_loopback, why_refused
from tests.cli.dashboard.boards import Script, serving
from tests.worlds.faults import Faults

TOKEN = "a-token"  # noqa: S105 - of a test


@pytest.fixture
def script() -> Script:
    made = Script()
    made.board.refresh()
    return made


def ask(
    server: DashboardServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers


@pytest.mark.parametrize(("name", "kind"), FILES.items())
def test_the_three_files_come_with_a_policy_that_lets_nothing_in_from_elsewhere(
    script: Script, name: str, kind: str
) -> None:
    with serving(script.board) as server:
        status, text, headers = ask(server, f"/{name}")
        assert (status, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
        assert text == files(dashboard).joinpath(name).read_text("utf-8")
        assert ask(server, "/")[1] == files(dashboard).joinpath("page.html").read_text("utf-8")
    for header, value in HEADERS:
        assert headers[header] == value
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "Python" not in headers["Server"]


@pytest.mark.parametrize("name", FILES)
def test_the_files_name_no_other_host_and_make_no_markup_of_texts(name: str) -> None:
    text = files(dashboard).joinpath(name).read_text("utf-8")
    elsewhere = set(re.findall(r"(?:https?:)?//[\w.]+[^\s\"']*", text))
    assert elsewhere <= {"http://www.w3.org/2000/svg"}
    makes_markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|Function\("
    assert not re.search(makes_markup, text)
    assert not re.search(
        r"""\son\w+=|style=["']|<style|<script>""", text
    )  # the policy forbids them


def test_updates_come_as_server_sent_events_until_the_browser_goes(script: Script) -> None:
    with serving(script.board) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", "/updates")
        response = connection.getresponse()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert next_update(response)["whole"] is True
        script.answers = False
        script.board.refresh()
        assert "no agent listens" in next_update(response)["gone"]
        response.close()
        connection.close()
        threads = [each for each in threading.enumerate() if "process_request" in each.name]
        for _ in range(1000):  # a write meets the reset of the connection after one that did not
            script.board.refresh()
            if not any(thread.is_alive() for thread in threads):
                break
            for thread in threads:
                thread.join(0.02)
        assert not any(thread.is_alive() for thread in threads)


def next_update(response: http.client.HTTPResponse) -> dict[str, Any]:
    line = response.readline()
    assert response.readline() == b"\n"
    update: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return update


@pytest.mark.parametrize("path", ["/", "/updates", "/page.html", "/nothing"])
@pytest.mark.parametrize("query", ["", "?token=", "?token=other", "?token=a-toke%C3%A9", "?=&&"])
def test_without_the_token_nothing_is_told(script: Script, path: str, query: str) -> None:
    with serving(script.board, TOKEN) as server:
        status, text, _ = ask(server, path + query)
        assert (status, text) == (403, "Open the link that 'pmesh dashboard' has printed.\n")


def test_with_the_token_the_page_opens_by_any_name_of_the_machine(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(script.board, TOKEN) as server:
        assert ask(server, f"/?token={TOKEN}", Host="studio.local")[0] == 200
        assert ask(server, "/page.js", Host="studio.local")[0] == 200  # it tells nothing
    assert capsys.readouterr() == ("", "")  # no log has the token


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1:80", "[::1]:9", "127.9.9.9"]
)
def test_on_loopback_this_machine_gets_in(host: str) -> None:
    assert why_refused(host, "", None) is None


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:9478", "localhost.evil.example", "10.0.0.1", "[", "[x]"],
)
def test_a_name_that_leads_to_loopback_for_a_moment_gets_nothing(script: Script, host: str) -> None:
    with serving(script.board) as server:
        status, text, _ = ask(server, "/updates", Host=host)
        assert status == 403
        assert text == "Without --token, this page opens as http://localhost only.\n"


@pytest.mark.parametrize(
    "path", ["/../picture.py", "/picture.py", "/%2e%2e/", "//x/page.html", "/a/b"]
)
def test_nothing_else_is_served(script: Script, path: str) -> None:
    with serving(script.board) as server:
        assert ask(server, path)[0] in {403, 404}


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"GET http://[/ HTTP/1.0\r\n\r\n", b"HTTP/1.0 400 "),
        (b"POST / HTTP/1.0\r\n\r\n", b"HTTP/1.0 501 "),
        (b"\x16\x03\x01 \r\n\r\n", b"<!DOCTYPE HTML>"),  # as of TLS
    ],
)
def test_what_is_no_request_gets_an_error_and_no_line_in_a_log(
    script: Script, request_: bytes, answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        serving(script.board) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw,
    ):
        raw.sendall(request_)
        assert raw.recv(4096).startswith(answer)
    assert capsys.readouterr() == ("", "")


def test_beyond_so_many_connections_the_next_one_is_closed(script: Script, faults: Faults) -> None:
    faults.limit(module, "MOST_CONNECTIONS", 1)
    with serving(script.board) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as first:
            first.sendall(b"GET / HTTP/1.0\r\n")  # not all of it
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as second:
                assert second.recv(1) == b""
            first.sendall(b"Host: localhost\r\n\r\n")
            assert first.recv(4096).startswith(b"HTTP/1.0 200")
            while first.recv(4096):
                pass
        for thread in threading.enumerate():
            if "process_request" in thread.name:
                thread.join()
        assert ask(server, "/")[0] == 200


@pytest.mark.parametrize(
    ("address", "whose"),
    [
        ("127.0.0.1", "ours"),
        ("::1", "ours"),
        ("0.0.0.0", "all"),  # noqa: S104 - none is bound
        ("::", "all"),
        ("10.0.0.1", "all"),
    ],
)
def test_loopback_is_told_from_the_rest(address: str, whose: str) -> None:
    assert is_loopback(address) is (whose == "ours")
