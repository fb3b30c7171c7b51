"""The job of a program that `pmesh mlx` has started, as environment variables name it."""

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
class MLXLaunch:
    """The options of `pmesh mlx`; PMESH_HOME has the agent's home, as everywhere."""

    job: str
    wait_for: int
    """The number of trainers with which the job begins."""
    compression: str = ""
    """For `average_gradients`; empty for the default of the machine's agent."""

    def variables(self) -> dict[str, str]:
        """Return the variables that `of` reads."""
        return {_JOB: self.job, _WAIT_FOR: str(self.wait_for), _COMPRESSION: self.compression}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Return the launch that the variables describe; None if `pmesh mlx` has not set them.

        Raises:
            UsageError: the number of trainers is not a number.
        """
        job, wait_for = environment.get(_JOB), environment.get(_WAIT_FOR)
        if job is None or wait_for is None:
            return None
        if not wait_for.isdecimal():
            raise UsageError(f"{_WAIT_FOR} is the number of trainers, not {wait_for!r}")
        compression = environment.get(_COMPRESSION, "")
        return cls(job=job, wait_for=int(wait_for), compression=compression)

    def join(self) -> Mesh:
        """Join the job; raises what `pmesh.connect` raises."""
        return connect(self.job, self.wait_for)
