"""V8: after an agent slept, check that its view is still the view of all its members.

The others may have continued without it. So it delivers nothing until every member of its view has
confirmed, in answer to something sent since, that it has the same view.
"""

from dataclasses import dataclass, replace

from pmesh.core.values import View
from pmesh.core.views.state import MemberState
from pmesh.core.wire.link import Heartbeat
from pmesh.ids import Member


@dataclass(frozen=True, slots=True)
class StallGuard:
    """When the agent woke up, and which members it waits for."""

    awake_us: int = 0
    """When the agent last woke up, on its monotonic clock."""
    unconfirmed: frozenset[Member] = frozenset()
    """The members that have not confirmed the view yet; it is trusted once there are none."""


def wake(state: MemberState, *, now_us: int) -> StallGuard:
    """Distrust the view: the agent slept so long that a member may have given it up."""
    return StallGuard(now_us, _others(state, state.view))


def hear(guard: StallGuard, state: MemberState, sender: Member, beat: Heartbeat) -> StallGuard:
    """A heartbeat confirms the view that it names if it answers one sent since we woke up."""
    if beat.view != state.view.epoch or beat.echo_us < guard.awake_us:
        return guard
    return replace(guard, unconfirmed=guard.unconfirmed - {sender})


def install(guard: StallGuard, before: MemberState, view: View) -> StallGuard:
    """Follow a new view.

    If it was promised before the sleep, the others may have installed and left it long ago.
    """
    promised_at = before.flushed_at
    if promised_at is not None and promised_at * 1e6 < guard.awake_us:
        return replace(guard, unconfirmed=_others(before, view))
    return replace(guard, unconfirmed=guard.unconfirmed.intersection(view.members))


def _others(state: MemberState, view: View) -> frozenset[Member]:
    return frozenset(view.members) - {state.me}
