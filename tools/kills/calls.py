"""`kill -9` of ranks and agents while eight ranks call each other a thousand times at once."""

import contextlib
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tools.kills.calling import DONE, ENDED, LOST, PATIENCE_S, RAN, call, turn_of
from tools.kills.campaign import KillTally
from tools.lab.call import fork_for
from tools.lab.campaign import CampaignRun
from tools.lab.commands import LabError
from tools.lab.mesh import LabMesh, Node
from tools.lab.net import NetLab
from tools.lab.program import LabProgram, await_that
from tools.lab.warm import Warm

RANKS = 8
IN_FLIGHT = 1000  # calls and objects, of all ranks together
AGENTS = 4  # each has two of the ranks
FLIES_S = 1.0  # at most, until a kill
WHOLE_S = 120.0
"""The job is whole again within so long: an agent and two processes start anew."""
MOST_ARENAS = 64  # of a rank without a call: it keeps some for the next ones
IMPORTED = ("tools.kills.calling",)


@dataclass(slots=True, eq=False)
class CallingRank:
    """A process that calls and serves."""

    number: int
    node: Node
    program: LabProgram

    def landed(self, turn: int) -> dict[str, Any] | None:
        """What it has told at the beginning of a round."""
        return next((r for r in self.program.reports if r.get("landed") == turn), None)

    def flies(self, turn: int) -> bool:
        return any(report.get("flies") == turn for report in self.program.reports)


@dataclass(slots=True)
class Calling:
    """Ranks that call each other, and those in their place once they are killed."""

    mesh: LabMesh
    warm: Mapping[str, Warm]
    """By the machine; a process without threads, which forks."""
    folder: Path
    rounds: int
    ranks: list[CallingRank] = field(default_factory=list[CallingRank])
    started: int = 0

    def start(self, node: Node) -> CallingRank:
        self.started += 1
        order = fork_for(
            call,
            node.environment,
            str(self.folder),
            self.started,
            RANKS,
            IN_FLIGHT // RANKS,
            self.rounds,
        )
        name = f"rank {self.started} at {node.name}"
        program = LabProgram(name, *self.warm[node.name].start(order))
        self.mesh.programs.append(program)
        return CallingRank(self.started, node, program)

    def await_landed(self, turn: int) -> list[dict[str, Any]]:
        """What all ranks have told once the job was whole again."""
        self._await(lambda: all(rank.landed(turn) for rank in self.ranks), f"round {turn}")
        return [rank.landed(turn) or {} for rank in self.ranks]

    def await_flight(self, turn: int) -> None:
        self._await(lambda: all(rank.flies(turn) for rank in self.ranks), f"the calls of {turn}")

    def _await(self, holds: Any, what: str) -> None:  # noqa: ANN401 - a condition
        of = [rank.program for rank in self.ranks]
        await_that(holds, what, within_s=WHOLE_S + PATIENCE_S, of=of)

    def kill_ranks(self, places: Sequence[int]) -> list[int]:
        """Kill these, and start others in their place; return the numbers of the killed."""
        killed = [self.ranks[place] for place in places]
        for rank in killed:
            rank.program.end()
        for place in places:
            self.ranks[place] = self.start(self.ranks[place].node)
        return [rank.number for rank in killed]

    def kill_agent(self, node: Node) -> list[int]:
        """Kill an agent and start it again; return the numbers of its ranks, which come back."""
        node.kill("agent")
        self.mesh.restart_agent(node)
        return [rank.number for rank in self.ranks if rank.node is node]


def run_calls(run: CampaignRun) -> KillTally:
    """Kill so often; each time all is well before the next kill."""
    dice, tally = run.random(), KillTally()
    with _calling(run) as calling:
        lost: dict[int, set[int]] = {}
        for turn in range(1, run.episodes + 1):
            calling.await_flight(turn)
            time.sleep(dice.uniform(0.0, FLIES_S))
            began = time.monotonic()
            lost[turn] = set(_kill(calling, dice, tally))
            told = calling.await_landed(turn)
            tally.back_s.append(time.monotonic() - began)
            _judge_landing(tally, f"kill {turn}", told, began)
        _judge_end(tally, calling)
        judge_calls(tally, *read_journals(calling.folder), lost)
    return tally.sum_up()


