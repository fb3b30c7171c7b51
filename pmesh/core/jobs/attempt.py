"""The rules of an op: what it does next, and how it ends. Agent and simulation share them.

Nothing here decides that an op has failed. An error becomes a request for a view change, and the
view tells all ranks the same outcome (O3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pmesh.core.jobs.progress import Progress
from pmesh.core.jobs.rank import RankState
from pmesh.core.ops.kinds import KINDS
from pmesh.core.values import OpOutcome, Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.ids import OpNumber, TrainerId

MAX_UNSTABLE_OPS = 32  # half of the arenas of a session; with more, the next op waits (O2)
MAX_UNSTABLE_BYTES = 256 * 1024 * 1024  # the same; but one result of any size may be retained
LANE_GRACE_S = 1.0  # a lane of a lost machine breaks before its link: wait for the link's reason
LANE_ATTEMPTS = 3  # an op that breaks its lanes thrice fails
ASK_AGAIN_S = 1.0  # five heartbeats: by then the request for a result, or the link, is lost
FOREVER_S = 1e9  # a timeout may be infinite, which no clock can wait for


@dataclass(slots=True, kw_only=True)
class OpState:
    """An op that a trainer has called and that has not ended; drivers add what they need."""

    number: OpNumber
    call: Call
    timeout_s: float
    deadline: float = 0.0
    root: TrainerId | None = None
    """The trainer that is the root; its rank may change while the op runs (O5)."""
    receivers: tuple[TrainerId, ...] = ()
    """The trainers that get a broadcast; their ranks may change while the op runs (O5)."""
    holds: bool = True
    """Whether the result is here; False if this rank only knows that it exists elsewhere."""
    contributors: tuple[TrainerId, ...] = ()
    """The trainers whose values the last attempt has put into the result."""
    broken: int = 0
    """How many attempts have ended with a broken lane."""
    doomed: Verdict | None = None
    """Why this rank can't run the op at all; a view then decides for all ranks (O3)."""


@dataclass(frozen=True, slots=True)
class Fail:
    """A view has failed the op, or this rank is out of the job; call `end_failed`."""

    outcome: OpOutcome


@dataclass(frozen=True, slots=True)
class ReportLate:
    """Answer the call with the failure of an earlier op; call `report_late`."""


@dataclass(frozen=True, slots=True)
class WaitForNews:
    """Call `next_step` again once there is room, a quorum, more ranks, or no fence.

    There is room once enough ops are stable (O2).
    """

    what: Literal["room", "quorum", "ranks", "fence"]


@dataclass(frozen=True, slots=True)
class RequestView:
    """Call `RankState.request_view`, and wait: only a view can settle this."""

    verdict: Verdict | None
    op: int


@dataclass(frozen=True, slots=True)
class FetchResult:
    """O2: fetch the result from a rank that has completed the op."""

    outcome: OpOutcome


@dataclass(frozen=True, slots=True)
class Run:
    """Run the op among the ranks of the current roster."""


NextStep: TypeAlias = Fail | ReportLate | WaitForNews | RequestView | FetchResult | Run


def next_step(  # noqa: PLR0911 - the rules, in their order
    rank: RankState[Any], op: OpState, *, newcomers: Callable[[], int], retained_bytes: int
) -> NextStep:
    """Return what to do next with the running op.

    Args:
        rank: the rank that runs the op.
        op: the op.
        newcomers: returns how many trainers wait to enter the job; called only if it matters.
        retained_bytes: bytes of the results that are not yet stable.
    """
    failure, elsewhere = rank.failure_of(op.number), rank.result_elsewhere(op.number)
    if failure is not None:
        return Fail(failure)
    if rank.late_failure is not None and elsewhere is None:
        # I5: the view that reported the failure came after this call began, and took the call back:
        # no rank has its result, and no attempt under the new number has sent anything.
        return ReportLate()
    if op.doomed is not None:
        return _give_up(rank, op, op.doomed)
    if len(rank.ledger.ops) > MAX_UNSTABLE_OPS or retained_bytes > MAX_UNSTABLE_BYTES:
        return WaitForNews("room")  # O2: unstable ops are bounded in number and bytes
    if not rank.may_run:
        return WaitForNews("quorum")  # V10: also before it fetches what others completed
    if elsewhere is not None:
        return FetchResult(elsewhere)
    if rank.is_short_of_ranks(0) and rank.is_short_of_ranks(newcomers()):
        return WaitForNews("ranks")
    if op.call.kind == "sync" and newcomers():
        return _let_in(rank, op)
    if rank.fences:
        # V3: our flush answer did not name this op, so it may send nothing.
        return WaitForNews("fence")
    verdict = _without_some(rank, op)
    return Run() if verdict is None else RequestView(verdict, op.number)


def _let_in(rank: RankState[Any], op: OpState) -> NextStep:
    """O6: a view lets newcomers in, and the sync runs with them."""
    if any(KINDS[r.call.kind].bound and r.completed for r in rank.ledger.ops.values()):
        return WaitForNews("room")  # O4: a view would fail that op, if it has not ended everywhere
    return RequestView(None, op.number)


