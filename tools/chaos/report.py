"""docs/explanation/reliability.md, made of what was measured."""

import re
from collections.abc import Iterator, Sequence

from tools.chaos.bars import CAMPAIGNS, find_campaign, is_met
from tools.chaos.results import Figures, Measured, Results, Table, figures_of

FRAME = """\
# What happens when machines go, measured

<!-- Written by `python -m tools.chaos report`: change the tool, or measure again. -->

Machines crash, sleep, lose their network and come back. This page says how long the others stand
still then, and what was tried to make them disagree. Every number is measured by `tools/chaos`, by
the command that stands beside it; the results lie in `docs/explanation/reliability/`, and a test
compares this page with them.

## How it is measured

Real agents (`pmesh up`) and real trainers run in network namespaces of one Linux machine, one of
each per node, in {nodes} nodes unless the row says otherwise. So all nodes share the machine's
cores, and the links between them are as fast as its memory: a time here contains the waiting of
processes for each other, and no cable. The trainers run the elastic loop of the tutorial, with a
`mesh.sync` before each op, and call one `all_reduce` after the other.

- **Checked**: each trainer gives values that depend on the op, on the trainer and on the place in
  the array, and are whole numbers, so that there is one right sum for each set of contributors.
  Every survivor compares every value of every result with the sum that `mesh.names` promises, and
  the hashes (XXH3, 128 bits) and contributors of all trainers are compared afterwards. An op is
  *torn* when two trainers disagree on its bits or its contributors, or when a survivor has skipped
  one that another has completed. What a dead node alone had completed last is not compared: its
  result has died with it (I4). If only the trainer has died, its agent keeps the result, and it is.
- **Other calls**: in two rows the trainers call all other collectives, strategies and groups, and
  send each other messages, or call every compression, in turn. Their inputs are such that each
  result can be judged: exactly, or within 3 % where values are rounded at every hop. A call that is
  bound to its ranks may raise, but the same at all that are left; who had returned from it gets
  that error from the next call (I5). A group breaks at all its ranks or has one result, a message
  comes once and in order, or its sender or receiver is lost.
- **The moment**: each fault strikes at a seeded random moment after all trainers have called an op.
- **The time**: from just before the fault (the signal, or the packet rule) to the return of the
  call on the *last* survivor, for the first op that no survivor had completed when the fault
  struck. It contains the noticing, the agreement on who is left and the whole rerun of the op.
- **The clean op**: from the last trainer's call to the last trainer's return, of the ops just
  before each fault in the same run. Bars that say *clean* mean its median.
- Killed processes are started again by forks of one that has imported pmesh already, so that a
  thousand kills take an hour; but for the row on cold starts, where agents are started as users do.
- Beside some rows tests and other campaigns ran on the same cores, tests at a low priority. That
  makes times longer, not shorter.

## The table

Times are in seconds. *Ops checked* counts each trainer's. **{verdict}**

{table}

## What else was measured

{facts}

{violations}## Hostile peers

A peer that turns hostile after it has authenticated, which sends wrong frames, wrong epochs and
replays, lies about sizes or stops reading, is not a fault that strikes at a moment: each lie has a
test of its own, in `tests/e2e/test_hostile.py` and `tests/net/`. Its link is closed and named.

{tables}## Repeat it

On Linux, as root (`tools/netlab.py` says what it needs), from a clone after `make venv`:

{commands}
"""
NOTHING = "-"
_HEAD = (
    "| fault | op | tried | clean op | median | p95 | p99 | max | ops checked | bar | verdict |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def render(results: Sequence[Results]) -> str:
    """The whole page."""
    measured = [m for file in results for m in file.measured]
    order = [campaign.name for campaign in CAMPAIGNS]
    measured.sort(key=lambda m: (order.index(m.fault), m.op_bytes))
    missed = [m for m in measured if not is_met(m)]
    return FRAME.format(
        nodes=4,
        verdict=_verdict(measured, missed),
        table="\n".join([*_HEAD, *map(_row, measured)]),
        facts="\n".join(_facts(measured)),
        violations=_violations(missed),
        tables="".join(_table(table) for file in results for table in file.tables),
        commands="\n".join(_commands(measured)),
    )


def _verdict(measured: Sequence[Measured], missed: Sequence[Measured]) -> str:
    unmeasured = [c.name for c in CAMPAIGNS if c.name not in {m.fault for m in measured}]
    said = f"{len(measured) - len(missed)} of {len(measured)} bars met."
    short = [m.fault for m in measured if is_met(m) and _missing_tries(m)]
    if short:
        said += f" In fewer tries than the bar asks for: {', '.join(dict.fromkeys(short))}."
    if missed:
        said += f" Missed: {', '.join(dict.fromkeys(m.fault for m in missed))}."
    if unmeasured:
        said += f" Not measured: {', '.join(unmeasured)}."
    return said


def _row(measured: Measured) -> str:
    campaign = find_campaign(measured.fault)
    took = figures_of(measured.recovery_s)
    clean = figures_of(measured.clean_s)
    cells = [
        campaign.what,
        NOTHING if campaign.one_size else size_text(measured.op_bytes),
        f"{_tried(measured):,}",
        NOTHING if clean is None else seconds_text(clean.median),
        *_times(took),
        f"{measured.ops_checked:,}",
        campaign.bar,
        _judged(measured),
    ]
    return f"| {' | '.join(cells)} |"


def _judged(measured: Measured) -> str:
    if not is_met(measured):
        return "**MISSED**"
    missing = _missing_tries(measured)
    planned = find_campaign(measured.fault).episodes
    return f"met, in {planned - missing:,} of {planned:,}" if missing else "met"


def _missing_tries(measured: Measured) -> int:
    """How many fewer episodes (minutes, for some) were run than the bar asks for."""
    run = [int(count) for count in re.findall(r"--episodes (\d+)", measured.command)]
    return max(0, find_campaign(measured.fault).episodes - sum(run)) if run else 0


def _tried(measured: Measured) -> int:
    return len(measured.recovery_s) or measured.ops_checked


def _times(took: Figures | None) -> list[str]:
    if took is None:
        return [NOTHING] * 4
    return [seconds_text(x) for x in (took.median, took.p95, took.p99, took.maximum)]


def seconds_text(seconds: float) -> str:
    """Milliseconds are what can be told apart.

    >>> seconds_text(0.0654), seconds_text(12.345)
    ('0.065', '12.3')
    """
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"  # noqa: PLR2004 - three digits


def size_text(nbytes: int) -> str:
    """In the unit that a user thinks in.

    >>> size_text(16 << 20)
    '16 MB'
    """
    return f"{nbytes / 2**20:g} MB"


def _facts(measured: Sequence[Measured]) -> Iterator[str]:
    for m in measured:
        if m.facts:
            size = "" if find_campaign(m.fault).one_size else f" ({size_text(m.op_bytes)})"
            said = "; ".join(f"{name}: {value:,.5g}" for name, value in m.facts.items())
            yield f"- **{m.fault}**{size}: {said}."


def _violations(missed: Sequence[Measured]) -> str:
    lines = [
        f"- **{m.fault}** ({size_text(m.op_bytes)}): {len(m.violations)} times; the first: "
        f"{m.violations[0].splitlines()[0]}"
        for m in missed
        if m.violations
    ]
    return "\n".join(["## What went wrong", "", *lines, "", ""]) if lines else ""


def _table(table: Table) -> str:
    lines = [
        f"## {table.title}",
        "",
        table.text,
        "",
        f"    {table.command}",
        "",
        f"| {' | '.join(table.columns)} |",
        "|" + "---|" * len(table.columns),
        *(f"| {' | '.join(row)} |" for row in table.rows),
    ]
    return "\n".join(lines) + "\n\n"


def _commands(measured: Sequence[Measured]) -> Iterator[str]:
    for m in dict.fromkeys((m.command, m.commit, m.machine) for m in measured):
        lines = m[0].replace("\n", "\n    ")
        yield f"    {lines}   # at {m[1]}, {m[2]}"
