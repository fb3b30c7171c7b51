"""The rows of the comparison, each measured with one system after the other, or in turns."""

import contextlib
import importlib.metadata
import importlib.util
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from tools.bench.measuring import slowest
from tools.bench.results import Order, RankAnswer
from tools.bench.systems import START, RankHosts, RunningSystem
from tools.compare import ranks as work
from tools.compare.judge import judge_call, judge_training, times_of
from tools.compare.started import Fleet, Ranks, RankWatch, Starter, System, fleet_settings
from tools.lab.commands import LabError
from tools.lab.net import NetLab, loopbacks
from tools.lab.program import PATIENCE_S, await_that
from tools.lab.report import table
from tools.lab.results import describe_commit, describe_machine
from tools.lab.units import MIB

SYSTEMS: tuple[System, ...] = get_args(System)
VICTIM = 1
STEPS_BEFORE = 30
SILENCE_S = 20.0
AFTER_S = 15.0  # so long one watches those who go on
DATA = "digits.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings:
    """What the rows have in common."""

    watch_s: float
    """How long to wait for those who may hang."""
    rounds: int
    macfleet_python: Path | None


@dataclass(frozen=True, slots=True)
class ComparedRow:
    name: str
    what: str
    ranks: int
    measure: Callable[[Starter, System, ComparisonSettings], str] | None
    """What one system does, in words; None: all have turns in one run."""
    in_lab: bool = False


def _train(starter: Starter, system: System) -> Ranks:
    """Ranks that train on the digits, each of which has done some steps."""
    data = starter.folder / DATA
    save_digits(data)
    fleet: Fleet = {"data": str(data), "inputs": 64, "outputs": 10, "epochs": 1000}
    ranks = starter.start(system, work.train, str(data), job="train", fleet=fleet)

    def all_train() -> bool:
        steps = ranks.steps()
        return len(steps) == starter.place.ranks and min(steps.values()) >= STEPS_BEFORE

    await_that(all_train, f"step {STEPS_BEFORE} of {system}", within_s=120, of=ranks.programs)
    return ranks


