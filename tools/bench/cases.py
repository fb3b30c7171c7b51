"""What is measured: the table of the cases, and their bars."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tools.bench.compressed import UNCOMPRESSED, WAYS
from tools.bench.results import CaseResult, Layout, cpu_s_of, seconds_of, wire_bytes_of
from tools.lab.report import BarVerdict, at_least, at_most
from tools.lab.units import KIB, MIB, size_text

MEGABIT = 10**6
GRADIENT_ARRAYS = 200
GRADIENT_BYTES = 100_000_000  # 25 M values
SOAK_BYTES = 16 * MIB
SOAK_OPS = 1000
BUSY_BYTES = 256 * MIB
SIDE = 5000  # a matrix of 25 M values, 100 MB
WIRE_SIDE = 2048  # eight hosts share the memory of one machine
LEAST_MEMORY_BYTES = 200 * MIB
MOST_GROWTH_BYTES_PER_OP = 4 * KIB  # of the agent's and the trainer's heap; one page of memory
AUTO_MARGIN = 1.10
LOSS_MARGIN = 0.01
CABLES_SHARE, FASTEST_SHARE, CHAIN_SHARE, MIXED_SHARE = 0.9, 0.97, 0.9, 0.95
DRAWN = (25, 50, 100, 200)
"""In Mbit/s, the speeds between two hosts of a mixed network, of which each pair draws one."""
FASTEST = "iperf3 on the fastest line, MB/s"
CONTROL_SHARE = "control traffic, share of the link"
LAG_P99 = "loop lag p99, ms"
PSS = "PSS beyond the caller's arrays, MiB"
GROWTH = "growth, KiB for each op"

PMESH, ORDINARY, GLOO, MLX = "pmesh", "ordinary", "gloo", "mlx"
"""pmesh's series: with the arrays that its users should take for large ops, and with any others."""

Kind = Literal["peers", "gradients", "memory", "lag", "compressed", "train"]
COMPRESSION: tuple[Kind, ...] = ("compressed", "train")
Network = Literal["plain", "cables", "chain", "mixed"]
"""One switch; a switch for each cable of a host; a chain of three, whose ends can't reach each
other; another speed between any two hosts, by the number of the round."""
Bars = tuple[tuple[str, float], ...]
"""Of schemes, by name."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured together, in one start of the systems."""

    name: str
    what: str
    ranks: int
    kind: Kind
    turns: tuple[str, ...]
    """Who has its turn: systems, schemes, or programs that train."""
    in_lab: bool = True
    """In network namespaces, a host for each agent; else on loopback."""
    per_agent: int = 1
    """How many of pmesh's trainers each agent has."""
    link_bits_per_s: int | None = None
    """Of each host of the lab; None: as fast as the kernel is."""
    network: Network = "plain"
    more_bits_per_s: tuple[int, ...] = ()
    """Of each host's further cables."""
    sizes: tuple[int, ...] = ()
    """In bytes; each has its rounds. Empty where the shape of what is reduced says it."""
    control_s: float = 60.0
    """How long control traffic is counted at least. Before that each edge without data is probed
    for the first time, which costs some MB once."""
    layout: Layout = "matrix"
    side: int = SIDE
    steps: int = 10
    """Of training, in each turn."""
    speed_bars: Bars = ()
    """How many times faster than uncompressed."""
    wire_bars: Bars = ()
    """How many times fewer bytes than uncompressed."""

    @property
    def machines(self) -> int:
        """How many agents there are; of a lab, hosts."""
        return self.ranks // self.per_agent

    @property
    def cables_bits_per_s(self) -> tuple[int, ...]:
        """Of all cables of a host; none where they are as fast as the kernel is."""
        return () if self.link_bits_per_s is None else (self.link_bits_per_s, *self.more_bits_per_s)

    @property
    def is_compression(self) -> bool:
        """Which of the two pages it is on."""
        return self.kind in COMPRESSION


_ALL = (UNCOMPRESSED, "bf16", "fp16", "int8", "topk", "onebit", "powersgd-4", "auto", "auto-any")


