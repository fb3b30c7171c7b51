"""What the line itself carries: a plain TCP stream on loopback, iperf3 between hosts of a lab."""

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

from tools.bench_peers.places import Place
from tools.bench_peers.stream import stream_bytes_per_s
from tools.bench_peers.systems import BenchError

IPERF_S = 2
ATTEMPTS = 20

Ceiling = Callable[[], float]
"""Measures once: bytes a second, of the stream's payload, in one direction."""


@contextlib.contextmanager
def ceiling_of(place: Place) -> Iterator[Ceiling]:
    """The one that fits the place."""
    if not place.hosts:
        yield stream_bytes_per_s
        return
    if shutil.which("iperf3") is None:
        raise BenchError("the line is measured by iperf3, which is missing: apt install iperf3")
    server = place.popen(1, ["iperf3", "-s"], stdout=subprocess.DEVNULL)
    try:
        yield lambda: iperf_bytes_per_s(place)
    finally:
        server.kill()
        server.wait()


def iperf_bytes_per_s(place: Place) -> float:
    """`iperf3 --bidir` between the first two hosts: what one direction gets, of both the mean."""
    command = ["iperf3", "-c", place.address(1), "-t", str(IPERF_S), "--bidir", "-J"]
    for _ in range(ATTEMPTS):  # its server may not listen yet, or still be at the last turn
        client = place.popen(0, command, stdout=subprocess.PIPE)
        output, _ = client.communicate(timeout=30.0)
        if client.returncode == 0:
            end = json.loads(output)["end"]
            both = (end["sum_received"], end["sum_received_bidir_reverse"])
            return float(sum(each["bits_per_second"] for each in both)) / 2 / 8
        time.sleep(0.1)
    raise BenchError(f"{' '.join(command)} failed: {output.strip()}")
