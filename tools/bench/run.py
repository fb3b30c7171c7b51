"""pmesh beside gloo and MLX's ring, compressed all-reduces beside uncompressed ones; in turns.

It needs torch and MLX (`pip install '.[torch,mlx]'`), a network lab also iperf3.
"""

import importlib.util
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tools.bench.cases import CASES, SOAK_OPS, Case, find_case
from tools.bench.compressed import find_way
from tools.bench.measuring import Taken, take_rounds
from tools.bench.report import lines_of
from tools.bench.results import CaseResult, CaseResults, CaseRun
from tools.bench.soaking import soak
from tools.lab.commands import Flag, LabError
from tools.lab.results import (
    describe_commit,
    describe_machine,
    read_results,
    replaced,
    write_results,
)
from tools.lab.units import KIB

SHORT_BYTES = 64 * KIB
SHORT_SIDE = 256
SHORT_ROUNDS = 2
SHORT_STEPS = 2
SHORT_OPS = 50
LAG_OPS = 40
MODULES = {"gloo": "torch", "mlx": "mlx.core"}
# One thread for each rank's linear algebra, as torchrun sets it: they share the machine's cores.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


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


def _ops(case: Case, *, short: bool) -> int:
    return SHORT_OPS if short else SOAK_OPS if case.kind == "memory" else LAG_OPS


def _measure(case: Case, rounds: int, ops: int, json: Path | None, *, add: bool) -> None:
    began = time.monotonic()
    print(f"{case.name}: {case.what}", flush=True)
    old = read_results(json, CaseResults) if json is not None and json.exists() else CaseResults()
    found: dict[int, CaseResult] = {}
    for taken in _take(case, rounds, ops):
        found[taken.op_bytes] = measured = _describe(case, taken, ops)
        if json is not None:  # now: who measures may run out of time
            kept = old.measured
            for each in found.values():
                kept = replaced(kept, each, _identity, CaseResult.__add__ if add else None)
            write_results(json, CaseResults(measured=kept))
        seconds = ", ".join(f"{n} {turn.seconds:.3g} s" for n, turn in taken.rounds[-1].items())
        print(f"  round {len(taken.rounds)}: {seconds}", flush=True)
        if len(taken.rounds) == rounds or case.kind in {"memory", "lag"}:
            print("\n".join(f"  {line}" for line in lines_of(measured)), flush=True)
    print(f"  took {time.monotonic() - began:.0f} s", flush=True)


def _identity(measured: CaseResult) -> tuple[str, int]:
    return measured.identity


def _take(case: Case, rounds: int, ops: int) -> Iterator[Taken]:
    if case.kind in {"memory", "lag"}:
        yield from (soak(case, op_bytes, ops) for op_bytes in case.sizes)
    else:
        yield from take_rounds(case, rounds, lambda text: print(f"  {text}", flush=True))


def _describe(case: Case, taken: Taken, ops: int) -> CaseResult:
    options = f" --sizes {taken.op_bytes}" if case.sizes else f" --schemes {','.join(case.turns)}"
    if case.kind == "compressed" and case.layout == "matrix":
        options += f" --side {case.side}"
    is_soak = case.kind in {"memory", "lag"}
    options += f" --ops {ops}" if is_soak else f" --rounds {len(taken.rounds)}"
    made = CaseRun(
        command=f"python -m tools run {case.name}{options}",
        commit=describe_commit(),
        machine=describe_machine(),
        rounds=taken.rounds,
        ceiling=taken.ceiling,
    )
    return CaseResult(
        case=case.name,
        ranks=case.ranks,
        machines=case.machines if 1 < case.machines < case.ranks else 0,
        op_bytes=taken.op_bytes,
        runs=(made,),
        facts=taken.facts,
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