# fmt: off
def _peers(name: str, what: str, ranks: int, *sizes: int, bits_per_s: int | None = None) -> Case:
    return Case(
        f"{name}-{ranks}", what, ranks, "peers", (PMESH, GLOO, MLX), sizes=sizes,
        in_lab=bits_per_s is not None, link_bits_per_s=bits_per_s,
    )


def _one_agent(ranks: int) -> Case:
    return replace(
        _peers("one-agent", f"{ranks} trainers of one agent", ranks, *_LOOPBACK_SIZES),
        per_agent=ranks,
        turns=(PMESH, GLOO),
    )


def _network(name: str, what: str, network: Network, size: int, *megabits: int) -> Case:
    """Hosts that pmesh alone has to find its ways between."""
    first, *more = (each * MEGABIT for each in megabits)
    return Case(
        name, what, int(name.rpartition("-")[2]), "peers", (PMESH,), sizes=(size,),
        network=network, link_bits_per_s=first, more_bits_per_s=tuple(more),
    )


def _alone(kind: Kind, what: str, size: int) -> Case:
    return Case(kind, f"{what}, 2 ranks", 2, kind, (PMESH,), sizes=(size,), in_lab=False)


_LOOPBACK_SIZES = (4 * KIB, MIB, 16 * MIB, 100 * MIB)
CASES: tuple[Case, ...] = (
    *(
        _peers("loopback", f"{ranks} ranks on loopback", ranks, *_LOOPBACK_SIZES)
        for ranks in (2, 4)
    ),
    Case("loopback-2x2", "2 agents with 2 trainers each on loopback", 4, "peers",
         (PMESH, GLOO, MLX), per_agent=2, sizes=(4 * KIB, 64 * KIB, MIB, 16 * MIB),
         in_lab=False),
    *map(_one_agent, (2, 4, 8)),
    *(
        _peers(name, f"{ranks} hosts, {link}", ranks, *sizes, bits_per_s=bits_per_s)
        for name, link, bits_per_s, sizes in (
            ("gigabit", "1 Gbit/s", 1000 * MEGABIT, (16 * MIB, 64 * MIB)),
            ("megabit", "100 Mbit/s", 100 * MEGABIT, (16 * MIB,)),
        )
        for ranks in (2, 4, 8)
    ),
    Case("gigabit-2x2", "2 hosts with 2 trainers each, 1 Gbit/s", 4, "peers", (PMESH,),
         per_agent=2, sizes=(64 * MIB,), link_bits_per_s=1000 * MEGABIT),
    _network("unequal-2", "2 hosts, 100 Mbit/s and 1 Gbit/s", "cables", 64 * MIB, 100, 1000),
    _network("twice-2", "2 hosts, 1 Gbit/s twice", "cables", 64 * MIB, 1000, 1000),
    _network("chain-3", "3 hosts in a chain, 1 Gbit/s", "chain", 16 * MIB, 1000),
    _network("mixed-8", "8 hosts, 25 to 200 Mbit/s by pair", "mixed", 4 * MIB, max(DRAWN)),
    _alone("gradients",
           f"average_gradients of {GRADIENT_ARRAYS} arrays against all_reduce of one",
           GRADIENT_BYTES),
    _alone("memory", f"{SOAK_OPS:,} ops one after the other", SOAK_BYTES),
    _alone("lag", "ops back to back", BUSY_BYTES),
    Case("100mbit", "4 hosts, 100 Mbit/s", 4, "compressed", _ALL, link_bits_per_s=100 * MEGABIT,
         speed_bars=(("int8", 3.3), ("topk", 10.0), ("powersgd-4", 30.0))),
    Case("1gbit", "4 hosts, 1 Gbit/s", 4, "compressed", _ALL, link_bits_per_s=1000 * MEGABIT,
         speed_bars=(("int8", 2.5), ("powersgd-4", 5.0))),
    Case("loopback", "4 ranks on loopback", 4, "compressed", _ALL, in_lab=False),
    Case("wire", "8 hosts, bytes on the wire", 8, "compressed",
         (UNCOMPRESSED, "bf16", "fp16", "int8", "topk", "topk-compact", "onebit"), side=WIRE_SIDE,
         wire_bars=(("bf16", 1.98), ("int8", 3.85), ("topk", 12.0), ("topk-compact", 24.0))),
    Case("resnet18", "4 hosts, the parameters of a ResNet18 for CIFAR", 4, "compressed",
         (UNCOMPRESSED, "powersgd-1", "powersgd-2", "powersgd-4"), layout="resnet18",
         wire_bars=(("powersgd-1", 240.0), ("powersgd-2", 135.0), ("powersgd-4", 71.0))),
    Case("training", "training, 4 hosts, 100 Mbit/s", 4, "train", (PMESH, GLOO),
         link_bits_per_s=100 * MEGABIT),
)
# fmt: on


