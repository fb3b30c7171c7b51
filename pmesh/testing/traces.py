"""What happens, as lines that a person reads."""

from pmesh.core.views import View
from pmesh.ids import Epoch


def describe(view: View) -> str:
    """A view in one line of a trace."""
    members = " ".join(f"{m.node[-1]}:{m.incarnation % 1000}" for m in view.by_seniority)
    rosters = " ".join(
        f"{r.job}#{r.number} born {_short(r.born)} lost {sorted(r.lost_ranks)} "
        + ",".join(f"{o.op}:{o.verdict.error if o.verdict else o.holders}" for o in r.outcomes)
        for r in view.rosters
    )
    return f"installs {_short(view.epoch)} [{members}] {rosters}"


def _short(epoch: Epoch) -> str:
    return f"{epoch.counter}.{epoch.leader[-1]}"
