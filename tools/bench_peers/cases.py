"""What is measured: the table of the cases, and their bars."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tools.bench_peers.results import Measured

KIB = 1 << 10
MIB = 1 << 20
GRADIENT_ARRAYS = 200
GRADIENT_BYTES = 100_000_000  # 25 M values
SOAK_BYTES = 16 * MIB
SOAK_OPS = 1000
BUSY_BYTES = 256 * MIB
LEAST_MEMORY_BYTES = 200 * MIB
MOST_GROWTH_BYTES_PER_OP = 4 * KIB  # of the agent's and the trainer's heap; one page of memory
CONTROL_SHARE = "control traffic, share of the link"
LAG_P99 = "loop lag p99, ms"
PSS = "PSS beyond the caller's arrays, MiB"
GROWTH = "growth, KiB for each op"

PMESH, ORDINARY = "pmesh", "ordinary"
"""pmesh's series: with the arrays that its users should take for large ops, and with any others."""

Kind = Literal["peers", "gradients", "memory", "lag"]
Outcome = Literal["met", "goal missed", "MISSED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured together, in one start of the systems."""

    name: str
    what: str
    ranks: int
    sizes: tuple[int, ...]
    kind: Kind = "peers"
    systems: tuple[str, ...] = ("pmesh", "gloo", "mlx")
    link_bits_per_s: int | None = None
    """In a network lab; None: on loopback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One bar, held against one measurement."""

    what: str
    bar: str
    value: str
    outcome: Outcome


_LOOPBACK_SIZES = (4 * KIB, MIB, 16 * MIB, 100 * MIB)

CASES: tuple[Case, ...] = (
    *(
        Case(
            name=f"loopback-{ranks}",
            what=f"{ranks} ranks on loopback",
            ranks=ranks,
            sizes=_LOOPBACK_SIZES,
        )
        for ranks in (2, 4)
    ),
    *(
        Case(
            name=f"{name}-{ranks}",
            what=f"{ranks} hosts, {link}",
            ranks=ranks,
            sizes=(16 * MIB, 64 * MIB) if bits_per_s == 10**9 else (16 * MIB,),
            link_bits_per_s=bits_per_s,
        )
        for name, link, bits_per_s in (
            ("gigabit", "1 Gbit/s", 10**9),
            ("megabit", "100 Mbit/s", 10**8),
        )
        for ranks in (2, 4, 8)
    ),
    Case(
        name="gradients",
        what=f"average_gradients of {GRADIENT_ARRAYS} arrays against all_reduce of one, 2 ranks",
        kind="gradients",
        ranks=2,
        sizes=(GRADIENT_BYTES,),
        systems=("pmesh",),
    ),
    Case(
        name="memory",
        what=f"{SOAK_OPS:,} ops one after the other, 2 ranks",
        kind="memory",
        ranks=2,
        sizes=(SOAK_BYTES,),
        systems=("pmesh",),
    ),
    Case(
        name="lag",
        what="ops back to back, 2 ranks",
        kind="lag",
        ranks=2,
        sizes=(BUSY_BYTES,),
        systems=("pmesh",),
    ),
)


def find_case(name: str) -> Case:
    """Raises ValueError, naming those that there are."""
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"no case {name!r}; there are: {', '.join(case.name for case in CASES)}")


def judge(measured: Measured, ours: str = PMESH) -> list[Verdict]:
    """What the bars say of one measurement, by one of pmesh's series; only once what is of both."""
    case = find_case(measured.case)
    verdicts = list(_JUDGES[case.kind](case, measured, ours))
    wrong = sum(series.wrong for series in measured.series.values())
    if wrong and ours == PMESH:
        verdicts.append(at_most("wrong results", wrong, goal=0, form="{:.0f}"))
    return verdicts


def judge_flatness(measured: Sequence[Measured], ours: str = PMESH) -> Iterator[Verdict]:
    """Bus bandwidth with the number of hosts, for each link and size with several numbers."""
    kinds: dict[tuple[int, int], list[Measured]] = {}
    for m in measured:
        link = find_case(m.case).link_bits_per_s
        if link is not None:
            kinds.setdefault((link, m.op_bytes), []).append(m)
    for (link, op_bytes), group in sorted(kinds.items(), reverse=True):
        if len(group) > 1:
            found = {m.ranks: m.bus_bytes_per_s(ours) for m in group}
            hosts = ", ".join(map(str, sorted(found)))
            what = f"slowest over fastest of {hosts} hosts, {link / 1e6:,.0f} Mbit/s, "
            share = min(found.values()) / max(found.values())
            yield at_least(f"{what}{size_text(op_bytes)}", share, goal=0.95)


