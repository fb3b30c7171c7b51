"""Garbage, silence and floods at both doors of an agent, while a job trains on."""

import contextlib
import re
import resource
import secrets
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest

from pmesh.home_paths import socket_path
from tests.e2e.harness import Fleet, Running, StartedAgent

pytestmark = pytest.mark.slow

MOST_MORE_BYTES = 16 * 1024 * 1024  # for all who have not authenticated
CONNECTIONS = 1000
MOST_LINES = 20  # 6, and some of a machine that was busy; of one kind 30 a minute are let through
HUGE_FRAME = struct.pack("!I", 2**32 - 1)
# What a TLS client begins with, and never goes on: a record of 16 KiB with a ClientHello in it.
HALF_A_CLIENT_HELLO = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + bytes(8 * 1024)
UNKNOWN_LANE = b"PMLN\x01" + bytes(16)
GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    HUGE_FRAME + bytes(64),
    secrets.token_bytes(4096).replace(b"\x16", b"\x17"),
]

# Trains until a signal tells rank 0, which tells the others by an op.
TRAINER = """
import signal
import numpy as np
import pmesh

stop = []
signal.signal(signal.SIGUSR1, lambda *_: stop.append(True))
x = np.arange(50_000, dtype=np.float32)
with pmesh.connect(job="steady", wait_for=2) as mesh:
    done, total = False, 0
    while not done:
        total += mesh.all_reduce(x)[7]
        done = bool(mesh.all_reduce(np.array(bool(stop)), op="max"))
        if mesh.last_op.op % 100 == 1:
            print("at op", mesh.last_op.op, flush=True)
    print("sum per op", total / ((mesh.last_op.op + 1) / 2))
"""


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process holds the other ends of all connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * CONNECTIONS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Watched:
    """An agent whose memory and whose job's progress are looked at again and again."""

    def __init__(self, agent: StartedAgent, trainer: Running) -> None:
        self.agent = agent
        self.trainer = trainer
        """Of rank 0 or another: all of them take the same steps."""
        self._process = psutil.Process(agent.process.pid)
        self.most_more_bytes = 0
        self._before = self._process.memory_info().rss

    def look(self) -> None:
        more = self._process.memory_info().rss - self._before
        self.most_more_bytes = max(self.most_more_bytes, more)

    def flood(self, dial: Callable[[int], socket.socket], said: list[bytes]) -> None:
        """Connections that say these things in turn, all of them open at once."""
        with ExitStack() as stack:
            for number in range(CONNECTIONS):
                connection = stack.enter_context(dial(number))
                with contextlib.suppress(OSError):  # it has been closed already: so should it be
                    connection.sendall(said[number % len(said)])
                if number % 20 == 0:
                    self.look()
            self.agent.status()  # answered while all of them are open
            self.look()
            self._await_progress()
            self.look()

    def _await_progress(self) -> None:
        before = int(re.findall(r"at op (\d+)", self.trainer.output)[-1])
        while int(self.trainer.await_line(r"at op (\d+)")[1]) <= before:
            pass


ALONE = """
import numpy as np
import pmesh
with pmesh.connect(job="alone") as mesh:
    print("sum", mesh.all_reduce(np.ones(1000, np.float32))[0])
"""

GREEDY = """
import time
import pmesh
with pmesh.connect(job="greedy") as mesh:
    kept, count = [], 2**40
    while count > 2**18:
        try:
            kept.append(mesh.empty(count))
        except pmesh.UsageError as e:
            print(e)
            count //= 2
    print("has all", flush=True)
    time.sleep(60)
"""

SMALL_MACHINE = """
import psutil
total = psutil.virtual_memory()._replace(total=512 * 2**20)
psutil.virtual_memory = lambda: total
"""


def test_silent_programs_cost_an_agent_with_few_descriptors_nothing(fleet: Fleet) -> None:
    few = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
    agent = fleet.start_agent("mac-1", "--no-mdns", under=few)
    agent.await_status(lambda _: True)
    with ExitStack() as stack:
        for _ in range(300):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(0)
            with contextlib.suppress(BlockingIOError):  # as many wait as the system lets
                connection.connect(str(socket_path(agent.home)))
        fleet.start_trainer(agent, ALONE).await_line("sum 1.0")
        agent.status()
    assert agent.process.alive


def test_programs_that_want_all_memory_leave_some_to_others(fleet: Fleet) -> None:
    agent = fleet.start_agent("mac-1", "--no-mdns", patch=SMALL_MACHINE)
    agent.await_status(lambda _: True)
    process = psutil.Process(agent.process.pid)
    before = process.memory_info().rss
    for number in (1, 2):
        greedy = fleet.start_trainer(agent, GREEDY.replace("greedy", f"greedy {number}"))
        greedy.await_line("has all")
        assert "no shared memory" in greedy.output
    fleet.start_trainer(agent, ALONE).await_line("sum 1.0")
    assert process.memory_info().rss - before < 256 * 2**20  # half of it


@pytest.mark.usefixtures("many_files")
def test_strangers_take_little_memory_and_no_job_notices(fleet: Fleet) -> None:
    one, two = fleet.start_ring("mac-1", "mac-2")
    trainers = [fleet.start_trainer(agent, TRAINER) for agent in (one, two)]
    host, port = one.address.split(":")
    path = str(socket_path(one.home))

    def dial_tcp(number: int) -> socket.socket:
        # Linux has all of 127.0.0.0/8; elsewhere one address is all there is, and 8 its share.
        source = f"127.0.0.{2 + number % 100}" if sys.platform == "linux" else "127.0.0.1"
        return socket.create_connection((host, int(port)), source_address=(source, 0), timeout=10)

    def dial_unix(_: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        return connection

    for trainer in trainers:
        trainer.await_line("at op 401")  # its arenas and buffers are there
    watched = Watched(one, trainers[0])
    floods = {
        "tcp, silent": (dial_tcp, [b""]),
        "tcp, garbage": (dial_tcp, GARBAGE),
        "tcp, half a handshake": (dial_tcp, [HALF_A_CLIENT_HELLO, UNKNOWN_LANE]),
        "unix, silent": (dial_unix, [b""]),
        "unix, garbage": (dial_unix, [HUGE_FRAME, HUGE_FRAME + bytes(4096), b"\x00\x00\x00\x05x"]),
    }
    for name, (dial, said) in floods.items():
        watched.flood(dial, said)
        print(f"{name}: {watched.most_more_bytes / 2**20:.1f} MiB more so far")  # noqa: T201

    door = one.await_status(lambda status: status.door.pending == 0).door
    print(door)  # noqa: T201
    assert door.accepted >= 3 * CONNECTIONS
    assert door.garbage >= CONNECTIONS * 0.9
    turned_away = door.garbage + door.closed_early + door.dropped + door.refused + door.timed_out
    assert door.accepted == door.authenticated + turned_away  # each of them counted once
    assert watched.most_more_bytes <= MOST_MORE_BYTES
    trainers[0].send_signal(signal.SIGUSR1)
    trainers[1].send_signal(signal.SIGUSR1)
    for trainer in trainers:
        assert trainer.await_end().splitlines()[-1] == "sum per op 14.0"
    for agent in (one, two):
        assert len(agent.status().view.members) == 2
        lines = agent.process.output.splitlines()
        assert len(lines) <= MOST_LINES, "a line for each stranger is a flood"
