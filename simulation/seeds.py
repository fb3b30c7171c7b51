"""Runs seeds of the simulated cluster: `python -m simulation.seeds 1000`.

A seed that fails is printed with the command that replays it. Exit code 1 if any does.
"""

import atexit
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeAlias, cast

import cyclopts

from simulation.cluster import Outcome
from simulation.faults import run
from simulation.invariants import Violation

Mutation: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Takes one rule out of the core while its context is open."""

MUTATIONS = "tests.simulation.mutations"
"""Where a mutation that is named without its module stands: in this repository's tests."""

CHUNK = 10  # seeds handed to a process at once: some seconds
REPORT_EVERY = 1000  # seeds: some minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedVerdict:
    """How one seed went."""

    seed: int
    outcome: Outcome | None
    violation: str = ""


def find_mutation(name: str) -> Mutation:
    """The mutation `name`, or `module:name`; AttributeError if there is none."""
    module, _, function = name.rpartition(":")
    found = importlib.import_module(module or MUTATIONS)
    return cast("Mutation", found.MUTATIONS[function] if not module else getattr(found, function))


def judge(seed: int, *, trace: Callable[[str], None] | None = None) -> SeedVerdict:
    """Run one seed."""
    try:
        return SeedVerdict(seed=seed, outcome=run(seed, trace))
    except Violation as violation:
        return SeedVerdict(seed=seed, outcome=None, violation=str(violation))


def judge_many(
    seeds: Iterable[int],
    *,
    mutation: str = "",
    processes: int = 1,
    trace: Callable[[str], None] | None = None,
) -> Iterator[SeedVerdict]:
    """Run many seeds, in their order; a trace is written in one process only."""
    if processes == 1:
        with find_mutation(mutation)() if mutation else nullcontext():
            for seed in seeds:
                yield judge(seed, trace=trace)
        return
    with ProcessPoolExecutor(
        processes, get_context("spawn"), _mutate_for_good, (mutation,)
    ) as pool:
        yield from pool.map(judge, seeds, chunksize=CHUNK)


def _mutate_for_good(mutation: str) -> None:
    if mutation:
        context = find_mutation(mutation)()
        context.__enter__()
        atexit.register(context.__exit__, None, None, None)  # so that it lasts until then


def replay_command(seed: int, mutation: str = "") -> str:
    """What to type to see this seed's history."""
    words = ["python -m simulation.seeds 1", f"--first {seed}", "--trace"]
    return " ".join(words + [f"--mutation {mutation}"] * bool(mutation))


def main(
    seeds: int,
    /,
    *,
    first: int = 0,
    mutation: str = "",
    processes: int = os.cpu_count() or 1,
    trace: bool = False,
) -> int:
    """Run SEEDS histories of a simulated cluster and check the design's invariants.

    Args:
        seeds: how many.
        first: the first seed.
        mutation: takes one rule out: `module:name`, or a name of this repository's
            tests/simulation/mutations.py. The simulation should then find violations.
        processes: how many to run in.
        trace: print what happens; in one process.
    """
    began, simulated, failed, settled = time.monotonic(), 0.0, 0, 0.0
    numbers = range(first, first + seeds)
    processes = 1 if trace else min(processes, seeds)
    show = _print if trace else None
    for verdict in judge_many(numbers, mutation=mutation, processes=processes, trace=show):
        if verdict.outcome is None:
            failed += 1
            _print(f"seed {verdict.seed}: {verdict.violation}")
            _print(f"  replay: {replay_command(verdict.seed, mutation)}")
        else:
            simulated += verdict.outcome.simulated_s
            settled = max(settled, verdict.outcome.settled_s)
        done = verdict.seed - first + 1
        if done % REPORT_EVERY == 0 or done == seeds:
            elapsed = time.monotonic() - began
            _print(
                f"{done} seeds, {failed} violations, {elapsed:.1f} s:"
                f" {done / elapsed:.1f} seeds/s, {simulated / elapsed:.0f} simulated s/s;"
                f" settled at most {settled:.1f} s after the last fault"
            )
    return 1 if failed else 0


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    app = cyclopts.App(help_format="plaintext")
    app.default(main)
    app()
