"""Compressed all-reduces beside uncompressed ones, in turns; and the page that reports them.

    $ python -m tools.bench_compression list
    $ sudo .venv/bin/python -m tools.bench_compression run 1gbit --json FILE     # Linux
    $ sudo .venv/bin/python -m tools.bench_compression run 1gbit --schemes none,int8 --rounds 1
    $ python -m tools.bench_compression report docs/explanation/compression/*.json

It needs numba (`pip install 'pmesh[fast]'`), for `training` torch; all but `loopback` needs a
network lab.
"""

import importlib.util
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import cyclopts

from tools.bench_compression.arrays import shapes_of
from tools.bench_compression.cases import CASES, Case, find_case
from tools.bench_compression.measuring import take_rounds
from tools.bench_compression.report import lines_of, render
from tools.bench_compression.results import (
    Measured,
    Results,
    Round,
    Run,
    merged,
    read_results,
    write_results,
)
from tools.bench_compression.schemes import find_way
from tools.bench_compression.training import PARAMETERS
from tools.bench_peers.commands import run_commands
from tools.bench_peers.systems import BenchError
from tools.chaos.results import describe_commit, describe_machine

ROUNDS = 3
SHORT_SIDE = 256
SHORT_ROUNDS = 2
SHORT_STEPS = 2
# One thread for each rank's linear algebra, as torchrun sets it: they share the machine's cores.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
app = cyclopts.App(
    name="bench_compression", help=__doc__, help_format="plaintext", version_flags=[]
)
Flag = Annotated[bool, cyclopts.Parameter(negative="")]


@app.command(name="list")
def list_cases() -> None:
    """The cases, with who has its turns."""
    for case in CASES:
        print(f"{case.name:10} {case.what}: {', '.join(case.turns)}")


@app.command
def run(
    *cases: str,
    schemes: str | None = None,
    rounds: int | None = None,
    side: int | None = None,
    json: Path | None = None,
    add: Flag = False,
    short: Flag = False,
) -> None:
    """Measure cases, one after the other; nothing else should run meanwhile.

    Args:
        cases: Which; without any, all.
        schemes: Who has its turn, in this order, if not all; with commas between.
        rounds: How many turns each has; 3, in short 2.
        side: Rows and columns of the matrix that is reduced.
        json: Where the results go, after each round; what it holds of other cases or sizes stays.
        add: Add rounds to those that it holds of the same case and size, not replace them.
        short: To see that it works: small matrices, lines as fast as the kernel is.
    """
    for case in [find_case(name) for name in cases] or CASES:
        chosen = replace(case, side=side or (SHORT_SIDE if short else case.side))
        if short:
            chosen = replace(chosen, link_bits_per_s=None, steps=SHORT_STEPS)
        turns = case.turns if schemes is None else tuple(schemes.split(","))
        _check(chosen, turns)
        _measure(chosen, turns, rounds or (SHORT_ROUNDS if short else ROUNDS), json, add=add)


@app.command
def report(*files: Path, plot: Path | None = None) -> None:
    """Write the page, from the results in these files, to standard output.

    Args:
        files: As `run --json` has written them.
        plot: Where a picture of the speeds goes: .svg, .png or .pdf.
    """
    results = [read_results(file) for file in files]
    print(render(results), end="")
    if plot is not None:
        from tools.bench_compression.plot import draw  # noqa: PLC0415 - who asks has matplotlib

        draw(plot, [measured for each in results for measured in each.measured])


def _measure(
    case: Case, turns: Sequence[str], rounds: int, json: Path | None, *, add: bool
) -> None:
    began = time.monotonic()
    print(f"{case.name}: {case.what}", flush=True)
    old = Results() if json is None else read_results(json)
    commit, machine = describe_commit(), describe_machine()
    taken: list[Round] = []
    for each in take_rounds(case, turns, rounds, lambda text: print(f"  {text}", flush=True)):
        taken.append(each)
        seconds = ", ".join(f"{name} {turn.seconds:.3f} s" for name, turn in each.items())
        print(f"  round {len(taken)}: {seconds}", flush=True)
        command = _command(case, turns, len(taken))
        run_ = Run(command=command, commit=commit, machine=machine, rounds=tuple(taken))
        measured = Measured(case=case.name, ranks=case.ranks, values=_values(case), runs=(run_,))
        if json is not None:  # now: who measures may run out of time
            write_results(json, merged(old, measured, add=add))
    print("\n".join(f"  {line}" for line in lines_of(measured)))
    print(f"  took {time.monotonic() - began:.0f} s", flush=True)


def _command(case: Case, turns: Sequence[str], rounds: int) -> str:
    size = f" --side {case.side}" if case.layout == "matrix" and case.kind == "reduce" else ""
    program = f"python -m tools.bench_compression run {case.name}"
    return f"{program} --schemes {','.join(turns)}{size} --rounds {rounds}"


def _values(case: Case) -> int:
    if case.kind == "train":
        return PARAMETERS
    return sum(map(math.prod, shapes_of(case.layout, case.side)))


def _check(case: Case, turns: Sequence[str]) -> None:
    if case.kind == "reduce":
        for name in turns:
            find_way(name)
        return
    if unknown := set(turns) - set(case.turns):
        raise ValueError(f"{', '.join(sorted(unknown))}: here train {', '.join(case.turns)}")
    if importlib.util.find_spec("torch") is None:
        raise BenchError("training needs torch: pip install 'pmesh[torch]'")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    os.environ.update(ONE_THREAD)
    return run_commands(app, "bench_compression", arguments)


if __name__ == "__main__":
    sys.exit(main())
