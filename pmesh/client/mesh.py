"""What `pmesh.connect` returns: a rank among others, its share of the data, and grids of ranks."""

import logging
import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeAlias, TypeVar, cast

import numpy as np

from pmesh.client.calls.queue import check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.calls.store import Store
from pmesh.client.collective.bucketed import LastOp
from pmesh.client.collective.differences import state_differences
from pmesh.client.elastic.membership import Place
from pmesh.client.elastic.sync import Synced
from pmesh.client.group import Collectives, Group, Groups, check_ranks, ranks_by_color
from pmesh.client.link.p2p_session import P2PSession
from pmesh.client.trees.state import pack, unpack_untrusted
from pmesh.core.ops.reductions import Values
from pmesh.core.values import View
from pmesh.errors import ProtocolError, RunError, UsageError

_logger = logging.getLogger("pmesh")

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


def order_of(dataset_len: int, *, epoch: int, seed: int) -> Indices:
    """A permutation of 0 to `dataset_len` - 1, the same on every machine; read-only int64.

    The samples are sorted by random numbers of a counter-based generator (Philox 4x64-10: Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the key (seed, epoch). Not
    `Generator.permutation`, whose order may change with numpy's version, unlike a bit generator's.
    """
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    order = np.argsort(generator.random_raw(dataset_len), kind="stable").astype(np.int64)
    order.flags.writeable = False  # it is kept for the next call
    return order


def deal(order: Indices, *, position: int, rank: int, size: int) -> Indices:
    """A rank's part of what follows `position`: every `size`-th, from the `rank`-th on."""
    return order[position + rank :: size].copy()  # torch warns of arrays that are read-only


def check_shard(dataset_len: int, *, epoch: int, position: int, seed: int) -> None:
    """Raises UsageError unless these can be a data set, an epoch, a position and a seed."""
    numbers = {"dataset_len": dataset_len, "epoch": epoch, "position": position, "seed": seed}
    for name, number in numbers.items():
        if not 0 <= number < 2**63:
            raise UsageError(f"{name} is at least 0 and less than 2**63, not {number}")


T = TypeVar("T")


