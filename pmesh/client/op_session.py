"""What runs the ops of a call: an agent's session, or a simulation of all ranks."""

from collections.abc import Callable
from typing import Protocol

from pmesh.client.arenas import Region
from pmesh.client.residuals import Residuals
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

    def region_of(self, values: Values, wire: str) -> Region | None:
        """Where an op can read these values without a copy; None: nowhere."""
        ...

    def prepare_ahead(self, nbytes: int) -> None:
        """Before the first op of a call: later ones will take so many bytes of `values_ahead`."""
        ...

    def values_ahead(self, dtype: str, count: int) -> Values:
        """In a `meanwhile`: memory to put the next op's values in."""
        ...

    def residuals(self, count: int) -> Residuals:
        """A residual of so many zeros, for ops of this session."""
        ...

    def has(self, residuals: Residuals) -> bool:
        """Whether they are this session's; else their values are to be copied into new ones."""
        ...

    def drop(self, residuals: Residuals) -> None:
        """They are needed no more; nothing happens if they are not this session's."""
        ...

    def show_compression(self, text: str) -> None:
        """What `pmesh status` is to say of how values are compressed."""
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
        residuals: Residuals | None = None,
        meanwhile: Callable[[], None] | None = None,
        region: Region | None = None,
        borrows: bool = False,
    ) -> Done:
        """Run one op to its end, the same for all ranks."""
        ...
