"""pmesh on networks as people have them: steps of training and small calls beside gloo, and faults.

    $ sudo .venv/bin/python -m tools.networks run --short
    $ sudo .venv/bin/python -m tools.networks run far crowded --seconds 120 --seeds 1 --seeds 2
    $ sudo .venv/bin/python -m tools.networks calls
    $ sudo .venv/bin/python -m tools.networks faults homes --episodes 10 --partition-s 30

Linux, root, a C compiler, torch. Each profile is in `tools.networks.lab`.
"""

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tools.bench.systems import ROOT, Place, Process
from tools.chaos.episodes import Run
from tools.lab.agents import await_status, new_key, status_of
from tools.lab.commands import Flag, LabError, new_app, run_app
from tools.lab.report import Verdict
from tools.networks.faults import judge_faults
from tools.networks.lab import PROFILES, SlowLab, measure_round_trip_s
from tools.networks.results import Line, Outcome, verdicts_of, verdicts_of_calls

START_S = 60.0
SHORT = ("wired", "crowded")
SHORT_S = 5.0
SYSTEMS = ("gloo", "pmesh")
AGENT = "from pmesh.cli import main; main()"
app = new_app("networks", __doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the ranks do."""

    seconds: float
    nbytes: int
    """Of gradients in each step."""
    sync: bool
    """pmesh's ranks call mesh.sync() before each step."""


@app.command
def run(
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
        short: A cable and crowded Wi-Fi for some seconds, with the bars of safety only: for CI.
        logs: Where all that was printed goes.

    Returns:
        1 if a bar was missed.
    """
    load = Load(seconds=SHORT_S if short else seconds, nbytes=int(mib * 2**20), sync=not plain)
    missed = 0
    for profile in profiles or (SHORT if short else PROFILES):
        for seed in seeds:
            found = _take_turns(profile, load, hosts=hosts, seed=seed, logs=logs)
            missed += _show(verdicts_of(found["pmesh"], found["gloo"], short=short))
    return int(missed > 0)


@app.command
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
    load = Load(seconds=SHORT_S if short else seconds, nbytes=4096, sync=False)
    missed = 0
    for profile in profiles or (("homes",) if short else ("homes", "far", "orbit")):
        trip_s = measure_round_trip_s(profile, seed=seed)
        found = _take_turns(profile, load, hosts=2, seed=seed, logs=logs)
        missed += _show(verdicts_of_calls(found["pmesh"], found["gloo"], trip_s, short=short))
    return int(missed > 0)


@app.command
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
    order = Run(episodes=episodes, op_bytes=int(mib * 2**20), seed=seed, logs=logs)
    missed = 0
    for profile in profiles or (("homes",) if short else PROFILES):
        print(f"{profile}, {episodes} times each:", flush=True)
        missed += _show(judge_faults(profile, order, partition_s, timed=not short))
    return int(missed > 0)


def _take_turns(
    profile: str, load: Load, *, hosts: int, seed: int, logs: Path | None
) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for system in SYSTEMS:
        with contextlib.ExitStack() as stack:
            if logs is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nets-")))
            else:
                folder = logs / f"{profile}-{seed}-{system}"
                folder.mkdir(parents=True)
            lab = stack.enter_context(SlowLab(hosts, PROFILES[profile], seed=seed))
            found[system] = measure(Place(ranks=hosts, hosts=lab.hosts), system, folder, load)
        print(f"{profile}, seed {seed}, {system}: {found[system]}", flush=True)
    return found


def _show(verdicts: Iterable[Verdict]) -> int:
    """Print a line for each; return how many were missed."""
    missed = 0
    for verdict in verdicts:
        line = f"  {verdict.what}: {verdict.value} ({verdict.bar}): {verdict.outcome}"
        print(line, flush=True)
        missed += verdict.outcome == "MISSED"
    return missed


def measure(place: Place, system: str, folder: Path, load: Load) -> Outcome:
    """Let one system make steps for so long."""
    with contextlib.ExitStack() as stack:
        environments = [{"PYTHONPATH": str(ROOT)} for _ in range(place.ranks)]
        homes: list[Path] = []
        if system == "pmesh":
            homes = _start_agents(place, folder, environments, stack)
        else:
            for environment in environments:
                environment["GLOO_SOCKET_IFNAME"] = place.interface
                environment["NETWORKS_STORE"] = str(folder / "store")
        ranks: list[list[Line]] = []
        for rank, environment in enumerate(environments):
            options = (system, rank, place.ranks, load.nbytes, "sync" if load.sync else "plain")
            command = [sys.executable, "-m", "tools.networks.worker", *map(str, options)]
            log = folder / f"{system}-{rank}.log"
            worker = stack.enter_context(
                Process(place, rank, command, environment=environment, log=log)
            )
            ranks.append([])
            threading.Thread(target=_collect, args=(worker, ranks[-1]), daemon=True).start()
        deadline = time.monotonic() + START_S
        while not all(any(line.what == "step" for line in rank) for rank in ranks):
            if time.monotonic() > deadline:
                raise LabError(f"{system} has made no step in {START_S:.0f} s")
            time.sleep(0.05)
        before = _views(homes)
        began = time.monotonic()
        time.sleep(load.seconds)
        ended = time.monotonic()
        views = _views(homes) - before
        (folder / "lines.json").write_bytes(msgspec.json.encode(ranks))
        for home in homes:
            events = subprocess.run(
                [sys.executable, "-c", AGENT, "events", "--home", str(home)],
                capture_output=True,
                check=False,
                text=True,
            )
            (folder / f"{home.name}.events").write_text(events.stdout + events.stderr)
        return Outcome.of(ranks, began=began, ended=ended, views=views)


def _start_agents(
    place: Place, folder: Path, environments: list[dict[str, str]], stack: contextlib.ExitStack
) -> list[Path]:
    homes, key = [folder / f"mac-{rank + 1}" for rank in range(place.ranks)], new_key()
    for rank, (home, environment) in enumerate(zip(homes, environments, strict=True)):
        home.mkdir(mode=0o700)
        environment |= {"PMESH_HOME": str(home), "PMESH_KEY": key}
        up = [sys.executable, "-c", AGENT, "up", "--name", home.name]
        log = folder / f"{home.name}.log"
        stack.enter_context(Process(place, rank, up, environment=environment, log=log))
    for home in homes:
        if not await_status(
            home, lambda picture: len(picture["view"]["members"]) == len(homes), within_s=START_S
        ):
            raise LabError(f"{home.name} has not met the others in {START_S:.0f} s")
    return homes


def _views(homes: Sequence[Path]) -> int:
    return max((status_of(home)["view"]["epoch"]["counter"] for home in homes), default=0)


def _collect(worker: Process, into: list[Line]) -> None:
    with contextlib.suppress(LabError):  # it was killed at the end of the measurement
        while True:
            into.append(msgspec.json.decode(worker.hear(timeout_s=1e6), type=Line))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; errors are one line."""
    return run_app(app, arguments, starts=None)


if __name__ == "__main__":
    sys.exit(main())
