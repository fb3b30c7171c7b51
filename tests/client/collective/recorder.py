"""A fake session that runs no op and records the calls it gets."""

from collections.abc import Callable

import numpy as np

from pmesh.client.session.arenas import InputRegion
from pmesh.client.session.session import Done
from pmesh.core.ops.reductions import WIRE_DTYPES, Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.ids import OpNumber, TrainerId


class OpRecorder:
    """One rank's ops, and in which order things happen around them."""

    def __init__(self) -> None:
        self.world = World(0, (TrainerId(0),), ("here",))
        self.events: list[str] = []
        self.prepared = -1
        self.in_place: set[int] = set()
        """How large the arrays are that need not be laid out."""
        self._input: Values = np.empty(0)
        self._ahead: Values | None = None
        self._next_op = 0

    def input_values(
        self, dtype: str, count: int, *, room_bytes: int, retained: bool = False
    ) -> Values:
        del room_bytes, retained
        self.events.append("lay out")
        self._input = np.empty(count, WIRE_DTYPES[dtype])
        return self._input

    def region_of(self, values: Values, wire: str) -> InputRegion | None:
        del wire
        return InputRegion(0, 0) if values.size in self.in_place else None

    def prepare_ahead(self, nbytes: int) -> None:
        self.prepared = nbytes

    def values_ahead(self, dtype: str, count: int) -> Values:
        self.events.append("lay out ahead")
        self._ahead = np.empty(count, WIRE_DTYPES[dtype])
        return self._ahead

    def run_op(
        self,
        call: Call,
        dtype: str,
        count: int,
        *,
        meanwhile: Callable[[], None] | None = None,
        region: InputRegion | None = None,
        **_: object,
    ) -> Done:
        if region is not None:
            self._input = np.full(count, self._next_op + 1)
        assert self._input.size == count
        op = self._next_op
        self._next_op += 1
        self.events.append(f"op {op}")
        result = self._input.astype(dtype)
        if call.kind == "reduce" and call.root != 0:
            result = result[:0]
        if meanwhile is not None:
            meanwhile()
        self.events.append(f"op {op} is done")
        if self._ahead is not None:
            self._input, self._ahead = self._ahead, None
        return Done(OpNumber(op), self.world, result)
