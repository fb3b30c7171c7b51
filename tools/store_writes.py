"""What very many writes to a job's store cost while somebody waits, and whether one can still join.

Three agents on this machine; a thread of rank 0 waits for a key all the time, two ranks write to
other keys, and at the end a newcomer enters. It prints, for each part of the writes, how long a
thousand took and what the largest agent holds, in the order of time: all should be the same.
"""

import time

import psutil

from tools.lab.mesh import LabMesh
from tools.lab.units import MIB

PARTS = 10
WRITERS = 32  # threads of each rank: a call waits for all copies, and the others go on meanwhile
RANK = """
import sys, threading
import pmesh
parts, writes, writers = map(int, sys.argv[1:])
with pmesh.connect(job="writes", wait_for=2) as mesh:
    mesh.sync({})
    me, store, step = mesh.rank, mesh.store, threading.Barrier(writers + 1)
    if me == 0:
        threading.Thread(target=store.get, args=("the end",)).start()
    def write(thread):
        for part in range(parts):
            step.wait()
            for n in range(writes // (2 * parts * writers)):
                store.set(f"{me}/{thread}/{n % 100}", b"%d" % n)
            step.wait()
    for thread in range(writers):
        threading.Thread(target=write, args=(thread,), daemon=True).start()
    for part in range(parts):
        mesh.barrier()
        step.wait(), step.wait()
        mesh.barrier()
        print(part, flush=True)
    while mesh.size < 3:
        mesh.sync({})
    mesh.barrier()
    if me == 0:
        store.set("the end", b"")
"""
NEWCOMER = """
import time
import pmesh
began = time.monotonic()
with pmesh.connect(job="writes", wait_for=2) as mesh:
    mesh.sync({})
    entered = time.monotonic() - began
    assert len(mesh.store.keys("0/")) > 0
    mesh.barrier()
    mesh.store.get("the end")
print(f"the newcomer entered after {entered:.2f} s", flush=True)
"""


def run(*, writes: int = 1_000_000) -> None:
    """What very many writes cost while somebody waits, and whether one can still join."""
    with LabMesh(3) as mesh:
        mesh.start_agents()
        mesh.await_view()
        agents = [psutil.Process(node.pid) for node in mesh.nodes]
        command = ("-c", RANK, *map(str, (PARTS, writes, WRITERS)))
        rank, _ = (mesh.start_program(node, *command) for node in mesh.nodes[:2])
        began, each = None, writes / PARTS
        for line in rank.follow():
            if not line.isdigit():
                print(line, flush=True)  # after each 10 s, that it waits
                continue
            now = time.monotonic()
            took = "" if began is None else f"{(now - began) * 1e6 / each:6.1f} ms a thousand, "
            most = max(agent.memory_info().rss for agent in agents) / MIB
            print(f"part {line}: {took}{most:.1f} MiB", flush=True)
            began = now
            if line == str(PARTS - 1):
                newcomer = mesh.start_program(mesh.nodes[2], "-c", NEWCOMER)
                print(*newcomer.follow(), sep="\n")
