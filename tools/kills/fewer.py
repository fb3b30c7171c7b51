"""A training in stages whose machines are lost for good, one after the other, down to two."""

import re
import time
from random import Random

from tools.kills.campaign import AGAIN, PATIENCE_S, VICTIMS, KilledTraining, KillTally, Victim
from tools.kills.stages import LOADS_S, PAUSE_S, Stages
from tools.lab.campaign import CampaignRun
from tools.lab.mesh import LabMesh, Node
from tools.lab.program import LabProgram, await_that

MACHINES, LEFT = 4, 2
STEPS = 400
FEWER_AFTER_S = 0.5
WAIT_S = 60.0  # for a neighbour of a lost one, lost before its layers are dealt, that never comes
SOON_S = 2.0  # most of these kills hit before the layers of the one before are dealt
_PROMISED = re.compile(r"pmesh\.errors\.(RosterChanged: stage|NotEnoughRanks:)")


class KilledForGood(KilledTraining):
    """One training, in which nothing that was killed comes back."""

    def __init__(self, workload: Stages, mesh: LabMesh, number: int) -> None:
        super().__init__(workload, mesh, number)
        self.nodes = dict(zip(self.ranks, mesh.nodes, strict=True))
        self.without_agent: list[Node] = []
        self.is_soon = False
        """Whether one was lost before all had gone on after the loss before it."""

    def lose_some(self, tally: KillTally, kills: int, random: Random) -> None:
        while self._has_more(tally, kills):
            time.sleep(random.uniform(0.0, PAUSE_S))
            began = time.monotonic()
            self._lose(tally, random)
            if self._has_more(tally, kills) and random.random() < AGAIN:
                time.sleep(random.uniform(0.0, SOON_S))
                self.is_soon = not all(map(self._take_part, self.ranks))
                tally.count("before all went on without the one before", self.is_soon)
                self._lose(tally, random)
            await_that(self._goes_on, "the others' next step", within_s=PATIENCE_S)
            if not any(rank.ended for rank in self.ranks):
                tally.recovery_s.append(time.monotonic() - began)

    def _has_more(self, tally: KillTally, kills: int) -> bool:
        has_ended = any(rank.ended for rank in self.ranks)
        return tally.kills < kills and len(self.ranks) > LEFT and not has_ended

    def _goes_on(self) -> bool:
        return all(rank.ended or self._take_part(rank) for rank in self.ranks)

    def _lose(self, tally: KillTally, random: Random) -> None:
        victim: Victim = VICTIMS[tally.kills % len(VICTIMS)]
        rank = random.choice(self.ranks)
        self.ranks.remove(rank)
        tally.kills += 1
        tally.count(f"of {victim}s")
        self._killed_at = time.monotonic()
        if victim != "rank":
            self.nodes[rank].kill("agent")
            self.without_agent.append(self.nodes[rank])
        if victim != "agent":  # else it waits for another agent, until the training has ended
            rank.end()

    def ended_as_promised(self) -> bool:
        """Whether two neighbours were lost together, and each rank has said that its end."""
        return self.is_soon and all(rank.found(_PROMISED) for rank in self.ranks)


def run_stages_for_good(run: CampaignRun) -> KillTally:
    """Train without a loss, then again and again until so many machines are lost."""
    random, tally, number = run.random(), KillTally(), 0
    words = (str(MACHINES), str(FEWER_AFTER_S), str(WAIT_S))
    with LabMesh(MACHINES) as mesh:
        mesh.start_agents()
        mesh.await_view()
        workload = Stages(
            steps=run.steps or STEPS, pause_s=PAUSE_S, loads_s=LOADS_S, mesh=mesh, words=words
        )
        while tally.kills < run.episodes or not number:
            training = KilledForGood(workload, mesh, number)
            try:
                training.await_all()
                if number:  # the first is undisturbed
                    training.lose_some(tally, run.episodes, random)
                for rank in training.ranks:
                    rank.join(within_s=PATIENCE_S)
            finally:
                _end_all(training.everyone)
            if training.ended_as_promised():
                tally.count("trainings that ended with the error for lost neighbours")
            else:
                workload.judge(training, tally)
            number += 1
            tally.count("trainings")
            print(f"  {number} trainings, {tally.kills} kills", flush=True)
            for node in training.without_agent:
                mesh.restart_agent(node)
            mesh.await_view()
    return tally.sum_up()


def _end_all(ranks: list[LabProgram]) -> None:
    for rank in ranks:
        rank.end()
