"""What `pmesh run --sync` costs a training that runs at the same time, and how fast it is.

Hosts of a virtual network train; then one of them sends a directory to all others, once with
`--sync` and once as plain bytes over TCP connections, which is what scp could do at best.
"""

import itertools
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tools.lab.call import words_for
from tools.lab.mesh import LabMesh, inherited
from tools.lab.net import LabHost, NetLab
from tools.lab.program import LabProgram, await_that

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


def rate(trainer: LabProgram, since: float) -> str:
    """Ops a second since then, and the longest pause between two."""
    steps = [float(line) for line in trainer.printed(since=since)]
    pauses = [after - before for before, after in itertools.pairwise(steps)]
    speed = len(steps) / (time.monotonic() - since)
    return f"{speed:.0f} ops/s, the longest pause {max(pauses, default=0) * 1e3:.0f} ms"


def start_training(mesh: LabMesh) -> LabProgram:
    """Agents that may run what others ask for, and a trainer at each; returns the first one."""
    for node in mesh.nodes:
        mesh.run_command(node, "allow", "run", "--as-root")
    mesh.start_agents()
    mesh.await_view()
    trainers = [mesh.start_program(n, "-c", TRAINER, str(len(mesh.nodes))) for n in mesh.nodes]
    begun = 100
    await_that(lambda: len(trainers[0].lines) >= begun, "the training", of=trainers)
    return trainers[0]


def copy_plainly(hosts: Sequence[LabHost], data: bytes) -> None:
    """Send the bytes from the first host to all others at once, as one process."""
    receivers = [
        LabProgram.start(
            f"receiver {host.number}",
            [sys.executable, "-c", RECEIVER],
            environment=inherited(),
            host=host,
        )
        for host in hosts[1:]
    ]
    for receiver in receivers:
        receiver.hear()  # it listens
    addresses = [host.ipv4 for host in hosts[1:]]
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        hosts[0].run([sys.executable, *words_for(send_to_all, file.name, addresses)])


def send_to_all(path: str, hosts: list[str]) -> None:
    """To each on a connection of its own, as fast as it goes."""
    threads = [threading.Thread(target=send, args=[path, host]) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send(path: str, host: str) -> None:
    with socket.create_connection((host, PORT)) as stream, Path(path).open("rb") as file:
        stream.sendfile(file)
        stream.shutdown(socket.SHUT_WR)
        stream.recv(1)


def run(*, megabytes: int = 50, mbit: float = 200.0, hosts: int = 4) -> None:
    """What `pmesh run --sync` costs a training that runs at the same time, and how fast it is.

    Args:
        megabytes: The size of the directory.
        mbit: The speed of each line in Mbit/s; 0 for no limit.
        hosts: How many there are; the first sends to all others.
    """
    data = os.urandom(megabytes * 1_000_000)
    lab = NetLab(hosts)
    with LabMesh(lab) as mesh, tempfile.TemporaryDirectory(prefix="pmesh-") as folder:
        for host in lab.hosts:
            if mbit:
                lab.shape(host, bits_per_s=round(mbit * 1e6))
        project = Path(folder) / "project"
        project.mkdir()
        trainer = start_training(mesh)
        before = [node.epoch for node in mesh.nodes]
        since = time.monotonic()
        time.sleep(CONTROL_S)
        print(f"training alone: {rate(trainer, since)}")
        for what in ("--sync", "--sync again, nothing changed", "--sync, one more file"):
            if what == "--sync":
                (project / "weights.bin").write_bytes(data)
            elif "more" in what:
                (project / "train.py").write_text("print(1)")
            since = time.monotonic()
            launch = ("run", "--on", "all", "--sync", "--cwd", str(project), "--", "true")
            mesh.run_command(mesh.nodes[0], *launch)
            took_s = time.monotonic() - since
            print(f"{what}: {took_s:.1f} s; training meanwhile: {rate(trainer, since)}")
        since = time.monotonic()
        copy_plainly(lab.hosts, data)
        took_s = time.monotonic() - since
        print(f"the bytes plainly: {took_s:.1f} s; training meanwhile: {rate(trainer, since)}")
        changes = [node.epoch - first for first, node in zip(before, mesh.nodes, strict=True)]
        print(f"view changes: {changes}")
