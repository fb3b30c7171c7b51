"""What is measured: the table of the cases, and their bars."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tools.bench_compression.orders import Layout
from tools.bench_compression.results import Measured, seconds_of, wire_bytes_of
from tools.bench_compression.schemes import UNCOMPRESSED, WAYS
from tools.bench_peers.cases import Verdict, at_least, at_most

MEGABIT = 10**6
SIDE = 5000  # a matrix of 25 M values, 100 MB
WIRE_SIDE = 2048  # eight hosts share the memory of one machine
AUTO_MARGIN = 1.10
LOSS_MARGIN = 0.01
OURS, THEIRS = "pmesh", "gloo"  # as `tools.bench_peers.systems` starts them

Bars = tuple[tuple[str, float], ...]
"""Of schemes, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured together, in one start."""

    name: str
    what: str
    ranks: int
    place: Literal["loopback", "lab"] = "lab"
    link_bits_per_s: int | None = None
    """Of each host of the lab; None: as fast as the kernel is."""
    kind: Literal["reduce", "train"] = "reduce"
    turns: tuple[str, ...]
    """Who has its turn: schemes, or programs that train."""
    layout: Layout = "matrix"
    side: int = SIDE
    steps: int = 10
    """Of training, in each turn."""
    speed_bars: Bars = ()
    """How many times faster than uncompressed."""
    wire_bars: Bars = ()
    """How many times fewer bytes than uncompressed."""


_ALL = (
    UNCOMPRESSED,
    "bf16",
    "fp16",
    "int8",
    "topk",
    "onebit",
    "powersgd-4",
    "auto",
    "auto-any",
)

CASES: tuple[Case, ...] = (
    Case(
        name="100mbit",
        what="4 hosts, 100 Mbit/s",
        ranks=4,
        link_bits_per_s=100 * MEGABIT,
        turns=_ALL,
        speed_bars=(("int8", 3.3), ("topk", 10.0), ("powersgd-4", 30.0)),
    ),
    Case(
        name="1gbit",
        what="4 hosts, 1 Gbit/s",
        ranks=4,
        link_bits_per_s=1000 * MEGABIT,
        turns=_ALL,
        speed_bars=(("int8", 2.5), ("powersgd-4", 5.0)),
    ),
    Case(name="loopback", what="4 ranks on loopback", ranks=4, place="loopback", turns=_ALL),
    Case(
        name="wire",
        what="8 hosts, bytes on the wire",
        ranks=8,
        turns=(UNCOMPRESSED, "bf16", "fp16", "int8", "topk", "topk-compact", "onebit"),
        side=WIRE_SIDE,
        wire_bars=(("bf16", 1.98), ("int8", 3.85), ("topk", 12.0), ("topk-compact", 24.0)),
    ),
    Case(
        name="resnet18",
        what="4 hosts, the parameters of a ResNet18 for CIFAR",
        ranks=4,
        turns=(UNCOMPRESSED, "powersgd-1", "powersgd-2", "powersgd-4"),
        layout="resnet18",
        wire_bars=(("powersgd-1", 240.0), ("powersgd-2", 135.0), ("powersgd-4", 71.0)),
    ),
    Case(
        name="training",
        what="training, 4 hosts, 100 Mbit/s",
        ranks=4,
        link_bits_per_s=100 * MEGABIT,
        kind="train",
        turns=(OURS, THEIRS),
    ),
)


def find_case(name: str) -> Case:
    """Raises ValueError, naming those that there are."""
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"no case {name!r}; there are: {', '.join(case.name for case in CASES)}")


def judge(measured: Measured) -> list[Verdict]:
    """What the bars say of one measurement; nothing of what had no turn."""
    case = find_case(measured.case)
    verdicts = list(_judge_training(measured) if case.kind == "train" else _judge(case, measured))
    wrong = sum(bool(turn.wrong) for each in measured.rounds for turn in each.values())
    if wrong:
        verdicts.append(at_most("turns with wrong results", wrong, goal=0, form="{:.0f}"))
    return verdicts


def _judge(case: Case, measured: Measured) -> Iterator[Verdict]:
    for name, bar in case.speed_bars:
        faster = measured.ratio(UNCOMPRESSED, name, seconds_of)
        if faster is not None:
            yield at_least(f"{WAYS[name].label}: times as fast", faster, goal=bar)
    for name, bar in case.wire_bars:
        fewer = measured.ratio(UNCOMPRESSED, name, wire_bytes_of)
        if fewer is not None:
            yield at_least(f"{WAYS[name].label}: times fewer bytes", fewer, goal=bar)
    for name in measured.names:
        best = best_allowed(measured, name)
        if best is not None:
            ratio = measured.ratio(name, best, seconds_of)
            if ratio is not None:
                what = f"{WAYS[name].label}: time over that of {WAYS[best].label}, the best"
                yield at_most(what, ratio, goal=AUTO_MARGIN)


def best_allowed(measured: Measured, auto: str) -> str | None:
    """The fastest of what Auto may pick; None unless all of them had turns."""
    allowed = WAYS[auto].allowed if auto in WAYS else ()
    if not allowed or not set(allowed) <= set(measured.names):
        return None
    return min(allowed, key=lambda name: measured.median(name, seconds_of))


def _judge_training(measured: Measured) -> Iterator[Verdict]:
    ratio = measured.ratio(OURS, THEIRS, seconds_of)
    if ratio is not None:
        yield at_most("time per step over that of powerSGD_hook", ratio, goal=1.0)
        yield at_most(
            "loss after the same steps, beyond that of powerSGD_hook",
            100 * loss_beyond(measured),
            goal=100 * LOSS_MARGIN,
            form="{:.2f} %",
        )


def loss_beyond(measured: Measured) -> float:
    """By which part our last loss is above theirs: of the worst run; below 0: none is."""
    lasts = [run.rounds[-1] for run in measured.runs]
    return max(last[OURS].loss / last[THEIRS].loss - 1 for last in lasts)
