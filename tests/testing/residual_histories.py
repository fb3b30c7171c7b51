"""A history aimed at residuals (O9), in which compression is known only by what it keeps."""

from pmesh.core.messages import Call
from pmesh.ids import OpNumber
from pmesh.testing import ops
from pmesh.testing.lane_messages import OpResult, Token
from pmesh.testing.links import Message
from pmesh.testing.ops import OP_TIMEOUT_S
from tests.testing.histories import agent_of, formed_cluster, ranks_of, run_until


def who_fetches_a_sum_keeps_the_residual_of_its_own_part_in_it() -> None:
    """O9: all have given to it, also the one whom the last token did not reach."""
    cluster = formed_cluster(3, think_s=1e6)  # the trainers call nothing: we do
    ring = sorted(ranks_of(cluster).values(), key=lambda rank: rank.rank or 0)
    unlucky, beyond, last = ring  # the token of `beyond` comes to `unlucky` by way of `last`
    number, op = unlucky.roster.number, OpNumber(0)
    host = agent_of(cluster, unlucky).number

    def swallow(_from: int, to: int, _channel: str, message: Message) -> bool:
        if to != host or not isinstance(message, Token):
            return False
        return message.number == number and message.origin == beyond.id

    cluster.network.swallow = swallow
    for rank in ring:
        ops.call_op(rank, Call("all_reduce", "float32", (8,), "sum"))
    run_until(cluster, lambda: op in beyond.ends and op in last.ends, OP_TIMEOUT_S)
    assert op not in unlucky.ends
    run_until(cluster, lambda: op in unlucky.ends, 2 * OP_TIMEOUT_S)
    end = unlucky.ends[op]
    assert isinstance(end.outcome, OpResult)
    assert end.outcome == beyond.ends[op].outcome
    assert end.staged == end.outcome.number == number < unlucky.roster.number