def _give_up(rank: RankState[Any], op: OpState, doomed: Verdict) -> RequestView:
    """Fail the op everywhere; if others have completed it (I4), they go on without this rank."""
    if rank.result_elsewhere(op.number) is None:
        return RequestView(doomed, op.number)
    text = f"{rank.roster.describe(rank.id)} is lost: it can't take op {op.number}: "
    return RequestView(Verdict("RankLost", text + doomed.message, (rank.id,)), -1)


def _without_some(rank: RankState[Any], op: OpState) -> Verdict | None:
    """Return why the op can't run among the ranks that are left; None if it can."""
    ids = rank.roster.ids
    if op.root is not None and op.root not in ids:
        return Verdict("RankLost", f"{_name(rank, op)}: its root, rank {op.call.root}, is lost")
    # O4: a bound op names a part for each rank, so it fails once the ranks have changed.
    if not KINDS[op.call.kind].bound or rank.world == ids:
        return None
    lost = tuple(trainer for trainer in rank.world if trainer not in ids)
    return Verdict("RosterChanged", f"{_name(rank, op)}: its ranks have changed", lost)


def _name(rank: RankState[Any], op: OpState) -> str:
    return f"op {op.number} ({op.call}) of job {rank.roster.job!r}"


# --- how it begins, goes wrong, and ends


def roles_in(rank: RankState[Any], call: Call) -> tuple[TrainerId | None, tuple[TrainerId, ...]]:
    """O5: return the trainers that are root and receivers, in the world of the call."""
    root = rank.world[call.root] if KINDS[call.kind].rooted else None
    return root, tuple(map(rank.world.__getitem__, call.receivers)) or rank.world


def start(rank: RankState[Any], op: OpState, now: float) -> None:
    """Note that the trainer has called the op, and set the op's deadline."""
    rank.start(op.number, op.call)
    op.deadline = now + min(op.timeout_s, FOREVER_S)


def begin_attempt(rank: RankState[Any], op: OpState, now: float) -> None:
    """Begin an attempt: the first one, or the next one after a view change."""
    if rank.result_elsewhere(op.number) is not None:
        # The op can't fail any more: if the fetch takes too long, it is only tried again.
        op.deadline = now + min(op.timeout_s, FOREVER_S)


def differs(rank: RankState[Any], op: OpNumber, why: str) -> Verdict:
    """O8: return the verdict when another rank has called something else as this op."""
    return Verdict("OpMismatch", f"op {op} of job {rank.roster.job!r}: {why}", (rank.id,))


def break_lanes(rank: RankState[Any], op: OpState, why: str) -> Verdict | None:
    """Return the verdict LANE_GRACE_S after a lane broke; None to run again over new lanes."""
    op.broken += 1
    return Verdict("LaneBroken", why, (rank.id,)) if op.broken >= LANE_ATTEMPTS else None


def timed_out(rank: RankState[Any], op: OpState, progress: Progress, newcomers: int) -> Verdict:
    """I6: return the verdict at the deadline, whatever the op waits for; a view settles it (O3)."""
    what = f"{_name(rank, op)} did not end within {op.timeout_s:g} s: "
    too_few = rank.describe_shortage(newcomers)
    if too_few:
        return Verdict("NotEnoughRanks", what + too_few)
    late = progress.late(rank, op.number)
    names = ", ".join(map(rank.roster.describe, late))
    why = f"not started by {names}" if late else "every rank has started it: the network is slow"
    return Verdict("OpTimedOut", what + why, late)


@dataclass(frozen=True, slots=True)
class Failed:
    """What the trainer is told about a call that has failed."""

    verdict: Verdict
    consumed: bool
    """Whether the call has used up its op's number."""
    world: World | None


def end_failed(rank: RankState[Any], op: OpState, failure: OpOutcome) -> Failed:
    """End the op with the failure on which a view has decided."""
    consumed = rank.superseded is None
    if consumed:
        rank.fail(failure)
    else:
        rank.take_back(op.number)  # the others decide how the op ends
    cause = (rank.late_failure or failure).verdict  # an earlier op's failure is this one's cause
    assert cause is not None  # noqa: S101 - `failure_of` gives only outcomes that have one
    rank.late_failure = None
    return Failed(cause, consumed, rank.see(rank.world_after(failure)))


def report_late(rank: RankState[Any]) -> Failed:
    """I5: report an earlier op that had returned here before it failed at another rank."""
    late_failure, rank.late_failure = rank.late_failure, None
    assert late_failure is not None  # noqa: S101 - the callers have checked
    assert late_failure.verdict is not None  # noqa: S101 - a late failure has one
    # O5: once a later op has ended here, the world is that op's.
    world = rank.see(late_failure.contributors) if late_failure.op == rank.ledger.started else None
    return Failed(late_failure.verdict, consumed=False, world=world)
