"""What `pmesh run --sync` costs a training that runs at the same time, and how fast it is.

Hosts of a virtual network train; then one of them sends a directory to all others, once with
`--sync` and once as plain bytes over TCP connections, which is what scp could do at best.

    sudo .venv/bin/python -m tools.sync_speed --megabytes 50 --mbit 200
"""

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cyclopts

from tools.lab.agents import await_status, inherited, new_key, status_of
from tools.lab.net import Host, NetLab

PATIENCE_S = 60.0
PORT = 7000
CONTROL_S = 5.0
TRAINER = """
import sys, time
import numpy as np, pmesh
with pmesh.connect(job="training", wait_for=int(sys.argv[1])) as mesh:
    values = np.ones(16384, np.float32)
    while True:
        mesh.all_reduce(values)
        print(time.monotonic(), flush=True)
"""
RECEIVER = f"""
import socket
with socket.create_server(("", {PORT})) as server:
    print("ready", flush=True)
    connection = server.accept()[0]
    with connection:
        while connection.recv(1 << 18): pass
        connection.sendall(b".")
"""


class Mesh:
    """Agents, one on each host, and a trainer on each."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self._hosts = hosts
        self.homes = [folder / f"mac-{host.number}" for host in hosts]
        key = new_key()
        self._environments = [
            inherited() | {"PMESH_HOME": str(home), "PMESH_KEY": key} for home in self.homes
        ]
        self.steps: list[float] = []
        for number, home in enumerate(self.homes):
            home.mkdir(mode=0o700)
            self.pmesh(number, "allow", "run", "--as-root")
            self.start(number, "-m", "pmesh.cli", "up", "--name", home.name)
        for home in self.homes:
            whole = await_status(home, self._is_whole, within_s=PATIENCE_S)
            if whole is None:
                raise RuntimeError(f"{home.name} has not found the others")
        for number in range(len(hosts)):
            trainer = self.start(number, "-c", TRAINER, str(len(hosts)))
            if number == 0:
                threading.Thread(target=self._count, args=[trainer], daemon=True).start()
        deadline = time.monotonic() + PATIENCE_S
        while len(self.steps) < 100:  # noqa: PLR2004 - it has begun
            if time.monotonic() > deadline:
                raise RuntimeError("the training has not begun")
            time.sleep(0.1)

    def _is_whole(self, status: dict[str, Any]) -> bool:
        return len(status["view"]["members"]) == len(self._hosts)

    def _count(self, trainer: subprocess.Popen[str]) -> None:
        for line in trainer.stdout or ():
            self.steps.append(float(line))

    def start(self, number: int, *words: str) -> subprocess.Popen[str]:
        return self._hosts[number].popen(
            [sys.executable, *words], env=self._environments[number], stdout=subprocess.PIPE
        )

    def pmesh(self, number: int, *words: str) -> str:
        command = self._hosts[number].command([sys.executable, "-m", "pmesh.cli", *words])
        environment = self._environments[number]
        done = subprocess.run(
            command, env=environment, check=True, text=True, stdout=subprocess.PIPE
        )
        return done.stdout

    def epochs(self) -> list[int]:
        return [status_of(home)["view"]["epoch"]["counter"] for home in self.homes]

    def rate(self, since: float) -> str:
        """Ops a second since then, and the longest pause between two."""
        steps = [step for step in self.steps if step >= since]
        pauses = [after - before for before, after in itertools.pairwise(steps)]
        rate = len(steps) / (time.monotonic() - since)
        return f"{rate:.0f} ops/s, the longest pause {max(pauses, default=0) * 1e3:.0f} ms"


def copy_plainly(hosts: Sequence[Host], data: bytes) -> None:
    """Send the bytes from the first host to all others at once, as one process."""
    receivers = [
        host.popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE) for host in hosts[1:]
    ]
    for receiver in receivers:
        next(iter(receiver.stdout or ()))  # it listens
    names = ",".join(host.ipv4 for host in hosts[1:])
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        hosts[0].run([sys.executable, "-m", "tools.sync_speed", "--send", file.name, "--to", names])


def send(path: str, host: str) -> None:
    with socket.create_connection((host, PORT)) as stream, Path(path).open("rb") as file:
        stream.sendfile(file)
        stream.shutdown(socket.SHUT_WR)
        stream.recv(1)


def measure(megabytes: int, mbit: float, count: int) -> None:
    data = os.urandom(megabytes * 1_000_000)
    with NetLab(count) as lab, tempfile.TemporaryDirectory(prefix="pmesh-") as folder:
        for host in lab.hosts:
            if mbit:
                lab.shape(host, bits_per_s=round(mbit * 1e6))
        project = Path(folder) / "project"
        project.mkdir()
        mesh = Mesh(lab.hosts, Path(folder))
        before = mesh.epochs()
        since = time.monotonic()
        time.sleep(CONTROL_S)
        print(f"training alone: {mesh.rate(since)}")
        for what in ("--sync", "--sync again, nothing changed", "--sync, one more file"):
            if what == "--sync":
                (project / "weights.bin").write_bytes(data)
            elif "more" in what:
                (project / "train.py").write_text("print(1)")
            since = time.monotonic()
            mesh.pmesh(0, "run", "--on", "all", "--sync", "--cwd", str(project), "--", "true")
            took_s = time.monotonic() - since
            print(f"{what}: {took_s:.1f} s; training meanwhile: {mesh.rate(since)}")
        since = time.monotonic()
        copy_plainly(lab.hosts, data)
        took_s = time.monotonic() - since
        print(f"the bytes plainly: {took_s:.1f} s; training meanwhile: {mesh.rate(since)}")
        changes = [after - first for first, after in zip(before, mesh.epochs(), strict=True)]
        print(f"view changes: {changes}")


def main(
    *, megabytes: int = 50, mbit: float = 200.0, hosts: int = 4, send_: str = "", to: str = ""
) -> None:
    """Print what was measured.

    Args:
        megabytes: The size of the directory.
        mbit: The speed of each line in Mbit/s; 0 for no limit.
        hosts: How many there are; the first sends to all others.
        send_: For itself: the file to send plainly.
        to: For itself: the addresses.
    """
    if not to:
        measure(megabytes, mbit, hosts)
        return
    threads = [threading.Thread(target=send, args=[send_, host]) for host in to.split(",")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    cyclopts.run(main)
