"""Tables of integers that ranks exchange, a row from each."""

from collections.abc import Sequence

from pmesh.client.session.session import Done, TrainerSession
from pmesh.core.wire.calls import Call


def exchange_rows(
    session: TrainerSession, row: Sequence[int], call: Call, *, timeout_s: float
) -> tuple[list[list[int]], Done]:
    """Give all ranks a row of integers; return the rows of all, in the order of the ring.

    Args:
        session: runs the op.
        row: int64, as many on each rank.
        call: an `exchange` or `sync` of one such row. Its `tree` names the purpose of the row, so
            that a rank that calls something else fails here (I5), and not in a later op that some
            ranks might not reach.
        timeout_s: for the op.
    """
    session.input_values("int64", len(row), room_bytes=0)[:] = row
    done = session.run_op(call, "int64", len(row), timeout_s=timeout_s)
    return done.values.reshape(-1, len(row)).tolist(), done
