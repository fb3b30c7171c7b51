"""Two hosts with several networks between them: what a lane over all of them brings.

The hosts are those of a network lab: Linux, root. Each turn reduces the same tensor some times;
`--cut N` pulls the first cable in the middle of every N-th op, and plugs it in again.

Run: sudo python -m tools.bench_paths 1000 1000        # Mbit/s of each network; 0: not shaped
"""

import json
import os
import signal
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Annotated, Any

import cyclopts
import numpy as np
import trio

from pmesh.core.wire.lanes import OfferLane
from pmesh.ids import Epoch, Incarnation, JobName, NodeId, TrainerId
from pmesh.net.lanes.lane import WAKE_UP_BYTES, Lane
from pmesh.net.lanes.multipath import Facts, MultipathLane
from pmesh.net.lanes.opening import offer_of_connection
from pmesh.net.lanes.ring import RingPosition, all_reduce
from tools.lab.commands import LabError
from tools.lab.mesh import ROOT
from tools.lab.net import NetLab, run_system
from tools.lab.program import Program

PORT = 5100
NAMES = ("a", "b")
PATH_0 = ({"10.77.0.1", "10.77.0.2"},) * 2  # the ends of the first network
app = cyclopts.App(help=__doc__, help_format="plaintext", version_flags=[])


def offer(sender: int) -> OfferLane:
    """The same at both hosts."""
    return OfferLane(
        lane=bytes(16),
        job=JobName("bench"),
        born=Epoch(1, NodeId(bytes(32)), Incarnation(1)),
        number=1,
        sender=TrainerId(sender),
        receiver=TrainerId(1 - sender),
        key=bytes([1, sender]) * 16,
        return_key=bytes([2, sender]) * 16,
        several=True,
    )


