"""One `compare`: whether the states of all ranks have the same bytes."""

from dataclasses import dataclass

from pmesh.client.session.rows import exchange_rows
from pmesh.client.session.session import Done, TrainerSession
from pmesh.client.trees.state import Packed
from pmesh.core.jobs.comparing import compare, digest_text
from pmesh.core.wire.calls import Call
from pmesh.ids import Rank


@dataclass(frozen=True, slots=True)
class Compared:
    """What `compare` of a mesh or a group has found."""

    digest: str
    """The hash of this rank's state (XXH3, 128 bits): 32 hexadecimal digits."""
    others: tuple[Rank, ...]
    """The ranks whose state is not that of most ranks; none if all have the same. If two states are
    as frequent, that of the lower rank counts."""


def run_compare(
    session: TrainerSession, packed: Packed, *, step: int, timeout_s: float
) -> tuple[Compared, Done]:
    """Compare the hashes of all ranks' states in one op; show the result in `pmesh status`."""
    call = Call("exchange", "int64", (2,), tree="compare")
    rows, done = exchange_rows(session, packed.digest, call, timeout_s=timeout_s)
    digests = [(rows[place][0], rows[place][1]) for place in session.places]
    found = compare(done.world.trainers, digests, op=done.op, step=step)
    session.show_comparison(found)
    texts = map(digest_text, digests)
    others = tuple(Rank(rank) for rank, text in enumerate(texts) if text != found.digest)
    return Compared(digest_text(packed.digest), others), done
