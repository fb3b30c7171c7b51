"""Shares of memory and descriptors, for sessions without an agent."""

from pmesh.net.arena_pools import ArenaBudget, ArenaShare


def share_of_one(limit_bytes: int) -> ArenaShare:
    """That of a program which is alone, and may hold so many bytes."""
    return ArenaShare(ArenaBudget(files=1024, nbytes=2 * limit_bytes), 1)