def find_case(name: str) -> Case:
    """Raises ValueError, naming those that there are."""
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"no case {name!r}; there are: {', '.join(case.name for case in CASES)}")


def judge(measured: CaseResult, ours: str = PMESH) -> list[BarVerdict]:
    """What the bars say of one measurement, by one of pmesh's series; nothing of what had no turn.

    What does not depend on the series is said of the first one only.
    """
    case = find_case(measured.case)
    match case.kind:
        case "peers" if case.machines == 1:
            verdicts = _judge_one_agent(measured, ours)
        case "peers" if case.link_bits_per_s is not None:
            verdicts = _judge_lan(case, measured, ours)
        case "peers":
            verdicts = _judge_loopback(case, measured, ours)
        case "train":
            verdicts = _judge_training(measured)
        case "compressed":
            verdicts = _judge_compression(case, measured)
        case _:
            verdicts = _judge_alone(measured)
    return [*verdicts, *(measured.judge_results() if ours == PMESH else ())]


def judge_flatness(measured: Sequence[CaseResult], ours: str = PMESH) -> Iterator[BarVerdict]:
    """Bus bandwidth with the number of hosts, for each link and size with several numbers."""
    kinds: dict[tuple[int, int], list[CaseResult]] = {}
    for m in measured:
        case = find_case(m.case)
        link = case.link_bits_per_s
        if link is not None and case.network == "plain" and case.per_agent == 1:
            kinds.setdefault((link, m.op_bytes), []).append(m)
    for (link, op_bytes), group in sorted(kinds.items(), reverse=True):
        if len(group) > 1:
            found = {m.ranks: m.bus_bytes_per_s(ours) for m in group}
            hosts = ", ".join(map(str, sorted(found)))
            what = f"slowest over fastest of {hosts} hosts, {link / 1e6:,.0f} Mbit/s, "
            share = min(found.values()) / max(found.values())
            yield at_least(f"{what}{size_text(op_bytes)}", share, goal=0.95)


def _judge_one_agent(measured: CaseResult, ours: str) -> Iterator[BarVerdict]:
    speed = 1 / (measured.ratio(ours, GLOO, seconds_of) or math.inf)
    if ours == PMESH:
        bars = {4 * KIB: 2.0, MIB: 3.0, 16 * MIB: 5.0, 100 * MIB: 5.0}
    else:
        bars = {16 * MIB: 1.8, 100 * MIB: 1.8}
    if measured.op_bytes in bars:
        yield at_least("speed over gloo's", speed, goal=bars[measured.op_bytes])


def _judge_loopback(case: Case, measured: CaseResult, ours: str) -> Iterator[BarVerdict]:
    is_large = measured.op_bytes >= MIB
    over_gloo, over_mlx = (measured.ratio(ours, other, seconds_of) for other in (GLOO, MLX))
    if is_large and over_gloo:
        yield at_least("speed over gloo's", 1 / over_gloo, goal=1.0, floor=0.8)
    if is_large and over_mlx:
        yield at_least("speed over MLX's", 1 / over_mlx, goal=1.3)
    if case.ranks != 2 or not over_gloo:  # noqa: PLR2004 - as the other bars have it
        return
    if not is_large:
        yield at_most("latency over gloo's", over_gloo, goal=1.0)
    elif cpu := measured.ratio(ours, GLOO, cpu_s_of):
        yield at_most("CPU seconds per GB over gloo's", cpu, goal=1.5, floor=2.0)


