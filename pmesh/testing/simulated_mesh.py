"""A mesh of threads, for the unit tests of training scripts: no agent, no network."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pmesh.client.mesh import Mesh
from pmesh.errors import GroupBroken, RankLost, UsageError
from pmesh.ids import TrainerId
from pmesh.testing.simulated_place import Hubs, SimulatedPlace

T = TypeVar("T")
_JOB = "simulated"
_COMING_S = 30.0  # for threads that all begin at once


class SimulatedMesh:
    """So many ranks as threads of this process, which make the same calls as on a real mesh.

    Every rank gets the same bits. They are summed in the order of ranks, which a network need not
    do: the last bits of a sum of floats may differ from a real mesh's.

    >>> SimulatedMesh(3).run(lambda mesh: mesh.rank)
    [0, 1, 2]
    """

    def __init__(self, size: int) -> None:
        """Raises UsageError if size is less than 1."""
        if size < 1:
            raise UsageError(f"a mesh has at least 1 rank, not {size}")
        self._size = size
        self._hubs = Hubs(size)

    def run(self, train: Callable[[Mesh], T]) -> list[T]:
        """Call `train` once for each rank, each in a thread of its own.

        A rank that returns has left, and one that raises is lost: what others wait for then fails
        with RankLost. One rank's error is raised as it is, without the RankLost and GroupBroken
        that it has caused; several different ones as an ExceptionGroup.

        Returns:
            What each rank's call has returned, by rank.
        """
        self._hubs = Hubs(self._size)
        with ThreadPoolExecutor(self._size, "simulated-rank") as pool:
            futures = [pool.submit(self._run_rank, rank, train) for rank in range(self._size)]
        errors = [e for future in futures if (e := future.exception()) is not None]
        causes = [e for e in errors if not isinstance(e, RankLost | GroupBroken)] or errors
        different = list({(type(e), str(e)): e for e in causes}.values())
        if len(different) > 1:
            raise BaseExceptionGroup("ranks of a simulated mesh have failed", different)
        if different:
            raise different[0]
        return [future.result() for future in futures]

    def lose(self, rank: int) -> None:
        """Lose a rank of the run under way, as by a crash: the others' calls raise RankLost."""
        self._hubs.lose(TrainerId(rank), "SimulatedMesh.lose")

    def _run_rank(self, rank: int, train: Callable[[Mesh], T]) -> T:
        place = SimulatedPlace(self._hubs, self._hubs.mesh, TrainerId(rank), _COMING_S)
        with Mesh(place, job=_JOB) as mesh:
            return train(mesh)
