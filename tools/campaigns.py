"""All campaigns, and what runs them, keeps what they have measured, and prints it."""

import time
from pathlib import Path
from typing import Annotated

import cyclopts

from tools.chaos.bars import CAMPAIGNS as CHAOS
from tools.hostile.rows import CAMPAIGNS as HOSTILE
from tools.kills.rows import CAMPAIGNS as KILLS
from tools.lab.campaign import Campaign, CampaignRun, Tally
from tools.lab.commands import Flag, LabError
from tools.lab.measured import Measured, Results, figures_of
from tools.lab.results import (
    describe_commit,
    describe_machine,
    read_results,
    replaced,
    write_results,
)
from tools.lab.units import MIB, seconds_text
from tools.launches.rows import CAMPAIGNS as LAUNCHES

CAMPAIGNS: tuple[Campaign, ...] = (*CHAOS, *HOSTILE, *LAUNCHES, *KILLS)
SHORT_OP_BYTES = MIB


def find_campaign(name: str) -> Campaign:
    """The row of this name; raises ValueError."""
    for campaign in CAMPAIGNS:
        if campaign.name == name:
            return campaign
    raise ValueError(f"no campaign is called {name}; 'list' shows them")


def is_met(measured: Measured) -> bool:
    return not measured.violations and find_campaign(measured.fault).holds(measured)


def run(
    *names: str,
    episodes: int | None = None,
    size_mb: Annotated[tuple[float, ...], cyclopts.Parameter(negative="")] = (16.0,),
    steps: int = 0,
    seed: int = 1,
    short: Flag = False,
    add: Flag = False,
    json: Path | None = None,
    logs: Path | None = None,
) -> int:
    """Run campaigns; exits with 1 if a bar was missed.

    Args:
        names: Which, as `list` shows them; after `--` options for what `lora` runs.
        episodes: How often each (the minutes of `churn`, the seconds of `flood`), if not as usual.
        size_mb: Of the ops; may be repeated.
        steps: Of each training of `elastic` and `lora`, if not as many as usual.
        seed: Of the dice.
        short: A few of each that has a short form, with small ops, for CI.
        add: To what `json` holds of the same, with other dice: a long campaign in parts.
        json: Where the results go; what it holds of other campaigns or sizes stays.
        logs: A folder for what all processes have printed.
    """
    first = next((i for i, name in enumerate(names) if name.startswith("-")), len(names))
    chosen = [find_campaign(name) for name in names[:first]]
    if short:
        chosen = [campaign for campaign in chosen if campaign.short_episodes]
        size_mb = (SHORT_OP_BYTES / MIB,)
    met = True
    for campaign in chosen:
        for size in size_mb[:1] if campaign.one_size else size_mb:
            order = CampaignRun(
                episodes=episodes or (campaign.short_episodes if short else campaign.episodes),
                op_bytes=int(size * MIB),
                seed=seed,
                logs=logs / f"{campaign.name}-{size:g}" if logs is not None else None,
                short=short,
                steps=steps,
                words=names[first:],
            )
            measured = _measure(campaign, order)
            _print(measured)
            met = met and is_met(measured)
            if json is not None:
                keep(json, measured, add=add)
    return 0 if met else 1


def _measure(campaign: Campaign, order: CampaignRun) -> Measured:
    began = time.monotonic()
    print(f"{campaign.name}: {campaign.what}; {order.episodes:,} times …", flush=True)
    try:
        tally = campaign.run(order)
    except LabError as e:
        tally = Tally(violations=[str(e)])
    size = "" if campaign.one_size else f" --size-mb {order.op_bytes / MIB:g}"
    more = " ".join(["", *(["--", *order.words] if order.words else ())])
    return Measured(
        fault=campaign.name,
        command=f"python -m tools run {campaign.name} --episodes {order.episodes}{size} "
        f"--seed {order.seed}{more}",
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
    for name, values in (("clean op", measured.clean_s), ("then", measured.recovery_s)):
        if figures := figures_of(values):
            names = ("median", "p95", "p99", "max")
            texts = ", ".join(
                f"{what} {seconds_text(x)}" for what, x in zip(names, figures[1:], strict=True)
            )
            print(f"  {name}: {texts} s ({figures.tried} times)")
    for name, value in measured.facts.items():
        print(f"  {name}: {value:,.5g}")
    print(f"  {measured.ops_checked:,} ops checked, {len(measured.violations)} violations")
    for violation in measured.violations[:5]:
        print(f"  VIOLATION {violation}")
    bar = find_campaign(measured.fault).bar
    print(f"  {bar}: {'met' if is_met(measured) else 'MISSED'}", flush=True)
