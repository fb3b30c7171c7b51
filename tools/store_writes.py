"""What very many writes to a job's store cost while somebody waits, and whether one can still join.

Three agents on this machine; a thread of rank 0 waits for a key all the time, two ranks write to
other keys, and at the end a newcomer enters. It prints, for each part of the writes, how long a
thousand took and what the largest agent holds, in the order of time: all should be the same.

    .venv/bin/python -m tools.store_writes --writes 1000000
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import cyclopts
import psutil

from tools.demo import NAMES, Demo
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


def most_memory(agents: list[subprocess.Popen[str]]) -> float:
    """MiB of the largest agent."""
    return max(psutil.Process(agent.pid).memory_info().rss for agent in agents) / MIB


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None  # noqa: S101 - it was started with a pipe
    return map(str.rstrip, process.stdout)


def main(*, writes: int = 1_000_000) -> None:
    """Measure."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="writes-"))
        demo = stack.enter_context(Demo(Path(folder) / "homes"))
        agents = demo.start_agents(multicast=False)
        if not demo.all_meet(60.0):
            sys.exit("the agents did not come together")
        numbers = map(str, (PARTS, writes, WRITERS))
        command = ["-c", RANK, *numbers]
        ranks = [demo.start(command, name=n, output=subprocess.PIPE) for n in NAMES[:2]]
        began, each = None, writes / PARTS
        for line in lines_of(ranks[0]):
            if not line.isdigit():
                print(line, flush=True)  # after each 10 s, that it waits
                continue
            now = time.monotonic()
            took = "" if began is None else f"{(now - began) * 1e6 / each:6.1f} ms a thousand, "
            print(f"part {line}: {took}{most_memory(agents):.1f} MiB", flush=True)
            began = now
            if line == str(PARTS - 1):
                newcomer = demo.start(["-c", NEWCOMER], name=NAMES[2], output=subprocess.PIPE)
                print(*lines_of(newcomer), sep="\n")


if __name__ == "__main__":
    cyclopts.run(main)
