"""Fine-tuning by mlx-lm's command line while `kill -9` hits any rank at random times.

$ python -m tools.lora kills --kills 50 --json kills.json

A tiny model to try `pmesh mlx -- mlx_lm.lora` with, without a download:

$ python -m tools.lora tiny /tmp/tiny
"""

import json as json_
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tools.lab.commands import new_app, run_app
from tools.lora.kills import run_kills
from tools.lora.tiny import make_data, make_model

app = new_app("lora", __doc__)


@app.command
def kills(
    *options: str,
    kills: int = 50,
    iterations: int = 600,
    seed: int = 1,
    json: Path | None = None,
) -> int:
    """Kill so often; exits with 1 if anything was not as it must be.

    Args:
        options: Further ones of mlx_lm.lora, after --.
        kills: How many, over several trainings.
        iterations: Of each training.
        seed: Of the dice.
        json: Where the figures go.
    """
    tally = run_kills(kills, iterations=iterations, seed=seed, options=options)
    if json is not None:
        json.write_text(json_.dumps(asdict(tally), indent=1) + "\n", encoding="utf-8")
    back = statistics.median(tally.back_s) if tally.back_s else 0.0
    print(
        f"{tally.kills} kills in {tally.trainings - 1} trainings of {iterations} iterations, "
        f"{tally.kills_of_rank_0} of rank 0, {tally.kills_while_entering} while it came back; "
        f"median {back:.1f} s until a killed rank took part again; validation loss "
        f"{min(tally.losses[1:], default=0):.3f} to {max(tally.losses[1:], default=0):.3f}, "
        f"undisturbed {tally.losses[0]:.3f}"
    )
    for violation in tally.violations:
        print(f"VIOLATION {violation}")
    return 1 if tally.violations else 0


@app.command
def tiny(folder: Path) -> int:
    """Make a tiny random model and data to fine-tune it with; nothing is downloaded.

    Args:
        folder: Where; the model goes to `model` in it, the data to `data`.
    """
    model, data = make_model(folder / "model"), make_data(folder / "data")
    print(f"a model of 0.2 million weights: {model}\nits data: {data}\n\ntype on each machine:")
    words = f"--model {model} --data {data} --train --iters 100 --batch-size 4 --num-layers 4"
    print(f"pmesh mlx mlx_lm.lora {words} --adapter-path {folder / 'adapters'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's own arguments if None."""
    return run_app(app, arguments, starts=None, needs_lab=False)


if __name__ == "__main__":
    sys.exit(main())
