"""The rows of the table: what is done, how often, and what the result is measured against."""

import math
from collections.abc import Callable
from functools import partial

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
from tools.chaos.episodes import (
    WIFI_PATCH,
    AnyKill,
    Cut,
    Fault,
    FreezeAgent,
    Kill,
    run_faults,
    run_ranks,
    run_together,
)
from tools.chaos.goodput import GOODPUT, run_goodput
from tools.chaos.steady import (
    run_computing_trainers,
    run_losses,
    run_pauses,
    run_pegged,
    run_stopped_trainers,
    run_wrong_clocks,
)
from tools.lab.campaign import (
    Campaign,
    CampaignRun,
    Tally,
    after_clean,
    fact_at_least,
    fact_within,
    nothing_violated,
    within,
)
from tools.lab.measured import Measured, figures_of
from tools.lab.mesh import BOTH

SILENCE_S = 2.5
WIFI_SILENCE_S = 5.5
LEAST_GOODPUT = 0.88


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


KILLED = ("median ≤ clean + 60 ms, p95 ≤ clean + 300 ms", after_clean(0.060, 0.300))
NOTICED = (f"≤ {SILENCE_S} s", within(SILENCE_S))
NOTICED_BY_WIFI = (f"≤ {WIFI_SILENCE_S} s", within(WIFI_SILENCE_S))
CALM = ("nobody expelled, no op fails", nothing_violated)


def _of(fault: Fault, calls: str = "sum") -> Callable[[CampaignRun], Tally]:
    return partial(run_faults, fault=fault, calls=calls)


# fmt: off
CAMPAIGNS = (
    Campaign("kill-agent", "SIGKILL of an agent; its trainer comes back with the next agent",
             _of(Kill(parts=("agent",))), *KILLED, 100, 1),
    Campaign("kill-trainer", "SIGKILL of a trainer",
             _of(Kill(parts=("trainer",))), *KILLED, 100, 1),
    Campaign("kill-node", "SIGKILL of a whole node",
             _of(Kill(parts=BOTH)), *KILLED, 100, 2),
    Campaign("kill-leader", "SIGKILL of the leader's node",
             _of(Kill(parts=BOTH, whom="leader")), *KILLED, 100, 1),
    Campaign("kill-two", "SIGKILL of two nodes at once",
             _of(Kill(parts=BOTH, count=2)), *KILLED, 100),
    Campaign("kill-second",
             "SIGKILL of a node up to 80 ms after another: while the view that expels it is made",
             _of(Kill(parts=BOTH, count=2, apart_s=0.08)), *KILLED, 100),
    Campaign("cut", "link cut so that packets vanish", _of(Cut()), *NOTICED, 30),
    Campaign("cut-wifi", "the same, Wi-Fi preset",
             _of(Cut(patch=WIFI_PATCH)), *NOTICED_BY_WIFI, 30),
    Campaign("stop-agent", "SIGSTOP of an agent for good", _of(FreezeAgent()), *NOTICED, 30),
    Campaign("stop-agent-wifi", "the same, Wi-Fi preset",
             _of(FreezeAgent(patch=WIFI_PATCH)), *NOTICED_BY_WIFI, 30),
    Campaign("cable",
             "the cable in use of two pulled: its carrier is lost; put back some seconds later",
             partial(run_harm, harm=pull),
             "median ≤ clean + 300 ms; nobody expelled, no op fails", after_clean(0.3), 100),
    Campaign("vanish", "packets vanish in the network in use of two; the carrier stays",
             partial(run_harm, harm=vanish),
             "≤ 1 s; nobody expelled, no op fails", within(1.0), 100),
    Campaign("plug",
             "the better one of two cables plugged in, first for the first time: until it is used",
             run_plugs, "≤ 5 s; no op fails", within(5.0), 20),
    Campaign("flap", "the better one of two cables comes and goes every second, 60 times",
             run_flaps, "≥ 0.8 of the speed with that cable out; nobody expelled, no op fails",
             fact_at_least(FLAP_SHARE, 0.8), 60),
    Campaign("stop-trainer", "SIGSTOP of a trainer for good", run_stopped_trainers,
             f"told by name ≤ {SILENCE_S} s; go on after `straggler_after`",
             told_and_left_behind, 30),
    Campaign("compute", "a trainer that computes for three times `straggler_after`",
             run_computing_trainers, "waited for", nothing_violated, 3),
    Campaign("pause", "SIGSTOP of an agent, a trainer or both for 1 s", run_pauses, *CALM, 100, 1),
    Campaign("pegged", "all cores busy with other work for a minute", run_pegged, *CALM, 3),
    Campaign("torn", "torn ops: kills of agents, trainers and nodes", _of(AnyKill()),
             "0 torn ops in 1,000 kills",
             lambda measured: len(measured.recovery_s) >= 1000, 1000, 3),  # noqa: PLR2004 - the bar's
    Campaign("kill-collectives",
             "kills of any kind amid the other collectives, strategies, groups and messages",
             _of(AnyKill(), "collectives"),
             "each right at all survivors, or the same error", nothing_violated, 100, 3),
    Campaign("kill-compressed",
             "kills of any kind in the middle of compressed ops, all schemes in turn",
             _of(AnyKill(), "compressed"),
             "each right at all survivors, with the same bits", nothing_violated, 100, 3),
    Campaign("kill-ranks",
             "kills of any kind among agents that have 1, 2 and 3 trainers, in ops of any size",
             run_ranks, *KILLED, 300, 2),
    Campaign("kill-together", "SIGKILL of one or two of four trainers that one agent has",
             run_together, *KILLED, 100, 1),
    Campaign("restarts", "a node killed and restarted 20 times in one training run", run_restarts,
             "equal weights, loss within 2 %, nothing leaked",
             fact_within("difference of the losses, %", 2.0), 20, one_size=True),
    Campaign("churn",
             "starts and SIGKILLs every 0.5 to 2 s among 2 to 8 peers, for 20 minutes: the "
             "longest gap between ops, of each second", run_churn,
             f"never {LONGEST_GAP_S:g} s without a completed op",
             fact_within("longest time without a completed op, s", LONGEST_GAP_S), MINUTES),
    Campaign("goodput",
             "one of 8 nodes of unequal speed, which train by local updates, killed each minute",
             run_goodput,
             f"≥ {LEAST_GOODPUT} of the samples per second without kills; equal weights",
             fact_at_least(GOODPUT, LEAST_GOODPUT), 5),
    Campaign("join", "a node joins four with 500 MB of state over 1 Gbit/s", run_joins,
             "computes its first step ≤ 1.15 of the raw transfer; the others lose ≤ 1 op",
             fact_within(PRODUCTIVE, 1.15), 5),
    Campaign("partition", "partition 2 + 2, healed after 10 s, each `quorum` and `on_superseded`",
             run_partitions, f"as asked for; each side that may goes on ≤ {SILENCE_S} s",
             within(SILENCE_S), 3),
    Campaign("loss", "2 % of all packets lost in each direction for a minute", run_losses,
             "nobody expelled, no error", nothing_violated, 3),
    Campaign("cold-start", "cold start of 8 agents in random order", run_cold_starts,
             "one mesh ≤ 5 s after the last start, and it stays one", within(5.0), 30,
             one_size=True),
    Campaign("clocks", "wall clocks days apart that jump by a day each second, for a minute",
             run_wrong_clocks, "nothing changes", nothing_violated, 1),
    Campaign("bits", "a flipped bit in records and in what links carry", run_bit_flips,
             "all detected, never a wrong sum", nothing_violated, 100_000, 2_000, one_size=True),
)
# fmt: on
