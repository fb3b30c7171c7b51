"""Kills, cuts and partitions on networks as people have them: the episodes of tools.chaos."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import NamedTuple

from tools.chaos.campaigns import check_after
from tools.chaos.episodes import Cut, Fault, Kill, run_episodes
from tools.lab.campaign import CLEAN_OPS, CampaignRun, Tally
from tools.lab.cluster import LabCluster
from tools.lab.commands import LabError
from tools.lab.mesh import BOTH
from tools.lab.report import BarVerdict, at_most
from tools.networks.lab import PROFILES, SlowLab, measure_round_trip_s

HOSTS = 3
PATIENCE_S = 90.0  # what has not come then has hung


class Trouble(NamedTuple):
    """One fault and its bar."""

    what: str
    limit_s: float
    run: Callable[[LabCluster, int, Random], Tally]
    """Make so many episodes of it."""
    beyond_clean: bool = False
    """The bar is for the median over the median clean op; else for the longest time."""


def judge_faults(
    profile: str, run: CampaignRun, partitions_s: tuple[float, ...], *, timed: bool
) -> Iterator[BarVerdict]:
    """Yield how each fault on this network holds against its bar.

    Args:
        profile: The network.
        run: How often, and with what ops.
        partitions_s: How long each partition lasts.
        timed: False: only what goes wrong misses a bar.
    """
    trip_s = measure_round_trip_s(profile, seed=run.seed)
    for row in _rows(profile, trip_s, partitions_s):
        logs = None if run.logs is None else run.logs / f"{profile}, {row.what}"
        lab = SlowLab(HOSTS, PROFILES[profile], seed=run.seed)
        try:
            with LabCluster(HOSTS, run.options(HOSTS), logs=logs, lab=lab) as cluster:
                tally = row.run(cluster, run.episodes, run.random())
        except LabError as e:
            tally = Tally(violations=[str(e)])
        yield _judge(row, tally, timed=timed)


def _rows(profile: str, trip_s: float, partitions_s: tuple[float, ...]) -> Iterator[Trouble]:
    killed_s, cut_s = 4 * trip_s + 0.020, 2.5 if profile in {"wired", "wifi"} else 10.0
    for what, limit_s, fault in (
        ("a rank killed", killed_s, Kill(parts=("trainer",), patience_s=PATIENCE_S)),
        ("a host's agent and rank killed", killed_s, Kill(parts=BOTH, patience_s=PATIENCE_S)),
        ("a host's link cut", cut_s, Cut(patience_s=PATIENCE_S)),
    ):
        yield Trouble(
            what,
            limit_s,
            _episodes_of(fault),
            beyond_clean=isinstance(fault, Kill),
        )
    for apart_s in partitions_s:
        what = f"healed after a partition of {apart_s:g} s"
        yield Trouble(what, 10 * trip_s + 5.0, partial(run_partitions, apart_s=apart_s))


def _episodes_of(fault: Fault) -> Callable[[LabCluster, int, Random], Tally]:
    return lambda cluster, count, random: run_episodes(cluster, fault, count, random)


def run_partitions(cluster: LabCluster, count: int, random: Random, *, apart_s: float) -> Tally:
    """Cut a random host off and mend that so often; the time until all train together counts."""
    tally = Tally()
    cluster.start()
    for _ in range(count):
        began = tally.await_clean(cluster)
        victim = random.choice(cluster.nodes).host
        cluster.lab.cut(victim)
        time.sleep(apart_s)
        cluster.lab.mend(victim)
        mended = time.monotonic()
        cluster.await_ops(1, timeout_s=PATIENCE_S)
        tally.recovery_s.append(time.monotonic() - mended)
        cluster.await_ops(CLEAN_OPS)
        check_after(cluster, tally, since=mended)
        tally.note_errors(cluster.nodes, began)
        cluster.forget_ops(before=time.monotonic())
    return tally


def _judge(row: Trouble, tally: Tally, *, timed: bool) -> BarVerdict:
    what, value_s = f"{row.what}, longest", max(tally.recovery_s, default=math.inf)
    if row.beyond_clean and tally.clean_s and tally.recovery_s:
        clean_s = statistics.median(tally.clean_s)
        what = f"{row.what}, median beyond a clean op of {clean_s:.3f} s"
        value_s = statistics.median(tally.recovery_s) - clean_s
    limit_s = row.limit_s if timed else math.inf
    verdict = at_most(what, value_s, goal=limit_s, form="{:.3f} s")
    each = " ".join(f"{took_s:.3f}" for took_s in tally.recovery_s)
    verdict = replace(verdict, value=f"{verdict.value} [{each}]")
    if tally.violations:
        return replace(verdict, value="; ".join(tally.violations), outcome="MISSED")
    return verdict
