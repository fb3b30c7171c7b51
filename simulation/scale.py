"""What agreeing costs in large meshes: `python -m simulation.scale` prints a table.

Messages, bytes and delays are simulated, without a job; what a heartbeat and a plan cost the
processor is measured on this machine, because simulated time passes for messages only.
"""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import cyclopts

from pmesh.core.topology.graph import measure_costs
from pmesh.core.values import Seat, SignedName, View
from pmesh.core.views import agreement, leader
from pmesh.core.views.leader import ring_order
from pmesh.core.views.state import Facts, Peer
from pmesh.core.wire.channels import encode
from pmesh.core.wire.link import Hello
from pmesh.core.wire.views import Commit, Heartbeat, MeasuredEdge
from pmesh.ids import Epoch, JobName
from simulation.agents import HEARTBEAT_S, SimulatedAgent
from simulation.cluster import Cluster
from simulation.lane_messages import Retained, Token
from simulation.links import Message
from simulation.network import Conditions
from simulation.trainers import Habits
from simulation.wire import AnyMessage, decode_untrusted

LATENCY_S = 0.001  # at most, in a wired network at home
EDGE = MeasuredEdge(600, 1000)
MEASURED_S = 2.0
PATIENCE_S = 30.0
FORMED_AFTER_S = 3.0
LENGTH_BYTES = 4  # before each message on a link (`pmesh.core.wire.framing`)
REPEATS = 20  # of what is measured on this machine: the fastest counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The costs of a mesh of one size."""

    nodes: int
    messages_per_s: float
    """Sent by each node, at rest."""
    bytes_per_s: float
    heartbeat_s: float
    """What one heartbeat costs the processors: encoding, decoding and deciding."""
    agreed_s: float
    """From a member's end until all survivors have installed a view without it."""
    leader_agreed_s: float
    """The same, when the leader ends."""
    commit_bytes: int
    plan_s: float
    """What the ring's plan costs the processor, at the leader and at each who checks it."""

    @property
    def load(self) -> float:
        """The share of a core that a node spends on heartbeats."""
        return (self.nodes - 1) / HEARTBEAT_S * self.heartbeat_s


class _Meter:
    """Counts what all nodes send."""

    def __init__(self, cluster: Cluster) -> None:
        self.messages = 0
        self.total_bytes = 0
        self.commit_bytes = 0
        self.heartbeat: Heartbeat | None = None
        cluster.network.swallow = self._count

    def _count(self, _from: int, _to: int, _channel: str, message: Message) -> bool:
        assert not isinstance(message, Hello | Token | Retained)  # noqa: S101 - no job runs
        self.messages += 1
        self.total_bytes += LENGTH_BYTES + self._size(message)
        return False

    def _size(self, message: AnyMessage) -> int:
        size = len(encode(message))
        if isinstance(message, Commit):
            self.commit_bytes = max(self.commit_bytes, size)
        if isinstance(message, Heartbeat):
            self.heartbeat = message
        return size


