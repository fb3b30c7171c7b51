"""The rows of the table: what is done, how often, and what the result is measured against."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tools.chaos.bits import run_bit_flips
from tools.chaos.cables import FLAP_SHARE, pull, run_flaps, run_harm, run_plugs, vanish
from tools.chaos.campaigns import (
    LONGEST_GAP_S,
    MINUTES,
    PRODUCTIVE,
    run_churn,
    run_cold_starts,
    run_joins,
    run_partitions,
    run_restarts,
)
from tools.chaos.episodes import WIFI_PATCH, AnyKill, Cut, Kill, Run, StopAgent, Tally, run_faults
from tools.chaos.goodput import GOODPUT, run_goodput
from tools.chaos.results import Measured, figures_of
from tools.chaos.steady import (
    run_computing_trainers,
    run_losses,
    run_pauses,
    run_pegged,
    run_stopped_trainers,
    run_wrong_clocks,
)

Judgement: TypeAlias = Callable[[Measured], bool]

KILL_MEDIAN_S = 0.060
KILL_P95_S = 0.300
SILENCE_S = 2.5
WIFI_SILENCE_S = 5.5
CABLE_S = 0.3
VANISHED_S = 1.0
PLUGGED_S = 5.0
FLAPPING_SPEED = 0.8
LEAST_GOODPUT = 0.88


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    name: str
    what: str
    """The fault, as the page names it."""
    bar: str
    holds: Judgement
    """Whether the bar is met, if nothing was violated."""
    run: Callable[[Run], Tally]
    episodes: int
    """Unless told otherwise."""
    short_episodes: int = 0
    """In the short form for CI; 0: not part of it."""
    one_size: bool = False
    """The size of the ops does not matter to it."""


def within_kill_bar(measured: Measured) -> bool:
    """The median at most 60 ms and the 95th percentile 300 ms more than the median clean op."""
    clean, took = figures_of(measured.clean_s), figures_of(measured.recovery_s)
    if clean is None or took is None:
        return False
    return took.median <= clean.median + KILL_MEDIAN_S and took.p95 <= clean.median + KILL_P95_S


def after_clean(limit_s: float) -> Judgement:
    """The median at most so much longer than the median clean op."""

    def holds(measured: Measured) -> bool:
        clean, took = figures_of(measured.clean_s), figures_of(measured.recovery_s)
        return clean is not None and took is not None and took.median <= clean.median + limit_s

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


def told_and_left_behind(measured: Measured) -> bool:
    """All told within 2.5 s, and nobody went on before `straggler_after` or long after it."""
    facts, took = measured.facts, figures_of(measured.recovery_s)
    after_s = facts.get("straggler_after, s", math.inf)
    return (
        took is not None
        and facts.get("slowest to be told by name, s", math.inf) <= SILENCE_S
        and after_s <= facts["first to go on, s"]
        and took.maximum <= after_s + SILENCE_S
    )


_KILL_BAR = "median ≤ clean + 60 ms, p95 ≤ clean + 300 ms"
_killed = partial(Campaign, bar=_KILL_BAR, holds=within_kill_bar, episodes=100)


_noticed = partial(Campaign, bar=f"≤ {SILENCE_S} s", holds=within(SILENCE_S), episodes=30)
_noticed_by_wifi = partial(
    Campaign, bar=f"≤ {WIFI_SILENCE_S} s", holds=within(WIFI_SILENCE_S), episodes=30
)


def _faults(fault: Kill | AnyKill | Cut | StopAgent) -> Callable[[Run], Tally]:
    return partial(run_faults, fault=fault)


CAMPAIGNS = (
    _killed(
        name="kill-agent",
        what="SIGKILL of an agent; its trainer comes back with the next agent",
        run=_faults(Kill(parts=("agent",))),
        short_episodes=1,
    ),
    _killed(
        name="kill-trainer",
        what="SIGKILL of a trainer",
        run=_faults(Kill(parts=("trainer",))),
        short_episodes=1,
    ),
    _killed(
        name="kill-node",
        what="SIGKILL of a whole node",
        run=_faults(Kill(parts=("agent", "trainer"))),
        short_episodes=2,
    ),
    _killed(
        name="kill-leader",
        what="SIGKILL of the leader's node",
        run=_faults(Kill(parts=("agent", "trainer"), whom="leader")),
        short_episodes=1,
    ),
    _killed(
        name="kill-two",
        what="SIGKILL of two nodes at once",
        run=_faults(Kill(parts=("agent", "trainer"), count=2)),
    ),
    _killed(
        name="kill-second",
        what="SIGKILL of a node up to 80 ms after another: while the view that expels it is made",
        run=_faults(Kill(parts=("agent", "trainer"), count=2, apart_s=0.08)),
    ),
    _noticed(
        name="cut",
        what="link cut so that packets vanish",
        run=_faults(Cut()),
    ),
    _noticed_by_wifi(
        name="cut-wifi",
        what="the same, Wi-Fi preset",
        run=_faults(Cut(patch=WIFI_PATCH)),
    ),
    _noticed(
        name="stop-agent",
        what="SIGSTOP of an agent for good",
        run=_faults(StopAgent()),
    ),
    _noticed_by_wifi(
        name="stop-agent-wifi",
        what="the same, Wi-Fi preset",
        run=_faults(StopAgent(patch=WIFI_PATCH)),
    ),
    Campaign(
        name="cable",
        what="the cable in use of two pulled: its carrier is lost; put back some seconds later",
        bar=f"median ≤ clean + {CABLE_S * 1000:.0f} ms; nobody expelled, no op fails",
        holds=after_clean(CABLE_S),
        run=partial(run_harm, harm=pull),
        episodes=100,
    ),
    Campaign(
        name="vanish",
        what="packets vanish in the network in use of two; the carrier stays",
        bar=f"≤ {VANISHED_S:g} s; nobody expelled, no op fails",
        holds=within(VANISHED_S),
        run=partial(run_harm, harm=vanish),
        episodes=100,
    ),
    Campaign(
        name="plug",
        what="the better one of two cables plugged in, first for the first time: until it is used",
        bar=f"≤ {PLUGGED_S:g} s; no op fails",
        holds=within(PLUGGED_S),
        run=run_plugs,
        episodes=20,
    ),
    Campaign(
        name="flap",
        what="the better one of two cables comes and goes every second, 60 times",
        bar=f"≥ {FLAPPING_SPEED} of the speed with that cable out; nobody expelled, no op fails",
        holds=fact_at_least(FLAP_SHARE, FLAPPING_SPEED),
        run=run_flaps,
        episodes=60,
    ),
    Campaign(
        name="stop-trainer",
        what="SIGSTOP of a trainer for good",
        bar=f"told by name ≤ {SILENCE_S} s; go on after `straggler_after`",
        holds=told_and_left_behind,
        run=run_stopped_trainers,
        episodes=30,
    ),
    Campaign(
        name="compute",
        what="a trainer that computes for three times `straggler_after`",
        bar="waited for",
        holds=nothing_violated,
        run=run_computing_trainers,
        episodes=3,
    ),
    Campaign(
        name="pause",
        what="SIGSTOP of an agent, a trainer or both for 1 s",
        bar="nobody expelled, no op fails",
        holds=nothing_violated,
        run=run_pauses,
        episodes=100,
        short_episodes=1,
    ),
    Campaign(
        name="pegged",
        what="all cores busy with other work for a minute",
        bar="nobody expelled, no op fails",
        holds=nothing_violated,
        run=run_pegged,
        episodes=3,
    ),
    _killed(
        name="torn",
        what="torn ops: kills of agents, trainers and nodes",
        bar="0 torn ops in 1,000 kills",
        holds=lambda measured: len(measured.recovery_s) >= 1000,  # noqa: PLR2004 - the bar's
        run=_faults(AnyKill()),
        episodes=1000,
        short_episodes=3,
    ),
    Campaign(
        name="kill-collectives",
        what="kills of any kind amid the other collectives, strategies, groups and messages",
        bar="each right at all survivors, or the same error",
        holds=nothing_violated,
        run=partial(run_faults, fault=AnyKill(), calls="collectives"),
        episodes=100,
        short_episodes=3,
    ),
    Campaign(
        name="kill-compressed",
        what="kills of any kind in the middle of compressed ops, all schemes in turn",
        bar="each right at all survivors, with the same bits",
        holds=nothing_violated,
        run=partial(run_faults, fault=AnyKill(), calls="compressed"),
        episodes=100,
        short_episodes=3,
    ),
    Campaign(
        name="restarts",
        what="a node killed and restarted 20 times in one training run",
        bar="equal weights, loss within 2 %, nothing leaked",
        holds=fact_within("difference of the losses, %", 2.0),
        run=run_restarts,
        episodes=20,
        one_size=True,
    ),
    Campaign(
        name="churn",
        what="starts and SIGKILLs every 0.5 to 2 s among 2 to 8 peers, for 20 minutes: the "
        "longest gap between ops, of each second",
        bar=f"never {LONGEST_GAP_S:g} s without a completed op",
        holds=fact_within("longest time without a completed op, s", LONGEST_GAP_S),
        run=run_churn,
        episodes=MINUTES,
    ),
    Campaign(
        name="goodput",
        what="one of 8 nodes of unequal speed, which train by local updates, killed each minute",
        bar=f"≥ {LEAST_GOODPUT} of the samples per second without kills; equal weights",
        holds=fact_at_least(GOODPUT, LEAST_GOODPUT),
        run=run_goodput,
        episodes=5,
    ),
    Campaign(
        name="join",
        what="a node joins four with 500 MB of state over 1 Gbit/s",
        bar="computes its first step ≤ 1.15 of the raw transfer; the others lose ≤ 1 op",
        holds=fact_within(PRODUCTIVE, 1.15),
        run=run_joins,
        episodes=5,
    ),
    Campaign(
        name="partition",
        what="partition 2 + 2, healed after 10 s, each `quorum` and `on_superseded`",
        bar=f"as asked for; each side that may goes on ≤ {SILENCE_S} s",
        holds=within(SILENCE_S),
        run=run_partitions,
        episodes=3,
    ),
    Campaign(
        name="loss",
        what="2 % of all packets lost in each direction for a minute",
        bar="nobody expelled, no error",
        holds=nothing_violated,
        run=run_losses,
        episodes=3,
    ),
    Campaign(
        name="cold-start",
        what="cold start of 8 agents in random order",
        bar="one mesh ≤ 5 s after the last start, and it stays one",
        holds=within(5.0),
        run=run_cold_starts,
        episodes=30,
        one_size=True,
    ),
    Campaign(
        name="clocks",
        what="wall clocks days apart that jump by a day each second, for a minute",
        bar="nothing changes",
        holds=nothing_violated,
        run=run_wrong_clocks,
        episodes=1,
    ),
    Campaign(
        name="bits",
        what="a flipped bit in records and in what links carry",
        bar="all detected, never a wrong sum",
        holds=nothing_violated,
        run=run_bit_flips,
        episodes=100_000,
        short_episodes=2_000,
        one_size=True,
    ),
)


def find_campaign(name: str) -> Campaign:
    """The row of this name; raises KeyError."""
    return {campaign.name: campaign for campaign in CAMPAIGNS}[name]


def is_met(measured: Measured) -> bool:
    return not measured.violations and find_campaign(measured.fault).holds(measured)
