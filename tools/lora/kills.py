"""Trainings of three ranks in which `kill -9` hits any of them at random times; each comes back."""

import math
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from pmesh.mlx_lm.libraries import mx
from pmesh.mlx_lm.training import digest
from tools.demo import NAMES, Demo
from tools.lab.commands import LabError
from tools.lora.tiny import make_data, make_model

PATIENCE_S = 240.0  # of a machine on which others work, too
LOOK_EVERY_S = 0.02
KILLED_UNTIL = 0.65  # of the iterations: the last one killed must have time to come back
LOADS_S = 6.0  # about; a rank that is killed while it comes back is killed within this time
AGAIN = 0.25  # the share of kills that hit a rank which is coming back
PAUSE_S = 3.0
MOST_LOSS_CHANGE = 0.01
_ENTERED = re.compile(r"^Iter (\d+): (\d) ranks?, .*; this is rank (\d)")
_AT = re.compile(r"^Iter (\d+): ")
_VALIDATED = re.compile(r"^Iter (\d+): Val loss ([\d.]+)")
_ENDED = re.compile(r"^Trained (\d+) iterations; .* weights (\w+)$")
_WRONG = re.compile(r"Traceback|Error|had another state|replaces this rank's")


@dataclass(slots=True)
class Tally:
    """What has been seen in all trainings."""

    kills: int = 0
    kills_of_rank_0: int = 0
    kills_while_entering: int = 0
    trainings: int = 0
    back_s: list[float] = field(default_factory=list[float])
    """From each kill until the restarted rank took part; the imports count."""
    losses: list[float] = field(default_factory=list[float])
    digests: list[str] = field(default_factory=list[str])
    violations: list[str] = field(default_factory=list[str])


class Rank:
    """One trainer process, and what it prints."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self.name = name
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None  # noqa: S101 - it was started with a pipe
        with self.process.stdout as stream:
            for line in stream:
                self.lines.append(line.rstrip())

    def found(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return [match for line in tuple(self.lines) if (match := pattern.search(line))]

    @property
    def entered(self) -> bool:
        """Whether it takes part with all others."""
        return any(int(match[2]) == len(NAMES) for match in self.found(_ENTERED))

    @property
    def rank(self) -> int:
        worlds = self.found(_ENTERED)
        return int(worlds[-1][3]) if worlds else -1

    def kill(self) -> None:
        self.process.kill()
        self.join()

    def join(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, once all that it printed has been read."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LabError(f"{self.name} does not end; it printed\n{self.shown}") from None
        self._reader.join(timeout_s)
        return code

    @property
    def shown(self) -> str:
        return "\n".join(self.lines[-25:])


class Training:
    """One run of `pmesh mlx -- mlx_lm.lora --train` on three machines, which are this one."""

    def __init__(self, demo: Demo, folder: Path, number: int, options: Sequence[str]) -> None:
        self._demo = demo
        self._number = number
        self._options = options
        self.adapters = folder / f"adapters-{number}"
        self.ranks = [self._start(name) for name in NAMES]
        self.lost: list[Rank] = []

    def _start(self, name: str) -> Rank:
        mesh = ["--job", f"lora-{self._number}", "--wait-for", str(len(NAMES))]
        lora = ["-m", "mlx_lm", "lora", "--train", "--adapter-path", str(self.adapters)]
        command = ["-m", "pmesh.cli", "mlx", *mesh, "--", *lora, *self._options]
        return Rank(self._demo.start(command, name=name, output=subprocess.PIPE), name)

    @property
    def iteration(self) -> int:
        """The last one that any rank has told of."""
        told = [int(m[1]) for rank in (*self.ranks, *self.lost) for m in rank.found(_AT)]
        return max(told, default=0)

    def restart(self, victim: int) -> Rank:
        """Kill one and start it again."""
        old = self.ranks[victim]
        old.kill()
        self.lost.append(old)
        self.ranks[victim] = self._start(old.name)
        return old

    def await_all(self) -> None:
        """Wait until every rank takes part."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(rank.entered for rank in self.ranks):
            ended = [rank for rank in self.ranks if rank.process.poll() is not None]
            if ended or time.monotonic() > deadline:
                shown = "\n".join(f"--- {rank.name}\n{rank.shown}" for rank in self.ranks)
                raise LabError(f"not all ranks took part:\n{shown}")
            time.sleep(LOOK_EVERY_S)


