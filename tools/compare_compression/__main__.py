"""Train each model with each scheme, and print how far the final losses are from uncompressed.

python -m tools.compare_compression mlp --json mlp.json --plot mlp.svg
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tools.chaos.results import describe_commit, describe_machine
from tools.compare_compression.cases import CASES, UNCOMPRESSED, Case
from tools.compare_compression.models import MODELS, Model
from tools.compare_compression.page import render
from tools.compare_compression.plot import draw
from tools.compare_compression.report import table_of, verdicts
from tools.compare_compression.results import Measured, Row, finite, read_results, write_results
from tools.compare_compression.training import RANKS, Choice, train

SEEDS = (1, 2, 3)
SHORT_STEPS = 12
_ORDER = (
    *((case, True) for case in CASES if case.is_judged),
    *((case, False) for case in CASES if case.is_judged),
    *((case, True) for case in CASES if not case.is_judged),
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all bars were met, or with --short, which measures nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all if none is named")
    parser.add_argument("--json", type=Path, help="write after each scheme; go on with what it has")
    parser.add_argument("--plot", type=Path, help="draw it into this file: .svg, .png, .pdf")
    parser.add_argument("--page", type=Path, help="write the page of the documentation")
    parser.add_argument("--read", type=Path, nargs="+", help="take results instead of training")
    parser.add_argument("--short", action="store_true", help="a few steps: does it work at all?")
    options = parser.parse_args(argv)
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are: {', '.join(MODELS)}")
    if options.read:
        measured = [each for file in options.read for each in read_results(file)]
    else:
        measured = []
        old = read_results(options.json) if options.json and options.json.exists() else ()
        for name in options.models or MODELS:
            for so_far in measure(MODELS[name](), old, short=options.short):
                if options.json is not None:
                    write_results(options.json, [*measured, so_far])
            measured.append(so_far)
    for each in measured:
        print("\n".join([f"\n{each.model}: {each.what}\n", *table_of(each)]))
    print(f"\n{verdicts(measured)}")
    if options.page is not None:
        options.page.write_text(render(measured), encoding="utf-8")
    if options.plot is not None:
        draw(options.plot, measured)
    met = all(r.is_met(m.plain) for m in measured for r in m.rows if r.feedback and r.is_judged)
    return 0 if met or options.short else 1


def measure(
    model: Model, old: Sequence[Measured] = (), *, short: bool = False
) -> Iterator[Measured]:
    """Train a model with all schemes; what is known at first, and after each of them.

    Those with feedback come first; without it the first seed does, as that is not judged.

    Args:
        model: what is trained.
        old: what an earlier run has written; of the same training it is taken as it is.
        short: one seed, a few steps.
    """
    seeds, steps = (SEEDS[:1], SHORT_STEPS) if short else (SEEDS, model.steps)
    began = time.process_time()
    measured = next((m for m in old if _is_of(m, model, seeds, steps)), None)
    measured = measured or Measured(
        model=model.name,
        what=model.what,
        weights=model.count,
        ranks=RANKS,
        batch=model.batch,
        steps=steps,
        rate=model.rate,
        seeds=seeds,
        command=f"python -m tools.compare_compression {model.name}{' --short' if short else ''}",
        commit=describe_commit(),
        machine=describe_machine(),
        plain=_row(model, seeds, steps, lambda *_: UNCOMPRESSED),
    )
    yield measured
    before_s = measured.took_cpu_s
    for case, feedback in _ORDER:
        if measured.found(case.name, feedback=feedback) is not None:
            continue
        choice = case.compression(feedback=feedback)
        mine = seeds if feedback else seeds[:1]
        row = _row(model, mine, steps, choice, case=case, feedback=feedback)
        took_s = before_s + round(time.process_time() - began)
        measured = msgspec.structs.replace(measured, rows=(*measured.rows, row), took_cpu_s=took_s)
        yield measured


def _is_of(measured: Measured, model: Model, seeds: tuple[int, ...], steps: int) -> bool:
    """Whether it is the same training."""
    same = (model.name, model.count, model.batch, steps, model.rate, seeds)
    m = measured
    return (m.model, m.weights, m.batch, m.steps, m.rate, m.seeds) == same


def _row(
    model: Model,
    seeds: Sequence[int],
    steps: int,
    choice: Choice,
    *,
    case: Case | None = None,
    feedback: bool = False,
) -> Row:
    name = UNCOMPRESSED if case is None else case.name
    trained = [train(model, seed, steps=steps, compression=choice) for seed in seeds]
    row = Row(
        case=name,
        feedback=feedback,
        is_judged=case is not None and case.is_judged,
        losses=tuple(finite(loss) for loss, _ in trained),
        curve=tuple(map(finite, np.mean([curve for _, curve in trained], axis=0))),
    )
    how = ", with feedback" if feedback else ""
    print(f"{model.name}: {name}{how}: {row.mean:.4f}", file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
