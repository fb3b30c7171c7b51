"""Kills of random ranks at random times, and what must hold after each."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from tools.lab.commands import LabError
from tools.torch_kills.ranks import RANKS, Rank, train_elastic, train_fixed

PATIENCE_S = 600.0  # of a machine on which others work, too
LOOK_EVERY_S = 0.002
PROMISED_S = 2.5  # docs/explanation/reliability.md; the death of a process is noticed far sooner
STEPS_BEFORE = 3  # DDP has laid out its buckets anew
PAUSE_S = 0.15  # about as long as several steps take
KILLED_UNTIL = 0.65  # of the steps: the last one killed must have time to come back
AGAIN = 0.25  # the share of kills that hit a rank which is coming back
MOST_LOSS_CHANGE = 0.01


@dataclass(slots=True)
class Tally:
    """What has been seen of one kind of training."""

    kind: str
    kills: int = 0
    kills_while_entering: int = 0
    steps: int = 0
    """How many were compared between ranks."""
    after_s: list[float] = field(default_factory=list[float])
    """From each kill until the last survivor had its error, or completed its next step."""
    back_s: list[float] = field(default_factory=list[float])
    """From each kill until the forked rank had completed a step."""
    losses: list[float] = field(default_factory=list[float])
    """Of each elastic training; the first is undisturbed."""
    violations: list[str] = field(default_factory=list[str])


def await_that(holds: Callable[[], bool], ranks: Sequence[Rank], within_s: float) -> bool:
    """Wait until it holds; False if it does not in time, LabError if a rank has crashed."""
    deadline = time.monotonic() + within_s
    while not holds():
        for rank in ranks:
            if crash := rank.find("crash"):
                raise LabError(f"a rank failed:\n{crash}")
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def run_fixed(kind: str, homes: Sequence[Path], kills: int, seed: int) -> Tally:
    """Trainings with torch's own DDP or FSDP2, each of which ends with a kill."""
    tally, random = Tally(kind), Random(seed)  # noqa: S311 - no secret
    program = partial(train_fixed, sharded=kind == "fsdp")
    while tally.kills < kills:
        ranks = [Rank(program, home, f"{kind}-{tally.kills}") for home in homes]
        try:
            _kill_one(tally, ranks, random)
        finally:
            for rank in ranks:
                rank.kill()
    return tally


def _kill_one(tally: Tally, ranks: Sequence[Rank], random: Random) -> None:
    if not await_that(
        lambda: all((rank.find("step") or 0) >= STEPS_BEFORE for rank in ranks), ranks, PATIENCE_S
    ):
        raise LabError("the ranks did not train")
    time.sleep(random.uniform(0.0, PAUSE_S))
    victim = random.choice(ranks)
    survivors = [rank for rank in ranks if rank is not victim]
    began = time.monotonic()
    victim.kill()
    tally.kills += 1
    where = f"{tally.kind}, kill {tally.kills}"
    if not await_that(
        lambda: all(rank.find("again") for rank in survivors), survivors, PROMISED_S * 4
    ):
        tally.violations.append(f"{where}: a survivor hangs: {[r.told[-1] for r in survivors]}")
        return
    ends = [next(each for each in rank.told if "error" in each) for rank in survivors]
    tally.after_s.append(max(each["at"] for each in ends) - began)
    expected = f"RankLost: rank {victim.find('rank')} "
    judge_errors(tally, where, expected, [rank.find("error") for rank in survivors])
    judge_errors(tally, f"{where}, next call", expected, [rank.find("again") for rank in survivors])


def judge_errors(tally: Tally, where: str, expected: str, errors: Sequence[str]) -> None:
    """All survivors have the same error, which names the lost rank, within the promised time."""
    if len(set(errors)) != 1 or not errors[0].startswith(expected):
        tally.violations.append(f"{where}: {errors}, not {expected!r}")
    if tally.after_s[-1] > PROMISED_S:
        tally.violations.append(f"{where}: {tally.after_s[-1]:.2f} s until the last error")


def run_elastic(homes: Sequence[Path], kills: int, seed: int, steps: int) -> Tally:
    """Train without a kill, then again and again until so many kills are done."""
    tally, random = Tally("elastic"), Random(seed)  # noqa: S311 - no secret
    while tally.kills < kills or not tally.losses:
        training = _Training(homes, f"elastic-{len(tally.losses)}", steps)
        try:
            if tally.losses:
                training.kill_some(tally, kills, random)
            training.end(tally)
        finally:
            for rank in training.everyone:
                rank.kill()
    return tally


