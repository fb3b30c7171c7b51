"""Process groups on a simulated mesh."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pmesh.client.mesh import Mesh
from pmesh.testing import SimulatedMesh
from pmesh.torch.process_group import ProcessGroup

T = TypeVar("T")


def group_of(mesh: Mesh) -> ProcessGroup:
    return ProcessGroup(
        mesh,
        None,
        mesh.rank,
        mesh.size,
        timeout=timedelta(minutes=1),
        name="all",
        split=lambda _: None,
        end=lambda: None,
    )


def run(program: Callable[[ProcessGroup], T], ranks: int = 3) -> list[T]:
    return SimulatedMesh(ranks).run(lambda mesh: program(group_of(mesh)))


def reducing(op: Any, *, waits: bool = False) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = not waits
    return options