class Host:
    """One of the two, in its own process and namespace: rank 0 dials, rank 1 answers."""

    def __init__(self, rank: int, paths: int, networks: int, *, plain: bool) -> None:
        self.rank, self.paths, self.networks, self.plain = rank, paths, networks, plain
        self.lanes: list[Lane] = []

    def connect(self, path: int) -> list[socket.socket]:
        """A connection for the lane of either rank, over this path's network."""
        address = f"10.{77 + path % self.networks}.0.2"
        if self.rank == 0:
            return [self._dial(address) for _ in NAMES]
        with socket.create_server((address, PORT)) as listener:
            return [listener.accept()[0] for _ in NAMES]

    @staticmethod
    def _dial(host: str) -> socket.socket:
        while True:
            try:
                return socket.create_connection((host, PORT), timeout=5)
            except OSError:
                time.sleep(0.05)

    def open(self) -> RingPosition:
        for sender, sock in enumerate(self.connect(0)):
            made = offer(sender)
            lane = self._lane(sock, made, 0, plain=self.plain)
            if not self.plain:
                lane = MultipathLane(lane, Facts(), made)
            self.lanes.append(lane)
        for path in range(1, self.paths):
            self.add(path, path)
        to_next, from_previous = sorted(self.lanes, key=lambda lane: not lane.sending)
        return RingPosition(
            rank=self.rank, size=2, roster=1, to_next=to_next, from_previous=from_previous
        )

    def add(self, path: int, index: int) -> None:
        for sender, sock in enumerate(self.connect(path)):
            lane = self.lanes[sender]
            assert isinstance(lane, MultipathLane)  # noqa: S101 - so it was opened
            lane.join(self._lane(sock, offer(sender), index), index, Facts())

    def _lane(
        self, sock: socket.socket, made: OfferLane, index: int, *, plain: bool = False
    ) -> Lane:
        if not plain:
            made = offer_of_connection(made, index)
        sending = made.sender == self.rank
        return Lane(
            sock, made, sending=sending, peer=NAMES[1 - self.rank], wake_up_bytes=WAKE_UP_BYTES
        )

    async def run(self, nbytes: int, ops: int, cut_every: int) -> dict[str, Any]:
        ring = self.open()
        source = np.random.default_rng(self.rank).random(nbytes // 4, np.float32)
        result = np.empty_like(source)
        seconds, cpu = list[float](), time.process_time()
        sums = set[bytes]()
        async with trio.open_nursery() as nursery:
            for lane in self.lanes:
                if isinstance(lane, MultipathLane):
                    nursery.start_soon(lane.tend)
            for op in range(ops):
                cut = cut_every and op % cut_every == cut_every - 1
                await self._reduce(ring, 2 * op, source[:1], result[:1])  # a barrier
                async with trio.open_nursery() as one:
                    if cut:
                        one.start_soon(self._cut, statistics.median(seconds) / 2)
                    began = time.perf_counter()
                    await self._reduce(ring, 2 * op + 1, source, result)
                    seconds.append(time.perf_counter() - began)
                sums.add(result.tobytes()[:4096] + result.tobytes()[-4096:])
                if cut:
                    await self._reduce(ring, 2 * op, source[:1], result[:1])
                    if self.rank == 0:
                        set_cable("up")
                    self.add(0, self.paths + op)
            cpu = time.process_time() - cpu
            moved = sum(lane.bytes_sent + lane.bytes_received for lane in self.lanes)
            for lane in self.lanes:
                lane.close()
        if len(sums) > 1:
            raise LabError("ops of the same values have given different results")
        return {"seconds": seconds, "cpu_s_per_gb": cpu / (moved / 1e9)}

    async def _cut(self, after_s: float) -> None:
        """The cable is pulled; each end is told at once, as by netlink."""
        await trio.sleep(after_s)
        if self.rank == 0:
            set_cable("down")
        for lane in self.lanes:
            assert isinstance(lane, MultipathLane)  # noqa: S101 - so it was opened
            lane.drop(*PATH_0)

    @staticmethod
    async def _reduce(ring: RingPosition, op: int, source: Any, result: Any) -> None:  # noqa: ANN401 - arrays
        await all_reduce(
            ring,
            op=op,
            fingerprint=1,
            completed=op - 1,
            source=source.data.cast("B").toreadonly(),
            result=result.data.cast("B"),
            dtype="float32",
            reduction="sum",
        )


def set_cable(state: str) -> None:
    """Pull the cable of this host's first network, or plug it in."""
    run_system(["ip", "link", "set", "eth0", state])


@app.command
def host(  # noqa: PLR0917 - a program's own
    rank: int, paths: int, networks: int, nbytes: int, ops: int, cut: int, plain: int
) -> None:
    """One of the two hosts: started by the main program."""
    one = Host(rank, paths, networks, plain=bool(plain))
    print(json.dumps(trio.run(one.run, nbytes, ops, cut)))


@app.default
def main(
    *mbits: int,
    mib: int = 64,
    ops: int = 10,
    cut: int = 0,
    connections: int = 1,
    plain: Annotated[bool, cyclopts.Parameter(negative="")] = False,
) -> None:
    """Measure, and print a line.

    Args:
        mbits: The speed of each network, in Mbit/s; 0 for one that is not shaped.
        mib: What is reduced.
        ops: How often.
        cut: Pull the first cable in the middle of every so many ops.
        connections: Of a lane on each network.
        plain: The lane of one connection, over the first network.
    """
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # else the hosts would outlive us
    numbers = [connections * len(mbits), len(mbits), mib << 20, ops, cut, int(plain)]
    with NetLab(2, networks=len(mbits)) as lab, ExitStack() as stack:
        for network, mbit in enumerate(mbits):
            for host in lab.hosts if mbit else ():
                lab.shape(host, bits_per_s=mbit * 1_000_000, network=network)
        programs = [
            Program.start(
                host.name,
                [sys.executable, "-m", "tools.bench_paths", "host", *map(str, [rank, *numbers])],
                environment=os.environ | {"PYTHONPATH": str(ROOT)},
                host=host,
            )
            for rank, host in enumerate(lab.hosts)
        ]
        for program in programs:
            stack.enter_context(program).join(within_s=200.0)
        answers = [program.reports[-1] for program in programs]
    seconds = [max(both) for both in zip(*(a["seconds"] for a in answers), strict=True)]
    cuts = [s for i, s in enumerate(seconds) if cut and i % cut == cut - 1]
    clean = statistics.median(s for i, s in enumerate(seconds) if i and s not in cuts)
    cpu = statistics.mean(a["cpu_s_per_gb"] for a in answers)
    how = " plain" if plain else f", {connections} connections each" if connections > 1 else ""
    line = f"{'+'.join(map(str, mbits))} Mbit/s{how}: "
    line += f"{(mib << 20) / clean / 1e6:.1f} MB/s, {cpu:.2f} s of CPU a GB"
    if cuts:
        line += f"; clean {clean:.3f} s, cut in the middle {statistics.median(cuts):.3f} s"
        line += f" (worst {max(cuts):.3f} s of {len(cuts)})"
    print(line)


if __name__ == "__main__":
    app()
