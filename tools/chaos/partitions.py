"""Two and two, cut apart for ten seconds: who goes on, and what becomes of the others after."""

import time
from collections.abc import Sequence

from tools.chaos.cluster import Cluster, Node
from tools.chaos.episodes import CLEAN_OPS, Run, Tally
from tools.chaos.oplog import Op, clean_ops_s, find_violations

APART_S = 10.0
VARIANTS = [(quorum, then) for quorum in ("any", "majority") for then in ("raise", "sync")]


def run_partitions(run: Run) -> Tally:
    """Each combination of `quorum` and `on_superseded`, as many times as there are episodes."""
    random = run.random()
    tally = Tally()
    together: list[float] = []
    for quorum, then in VARIANTS:
        options = run.options(quorum=quorum, on_superseded=then)
        with Cluster(4, options, logs=run.logs) as cluster:
            cluster.start()
            for _ in range(run.episodes):
                nodes = random.sample(cluster.nodes, 4)
                together.append(_part_and_heal(cluster, tally, nodes[:2], nodes[2:]))
    tally.facts["slowest to train together again after the cut was mended, s"] = max(together)
    return tally


def _part_and_heal(
    cluster: Cluster, tally: Tally, one: Sequence[Node], other: Sequence[Node]
) -> float:
    options = cluster.options
    began = cluster.await_ops(CLEAN_OPS)
    lives = [node.life for node in cluster.nodes]
    tally.clean_s += clean_ops_s(lives, since=began, until=time.monotonic())
    at = time.monotonic()
    for node in one:
        cluster.lab.cut(node.host, *(far.host for far in other))
    time.sleep(APART_S)
    mended = time.monotonic()
    sides = {
        side: _ops_of(nodes, since=at, until=mended) for side, nodes in enumerate((one, other))
    }
    for node in one:
        cluster.lab.mend(node.host, *(far.host for far in other))
    heal_s = cluster.await_ops(1, timeout_s=30.0) and time.monotonic() - mended
    cluster.await_ops(CLEAN_OPS)
    parted = {node.name: node for node in cluster.nodes}
    went_on = _judge_sides(tally, sides, (one, other), at)
    what = f"quorum {options.quorum!r}, on_superseded {options.on_superseded!r}"
    if options.quorum == "any" and len(went_on) != 2:  # noqa: PLR2004 - both sides
        tally.violations.append(f"{what}: only {len(went_on)} of both sides went on")
    if options.quorum == "majority" and len(went_on) != 1:  # two and two: that of the most senior
        tally.violations.append(f"{what}: {len(went_on)} sides went on")
    told = {
        n for n, node in parted.items() if any(r.what == "superseded" for r in node.life.errors(at))
    }
    if options.on_superseded == "sync" and told:
        tally.violations.append(f"{what}: {', '.join(sorted(told))} got HistorySuperseded")
    if options.on_superseded == "raise" and told not in (
        {n.name for n in one},
        {n.name for n in other},
    ):
        tally.violations.append(f"{what}: HistorySuperseded at {sorted(told)}, not at one side")
    errors = [(n, r) for n, node in parted.items() for r in node.life.errors(at)]
    tally.violations += [f"{what}: {n}: {r.says}" for n, r in errors if r.what == "error"]
    _check_after(cluster, tally, since=mended)
    cluster.forget_ops(before=time.monotonic())
    return heal_s


def _ops_of(nodes: Sequence[Node], *, since: float, until: float) -> dict[str, list[Op]]:
    return {
        node.name: sorted(
            (op for op in list(node.life.ops.values()) if since <= op.done <= until),
            key=lambda op: op.step,
        )
        for node in nodes
    }


def _judge_sides(
    tally: Tally,
    sides: dict[int, dict[str, list[Op]]],
    nodes: tuple[Sequence[Node], Sequence[Node]],
    at: float,
) -> list[int]:
    """Which sides went on by themselves; their ops are checked, and when the first one was done."""
    went_on: list[int] = []
    for side, ops in sides.items():
        names = {node.name for node in nodes[side]}
        alone = {n: [op for op in done if set(op.names) == names] for n, done in ops.items()}
        tally.ops_checked += sum(map(len, ops.values()))
        tally.violations += find_violations(ops, survivors=ops if all(ops.values()) else ())
        if all(alone.values()):
            went_on.append(side)
            tally.recovery_s.append(max(done[0].done for done in alone.values()) - at)
    return went_on


def _check_after(cluster: Cluster, tally: Tally, *, since: float) -> None:
    everybody = {node.name for node in cluster.nodes}
    ops = {
        node.name: [
            op
            for op in sorted(node.life.ops.values(), key=lambda op: op.step)
            if op.called >= since and set(op.names) == everybody
        ]
        for node in cluster.nodes
    }
    tally.ops_checked += sum(map(len, ops.values()))
    tally.violations += find_violations(ops, survivors=ops)
