"""Ranks in threads of one process that meet at each call: what `pmesh bench` needs of a mesh."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np

from pmesh.client.mesh import Mesh

PATIENCE_S = 30.0


@dataclass
class Meeting:
    """Where the ranks meet: each brings something, and sees what all have brought."""

    size: int
    names: tuple[str, ...]
    _brought: dict[int, dict[int, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """Of rank 0."""
    spoil: Callable[[str, int, Any], Any] = lambda _call, _rank, result: result
    """What comes out instead: a broken collective."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: list[int] = [0] * self.size
        self._failed = False

    def exchange(self, rank: int, mine: object) -> list[Any]:
        turn = self._turns[rank]
        self._turns[rank] += 1
        with self._changed:
            there = self._brought.setdefault(turn, {})
            there[rank] = mine
            self._changed.notify_all()
            met = self._changed.wait_for(
                lambda: len(there) == self.size or self._failed, PATIENCE_S
            )
            assert met, "another rank has made fewer calls"
            assert len(there) == self.size, "another rank has failed"
        return [there[r] for r in range(self.size)]

    def fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class FakeMesh:
    """One rank."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank
        self.size = meeting.size

    @property
    def names(self) -> tuple[str, ...]:
        return self.meeting.names

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.meeting.fail()

    def empty(self, count: int) -> Any:  # noqa: ANN401
        return np.full(count, np.nan, np.float32)

    def all_reduce(self, x: Any, op: str = "sum", **how: Any) -> Any:  # noqa: ANN401
        each = self._call(f"all_reduce {op} {how.get('strategy', 'auto')}", x)
        ufunc = {"sum": np.add, "max": np.maximum}[op]
        return self._out("all_reduce" if op == "sum" else "max", ufunc.reduce(each))

    def broadcast(self, x: Any, root: int = 0) -> Any:  # noqa: ANN401
        return self._out("broadcast", self._call("broadcast", x)[root])

    def reduce(self, x: Any, root: int = 0) -> Any:  # noqa: ANN401
        total = np.add.reduce(self._call("reduce", x))
        return self._out("reduce", total if self.rank == root else None)

    def all_gather(self, x: Any) -> Any:  # noqa: ANN401
        return self._out("all_gather", np.concatenate(self._call("all_gather", x)))

    def gather(self, x: Any, root: int = 0) -> Any:  # noqa: ANN401
        each = np.concatenate(self._call("gather", x))
        return self._out("gather", each if self.rank == root else None)

    def scatter(self, xs: Any, root: int = 0) -> Any:  # noqa: ANN401
        return self._out("scatter", self._call("scatter", xs)[root][self.rank])

    def reduce_scatter(self, x: Any) -> Any:  # noqa: ANN401
        total = np.add.reduce(self._call("reduce_scatter", x))
        return self._out("reduce_scatter", np.array_split(total, self.size)[self.rank])

    def all_to_all(self, xs: Any) -> Any:  # noqa: ANN401
        return self._out("all_to_all", [each[self.rank] for each in self._call("all_to_all", xs)])

    def sendrecv(self, x: Any, to: int, from_: int) -> Any:  # noqa: ANN401
        assert to != self.rank
        return self._out("sendrecv", self._call("sendrecv", x)[from_])

    def barrier(self) -> None:
        self._call("barrier", None)

    def _call(self, call: str, mine: object) -> list[Any]:
        if self.rank == 0:
            self.meeting.calls.append(call)
        return self.meeting.exchange(self.rank, mine)

    def _out(self, call: str, result: Any) -> Any:  # noqa: ANN401
        return self.meeting.spoil(call, self.rank, result)


def make_meeting(size: int) -> Meeting:
    return Meeting(size, tuple(f"mac-{rank + 1}" for rank in range(size)))


def on_each_rank(meeting: Meeting, program: Callable[[Mesh], Any]) -> list[Any]:
    """What the program returns at each rank, each in a thread of its own."""

    def run(rank: int) -> Any:  # noqa: ANN401
        with FakeMesh(meeting, rank) as mesh:
            return program(cast("Mesh", mesh))

    with ThreadPoolExecutor(meeting.size) as pool:
        return list(pool.map(run, range(meeting.size)))