def measure(nodes: int) -> Scale:
    """Simulate a mesh that rests, and then loses a member and its leader."""
    cluster = _resting_mesh(nodes)
    meter = _Meter(cluster)
    cluster.run_until(cluster.timeline.now + MEASURED_S)
    messages, sent_bytes = meter.messages, meter.total_bytes
    listener = cluster.agents[nodes - 1]
    assert meter.heartbeat is not None  # noqa: S101 - MEASURED_S are some heartbeats
    heartbeat_s, plan_s = _time_heartbeat(listener, meter.heartbeat), _time_plan(cluster)
    agreed_s = _lose(cluster, nodes // 2)
    leader_agreed_s = _lose(cluster, 0)
    return Scale(
        nodes=nodes,
        messages_per_s=messages / nodes / MEASURED_S,
        bytes_per_s=sent_bytes / nodes / MEASURED_S,
        heartbeat_s=heartbeat_s,
        agreed_s=agreed_s,
        leader_agreed_s=leader_agreed_s,
        commit_bytes=meter.commit_bytes,
        plan_s=plan_s,
    )


def _resting_mesh(nodes: int) -> Cluster:
    """All agents, linked, in one view; how they have come together is left out."""
    habits = Habits(job=JobName("none"), wait_for=1)
    cluster = Cluster(0, size=nodes, conditions=Conditions(latency_s=LATENCY_S), habits=habits)
    for row in cluster.edges:
        row.update(dict.fromkeys(row, EDGE))
    cluster.on_start = SimulatedAgent.dismiss
    for number in range(nodes):
        cluster.start(number)
    members = [agent.state.me for agent in cluster.agents.values()]
    epoch = Epoch(nodes + 1, *members[0])
    seats = [
        Seat(member, SignedName(f"node-{i}", bytes(64)), Epoch(i + 1, *members[0]), None)
        for i, member in enumerate(members)
    ]
    view = View(epoch, tuple(seats))
    heard = {member.incarnation: EDGE for member in members}
    beat = Heartbeat(epoch, epoch, False, False, False, heard)  # noqa: FBT003 - as it travels
    for agent in cluster.agents.values():
        others = [member for member in members if member != agent.state.me]
        agent.adopt(
            view, {member.node: Peer(member=member, heartbeat=beat, view=view) for member in others}
        )
    cluster.run_until(cluster.timeline.now + FORMED_AFTER_S)
    if not cluster.is_one_view():
        raise AssertionError(f"{nodes} agents do not stay in one view")
    return cluster


def _lose(cluster: Cluster, number: int) -> float:
    """How long the survivors take to agree on a view without a member whose process ends."""
    member, began = cluster.agents[number].state.me, cluster.timeline.now
    cluster.crash(number)
    _run_until(
        cluster,
        lambda: all(member not in a.state.view.members for a in cluster.agents.values()),
    )
    agreed_s = cluster.timeline.now - began
    _run_until(cluster, cluster.is_one_view)
    cluster.run_until(cluster.timeline.now + 1.0)
    return agreed_s


def _run_until(cluster: Cluster, condition: Callable[[], bool]) -> None:
    end = cluster.timeline.now + PATIENCE_S
    while not condition():
        if cluster.timeline.now > end:
            raise AssertionError(f"{cluster.size} agents do not agree within {PATIENCE_S} s")
        cluster.run_until(cluster.timeline.now + LATENCY_S)


def _time_heartbeat(agent: SimulatedAgent, heartbeat: Heartbeat) -> float:
    sender = agent.state.view.members[0]

    def receive() -> None:
        message = decode_untrusted(encode(heartbeat))
        assert isinstance(message, Heartbeat)  # noqa: S101 - it was encoded here
        agreement.receive(agent.state, sender, message, Facts(), now=agent.now)

    return _fastest(receive)


def _time_plan(cluster: Cluster) -> float:
    members = cluster.agents[0].state.view.members
    heard = {m: {o.incarnation: EDGE for o in members if o != m} for m in members}
    costs = measure_costs(members, heard)
    return _fastest(lambda: ring_order(members, costs), repeats=3)


def _fastest(what: Callable[[], object], repeats: int = REPEATS) -> float:
    durations: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        what()
        durations.append(time.perf_counter() - began)
    return min(durations)


def table(scales: list[Scale]) -> str:
    """The figures as Markdown."""
    head = [
        "nodes",
        "messages/s per node",
        "KiB/s per node",
        "one heartbeat, µs",
        "load of one core",
        "a member ends: agreed after, s",
        "the leader ends, s",
        "a commit, KiB",
        "planning the ring, s",
    ]
    rows = [_figures(row) for row in scales]
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figures(row: Scale) -> list[str]:
    return [
        f"{row.nodes}",
        f"{row.messages_per_s:.0f}",
        f"{row.bytes_per_s / 1024:.1f}",
        f"{row.heartbeat_s * 1e6:.0f}",
        f"{row.load:.1%}",
        f"{row.agreed_s:.3f}",
        f"{row.leader_agreed_s:.3f}",
        f"{row.commit_bytes / 1024:.1f}",
        f"{row.plan_s:.3f}",
    ]


def main(*nodes: int) -> None:
    """Print what meshes of these sizes cost.

    Args:
        nodes: how many each has; 8, 64 and 256 unless given.
    """
    with _plans_kept():
        scales = [measure(size) for size in nodes or (8, 64, 256)]
    sys.stdout.write(table(scales) + "\n")


@contextmanager
def _plans_kept() -> Generator[None]:
    """All members check the leader's plan, here in one process: once is enough."""
    leader.ring_order = lru_cache(maxsize=4)(ring_order)
    try:
        yield
    finally:
        leader.ring_order = ring_order


if __name__ == "__main__":
    app = cyclopts.App(help_format="plaintext")
    app.default(main)
    app()
