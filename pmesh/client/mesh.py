"""`Mesh`, which `pmesh.connect` returns, the samples that each rank takes, and grids of ranks."""

import logging
import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar, cast

import numpy as np

from pmesh.client.calls.queue import check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.collective.bucketed import LastOp
from pmesh.client.collective.differences import state_differences
from pmesh.client.elastic.place import Place
from pmesh.client.elastic.sync import Synced
from pmesh.client.group import Collectives, Group, Groups, check_ranks, ranks_by_color
from pmesh.client.shown import names_line, ranks_table
from pmesh.client.trees.state import pack, unpack_untrusted
from pmesh.compression.blocks import Indices
from pmesh.core.ops.reductions import Values
from pmesh.core.values import View
from pmesh.errors import ProtocolError, RunError, UsageError
from pmesh.ids import TrainerId
from pmesh.rpc.client.calls import Rpc
from pmesh.store.client import Store, StoreSession

_logger = logging.getLogger("pmesh")


def order_of(dataset_len: int, *, epoch: int, seed: int) -> Indices:
    """Return a permutation of 0 to `dataset_len` - 1, the same on every machine; read-only int64.

    The samples are sorted by random numbers of a counter-based generator (Philox 4x64-10: Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the key (seed, epoch). The output
    of a bit generator is fixed; `Generator.permutation` may change with numpy's version.
    """
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    order = np.argsort(generator.random_raw(dataset_len), kind="stable").astype(np.int64)
    order.flags.writeable = False  # it is cached for the next call
    return order


def deal(order: Indices, *, position: int, rank: int, size: int) -> Indices:
    """Return every `size`-th of the indices from `position` on, beginning with the `rank`-th."""
    return order[position + rank :: size].copy()  # torch warns about read-only arrays


def check_shard(dataset_len: int, *, epoch: int, position: int, seed: int) -> None:
    """Raise UsageError unless all four are at least 0 and below 2**63."""
    numbers = {"dataset_len": dataset_len, "epoch": epoch, "position": position, "seed": seed}
    for name, number in numbers.items():
        if not 0 <= number < 2**63:
            raise UsageError(f"{name} is at least 0 and less than 2**63, not {number}")


T = TypeVar("T")


