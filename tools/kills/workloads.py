"""What is trained while ranks are killed: handwritten digits by torch, a tiny model by mlx-lm."""

import contextlib
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tools.kills.campaign import (
    PATIENCE_S,
    RANKS,
    KilledTraining,
    KillTally,
    Workload,
    judge_losses,
    judge_steps,
    run_kills,
)
from tools.lab.campaign import CampaignRun
from tools.lab.commands import LabError
from tools.lab.mesh import LabMesh, Node
from tools.lab.program import LabProgram, await_that
from tools.lab.warm import ForkOrder, Warm

PROMISED_S = 2.5  # docs/explanation/reliability.md; the death of a process is noticed far sooner
ELASTIC_STEPS, LORA_STEPS = 300, 600
STEPS_BEFORE = 3  # DDP has laid out its buckets anew
PAUSE_S = 0.15  # about as long as several steps of torch take
# Ranks of torch are forks of a process that has imported it, and what DDP does when constructed.
IMPORTED = ("torch", "torch._dynamo", "tools.torch_ranks")


@dataclass(slots=True)
class ElasticDdp(Workload):
    """DDP that goes on with whoever is there."""

    warm: Warm
    kind: str = "elastic"
    """Which program of `tools.torch_ranks`."""

    def start(self, node: Node, job: str) -> LabProgram:
        return start_torch(self.warm, node, job, self.kind, str(self.steps))

    def rank_of(self, rank: LabProgram) -> int:
        return -1 if (number := rank.last("rank")) is None else int(number)

    def step_of(self, rank: LabProgram) -> int:
        return rank.last("step") or 0

    def takes_part(self, rank: LabProgram, since: float) -> bool:  # noqa: ARG002 - it is a new program
        return bool(rank.last("size") == RANKS)

    def await_progress(self, survivors: Sequence[LabProgram], began: float) -> float | None:
        done = [self.step_of(rank) for rank in survivors]

        def go_on() -> bool:
            pairs = zip(survivors, done, strict=True)
            return all(self.step_of(rank) > step + 1 for rank, step in pairs)

        await_that(go_on, "the survivors' next steps", within_s=PATIENCE_S, of=survivors)
        ends: list[list[float]]
        ends = [[r["at"] for r in rank.reports if "step" in r] for rank in survivors]
        return max(next(at for at in its if at > began) for its in ends) - began

    def judge(self, training: KilledTraining, tally: KillTally) -> None:
        """Everybody ends, and all that any rank has told of a step is the same."""
        losses = [rank.last("loss") for rank in training.ranks]
        if None in losses:
            raise LabError("\n".join(rank.shown for rank in training.ranks))
        judge_losses(tally, training.name, losses)
        digests: dict[int, set[str]] = defaultdict(set)
        for each in (report for rank in training.everyone for report in rank.reports):
            if "step" in each:
                digests[each["step"]].add(each["digest"])
        judge_steps(tally, training.name, digests)


def start_torch(warm: Warm, node: Node, job: str, *arguments: str) -> LabProgram:
    settings = {"PMESH_JOB": job, "PMESH_WAIT_FOR": str(RANKS)}
    order = ForkOrder(
        program="tools.torch_ranks:main",
        arguments=arguments,
        environment=node.environment | settings,
    )
    return LabProgram(f"rank at {node.name}", *warm.start(order))


@contextlib.contextmanager
def _machines() -> Iterator[LabMesh]:
    with LabMesh(RANKS) as mesh:
        mesh.start_agents()
        mesh.await_view()
        yield mesh


@contextlib.contextmanager
def _warm(mesh: LabMesh, *others: str) -> Iterator[Warm]:
    # One thread: it forks.
    warm = Warm((*IMPORTED, *others), mesh.nodes[0].environment | {"OMP_NUM_THREADS": "1"})
    try:
        yield warm
    finally:
        warm.close()


def run_elastic(run: CampaignRun) -> KillTally:
    with _machines() as mesh, _warm(mesh) as warm:
        steps = run.steps or ELASTIC_STEPS
        workload = ElasticDdp(steps=steps, pause_s=PAUSE_S, loads_s=PAUSE_S, warm=warm)
        return run_kills(workload, mesh, run.episodes, run.seed)


def run_trainer(run: CampaignRun) -> KillTally:
    """Train by Transformers' Trainer as `run_elastic` does without it."""
    with _machines() as mesh, _warm(mesh, "pmesh.torch.elastic_trainer") as warm:
        steps = run.steps or ELASTIC_STEPS
        workload = ElasticDdp(
            steps=steps, pause_s=PAUSE_S, loads_s=PAUSE_S, warm=warm, kind="elastic-trainer"
        )
        return run_kills(workload, mesh, run.episodes, run.seed)


def run_fixed(run: CampaignRun, kind: str) -> KillTally:
    """Trainings with torch's own DDP or FSDP2, each of which ends with a kill."""
    tally, random = KillTally(), run.random()
    with _machines() as mesh, _warm(mesh) as warm:
        while tally.kills < run.episodes:
            job = f"{kind}-{tally.kills}"
            ranks = [start_torch(warm, node, job, kind) for node in mesh.nodes]
            try:
                _kill_one(tally, ranks, random)
            finally:
                for rank in ranks:
                    rank.end()
    return tally.sum_up()


