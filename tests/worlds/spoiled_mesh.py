"""Ranks on one real agent, whose results a test can spoil: for `pmesh bench`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

from pmesh.client.mesh import Mesh
from pmesh.testing import SimulatedMesh


@dataclass
class Meeting:
    """What the ranks of one mesh have in common."""

    size: int
    names: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)
    """Of rank 0."""
    spoil: Callable[[str, int, Any], Any] = lambda _call, _rank, result: result
    """What comes out instead: a broken collective."""

    def __post_init__(self) -> None:
        self.names = tuple(f"mac-{rank + 1}" for rank in range(self.size))


class SpoiledMesh:
    """One rank."""

    def __init__(self, meeting: Meeting, mesh: Mesh) -> None:
        self.meeting = meeting
        self.mesh = mesh

    @property
    def names(self) -> tuple[str, ...]:
        return self.meeting.names

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.mesh.__exit__(kind, error, traceback)

    def all_reduce(self, x: Any, op: str = "sum", **how: Any) -> Any:  # noqa: ANN401
        call = "all_reduce" if op == "sum" else op
        return self._call(call, self.mesh.all_reduce(x, op, **how), how.get("strategy", "auto"))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        found = getattr(self.mesh, name)
        if name == "empty" or not callable(found):
            return found
        return lambda *arguments: self._call(name, found(*arguments))

    def _call(self, call: str, result: object, *how: str) -> Any:  # noqa: ANN401
        if self.mesh.rank == 0:
            self.meeting.calls.append(" ".join((call, *how)))
        return self.meeting.spoil(call, self.mesh.rank, result)


def on_each_rank(meeting: Meeting, program: Callable[[Mesh], Any]) -> list[Any]:
    """What the program returns at each rank, each in a thread of its own."""
    return SimulatedMesh(meeting.size).run(
        lambda mesh: program(cast("Mesh", SpoiledMesh(meeting, mesh)))
    )