class Mesh(Collectives):
    """This trainer among the ranks of its job. Get one from `pmesh.connect`.

    Collective calls block until the result is there. They take an array of numpy, MLX or torch, or
    a (nested) dict, list or tuple of arrays. They return the same types, shapes and dtypes, bit for
    bit the same on every rank, and do not change their arguments. Every rank must make the same
    calls in the same order; the ranks may use different libraries.

    Machines come and go. When a rank is lost, an op in flight continues among the others, and
    `rank`, `size` and `last_op` then say which ranks took part. A trainer that joins a running job,
    or comes back to it, enters in `sync`: call it at the top of the training loop.

    Dtypes: float64, float32, float16, bfloat16 (both added as float32), complex128, complex64,
    signed and unsigned integers of 8 to 64 bits, and bool; calls that only move arrays take other
    numbers too, such as float8.

    Any thread may call; one call runs at a time. Close the mesh, or use it in a `with` statement.
    An exception that leaves the `with` block counts as a crash of this rank, and the others learn
    of it.
    """

    def __init__(self, place: Place, *, job: str) -> None:
        super().__init__(place)
        self._job = job
        self._shard_order: tuple[tuple[int, int, int], Indices] | None = None
        self._groups = Groups(place, job)
        self._store = Store(self._attach_synced)
        self._rpc = Rpc(place, self._callee)

    def __repr__(self) -> str:
        return f"<{self._title}: {names_line(self.names)}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return ranks_table(self._title, self.names, self.rank)

    @property
    def _title(self) -> str:
        return f"Mesh {self._job!r}, rank {self.rank} of {self.size}, step {self.step}"

    @property
    def step(self) -> int:
        """How many times the job has synced: 0 before the first `sync`, 1 after it, and so on.

        `while mesh.step < N: state = mesh.sync(state); ...` runs its body N times. A newcomer takes
        over the job's number, so it runs the body only for the steps that are left.
        """
        return self._place.step

    @property
    def store(self) -> Store:
        """The keys and values that all ranks of the job share (`pmesh.Store`)."""
        return self._store

    @property
    def rpc(self) -> Rpc:
        """Calls of functions on other ranks (`pmesh.Rpc`)."""
        return self._rpc

    @property
    def view(self) -> View:
        """The view in which this trainer joined: the machines, the ring's order and the ranks."""
        return self._place.view

    def sync(self, state: T, timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Give all ranks the same state. Trainers enter a running job in this call.

        Call it at the top of each step, with everything that the next steps depend on: weights, the
        optimizer's state, random generators, the position in the data. If the states of all ranks
        are equal, this costs a hash of the state and one small op, and returns `state` itself.
        Otherwise the ranks that differ receive the state of one rank. It is a rank that was in the
        job already; among these the one with the most steps; among these the lowest. In the first
        `sync` it is rank 0.

        The logger `pmesh` warns of a rank that was in the job and yet receives another state: it
        has computed something else than the others. A rank that receives a state also warns of its
        own arrays that the received state lacks, or has with another shape or dtype.

        Args:
            state: dicts, lists and tuples, nested as you like, of arrays (numpy, MLX, torch; any
                dtype) and of None, bool, int, float, str and bytes. Every byte is preserved. The
                structure may differ between ranks: a receiver gets the structure of the source, in
                new arrays of the source's library. A torch tensor goes to the device of the tensor
                that it replaces, otherwise to the CPU. The order in a dict counts. Named tuples and
                subclasses of dict keep their class where the receiver has the same.
            timeout_s: for each op; a state that is sent takes one op for each 4 MiB. A trainer
                without an agent also waits this long for one.

        Raises:
            UnsupportedArray: the state holds something else.
            UsageError: it holds arrays of a library that is not installed here.
            RunError: the state that arrived is not the one that was sent.
            PmeshError: as for `all_reduce`; the state is unchanged, the next `sync` tries again.
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

    def report(self, /, **values: float) -> None:
        """Show numbers of this step, such as `loss=0.31`, wherever the job's status is shown.

        `pmesh status` and `pmesh top` on any machine of the mesh show the latest value of each name
        and rank. They travel with the rank's next collective call of the mesh: the report itself
        takes microseconds, waits for nobody, and does nothing if the agent has stopped.

        Args:
            values: at most 8 names, each with an int or float of Python or numpy, which may be
                infinite or NaN. A name that this call leaves out keeps its value.

        Raises:
            UsageError: a value is an array or no number, a name is longer than 24 characters or has
                others than letters, digits and _ . / -, or there are more than 8 names.
        """
        self._place.report(values)

    def shard(
        self, dataset_len: int, *, epoch: int = 0, position: int = 0, seed: int = 0
    ) -> Indices:
        """Return this rank's samples of an epoch, from a position on.

        The order of all samples depends on seed and epoch alone. The samples from `position` on are
        dealt round robin: rank r takes every `size`-th, beginning with the r-th. So for one
        position the shards of the ranks are disjoint, and together they are the rest of the epoch,
        whichever ranks came and went before.

        After each step all ranks must advance `position` by the same number: the samples that all
        of them took. That is `BATCH * size` if each took `mesh.shard(...)[:BATCH]`; `size` is the
        `mesh.size` at that time, before the step's ops. Keep the position in the state that you
        pass to `sync`. If a rank is lost in the middle of a step, its samples are skipped in that
        epoch.

        Args:
            dataset_len: the number of samples.
            epoch: each epoch has another order.
            position: how many samples of the epoch all ranks together have taken.
            seed: each seed gives other orders.

        Returns:
            Indices from 0 to `dataset_len` - 1 as int64; none at the end of the epoch.

        Raises:
            UsageError: before a newcomer's first `sync`, or for a negative number.
        """
        self._place.check_synced()
        order, world = self._order(dataset_len, epoch, position, seed), self._world
        return deal(order, position=position, rank=world.rank, size=len(world.names))

    def share(self, rows: int) -> Indices:
        """Return which rows of a batch this rank takes: more of them if it is faster.

        From `sync` to `sync`, each rank measures how long it computes, which is the time that it
        spends outside of collective calls. The ranks compare their times in `sync`, so that all of
        them take as long for their rows. A share changes only if that makes the steps clearly
        shorter, and only in `sync`. At first, and with `pmesh.connect(shares="even")`, the rows are
        dealt in turns. Use the number of rows as the weight of the gradients:

            rows = batch[mesh.share(len(batch))]
            gradients = mesh.average_gradients(gradients_of(rows), weight=len(rows))

        So the step is that of the whole batch, whichever ranks there are, and however fast.

        Args:
            rows: how many rows the batch of all ranks has. Every rank passes the same number.

        Returns:
            Indices from 0 to `rows` - 1 as int64; each row is in one rank's share. Every rank has a
            row if there are at least as many rows as ranks.

        Raises:
            UsageError: before a newcomer's first `sync`; for a negative number; or for more rows
                than all ranks take by their `max_rows`.
        """
        self._place.check_synced()
        if not 0 <= rows < 2**31:
            raise UsageError(f"a batch has at least 0 and less than 2**31 rows, not {rows}")
        return self._place.shares.deal(rows, self._world)

    def batch(
        self, dataset_len: int, batch_size: int, *, epoch: int = 0, position: int = 0, seed: int = 0
    ) -> Indices:
        """Return this rank's samples of the next batch, which has `batch_size` for all ranks.

        The order of all samples is that of `shard`, and the batch is dealt as by `share`. After the
        step all ranks advance `position` by `batch_size`, whichever ranks there are.

        Args:
            dataset_len: the number of samples.
            batch_size: how many samples all ranks take together.
            epoch: each epoch has another order.
            position: how many samples of the epoch all ranks together have taken.
            seed: each seed gives other orders.

        Returns:
            Indices from 0 to `dataset_len` - 1 as int64. The last batch of an epoch may be smaller.

        Raises:
            UsageError: as for `shard` and `share`.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size is at least 1, not {batch_size}")
        whole = self._order(dataset_len, epoch, position, seed)[position : position + batch_size]
        return whole[self.share(len(whole))]

    def group(self, ranks: Sequence[int], timeout_s: float = 30.0) -> Group | None:
        """Make a group of some ranks, with collectives of its own.

        Every rank of the group must call this, with the same ranks in the same order. The other
        ranks may call it too, and get None. A trainer that enters the job later is in no group that
        was made before.

        Args:
            ranks: ranks of the mesh, each once. The group counts its ranks in this order.
            timeout_s: how long to wait for the others.

        Raises:
            UsageError: the ranks are not different ranks of the mesh, or there are none.
            NotEnoughRanks: some ranks did not call in time.
            GroupBroken: a rank was lost meanwhile.
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
            color: at least 0; ranks with the same color form a group. A rank with None is in none.
            key: the group orders its ranks by their keys, and equal keys by rank in the mesh.
            timeout_s: how long to wait for the others.

        Raises:
            UsageError: the color is below 0.
            NotEnoughRanks: some ranks did not call in time.
            GroupBroken: a rank of this rank's color was lost meanwhile.
            PmeshError: as for `all_reduce`.
        """
        if color is not None and color < 0:
            raise UsageError(f"a color is at least 0, or None, not {color}")
        choices = self.all_gather_object([-1 if color is None else color, key], timeout_s)
        return None if color is None else self.group(ranks_by_color(choices, color), timeout_s)

    def close(self) -> None:
        """Leave the job and all groups. A call in another thread raises MeshClosed there."""
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

    def _order(self, dataset_len: int, epoch: int, position: int, seed: int) -> Indices:
        check_shard(dataset_len, epoch=epoch, position=position, seed=seed)
        key = (dataset_len, epoch, seed)
        if self._shard_order is None or self._shard_order[0] != key:
            self._shard_order = key, order_of(dataset_len, epoch=epoch, seed=seed)
        return self._shard_order[1]

    def _callee(self, rank: int) -> TrainerId:
        """O5: return the trainer that has this rank when the call is made."""
        self._place.check_synced()
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank}: there are ranks 0 to {self.size - 1}")
        return self._world.trainers[rank]

    def _attach_synced(self) -> StoreSession:
        self._place.check_synced()
        return self._attached()

    def _stop(self, *, crashed: BaseException | None) -> None:
        self._rpc.close()
        self._groups.stop(crashed=crashed)
        super()._stop(crashed=crashed)


def _unpacked(received: Values, state: T) -> T:
    try:
        return cast("T", unpack_untrusted(received, state))
    except ProtocolError as e:
        raise RunError(f"the state that has arrived can't be read: {e}") from e


class DeviceMesh:
    """The ranks of a mesh as a grid, like `torch.distributed.device_mesh.DeviceMesh`.

    `grid = DeviceMesh(mesh, (2, 3), ("data", "model"))` lays six ranks in two rows: ranks 0 to 2 in
    the first, ranks 3 to 5 in the second. `grid["model"]` is then the group of this rank's row, and
    `grid["data"]` the group of its column. Every rank of the mesh must make the same grid.

    Raises:
        UsageError: the shape does not hold all ranks, or there is not one name for each dimension.
        NotEnoughRanks: some ranks did not make the grid in time.
        GroupBroken: a rank of one of the groups was lost meanwhile.
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
                self._groups[name] = _not_none(mesh.group(self._line(dimension), timeout_s))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={group.size}" for name, group in self._groups.items())
        return f"<DeviceMesh {sizes}, at {self.coordinate}>"

    def __getitem__(self, name: str) -> Group:
        """Return this rank's group along the dimension.

        Raises:
            UsageError: there is no such dimension.
        """
        if name not in self._groups:
            raise UsageError(
                f"this grid has the dimensions {', '.join(self._groups)}, not {name!r}"
            )
        return self._groups[name]

    def close(self) -> None:
        """Leave all groups of the grid. This also happens once nobody refers to them any more."""
        for group in self._groups.values():
            group.close()

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return self._shape

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dimensions."""
        return tuple(self._groups)

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's index in each dimension; the last dimension changes fastest."""
        return tuple(
            self._rank // self._stride(dimension) % length
            for dimension, length in enumerate(self._shape)
        )

    def _line(self, dimension: int) -> list[int]:
        """Return the ranks that differ from this one in the dimension only."""
        stride = self._stride(dimension)
        first = self._rank - self.coordinate[dimension] * stride
        return [first + i * stride for i in range(self._shape[dimension])]

    def _stride(self, dimension: int) -> int:
        return math.prod(self._shape[dimension + 1 :])


def _not_none(group: Group | None) -> Group:
    assert group is not None  # noqa: S101 - this rank is on each of its lines
    return group
