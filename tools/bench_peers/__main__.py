"""pmesh beside gloo and MLX's ring, in turns; and the page that reports it.

    $ python -m tools.bench_peers list
    $ python -m tools.bench_peers run loopback-2 --json docs/explanation/benchmarks/loopback-2.json
    $ sudo .venv/bin/python -m tools.bench_peers run gigabit-4 --json ...      # Linux
    $ python -m tools.bench_peers report docs/explanation/benchmarks/*.json

It needs torch and MLX (`pip install 'pmesh[torch,mlx]'`), a network lab also iperf3.
"""

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import cyclopts

from tools.bench_peers.cases import CASES, KIB, SOAK_OPS, Case, find_case, size_text
from tools.bench_peers.commands import run_commands
from tools.bench_peers.measuring import Turns, take_turns
from tools.bench_peers.report import lines_of, render
from tools.bench_peers.results import Measured, keep, read_results
from tools.bench_peers.soaking import soak
from tools.bench_peers.systems import BenchError
from tools.chaos.results import describe_commit, describe_machine

ROUNDS = 5
SHORT_BYTES = 64 * KIB
SHORT_OPS = 50
LAG_OPS = 40
MODULES = {"gloo": "torch", "mlx": "mlx.core"}
app = cyclopts.App(name="bench_peers", help=__doc__, help_format="plaintext", version_flags=[])
Flag = Annotated[bool, cyclopts.Parameter(negative="")]


@app.command(name="list")
def list_cases() -> None:
    """The cases, with their sizes."""
    for case in CASES:
        print(f"{case.name:12} {', '.join(map(size_text, case.sizes)):32} {case.what}")


@app.command
def run(
    *cases: str,
    sizes: Annotated[tuple[int, ...], cyclopts.Parameter(negative="")] = (),
    rounds: int = ROUNDS,
    ops: int | None = None,
    json: Path | None = None,
    add: Flag = False,
    short: Flag = False,
) -> None:
    """Measure cases, one after the other; nothing else should run meanwhile.

    Args:
        cases: Which; without any, all.
        sizes: In bytes, if not those that `list` shows; may be repeated.
        rounds: How many turns each system has with each size.
        ops: How many ops `memory` and `lag` run.
        json: Where the results go; what it holds of other cases or sizes stays.
        add: Add turns to those that it holds of the same case and size, not replace them.
        short: To see that it works: one small size, two turns.
    """
    for case in [find_case(name) for name in cases] or CASES:
        chosen = replace(case, sizes=sizes or ((SHORT_BYTES,) if short else case.sizes))
        for measured in _measure(chosen, rounds=2 if short else rounds, ops=ops, short=short):
            print("\n".join(f"  {line}" for line in lines_of(measured)), flush=True)
            if json is not None:
                keep(json, measured, add=add)


@app.command
def report(*files: Path) -> None:
    """Write the page, from the results in these files, to standard output."""
    print(render([read_results(file) for file in files]), end="")


def _measure(case: Case, *, rounds: int, ops: int | None, short: bool) -> Iterator[Measured]:
    began = time.monotonic()
    print(f"{case.name}: {case.what}", flush=True)
    if case.kind in {"memory", "lag"}:
        ops = ops or (SHORT_OPS if short else SOAK_OPS if case.kind == "memory" else LAG_OPS)
        for op_bytes in case.sizes:
            series, facts = soak(case, op_bytes, ops)
            turns = Turns(op_bytes=op_bytes, series={"pmesh": series}, facts=facts)
            yield _describe(case, turns, f" --ops {ops}")
    else:
        _check_modules(case)
        for turns in take_turns(case, case.sizes, rounds, lambda text: print(f"  {text}")):
            yield _describe(case, turns, f" --rounds {rounds}")
    print(f"  took {time.monotonic() - began:.0f} s", flush=True)


def _describe(case: Case, turns: Turns, options: str) -> Measured:
    program = f"python -m tools.bench_peers run {case.name} --sizes {turns.op_bytes}"
    return Measured(
        case=case.name,
        op_bytes=turns.op_bytes,
        ranks=case.ranks,
        command=program + options,
        commit=describe_commit(),
        machine=describe_machine(),
        series=turns.series,
        ceiling=tuple(round(x) for x in turns.ceiling),
        facts=turns.facts,
    )


def _check_modules(case: Case) -> None:
    for system, module in MODULES.items():
        if system in case.systems and importlib.util.find_spec(module.partition(".")[0]) is None:
            raise BenchError(f"{system} needs {module}: pip install 'pmesh[torch,mlx]'")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_commands(app, "bench_peers", arguments)


if __name__ == "__main__":
    sys.exit(main())
