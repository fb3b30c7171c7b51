"""Chaos campaigns against real agents and trainers, and the page that reports them.

    $ sudo .venv/bin/python -m tools.chaos list
    $ sudo .venv/bin/python -m tools.chaos run kill-node --size-mb 64 --json kill-node.json
    $ python -m tools.chaos report *.json > docs/explanation/reliability.md

Linux, root.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import cyclopts

from tools.chaos.bars import CAMPAIGNS, Campaign, find_campaign, is_met
from tools.chaos.episodes import Run, Tally
from tools.chaos.report import render, size_text
from tools.chaos.results import Measured, Results, figures_of
from tools.lab.commands import Flag, LabError, new_app, run_app
from tools.lab.results import (
    describe_commit,
    describe_machine,
    read_results,
    replaced,
    write_results,
)
from tools.lab.units import MIB, seconds_text

SHORT_OP_BYTES = MIB
app = new_app("chaos", __doc__)


@app.command(name="list")
def list_campaigns() -> None:
    """The campaigns, with how often each is tried and its bar."""
    for campaign in CAMPAIGNS:
        print(f"{campaign.name:16} {campaign.episodes:7,} times {campaign.what}: {campaign.bar}")


@app.command
def run(
    *faults: str,
    episodes: int | None = None,
    size_mb: Annotated[tuple[float, ...], cyclopts.Parameter(negative="")] = (16.0,),
    seed: int = 1,
    short: Flag = False,
    add: Flag = False,
    json: Path | None = None,
    logs: Path | None = None,
) -> int:
    """Run campaigns; exits with 1 if a bar was missed.

    Args:
        faults: Which; without any, all, or with --short those that have a short form.
        episodes: How often each (the minutes of `churn`), if not as `list` says.
        size_mb: Of the ops; may be repeated.
        seed: Of the dice.
        short: A few of each, with small ops, for CI.
        add: To what `json` holds of the same, with other dice: a long campaign in parts.
        json: Where the results go; what it holds of other faults or sizes stays.
        logs: A folder for what all processes have printed.
    """
    chosen = [find_campaign(name) for name in faults] or list(CAMPAIGNS)
    if short:
        chosen = [campaign for campaign in chosen if campaign.short_episodes]
        size_mb = (SHORT_OP_BYTES / MIB,)
    met = True
    for campaign in chosen:
        for size in size_mb[:1] if campaign.one_size else size_mb:
            count = episodes or (campaign.short_episodes if short else campaign.episodes)
            where = logs / f"{campaign.name}-{size:g}" if logs is not None else None
            order = Run(episodes=count, op_bytes=int(size * MIB), seed=seed, logs=where)
            measured = _measure(campaign, order)
            _print(measured)
            met = met and is_met(measured)
            if json is not None:
                keep(json, measured, add=add)
    return 0 if met else 1


@app.command
def report(*files: Path) -> None:
    """Write the page, from the results in these files, to standard output."""
    print(render([read_results(file, Results) for file in files]), end="")


def _measure(campaign: Campaign, order: Run) -> Measured:
    began = time.monotonic()
    print(f"{campaign.name}: {campaign.what}; {order.episodes:,} times …", flush=True)
    try:
        tally = campaign.run(order)
    except LabError as e:
        tally = Tally(violations=[str(e)])
    size = "" if campaign.one_size else f" --size-mb {order.op_bytes / MIB:g}"
    program = "python -m tools.chaos run"
    return Measured(
        fault=campaign.name,
        command=f"{program} {campaign.name} --episodes {order.episodes}{size} --seed {order.seed}",
        commit=describe_commit(),
        machine=describe_machine(),
        nodes=4,
        op_bytes=order.op_bytes,
        seed=order.seed,
        recovery_s=tuple(round(x, 6) for x in tally.recovery_s),
        clean_s=tuple(round(x, 6) for x in tally.clean_s),
        ops_checked=tally.ops_checked,
        violations=tuple(tally.violations),
        facts=tally.facts | {"took, s": round(time.monotonic() - began, 1)},
    )


def keep(path: Path, measured: Measured, *, add: bool = False) -> None:
    """Into the file, in the place of what was measured of the same before, or with it."""
    old = read_results(path, Results) if path.exists() else Results()
    joined = Measured.with_more if add else None
    kept = replaced(old.measured, measured, lambda m: (m.fault, m.op_bytes), joined)
    write_results(path, Results(measured=kept, tables=old.tables))


def _print(measured: Measured) -> None:
    for name, values in (("clean op", measured.clean_s), ("next op", measured.recovery_s)):
        if figures := figures_of(values):
            names = ("median", "p95", "p99", "max")
            texts = ", ".join(
                f"{what} {seconds_text(x)}" for what, x in zip(names, figures[1:], strict=True)
            )
            print(f"  {name} of {size_text(measured.op_bytes)}: {texts} s ({figures.tried} times)")
    for name, value in measured.facts.items():
        print(f"  {name}: {value:,.5g}")
    print(f"  {measured.ops_checked:,} ops checked, {len(measured.violations)} violations")
    for violation in measured.violations[:5]:
        print(f"  VIOLATION {violation}")
    bar = find_campaign(measured.fault).bar
    print(f"  {bar}: {'met' if is_met(measured) else 'MISSED'}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_app(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
