"""Attacks on real agents that train, and what the training notices.

    $ sudo .venv/bin/python -m tools.hostile                      # all rows: an hour and a half
    $ sudo .venv/bin/python -m tools.hostile mdns-1000 --json hostile.json
    $ sudo .venv/bin/python -m tools.hostile --short

Linux, root.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.chaos.results import Results, Table
from tools.hostile.rows import ROWS, Judged, Row
from tools.hostile.turns import run_turns
from tools.lab.commands import Flag, LabError, new_app, run_app
from tools.lab.results import describe_commit, describe_machine, write_results

SHORT_S = 5.0
app = new_app("hostile", __doc__)


@app.default
def run(
    *names: str,
    turns: int = 3,
    seconds: float | None = None,
    short: Flag = False,
    json: Path | None = None,
    logs: Path | None = None,
) -> int:
    """Run the rows of these names, or all; exits with 1 if a bar was missed.

    Args:
        names: Of rows.
        turns: How often the attack and its control follow each other; medians count.
        seconds: Of each attack and each control, if not as the bar says.
        short: One turn of 5 seconds, for CI: its figures say little.
        json: Where the table goes, for `python -m tools.chaos report`.
        logs: A folder for what all machines have printed.
    """
    if short:
        turns, seconds = 1, SHORT_S
    rows: list[tuple[str, ...]] = []
    for row in ROWS:
        if not names or row.name in names:
            print(f"{row.name}: {row.what} …", flush=True)
            rows.append(_tell(row.what, _measure(row, turns, seconds, logs)))
    if json is not None:
        write_results(json, Results(tables=(_table(rows),)))
    return int(any(cells[-1] != "met" for cells in rows))


def _measure(row: Row, turns: int, seconds: float | None, logs: Path | None) -> list[Judged]:
    try:
        return list(row.judge(run_turns(row.order(seconds=seconds), turns, logs)))
    except LabError as e:
        return [Judged("hung", str(e), met=False)]


def _tell(what: str, figures: Sequence[Judged]) -> tuple[str, ...]:
    missed = ", ".join(figure.name for figure in figures if not figure.met)
    verdict = f"MISSED: {missed}" if missed else "met"
    figures_text = "; ".join(f"{figure.name} {figure.value}" for figure in figures)
    print(f"  {figures_text}: {verdict}", flush=True)
    return what, figures_text, verdict


def _table(rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(
        title="Hostile neighbours",
        text="Each attack beside a control that sends the same to nobody, in turn; medians. The "
        "descriptors and the memory are of the agent that took most more of them; `join` is until "
        "a third machine was in everybody's view while the attack went on; `at rest` is from its "
        f"end until the ops/s were 95 % of before. At {describe_commit()}, {describe_machine()}.",
        command=f"sudo .venv/bin/python -m tools.hostile {shlex.join(sys.argv[1:])}".rstrip(),
        columns=("attack", "control → attack", "verdict"),
        rows=tuple(rows),
    )


def main() -> int:
    return run_app(app, None, starts=None)


if __name__ == "__main__":
    sys.exit(main())