@contextlib.contextmanager
def _calling(run: CampaignRun) -> Generator[Calling]:
    lab = NetLab(AGENTS)
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="calls-"))
        mesh = stack.enter_context(LabMesh(lab, logs=run.logs))
        mesh.start_agents()
        warm = {
            node.name: stack.enter_context(
                closing(Warm(IMPORTED, node.environment | {"OPENBLAS_NUM_THREADS": "1"}, node.host))
            )
            for node in mesh.nodes
        }
        mesh.await_view()
        calling = Calling(mesh, warm, Path(name), run.episodes)
        places = mesh.nodes * (RANKS // len(mesh.nodes))
        calling.ranks = [calling.start(node) for node in places]
        yield calling


def _kill(calling: Calling, dice: Random, tally: KillTally) -> list[int]:
    tally.kills += 1
    match tally.kills % 10:
        case 2:
            tally.count("of agents")
            return calling.kill_agent(dice.choice(calling.mesh.nodes))
        case 4 | 8:  # the caller and the callee of some calls
            tally.count("of two ranks")
            return calling.kill_ranks(dice.sample(range(RANKS), 2))
        case _:
            return calling.kill_ranks([dice.randrange(RANKS)])


def _judge_landing(
    tally: KillTally, where: str, told: Iterable[Mapping[str, Any]], killed_at: float
) -> None:
    """No call of the survivors hangs, and nothing is left of any."""
    told = list(told)
    for each in told:
        tally.violations += [f"{where}: {what}" for what in each["wrong"]]
        if each["left"]:
            tally.violations.append(f"{where}: {each['left']} is left")
        if each["arenas"] > MOST_ARENAS:
            tally.violations.append(f"{where}: {each['arenas']} arenas are left")
    ends = [each["lost_at"] for each in told if each["lost_at"] is not None]
    if ends:
        tally.recovery_s.append(max(ends) - killed_at)
    tally.facts["most arenas of a rank"] = max(
        tally.facts.get("most arenas of a rank", 0), *(each["arenas"] for each in told)
    )
    if tally.kills % 10 == 0:
        print(f"  {tally.kills} kills, {len(tally.violations)} violations", flush=True)


def _judge_end(tally: KillTally, calling: Calling) -> None:
    """Ranks that have closed their mesh have neither threads nor arenas, and agents no arenas."""
    for rank in calling.ranks:
        code = rank.program.join()
        last = next((r for r in rank.program.reports if "closed" in r), dict[str, Any]())
        if code or last.get("threads") or last.get("arenas") or not last:
            tally.violations.append(f"the end of rank {rank.number}: {rank.program.shown}")
    agents = [node.pid for node in calling.mesh.nodes]
    try:
        await_that(lambda: not sum(map(arenas_of, agents)), "the end of all arenas")
    except LabError as e:
        tally.violations.append(f"{e}: {[arenas_of(pid) for pid in agents]} are left")


def arenas_of(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("pmesh-")


Records: TypeAlias = NDArray[np.void]


def read_journals(folder: Path) -> tuple[dict[int, Records], Records]:
    """What each process has run, and how all calls have ended."""
    ran = {int(path.stem): np.fromfile(path, RAN) for path in folder.glob("*.ran")}
    ended = [np.fromfile(path, ENDED) for path in folder.glob("*.ended")]
    return ran, np.concatenate(ended)


def judge_calls(
    tally: KillTally, ran: Mapping[int, Records], ended: Records, lost: Mapping[int, set[int]]
) -> None:
    """Each call has run at most once, and once if it has a result; only lost ranks lose calls.

    Args:
        tally: What is found goes here.
        ran: What each process has run.
        ended: The calls that have ended, and how.
        lost: Which processes were lost in each round.
    """
    where = {int(number): process for process, found in ran.items() for number in found["call"]}
    runs = np.concatenate([found["call"] for found in ran.values()])
    tally.ops_checked += len(ended)
    tally.facts["calls that have run"] = len(runs)
    called, times = np.unique(runs, return_counts=True)
    tally.violations += [f"call {number:x} has run twice" for number in called[times > 1]]
    of_outcome = {each: ended["call"][ended["outcome"] == each] for each in (DONE, LOST)}
    never = np.setdiff1d(of_outcome[DONE], called)
    tally.violations += [f"call {number:x} has a result, and has not run" for number in never]
    tally.facts["calls that were lost"] = len(of_outcome[LOST])
    for number in map(int, of_outcome[LOST]):
        gone = lost.get(turn_of(number), set())
        if number in where and where[number] not in gone:
            tally.violations.append(f"call {number:x} is lost, and {where[number]} is not")
