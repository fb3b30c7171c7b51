"""V6: a lane that brings nothing is broken, also while heartbeats flow."""

import trio

from pmesh.agent.jobs.op_task import describe_shortage
from pmesh.agent.jobs.progress import Marks
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.mesh.membership import Membership
from pmesh.core.links.health import WIRED
from pmesh.ids import OpNumber


def lanes_stand_still(
    rank: LocalRank, newcomers: int, *, marks: Marks, membership: Membership
) -> bool:
    """Whether an op for which all ranks are here has moved nothing for too long.

    To be asked again and again: it notes what has moved since.

    Args:
        rank: whose lanes.
        newcomers: how many trainers wait to enter the job.
        marks: who has started the op.
        membership: how long each neighbour may be silent before it is gone.
    """
    op = OpNumber(rank.ledger.started)
    runs = rank.rank is not None and rank.size > 1 and rank.ledger.ended < op
    # On whom it waits is no matter of lanes; nor is what the leader has been asked about.
    if not runs or rank.concern or marks.late(rank, op) or describe_shortage(rank, newcomers):
        rank.progress = None
        return False
    now, moved = trio.current_time(), rank.lanes.traffic
    if rank.progress is None or rank.progress[0] != moved:
        rank.progress = moved, now
        return False
    return now - rank.progress[1] >= _patience_s(rank, membership)


def _patience_s(rank: LocalRank, membership: Membership) -> float:
    """How long the peer at the slower of the two edges may be silent before it is gone."""
    peers = [trainer.member.node for trainer in rank.neighbours()]
    known = [health for peer in peers if (health := membership.health_of(peer))]
    return max((h.thresholds.gone_after_s for h in known), default=WIRED.gone_after_s)
