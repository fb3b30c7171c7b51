"""A board whose agent the test plays, and its server."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from pmesh.agent.events import EventPage
from pmesh.agent.schema import Status
from pmesh.cli.dashboard.board import Board
from pmesh.cli.dashboard.server import DashboardServer
from pmesh.errors import AgentNotRunning
from tests.worlds.fake_status_agent import SNAPSHOT, make_chronicle

JOB = msgspec.structs.replace(SNAPSHOT.jobs[0], step=3, steps_per_s=2.0)
GONE = "no agent listens; start one with 'pmesh up'"


class Script:
    """An agent that answers, or does not, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers = True
        self.status = msgspec.structs.replace(SNAPSHOT, jobs=(JOB,))
        self.events = make_chronicle()
        self._after = -1
        self.board = Board(self.ask, self.ask_events, lambda: self.now)

    def ask(self) -> Status:
        if not self.answers:
            raise AgentNotRunning(GONE)
        return self.status

    def ask_events(self) -> EventPage:
        page = self.events.since(self._after)
        self._after = page.next - 1
        return page

    def stream(self, *then: Callable[[], None]) -> list[dict[str, Any]]:
        """What a page is sent; `then` happens after each update, and the last ends the stream."""
        got = list[dict[str, Any]]()
        deeds = iter(then)

        def write(data: bytes) -> None:
            assert data.startswith(b"data: ")
            assert data.endswith(b"\n\n")
            assert data.count(b"\n") == 2
            got.append(json.loads(data[6:]))
            deed = next(deeds, None)
            if deed is None:
                raise BrokenPipeError
            deed()

        with pytest.raises(BrokenPipeError):
            self.board.stream(write)
        return got


@contextmanager
def serving(board: Board, token: str | None = None) -> Iterator[DashboardServer]:
    with DashboardServer(socket.AF_INET, ("127.0.0.1", 0), board, token) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
