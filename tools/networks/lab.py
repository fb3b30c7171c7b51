"""A lab whose network is slow, lossy or stalls, by a switch in user space: no netem is needed."""

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from tools.lab.net import LabHost, NetLab, run_system
from tools.lab.program import LabProgram

SOURCE = Path(__file__).with_name("switch.c")
_ECHO = """
import socket
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while data := connection.recv(1):
        connection.sendall(data)
"""
_PING = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])) as connection:
    for _ in range(25):
        began = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        print(time.monotonic() - began)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a network does to each frame, one way; the order is that of the switch's arguments."""

    delay_ms: float
    jitter_ms: float = 0
    """At most; frames between two hosts never overtake each other."""
    loss_ppm: int = 0
    mbit: float = 0
    """Of each host's line, in either direction, with a queue of 250 ms; 0: no limit."""
    stall_every_ms: float = 0
    """How often, on average, what goes to a host stands still."""
    stall_ms: float = 0


PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        "wired": Profile(delay_ms=0.1, mbit=1000),
        "wifi": Profile(
            delay_ms=1.5, jitter_ms=6, loss_ppm=2000, mbit=300, stall_every_ms=5000, stall_ms=300
        ),
        "crowded": Profile(
            delay_ms=2, jitter_ms=20, loss_ppm=10000, mbit=100, stall_every_ms=15000, stall_ms=1500
        ),
        "homes": Profile(delay_ms=20, jitter_ms=2, loss_ppm=100, mbit=100),
        "mobile": Profile(
            delay_ms=30, jitter_ms=30, loss_ppm=5000, mbit=30, stall_every_ms=20000, stall_ms=1000
        ),
        "far": Profile(delay_ms=75, jitter_ms=5, loss_ppm=1000, mbit=200),
        "orbit": Profile(delay_ms=300, jitter_ms=10, loss_ppm=100, mbit=50),
    }
)


class SlowLab(NetLab):
    """Hosts on such a network; they can be cut off, but not be shaped or unplugged."""

    def __init__(self, count: int, profile: Profile, *, seed: int = 1) -> None:
        super().__init__(count)
        self._profile = profile
        self._seed = seed
        self._running: LabProgram | None = None

    def _build(self) -> None:
        run_system(["ip", "netns", "add", self._switch])
        for host in self.hosts:
            run_system(["ip", "netns", "add", host.namespace])
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/switch"
            run_system(["cc", "-O2", "-o", program, str(SOURCE)])
            names = ",".join(host.namespace for host in self.hosts)
            numbers = [f"{number:g}" for number in (*astuple(self._profile), self._seed)]
            command = ["ip", "netns", "exec", self._switch, program, names, *numbers]
            self._running = LabProgram.start("switch", command, environment=os.environ, told=True)
            self._running.hear()  # it is ready
        for host in self.hosts:
            self._set_up(host)

    def _change_cuts(
        self,
        verb: Literal["add", "delete"],
        pairs: Sequence[tuple[LabHost, LabHost]],
        networks: Sequence[int],
    ) -> None:
        assert networks == [0]  # noqa: S101 - it has one
        assert self._running is not None  # noqa: S101 - it was built
        order = {"add": "cut", "delete": "mend"}[verb]
        lines = [f"{order} {one.number - 1} {other.number - 1}" for one, other in pairs]
        self._running.tell("\n".join(lines))

    def round_trip_s(self, one: LabHost, other: LabHost, *, timeout_s: float = 10.0) -> float:
        """Measure the median round trip of a byte by TCP; raises CalledProcessError if none."""
        echo = [sys.executable, "-c", _ECHO]
        with LabProgram.start("echo", echo, environment=os.environ, host=other) as program:
            program.hear()  # it listens
            ping = [sys.executable, "-c", _PING, other.ipv4, str(timeout_s)]
            return statistics.median(map(float, one.run(ping, timeout_s=60.0).split()))

    def close(self) -> None:
        super().close()
        if self._running is not None:
            self._running.end()  # it was killed with all that runs in the lab


def measure_round_trip_s(profile: str, *, seed: int) -> float:
    """Measure it between two hosts of a lab of their own."""
    with SlowLab(2, PROFILES[profile], seed=seed) as lab:
        return lab.round_trip_s(*lab.hosts)
