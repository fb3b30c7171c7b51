"""`pmesh.connect`: check what the user asks for, then join the job through the agent."""

import os
import re
import sys
import threading
from pathlib import Path
from typing import Literal, get_args

from pmesh.client.calls.queue import check_timeout
from pmesh.client.calls.traceback import public
from pmesh.client.elastic.place import OnSuperseded, Place
from pmesh.client.elastic.shares import Shares
from pmesh.client.mesh import Mesh
from pmesh.core.jobs.shares import Standing
from pmesh.core.values import MAX_JOB_BYTES, Terms
from pmesh.core.wire.session import SESSION_VERSION
from pmesh.core.wire.trainer import Connect
from pmesh.errors import UsageError
from pmesh.home_paths import home_directory
from pmesh.ids import PRINTABLE, JobName

_MAX_RANKS = 1024  # what `pmesh.core.wire.trainer.Connect` allows
_MAX_PLACE = 2**31
_MOST_ROWS = 2**31

OnLoss = Literal["continue", "raise"]
Quorum = Literal["any", "majority"]
DealsShares = Literal["measured", "even"]


@public
def connect(
    job: str | None = None,
    wait_for: int | None = None,
    timeout_s: float = 300.0,
    home: Path | str | None = None,
    *,
    min_ranks: int = 1,
    on_loss: OnLoss = "continue",
    quorum: Quorum = "any",
    on_superseded: OnSuperseded | None = None,
    straggler_after_s: float = 60.0,
    shares: DealsShares | None = None,
    max_rows: int | None = None,
) -> Mesh:
    """Join a job through the agent on this machine; return when the job begins.

    If the job runs already, this returns at once: `mesh.rank` is -1, and the trainer enters the job
    in its first `mesh.sync`.

    If trainers of one job ask for different `min_ranks`, `on_loss` or `quorum`, the strictest value
    holds for all of them.

    Args:
        job: a name of your choice; trainers that pass the same name train together. Default:
            PMESH_JOB, which `pmesh run --on` sets.
        wait_for: how many trainers to wait for before the job begins. Default: PMESH_WAIT_FOR,
            which `pmesh run --on` sets, otherwise 1.
        timeout_s: how long to wait for them; meanwhile the logger `pmesh` says which ones are
            missing.
        home: the agent's home, if it is neither PMESH_HOME nor `~/.pmesh`.
        min_ranks: if fewer ranks are left, ops wait until enough have come back.
        on_loss: "continue": when a rank is lost, the op in flight continues among the others.
            "raise": that op fails on all of them with RankLost; later ops run.
        quorum: which side continues when the network splits: "any" side, or only the side with the
            "majority" of the machines.
        on_superseded: what calls do after the job has continued without this trainer (because its
            machine slept, for example), or after the trainer's agent has stopped. The next
            `mesh.sync` comes back to the job, also through another agent at the same home. "raise":
            until then calls raise HistorySuperseded or AgentStopped, also the `sync` in which that
            happens. "sync": until then calls return as if this rank were alone, with rank 0 and
            size 1. Default: a `sync` comes back after HistorySuperseded. Other calls do as "sync"
            if the job has synced at least twice, as a job with a loop does, and the agent has not
            stopped; otherwise they raise.
        straggler_after_s: how long the others wait for this trainer while its process is stopped,
            as by SIGSTOP. They wait for a process that runs, however long it computes.
        shares: how `Mesh.share` and `Mesh.batch` deal rows: "measured", by the speed of the ranks,
            or "even"; it is even if any rank asks for it. Even shares do not depend on time: they
            give the same bits in each run. Default: PMESH_SHARES, otherwise "measured".
        max_rows: the most rows of a batch that fit the memory of this rank. Default: any number.

    Raises:
        UsageError: an argument is invalid.
        AgentNotRunning: no agent runs; start one with `pmesh up`.
        NotEnoughRanks: fewer than `wait_for` trainers came in time.
        JobRunning: the job runs without ever calling `mesh.sync`, so no trainer can enter it.
    """
    job, wait_for = _job(job), _wait_for(wait_for)
    check_job(job, wait_for)
    _check_count("min_ranks", min_ranks)
    _check_choice("on_loss", on_loss, get_args(OnLoss))
    _check_choice("quorum", quorum, get_args(Quorum))
    if on_superseded is not None:
        _check_choice("on_superseded", on_superseded, get_args(OnSuperseded))
    request = Connect(
        SESSION_VERSION,
        JobName(job),
        wait_for,
        check_timeout(timeout_s),
        _program(),
        Terms(min_ranks, on_loss, quorum),
        check_timeout(straggler_after_s, "straggler_after_s"),
        place=_place(os.environ.get("PMESH_PLACE", "")),
    )
    wish = wish_of(shares, max_rows)
    place = Place(home_directory(home), request, on_superseded=on_superseded, shares=Shares(wish))
    _JOINED.set()
    return Mesh(place, job=job)


