"""Collectives that write into given arrays. All ranks know the sizes, so each takes one op."""

from collections.abc import Callable, Sequence

from pmesh.client.calls.queue import Caller, check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S, Reduction, named_reduction
from pmesh.client.collective.bucketed import (
    ALONE,
    LastOp,
    is_memory_of,
    may_be_written,
    single_alone,
    take_apart,
    written_into,
)
from pmesh.client.collective.gather_ops import ArrayBytes, block_of, check_count, exchange
from pmesh.client.session.session import Done, TrainerSession
from pmesh.client.trees.arrays import Leaf, digest, evaluate_mlx
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.errors import OpMismatch, RosterChanged, UnsupportedArray, UsageError
from pmesh.ids import TrainerId


class Placing(Caller):
    """all_gather_into, gather_into, scatter_into, reduce_scatter_into and all_to_all_into.

    They mean the same as `all_gather` and so on, but all ranks know the shapes of all arrays, as
    the callers of `torch.distributed` do. So a call takes one op instead of two, and writes into
    arrays that exist: of numpy, or of torch on the CPU, in one piece of memory. If the sizes or
    dtypes of two ranks differ, the call raises OpMismatch on all ranks.
    """

    def all_gather_into(
        self, outs: Sequence[object], x: object, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Write the array of each rank into `outs`, which has an array of that size for each rank.

        Raises:
            UsageError: `outs` has not one array for each rank, or this rank's has another size.
            OpMismatch: another rank has other sizes.
            PmeshError: as for `all_gather`.
        """
        check_count(outs, self.size, "all_gather_into")
        targets, given = _targets(outs), _given([x])[0]
        if targets[self.rank].size != given.data.size:
            raise UsageError(
                f"this rank gives {given.data.size} bytes, and expects "
                f"{targets[self.rank].size} of itself"
            )
        sizes = [target.size for target in targets]

        def ops(session: TrainerSession) -> tuple[None, LastOp]:
            label = digest([f"{given.head.dtype} {sizes}"])
            by_rank = _in_places(session, sizes)
            _lay_out(session, [given.data])
            call = Call("all_gather", "uint8", (sum(sizes),), tree=label)
            done = session.run_op(
                call, "uint8", given.data.size, timeout_s=timeout_s, parts=by_rank
            )
            return None, _take(session, done, targets)

        self._run_placed(ops, lambda: _place([given], targets), timeout_s)

    def gather_into(
        self,
        outs: Sequence[object] | None,
        x: object,
        root: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Write the arrays of all ranks, which have the same size, into `outs` at the root.

        Raises:
            UsageError: the root's `outs` has not one array of this size for each rank.
            OpMismatch: another rank has an array of another size.
            PmeshError: as for `gather`.
        """
        trainer, given = self._trainer_at(root), _given([x])[0]
        targets: list[Values] = []
        if root == self.rank:
            targets = _equal_targets(outs, given, self.size, "gather_into")

        def ops(session: TrainerSession) -> tuple[None, LastOp]:
            sizes = [given.data.size] * len(session.places)
            _lay_out(session, [given.data])
            call = Call(
                "gather",
                "uint8",
                (sum(sizes),),
                root=_place_of(session, trainer),
                tree=digest([f"{given.head.dtype} {sizes}"]),
            )
            done = session.run_op(
                call, "uint8", given.data.size, timeout_s=timeout_s, parts=tuple(sizes)
            )
            return None, _take(session, done, targets)

        self._run_placed(ops, lambda: _place([given], targets), timeout_s)

    def scatter_into(
        self,
        out: object,
        xs: Sequence[object] | None,
        root: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Write this rank's array into `out`; the root has one for each rank, all of one size.

        Raises:
            UsageError: the root's `xs` has not one array of this size for each rank.
            OpMismatch: another rank expects another size.
            PmeshError: as for `scatter`.
        """
        trainer, target = self._trainer_at(root), _targets([out])[0]
        expected = _given([out])[0].head.dtype
        blocks: list[ArrayBytes] = []
        if root == self.rank:
            blocks = _given(() if xs is None else xs)
            check_count(blocks, self.size, "scatter_into")
            _check_sizes([block.data for block in blocks], target.size, "scatter_into")

        def ops(session: TrainerSession) -> tuple[None, LastOp]:
            sizes = [target.size] * len(session.places)
            _check_size_of(session, self.size)
            gives = [blocks[rank].data for rank in _ranks(session)] if blocks else []
            _lay_out(session, gives)
            call = Call(
                "scatter",
                "uint8",
                (sum(sizes),),
                root=_place_of(session, trainer),
                tree=digest([f"{expected} {sizes}"]),
            )
            count = sum(each.size for each in gives)
            done = session.run_op(call, "uint8", count, timeout_s=timeout_s, parts=tuple(sizes))
            target[:] = done.values
            return None, LastOp.among(done.op, done.world, count + target.size)

        def place() -> None:
            if not blocks:
                raise RosterChanged("the root of this scatter is not here")
            _place(blocks, [target])

        self._run_placed(ops, place, timeout_s)

    def reduce_scatter_into(
        self,
        out: object,
        xs: Sequence[object],
        op: Reduction = "sum",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Reduce the arrays that all ranks have for this rank, and write the result into `out`.

        Args:
            out: an array like this rank's in `xs`.
            xs: one array for each rank, with the same shapes and dtype on every rank.
            op: as for `all_reduce`.
            timeout_s: for the op.

        Raises:
            UsageError: `xs` has not one array for each rank, or `out` is not like this rank's.
            OpMismatch: another rank has other shapes.
            PmeshError: as for `reduce_scatter`.
        """
        check_count(xs, self.size, "reduce_scatter_into")
        reduction = named_reduction(op)
        leaves = take_apart(list(xs), reduction=reduction).leaves
        if len({leaf.dtype for leaf in leaves}) != 1:
            raise UsageError("reduce_scatter_into takes arrays of one dtype")
        own = take_apart(xs[self.rank], reduction=reduction)
        target = written_into(own, out, bucket_bytes=0).leaves[0]
        counts = [leaf.values.size for leaf in leaves]

        def ops(session: TrainerSession) -> tuple[None, LastOp]:
            by_place = _in_places(session, counts)
            region = session.input_values(leaves[0].wire, sum(counts), room_bytes=0)
            _fill([leaves[rank] for rank in _ranks(session)], region)
            shapes = [leaf.values.shape for leaf in leaves]
            call = Call(
                "reduce_scatter",
                leaves[0].dtype,
                (sum(counts),),
                reduction,
                tree=digest([str(shapes)]),
            )
            done = session.run_op(
                call, leaves[0].wire, sum(counts), timeout_s=timeout_s, parts=by_place
            )
            target.of(done.values)
            return None, LastOp.among(done.op, done.world, region.nbytes)

        self._run_placed(ops, lambda: single_alone(target, self._place.world), timeout_s)

    def all_to_all_into(
        self,
        outs: Sequence[object],
        xs: Sequence[object],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        equal: bool = False,
    ) -> None:
        """Send each rank one array, and write the array from each rank into `outs`.

        Args:
            outs: one array for each rank, of the size that this rank receives from it.
            xs: one array for each rank.
            timeout_s: for each op.
            equal: True if all arrays of all ranks have the same size. Then this takes one op;
                otherwise two, as the ranks first exchange their sizes.

        Raises:
            UsageError: there is not one array for each rank, or the sizes are not equal.
            OpMismatch: a rank sends another size than the receiver expects.
            PmeshError: as for `all_to_all`.
        """
        check_count(outs, self.size, "all_to_all_into")
        check_count(xs, self.size, "all_to_all_into")
        blocks, targets = _given(xs), _targets(outs)
        gives = [block.data for block in blocks]
        if equal:
            _check_sizes([*gives, *targets], gives[0].size, "all_to_all_into")
        sizes_out, sizes_in = [each.size for each in gives], [each.size for each in targets]

        def ops(session: TrainerSession) -> tuple[None, LastOp]:
            label = f"{blocks[0].head.dtype} {sizes_out}"
            if not equal:
                label = _agreed(session, blocks[0], sizes_out, sizes_in, timeout_s)
            parts, parts_in = _in_places(session, sizes_out), _in_places(session, sizes_in)
            _lay_out(session, [gives[rank] for rank in _ranks(session)])
            call = Call("all_to_all", "uint8", (), tree=digest([label]))
            done = session.run_op(
                call,
                "uint8",
                sum(sizes_out),
                timeout_s=timeout_s,
                parts=parts,
                parts_in=parts_in,
            )
            return None, _take(session, done, targets)

        def place() -> None:
            _check_sizes(gives, targets[0].size, "all_to_all_into")
            _place(blocks, targets)

        self._run_placed(ops, place, timeout_s)

    def _run_placed(
        self,
        ops: Callable[[TrainerSession], tuple[None, LastOp]],
        place: Callable[[], object],
        timeout_s: float,
    ) -> None:
        """Run `ops` in the job, or `place` if this rank is alone for now, with an array for it."""
        check_timeout(timeout_s)
        size = self.size

        def alone(world: World) -> tuple[None, LastOp]:
            if size > 1:
                raise RosterChanged("this rank is alone, and the call has arrays for several")
            place()
            return None, LastOp.among(ALONE, world, 0)

        self._call(ops, alone, _nothing, timeout_s=timeout_s)


def _nothing(result: None) -> None:
    return result


def _place(blocks: Sequence[ArrayBytes], targets: Sequence[Values]) -> None:
    """Write what a rank that is alone gives to itself; elsewhere than at the root nothing."""
    for block, target in zip(blocks, targets, strict=False):
        target[:] = block.data


def _given(xs: Sequence[object]) -> list[ArrayBytes]:
    evaluate_mlx(list(xs))
    return [block_of(x) for x in xs]


def _targets(outs: Sequence[object]) -> list[Values]:
    return [_target(out) for out in outs]


def _target(out: object) -> Values:
    block = block_of(out)
    if not may_be_written(out) or not is_memory_of(out, block.data):
        raise UnsupportedArray(
            "results are written into numpy arrays and torch tensors on the CPU, "
            "which may be written to and lie in one piece"
        )
    return block.data


def _equal_targets(
    outs: Sequence[object] | None, given: ArrayBytes, size: int, what: str
) -> list[Values]:
    targets = _targets(() if outs is None else outs)
    check_count(targets, size, what)
    _check_sizes(targets, given.data.size, what)
    return targets


def _check_sizes(arrays: Sequence[Values], nbytes: int, what: str) -> None:
    if any(each.size != nbytes for each in arrays):
        raise UsageError(
            f"{what} takes arrays of one size, here {nbytes} bytes, "
            f"not {[each.size for each in arrays]}"
        )


def _check_size_of(session: TrainerSession, size: int) -> None:
    if len(session.places) != size:
        raise RosterChanged("a rank was lost before this call, which has an array for each")


def _ranks(session: TrainerSession) -> list[int]:
    """Return the rank at each place in the ring."""
    places = session.places
    return sorted(range(len(places)), key=places.__getitem__)


def _in_places(session: TrainerSession, numbers: Sequence[int]) -> tuple[int, ...]:
    """Reorder numbers by rank into the order of the ring."""
    _check_size_of(session, len(numbers))
    return tuple(numbers[rank] for rank in _ranks(session))


def _place_of(session: TrainerSession, trainer: TrainerId) -> int:
    if trainer not in session.world.trainers:
        raise RosterChanged("the root of this call is lost")
    return session.world.trainers.index(trainer)


def _lay_out(session: TrainerSession, blocks: Sequence[Values]) -> None:
    region = session.input_values("uint8", sum(each.size for each in blocks), room_bytes=0)
    begin = 0
    for block in blocks:
        region[begin : begin + block.size] = block
        begin += block.size


def _fill(leaves: Sequence[Leaf], region: Values) -> None:
    begin = 0
    for leaf in leaves:
        end = begin + leaf.values.size
        leaf.fill(region[begin:end])
        begin = end


def _take(session: TrainerSession, done: Done, targets: Sequence[Values]) -> LastOp:
    """Copy the blocks of a result, which has the order of the ring, into the targets by rank."""
    begin = 0
    for rank in _ranks(session) if targets else ():
        target = targets[rank]
        target[:] = done.values[begin : begin + target.size]
        begin += target.size
    return LastOp.among(done.op, done.world, done.values.size)


def _agreed(
    session: TrainerSession,
    block: ArrayBytes,
    gives: Sequence[int],
    expects: Sequence[int],
    timeout_s: float,
) -> str:
    """Exchange the sizes that ranks send and expect; raise OpMismatch on all if they differ."""
    head = block.head._replace(shape=())
    what = "all_to_all_into"
    table = exchange(session, head, [*gives, *expects], what=what, timeout_s=timeout_s)
    size = len(gives)
    if table.size != size:
        raise RosterChanged("a rank was lost before an array for each could be sent")
    dtypes = [each.dtype if each else "" for each in table.heads]
    if len(set(dtypes)) > 1:
        raise OpMismatch(f"{what}: the ranks give {', '.join(dtypes)}")
    for giver, counts in enumerate(table.counts):
        for taker in range(size):
            wanted = table.counts[taker][size + giver]
            if counts[taker] != wanted:
                raise OpMismatch(
                    f"{what}: rank {giver} gives rank {taker} {counts[taker]} bytes, "
                    f"which expects {wanted}"
                )
    return table.label()
