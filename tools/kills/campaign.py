"""Trainings of three ranks in which `kill -9` hits at random times; what was killed comes back."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, Self, TypeAlias

from tools.lab.campaign import Tally
from tools.lab.mesh import LabMesh, Node
from tools.lab.program import LabProgram, await_that

RANKS = 3
PATIENCE_S = 600.0  # of a machine on which others work, too
KILLED_UNTIL = 0.65  # of the steps: the last one killed must have time to come back
AGAIN = 0.25  # the share of kills that hit a rank which is coming back
MOST_LOSS_CHANGE = 0.01
AWAY_S = 2.0  # at most, until a killed machine has an agent again

Victim: TypeAlias = Literal["rank", "agent", "machine"]
VICTIMS: Sequence[Victim] = ("agent", "machine", "rank")
"""A machine's kill is that of its agent and of its rank."""


@dataclass(slots=True)
class KillTally(Tally):
    """What has been seen in all trainings; `recovery_s` is until the survivors went on."""

    kills: int = 0
    back_s: list[float] = field(default_factory=list[float])
    """From each kill until the restarted rank took part; imports count."""
    losses: list[float] = field(default_factory=list[float])
    """Of each training in which ranks come back; the first is undisturbed."""

    def sum_up(self) -> Self:
        """Put into the facts what is not in them yet."""
        self.facts["kills"] = self.kills
        for what, found in (
            ("s until the killed rank took part again", self.back_s),
            ("loss", self.losses[1:]),
        ):
            if found:
                self.facts[f"{what}, median"] = statistics.median(found)
                self.facts[f"{what}, most"] = max(found)
        if self.losses:
            self.facts["loss, undisturbed"] = self.losses[0]
        return self


@dataclass(slots=True)
class Workload:
    """A training in which ranks come back: how one is started, and what its lines say."""

    steps: int
    pause_s: float
    """At most, before each kill."""
    loads_s: float
    """A rank that is killed while it comes back is killed within this time."""
    victims: Sequence[Victim] = field(default=("rank",), kw_only=True)
    """What is killed, in turn."""

    def start(self, node: Node, job: str) -> LabProgram:
        raise NotImplementedError

    def rank_of(self, rank: LabProgram) -> int:
        """Its number when it was last told; -1 before."""
        raise NotImplementedError

    def step_of(self, rank: LabProgram) -> int:
        """The last that it has told of."""
        raise NotImplementedError

    def takes_part(self, rank: LabProgram, since: float) -> bool:
        """Whether it has trained with all others since this time."""
        raise NotImplementedError

    def await_progress(self, survivors: Sequence[LabProgram], began: float) -> float | None:
        """How long after a kill the last of them completed its next step, if it tells of each."""

    def judge(self, training: "KilledTraining", tally: KillTally) -> None:
        """Count what the ranks, which have ended, have told."""
        raise NotImplementedError


class KilledTraining:
    """One training on these machines."""

    def __init__(self, workload: Workload, mesh: LabMesh, number: int) -> None:
        self.name = f"training {number}"
        self._workload, self._mesh, self.job = workload, mesh, f"kills-{number}"
        self._killed_at = 0.0
        self.ranks = [workload.start(node, self.job) for node in mesh.nodes]
        self.everyone = [*self.ranks]
        """Those that were killed, too."""

    @property
    def step(self) -> int:
        return max(map(self._workload.step_of, self.everyone))

    def await_all(self) -> None:
        """Wait until every rank takes part."""
        what = f"{self.name} of all ranks"
        everyone = self._take_part
        await_that(lambda: all(map(everyone, self.ranks)), what, within_s=PATIENCE_S, of=self.ranks)

    def _take_part(self, rank: LabProgram) -> bool:
        return self._workload.takes_part(rank, self._killed_at)

    def _kill(self, place: int, tally: KillTally, random: Random) -> None:
        """Kill what is there, or a part of it, and start that again."""
        victims, node = self._workload.victims, self._mesh.nodes[place]
        victim = victims[tally.kills % len(victims)]
        tally.kills += 1
        if len(victims) > 1:
            tally.count(f"of {victim}s")
        self._killed_at = time.monotonic()
        if victim != "rank":
            node.kill("agent")
        if victim != "agent":
            self.ranks[place].end()
        if victim != "rank":
            time.sleep(random.uniform(0.0, AWAY_S))
            self._mesh.restart_agent(node)
        if victim != "agent" or self._workload.rank_of(self.ranks[place]) < 0:  # never connected
            self.ranks[place].end()
            self.ranks[place] = self._workload.start(node, self.job)
            self.everyone.append(self.ranks[place])

    def kill_some(self, tally: KillTally, kills: int, random: Random) -> None:
        """Kill one after the other; each comes back before the next is killed."""
        workload = self._workload
        while tally.kills < kills and self.step < KILLED_UNTIL * workload.steps:
            time.sleep(random.uniform(0.0, workload.pause_s))
            place = random.randrange(len(self.ranks))
            survivors = [rank for i, rank in enumerate(self.ranks) if i != place]
            began = time.monotonic()
            tally.count("of rank 0", workload.rank_of(self.ranks[place]) == 0)
            self._kill(place, tally, random)
            if (after_s := workload.await_progress(survivors, began)) is not None:
                tally.recovery_s.append(after_s)
            while tally.kills < kills and random.random() < AGAIN:
                time.sleep(random.uniform(0.0, workload.loads_s))
                tally.count("while it came back", not self._take_part(self.ranks[place]))
                self._kill(place, tally, random)
            self.await_all()
            tally.back_s.append(time.monotonic() - began)


def run_kills(workload: Workload, mesh: LabMesh, kills: int, seed: int) -> KillTally:
    """Train without a kill, then again and again until so many kills are done."""
    random, tally = Random(seed), KillTally()  # noqa: S311 - no secret
    number = 0
    while tally.kills < kills or not number:
        training = KilledTraining(workload, mesh, number)
        try:
            training.await_all()
            if number:  # the first is undisturbed
                training.kill_some(tally, kills, random)
            for rank in training.ranks:
                rank.join(within_s=PATIENCE_S)
        finally:
            for rank in training.ranks:
                rank.end()
        workload.judge(training, tally)
        number += 1
        tally.count("trainings")
        print(
            f"  {number} trainings, {tally.kills} kills, {len(tally.violations)} "
            f"violations, loss {tally.losses[-1]:.3f}",
            flush=True,
        )
    return tally.sum_up()


def judge_losses(tally: KillTally, where: str, losses: Sequence[float]) -> None:
    """All ranks end with the same loss, which is the undisturbed one within 1 %."""
    tally.losses.append(losses[0] if losses else math.nan)
    if len(set(losses)) > 1:
        tally.violations.append(f"{where}: the ranks end with the losses {losses}")
    if not abs(tally.losses[-1] / tally.losses[0] - 1) <= MOST_LOSS_CHANGE:
        tally.violations.append(f"{where}: loss {tally.losses[-1]}, undisturbed {tally.losses[0]}")


def judge_steps(tally: KillTally, where: str, digests: Mapping[int, set[str]]) -> None:
    """After each step all ranks have the same weights, those that were killed later, too."""
    tally.ops_checked += len(digests)
    for step, found in digests.items():
        if len(found) != 1:
            tally.violations.append(f"{where}: step {step} is torn: weights {sorted(found)}")
