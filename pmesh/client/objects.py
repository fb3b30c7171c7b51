"""The collectives that move objects, and those that only wait."""

from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np

from pmesh.client.caller import Caller, check_timeout
from pmesh.client.calls import ALONE, LastOp
from pmesh.client.moves import Head, cut, exchange, move, rank_of, with_root
from pmesh.client.op_session import OpSession
from pmesh.client.orders import Order
from pmesh.client.reducing import DEFAULT_TIMEOUT_S
from pmesh.core.messages import Call
from pmesh.core.reductions import Values
from pmesh.core.session import World
from pmesh.errors import UsageError


class Objects(Caller):
    """all_gather_object, broadcast_object and barriers."""

    def all_gather_object(self, obj: object, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """Give every rank an object of each: data that MessagePack can say, never code.

        Args:
            obj: None, bool, int (64 bits), float, str, bytes, and lists, tuples and dicts of these.
                Tuples and sets arrive as lists, dataclasses as dicts, dates as text.
            timeout_s: for each of two ops.

        Returns:
            The objects in the order of ranks.

        Raises:
            UsageError: the object holds something else.
            RosterChanged: a rank was lost in the call.
            PmeshError: as for `all_reduce`.
        """
        data = _packed(obj)
        timeout_s = check_timeout(timeout_s)

        def ops(session: OpSession, order: Order) -> tuple[Any, LastOp]:
            head = Head("numpy", "uint8", (data.size,))
            table = exchange(session, order, head, what="all_gather_object", timeout_s=timeout_s)
            sizes = [told.shape[0] for told in table.heads if told is not None]
            moved = move(session, table, "all_gather", [data], parts=sizes, timeout_s=timeout_s)
            return lambda: [_unpacked(piece) for piece in cut(moved.data, sizes)], moved.last

        def alone(world: World) -> tuple[Any, LastOp]:
            return lambda: [_unpacked(data)], LastOp.among(ALONE, world, data.size)

        return cast("list[Any]", self._call(ops, alone, async_op=False))

    def broadcast_object(
        self, obj: object = None, root: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Any:  # noqa: ANN401 - the root's object
        """Give every rank the object of one; see `all_gather_object`. `obj` matters at the root."""
        is_root, trainer = root == self.rank, self._trainer_at(root)
        data = _packed(obj) if is_root else np.empty(0, np.uint8)
        timeout_s = check_timeout(timeout_s)

        def ops(session: OpSession, order: Order) -> tuple[Any, LastOp]:
            head = Head("numpy", "uint8", (data.size,)) if is_root else None
            what = with_root("broadcast_object", session, order, trainer)
            table = exchange(session, order, head, what=what, timeout_s=timeout_s)
            told = table.heads[rank_of(order, table.done.world, trainer)]
            size = 0 if told is None else told.shape[0]
            if is_root:
                session.input_values("uint8", size, room_bytes=0)[:] = data
            place = session.world.trainers.index(trainer)
            call = Call("broadcast", "uint8", (size,), root=place)
            done = session.run_op(call, "uint8", size, timeout_s=timeout_s)
            arrived = done.values.copy()
            return lambda: _unpacked(arrived), LastOp.among(done.op, order.seen(done.world), size)

        def alone(world: World) -> tuple[Any, LastOp]:
            return lambda: _unpacked(data) if is_root else obj, LastOp.among(ALONE, world, 0)

        return self._call(ops, alone, async_op=False)

    def barrier(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until every rank has called this; raises as `all_reduce` does."""
        timeout_s = check_timeout(timeout_s)

        def ops(session: OpSession, order: Order) -> tuple[Callable[[], None], LastOp]:
            call = Call("barrier", "float32", (0,))
            done = session.run_op(call, "float32", 0, timeout_s=timeout_s)
            return _nothing, LastOp.among(done.op, order.seen(done.world), 0)

        self._call(ops, lambda world: (_nothing, LastOp.among(ALONE, world, 0)), async_op=False)

    def monitored_barrier(self, timeout_s: float) -> None:
        """Wait until every rank has called this, for a time after which it says who has not.

        Args:
            timeout_s: how long.

        Raises:
            OpTimedOut: names every rank that did not come; on all that did, and on the others when
                they come.
            PmeshError: as for `all_reduce`.
        """
        self.barrier(timeout_s)


def _packed(obj: object) -> Values:
    try:
        return np.frombuffer(msgspec.msgpack.encode(obj), np.uint8)
    except (TypeError, OverflowError, RecursionError, ValueError) as e:
        raise UsageError(f"not data that MessagePack can say: {e}") from e


def _unpacked(data: Values) -> Any:  # noqa: ANN401 - whatever was sent
    return msgspec.msgpack.decode(data.tobytes())


def _nothing() -> None:
    """What a call returns that only waits."""
