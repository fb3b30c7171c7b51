"""A fifth node joins four that train, and gets 500 MB of state over 1 Gbit/s.

It is productive when it has the others' state and computes its first step: from then on it does
what they do. Its first op ends a step and an op later, whatever the transfer; that is told too.
"""

import statistics
import sys
import time

from tools.chaos.cluster import CampaignError, Cluster
from tools.chaos.episodes import CLEAN_OPS, Run, Tally
from tools.chaos.oplog import clean_ops_s, find_violations, longest_gap_s

STATE_BYTES = 500_000_000
LINE_BITS_PER_S = 1_000_000_000
PAUSE_S = 0.2  # what a step computes
PRODUCTIVE = "until it computes its first step / raw"

_RECEIVE = """
import socket, time
with socket.create_server(("", 9)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    began, left = time.monotonic(), {nbytes}
    buffer = bytearray(1 << 20)
    while left:
        left -= connection.recv_into(buffer)
    connection.sendall(b"!")
    print(time.monotonic() - began, flush=True)
"""
_SEND = """
import socket
with socket.create_connection(("{address}", 9)) as connection:
    data = memoryview(bytes(1 << 20))
    left = {nbytes}
    while left:
        left -= connection.send(data[:left])
    connection.recv(1)
"""


def run_joins(run: Run) -> Tally:
    """Each time the raw transfer of the same bytes over the same lines, then the newcomer."""
    tally = Tally()
    raw: list[float] = []
    ready: list[float] = []
    still: list[float] = []
    options = run.options(state_bytes=STATE_BYTES, pause_s=PAUSE_S)
    with Cluster(5, options, logs=run.logs) as cluster:
        for host in cluster.lab.hosts:
            cluster.lab.shape(host, bits_per_s=LINE_BITS_PER_S)
        *old, newcomer = cluster.nodes
        raw += [raw_transfer_s(cluster) for _ in range(run.episodes)]  # the lines are idle now
        cluster.start(old)
        for _ in range(run.episodes):
            began = cluster.await_ops(CLEAN_OPS, old)
            lives = [node.life for node in old]
            tally.clean_s += clean_ops_s(lives, since=began, until=time.monotonic())
            cluster.start([newcomer])
            cluster.wait_for(lambda: newcomer.life.last is not None, "the newcomer's first op")
            last = newcomer.life.last
            said = {r.what: r.at for r in reversed(newcomer.life.others)}  # each first
            if last is None or not {"connecting", "entered"} <= said.keys():
                raise CampaignError("the newcomer has not said when it connected and entered")
            tally.recovery_s.append(last.done - said["connecting"])
            ready.append(said["entered"] - said["connecting"])
            done = [op.done for life in lives for op in life.ops.values()]
            still.append(longest_gap_s(done, since=said["connecting"], until=last.done))
            cluster.await_ops(1)
            ops = {
                node.name: sorted(node.life.ops.values(), key=lambda op: op.step)
                for node in cluster.nodes
            }
            tally.ops_checked += sum(map(len, ops.values()))
            tally.violations += find_violations(ops, survivors=[node.name for node in old])
            tally.violations += [f"{life.name}: {e.says}" for life in lives for e in life.errors(0)]
            newcomer.kill("agent", "trainer")
            cluster.await_ends(newcomer)
            cluster.forget_ops(before=began)
    tally.facts = {
        "raw transfer of the same bytes, s": statistics.median(raw),
        PRODUCTIVE: statistics.median(ready) / statistics.median(raw),
        "until its first op has ended / raw": statistics.median(tally.recovery_s)
        / statistics.median(raw),
        "the others stood still for, s": statistics.median(still),
    }
    return tally


def raw_transfer_s(cluster: Cluster) -> float:
    """How long the bytes take from the first host to the last by one plain TCP connection."""
    first, last = cluster.lab.hosts[0], cluster.lab.hosts[-1]
    receiving = last.popen([sys.executable, "-c", _RECEIVE.format(nbytes=STATE_BYTES)], stdout=-1)
    with receiving:
        if receiving.stdout is None or receiving.stdout.readline().strip() != "listening":
            raise CampaignError("the receiver of the raw transfer did not start")
        first.run([sys.executable, "-c", _SEND.format(address=last.ipv4, nbytes=STATE_BYTES)])
        return float(receiving.stdout.readline())
