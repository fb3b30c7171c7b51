"""`kill -9` of ranks, agents and machines under libraries that fix the number of ranks.

A lost rank ends the step of all, so `pmesh run` starts all ranks again, and the script goes on from
its last checkpoint. If the machine that typed the command is killed, the user types it again.
"""

import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from tools.kills.campaign import (
    AGAIN,
    AWAY_S,
    KILLED_UNTIL,
    MOST_LOSS_CHANGE,
    PATIENCE_S,
    RANKS,
    VICTIMS,
    KillTally,
)
from tools.lab.campaign import CampaignRun
from tools.lab.commands import LabError
from tools.lab.mesh import Node
from tools.lab.program import LabProgram, await_that
from tools.launches.house import House, alive, command_of, lines_of

SCRIPT = Path(__file__).parent / "scripts/resuming.py"
LIBRARIES = {
    "transformers": (),  # what most people run, so the short form
    "lightning": (),
    "torch": ("--backend", "pmesh"),  # it asks for gloo
}
"""For each library of the script, the options of `pmesh run`."""
STEPS = 48
STEP_S = 0.1
PAUSE_S = 1.0  # at most, from the next step of all ranks to a kill
LOADS_S = 8.0  # at most, from a kill to one that hits while the ranks come back
SETTLES_S = 0.5  # until the last line from before a kill has come
ENDS_S = 30.0
"""Within so long, without the command that has started them, nothing may be left of the ranks."""
KILLS_EACH = 4  # in one training: `pmesh run` waits longer before each start that fails soon
MOST_APART = 1e-5
MOST_VIOLATIONS = 5  # then the campaign ends


@dataclass(frozen=True, slots=True)
class Ended:
    """What a rank has saved in the end."""

    steps: int
    loss: float
    net: Mapping[str, Any]
    """Its weights, tensors by name."""

    @classmethod
    def load(cls, folder: Path, rank: int) -> "Ended":
        import torch  # noqa: PLC0415 - other campaigns need none

        path = folder / f"rank-{rank}.pt"
        if not path.exists():
            raise LabError(f"rank {rank} has saved nothing")
        found = torch.load(path)
        return cls(found["steps"], found["loss"], found["net"])

    def distance(self, other: "Ended") -> float:
        """The largest difference of two weights."""
        return max(float((self.net[name] - other.net[name]).abs().max()) for name in self.net)


@dataclass(slots=True)
class LaunchedTraining:
    """One training, whose command is typed again if its machine was killed."""

    house: House
    library: str
    folder: Path
    steps: int
    dice: Random
    tally: KillTally
    launches: list[LabProgram] = field(default_factory=list[LabProgram])
    starter: Node = field(init=False)

    def run(self, most_kills: int) -> list[Ended]:
        """Train, with at most so many kills; return what each rank has in the end."""
        self._start()
        self._kill_some(most_kills)
        launch = self.launches[-1]
        if launch.join(within_s=PATIENCE_S) != 0:
            raise LabError(f"{self.library} does not end well: {launch.shown}")
        return [Ended.load(self.folder, rank) for rank in range(RANKS)]

    def _start(self) -> None:
        self.starter = self.dice.choice(self.house.nodes)
        options = ("--on", "all", "--restarts", "100", *LIBRARIES[self.library])
        script = (str(SCRIPT), self.library, str(self.folder), str(self.steps), str(STEP_S))
        launch = self.house.launch(self.starter, *options, "--", *script)
        self.launches.append(launch)
        # Until then `all` would leave out a machine that is killed now.
        await_that(lambda: launch.last_line("runs on").text, "its machines", of=[launch])

    def _kill_some(self, most_kills: int) -> None:
        self._await_steps(0.0)
        kills = 0
        while kills < most_kills and self._step < KILLED_UNTIL * self.steps:
            time.sleep(self.dice.uniform(0.0, PAUSE_S))
            killed_at = self._kill()
            kills += 1
            while kills < most_kills and self.dice.random() < AGAIN:
                time.sleep(self.dice.uniform(0.0, LOADS_S))
                self.tally.count("while all came back", not self._trains(killed_at))
                killed_at = self._kill()
                kills += 1
            self._await_steps(killed_at + SETTLES_S)
            self.tally.back_s.append(time.monotonic() - killed_at)

    def _kill(self) -> float:
        """Kill something somewhere; return when that was."""
        victim, node = self.dice.choice(VICTIMS), self.dice.choice(self.house.nodes)
        if victim == "rank":
            what = f"a rank of {node.name}"
            await_that(lambda: self._ranks_on(node), what, within_s=PATIENCE_S, of=self._running)
        killed_at = time.monotonic()
        if victim == "rank":
            for pid in self._ranks_on(node):
                os.kill(pid, signal.SIGKILL)
        elif victim == "agent":
            node.kill("agent")
        else:
            self.house.kill_machine(node)
        self.tally.kills += 1
        self.tally.count(f"of {victim}s")
        if victim != "rank":
            self._bring_back(node)
        return killed_at

    def _bring_back(self, node: Node) -> None:
        time.sleep(self.dice.uniform(0.0, AWAY_S))
        self.house.start_agent(node)
        if node is self.starter:
            self.tally.count("of the machine that typed the command")
            self.launches[-1].join(within_s=ENDS_S)
            self._await_end_of_all()
            self.house.await_view()
            self._start()

    def _await_end_of_all(self) -> None:
        try:
            await_that(lambda: not self.house.left(), "the end of all ranks", within_s=ENDS_S)
        except LabError as e:
            left = [" ".join(command_of(pid)) for pid in self.house.left()]
            raise LabError(f"{e}: {left}") from None

    @property
    def _running(self) -> list[LabProgram]:
        return self.launches[-1:]

    def _ranks_on(self, node: Node) -> list[int]:
        """The processes that run the script, and not the command that starts it everywhere."""
        words = ((pid, command_of(pid)) for pid in node.host.pids())
        return [pid for pid, found in words if str(SCRIPT) in found and "--on" not in found]

    @property
    def _step(self) -> int:
        return max(int(line.split()[1]) for lines in self._lines(0.0) for line in lines)

    def _lines(self, since: float) -> list[list[str]]:
        """What the ranks of each machine have printed of steps."""
        launch = self.launches[-1]
        return [lines_of(launch, node, "step ", since=since) for node in self.house.nodes]

    def _trains(self, since: float) -> bool:
        return all(self._lines(since))

    def _await_steps(self, since: float) -> None:
        what = f"a step of {self.library} on all machines"
        await_that(lambda: self._trains(since), what, within_s=PATIENCE_S, of=self._running)

    def clear(self) -> None:
        """After what has gone wrong, leave no process of it."""
        for pid in alive(self.house.left()):
            os.kill(pid, signal.SIGKILL)
        self.house.kill_agents()
        self.house.heal()


