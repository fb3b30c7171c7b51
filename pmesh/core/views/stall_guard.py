"""V8: after a sleep of its own, whether an agent's view is still everybody's.

While it slept the others may have gone on without it. So it delivers nothing until every member of
its view has said, in answer to something sent since, that this view is the member's own.
"""

from dataclasses import dataclass, replace

from pmesh.core.values import View
from pmesh.core.views.state import MemberState
from pmesh.core.wire.link import Heartbeat
from pmesh.ids import Member


@dataclass(frozen=True, slots=True)
class StallGuard:
    """Since which sleep, and about whom."""

    awake_us: int = 0
    """When the agent last woke up, on its monotonic clock."""
    unconfirmed: frozenset[Member] = frozenset()
    """Who has not confirmed the view yet; nobody: it is trusted."""


def wake(state: MemberState, *, now_us: int) -> StallGuard:
    """The agent has slept for so long that somebody may have given it up."""
    return StallGuard(now_us, _others(state, state.view))


def hear(guard: StallGuard, state: MemberState, sender: Member, beat: Heartbeat) -> StallGuard:
    """A heartbeat confirms the view that it names, if it answers one of ours that is fresh."""
    if beat.view != state.view.epoch or beat.echo_us < guard.awake_us:
        return guard
    return replace(guard, unconfirmed=guard.unconfirmed - {sender})


def install(guard: StallGuard, before: MemberState, view: View) -> StallGuard:
    """A view follows.

    What was promised before the sleep is as old as the view that was installed then: the others may
    have installed it long ago, and left it.
    """
    promised_at = before.flushed_at
    if promised_at is not None and promised_at * 1e6 < guard.awake_us:
        return replace(guard, unconfirmed=_others(before, view))
    return replace(guard, unconfirmed=guard.unconfirmed.intersection(view.members))


def _others(state: MemberState, view: View) -> frozenset[Member]:
    return frozenset(view.members) - {state.me}
