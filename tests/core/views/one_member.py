"""One member, Bert, and what he does with what he is told."""

from pmesh.core.topology.graph import USUAL, edge_cost
from pmesh.core.values import View
from pmesh.core.views.agreement import lose, receive
from pmesh.core.views.state import Facts, Install, MemberState, MemberStep, SendOnLink
from pmesh.core.wire.views import AgreementMessage, Commit
from pmesh.ids import Member
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    all_hearing_each_other,
    make_epoch,
    make_heartbeat,
    make_proposal,
    make_seat,
    make_view,
)

NOW = 100.0
TRIO = make_view(5, ANNA, BERT, CARA)
BERTS = all_hearing_each_other(BERT, TRIO, ANNA, CARA)
"""Bert in peace, with Anna who leads and Cara who comes after him."""

CARA_LOST_ANNA = receive(BERTS, CARA, make_heartbeat(TRIO, BERT), Facts(), now=NOW).state
"""Cara has noticed already that Anna, who leads, is gone; Bert is about to."""

CARA_GONE = lose(BERTS, CARA.node, "silent", Facts(), now=NOW).state
"""Only Anna is there yet, who goes on with Bert."""

GONE_ON = View(make_epoch(9), (make_seat(ANNA, 1, TRIO.epoch), make_seat(CARA, 3, TRIO.epoch)))
"""What becomes of the view of the three without Bert."""


def told(
    state: MemberState, sender: Member, message: AgreementMessage, *, facts: Facts | None = None
) -> MemberStep:
    return receive(state, sender, message, facts or Facts(), now=NOW)


def sent(step: MemberStep) -> list[tuple[Member, AgreementMessage]]:
    return [
        (action.to, action.message) for action in step.actions if isinstance(action, SendOnLink)
    ]


def installed(step: MemberStep) -> list[View]:
    return [action.view for action in step.actions if isinstance(action, Install)]


def commit(view: View) -> Commit:
    """The commit of a view whose ring is in order of node id: all edges cost the same."""
    return Commit(
        view, tuple(tuple(edge_cost(USUAL) * (a != b) for b in view.seats) for a in view.seats)
    )


def promising(counter: int = 6, leader: Member = ANNA) -> MemberState:
    """Bert, who has promised this epoch and waits for its commit."""
    return told(BERTS, leader, make_proposal(leader, counter, TRIO, *TRIO.members)).state
