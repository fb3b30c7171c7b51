"""Whether all ranks have the same state, such as their weights: what they found, and its words."""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from pmesh.core.values import MAX_DIFFERING, Comparison, Roster
from pmesh.ids import OpNumber, TrainerId


def digest_text(digest: tuple[int, int]) -> str:
    """Return the 32 hexadecimal digits of a hash that came as two int64.

    >>> digest_text((1, -1))
    '0000000000000001ffffffffffffffff'
    """
    return "".join(f"{half % 2**64:016x}" for half in digest)


def compare(
    trainers: Sequence[TrainerId],
    digests: Sequence[tuple[int, int]],
    *,
    op: OpNumber,
    step: int,
) -> Comparison:
    """Return which ranks have another state than most; of two as frequent, the lower rank's counts.

    Args:
        trainers: the ranks, in order; at least one.
        digests: the hash of the state of each.
        op: the op in which they compared.
        step: `mesh.step` then.
    """
    most, _ = Counter(digests).most_common(1)[0]  # of several, the first that was counted
    others = [t for t, own in zip(trainers, digests, strict=True) if own != most]
    return naming(others, Comparison(op, step, digest_text(most), len(trainers)))


def naming(others: Sequence[TrainerId], found: Comparison) -> Comparison:
    """Return the comparison with the ranks that differ, of which it names some."""
    return replace(found, differing=len(others), others=tuple(others[:MAX_DIFFERING]))


def describe_difference(roster: Roster, found: Comparison) -> str:
    """Say which ranks had another state, for an event; there is at least one."""
    named = [roster.describe(trainer) for trainer in found.others]
    if found.differing > len(named):
        named.append(f"{found.differing - len(named)} more")
    *others, last = named
    who = f"{', '.join(others)} and {last}" if others else last
    when = f"step {found.step}" if found.step else f"op {found.op}"
    same = found.ranks - found.differing
    text = (
        f"job {roster.job!r}: {who} had another state than the other "
        f"{'rank' if same == 1 else f'{same} ranks'} in {when}"
    )
    return f"{text}, and got theirs" if found.mended else text
