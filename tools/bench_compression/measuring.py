"""The turns: each scheme on the same values, one after the other, again and again."""

import contextlib
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from tools.bench_compression.cases import OURS, THEIRS, Case
from tools.bench_compression.orders import Answer, Order
from tools.bench_compression.results import Round, Turn
from tools.bench_compression.schemes import find_way
from tools.bench_compression.training import START_STEP
from tools.bench_compression.wire import sent_bytes
from tools.bench_peers.places import Place, loopback, shaped_lan
from tools.bench_peers.systems import BenchError, Running, start_gloo, start_pmesh

WORKER = "tools.bench_compression.worker"
PATIENCE_S = 240.0  # for a turn
TURN_S = 2.0  # of calls that are quicker than that
MOST_CALLS = 5
WARM_CALLS = 2  # arenas are faulted in, kernels compiled
WARM_S = 4.0  # of calls that are slower one is enough
MOST_TRIALS = 100


@dataclass(frozen=True, slots=True)
class Runner:
    """The ranks of one program, where they run."""

    place: Place
    running: Running

    def carry_out(self, order: Order) -> Turn:
        """One turn."""
        agents_s, wire_bytes = self._agents_cpu_s(), sent_bytes(self.place)
        answers = self.ask(order)
        agents_s = self._agents_cpu_s() - agents_s
        seconds = [max(ranks) for ranks in zip(*(a.seconds for a in answers), strict=True)]
        return Turn(
            seconds=round(statistics.median(seconds), 5),
            calls=len(seconds),
            cpu_s=round((agents_s + sum(a.cpu_s for a in answers)) / len(seconds), 3),
            wire_bytes=round(
                (sent_bytes(self.place) - wire_bytes) / self.place.ranks / len(seconds)
            ),
            error=float(f"{max(a.error for a in answers):.3g}"),
            picked=answers[0].picked,
            loss=answers[0].loss,
            wrong=wrong_in(order, answers),
        )

    def ask(self, order: Order) -> list[Answer]:
        """Tell all ranks, and wait for all."""
        for worker in self.running.workers:
            worker.tell(msgspec.json.encode(order).decode())
        return [
            msgspec.json.decode(worker.hear(timeout_s=PATIENCE_S), type=Answer)
            for worker in self.running.workers
        ]

    def _agents_cpu_s(self) -> float:
        times = [psutil.Process(agent.pid).cpu_times() for agent in self.running.agents]
        return sum(each.user + each.system for each in times)


def take_rounds(
    case: Case, turns: Sequence[str], rounds: int, say: Callable[[str], None]
) -> Iterator[Round]:
    """A B C A B C; each round as soon as it is over."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        _place_of(case) as place,
        contextlib.ExitStack() as stack,
    ):
        systems = turns if case.kind == "train" else (OURS,)
        runners = {
            name: Runner(place, _START[name](place, Path(folder), stack)) for name in systems
        }
        say(f"{case.ranks} ranks of {', '.join(runners)} have met")
        yield from (_train if case.kind == "train" else _reduce)(case, runners, turns, rounds, say)
        for runner in runners.values():
            _end(runner.running)


def _place_of(case: Case) -> contextlib.AbstractContextManager[Place]:
    if case.place == "loopback":
        return loopback(case.ranks)
    return shaped_lan(case.ranks, bits_per_s=case.link_bits_per_s)


def _reduce(
    case: Case,
    runners: dict[str, Runner],
    turns: Sequence[str],
    rounds: int,
    say: Callable[[str], None],
) -> Iterator[Round]:
    runner = runners[OURS]
    orders: dict[str, Order] = {}
    for name in turns:
        order = Order(what="all_reduce", scheme=name, layout=case.layout, side=case.side)
        warm_s = _warm_up(runner, order)
        say(f"{find_way(name).label}: {warm_s:.3f} s once warm")
        times = max(1, min(MOST_CALLS, int(TURN_S / warm_s)))
        orders[name] = msgspec.structs.replace(order, times=times)
    for _ in range(rounds):
        yield {name: runner.carry_out(order) for name, order in orders.items()}


def _warm_up(runner: Runner, order: Order) -> float:
    """How long a call takes at its slowest rank once it is warm, and Auto has picked."""
    took_s: list[float] = []
    for _ in range(MOST_TRIALS):
        answers = runner.ask(order)
        took_s.append(max(answer.seconds[0] for answer in answers))
        enough = len(took_s) >= WARM_CALLS or took_s[0] > WARM_S
        if enough and all(answer.settled for answer in answers):
            return took_s[-1]
    raise BenchError(f"{order.scheme} has not settled after {MOST_TRIALS} calls")


def _train(
    case: Case,
    runners: dict[str, Runner],
    turns: Sequence[str],
    rounds: int,
    say: Callable[[str], None],
) -> Iterator[Round]:
    for name in turns:
        first = runners[name].carry_out(Order(what="train", times=START_STEP))
        say(f"{name}: {START_STEP} steps uncompressed, each {first.seconds:.3f} s")
    for _ in range(rounds):
        order = Order(what="train", times=case.steps)
        yield {name: runners[name].carry_out(order) for name in turns}


def wrong_in(order: Order, answers: Sequence[Answer]) -> str:
    """What is wrong with the last result."""
    if len({answer.digest for answer in answers}) > 1:
        return "not the same on all ranks"
    most = find_way(order.scheme).most_error
    if order.what == "all_reduce" and most is not None:
        for answer in answers:
            if not answer.error <= most:  # NaN is not, either
                return f"an error of {answer.error:.3g}, more than {most}"
    return ""


def _end(running: Running) -> None:
    for worker in running.workers:
        worker.tell(msgspec.json.encode(Order(what="end")).decode())
    for worker in running.workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.popen.wait(5.0)


def _start_ours(place: Place, folder: Path, stack: contextlib.ExitStack) -> Running:
    return start_pmesh(place, folder, stack, program=WORKER)


def _start_theirs(place: Place, folder: Path, stack: contextlib.ExitStack) -> Running:
    return start_gloo(place, folder, stack, program=WORKER)


_START = {OURS: _start_ours, THEIRS: _start_theirs}
