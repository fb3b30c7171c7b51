"""Process groups on a simulated mesh."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pmesh.client.mesh import Mesh
from pmesh.testing import SimulatedMesh
from pmesh.torch.process_group import ProcessGroup

T = TypeVar("T")


def group_of(mesh: Mesh, end: Callable[[], None] = lambda: None) -> ProcessGroup:
    return ProcessGroup(
        mesh,
        None,
        mesh.rank,
        mesh.size,
        timeout=timedelta(minutes=1),
        name="all",
        split=lambda _: None,
        end=end,
    )


@contextlib.contextmanager
def group_that_ends(mesh: Mesh) -> Iterator[ProcessGroup]:
    """Else its threads would wait for ops until the tests have ended."""
    group = group_of(mesh)
    try:
        yield group
    finally:
        group.shutdown()


def run(program: Callable[[ProcessGroup], T], ranks: int = 3) -> list[T]:
    def run_rank(mesh: Mesh) -> T:
        with group_that_ends(mesh) as group:
            return program(group)

    return SimulatedMesh(ranks).run(run_rank)


def reducing(op: Any, *, waits: bool = False) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = not waits
    return options
