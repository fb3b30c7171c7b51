"""Which job a program joins that `pmesh mlx` has started: it is told by variables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pmesh.client.connect import connect
from pmesh.client.mesh import Mesh
from pmesh.errors import UsageError

_JOB = "PMESH_MLX_JOB"
_WAIT_FOR = "PMESH_MLX_WAIT_FOR"
_COMPRESSION = "PMESH_MLX_COMPRESSION"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the options of `pmesh mlx` say; the agent's home is in PMESH_HOME as everywhere."""

    job: str
    wait_for: int
    """How many trainers the job begins with."""
    compression: str = ""
    """For `average_gradients`; empty: what the machine's agent was started with."""

    def variables(self) -> dict[str, str]:
        """What `of` reads."""
        return {_JOB: self.job, _WAIT_FOR: str(self.wait_for), _COMPRESSION: self.compression}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """The launch that is described there; None if `pmesh mlx` has not set these variables.

        Raises:
            UsageError: the number of trainers is none.
        """
        job, wait_for = environment.get(_JOB), environment.get(_WAIT_FOR)
        if job is None or wait_for is None:
            return None
        if not wait_for.isdecimal():
            raise UsageError(f"{_WAIT_FOR} is the number of trainers, not {wait_for!r}")
        compression = environment.get(_COMPRESSION, "")
        return cls(job=job, wait_for=int(wait_for), compression=compression)

    def join(self) -> Mesh:
        """Join the job; what can go wrong is what `pmesh.connect` raises."""
        return connect(self.job, self.wait_for)
