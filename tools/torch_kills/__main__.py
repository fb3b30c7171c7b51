"""Training with torch while `kill -9` hits random ranks at random times.

$ python -m tools.torch_kills run --kind elastic --kills 100 --json elastic.json
"""

import json as json_
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch

from tools.demo import NAMES, Demo
from tools.lab.commands import LabError, new_app, run_app
from tools.torch_kills.rounds import PATIENCE_S, run_elastic, run_fixed

app = new_app("torch_kills", __doc__)


@app.command
def run(
    *,
    kind: Literal["elastic", "ddp", "fsdp"] = "elastic",
    kills: int = 100,
    steps: int = 300,
    seed: int = 1,
    json: Path | None = None,
) -> int:
    """Kill so often; exits with 1 if anything was not as it must be.

    Args:
        kind: elastic: killed ranks come back; ddp and fsdp: torch's own, each kill ends a training.
        kills: How many.
        steps: Of each elastic training.
        seed: Of the dice.
        json: Where the figures go.
    """
    torch.set_num_threads(1)  # no thread may run when this forks
    with tempfile.TemporaryDirectory(prefix="pmesh-") as name, Demo(Path(name) / "demo") as demo:
        demo.start_agents(multicast=False)
        if not demo.all_meet(PATIENCE_S):
            raise LabError("the agents did not meet:\n" + demo.log_of(NAMES[0]))
        homes = [demo.home(each) for each in NAMES]
        if kind == "elastic":
            tally = run_elastic(homes, kills, seed, steps)
        else:
            tally = run_fixed(kind, homes, kills, seed)
    if json is not None:
        json.write_text(json_.dumps(asdict(tally), indent=1) + "\n", encoding="utf-8")
    print(f"{kind}: {tally.kills} kills, {len(tally.violations)} violations")
    _show("until the survivors went on or had their error", tally.after_s)
    _show("until the killed rank took part again", tally.back_s)
    if tally.losses:
        print(
            f"{tally.steps} steps compared, {tally.kills_while_entering} ranks killed while they "
            f"entered; loss {min(tally.losses[1:], default=0):.4f} to "
            f"{max(tally.losses[1:], default=0):.4f}, undisturbed {tally.losses[0]:.4f}"
        )
    for violation in tally.violations:
        print(f"VIOLATION {violation}")
    return 1 if tally.violations else 0


def _show(what: str, seconds: Sequence[float]) -> None:
    if seconds:
        ordered = sorted(seconds)
        p95 = ordered[int(0.95 * (len(ordered) - 1))]
        median, most = statistics.median(seconds), ordered[-1]
        print(f"{what}: median {median:.3f} s, p95 {p95:.3f} s, at most {most:.3f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's own arguments if None."""
    return run_app(app, arguments, starts="", needs_lab=False)  # none of its commands starts hosts


if __name__ == "__main__":
    sys.exit(main())
