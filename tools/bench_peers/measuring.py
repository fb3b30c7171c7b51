"""The turns: each system on the same size, one after the other, again and again."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench_peers.cases import CONTROL_SHARE, GRADIENT_ARRAYS, ORDINARY, PMESH, Case
from tools.bench_peers.ceilings import Ceiling, ceiling_of
from tools.bench_peers.orders import Answer, Order
from tools.bench_peers.places import Place, loopback, shaped_lan
from tools.bench_peers.results import Series
from tools.bench_peers.systems import Running, started

VALUE_BYTES = 4  # float32
TURN_S = 0.4  # of the slowest system: enough calls for a median
MOST_CALLS = 300
LEAST_CALLS = 3  # but for calls that take as long as a turn
WARM_CALLS = 6  # arenas come from a pool that has to fill first
WARM_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """All turns with one size."""

    op_bytes: int
    series: dict[str, Series]
    ceiling: tuple[float, ...] = ()
    facts: dict[str, float]


@contextlib.contextmanager
def place_of(case: Case) -> Iterator[Place]:
    """Where the case is measured."""
    line = case.link_bits_per_s
    here = loopback(case.ranks) if line is None else shaped_lan(case.ranks, bits_per_s=line)
    with here as place:
        yield place


def take_turns(
    case: Case, sizes: Sequence[int], rounds: int, say: Callable[[str], None]
) -> Iterator[Turns]:
    """A B C A B C with each size; the ceiling is a further one of them."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        place_of(case) as place,
        started(place, case.systems, Path(folder)) as running,
        ceiling_of(place) as ceiling,
    ):
        say(f"{', '.join(running)}: {case.ranks} ranks of each have met")
        for op_bytes in sizes:
            yield _with_size(case, running, ceiling, op_bytes, rounds)


def _with_size(
    case: Case, running: dict[str, Running], ceiling: Ceiling, op_bytes: int, rounds: int
) -> Turns:
    orders = _orders(case, op_bytes)
    longest_s = max(_warm_up(running, orders))
    times = min(MOST_CALLS, int(TURN_S / longest_s)) or 1
    if longest_s < TURN_S:
        times = max(LEAST_CALLS, times)
    series = dict.fromkeys(orders, Series())
    ceilings: list[float] = []
    before, began = running["pmesh"].traffic(), time.monotonic()
    for _ in range(rounds):
        for name, order in orders.items():
            system = running.get(name, running["pmesh"])
            series[name] += _one_turn(system, order, times)
        if case.kind == "peers":
            ceilings.append(ceiling())
    facts: dict[str, float] = {}
    if case.link_bits_per_s is not None:
        after, took_s = running["pmesh"].traffic(), time.monotonic() - began
        facts[CONTROL_SHARE] = _control_share(before, after, case.link_bits_per_s * took_s / 8)
    return Turns(op_bytes=op_bytes, series=series, ceiling=tuple(ceilings), facts=facts)


def _orders(case: Case, op_bytes: int) -> dict[str, Order]:
    """What has its turns: each system, and each of two calls of pmesh."""
    plain = Order(what="all_reduce", count=op_bytes // VALUE_BYTES)
    if case.kind == "peers":
        shared = Order(what="all_reduce_shared", count=plain.count)
        return {PMESH: shared, ORDINARY: plain, **dict.fromkeys(case.systems[1:], plain)}
    tree = Order(what="average_gradients", count=plain.count, arrays=GRADIENT_ARRAYS)
    return {"all_reduce": plain, "average_gradients": tree}


def _warm_up(running: dict[str, Running], orders: dict[str, Order]) -> Iterator[float]:
    """For each of them, how long a call takes once it is warm."""
    for name, order in orders.items():
        system = running.get(name, running["pmesh"])
        calls_s: list[float] = []
        while len(calls_s) < WARM_CALLS and sum(calls_s) < WARM_S:
            calls_s += slowest(system.carry_out(order))
        yield min(calls_s)


def _one_turn(system: Running, order: Order, times: int) -> Series:
    answers = system.carry_out(
        Order(what=order.what, count=order.count, arrays=order.arrays, times=times)
    )
    cpu_s = sum(answer.cpu_s for answer in answers)
    return Series(
        seconds=(round(statistics.median(slowest(answers)), 7),),
        cpu_s_per_gb=(round(cpu_s / (times * order.count * VALUE_BYTES / 1e9), 4),),
        checked=times * len(answers),
        wrong=sum(answer.wrong for answer in answers),
    )


def slowest(answers: Sequence[Answer]) -> list[float]:
    """Of each call the longest that a rank has waited."""
    return [max(ranks) for ranks in zip(*(answer.seconds for answer in answers), strict=True)]


def _control_share(
    before: list[dict[str, int]], after: list[dict[str, int]], line_bytes: float
) -> float:
    """Of the busiest host, in its busier direction."""
    directions = ("control_sent_bytes", "control_received_bytes")
    most = max(b[key] - a[key] for a, b in zip(before, after, strict=True) for key in directions)
    return round(most / line_bytes, 7)