def _judge_lan(case: Case, measured: CaseResult, ours: str) -> Iterator[BarVerdict]:
    share = measured.share_of_ceiling(ours)
    match case.network:
        case "plain" if case.ranks <= 4:  # noqa: PLR2004 - eight hosts are judged by flatness
            yield at_least("bus bandwidth over iperf3's", share, goal=0.97)
        case "plain":
            pass
        case "cables":
            yield at_least("bus bandwidth over iperf3's on all cables", share, goal=CABLES_SHARE)
            fastest = measured.bus_bytes_per_s(ours) / 1e6 / measured.facts[FASTEST]
            yield at_least(
                "bus bandwidth over iperf3's on the fastest", fastest, goal=FASTEST_SHARE
            )
        case "chain":  # a segment goes to one end and its result back: each edge, each way, once
            share *= case.ranks / (2 * (case.ranks - 1))
            yield at_least("bytes a second over iperf3's", share, goal=CHAIN_SHARE)
        case "mixed":
            what = "bus bandwidth over iperf3's on the slowest edge of the best ring"
            yield at_least(what, share, goal=MIXED_SHARE)
    if ours == PMESH and CONTROL_SHARE in measured.facts:
        control = measured.facts[CONTROL_SHARE]
        yield at_most(CONTROL_SHARE, control * 100, goal=0.1, form="{:.3f} %")


def _judge_alone(measured: CaseResult) -> Iterator[BarVerdict]:
    facts = measured.facts
    ratio = measured.ratio("average_gradients", "all_reduce", seconds_of)
    if ratio is not None:
        yield at_most("average_gradients over all_reduce", ratio, goal=1.15)
    if PSS in facts:
        most = (3 * measured.op_bytes + LEAST_MEMORY_BYTES) / MIB
        yield at_most(PSS, facts[PSS], goal=most, form="{:.0f}")
        yield at_most(GROWTH, facts[GROWTH], goal=MOST_GROWTH_BYTES_PER_OP / KIB)
    if LAG_P99 in facts:
        yield at_most(LAG_P99, facts[LAG_P99], goal=20.0, form="{:.1f}")


def _judge_compression(case: Case, measured: CaseResult) -> Iterator[BarVerdict]:
    for bars, what, figure in (
        (case.speed_bars, "times as fast", seconds_of),
        (case.wire_bars, "times fewer bytes", wire_bytes_of),
    ):
        for name, bar in bars:
            ratio = measured.ratio(UNCOMPRESSED, name, figure)
            if ratio is not None:
                yield at_least(f"{WAYS[name].label}: {what}", ratio, goal=bar)
    for name in measured.names:
        best = _best_allowed(measured, name)
        ratio = None if best is None else measured.ratio(name, best, seconds_of)
        if best is not None and ratio is not None:
            what = f"{WAYS[name].label}: time over that of {WAYS[best].label}, the best"
            yield at_most(what, ratio, goal=AUTO_MARGIN)


def _best_allowed(measured: CaseResult, auto: str) -> str | None:
    """The fastest of what Auto may pick; None unless all of them had turns."""
    allowed = WAYS[auto].allowed if auto in WAYS else ()
    if not allowed or not set(allowed) <= set(measured.names):
        return None
    return min(allowed, key=lambda name: measured.median(name, seconds_of))


def _judge_training(measured: CaseResult) -> Iterator[BarVerdict]:
    ratio = measured.ratio(PMESH, GLOO, seconds_of)
    if ratio is not None:
        yield at_most("time per step over that of powerSGD_hook", ratio, goal=1.0)
        lasts = [run.rounds[-1] for run in measured.runs]
        beyond = max(last[PMESH].loss / last[GLOO].loss - 1 for last in lasts)
        what = "loss after the same steps, beyond that of powerSGD_hook"
        yield at_most(what, 100 * beyond, goal=100 * LOSS_MARGIN, form="{:.2f} %")