def save_digits(path: Path) -> None:
    """Scikit-learn's handwritten digits."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - the other rows need none

    x, y = load_digits(return_X_y=True)
    np.savez(path, x=(x / 16).astype(np.float32), y=y.astype(np.int64))


def kill(starter: Starter, system: System, comparison: ComparisonSettings) -> str:
    ranks = _train(starter, system)
    at = time.monotonic()
    ranks.send(VICTIM, signal.SIGKILL)
    return _what_others_do(ranks, starter.place.ranks, at, comparison.watch_s)


def silence(
    starter: Starter, system: System, comparison: ComparisonSettings, *, to_all: bool = False
) -> str:
    ranks = _train(starter, system)
    at = time.monotonic()
    ranks.send(VICTIM, signal.SIGSTOP, to_all=to_all)
    time.sleep(SILENCE_S)
    resumed = time.monotonic()
    ranks.send(VICTIM, signal.SIGCONT, to_all=to_all)
    others = _what_others_do(ranks, starter.place.ranks, at, comparison.watch_s, resumed)
    error = RankWatch(ranks).training(VICTIM).error
    last = max(line["at"] for line in ranks.lines() if line["rank"] == VICTIM)
    then = f"raises {error}" if error else "takes steps" if last > resumed + 5 else "takes none"
    return f"{others}; the one that was stopped then {then}"


def asleep(starter: Starter, system: System, comparison: ComparisonSettings) -> str:
    return silence(starter, system, comparison, to_all=True)


def _what_others_do(
    ranks: Ranks, size: int, at: float, watch_s: float, resumed: float | None = None
) -> str:
    others = [rank for rank in range(size) if rank != VICTIM]
    watch = RankWatch(ranks)

    def are_settled() -> bool:
        watch.look()
        late = (resumed or at) + AFTER_S
        return all(
            rank in watch.ended or max(watch.training(rank).steps.values()) > late
            for rank in others
        )

    with contextlib.suppress(LabError):
        await_that(are_settled, "their end", within_s=watch_s)
    records = {rank: watch.training(rank) for rank in others}
    return judge_training(records, at=at, until=time.monotonic(), resumed=resumed)


def mismatch(starter: Starter, system: System, comparison: ComparisonSettings) -> str:
    """Rank 1 brings 1,200 values to an all-reduce, the others 1,000."""
    counts = [1200 if rank == VICTIM else 1000 for rank in range(starter.place.ranks)]
    return _call_once(starter, system, counts, comparison.watch_s)


def stranger(starter: Starter, system: System, comparison: ComparisonSettings) -> str:
    """Rank 1 has no key; where there is none to have, it has what all have."""
    counts = [1000] * starter.place.ranks
    return _call_once(starter, system, counts, comparison.watch_s, strange=VICTIM)


def _call_once(
    starter: Starter, system: System, counts: list[int], watch_s: float, strange: int | None = None
) -> str:
    wait_s = 20.0 if strange is not None else PATIENCE_S
    fleet: Fleet = {"counts_of_ranks": counts}
    began = time.monotonic()
    ranks = starter.start(
        system,
        work.reduce_once,
        counts,
        wait_s,
        job="reduce",
        fleet=fleet,
        strange=strange,
    )
    watch = RankWatch(ranks)

    def are_settled() -> bool:
        watch.look()
        said = {line["rank"] for line in ranks.lines() if "values" in line or "error" in line}
        return len(said) == len(counts) or all(program.ended for program in ranks.programs)

    with contextlib.suppress(LabError):
        await_that(are_settled, "their answers", within_s=watch_s)
    met = [line["at"] for line in ranks.lines() if "ready" in line]
    began = max([began, *met])
    return judge_call({rank: watch.call(rank, since=began) for rank in range(len(counts))})


def wire(starter: Starter, system: System, comparison: ComparisonSettings) -> str:
    """Bytes at the interface of each rank for each gradient of 4 MiB."""
    if system == "macfleet":
        ways = ("none", "light", "moderate", "aggressive")
        sent = {way: _wire_of_macfleet(starter, way, comparison) for way in ways}
    else:
        ranks = starter.start(system, work.count_bytes)
        await_that(lambda: all(p.ended for p in ranks.programs), "all ways", within_s=150)
        sent = {}
        for line in ranks.lines():
            if "error" in line:
                return str(line["error"])
            if "way" in line:
                sent[line["way"]] = sent.get(line["way"], 0.0) + line["sent"] / starter.place.ranks
    return ", ".join(f"{way} {bytes_ / MIB:.2f} MiB" for way, bytes_ in sent.items())


def _wire_of_macfleet(starter: Starter, way: str, comparison: ComparisonSettings) -> float:
    side, size = work.SIDE, starter.place.ranks
    fleet: Fleet = {"inputs": side, "outputs": side, "compression": way, "pause_s": 0.0}
    ranks = starter.start("macfleet", work.count_bytes, job="train", fleet=fleet | {"epochs": 3})
    await_that(lambda: all(p.ended for p in ranks.programs), way, within_s=comparison.watch_s)
    sent = 0.0
    for rank in range(size):
        at = {
            line["step"]: line["sent"]
            for line in ranks.lines()
            if line["rank"] == rank and "step" in line
        }
        first, last = work.WARM_CALLS, work.WARM_CALLS + work.COUNTED_CALLS
        if last not in at:
            raise LabError(ranks.programs[rank].shown)
        sent += (at[last] - at[first]) / work.COUNTED_CALLS / size
    return sent


ROWS = (
    ComparedRow("lost-rank", "SIGKILL of one of three ranks that train", 3, kill),
    ComparedRow("stopped-rank", "SIGSTOP of one of three ranks for 20 s", 3, silence),
    ComparedRow("stopped-machine", "the same, its agent or launcher too", 3, asleep),
    ComparedRow("other-shape", "one of three ranks brings another shape", 3, mismatch),
    ComparedRow("without-key", "one of two ranks has no key", 2, stranger),
    ComparedRow("wire-bytes", "bytes for a gradient of 4 MiB", 2, wire, in_lab=True),
    ComparedRow("all-reduce-time", "all-reduces of 1 and 16 MiB, in turns", 2, None),
)


def run(
    *rows: str,
    systems: str = ",".join(SYSTEMS),
    macfleet_python: Path | None = None,
    watch_s: float = 150.0,
    rounds: int = 7,
    mib: tuple[int, ...] = (1, 16),
    logs: Path | None = None,
) -> None:
    """Measure rows; MacFleet in an environment of its own, which this never installs anything into.

    Args:
        rows: Which, as `list` shows them; without any, all.
        systems: Which, with commas between.
        macfleet_python: A Python that has `macfleet[torch]`; without it MacFleet is left out.
        watch_s: How long to wait for ranks that may hang.
        rounds: How many turns each system has in `all-reduce-time`.
        mib: The sizes of `all-reduce-time`; may be repeated.
        logs: A folder that stays, for what ranks have printed.
    """
    chosen = _systems(systems, macfleet_python)
    print(f"{describe_commit()}; {describe_machine()}; {versions(macfleet_python)}", flush=True)
    comparison = ComparisonSettings(watch_s=watch_s, rounds=rounds, macfleet_python=macfleet_python)
    if unknown := {*rows} - {row.name for row in ROWS}:
        raise ValueError(f"no row is called {min(unknown)}; 'python -m tools list' shows them")
    for row in [row for row in ROWS if row.name in rows or not rows]:
        print(f"\n{row.name}: {row.what}", flush=True)
        if row.measure is None:
            for size in mib:
                print(_turns(row, chosen, comparison, size), flush=True)
            continue
        for system in chosen:
            with _starter(row, macfleet_python, logs, system) as starter:
                try:
                    said = row.measure(starter, system, comparison)
                except LabError as e:
                    errors = [
                        line["error"] for line in starter.started[-1].lines() if "error" in line
                    ]
                    said = f"not measured: {errors or e}"
            print(f"  {system}: {said}", flush=True)


def _systems(named: str, macfleet_python: Path | None) -> list[System]:
    """Raises ValueError for one that there is not."""
    unknown = set(named.split(",")) - set(SYSTEMS)
    if unknown:
        raise ValueError(f"no system is called {min(unknown)}; there are {', '.join(SYSTEMS)}")
    chosen = [system for system in SYSTEMS if system in named.split(",")]
    if "macfleet" in chosen and macfleet_python is None:
        print(
            "MacFleet is left out: name a Python that has it with --macfleet-python, made by "
            "'python -m venv fleet && fleet/bin/pip install macfleet[torch]==2.2.1'"
        )
        chosen.remove("macfleet")
    return chosen


def versions(macfleet_python: Path | None) -> str:
    """Of all that is compared and installed."""
    found = {
        name: importlib.metadata.version(name)
        for name in ("torch", "mlx")
        if importlib.util.find_spec(name) is not None
    }
    if macfleet_python is not None:
        ask = "import importlib.metadata as m; print(m.version('macfleet'))"
        command = [str(macfleet_python), "-c", ask]
        found["macfleet"] = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
    return ", ".join(f"{name} {version}" for name, version in found.items())


@contextlib.contextmanager
def _starter(
    row: ComparedRow, macfleet_python: Path | None, logs: Path | None, system: str
) -> Iterator[Starter]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cmp-")))
        if logs is not None:
            folder = logs / f"{row.name}-{system}-{int(time.time())}"
            folder.mkdir(parents=True, exist_ok=True)
        hosts = stack.enter_context(NetLab(row.ranks)).hosts if row.in_lab else loopbacks(row.ranks)
        yield Starter(
            place=RankHosts(hosts=tuple(hosts)),
            folder=folder,
            stack=stack,
            macfleet_python=macfleet_python,
        )


def _turns(
    row: ComparedRow, systems: Sequence[System], comparison: ComparisonSettings, mib: int
) -> str:
    """A table of the systems' times, each in its turn, round after round."""
    rounds = list[dict[str, float]]()
    with _starter(row, comparison.macfleet_python, None, "") as starter:
        running = dict(_running(starter, systems))
        order = Order(what="all_reduce", count=mib * MIB // 4)
        once = {name: _take(system, order) for name, system in running.items()}
        times = max(2, min(20, int(0.5 / max(once.values()))))
        order = msgspec.structs.replace(order, times=times)
        for _ in range(comparison.rounds):
            rounds.append({name: _take(system, order) for name, system in running.items()})
        for system in running.values():
            system.end()
    shown = times_of(rounds, systems[0])
    rows = [(name, f"{1000 * s:.2f} ms", f"{ratio:.2f}") for name, (s, ratio) in shown.items()]
    return table(f"{mib} MiB | median | of {systems[0]}'s time, median of the rounds", rows)


def _take(system: RunningSystem, order: Order) -> float:
    """The median call, each as long as at its slowest rank; raises LabError for a wrong sum."""
    answers: tuple[RankAnswer, ...] = system.carry_out(order)
    if any(answer.wrong for answer in answers):
        raise LabError("a sum was wrong")
    return float(np.median(slowest(answers)))


def _running(starter: Starter, systems: Sequence[System]) -> Iterator[tuple[str, RunningSystem]]:
    for system in systems:
        if system != "macfleet":
            yield system, START[system](starter.place, starter.folder, starter.stack)
            continue
        for name, token in (("macfleet", "t" * 43), ("macfleet, open", None)):
            settings: Mapping[str, object] = fleet_settings(starter.place)
            ranks = [
                starter.start_macfleet_rank(
                    "serve", rank, {**settings, "tokens": [token] * starter.place.ranks}
                )
                for rank in range(starter.place.ranks)
            ]
            for rank in ranks:
                rank.hear()
            yield name, RunningSystem(ranks)
