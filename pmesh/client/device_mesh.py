"""A mesh whose ranks lie in a grid, with a group along each dimension."""

import math
from collections.abc import Sequence

from pmesh.client.group import Group
from pmesh.client.mesh import Mesh
from pmesh.errors import UsageError


class DeviceMesh:
    """The ranks of a mesh as a grid, as `torch.distributed.device_mesh.DeviceMesh` has it.

    `DeviceMesh(mesh, (2, 3), ("data", "model"))` lays six ranks in two rows of three: rank 0 to 2
    in the first, 3 to 5 in the second. `grid["model"]` is then the group of this rank's row,
    `grid["data"]` that of its column. Every rank of the mesh must make it.

    Raises:
        UsageError: the shape does not hold as many ranks as there are, or the names do not fit it.
        NotEnoughRanks: some rank did not make it in time.
        GroupBroken: one of a group was lost meanwhile.
    """

    def __init__(
        self, mesh: Mesh, shape: Sequence[int], names: Sequence[str], timeout_s: float = 30.0
    ) -> None:
        if min(shape, default=0) < 1 or math.prod(shape) != mesh.size:
            raise UsageError(
                f"a grid of the shape {tuple(shape)} does not hold the {mesh.size} ranks there are"
            )
        if len(set(names)) != len(shape) or len(names) != len(shape):
            raise UsageError(
                f"the names {tuple(names)} are not one for each of {len(shape)} dimensions"
            )
        self._shape = tuple(shape)
        self._rank = mesh.rank
        self._groups: dict[str, Group] = {}
        try:
            for dimension, name in enumerate(names):
                self._groups[name] = _made(mesh.group(self._line(dimension), timeout_s))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={group.size}" for name, group in self._groups.items())
        return f"<DeviceMesh {sizes}, at {self.coordinate}>"

    def __getitem__(self, name: str) -> Group:
        """The group along this dimension of which this rank is one.

        Raises:
            UsageError: there is no such dimension.
        """
        if name not in self._groups:
            raise UsageError(
                f"this grid has the dimensions {', '.join(self._groups)}, not {name!r}"
            )
        return self._groups[name]

    def close(self) -> None:
        """Leave its groups, which otherwise stay until the mesh is closed."""
        for group in self._groups.values():
            group.close()

    @property
    def shape(self) -> tuple[int, ...]:
        """How many ranks lie along each dimension."""
        return self._shape

    @property
    def names(self) -> tuple[str, ...]:
        """Of the dimensions."""
        return tuple(self._groups)

    @property
    def coordinate(self) -> tuple[int, ...]:
        """Where this rank lies; the last dimension changes fastest."""
        return tuple(
            self._rank // self._stride(dimension) % length
            for dimension, length in enumerate(self._shape)
        )

    def _line(self, dimension: int) -> list[int]:
        """The ranks along a dimension, through this one."""
        stride = self._stride(dimension)
        first = self._rank - self.coordinate[dimension] * stride
        return [first + i * stride for i in range(self._shape[dimension])]

    def _stride(self, dimension: int) -> int:
        return math.prod(self._shape[dimension + 1 :])


def _made(group: Group | None) -> Group:
    assert group is not None  # noqa: S101 - this rank is on each of its lines
    return group
