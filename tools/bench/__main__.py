"""pmesh beside gloo and MLX's ring, compressed all-reduces beside uncompressed ones; in turns.

    $ python -m tools.bench list
    $ python -m tools.bench run loopback-2 --json docs/explanation/benchmarks/loopback-2.json
    $ sudo .venv/bin/python -m tools.bench run gigabit-4 --json ...      # Linux
    $ sudo .venv/bin/python -m tools.bench run 1gbit --schemes none,int8 --rounds 1
    $ python -m tools.bench report benchmarks docs/explanation/benchmarks/*.json
    $ python -m tools.bench report compression-speed docs/explanation/compression/*.json

It needs torch and MLX (`pip install '.[torch,mlx]'`), a network lab also iperf3. The kernels alone
are measured by `python -m tools.bench.kernels`, what compression does to a training by
`python -m tools.bench.training`.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tools.bench.cases import CASES, SOAK_OPS, Case, find_case
from tools.bench.compressed import find_way
from tools.bench.measuring import Taken, take_rounds
from tools.bench.report import COMPRESSION_PAGE, lines_of, render
from tools.bench.results import Measured, Results, Run
from tools.bench.soaking import soak
from tools.lab.commands import Flag, LabError, new_app, run_app
from tools.lab.results import (
    describe_commit,
    describe_machine,
    read_results,
    replaced,
    write_results,
)
from tools.lab.units import KIB, size_text

SHORT_BYTES = 64 * KIB
SHORT_SIDE = 256
SHORT_ROUNDS = 2
SHORT_STEPS = 2
SHORT_OPS = 50
LAG_OPS = 40
MODULES = {"gloo": "torch", "mlx": "mlx.core"}
# One thread for each rank's linear algebra, as torchrun sets it: they share the machine's cores.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
app = new_app("bench", __doc__)


@app.command(name="list")
def list_cases() -> None:
    """The cases, with their sizes and who has turns."""
    for case in CASES:
        sizes = ", ".join(map(size_text, case.sizes))
        print(f"{case.name:12} {sizes:32} {case.what}: {', '.join(case.turns)}")


@app.command
def run(
    *cases: str,
    sizes: tuple[int, ...] = (),
    side: int | None = None,
    schemes: str | None = None,
    rounds: int | None = None,
    ops: int | None = None,
    json: Path | None = None,
    add: Flag = False,
    short: Flag = False,
) -> None:
    """Measure cases, one after the other; nothing else should run meanwhile.

    Args:
        cases: Which; without any, all.
        sizes: In bytes, if not those that `list` shows; may be repeated.
        side: Rows and columns of the matrix that is compressed.
        schemes: Who has its turn, in this order, if not all; with commas between.
        rounds: How many turns each has with each size; 5, compressed 3, in short 2.
        ops: How many ops `memory` and `lag` run.
        json: Where the results go, after each round; what it holds of other cases or sizes stays.
        add: Add rounds to those that it holds of the same case and size, not replace them.
        short: To see that it works: small sizes, two turns; compressed: bare lines.
    """
    for case in [find_case(name) for name in cases] or CASES:
        rounds_ = rounds or (SHORT_ROUNDS if short else 3 if case.is_compression else 5)
        chosen = replace(case, side=side or (SHORT_SIDE if short else case.side))
        if short:
            chosen = replace(chosen, control_s=0.0)
        if case.sizes:
            chosen = replace(chosen, sizes=sizes or ((SHORT_BYTES,) if short else case.sizes))
        elif short:
            chosen = replace(chosen, link_bits_per_s=None, steps=SHORT_STEPS)
        if schemes is not None:
            chosen = replace(chosen, turns=tuple(schemes.split(",")))
        _check(chosen)
        if case.is_compression:
            os.environ.update(ONE_THREAD)
        _measure(chosen, rounds_, ops or _ops(case, short=short), json, add=add)


@app.command
def report(
    page: Literal["benchmarks", "compression-speed"], *files: Path, plot: Path | None = None
) -> None:
    """Write the page, from the results in these files, to standard output.

    Args:
        page: Which one.
        files: As `run --json` has written them.
        plot: Where a picture of the schemes' speeds goes: .svg, .png or .pdf.
    """
    results = [read_results(file, Results) for file in files]
    print(render(page, results), end="")
    if plot is not None and page == COMPRESSION_PAGE:
        from tools.bench.plots import draw_speeds  # noqa: PLC0415 - who asks has matplotlib

        draw_speeds(plot, [measured for each in results for measured in each.measured])


def _ops(case: Case, *, short: bool) -> int:
    return SHORT_OPS if short else SOAK_OPS if case.kind == "memory" else LAG_OPS


def _measure(case: Case, rounds: int, ops: int, json: Path | None, *, add: bool) -> None:
    began = time.monotonic()
    print(f"{case.name}: {case.what}", flush=True)
    old = read_results(json, Results) if json is not None and json.exists() else Results()
    found: dict[int, Measured] = {}
    for taken in _take(case, rounds, ops):
        found[taken.op_bytes] = measured = _describe(case, taken, ops)
        if json is not None:  # now: who measures may run out of time
            kept = old.measured
            for each in found.values():
                kept = replaced(kept, each, _identity, Measured.__add__ if add else None)
            write_results(json, Results(measured=kept))
        seconds = ", ".join(f"{n} {turn.seconds:.3g} s" for n, turn in taken.rounds[-1].items())
        print(f"  round {len(taken.rounds)}: {seconds}", flush=True)
        if len(taken.rounds) == rounds or case.kind in {"memory", "lag"}:
            print("\n".join(f"  {line}" for line in lines_of(measured)), flush=True)
    print(f"  took {time.monotonic() - began:.0f} s", flush=True)


def _identity(measured: Measured) -> tuple[str, int]:
    return measured.identity


def _take(case: Case, rounds: int, ops: int) -> Iterator[Taken]:
    if case.kind in {"memory", "lag"}:
        yield from (soak(case, op_bytes, ops) for op_bytes in case.sizes)
    else:
        yield from take_rounds(case, rounds, lambda text: print(f"  {text}", flush=True))


def _describe(case: Case, taken: Taken, ops: int) -> Measured:
    options = f" --sizes {taken.op_bytes}" if case.sizes else f" --schemes {','.join(case.turns)}"
    if case.kind == "compressed" and case.layout == "matrix":
        options += f" --side {case.side}"
    is_soak = case.kind in {"memory", "lag"}
    options += f" --ops {ops}" if is_soak else f" --rounds {len(taken.rounds)}"
    made = Run(
        command=f"python -m tools.bench run {case.name}{options}",
        commit=describe_commit(),
        machine=describe_machine(),
        rounds=taken.rounds,
        ceiling=taken.ceiling,
    )
    return Measured(
        case=case.name, ranks=case.ranks, op_bytes=taken.op_bytes, runs=(made,), facts=taken.facts
    )


def _check(case: Case) -> None:
    """Raises LabError or ValueError for what can't be measured here."""
    if case.kind == "compressed":
        for name in case.turns:
            find_way(name)
        return
    known = find_case(case.name).turns
    if unknown := set(case.turns) - set(known):
        raise ValueError(f"{', '.join(sorted(unknown))}: here take turns {', '.join(known)}")
    needed = ("gloo",) if case.kind == "train" else case.turns
    for system, module in MODULES.items():
        missing = importlib.util.find_spec(module.partition(".")[0]) is None
        if missing and system in needed:
            raise LabError(f"{system} needs {module}: pip install '.[torch,mlx]'")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_app(app, arguments, needs_lab=False)


if __name__ == "__main__":
    sys.exit(main())
