"""The calls that a mesh and a group share; and groups, each of which is a job of its own."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast
from weakref import WeakSet, finalize

from pmesh.client.calls.averaging import Averaging
from pmesh.client.calls.moving import Moving, Objects
from pmesh.client.calls.placing import Placing
from pmesh.client.calls.queue import Handle, Line, Turn, check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.collective.bucketed import ALONE, LastOp
from pmesh.client.elastic.compare import Compared, run_compare
from pmesh.client.elastic.place import Place
from pmesh.client.session.rows import exchange_rows
from pmesh.client.session.session import TrainerSession
from pmesh.client.shown import names_line, ranks_table
from pmesh.client.trees.arrays import digest
from pmesh.client.trees.state import pack
from pmesh.core.jobs.comparing import digest_text
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.errors import (
    AgentStopped,
    GroupBroken,
    HistorySuperseded,
    RankLost,
    RosterChanged,
    UsageError,
)
from pmesh.ids import JobName, TrainerId
from pmesh.p2p.client.calls import PointToPoint


class Collectives(Averaging, Moving, Placing, Objects, PointToPoint):
    """The collectives, with the names of `torch.distributed` where they mean the same.

    They block until the result is there. They take an array of numpy, MLX or torch; many also take
    a (nested) dict, list or tuple of arrays. They return the same types and dtypes, bit for bit the
    same on every rank, and do not change their arguments. Every rank must make the same calls in
    the same order; the ranks may use different libraries. With `async_op=True` they return a
    `Handle` at once. Calls run in the order in which they were made; messages between two ranks run
    at the same time.
    """

    def compare(self, state: object, timeout_s: float = DEFAULT_TIMEOUT_S) -> Compared:
        """Find out whether all ranks have the same state, such as their weights, bit for bit.

        It changes nothing, costs a hash of the state and one small op, and every rank must call it.
        `pmesh status` on any machine shows what was found last; if ranks differ, `pmesh events` on
        the machines of the job has it, too. A `sync` compares as well, and shows the same. In a
        group it is about the ranks of the group, such as the copies of one stage, and `pmesh
        status` shows it at the group.

        Args:
            state: as for `sync`.
            timeout_s: for the op.

        Returns:
            The hash of this rank's state, and the ranks that have another state than most.

        Raises:
            UnsupportedArray: the state holds something that `sync` does not take.
            PmeshError: as for `all_reduce`.
        """
        packed, timeout_s = pack(state), check_timeout(timeout_s)

        def ops(session: TrainerSession) -> tuple[Compared, LastOp]:
            found, done = run_compare(session, packed, step=self._place.step, timeout_s=timeout_s)
            return found, LastOp.among(done.op, done.world, done.values.nbytes)

        def alone(world: World) -> tuple[Compared, LastOp]:
            return Compared(digest_text(packed.digest), ()), LastOp.among(ALONE, world, 0)

        result = self._call(ops, alone, lambda found: found, timeout_s=timeout_s)
        return cast("Compared", result)


R = TypeVar("R")
T = TypeVar("T")

_NAME_CHARACTERS = 40  # a group's name begins with so much of the job's name
_BREAKS = (RankLost, RosterChanged, HistorySuperseded, AgentStopped)


class Group(Collectives):
    """Some ranks of a mesh. Get one from `Mesh.group`, `Mesh.split` or a `DeviceMesh`.

    Its ranks count from 0, in the order in which they were named. Groups run at the same time as
    each other and as the mesh. Once a rank of the group is lost, its calls raise GroupBroken on all
    ranks that are left. When nobody refers to the group any more, this rank leaves it, as by
    `close`.
    """

    def __init__(self, place: Place, ranks: Sequence[int]) -> None:
        super().__init__(place)
        self._ranks = tuple(ranks)
        self._broken: str | None = None
        # Not at the program's end: its connections close by themselves then.
        finalize(self, _leave, place, self._line, os.getpid()).atexit = False

    def __repr__(self) -> str:
        return f"<{self._title}: {names_line(self.names)}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return ranks_table(self._title, self.names, self.rank)

    @property
    def _title(self) -> str:
        return f"Group of ranks {list(self._ranks)}, rank {self.rank} of {self.size}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh that form the group, in the group's order."""
        return self._ranks

    def _trainer_at(self, rank: int) -> TrainerId:
        """Raise GroupBroken first: in a broken group a root may have no rank any more."""
        if self._broken is not None:
            raise GroupBroken(self._broken)
        return super()._trainer_at(rank)

    def _do(
        self,
        run: Callable[[Place], tuple[R, LastOp | None]],
        finish: Callable[[R], T],
        *,
        async_op: bool = False,
        turn: Turn | None = None,
    ) -> T | Handle[T]:
        guarded = partial(self._run_unless_broken, run)
        return super()._do(guarded, finish, async_op=async_op, turn=turn)

    def _run_unless_broken(
        self, run: Callable[[Place], tuple[R, LastOp | None]], place: Place
    ) -> tuple[R, LastOp | None]:
        if self._broken is not None:
            raise GroupBroken(self._broken)
        try:
            return run(place)
        except _BREAKS as e:
            self._broken = _broken(self._ranks, e)
            raise GroupBroken(self._broken) from e