def check_job(job: str, wait_for: int) -> None:
    """Raise UsageError for what is no name of a job, or no number of its trainers."""
    if not isinstance(job, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"job is a name, such as 'mnist', not {job!r}; a number is wait_for=")
    nbytes = len(job.encode("utf-8", "replace"))
    if not 1 <= nbytes <= MAX_JOB_BYTES or not re.search(PRINTABLE, job):
        raise UsageError(
            f"a job's name has 1 to {MAX_JOB_BYTES} characters, all of which print (fewer if they "
            f"are not ASCII): {job!r}"
        )
    _check_count("wait_for", wait_for)


_JOINED = threading.Event()


def has_joined() -> bool:
    """Whether this program has joined a job, which it may have left."""
    return _JOINED.is_set()


def _job(job: str | None) -> str:
    if job is None and "PMESH_JOB" not in os.environ:
        raise UsageError(
            "a job needs a name: pmesh.connect(job=...), or start it by 'pmesh run --on all'"
        )
    return os.environ["PMESH_JOB"] if job is None else job


def _wait_for(wait_for: int | None) -> int:
    if wait_for is not None:
        return wait_for
    default = default_wait_for()
    return 1 if default is None else default


def default_wait_for() -> int | None:
    """Return PMESH_WAIT_FOR, which `pmesh run` sets. Raise UsageError if it is not a number."""
    text = os.environ.get("PMESH_WAIT_FOR")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"PMESH_WAIT_FOR is a number of trainers, not {text!r}")
    return int(text)


def wish_of(shares: str | None, max_rows: int | None) -> Standing:
    """Return what a rank wishes of its shares. Raises UsageError if an argument is invalid."""
    name = "PMESH_SHARES" if shares is None else "shares"
    chosen = os.environ.get("PMESH_SHARES", "measured") if shares is None else shares
    _check_choice(name, chosen, get_args(DealsShares))
    if max_rows is not None and not 1 <= max_rows < _MOST_ROWS:
        raise UsageError(f"max_rows is at least 1 and less than 2**31, not {max_rows}")
    return Standing(most_rows=max_rows or 0, even=int(chosen == "even"))


def _place(text: str) -> int:
    if not text:
        return -1
    if not (text.isascii() and text.isdecimal() and int(text) < _MAX_PLACE):
        raise UsageError(f"PMESH_PLACE is a rank, not {text!r}")
    return int(text)


def _check_count(name: str, count: object) -> None:
    if not isinstance(count, int):
        raise UsageError(f"{name} is a whole number, not {count!r}")
    if not 1 <= count <= _MAX_RANKS:
        raise UsageError(f"{name} is at least 1 and at most {_MAX_RANKS}, not {count}")


def _check_choice(name: str, choice: str, allowed: tuple[str, ...]) -> None:
    if choice not in allowed:
        raise UsageError(f"{name} is {' or '.join(map(repr, allowed))}, not {choice!r}")


def _program() -> str:
    """Return the script's name for `pmesh status`, changed so that the message allows it."""
    path = Path(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable)
    name = os.fsencode(path.name).decode(errors="replace")[:256]
    return "".join(c if re.search(PRINTABLE, c) else "�" for c in name)
