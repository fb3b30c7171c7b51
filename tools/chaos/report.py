"""docs/explanation/reliability.md, made of what was measured."""

import re
from collections.abc import Sequence

from tools.campaigns import CAMPAIGNS, find_campaign, is_met
from tools.chaos.bars import CAMPAIGNS as CHAOS
from tools.lab import report
from tools.lab.measured import Measured, PageTable, Results, figures_of
from tools.lab.units import seconds_text

PAGE = "reliability"
NOTHING = "-"
_COLUMNS = "fault | op | tried | clean op | median | p95 | p99 | max | ops checked | bar | verdict"


def render(results: Sequence[Results]) -> str:
    measured = [m for file in results for m in file.measured]
    order = [campaign.name for campaign in CAMPAIGNS]
    measured.sort(key=lambda m: (order.index(m.fault), m.op_bytes))
    missed = [m for m in measured if not is_met(m)]
    return report.fill(
        PAGE,
        verdict=_verdict(measured, missed),
        table=report.table(_COLUMNS, map(_row, measured)),
        facts="\n".join(
            f"- **{m.fault}**{_size(m)}: {report.facts_text(m.facts)}." for m in measured if m.facts
        ),
        violations=_violations(missed),
        tables="".join(_table(table) for file in results for table in file.tables),
        commands="\n".join(
            f"    {command}   # at {commit}, {machine}".replace("\n", "\n    ")
            for command, commit, machine in dict.fromkeys(
                (m.command, m.commit, m.machine) for m in measured
            )
        ),
    )


def _size(measured: Measured) -> str:
    is_of_any = find_campaign(measured.fault).one_size
    return "" if is_of_any else f" ({size_text(measured.op_bytes)})"


def _verdict(measured: Sequence[Measured], missed: Sequence[Measured]) -> str:
    said = f"{len(measured) - len(missed)} of {len(measured)} bars met."
    short = [m.fault for m in measured if is_met(m) and _missing_tries(m)]
    if short:
        said += f" In fewer tries than the bar asks for: {', '.join(dict.fromkeys(short))}."
    if missed:
        said += f" Missed: {', '.join(dict.fromkeys(m.fault for m in missed))}."
    return said + report.not_measured((c.name for c in CHAOS), (m.fault for m in measured))


def _row(measured: Measured) -> list[str]:
    campaign = find_campaign(measured.fault)
    took = figures_of(measured.recovery_s)
    clean = figures_of(measured.clean_s)
    return [
        campaign.what,
        NOTHING if campaign.one_size else size_text(measured.op_bytes),
        f"{len(measured.recovery_s) or measured.ops_checked:,}",
        NOTHING if clean is None else seconds_text(clean.median),
        *(map(seconds_text, took[1:]) if took is not None else [NOTHING] * 4),
        f"{measured.ops_checked:,}",
        campaign.bar,
        _judged(measured),
    ]


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


def size_text(nbytes: int) -> str:
    """In the unit that a user thinks in.

    >>> size_text(16 << 20)
    '16 MB'
    """
    return f"{nbytes / 2**20:g} MB"


def _violations(missed: Sequence[Measured]) -> str:
    lines = [
        f"- **{m.fault}** ({size_text(m.op_bytes)}): {len(m.violations)} times; the first: "
        f"{m.violations[0].splitlines()[0]}"
        for m in missed
        if m.violations
    ]
    return "\n".join(["## What went wrong", "", *lines, "", ""]) if lines else ""


def _table(table: PageTable) -> str:
    rows = report.table(" | ".join(table.columns), table.rows)
    return f"## {table.title}\n\n{table.text}\n\n    {table.command}\n\n{rows}\n\n"
