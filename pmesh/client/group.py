"""What a rank of a mesh or a group can call; and groups, each of which is a job of its own."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakSet, finalize

from pmesh.client.calls.averaging import Averaging
from pmesh.client.calls.moving import Moving, Objects
from pmesh.client.calls.placing import Placing
from pmesh.client.calls.point_to_point import PointToPoint
from pmesh.client.calls.queue import Handle, Line
from pmesh.client.collective.bucketed import LastOp
from pmesh.client.elastic.membership import Place
from pmesh.client.link.session import TrainerSession, exchange_rows
from pmesh.client.trees.arrays import digest
from pmesh.core.wire.link import Call
from pmesh.errors import (
    AgentStopped,
    GroupBroken,
    HistorySuperseded,
    RankLost,
    RosterChanged,
    UsageError,
)
from pmesh.ids import JobName, TrainerId


class Collectives(Averaging, Moving, Placing, Objects, PointToPoint):
    """The collectives, under the names of `torch.distributed` where they mean the same.

    They block until the result is there, and take an array of numpy, MLX or torch, where it makes
    sense also a (nested) dict, list or tuple of them. They return the same types and dtypes, bit
    for bit alike on every rank, and leave their arguments as they were. Every rank must make the
    same calls in the same order, whatever the library its arrays are of. With `async_op=True` they
    return a `Handle` at once; calls run in the order in which they were made. Messages between two
    ranks go beside them.
    """


R = TypeVar("R")
T = TypeVar("T")

_NAME_CHARACTERS = 40  # of the job's name, in the group's
_BREAKS = (RankLost, RosterChanged, HistorySuperseded, AgentStopped)


class Group(Collectives):
    """Some ranks of a mesh. Get one from `Mesh.group`, `Mesh.split` or a `DeviceMesh`.

    Its ranks count from 0 in the order in which they were named. Groups run at the same time as
    each other and as the mesh. When a rank of it is lost, its calls raise GroupBroken from then on,
    on all that are left. A group that nobody holds any more is left, as by `close`.
    """

    def __init__(self, place: Place, ranks: Sequence[int]) -> None:
        super().__init__(place)
        self._ranks = tuple(ranks)
        self._broken: str | None = None
        # At the program's end its connections close by themselves.
        finalize(self, _leave, place, self._line, os.getpid()).atexit = False

    def __repr__(self) -> str:
        return f"<Group of ranks {list(self._ranks)}, rank {self.rank} of {self.size}>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh that form the group, in the group's order."""
        return self._ranks

    def _trainer_at(self, rank: int) -> TrainerId:
        """As in a mesh; in a broken group a root may have no rank any more."""
        if self._broken is not None:
            raise GroupBroken(self._broken)
        return super()._trainer_at(rank)

    def _do(
        self,
        run: Callable[[Place], tuple[R, LastOp | None]],
        finish: Callable[[R], T],
        *,
        async_op: bool = False,
    ) -> T | Handle[T]:
        return super()._do(partial(self._run_unless_broken, run), finish, async_op=async_op)

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
    """Leave a group that nobody holds: in any thread, wherever Python collects garbage."""
    if os.getpid() == process:  # else a forked child's copy: the rank is the parent's
        place.leave_at_once()
        line.end()


class Groups:
    """The groups that one trainer has made of its mesh."""

    def __init__(self, place: Place, job: str) -> None:
        self._place = place
        self._job = job
        self._made: Counter[tuple[TrainerId, ...]] = Counter()
        self._open = WeakSet[Group]()

    def make(
        self, trainers: tuple[TrainerId, ...], ranks: Sequence[int], timeout_s: float
    ) -> Group:
        """Make a group of these trainers, in this order; returns when all have joined.

        All of them make the same groups in the same order, so each group gets one name. A group
        that failed to form does not count: some may not have tried, as when a `split` failed at
        some of its ranks and had returned at others (O4).
        """
        which = f"{digest([self._job, str(trainers)])}.{self._made[trainers]}"
        name = JobName(f"{self._job[:_NAME_CHARACTERS]}/{which}")
        try:
            place = self._place.open(name, trainers, timeout_s)
            self._made[trainers] += 1  # at all of them: it began in one view
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
        """Leave them all, or end them as a crash."""
        for group in tuple(self._open):
            group._stop(crashed=crashed)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    def _me(self) -> TrainerId:
        world = self._place.world
        return world.trainers[world.rank]


def check_ranks(ranks: Sequence[int], size: int) -> None:
    """Raises UsageError unless they are different ranks of a mesh of this size."""
    if len(ranks) == 0 or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size)):
        raise UsageError(
            f"a group is of different ranks from 0 to {size - 1}, at least one, not {list(ranks)}"
        )


def _broken(ranks: Sequence[int], why: BaseException) -> str:
    return f"this group of ranks {list(ranks)} is broken: {why}"


def ranks_by_color(choices: Sequence[Sequence[int]], color: int) -> list[int]:
    """The ranks that chose this color, by key, those with the same key by rank.

    Args:
        choices: the color and key of each rank.
        color: of the group.

    >>> ranks_by_color([[0, 5], [1, 0], [0, 2]], 0)
    [2, 0]
    """
    mine = [(key, rank) for rank, (theirs, key) in enumerate(choices) if theirs == color]
    return [rank for _, rank in sorted(mine)]


def _order_of(place: Place, index: int, timeout_s: float) -> tuple[TrainerId, ...]:
    """Each rank gives its place in the group: the agents' ring is in another order."""

    def ops(session: TrainerSession) -> tuple[TrainerId, ...]:
        call = Call("exchange", "int64", (1,))
        rows, done = exchange_rows(session, [index], call, timeout_s=timeout_s)
        return tuple(done.world.trainers[rows.index([i])] for i in range(len(rows)))

    return place.run(ops, lambda world: world.trainers, timeout_s=timeout_s)
