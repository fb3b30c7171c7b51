"""What happens, as lines that a person reads."""

from pmesh.core.views import OpOutcome, Roster, View
from pmesh.ids import Epoch


def describe(view: View) -> str:
    """A view in one line of a trace."""
    members = " ".join(f"{m.node[-1]}:{m.incarnation % 1000}" for m in view.by_seniority)
    rosters = " ".join(map(_describe_roster, view.rosters))
    return f"installs {_short(view.epoch)} [{members}] {rosters}"


def _describe_roster(roster: Roster) -> str:
    trainers = ",".join(f"{t.id}@{t.member.node[-1]}" for t in roster.trainers)
    witnesses = "".join(f"+{t.id}@{t.member.node[-1]}" for t in roster.witnesses)
    outcomes = ",".join(map(_describe_outcome, roster.outcomes))
    quorum = "" if roster.quorate else " no quorum"
    born = _short(roster.born)
    return f"{roster.job}#{roster.number} born {born} <{trainers}{witnesses}>{quorum} {outcomes}"


def _describe_outcome(outcome: OpOutcome) -> str:
    ended = outcome.verdict.error if outcome.verdict else outcome.holders
    return f"{outcome.op}:{ended}/{outcome.contributors}"


def _short(epoch: Epoch) -> str:
    return f"{epoch.counter}.{epoch.leader[-1]}"