def run_kills(kills: int, *, iterations: int, seed: int, options: Sequence[str] = ()) -> Tally:
    """Train without a kill, then again and again until so many kills are done."""
    random, tally = Random(seed), Tally()  # noqa: S311 - no secret
    with tempfile.TemporaryDirectory(prefix="pmesh-lora-") as name:
        folder = Path(name)
        model, data = make_model(folder / "model"), make_data(folder / "data")
        words = [
            *("--model", str(model), "--data", str(data), "--iters", str(iterations)),
            *("--batch-size", "7", "--num-layers", "4", "--learning-rate", "3e-4"),
            *("--steps-per-report", "10", "--steps-per-eval", "100", "--save-every", "20"),
            *options,
        ]
        with Demo(folder / "mesh") as demo:
            demo.start_agents(multicast=False)
            if not demo.all_meet(PATIENCE_S):
                raise LabError("the agents did not meet:\n" + demo.log_of(NAMES[0]))
            while tally.kills < kills or not tally.trainings:
                training = Training(demo, folder, tally.trainings, words)
                training.await_all()
                if tally.trainings:  # the first is undisturbed
                    _kill_some(training, kills, iterations, random, tally)
                _judge(training, iterations, tally)
                tally.trainings += 1
                print(
                    f"{tally.trainings} trainings, {tally.kills} kills, "
                    f"{len(tally.violations)} violations, validation loss {tally.losses[-1]:.3f}",
                    flush=True,
                )
    return tally


def _kill_some(
    training: Training, kills: int, iterations: int, random: Random, tally: Tally
) -> None:
    while tally.kills < kills and training.iteration < KILLED_UNTIL * iterations:
        time.sleep(random.uniform(0.0, PAUSE_S))
        victim = random.randrange(len(NAMES))
        began = time.monotonic()
        tally.kills_of_rank_0 += training.restart(victim).rank == 0
        tally.kills += 1
        while tally.kills < kills and random.random() < AGAIN:
            time.sleep(random.uniform(0.0, LOADS_S))
            tally.kills_while_entering += not training.restart(victim).entered
            tally.kills += 1
        training.await_all()
        tally.back_s.append(time.monotonic() - began)


def _judge(training: Training, iterations: int, tally: Tally) -> None:
    """Everybody ends well with the same bits, which are on the disk, and learned as much."""
    where = f"training {tally.trainings}"
    ends: list[str] = []
    for rank in training.ranks:
        code = rank.join()
        ended = [match[2] for match in rank.found(_ENDED) if int(match[1]) == iterations]
        if code or not ended:
            tally.violations.append(f"{where}: {rank.name} ended with {code}:\n{rank.shown}")
        ends += ended
    for rank in (*training.ranks, *training.lost):
        tally.violations += [f"{where}: {rank.name}: {m.string}" for m in rank.found(_WRONG)]
    saved = training.adapters / "adapters.safetensors"
    on_disk = digest(mx.load(str(saved))) if saved.exists() else "none"
    losses = [
        float(match[2])
        for rank in training.ranks
        for match in rank.found(_VALIDATED)
        if int(match[1]) == iterations
    ]
    judge_ends(tally, where, ends, on_disk, losses)


def judge_ends(
    tally: Tally, where: str, ends: Sequence[str], on_disk: str, losses: Sequence[float]
) -> None:
    """Count a training whose ranks ended with these weights and validation losses."""
    if len({*ends, on_disk}) != 1:
        tally.violations.append(f"{where}: weights {ends}, and on the disk {on_disk}")
    tally.losses.append(losses[0] if losses else math.nan)
    tally.digests.append(on_disk)
    if not abs(tally.losses[-1] / tally.losses[0] - 1) <= MOST_LOSS_CHANGE:
        tally.violations.append(f"{where}: loss {tally.losses[-1]}, undisturbed {tally.losses[0]}")