def judge(tally: KillTally, where: str, undisturbed: Ended, ended: Sequence[Ended]) -> None:
    """All ranks have the same bits, which are those of the training without kills."""
    tally.ops_checked += len(ended)
    first = ended[0]
    if any(each.steps != undisturbed.steps for each in ended):
        steps = [each.steps for each in ended]
        tally.violations.append(f"{where}: {steps} steps, undisturbed {undisturbed.steps}")
    if any(each.distance(first) for each in ended):
        tally.violations.append(f"{where}: the ranks have different weights")
    apart = first.distance(undisturbed)
    tally.facts["weights differ at most"] = max(apart, tally.facts.get("weights differ at most", 0))
    if not apart <= MOST_APART:
        tally.violations.append(f"{where}: a weight differs by {apart:.1e} from the undisturbed")
    if not abs(first.loss / undisturbed.loss - 1) <= MOST_LOSS_CHANGE:
        tally.violations.append(f"{where}: loss {first.loss}, undisturbed {undisturbed.loss}")


def run_launched(run: CampaignRun) -> KillTally:
    """Train by one library after the other, until so many kills are done."""
    dice, tally = run.random(), KillTally()
    libraries = list(run.words or filter(find_spec, LIBRARIES))
    undisturbed = dict[str, Ended]()
    number = 0
    with (
        tempfile.TemporaryDirectory(prefix="kills-") as name,
        House(RANKS, logs=run.logs) as house,
    ):
        while tally.kills < run.episodes and len(tally.violations) < MOST_VIOLATIONS:
            library = libraries[number % len(libraries)]
            number += 1
            seen = len(tally.violations)
            kills = min(KILLS_EACH, run.episodes - tally.kills)
            folders = [Path(name) / f"{library}-{number}-{kind}" for kind in ("whole", "killed")]
            for folder, most in zip(folders, (0, kills), strict=True):
                if not most and library in undisturbed:
                    continue
                folder.mkdir()
                training = LaunchedTraining(house, library, folder, run.steps or STEPS, dice, tally)
                where = f"training {number}, {library}"
                try:
                    ended = training.run(most)
                except LabError as e:
                    tally.violations.append(f"{where}: {e}")
                    training.clear()
                    break
                judge(tally, where, undisturbed.setdefault(library, ended[0]), ended)
            tally.count("trainings")
            print(f"  {where}: {tally.kills} kills", *tally.violations[seen:], sep="\n", flush=True)
    return tally.sum_up()
