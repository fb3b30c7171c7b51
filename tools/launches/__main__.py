"""Kills, floods and slow terminals for `pmesh run --on`.

    $ sudo .venv/bin/python -m tools.launches list
    $ sudo .venv/bin/python -m tools.launches run starter ctrl-c --episodes 50 --json kills.json
    $ sudo .venv/bin/python -m tools.launches flood --json flood.json
    $ sudo .venv/bin/python -m tools.launches terminals --json terminals.json

Linux, root.
"""

import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tools.chaos.results import Results, Table
from tools.lab.commands import new_app, run_app
from tools.lab.results import (
    describe_commit,
    describe_machine,
    read_results,
    replaced,
    write_results,
)
from tools.lab.units import MIB
from tools.launches.house import House
from tools.launches.kills import CASES, DEAF_ENDS_S, ENDS_S, Case, Tally, run_case
from tools.launches.output import LINES_PER_S, TERMINALS, Terminal, flood, steps_per_s

EPISODES = 50
MACHINES = 3
app = new_app("launches", __doc__)


@app.command(name="list")
def list_cases() -> None:
    """What is tried."""
    for case in CASES:
        print(f"{case.name:18} {case.what}, --engine {case.engine}")


@app.command
def run(
    *names: str,
    episodes: int = EPISODES,
    seed: int = 1,
    json: Path | None = None,
    logs: Path | None = None,
) -> int:
    """Kill somebody, again and again; exits with 1 if a promise was broken.

    Args:
        names: Of what is tried, as `list` shows them; without any, all.
        episodes: How often each.
        seed: Of the dice.
        json: Where the rows go, for `python -m tools.chaos report`; what it holds of others stays.
        logs: A folder for what all machines have printed.
    """
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        raise ValueError(f"no case is called {', '.join(sorted(unknown))}; 'list' shows them")
    chosen = [case for case in CASES if not names or case.name in names]
    kept = True
    with (
        tempfile.TemporaryDirectory(prefix="launches-") as folder,
        House(MACHINES, logs=logs) as house,
    ):
        for case in chosen:
            print(
                f"{case.name}: {case.what}, --engine {case.engine}; {episodes} times …", flush=True
            )
            began = time.monotonic()
            keep = (lambda _: None) if json is None else partial(_store, json, case)
            tally = run_case(house, case, episodes, seed=seed, folder=Path(folder), keep=keep)
            kept = _tell(case, tally, time.monotonic() - began) and kept
    return 0 if kept else 1


@app.command(name="flood")
def run_flood(
    *, lines_per_s: int = LINES_PER_S, seconds: int = 20, json: Path | None = None
) -> int:
    """Let four machines print; exits with 1 if a line was lost, torn or out of order.

    Args:
        lines_per_s: Of each machine.
        seconds: For how long.
        json: Where the table goes.
    """
    with House(4) as house:
        found = flood(house, lines_per_s=lines_per_s, seconds=seconds)
    for wrong in found.wrong[:10]:
        print(f"  VIOLATION {wrong}")
    wanted = 4 * lines_per_s * seconds
    rows = (
        ("lines printed", f"{wanted:,}"),
        ("lost, torn, or out of order within a rank", f"{wanted - found.lines:,}"),
        (
            f"the slowest rank took, for what it was to print in {seconds} s",
            f"{found.ranks_s:.1f} s",
        ),
        ("until `pmesh run` had printed all and ended", f"{found.took_s:.1f} s"),
        ("most that an agent's own memory grew by", f"{found.agent_growth / MIB:.1f} MiB"),
        ("most memory of `pmesh run`", f"{found.starter_bytes / MIB:.0f} MiB"),
    )
    text = (
        f"Four machines print {lines_per_s:,} lines of about 70 bytes a second each, for {seconds} "
        "s; each line of a machine must be the one after its last. "
    )
    table = _table("Ten thousand lines a second", text, "flood", ("what", "measured"))
    _finish(table, rows, json)
    return int(bool(found.wrong))


