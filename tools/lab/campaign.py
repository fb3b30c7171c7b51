"""A campaign: what is done and how often, what it has come to, and what that is held against."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from tools.lab.cluster import LabCluster, lives_of
from tools.lab.measured import Measured, figures_of
from tools.lab.mesh import Node
from tools.lab.oplog import SeenOp, TrainerOptions, clean_ops_s, find_violations

CLEAN_OPS = 3  # before each fault


@dataclass(slots=True)
class Tally:
    """What the episodes of one campaign have come to."""

    recovery_s: list[float] = field(default_factory=list[float])
    clean_s: list[float] = field(default_factory=list[float])
    in_flight: int = 0
    """Faults that struck when all had called the op and none had completed it."""
    ops_checked: int = 0
    hangs: int = 0
    violations: list[str] = field(default_factory=list[str])
    facts: dict[str, float] = field(default_factory=dict[str, float])
    """What else was measured, by name."""

    def check(self, ops: Mapping[str, Sequence[SeenOp]], survivors: Iterable[str] = ()) -> None:
        """Compare ops with each other: see `find_violations`."""
        self.ops_checked += sum(map(len, ops.values()))
        self.violations += find_violations(ops, survivors=survivors)

    def note_errors(self, nodes: Sequence[Node], since: float) -> None:
        """What the calls of these nodes' trainers have raised is a violation."""
        for life in lives_of(nodes):
            self.violations += [f"{life.name}: {e.says}" for e in life.errors(since)]

    def count(self, fact: str, more: float = 1) -> None:
        self.facts[fact] = self.facts.get(fact, 0) + more

    def await_clean(self, cluster: LabCluster, nodes: Sequence[Node] | None = None) -> float:
        """Until some undisturbed ops are done, which are measured; when that began."""
        began = cluster.await_ops(CLEAN_OPS, nodes)
        lives = lives_of(cluster.nodes if nodes is None else nodes)
        self.clean_s += clean_ops_s(lives, since=began, until=time.monotonic())
        return began


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRun:
    """How often, how large, with which dice: what the command line says."""

    episodes: int
    op_bytes: int
    seed: int
    logs: Path | None = None
    short: bool = False
    steps: int = 0
    """Of each training; 0: as many as usual."""
    words: tuple[str, ...] = ()
    """Further options of the program that trains."""

    def options(self, wait_for: int = 4, **more: Any) -> TrainerOptions:  # noqa: ANN401 - of Options
        return TrainerOptions(number=0, wait_for=wait_for, op_bytes=self.op_bytes, **more)

    def random(self) -> Random:
        """The dice: the same seed, the same faults, though not at the same instructions."""
        return Random(self.seed)  # noqa: S311 - repeats a run


Judgement: TypeAlias = Callable[[Measured], bool]


@dataclass(frozen=True, slots=True)
class Campaign:
    name: str
    what: str
    """The fault, as the page names it."""
    run: Callable[[CampaignRun], Tally]
    bar: str
    holds: Judgement
    """Whether the bar is met, if nothing was violated."""
    episodes: int
    """Unless told otherwise."""
    short_episodes: int = 0
    """In the short form for CI; 0: not part of it."""
    one_size: bool = False
    """The size of the ops does not matter to it."""


def after_clean(limit_s: float, p95_s: float = math.inf) -> Judgement:
    """The median, and the 95th percentile, at most so much longer than the median clean op."""

    def holds(measured: Measured) -> bool:
        clean, took = figures_of(measured.clean_s), figures_of(measured.recovery_s)
        if clean is None or took is None:
            return False
        return took.median <= clean.median + limit_s and took.p95 <= clean.median + p95_s

    return holds


def within(limit_s: float) -> Judgement:
    """Every time at most so long."""
    return lambda measured: 0 < max(measured.recovery_s, default=math.inf) <= limit_s


def fact_within(name: str, limit: float) -> Judgement:
    """A fact at most so much."""
    return lambda measured: measured.facts.get(name, math.inf) <= limit


def fact_at_least(name: str, limit: float) -> Judgement:
    """A fact at least so much."""
    return lambda measured: measured.facts.get(name, -math.inf) >= limit


def nothing_violated(measured: Measured) -> bool:
    """Something was checked; that nothing is wrong is asked of every row."""
    return measured.ops_checked > 0