def _kill_one(tally: KillTally, ranks: Sequence[LabProgram], random: Random) -> None:
    await_that(
        lambda: all((rank.last("step") or 0) >= STEPS_BEFORE for rank in ranks),
        "the first steps",
        within_s=PATIENCE_S,
        of=ranks,
    )
    time.sleep(random.uniform(0.0, PAUSE_S))
    victim = random.choice(ranks)
    survivors = [rank for rank in ranks if rank is not victim]
    began = time.monotonic()
    victim.end()
    tally.kills += 1
    tally.ops_checked += 1
    tally.count("trainings")
    where = f"kill {tally.kills}"
    try:
        for rank in survivors:
            rank.join(within_s=PROMISED_S * 4)
    except LabError as e:
        tally.violations.append(f"{where}: a survivor hangs: {e}")
        return
    ends = [[r for r in rank.reports if "error" in r or "again" in r] for rank in survivors]
    if not all(len(its) == 2 for its in ends):  # noqa: PLR2004 - an error of each call
        raise LabError("\n".join(rank.shown for rank in survivors))
    tally.recovery_s.append(max(error["at"] for error, _ in ends) - began)
    lost = f"rank {victim.last('rank')} "
    judge_errors(tally, where, lost, [error["error"] for error, _ in ends])
    judge_errors(tally, f"{where}, next call", lost, [again["again"] for _, again in ends])


def judge_errors(tally: KillTally, where: str, lost: str, errors: Sequence[str]) -> None:
    """All survivors have the same error, which names the lost rank, within the promised time."""
    if len(set(errors)) != 1 or not re.match(rf"(RankLost|RosterChanged): (.* )?{lost}", errors[0]):
        tally.violations.append(f"{where}: {errors}, not RankLost or RosterChanged of {lost}")
    if tally.recovery_s[-1] > PROMISED_S:
        tally.violations.append(f"{where}: {tally.recovery_s[-1]:.2f} s until the last error")


_ENTERED = re.compile(r"^Iter (\d+): (\d) ranks?, .*; this is rank (\d)")
_AT = re.compile(r"^Iter (\d+): ")
_VALIDATED = re.compile(r"^Iter (\d+): Val loss ([\d.]+)")
_ENDED = re.compile(r"^Trained (\d+) iterations; .* weights (\w+)$")
_WRONG = re.compile(r"Traceback|Error|had another state|replaces this rank's")
# `pmesh`, whose training does not end before one that was killed is back: it imports for seconds.
_WAITS_FOR_ALL = f"""
from pmesh.cli import main
from pmesh.mlx_lm.training import Training

enter = Training._enter

def enter_with_all(training):
    enter(training)
    while training._state.iteration == training._run.last and training._mesh.size < {RANKS}:
        enter(training)

Training._enter = enter_with_all
main()
"""


@dataclass(slots=True)
class Lora(Workload):
    """`pmesh mlx -- mlx_lm.lora --train`."""

    mesh: LabMesh
    folder: Path
    words: Sequence[str]

    def start(self, node: Node, job: str) -> LabProgram:
        train = ("-m", "mlx_lm", "lora", "--train", "--adapter-path", str(self.folder / job))
        options = ("--job", job, "--wait-for", str(RANKS), "--", *train, *self.words)
        name = f"pmesh mlx of {node.name} ({len(self.mesh.programs)})"
        return self.mesh.start_program(node, "-c", _WAITS_FOR_ALL, "mlx", *options, name=name)

    def rank_of(self, rank: LabProgram) -> int:
        worlds = rank.found(_ENTERED)
        return int(worlds[-1][3]) if worlds else -1

    def step_of(self, rank: LabProgram) -> int:
        return max((int(match[1]) for match in rank.found(_AT)), default=0)

    def takes_part(self, rank: LabProgram, since: float) -> bool:  # noqa: ARG002 - it is a new program
        return any(int(match[2]) == RANKS for match in rank.found(_ENTERED))

    def judge(self, training: KilledTraining, tally: KillTally) -> None:
        """Everybody ends well with the same bits, which are on the disk, and learned as much."""
        from pmesh.mlx_lm.libraries import mx  # noqa: PLC0415 - torch's campaigns need no MLX
        from pmesh.mlx_lm.training import digest  # noqa: PLC0415

        where = training.name
        saved = self.folder / training.job / "adapters.safetensors"
        weights = {digest(mx.load(str(saved))) if saved.exists() else "none"}
        losses = list[float]()
        for rank in training.ranks:
            ended = [match[2] for match in rank.found(_ENDED) if int(match[1]) == self.steps]
            if rank.code or not ended:
                tally.violations.append(f"{where}: {rank.shown}")
            weights |= {*ended}
            validated = [m[2] for m in rank.found(_VALIDATED) if int(m[1]) == self.steps]
            losses += map(float, validated)
        for rank in training.everyone:
            wrong = [match.string for match in rank.found(_WRONG)]
            tally.violations += [f"{where}: {rank.name}: {line}" for line in wrong]
        judge_steps(tally, where, {self.steps: weights})
        judge_losses(tally, where, losses[:1])


def run_lora(run: CampaignRun) -> KillTally:
    from tools.lora import make_data, make_model  # noqa: PLC0415 - they need mlx-lm

    steps = run.steps or LORA_STEPS
    with _machines() as mesh, tempfile.TemporaryDirectory(prefix="pmesh-lora-") as name:
        folder = Path(name)
        words = (
            *("--model", str(make_model(folder / "model"))),
            *("--data", str(make_data(folder / "data")), "--iters", str(steps)),
            *("--batch-size", "7", "--num-layers", "4", "--learning-rate", "3e-4"),
            *("--steps-per-report", "10", "--steps-per-eval", "100", "--save-every", "20"),
            *run.words,
        )
        workload = Lora(
            steps=steps, pause_s=3.0, loads_s=6.0, mesh=mesh, folder=folder, words=words
        )
        return run_kills(workload, mesh, run.episodes, run.seed)
