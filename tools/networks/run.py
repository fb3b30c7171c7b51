"""pmesh on networks as people have them: steps of training and small calls beside gloo, and faults.

Linux, root, a C compiler, torch. Each profile is in `tools.networks.lab`.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.json import decode

from tools.bench.systems import RankHosts, gloo_settings, start_ranks
from tools.lab.call import words_for
from tools.lab.campaign import CampaignRun
from tools.lab.commands import Flag
from tools.lab.mesh import LabMesh, Node
from tools.lab.net import LabHost
from tools.lab.program import await_that
from tools.lab.report import BarVerdict
from tools.networks.faults import judge_faults
from tools.networks.lab import PROFILES, SlowLab, measure_round_trip_s
from tools.networks.results import StepLine, StepsTaken, verdicts_of, verdicts_of_calls
from tools.networks.worker import work

SHORT = ("crowded",)
SHORT_S = 3.0
SYSTEMS = ("gloo", "pmesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What the ranks do."""

    seconds: float
    nbytes: int
    """Of gradients in each step."""
    sync: bool
    """pmesh's ranks call mesh.sync() before each step."""


def steps(
    *profiles: str,
    seconds: float = 30.0,
    seeds: tuple[int, ...] = (1,),
    hosts: int = 3,
    mib: float = 1.0,
    plain: Flag = False,
    short: Flag = False,
    logs: Path | None = None,
) -> int:
    """Measure networks, one after the other; nothing else should run meanwhile.

    Args:
        profiles: Which; without any, all.
        seconds: How long each system makes steps.
        seeds: Of the network's dice; may be repeated.
        hosts: How many ranks, each on a host of its own.
        mib: Of gradients in each step.
        plain: pmesh's ranks leave out mesh.sync(), which gloo does not have.
        short: Crowded Wi-Fi for some seconds, with the bars of safety only: for CI.
        logs: Where all that was printed goes.

    Returns:
        1 if a bar was missed.
    """
    load = StepLoad(seconds=SHORT_S if short else seconds, nbytes=int(mib * 2**20), sync=not plain)
    missed = 0
    for profile in profiles or (SHORT if short else PROFILES):
        for seed in seeds:
            found = _take_turns(profile, load, hosts=hosts, seed=seed, logs=logs)
            missed += _show(verdicts_of(found["pmesh"], found["gloo"], short=short))
    return int(missed > 0)


def calls(
    *profiles: str,
    seconds: float = 30.0,
    seed: int = 1,
    short: Flag = False,
    logs: Path | None = None,
) -> int:
    """Measure an all-reduce of 4 KiB between two hosts beside their round trip, in turns.

    Args:
        profiles: Which; without any, homes, far and orbit.
        seconds: How long each system makes calls.
        seed: Of the network's dice.
        short: Between two homes for some seconds, with the bars of safety only: for CI.
        logs: Where all that was printed goes.

    Returns:
        1 if a bar was missed.
    """
    load = StepLoad(seconds=SHORT_S if short else seconds, nbytes=4096, sync=False)
    missed = 0
    for profile in profiles or (("homes",) if short else ("homes", "far", "orbit")):
        trip_s = measure_round_trip_s(profile, seed=seed)
        found = _take_turns(profile, load, hosts=2, seed=seed, logs=logs)
        missed += _show(verdicts_of_calls(found["pmesh"], found["gloo"], trip_s, short=short))
    return int(missed > 0)


def faults(
    *profiles: str,
    episodes: int = 5,
    partition_s: tuple[float, ...] = (1.0, 5.0, 30.0),
    mib: float = 1.0,
    seed: int = 1,
    short: Flag = False,
    logs: Path | None = None,
) -> int:
    """Kill ranks, cut hosts off and part the network while three hosts train.

    Args:
        profiles: Which; without any, all.
        episodes: Of each fault.
        partition_s: How long the partitions last; may be repeated.
        mib: Of each op.
        seed: Of all dice.
        short: Once each between homes, with the bars of safety only: for CI.
        logs: Where all that was printed goes.

    Returns:
        1 if a bar was missed.
    """
    if short:
        episodes, partition_s, mib = 1, (1.0,), 1 / 16
    order = CampaignRun(episodes=episodes, op_bytes=int(mib * 2**20), seed=seed, logs=logs)
    missed = 0
    for profile in profiles or (("homes",) if short else PROFILES):
        print(f"{profile}, {episodes} times each:", flush=True)
        missed += _show(judge_faults(profile, order, partition_s, timed=not short))
    return int(missed > 0)


def _take_turns(
    profile: str, load: StepLoad, *, hosts: int, seed: int, logs: Path | None
) -> dict[str, StepsTaken]:
    found: dict[str, StepsTaken] = {}
    for system in SYSTEMS:
        with contextlib.ExitStack() as stack:
            if logs is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nets-")))
            else:
                folder = logs / f"{profile}-{seed}-{system}"
                folder.mkdir(parents=True)
            lab = stack.enter_context(SlowLab(hosts, PROFILES[profile], seed=seed))
            found[system] = measure(lab.hosts, system, folder, load)
        print(f"{profile}, seed {seed}, {system}: {found[system]}", flush=True)
    return found


def _show(verdicts: Iterable[BarVerdict]) -> int:
    """Print a line for each; return how many were missed."""
    missed = 0
    for verdict in verdicts:
        line = f"  {verdict.what}: {verdict.value} ({verdict.bar}): {verdict.outcome}"
        print(line, flush=True)
        missed += verdict.outcome == "MISSED"
    return missed


def measure(hosts: Sequence[LabHost], system: str, folder: Path, load: StepLoad) -> StepsTaken:
    """Let one system make steps for so long."""
    with contextlib.ExitStack() as stack:
        nodes: Sequence[Node] = ()
        environments = gloo_settings(RankHosts(hosts=tuple(hosts)), folder)
        if system == "pmesh":
            mesh = stack.enter_context(LabMesh(hosts, folder=folder, logs=folder))
            mesh.start_agents()
            mesh.await_view()
            nodes, environments = mesh.nodes, [node.environment for node in mesh.nodes]
        commands = [
            words_for(work, system, rank, len(hosts), load.nbytes, load.sync)
            for rank, _ in enumerate(hosts)
        ]
        workers = start_ranks(hosts, system, commands, environments, folder=folder, stack=stack)
        await_that(
            lambda: all(any('"step"' in line for line in rank.printed()) for rank in workers),
            f"a step of {system}",
            of=workers,
        )
        before = _views(nodes)
        began = time.monotonic()
        time.sleep(load.seconds)
        ended = time.monotonic()
        views = _views(nodes) - before
        ranks = [[decode(line, type=StepLine) for line in rank.printed()] for rank in workers]
        (folder / "lines.json").write_bytes(msgspec.json.encode(ranks))
        for node in nodes:
            (folder / f"{node.name}.events").write_text(mesh.run_command(node, "events"))
        return StepsTaken.of(ranks, began=began, ended=ended, views=views)


def _views(nodes: Sequence[Node]) -> int:
    return max((node.epoch for node in nodes), default=0)