def _leave(place: Place, line: Line, process: int) -> None:
    """Leave a group that nobody refers to. Python calls this in any thread, at any moment."""
    if os.getpid() == process:  # a forked child only has a copy of the parent's group
        place.leave_at_once()
        line.end()


class Groups:
    """The groups that one trainer has made from its mesh."""

    def __init__(self, place: Place, job: str) -> None:
        self._place = place
        self._job = job
        self._made: Counter[tuple[TrainerId, ...]] = Counter()
        self._open = WeakSet[Group]()

    def make(
        self, trainers: tuple[TrainerId, ...], ranks: Sequence[int], timeout_s: float
    ) -> Group:
        """Make a group of these trainers, in this order; return when all have joined.

        All of them make the same groups in the same order, so they give each group the same name.
        A group that failed to form does not count, since not all may have tried: a `split` may fail
        at some of its ranks after it has returned at others (O4).
        """
        which = f"{digest([self._job, str(trainers)])}.{self._made[trainers]}"
        name = JobName(f"{self._job[:_NAME_CHARACTERS]}/{which}")
        try:
            place = self._place.open(name, trainers, timeout_s)
            self._made[trainers] += 1  # on all of them, as the group began in one view
            try:
                place.count_in(_order_of(place, trainers.index(self._me()), timeout_s))
            except BaseException:
                place.leave()
                raise
        except _BREAKS as e:
            raise GroupBroken(_broken(ranks, e)) from e
        group = Group(place, ranks)
        self._open.add(group)
        return group

    def stop(self, *, crashed: BaseException | None) -> None:
        """Leave all groups, or end them as after a crash."""
        for group in tuple(self._open):
            group._stop(crashed=crashed)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    def _me(self) -> TrainerId:
        world = self._place.world
        return world.trainers[world.rank]


def check_ranks(ranks: Sequence[int], size: int) -> None:
    """Raise UsageError unless these are different ranks of a mesh of this size, at least one."""
    if len(ranks) == 0 or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size)):
        raise UsageError(
            f"a group is of different ranks from 0 to {size - 1}, at least one, not {list(ranks)}"
        )


def _broken(ranks: Sequence[int], why: BaseException) -> str:
    return f"this group of ranks {list(ranks)} is broken: {why}"


def ranks_by_color(choices: Sequence[Sequence[int]], color: int) -> list[int]:
    """Return the ranks that chose this color, sorted by key, and equal keys by rank.

    Args:
        choices: the color and key of each rank.
        color: the color of the group.

    >>> ranks_by_color([[0, 5], [1, 0], [0, 2]], 0)
    [2, 0]
    """
    mine = [(key, rank) for rank, (theirs, key) in enumerate(choices) if theirs == color]
    return [rank for _, rank in sorted(mine)]


def _order_of(place: Place, index: int, timeout_s: float) -> tuple[TrainerId, ...]:
    """Exchange the ranks' indices in the group, as the ring has another order."""

    def ops(session: TrainerSession) -> tuple[TrainerId, ...]:
        call = Call("exchange", "int64", (1,))
        rows, done = exchange_rows(session, [index], call, timeout_s=timeout_s)
        return tuple(done.world.trainers[rows.index([i])] for i in range(len(rows)))

    return place.run(ops, lambda world: world.trainers, timeout_s=timeout_s)
