"""Training while `kill -9` hits random ranks at random times.

$ python -m tools.kills list
$ python -m tools.kills run elastic --kills 100 --json elastic.json
$ python -m tools.kills run lora --kills 50
"""

import json as json_
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, Literal, TypeAlias

from tools.kills.campaign import RANKS, Tally
from tools.kills.workloads import run_elastic, run_fixed, run_lora
from tools.lab.commands import new_app, run_app
from tools.lab.mesh import Mesh

Kind: TypeAlias = Literal["elastic", "ddp", "fsdp", "lora"]
WHAT: Final[dict[Kind, str]] = {
    "elastic": "pmesh.torch's elastic DDP: ranks that are killed come back",
    "ddp": "torch's own DDP: each kill ends a training, with an error at all who are left",
    "fsdp": "torch's own FSDP2, likewise",
    "lora": "pmesh mlx -- mlx_lm.lora --train: ranks that are killed come back",
}
STEPS: Final = {"elastic": 300, "lora": 600}
app = new_app("kills", __doc__)


@app.command(name="list")
def list_kinds() -> None:
    """What is trained."""
    for kind, what in WHAT.items():
        print(f"{kind:8} {what}")


@app.command
def run(
    kind: Kind,
    *options: str,
    kills: int = 50,
    steps: int | None = None,
    seed: int = 1,
    json: Path | None = None,
) -> int:
    """Kill so often; exits with 1 if anything was not as it must be.

    Args:
        kind: What is trained, as `list` shows it.
        options: Further ones of mlx_lm.lora, after --.
        kills: How many, over several trainings.
        steps: Of each training in which ranks come back.
        seed: Of the dice.
        json: Where the figures go.
    """
    steps = steps or STEPS.get(kind, 0)
    with Mesh(RANKS) as mesh:
        mesh.start_agents()
        mesh.await_view()
        if kind == "elastic":
            tally = run_elastic(mesh, kills, steps, seed)
        elif kind == "lora":
            tally = run_lora(mesh, kills, steps, seed, options)
        else:
            tally = run_fixed(mesh, kind, kills, seed)
    if json is not None:
        json.write_text(json_.dumps(asdict(tally), indent=1) + "\n", encoding="utf-8")
    _show(kind, tally)
    return 1 if tally.violations else 0


def _show(kind: str, tally: Tally) -> None:
    print(
        f"{kind}: {tally.kills} kills in {tally.trainings} trainings, {tally.kills_of_rank_0} of "
        f"rank 0, {tally.kills_while_entering} while it came back; "
        f"{len(tally.violations)} violations"
    )
    _show_times("until the survivors went on or had their error", tally.after_s)
    _show_times("until the killed rank took part again", tally.back_s)
    if tally.losses:
        first, *others = tally.losses
        print(
            f"{tally.steps} steps compared; loss {min(others, default=0):.4f} to "
            f"{max(others, default=0):.4f}, undisturbed {first:.4f}"
        )
    for violation in tally.violations:
        print(f"VIOLATION {violation}")


def _show_times(what: str, seconds: Sequence[float]) -> None:
    if seconds:
        ordered = sorted(seconds)
        p95 = ordered[int(0.95 * (len(ordered) - 1))]
        median, most = statistics.median(seconds), ordered[-1]
        print(f"{what}: median {median:.3f} s, p95 {p95:.3f} s, at most {most:.3f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's own arguments if None."""
    return run_app(app, arguments, starts="", needs_lab=False)  # no command starts hosts


if __name__ == "__main__":
    sys.exit(main())
