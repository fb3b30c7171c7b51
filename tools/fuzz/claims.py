"""What a member may say of itself, as much as anybody takes: its trainers and their errors."""

from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

from pmesh.core.values import Verdict, View
from pmesh.core.wire.channels import MAX_ENTRIES, MAX_MESSAGE_BYTES
from pmesh.core.wire.views import Candidate, ViewRequest
from pmesh.ids import JobName, Member, OpNumber, Slot

LONGEST_TEXTS = 3  # of 64 KiB, in one frame; more of them are shorter
SHARES = (1, 2, 4, 8, 16, 32)
SPARE_BYTES = 8 * 1024  # for the rest of the message

Claims: TypeAlias = dict[str, tuple[Any, ...]]
"""By the field of a heartbeat, and of a promise, in which it is said."""


def waiting_in_jobs(count: int, dice: Random, *, of_one: bool) -> Claims:
    """So many trainers that wait, in as many jobs or in one."""
    names = [f"{dice.getrandbits(64):016x}".ljust(64, "x") for _ in range(1 if of_one else count)]
    jobs = [JobName(names[n % len(names)]) for n in range(count)]
    wait_for = count if of_one else 1
    return {
        "waiting": tuple(Candidate(job, Slot(10**6 + n), wait_for) for n, job in enumerate(jobs))
    }


def errors_of_ranks(view: View, me: Member, nbytes: int) -> Claims:
    """Errors of so many bytes in all the jobs in which it has a rank."""
    mine = [roster for roster in view.rosters if roster.trainers_at(me)]
    each = min(2**16, nbytes // max(1, len(mine) * LONGEST_TEXTS))
    verdict = Verdict("OpTimedOut", "\x1b[2J".ljust(each, "x"))
    asked = [
        ViewRequest(roster.job, roster.born, roster.number, verdict, OpNumber(number))
        for roster in mine
        for number in range(LONGEST_TEXTS)
    ]
    return {"view_requests": tuple(asked)}


def choose_claims(
    view: View, me: Member, dice: Random, accepts: Callable[[Claims], bool]
) -> Claims:
    """Something of which there is as much as `accepts` takes; nothing if that is not much."""

    def of_size(share: int) -> Claims:
        match kind:
            case "errors":
                return errors_of_ranks(view, me, (MAX_MESSAGE_BYTES - SPARE_BYTES) // share)
            case _:
                return waiting_in_jobs(MAX_ENTRIES // share, dice, of_one=kind == "one job")

    kind = dice.choice(("errors", "one job", "many jobs"))
    return next(filter(accepts, map(of_size, SHARES)), {})