def size_text(nbytes: int) -> str:
    """In the unit that a user thinks in.

    >>> size_text(4096), size_text(16 << 20), size_text(100_000_000)
    ('4 KiB', '16 MiB', '95.4 MiB')
    """
    unit, name = (MIB, "MiB") if nbytes >= MIB else (KIB, "KiB")
    return f"{nbytes / unit:.3g} {name}"


def _judge_peers(case: Case, measured: Measured, ours: str) -> Iterator[Verdict]:
    if case.link_bits_per_s is not None:
        yield from _judge_lan(case, measured, ours)
    elif measured.op_bytes < MIB:
        if case.ranks == 2:  # noqa: PLR2004 - as the bar has it
            yield at_most("latency over gloo's", measured.ratio(ours, "gloo"), goal=1.0)
    else:
        speed = 1 / measured.ratio(ours, "gloo")
        yield at_least("speed over gloo's", speed, goal=1.0, floor=0.8)
        yield at_least("speed over MLX's", 1 / measured.ratio(ours, "mlx"), goal=1.3)
        if case.ranks == 2:  # noqa: PLR2004 - as the bar has it
            cpu = measured.cpu_ratio(ours, "gloo")
            yield at_most("CPU seconds per GB over gloo's", cpu, goal=1.5, floor=2.0)


def _judge_lan(case: Case, measured: Measured, ours: str) -> Iterator[Verdict]:
    if case.ranks <= 4:  # noqa: PLR2004 - eight hosts are judged by flatness
        share = measured.share_of_ceiling(ours)
        yield at_least("bus bandwidth over iperf3's", share, goal=0.97)
    if ours == PMESH:
        control = measured.facts[CONTROL_SHARE]
        yield at_most(CONTROL_SHARE, control * 100, goal=0.1, form="{:.3f} %")


def _judge_gradients(_: Case, measured: Measured, __: str) -> Iterator[Verdict]:
    ratio = measured.ratio("average_gradients", "all_reduce")
    yield at_most("average_gradients over all_reduce", ratio, goal=1.15)


def _judge_memory(_: Case, measured: Measured, __: str) -> Iterator[Verdict]:
    most = (3 * measured.op_bytes + LEAST_MEMORY_BYTES) / MIB
    yield at_most(PSS, measured.facts[PSS], goal=most, form="{:.0f}")
    growth = MOST_GROWTH_BYTES_PER_OP / KIB
    yield at_most(GROWTH, measured.facts[GROWTH], goal=growth)


def _judge_lag(_: Case, measured: Measured, __: str) -> Iterator[Verdict]:
    yield at_most(LAG_P99, measured.facts[LAG_P99], goal=20.0, form="{:.1f}")


_JUDGES: Mapping[Kind, Callable[[Case, Measured, str], Iterator[Verdict]]] = {
    "peers": _judge_peers,
    "gradients": _judge_gradients,
    "memory": _judge_memory,
    "lag": _judge_lag,
}


def at_least(
    what: str, value: float, *, goal: float, floor: float | None = None, form: str = "{:.2f}"
) -> Verdict:
    """A bar that is met from `goal` up, and kept from `floor` up."""
    bar = f"≥ {form.format(goal)}" + ("" if floor is None else f", floor {form.format(floor)}")
    met, kept = value >= goal, floor is not None and value >= floor
    return _verdict(what, bar, form.format(value), met=met, kept=kept)


def at_most(
    what: str, value: float, *, goal: float, floor: float | None = None, form: str = "{:.2f}"
) -> Verdict:
    """A bar that is met up to `goal`, and kept up to `floor`."""
    bar = f"≤ {form.format(goal)}" + ("" if floor is None else f", floor {form.format(floor)}")
    met, kept = value <= goal, floor is not None and value <= floor
    return _verdict(what, bar, form.format(value), met=met, kept=kept)


def _verdict(what: str, bar: str, value: str, *, met: bool, kept: bool) -> Verdict:
    outcome: Outcome = "met" if met else "goal missed" if kept else "MISSED"
    return Verdict(what=what, bar=bar, value=value, outcome=outcome)
