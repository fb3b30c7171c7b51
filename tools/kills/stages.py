"""A training in stages by `pmesh.mlx.ElasticPipeline`: ranks, agents and machines are killed."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.kills.campaign import (
    RANKS,
    VICTIMS,
    KilledTraining,
    KillTally,
    Workload,
    judge_steps,
    run_kills,
)
from tools.lab.campaign import CampaignRun
from tools.lab.commands import LabError
from tools.lab.mesh import LabMesh, Node
from tools.lab.program import LabProgram

SCRIPT = Path(__file__).parent / "scripts" / "stages.py"
STEPS = 800
PAUSE_S = 1.0
LOADS_S = 1.5  # imports take most of it


@dataclass(slots=True)
class Stages(Workload):
    """Stages of a small model."""

    mesh: LabMesh
    words: Sequence[str] = (str(RANKS),)
    """How many stages, and further arguments of the script."""
    losses: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """Of each step of the first training."""
    weights: list[str] = field(default_factory=list[str])
    """The hash of each layer's weights at its end."""

    def start(self, node: Node, job: str) -> LabProgram:
        return self.mesh.start_program(node, str(SCRIPT), job, str(self.steps), *self.words)

    def rank_of(self, rank: LabProgram) -> int:
        return -1 if (number := rank.last("rank")) is None else int(number)

    def step_of(self, rank: LabProgram) -> int:
        return rank.last("step") or 0

    def takes_part(self, rank: LabProgram, since: float) -> bool:
        if since:  # all have met, and ended a step together
            since = rank.last_line("pipeline: all", since=since).at
            return bool(since and rank.last_line('{"step"', since=since).at)
        return rank.last("step") is not None

    def await_progress(self, *_: object) -> None:
        """None goes on until the killed one is back."""

    def judge(self, training: KilledTraining, tally: KillTally) -> None:
        """Each step has the loss, and each layer the weights, of the training without a kill."""
        if any(rank.last("digests") is None for rank in training.ranks):
            raise LabError("\n".join(rank.shown for rank in training.ranks))
        losses = losses_of(training.everyone)
        in_order = sorted(training.ranks, key=lambda rank: int(rank.last("stage")))
        weights = [digest for rank in in_order for digest in rank.last("digests")]
        self.losses, self.weights = self.losses or losses, self.weights or weights
        both = {step: losses.get(step, set()) | self.losses[step] for step in self.losses}
        judge_steps(tally, training.name, both)
        if len(losses) != self.steps or weights != self.weights:
            tally.violations.append(f"{training.name}: {len(losses)} steps, weights {weights}")
        tally.losses.append(float(max(losses[self.steps - 1])))


def losses_of(ranks: Iterable[LabProgram]) -> dict[int, set[str]]:
    """What all have said of each step."""
    found: dict[int, set[str]] = defaultdict(set)
    for each in (report for rank in ranks for report in rank.reports if "loss" in report):
        found[each["step"]].add(repr(each["loss"]))
    return found


def run_stages(run: CampaignRun) -> KillTally:
    with LabMesh(RANKS) as mesh:
        mesh.start_agents()
        mesh.await_view()
        workload = Stages(
            steps=run.steps or STEPS, pause_s=PAUSE_S, loads_s=LOADS_S, mesh=mesh, victims=VICTIMS
        )
        return run_kills(workload, mesh, run.episodes, run.seed)
