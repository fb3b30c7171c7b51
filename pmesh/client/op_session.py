"""What runs the ops of a call: an agent's session, or a simulation of all ranks."""

from typing import Protocol

from pmesh.client.session import Done
from pmesh.core.messages import Call
from pmesh.core.reductions import Values
from pmesh.core.session import World


class OpSession(Protocol):
    """Runs ops one after the other; see `TrainerSession`."""

    @property
    def world(self) -> World:
        """The ranks, after the last op."""
        ...

    def input_values(self, dtype: str, count: int, *, room_bytes: int) -> Values:
        """Memory to put an op's values in; the next op reads it."""
        ...

    def run_op(
        self,
        call: Call,
        dtype: str,
        count: int,
        *,
        timeout_s: float,
        parts: tuple[int, ...] = (),
        parts_in: tuple[int, ...] = (),
    ) -> Done:
        """Run one op to its end, the same for all ranks."""
        ...
