"""Refuse messages that no honest member would send, before they touch the state.

msgspec has checked each field by itself. These checks cover a message as a whole, without the
receiver's state: `pmesh.core.views.agreement` checks what depends on that.
"""

from collections.abc import Hashable, Iterable, Sequence

from pmesh.core.values import Roster, View
from pmesh.core.wire.link import (
    AgreementMessage,
    Commit,
    Flushed,
    Heartbeat,
    Propose,
    Superseded,
    TellView,
)
from pmesh.errors import ProtocolError
from pmesh.ids import Member


def check_message(sender: Member, message: AgreementMessage) -> None:
    """Raise ProtocolError if no honest member would send this."""
    match message:
        case Heartbeat():
            _demand(message.view <= message.promised, "a promise below the installed epoch (V1)")
        case TellView() | Superseded():
            _check_view_of(sender, message.view)
        case Propose():
            _check_proposal(sender, message)
        case Flushed():
            _check_flushed(sender, message)
        case Commit():
            _check_commit(sender, message)
        case _:
            pass  # the fields of the others are independent


def check_view(view: View) -> None:
    """Raise ProtocolError if no leader could have committed this view."""
    counter = view.epoch.counter
    _demand_unique([member.node for member in view.members], "machines in a view")
    _demand(view.epoch[1:] in view.members, "a view whose leader has no seat")
    for seat in view.seats:
        _demand(seat.admitted <= view.epoch, "a seat from a later view")
        _demand(seat.previous is None or seat.previous < view.epoch, "a seat from a later view")
    _demand_unique([roster.job for roster in view.rosters], "rosters of one job")
    for roster in view.rosters:
        _demand(roster.number <= counter, "a roster from a later view")
        _demand(roster.primary.epoch <= view.epoch, "a quorum from a later view")
        _check_roster(roster, view.members)


def _check_roster(roster: Roster, members: Sequence[Member]) -> None:
    _demand(roster.trainers, f"a roster of job {roster.job!r} without trainers")
    known = roster.trainers + roster.lost_holders
    _demand_unique([trainer.id for trainer in known], "trainers of one number")
    _demand_unique([(t.member, t.slot) for t in roster.trainers], "trainers on one connection")
    _demand(all(t.id < roster.next_id for t in known), "a trainer with an id not yet assigned")
    # V3: a job that is not fenced everywhere keeps a lost trainer until the next view.
    _demand(
        any(trainer.member in members for trainer in roster.trainers),
        f"a roster of job {roster.job!r} with trainers only on machines that have no seat",
    )
    _demand(roster.born.counter <= roster.number, "a roster from before its job began")
    _demand_unique([outcome.op for outcome in roster.outcomes], "outcomes of one op")


def _check_view_of(sender: Member, view: View) -> None:
    """Check a view that the sender claims to have installed (I2)."""
    check_view(view)
    _demand(sender in view.members, "a view without its sender")


def _check_proposal(sender: Member, message: Propose) -> None:
    _demand(message.epoch[1:] == sender, "a proposal in another's name")
    _check_view_of(sender, message.base)
    _demand(message.base.epoch < message.epoch, "a proposal below its base (V1)")
    _demand_unique([member.node for member in message.members], "machines in a proposal")
    _demand(set(message.continuing) <= set(message.members), "a proposal that omits a member")
    kept = [member for member in message.base.by_seniority if member in message.continuing]
    _demand(len(kept) == len(message.continuing), "a proposal that continues a stranger (V2)")
    _demand(kept and kept[0] == sender, "a proposal that its most senior member did not send")


def _check_flushed(sender: Member, message: Flushed) -> None:
    _check_view_of(sender, message.view)
    _demand(message.view.epoch < message.epoch, "a promise of an epoch already installed (V1)")
    _demand_unique([(report.job, report.born) for report in message.jobs], "reports of one job")
    for report in message.jobs:
        _demand_unique([rank.trainer for rank in report.ranks], "reports of one rank")
        for rank in report.ranks:
            _demand_unique([op.op for op in rank.ops], "reports of one op")
    _demand_unique([waiting.slot for waiting in message.waiting], "trainers that wait")


def _check_commit(sender: Member, message: Commit) -> None:
    _demand(message.view.epoch[1:] == sender, "a commit in another's name")
    check_view(message.view)
    size = len(message.view.seats)
    fits = len(message.costs) == size and all(len(row) == size for row in message.costs)
    _demand(fits, "a commit whose costs do not fit its members")


def _demand_unique(values: Iterable[Hashable], what: str) -> None:
    listed = list(values)
    _demand(len(set(listed)) == len(listed), f"{what}: one appears twice")


def _demand(holds: object, otherwise: str) -> None:
    if not holds:
        raise ProtocolError(otherwise)