@app.command(name="terminals")
def run_terminals(*, seconds: float = 8.0, turns: int = 3, json: Path | None = None) -> int:
    """Train behind a terminal that reads all, one that reads 1 kB/s, and a stopped `pmesh run`.

    Args:
        seconds: Of each training.
        turns: How often each; medians count.
        json: Where the table goes.
    """
    speeds: dict[Terminal, list[float]] = {kind: [] for kind in TERMINALS}
    with tempfile.TemporaryDirectory(prefix="launches-") as folder, House(3) as house:
        for _ in range(turns):
            for kind, found in speeds.items():
                found.append(steps_per_s(house, kind, seconds=seconds, folder=Path(folder)))
                print(f"  {kind}: {found[-1]:.1f} steps/s", flush=True)
    rows = tuple(
        (TERMINALS[kind], f"{statistics.median(found):.1f}", " ".join(f"{v:.0f}" for v in found))
        for kind, found in speeds.items()
    )
    text = "Three ranks sum in each step, and print 20 lines. The terminals take turns. "
    columns = ("terminal", "steps/s, median", "each")
    table = _table("A slow terminal", text, "terminals", columns)
    _finish(table, rows, json)
    return 0


def _table(title: str, text: str, command: str, columns: tuple[str, ...]) -> Table:
    return Table(
        title=title,
        text=f"{text}At {describe_commit()}, {describe_machine()}.",
        command=f"sudo .venv/bin/python -m tools.launches {command}",
        columns=columns,
        rows=(),
    )


def _finish(table: Table, rows: tuple[tuple[str, ...], ...], json: Path | None) -> None:
    for row in rows:
        print(f"  {': '.join(row)}", flush=True)
    if json is not None:
        write_results(json, Results(tables=(replace(table, rows=rows),)))


def _tell(case: Case, tally: Tally, took_s: float) -> bool:
    """Print what was measured; return whether every promise was kept."""
    if tally.ended_s:
        median, most = statistics.median(tally.ended_s), max(tally.ended_s)
        print(f"  nothing left after {median:.2f} s (median), {most:.2f} s (most)", flush=True)
    for violation in tally.violations:
        print(f"  VIOLATION {violation}")
    kept = _is_kept(case, tally)
    count = len(tally.ended_s)
    print(f"  {count} in {took_s:.0f} s: {'met' if kept else 'MISSED'}", flush=True)
    return kept


def _is_kept(case: Case, tally: Tally) -> bool:
    return not tally.violations and 0 < max(tally.ended_s, default=0.0) <= case.ends_s


def _row(case: Case, tally: Tally) -> tuple[str, ...]:
    times = tally.ended_s or [0.0]
    after = "the others train to the end" if case.goes_on else "all ends"
    if case.goes_on and case.trained == MACHINES:
        after = "all train to the end"
    return (
        case.what,
        case.engine,
        after,
        "" if case.code is None else str(case.code),
        str(tally.tried),
        f"{statistics.median(times):.2f}",
        f"{max(times):.2f}",
        "met" if _is_kept(case, tally) else "**MISSED**",
        describe_commit(),
    )


def _store(path: Path, case: Case, tally: Tally) -> None:
    """Into the table of this file, in the place of what was measured of the same before."""
    row = _row(case, tally)
    tables = read_results(path, Results).tables if path.exists() else ()
    before = tables[0].rows if tables else ()
    order = [(case.what, case.engine) for case in CASES]
    known = [cells for cells in before if cells[:2] in order]  # the rest had other names
    rows = replaced(known, row, lambda cells: cells[:2])
    rows = tuple(sorted(rows, key=lambda cells: order.index((cells[0], cells[1]))))  # type: ignore[arg-type]
    text = (
        "Three machines run one rank each, from `pmesh run --on all`. Every rank and a child of it "
        "ignore SIGINT, SIGTERM and SIGHUP. The time is from the blow until no process was left of "
        f"what must end; the bar is {ENDS_S:g} s, and {DEAF_ENDS_S:g} s where a machine's own link "
        "is cut: it hears nobody, and waits for longer before it believes that (V12). The ranks "
        "that go on must reach the last step with the same weights; with gloo and mlx-ring they "
        "start again from the checkpoint that their script writes. Before a link is cut the agents "
        "are new: with one that has recovered from a cut they have more patience, up to 10 s. "
    )
    columns = (
        "what",
        "engine",
        "then",
        "exit code",
        "tried",
        "median, s",
        "most, s",
        "verdict",
        "at",
    )
    table = _table("One command on all machines", text, "run", columns)
    write_results(path, Results(tables=(replace(table, rows=rows),)))


def main(arguments: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    return run_app(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
