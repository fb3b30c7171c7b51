"""Eight agents started in any order: one mesh soon after the last, and it stays one."""

import time

from tools.chaos.cluster import Cluster, Node
from tools.chaos.episodes import Run, Tally

AGENTS = 8
APART_S = 1.0
"""Between two starts, at most."""
WATCHED_S = 3.0


def run_cold_starts(run: Run) -> Tally:
    """`pmesh up` on eight hosts, from nothing; the time is counted from the last start on."""
    random = run.random()
    tally = Tally()
    with Cluster(AGENTS, run.options(), logs=run.logs) as cluster:
        everybody = {node.name for node in cluster.nodes}
        for _ in range(run.episodes):
            for node in random.sample(cluster.nodes, AGENTS):
                cluster.start_cold_agent(node)
                at = time.monotonic()
                time.sleep(random.uniform(0.0, APART_S))
            cluster.wait_for(
                lambda: all(_ring(node) == everybody for node in cluster.nodes), "a ring of all"
            )
            agreed = time.monotonic()
            tally.recovery_s.append(agreed - at)
            time.sleep(WATCHED_S)
            views = {str(node.status().get("view", {}).get("epoch")) for node in cluster.nodes}
            if len(views) != 1:
                tally.violations.append(f"{len(views)} views {WATCHED_S:g} s later: {views}")
            tally.violations += [
                f"{node.name}, when all had met: {line}"
                for node in cluster.nodes
                if node.agent is not None
                for line in node.agent.printed(since=agreed)
                if " is gone" in line or line.startswith("alone")
            ]
            for node in cluster.nodes:
                node.kill("agent")
            cluster.await_ends(*cluster.nodes)
    return tally


def _ring(node: Node) -> set[str]:
    """Whom the agent's last line about the ring names."""
    lines = node.agent.printed() if node.agent is not None else []
    rings = [line for line in lines if line.startswith("ring: ")]
    if not rings:
        return set()
    ring = rings[-1].removeprefix("ring: ").partition(";")[0].replace(" (this machine)", "")
    return set(ring.split(" → "))