class Mesh(Collectives):
    """This trainer among the ranks of its job. Get one from `pmesh.connect`.

    Collective calls block until the result is there, and take an array of numpy, MLX or torch, or a
    (nested) dict, list or tuple of them. They return the same types, shapes and dtypes, bit for bit
    alike on every rank, and leave their arguments as they were. Every rank must make the same calls
    in the same order, whatever the library its arrays are of.

    Machines come and go: an op in flight goes on among the ranks that are left, and `rank`, `size`
    and `last_op` say afterwards who took part. Call `sync` at the top of the training loop, and who
    comes, or comes back, takes part too.

    Dtypes: float64, float32, float16, bfloat16 (both added as float32), complex128, complex64,
    signed and unsigned integers of 8 to 64 bits, and bool; calls that only move arrays take other
    numbers too, such as float8.

    Any thread may call; one call runs at a time. Close it, or use it in a `with` statement: leaving
    that by an exception counts as a crash of this rank, so that the others learn of it.
    """

    def __init__(self, place: Place, *, job: str) -> None:
        super().__init__(place)
        self._job = job
        self._shard_order: tuple[tuple[int, int, int], Indices] | None = None
        self._groups = Groups(place, job)
        self._store = Store(self._attach_synced)

    def __repr__(self) -> str:
        return f"<Mesh {self._job!r}, rank {self.rank} of {self.size}>"

    @property
    def step(self) -> int:
        """How many times the job has synced: 0 before the first `sync`, 1 after it, and so on.

        `while mesh.step < N: state = mesh.sync(state); ...` runs its body N times if nothing
        happens, and a newcomer goes on with the job's number: it runs the body for what is left.
        """
        return self._place.step

    @property
    def store(self) -> Store:
        """Keys and values that all ranks of the job share (`pmesh.Store`)."""
        return self._store

    @property
    def view(self) -> View:
        """What the agents had agreed on when this trainer joined: machines, ring order, ranks."""
        return self._place.view

    def sync(self, state: T, timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Let all ranks have the same state; the place where trainers enter a running job.

        Call it at the top of each step, with everything that the next steps depend on: weights, the
        optimizer's state, random generators, the position in the data. If all ranks have the same,
        this costs a hash of the state and one small op, and returns `state` itself. Else those who
        differ get the state of a rank that was in the job, of those the one with the most steps,
        of those the lowest rank's: in the first `sync` rank 0's.

        A rank that had to be given another state though it was in the job is named in a warning of
        the logger `pmesh`: what it computes differs from the others. So are, on a rank that is
        given another state, the arrays of its own that come out with another shape or dtype, or not
        at all.

        Args:
            state: dicts, lists and tuples, nested as you like, of arrays (numpy, MLX, torch; any
                dtype) and of None, bool, int, float, str and bytes. Every byte comes out as it was.
                It may be of another structure on each rank: who receives gets that of the source,
                in new arrays, of the source's library, torch tensors on the device of those that
                they replace, else on the CPU. Order in a dict counts. Named tuples and
                subclasses of dict come out as such where the receiver has the same.
            timeout_s: for each op; one that moves state takes one op for each 4 MiB. For a trainer
                without an agent also how long it waits for one.

        Raises:
            UnsupportedArray: the state holds something else.
            UsageError: it holds arrays of a library that is not installed here.
            RunError: what has arrived is not what was sent.
            PmeshError: as for `all_reduce`; the state is as it was, the next `sync` begins anew.
        """
        timeout_s = check_timeout(timeout_s)
        packed = pack(state)

        def run(place: Place) -> tuple[Synced, LastOp]:
            synced = place.sync(packed, timeout_s=timeout_s)
            last = LastOp.among(synced.last.op, synced.last.world, synced.nbytes)
            return synced, last

        def finish(synced: Synced) -> T:
            if synced.received is None:
                return state
            received = _unpacked(synced.received, state)
            differs = state_differences(state, received, source=synced.source)
            if differs:
                _logger.warning(
                    "mesh.sync: the job's state replaces this rank's, which has other arrays: %s",
                    differs,
                )
            return received

        return cast("T", self._do(run, finish))

    def shard(
        self, dataset_len: int, *, epoch: int = 0, position: int = 0, seed: int = 0
    ) -> Indices:
        """This rank's samples of an epoch, from a position on.

        All samples in an order that depends on seed and epoch alone, cut at `position` and dealt
        round robin: rank r takes every `size`-th, from the r-th on. So for one position the ranks'
        shards have nothing in common and together hold what is left of the epoch, whatever has come
        and gone before.

        After each step all ranks must move `position` alike: by what all of them took, which is
        `BATCH * size` where each took `mesh.shard(...)[:BATCH]`, with the `mesh.size` that held
        when they took it, before the step's ops. Keep it in the state that `sync` gets. The samples
        of a rank that is lost in the middle of a step are skipped in that epoch.

        Args:
            dataset_len: how many samples there are.
            epoch: another one gives another order.
            position: how many samples of the epoch have been taken by all ranks together.
            seed: another one gives other orders.

        Returns:
            Indices from 0 to `dataset_len` - 1 as int64; empty at the epoch's end.

        Raises:
            UsageError: before a newcomer's first `sync`, or for a negative number.
        """
        self._place.check_synced()
        check_shard(dataset_len, epoch=epoch, position=position, seed=seed)
        key = (dataset_len, epoch, seed)
        if self._shard_order is None or self._shard_order[0] != key:
            self._shard_order = key, order_of(dataset_len, epoch=epoch, seed=seed)
        world = self._world
        return deal(self._shard_order[1], position=position, rank=world.rank, size=len(world.names))

    def group(self, ranks: Sequence[int], timeout_s: float = 30.0) -> Group | None:
        """A group of some ranks, with collectives of its own.

        Every rank of it must call this, with the same ranks in the same order; the others may, and
        get None. Who enters the job later is in no group that was made before.

        Args:
            ranks: of the mesh, each once. The group counts its ranks in this order.
            timeout_s: how long to wait for the others.

        Raises:
            UsageError: these can't be a group.
            NotEnoughRanks: some did not call in time.
            GroupBroken: one was lost meanwhile.
        """
        self._place.check_synced()
        check_ranks(ranks, self.size)
        if self.rank not in ranks:
            return None
        trainers = tuple(self._world.trainers[rank] for rank in ranks)
        return self._groups.make(trainers, ranks, check_timeout(timeout_s))

    def split(self, color: int | None, key: int = 0, timeout_s: float = 30.0) -> Group | None:
        """Divide the mesh into groups; every rank must call this.

        Args:
            color: ranks with the same one, at least 0, get into one group; with None into none.
            key: the group counts its ranks by this, and where it is the same as the mesh does.
            timeout_s: how long to wait for the others.

        Raises:
            UsageError: the color is below 0.
            NotEnoughRanks: some did not come in time.
            GroupBroken: one of this rank's color was lost meanwhile.
            PmeshError: as for `all_reduce`.
        """
        if color is not None and color < 0:
            raise UsageError(f"a color is at least 0, or None, not {color}")
        choices = self.all_gather_object([-1 if color is None else color, key], timeout_s)
        return None if color is None else self.group(ranks_by_color(choices, color), timeout_s)

    def close(self) -> None:
        """Leave the job, and all groups. A call in which another thread waits raises MeshClosed."""
        self._stop(crashed=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop(crashed=error)

    def _attach_synced(self) -> P2PSession:
        self._place.check_synced()
        return self._attached()

    def _stop(self, *, crashed: BaseException | None) -> None:
        self._groups.stop(crashed=crashed)
        super()._stop(crashed=crashed)


def _unpacked(received: Values, state: T) -> T:
    try:
        return cast("T", unpack_untrusted(received, state))
    except ProtocolError as e:
        raise RunError(f"the state that has arrived can't be read: {e}") from e


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
        """Leave its groups, as when nobody holds the grid and its groups any more."""
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
