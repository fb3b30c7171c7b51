"""The turns: each system or scheme on the same values, one after the other, again and again."""

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tools.bench.cases import CONTROL_SHARE, FASTEST, GRADIENT_ARRAYS, ORDINARY, PMESH, Case
from tools.bench.compressed import PARAMETERS, START_STEP, find_way, shapes_of
from tools.bench.results import BenchTurn, Order, RankAnswer, Round
from tools.bench.systems import Ceiling, RankHosts, RunningSystem, ceiling_of, place_of, started
from tools.lab.commands import LabError

VALUE_BYTES = 4  # float32
PATIENCE_S = 240.0  # for a turn
SETTLE_S = 75.0  # in which agents measure each other's edges, and change their ring, perhaps twice
FIRST_PROBES_S = 40.0  # 8 hosts probe each edge without data three times, half a second apart
MOST_TRIALS = 100  # until Auto has picked
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLength:
    """How long turns take, and what comes before them."""

    turn_s: float
    """Of the slowest who has turns."""
    most_calls: int
    least_calls: int
    """But for calls that take as long as a turn."""
    warm_calls: int
    """Arenas come from a pool that has to fill first, kernels are compiled."""
    warm_s: float
    """Of calls that are slower fewer are enough."""


PEERS = TurnLength(turn_s=0.4, most_calls=300, least_calls=3, warm_calls=6, warm_s=1.0)
COMPRESSED = TurnLength(turn_s=2.0, most_calls=5, least_calls=1, warm_calls=2, warm_s=4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The rounds with one size."""

    op_bytes: int
    rounds: tuple[Round, ...]
    ceiling: tuple[float, ...]
    facts: dict[str, float]


def op_bytes_of(case: Case) -> int:
    """What is reduced where not a size but a shape says it."""
    if case.kind == "train":
        return PARAMETERS * VALUE_BYTES
    return VALUE_BYTES * sum(map(math.prod, shapes_of(case.layout, case.side)))


def take_rounds(case: Case, rounds: int, say: Say) -> Iterator[Taken]:
    """A B C A B C with each size; what has been taken so far, after each round."""
    if case.network == "mixed":
        yield from _take_draws(case, rounds, say)
    else:
        yield from _take_in_one_place(case, rounds, say)


def _take_draws(case: Case, rounds: int, say: Say) -> Iterator[Taken]:
    """Another network in each round."""
    taken: dict[int, Taken] = {}
    for draw in range(rounds):
        for one in _take_in_one_place(case, 1, say, draw=draw):
            before = taken.get(one.op_bytes)
            taken[one.op_bytes] = together = (
                one
                if before is None
                else Taken(
                    op_bytes=one.op_bytes,
                    rounds=before.rounds + one.rounds,
                    ceiling=before.ceiling + one.ceiling,
                    facts={name: max(x, before.facts[name]) for name, x in one.facts.items()},
                )
            )
            yield together


def _take_in_one_place(case: Case, rounds: int, say: Say, *, draw: int = 0) -> Iterator[Taken]:
    systems = (PMESH,) if case.kind == "compressed" else case.turns
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        place_of(case, draw=draw) as place,
        started(place, systems, Path(folder)) as running,
        ceiling_of(place) if case.kind == "peers" else contextlib.nullcontext() as ceiling,
    ):
        say(f"{', '.join(running)}: {case.ranks} ranks of each have met")
        for op_bytes in case.sizes or (op_bytes_of(case),):
            taking = _Taking(case, place, running, ceiling, op_bytes)
            if case.network == "mixed":
                taking.settle()
            yield from taking.take(rounds, say)


@dataclass(frozen=True, slots=True)
class _Taking:
    case: Case
    place: RankHosts
    running: Mapping[str, RunningSystem]
    ceiling: Ceiling | None
    op_bytes: int

    def take(self, rounds: int, say: Say) -> Iterator[Taken]:
        orders = self._train_first(say) if self.case.kind == "train" else self._warm_up(say)
        taken: list[Round] = []
        ceilings: list[float] = []
        facts: dict[str, float] = {}
        lines: tuple[float, ...] = ()
        has_lines = self.case.kind == "peers" and self.case.network != "mixed"  # one for each host
        line = sum(self.case.cables_bits_per_s) if has_lines else 0
        if line and self.case.control_s:
            self.settle(FIRST_PROBES_S)
        before = [] if not line else self.running[PMESH].traffic()
        began = time.monotonic()
        for number in range(1, rounds + 1):
            taken.append({name: self._take_turn(name, order) for name, order in orders.items()})
            if self.ceiling is not None:
                lines = self.ceiling()
                ceilings.append(sum(lines))
            if line:
                if number == rounds:
                    time.sleep(max(0.0, began + self.case.control_s - time.monotonic()))
                line_bytes = line * (time.monotonic() - began) / 8
                after = self.running[PMESH].traffic()
                facts = {CONTROL_SHARE: _control_share(before, after, line_bytes)}
                if self.case.network == "cables":
                    facts[FASTEST] = round(max(lines) / 1e6, 1)
            yield Taken(
                op_bytes=self.op_bytes,
                rounds=tuple(taken),
                ceiling=tuple(map(round, ceilings)),
                facts=facts,
            )

    def settle(self, seconds: float = SETTLE_S) -> None:
        """Reduce until the ring is the best one: V13, ranks change places within an op."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._ask(PMESH, Order(what="all_reduce", count=self.op_bytes // VALUE_BYTES))

    def _orders(self) -> dict[str, Order]:
        """What has its turns: each system and each of two calls of pmesh, or each scheme."""
        case, plain = self.case, Order(what="all_reduce", count=self.op_bytes // VALUE_BYTES)
        match case.kind:
            case "compressed":
                order = Order(what="compressed", layout=case.layout, side=case.side)
                return {name: replace(order, scheme=name) for name in case.turns}
            case "peers":
                shared = replace(plain, what="all_reduce_shared")
                return {PMESH: shared, ORDINARY: plain, **dict.fromkeys(case.turns[1:], plain)}
            case _:
                tree = replace(plain, what="average_gradients", arrays=GRADIENT_ARRAYS)
                return {"all_reduce": plain, "average_gradients": tree}

    def _ask(self, name: str, order: Order) -> tuple[RankAnswer, ...]:
        running = self.running[name if name in self.running else PMESH]
        return running.carry_out(order, timeout_s=PATIENCE_S)

    def _warm_up(self, say: Say) -> dict[str, Order]:
        """The orders, each for as many calls as a turn has."""
        is_compressed = self.case.kind == "compressed"
        pace = COMPRESSED if is_compressed else PEERS
        orders = self._orders()
        warm_s: dict[str, float] = {}
        for name, order in orders.items():
            warm_s[name] = self._warm_up_one(name, order, pace)
            if is_compressed:
                say(f"{find_way(name).label}: {warm_s[name]:.3f} s once warm")
        slowest_s = max(warm_s.values())
        for name, order in orders.items():
            call_s = warm_s[name] if is_compressed else slowest_s
            times = min(pace.most_calls, int(pace.turn_s / call_s)) or 1
            if call_s < pace.turn_s:
                times = max(pace.least_calls, times)
            orders[name] = replace(order, times=times)
        return orders

    def _warm_up_one(self, name: str, order: Order, pace: TurnLength) -> float:
        """How long a call takes at its slowest rank once it is warm, and Auto has picked."""
        calls_s: list[float] = []
        for _ in range(MOST_TRIALS):
            answers = self._ask(name, order)
            calls_s += slowest(answers)
            enough = len(calls_s) >= pace.warm_calls or sum(calls_s) >= pace.warm_s
            if enough and all(answer.settled for answer in answers):
                return min(calls_s[-pace.warm_calls :])
        raise LabError(f"{order.scheme} has not settled after {MOST_TRIALS} calls")

    def _train_first(self, say: Say) -> dict[str, Order]:
        for name in self.case.turns:
            first = self._take_turn(name, Order(what="train", times=START_STEP))
            say(f"{name}: {START_STEP} steps uncompressed, each {first.seconds:.3f} s")
        return dict.fromkeys(self.case.turns, Order(what="train", times=self.case.steps))

    def _take_turn(self, name: str, order: Order) -> BenchTurn:
        sent = self._sent_bytes() if self.case.is_compression else 0
        answers = self._ask(name, order)
        if self.case.is_compression:
            sent = self._sent_bytes() - sent
        turn = turn_of(order, answers)
        return replace(turn, wire_bytes=round(sent / self.place.ranks / turn.calls))

    def _sent_bytes(self) -> int:
        """By all hosts, at their interfaces, without what agents tell each other; 0 on loopback.

        Their probes of the bandwidth, a few MB after the start, would be most of a short turn.
        """
        if not self.place.in_lab:
            return 0
        control = sum(agent["control_sent_bytes"] for agent in self.running[PMESH].traffic())
        return self.place.sent_bytes() - control


def turn_of(order: Order, answers: Sequence[RankAnswer]) -> BenchTurn:
    calls_s = slowest(answers)
    fault = fault_in(order, answers)
    return BenchTurn(
        seconds=round(statistics.median(calls_s), 7),
        calls=len(calls_s),
        cpu_s=float(f"{sum(answer.cpu_s for answer in answers) / len(calls_s):.5g}"),
        checked=len(answers) * (1 if answers[0].digest else order.times),
        wrong=bool(fault) + sum(answer.wrong for answer in answers),
        fault=fault,
        error=float(f"{max(answer.error for answer in answers):.3g}"),
        picked=answers[0].picked,
        loss=answers[0].loss,
    )


def slowest(answers: Sequence[RankAnswer]) -> list[float]:
    """Of each call the longest that a rank has waited."""
    return [max(ranks) for ranks in zip(*(answer.seconds for answer in answers), strict=True)]


def fault_in(order: Order, answers: Sequence[RankAnswer]) -> str:
    if len({answer.digest for answer in answers}) > 1:
        return "not the same on all ranks"
    most = find_way(order.scheme).most_error
    if order.what == "compressed" and most is not None:
        for answer in answers:
            if not answer.error <= most:  # NaN is not, either
                return f"an error of {answer.error:.3g}, more than {most}"
    return ""


def _control_share(
    before: list[dict[str, int]], after: list[dict[str, int]], line_bytes: float
) -> float:
    """Of the busiest host, in its busier direction."""
    directions = ("control_sent_bytes", "control_received_bytes")
    most = max(b[key] - a[key] for a, b in zip(before, after, strict=True) for key in directions)
    return round(most / line_bytes, 7)
