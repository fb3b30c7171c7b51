"""The pictures of docs/how-to/watch-your-mesh.md: an hour of a mesh that is made up.

    $ python -m tools.dashboard_pictures docs/how-to

Needs Debian's package chromium, and Pillow, which matplotlib brings. The page and its server are
the real ones.
"""

import math
import random
import socket
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
from PIL import Image

from pmesh.agent.events import EVENTS_SCHEMA_VERSION, Event, EventKind, EventPage
from pmesh.agent.schema import Status
from pmesh.charts.rules.history import KEPT_SLOTS, SLOT_S
from pmesh.cli.dashboard.board import Board
from pmesh.cli.dashboard.server import DashboardServer
from tools.lab.chromium import Chromium

PICTURES: Final = (
    ("dashboard.png", 1100, False),
    ("dashboard-phone.png", 360, True),
)
NAMES: Final = ("studio", "mac-mini", "macbook", "linux-box")
COLORS: Final = 128  # so each file has some 60 KB
WAYS: Final = (("thunderbolt", 18600), ("thunderbolt", 17900), ("wired", 940), ("wired", 935))
OWN: Final = (52, 61, 88, 64)
SHARES: Final = (41, 24, 12, 23)
ZEROS: Final = ("door", "turned_away", "traffic")
LOST_AT_S, BACK_AT_S, BEGAN_AT_S = 1900.0, 2300.0, 250.0
STORY: Final[tuple[tuple[float, EventKind, str], ...]] = (
    (0.0, "agent started", "studio is up"),
    (9.0, "peer joined", "mac-mini joined"),
    (11.0, "peer joined", "macbook joined"),
    (14.0, "peer joined", "linux-box joined"),
    (BEGAN_AT_S, "job began", "job 'digits' begins with 4 ranks"),
    (LOST_AT_S, "rank lost", "job 'digits': rank 2 (macbook) is lost: its process was killed"),
    (BACK_AT_S, "rank entered", "job 'digits': rank 3 (macbook) enters, as one of 4"),
)


def name_of(n: int) -> str:
    return NAMES[n] if n < len(NAMES) else f"mac-{n}"


class Story:
    """A mesh whose time goes by as it is asked."""

    def __init__(self, machines: int = len(NAMES)) -> None:
        self.now = 0.0
        self._machines = range(machines)
        self._dice = random.Random(38)  # noqa: S311 - no secret
        self._told = 0

    def status(self) -> Status:
        places = [n for n in self._machines if n != 2 or not LOST_AT_S < self.now < BACK_AT_S]  # noqa: PLR2004 - macbook
        told = {
            "schema": 2,
            "version": "0.1.0",
            "protocol": 1,
            "pid": 1,
            "uptime_s": self.now,
            "loop_lag_ms": 1.0,
            "node": {"id": "0", "name": NAMES[0], "incarnation": "0", "addresses": []},
            "view": {
                "epoch": {"counter": 9, "leader": "0", "incarnation": "0"},
                "leader": "0",
                "members": [self._member(n) for n in self._machines],
                "edges": [
                    {
                        "sender": f"{n}",
                        "receiver": f"{(n + 1) % len(self._machines)}",
                        "rtt_ms": 0.2,
                        "mbit_s": WAYS[n % len(WAYS)][1],
                    }
                    for n in self._machines
                ],
            },
            "peers": [],
            "jobs": [] if self.now < BEGAN_AT_S else [self._job(places)],
            **{name: _zeros(Status, name) for name in ZEROS},
        }
        return msgspec.convert(told, Status)

    def _member(self, n: int) -> dict[str, Any]:
        rtt_ms = round(0.2 + 0.1 * n, 2)
        use = {
            "interface": "en5",
            "remote": "en0",
            "kind": WAYS[(n - 1) % len(WAYS)][0],
            "use": "in use",
        }
        return {
            "id": f"{n}",
            "name": name_of(n),
            "rank": n,
            "interface": "en5",
            "addresses": [],
            "cpu_percent": 31 + 14 * (n % 4),
            "memory_percent": 58 - 9 * (n % 4),
            "health": "healthy" if n else "self",
            "rtt_ms": rtt_ms if n else None,
            "paths": [{**use, "rtt_ms": rtt_ms}] if n else [],
        }

    def _job(self, places: list[int]) -> dict[str, Any]:
        trained_s, noise = self.now - BEGAN_AT_S, self._dice.random
        speed = 9.1 * len(places) / len(self._machines) + 0.5 * noise()
        loss = 0.11 + 2.2 * math.exp(-trained_s / 600)
        reports = {"loss": loss * (1 + 0.04 * noise()), "accuracy": 1 - loss / 2.6}
        ranks = [
            {
                "rank": rank,
                "trainer": n,
                "node": f"{n}",
                "name": name_of(n),
                "started": 9,
                "completed": 9,
                "step": int(9 * trained_s),
                "reports": reports,
                "own_percent": OWN[n % len(OWN)],
                "share_percent": SHARES[n % len(SHARES)],
            }
            for rank, n in enumerate(places)
        ]
        return {
            "name": "digits",
            "state": "running",
            "wait_for": None,
            "newcomers": [],
            "ranks": ranks,
            "step": int(9 * trained_s),
            "steps_per_s": speed,
        }

    def events(self) -> EventPage:
        new = [told for told in STORY[self._told :] if told[0] <= self.now]
        self._told += len(new)
        noon = datetime(2026, 11, 28, 12, tzinfo=UTC)
        events = tuple(
            Event(number=n, time=noon + timedelta(seconds=at), uptime_s=at, kind=kind, text=text)
            for n, (at, kind, text) in enumerate(new)
        )
        return page_of(events)


def page_of(events: tuple[Event, ...]) -> EventPage:
    """What the agent of the first machine says of its events."""
    schema = EVENTS_SCHEMA_VERSION
    return EventPage(schema=schema, node="0", name=NAMES[0], incarnation="0", next=0, events=events)


def _zeros(of: type[msgspec.Struct], name: str) -> dict[str, int]:
    (kind,) = (field.type for field in msgspec.structs.fields(of) if field.name == name)
    return {field.name: 0 for field in msgspec.structs.fields(kind)}


def main(folder: Path) -> None:
    story = Story()
    board = Board(story.status, story.events, lambda: story.now)
    for slot in range(KEPT_SLOTS):
        story.now = slot * SLOT_S
        board.refresh()
    with DashboardServer(socket.AF_INET, ("127.0.0.1", 0), board, None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, width, dark in PICTURES:
            with Chromium(width=width, dark=dark) as browser:
                browser.open(f"http://127.0.0.1:{server.port}/")
                browser.await_that("document.querySelector('.charts path')")
                height = browser.evaluate("document.documentElement.scrollHeight")
                browser.resize(height=height)
                browser.screenshot(folder / name)
            Image.open(folder / name).quantize(COLORS).save(folder / name, optimize=True)
        server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
