"""Train each model with each scheme, and print how far the final losses are from uncompressed.

python -m tools.compare_compression mlp --json mlp.json --plot mlp.svg
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pmesh.compression.schemes import Scheme
from tools.chaos.results import describe_commit, describe_machine
from tools.compare_compression.cases import CASES, UNCOMPRESSED
from tools.compare_compression.models import MODELS, Model
from tools.compare_compression.page import render
from tools.compare_compression.plot import draw
from tools.compare_compression.report import table_of, verdicts
from tools.compare_compression.results import Measured, Row, finite, read_results, write_results
from tools.compare_compression.training import RANKS, train

SEEDS = (1, 2, 3)
SHORT_SEEDS = (1,)
SHORT_STEPS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all bars were met, or with --short, which measures nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all if none is named")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
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
        names = options.models or list(MODELS)
        measured = [measure(MODELS[name](), short=options.short) for name in names]
    print(verdicts(measured))
    if options.json is not None:
        write_results(options.json, measured)
    if options.page is not None:
        options.page.write_text(render(measured), encoding="utf-8")
    if options.plot is not None:
        draw(options.plot, measured)
    met = all(r.is_met(m.plain) for m in measured for r in m.rows if r.feedback and r.is_judged)
    return 0 if met or options.short else 1


def measure(model: Model, *, short: bool) -> Measured:
    """Train it with all schemes; prints its table."""
    seeds, steps = (SHORT_SEEDS, SHORT_STEPS) if short else (SEEDS, model.steps)
    began = time.process_time()

    def row(
        name: str,
        compression: Callable[[int, int], Scheme | str],
        *,
        feedback: bool,
        is_judged: bool,
    ) -> Row:
        print(f"{model.name}: {name}{', with feedback' if feedback else ''} …", file=sys.stderr)
        trained = [train(model, seed, steps=steps, compression=compression) for seed in seeds]
        return Row(
            case=name,
            feedback=feedback,
            is_judged=is_judged,
            losses=tuple(finite(loss) for loss, _ in trained),
            curve=tuple(map(finite, np.mean([curve for _, curve in trained], axis=0))),
        )

    measured = Measured(
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
        plain=row(UNCOMPRESSED, lambda *_: UNCOMPRESSED, feedback=False, is_judged=False),
        rows=tuple(
            row(
                case.name,
                case.compression(feedback=feedback),
                feedback=feedback,
                is_judged=case.is_judged,
            )
            for case in CASES
            for feedback in (True, False)
        ),
        took_cpu_s=round(time.process_time() - began),
    )
    print(f"\n{model.name}: {model.what}, {model.count:,} weights, {steps} steps\n")
    print("\n".join([*table_of(measured), ""]), flush=True)
    return measured


if __name__ == "__main__":
    sys.exit(main())
