"""Somebody is killed, or cut off, while ranks train; what must end ends, and the others go on."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, TypeAlias

import numpy as np
from sklearn.datasets import load_digits

from tools.lab.campaign import CampaignRun, Tally
from tools.lab.commands import LabError
from tools.lab.mesh import Node
from tools.lab.program import await_that
from tools.launches.house import House, alive, command_of, lines_of

ENDS_S = 5.0
"""Within so long nothing may be left of what must end."""
DEAF_ENDS_S = 10.0
"""The same on a machine whose own link is cut: it hears nobody, and waits for longer (V12)."""
STARTS_S, TRAINS_S = 90.0, 90.0  # a busy machine imports torch for a while
FOR_EVER = 10**6
MACHINES = 3
ACCURACY = 0.85
SCRIPTS = Path(__file__).parent / "scripts"
# The rank and a child of it heed no signal.
STUBBORN = 'trap "" INT TERM HUP; sleep 86400 & exec "$0" "$@"'

Engine: TypeAlias = Literal["pmesh", "gloo", "mlx-ring"]
Victim: TypeAlias = Literal["rank", "agent", "machine", "cable", "starter", "ctrl-c"]

_SCRIPT = {"pmesh": "pmesh_digits.py", "gloo": "torch_digits.py", "mlx-ring": "mlx_digits.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """Whom to strike, and what is promised then."""

    name: str
    what: str
    victim: Victim
    engine: Engine = "pmesh"
    of_starter: bool = False
    """The victim's machine is the one on which the launch was started."""
    comes_back: bool = False
    """The agent is started again at once."""
    restarts: int = 10
    code: int | None = 0
    """The exit code; None if `pmesh run` itself is killed."""
    goes_on: bool = True
    """The ranks that are left train to the end."""

    @property
    def bar(self) -> str:
        goes_on = "all train" if self.trained == MACHINES else "the others train"
        then = f", and {goes_on} to the end" if self.goes_on else ""
        code = "" if self.code is None else f"; exit code {self.code}"
        return f"nothing is left after {self.ends_s:g} s{then}{code}"

    @property
    def steps(self) -> int:
        if not self.goes_on:
            return FOR_EVER
        return 300 if self.comes_back else 60

    @property
    def ends_s(self) -> float:
        return DEAF_ENDS_S if self.victim == "cable" and not self.of_starter else ENDS_S

    @property
    def trained(self) -> int:
        """How many of three ranks reach the end."""
        return 3 if self.victim == "rank" or self.comes_back else 2


def _for_engines(name: str, what: str, victim: Victim) -> list[Blow]:
    engines: tuple[Engine, ...] = ("pmesh", "gloo", "mlx-ring")
    return [Blow(name=f"{name}-{e}", what=what, victim=victim, engine=e) for e in engines]


def _of_starter(
    name: str, what: str, victim: Victim, *, code: int | None, of_starter: bool = True
) -> Blow:
    return Blow(
        name=name, what=what, victim=victim, of_starter=of_starter, code=code, goes_on=False
    )


# fmt: off
BLOWS = (
    *_for_engines("rank", "kill -9 of a rank", "rank"),
    *_for_engines("agent", "kill -9 of an agent", "agent"),
    *_for_engines("machine", "kill -9 of all on a machine", "machine"),
    *_for_engines("cable", "the link of a machine is cut", "cable"),
    Blow(name="back", what="kill -9 of an agent that is started again", victim="agent",
         comes_back=True),
    Blow(name="rank-once", what="kill -9 of a rank, --restarts 0", victim="rank",
         engine="mlx-ring", restarts=0, code=137, goes_on=False),
    _of_starter("ctrl-c", "Ctrl-C", "ctrl-c", code=130),
    _of_starter("starter", "kill -9 of `pmesh run`", "starter", code=None),
    _of_starter("starter-agent", "kill -9 of the starter's agent", "agent", code=1),
    _of_starter("starter-machine", "kill -9 of all on its machine", "machine", code=None),
    _of_starter("starter-cable", "the link of its machine is cut", "cable", code=None),
)
# fmt: on


def write_digits(folder: Path) -> Path:
    """scikit-learn's digits, in a form that loads in milliseconds."""
    images, labels = load_digits(return_X_y=True)
    path = folder / "digits.npz"
    np.savez(path, images=(images / 16).astype(np.float32), labels=labels.astype(np.int64))
    return path


def run_blows(run: CampaignRun, case: Blow) -> Tally:
    """Strike so many times; what goes wrong is kept, and the house begins anew."""
    dice, tally = Random(f"{case.name} {run.seed}"), Tally()  # noqa: S311 - no secret
    with (
        tempfile.TemporaryDirectory(prefix="launches-") as name,
        House(MACHINES, logs=run.logs) as house,
    ):
        folder = Path(name)
        data = write_digits(folder)
        for number in range(run.episodes):
            tally.ops_checked += 1
            try:
                Episode(house, case, dice, data, folder / f"{number}.npz").run(tally)
            except LabError as e:
                tally.violations.append(f"episode {number}: {e}")
                for pid in house.left():
                    os.kill(pid, signal.SIGKILL)
            if case.victim == "cable":  # agents have more patience with a link that has recovered
                house.kill_agents()
            house.heal()
    return tally


