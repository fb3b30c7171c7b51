"""The options of `init_process_group("pmesh")`, from `pg_options` or the environment."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from pmesh.client.connect import Quorum
from pmesh.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The `pg_options` of `torch.distributed.init_process_group("pmesh", pg_options=...)`.

    Each option has a default.
    """

    job: str | None = None
    """The job's name, the same on all ranks. Default: PMESH_JOB, or else the script's name."""
    wait_for: int | None = None
    """The number of ranks. Default: PMESH_WAIT_FOR."""
    home: Path | str | None = None
    """The agent's home. Default: PMESH_HOME, or else `~/.pmesh`."""
    quorum: Quorum = "any"
    """The side of a partition that may continue, as for `pmesh.connect`."""
    min_ranks: int = 1
    """With fewer ranks, ops wait, as for `pmesh.connect`. Only for `init(elastic=True)`."""

    def job_name(self) -> str:
        """Return the name of the job to join."""
        script = Path(sys.argv[0] if sys.argv and sys.argv[0] else "torch").stem
        return (self.job or os.environ.get("PMESH_JOB") or script)[:48]

    def ranks(self) -> int:
        """Return the number of ranks.

        Raises:
            UsageError: neither the option nor PMESH_WAIT_FOR gives a number.
        """
        if self.wait_for is not None:
            return self.wait_for
        text = os.environ.get("PMESH_WAIT_FOR", "")
        if not text.isdecimal():
            raise UsageError(
                "how many ranks are there? Set PMESH_WAIT_FOR, such as PMESH_WAIT_FOR=3, or pass "
                "pg_options=pmesh.torch.Options(wait_for=3)"
                + (f"; PMESH_WAIT_FOR={text!r} is no number" if text else "")
            )
        return int(text)


def options_of(pg_options: object) -> Options:
    """Return the options. Raises UsageError for options of another backend."""
    if pg_options is None:
        return Options()
    if not isinstance(pg_options, Options):
        raise UsageError(
            f"the backend 'pmesh' takes pg_options=pmesh.torch.Options(...), not a "
            f"{type(pg_options).__name__}"
        )
    return pg_options