class _Training:
    def __init__(self, homes: Sequence[Path], job: str, steps: int) -> None:
        self._homes, self._job, self._steps = homes, job, steps
        self.ranks = [self._start(i) for i in range(len(homes))]
        self.everyone = list(self.ranks)

    def _start(self, place: int) -> Rank:
        return Rank(partial(train_elastic, steps=self._steps), self._homes[place], self._job)

    def _restart(self, place: int) -> None:
        self.ranks[place].kill()
        self.ranks[place] = self._start(place)
        self.everyone.append(self.ranks[place])

    @property
    def step(self) -> int:
        return max(rank.find("step") or 0 for rank in self.ranks)

    def kill_some(self, tally: Tally, kills: int, random: Random) -> None:
        """Kill one after the other; each comes back before the next is killed."""
        self._await_all()
        while tally.kills < kills and self.step < KILLED_UNTIL * self._steps:
            time.sleep(random.uniform(0.0, PAUSE_S))
            place = random.randrange(len(self.ranks))
            survivors = [rank for i, rank in enumerate(self.ranks) if i != place]
            done = [rank.find("step") for rank in survivors]
            began = time.monotonic()
            self._restart(place)
            tally.kills += 1
            self._await_progress(survivors, done)
            tally.after_s.append(self._first_after(survivors, began) - began)
            while tally.kills < kills and random.random() < AGAIN:
                time.sleep(random.uniform(0.0, PAUSE_S))
                tally.kills_while_entering += self.ranks[place].find("step") is None
                tally.kills += 1
                self._restart(place)
            self._await_all()
            tally.back_s.append(time.monotonic() - began)

    def end(self, tally: Tally) -> None:
        """Wait for the end of all, and compare what all have told of each step."""
        if not await_that(
            lambda: all(rank.find("loss") is not None for rank in self.ranks),
            self.ranks,
            PATIENCE_S,
        ):
            raise LabError(f"{self._job} does not end: {[rank.told[-1:] for rank in self.ranks]}")
        where = self._job
        losses = [rank.find("loss") for rank in self.ranks]
        tally.losses.append(losses[0])
        judge_losses(tally, where, losses)
        digests: dict[int, set[str]] = {}
        for rank in self.everyone:
            for each in rank.told:
                if "step" in each:
                    digests.setdefault(each["step"], set()).add(each["digest"])
        tally.steps += len(digests)
        judge_steps(tally, where, digests)

    def _await_all(self) -> None:
        if not await_that(lambda: all(map(_trains_with_all, self.ranks)), self.ranks, PATIENCE_S):
            shown = [rank.told[-1:] for rank in self.ranks]
            raise LabError(f"{self._job}: not all ranks came together: {shown}")

    def _await_progress(self, survivors: Sequence[Rank], done: Sequence[int]) -> None:
        def go_on() -> bool:
            pairs = zip(survivors, done, strict=True)
            return all(rank.find("step") > step + 1 for rank, step in pairs)

        if not await_that(go_on, survivors, PATIENCE_S):
            shown = [rank.told[-1:] for rank in survivors]
            raise LabError(f"{self._job}: the survivors do not go on: {shown}")

    @staticmethod
    def _first_after(survivors: Sequence[Rank], began: float) -> float:
        """When the last of them had completed its first step after the kill."""
        return max(
            next(each["at"] for each in rank.told if "step" in each and each["at"] > began)
            for rank in survivors
        )


def _trains_with_all(rank: Rank) -> bool:
    return rank.find("size") == RANKS


def judge_losses(tally: Tally, where: str, losses: Sequence[float]) -> None:
    """All ranks end with the same loss, which is the undisturbed one within 1 %."""
    if len(set(losses)) != 1:
        tally.violations.append(f"{where}: the ranks end with the losses {losses}")
    if not abs(tally.losses[-1] / tally.losses[0] - 1) <= MOST_LOSS_CHANGE or math.isnan(losses[0]):
        tally.violations.append(f"{where}: loss {losses[0]}, undisturbed {tally.losses[0]}")


def judge_steps(tally: Tally, where: str, digests: dict[int, set[str]]) -> None:
    """After each step all ranks have the same weights, those that were killed later, too."""
    for step, found in digests.items():
        if len(found) != 1:
            tally.violations.append(f"{where}: step {step} is torn: weights {sorted(found)}")