class Episode:
    """One launch that is struck once."""

    def __init__(
        self, house: House, case: Blow, dice: Random, data: Path, checkpoint: Path
    ) -> None:
        self._house, self._case, self._dice = house, case, dice
        starter, *others = dice.sample(house.nodes, len(house.nodes))
        self._victim = starter if case.of_starter else others[0]
        engine = ("--engine", case.engine, "--restarts", str(case.restarts))
        rank = (sys.executable, str(SCRIPTS / _SCRIPT[case.engine]), str(data), str(checkpoint))
        command = ("sh", "-c", STUBBORN, *rank, str(case.steps), "0.05")
        self._launch = house.launch(starter, "--on", "all", *engine, "--", *command)

    def run(self, tally: Tally) -> None:
        case, launch = self._case, self._launch
        await_that(self._trains, "step 6 of all ranks", within_s=STARTS_S, of=[launch])
        time.sleep(self._dice.uniform(0, 0.3))
        doomed = self._doomed()
        took_s = self._strike(doomed)
        tally.recovery_s.append(took_s)
        if case.comes_back:
            self._house.start_agent(self._victim)
        if case.goes_on:
            launch.join(within_s=TRAINS_S)
            self._check_result()
        elif case.code is not None:
            launch.join(within_s=TRAINS_S)
        self._check_code()
        self._clear()

    def _trains(self) -> bool:
        return all(lines_of(self._launch, node, "step 6") for node in self._house.nodes)

    def _doomed(self) -> frozenset[int]:
        """What must be gone soon: of one machine, or of all."""
        case, house = self._case, self._house
        mine = case.victim in {"rank", "agent", "machine", "cable"} and not case.of_starter
        if case.engine == "pmesh" and mine:
            nodes: Sequence[Node] = [self._victim]
        elif case.victim == "cable" and case.of_starter:
            nodes = [node for node in house.nodes if node != self._victim]
        else:
            nodes = house.nodes
        return house.left(nodes) - {self._launch.pid}

    def _strike(self, doomed: frozenset[int]) -> float:
        match self._case.victim:
            case "rank":
                (rank,) = (
                    pid
                    for pid in self._house.left([self._victim])
                    if command_of(pid)[0:1] == [sys.executable] and "--on" not in command_of(pid)
                )
                os.kill(rank, signal.SIGKILL)
            case "agent":
                self._victim.kill("agent")
            case "machine":
                self._house.kill_machine(self._victim)
            case "cable":
                self._house.lab.cut(self._victim.host)
            case "starter":
                self._launch.send_signal(signal.SIGKILL)
            case "ctrl-c":
                self._launch.send_signal(signal.SIGINT)
        began = time.monotonic()
        try:
            await_that(lambda: not alive(doomed), "the end", within_s=4 * ENDS_S)
        except LabError:
            left = [" ".join(command_of(pid)) for pid in alive(doomed)]
            raise LabError(f"left running: {left}\n{self._launch.text}") from None
        return time.monotonic() - began

    def _check_code(self) -> None:
        if self._case.code is not None and self._launch.code != self._case.code:
            raise LabError(f"exit code {self._launch.code}\n{self._launch.text}")

    def _check_result(self) -> None:
        """All who are left have the same weights, and these are good."""
        case, launch = self._case, self._launch
        ends = [line for node in self._house.nodes for line in lines_of(launch, node, "trained")]
        results = [(steps, digest) for _, steps, digest, _ in map(str.split, ends)]
        good = all(float(line.split()[-1]) >= ACCURACY for line in ends)
        wanted = case.trained
        if len(ends) != wanted or set(results) != {(str(case.steps), results[0][1])} or not good:
            raise LabError(f"wrong result {ends}\n{launch.text}")
        if case.engine != "pmesh" and "resumed at step" not in launch.text:
            raise LabError(f"not resumed\n{launch.text}")
        if case.comes_back and self._entered_later() is None:
            raise LabError(f"it did not enter the others' training\n{launch.text}")

    def _entered_later(self) -> int | None:
        entries = lines_of(self._launch, self._victim, "entered at step ")
        return next((step for line in entries if (step := int(line.split()[-1])) > 0), None)

    def _clear(self) -> None:
        """Nothing is left anywhere; what a cut machine was to run goes on there until now."""
        if self._case.victim == "cable" and self._case.of_starter:
            self._launch.send_signal(signal.SIGTERM)
            self._launch.join(within_s=TRAINS_S)
        house = self._house
        try:
            await_that(lambda: not house.left(), "the end of all", within_s=ENDS_S)
        except LabError:
            left = [" ".join(command_of(pid)) for pid in house.left()]
            raise LabError(f"left at the end: {left}\n{self._launch.text}") from None
