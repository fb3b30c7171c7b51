"""`kill -9` of ranks while one of them shares items out by `mesh.rpc.map` among unequal machines.

An item is a wait, as long as its machine is slow: so the speeds are exact on any number of cores.
What a machine could have done is its rate times the time in which it was in the job.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count

import pmesh
from tools.kills.calling import CUT_OFF_ERRORS, tell
from tools.kills.campaign import PATIENCE_S, KillTally
from tools.lab.call import fork_for
from tools.lab.campaign import CampaignRun
from tools.lab.mesh import LabMesh, Node
from tools.lab.program import LabProgram, await_that
from tools.lab.warm import Warm

JOB = "maps"
SPEEDS = (1, 1, 2, 4)  # of the machines; the first one calls, and is not killed
ITEM_S = 2.0  # of the slowest machine
SHORT_ITEM_S = 0.4
ITEMS = 20  # for each kill
PAUSE_S = 3.0  # at most, before each kill
TURN_S = 0.05  # between two collectives
USED = "of the sum of their rates"


def work(process: int, item_s: float, items: int) -> None:
    """Be one rank, until the items are done.

    Args:
        process: Its number; each process of the campaign has its own.
        item_s: How long an item takes here.
        items: How many it shares out once all ranks are there; 0: another rank does.
    """
    with pmesh.connect(JOB, len(SPEEDS)) as mesh:

        def wait(item: int) -> list[int]:
            tell(ran=item)
            time.sleep(item_s)
            return [item, process]

        def share_out() -> None:
            began = time.monotonic()
            results = mesh.rpc.map("wait", range(items))
            tell(results=results, began=began, ended=time.monotonic())

        mesh.rpc.serve(threads=1)
        mesh.rpc.register(wait)
        sharing = threading.Thread(target=share_out)
        is_here, state = False, {"": 0}
        while True:
            try:
                state = mesh.sync(state)
                ended = mesh.all_gather_object(sharing.ident is not None and not sharing.is_alive())
            except pmesh.RosterChanged:
                continue
            except CUT_OFF_ERRORS:  # the machine stood still for too long
                tell(cut_off=True)
                time.sleep(TURN_S)
                continue
            if not is_here:
                is_here = True
                tell(here=time.monotonic())
            if items and sharing.ident is None and len(ended) == len(SPEEDS):
                sharing.start()
            if any(ended) and len(ended) == len(SPEEDS):  # nobody who comes back is left alone
                break
            time.sleep(TURN_S)


@dataclass(slots=True)
class ItemWorker:
    """A process that does items."""

    number: int
    place: int
    """Its machine."""
    program: LabProgram
    killed_at: float | None = None

    @property
    def here_at(self) -> float | None:
        told: float | None = self.program.last("here")
        return told

    @property
    def was_lost(self) -> bool:
        """It was killed or cut off, so others got what it had begun."""
        return self.killed_at is not None or self.program.last("cut_off") is not None

    @property
    def ran(self) -> list[int]:
        return [report["ran"] for report in self.program.reports if "ran" in report]

    def could_do(self, began: float, ended: float, item_s: float) -> float:
        """How many items it could do in this time, while it was in the job."""
        if self.here_at is None:
            return 0.0
        until = ended if self.killed_at is None else min(self.killed_at, ended)
        return max(until - max(self.here_at, began), 0.0) * SPEEDS[self.place] / item_s


@dataclass(slots=True)
class RanksOfMap:
    """The ranks, and those in their place once they are killed."""

    mesh: LabMesh
    warm: Sequence[Warm]
    item_s: float
    items: int
    everyone: list[ItemWorker] = field(default_factory=list[ItemWorker])
    ranks: list[ItemWorker] = field(default_factory=list[ItemWorker])
    _numbers: "count[int]" = field(default_factory=count)

    def start(self, place: int) -> ItemWorker:
        node, number = self.mesh.nodes[place], next(self._numbers)
        items = 0 if place else self.items
        order = fork_for(work, node.environment, number, self.item_s / SPEEDS[place], items)
        program = LabProgram(f"rank {number} at {node.name}", *self.warm[place].start(order))
        self.mesh.programs.append(program)
        self.everyone.append(ItemWorker(number, place, program))
        return self.everyone[-1]

    def await_all(self) -> None:
        await_that(
            lambda: all(rank.here_at is not None for rank in self.ranks),
            "all ranks",
            within_s=PATIENCE_S,
            of=[rank.program for rank in self.ranks],
        )

    def kill(self, place: int) -> None:
        killed = self.ranks[place]
        killed.killed_at = time.monotonic()
        killed.program.end()
        self.ranks[place] = self.start(place)


def run_maps(run: CampaignRun) -> KillTally:
    """Kill so often while the items are done."""
    dice, tally = run.random(), KillTally()
    with _sharing(run) as sharing:
        sharing.await_all()
        caller = sharing.ranks[0].program
        for _ in range(run.episodes):
            time.sleep(dice.uniform(0.0, sharing.item_s / ITEM_S * PAUSE_S))
            if caller.last("results") is not None:  # this program got no time to kill
                break
            began = time.monotonic()
            sharing.kill(dice.randrange(1, len(SPEEDS)))
            tally.kills += 1
            sharing.await_all()
            tally.back_s.append(time.monotonic() - began)
        for rank in sharing.ranks:
            rank.program.join(within_s=PATIENCE_S)
        _judge(tally, sharing, run.episodes)
    return tally.sum_up()


@contextlib.contextmanager
def _sharing(run: CampaignRun) -> Generator[RanksOfMap]:
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(LabMesh(len(SPEEDS), logs=run.logs))
        mesh.start_agents()
        warm = [stack.enter_context(closing(_warm(node))) for node in mesh.nodes]
        mesh.await_view()
        item_s = SHORT_ITEM_S if run.short else ITEM_S
        sharing = RanksOfMap(mesh, warm, item_s, ITEMS * run.episodes)
        sharing.ranks = [sharing.start(place) for place in range(len(SPEEDS))]
        yield sharing


def _warm(node: Node) -> Warm:
    return Warm([__name__], node.environment | {"OPENBLAS_NUM_THREADS": "1"}, node.host)


def _judge(tally: KillTally, sharing: RanksOfMap, kills: int) -> None:
    told = next((r for r in sharing.ranks[0].program.reports if "results" in r), None)
    if told is None:
        tally.violations.append(f"no results: {sharing.ranks[0].program.shown}")
        return
    lost = [worker.number for worker in sharing.everyone if worker.was_lost]
    ran = {worker.number: worker.ran for worker in sharing.everyone}
    judge_results(tally, sharing.items, told["results"], ran, lost)
    could = sum(
        worker.could_do(told["began"], told["ended"], sharing.item_s) for worker in sharing.everyone
    )
    tally.facts["s"] = told["ended"] - told["began"]
    if tally.kills == kills:  # else the bar is not met
        tally.facts[USED] = sharing.items / could


def judge_results(
    tally: KillTally,
    items: int,
    results: Sequence[Sequence[int]],
    ran: Mapping[int, Sequence[int]],
    lost: Collection[int],
) -> None:
    """Each item has one result, of a process that ran it; only lost ones ran it in vain.

    Args:
        tally: What is found goes here.
        items: How many there are.
        results: In the items' order: each the item and the process.
        ran: The items that each process has begun.
        lost: The processes that were killed, or cut off.
    """
    tally.ops_checked += len(results)
    if [item for item, _ in results] != list(range(items)):
        tally.violations.append(f"{len(results)} results of {items} items, or in another order")
    for item, process in results:
        if item not in ran.get(process, ()):
            tally.violations.append(f"item {item} has a result of {process}, which did not run it")
    tally.violations += _run_twice(ran, lost)
    tally.facts["items begun"] = sum(map(len, ran.values()))


def _run_twice(ran: Mapping[int, Sequence[int]], lost: Collection[int]) -> Iterable[str]:
    by_survivors = Counter(
        item for process, begun in ran.items() if process not in lost for item in begun
    )
    return [f"item {item} has run {n} times" for item, n in by_survivors.items() if n > 1]
