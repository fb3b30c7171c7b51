"""Batches that ranks deal ahead, some of them further than others."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.jobs.batches import BatchShares
from pmesh.core.jobs.shares import Standing

STANDINGS = st.builds(
    Standing,
    ns_per_row=st.integers(0, 10**6),
    uncertainty_ppm=st.sampled_from([0, 10**4]),
    weight=st.sampled_from([0, 1 << 16]),
    most_rows=st.sampled_from([0, 40]),
    even=st.just(0),  # else most weights would be even
)


def fast(weight: int = 0) -> list[Standing]:
    """Of two ranks, of which the first is three times as fast."""
    return [Standing(ns, 0, weight) for ns in (100, 300)]


@given(
    st.data(),
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.sampled_from([0, 3, 12]),
)
def test_each_row_of_each_batch_is_dealt_once_however_far_ahead_a_rank_is(
    data: st.DataObject, ahead: list[int], breaks_off: int
) -> None:
    """Two passes over twelve batches of forty rows; the first may be broken off."""
    size = len(ahead)
    ranks = [BatchShares(rank, size) for rank in range(size)]
    standings = st.lists(STANDINGS, min_size=size, max_size=size)
    for first in (0, 12):
        dealt: list[list[list[int]]] = [[] for _ in ranks]
        for each in ranks:
            each.next_batch = first
        for step in range(12 if first else breaks_off):
            for each, mine, more in zip(ranks, dealt, ahead, strict=True):
                while len(mine) < min(12, step + 1 + more):
                    mine.append(each.deal(40).tolist())
            told = data.draw(standings)
            changed = {each.agree(told, [r.next_batch for r in ranks]) for each in ranks}
            assert len(changed) == 1
        for parts in zip(*dealt, strict=False):
            assert sorted(itertools.chain(*parts)) == list(range(40))


def test_new_weights_hold_from_the_first_batch_on_that_no_rank_has_dealt() -> None:
    first, second = BatchShares(0, 2), BatchShares(1, 2)
    assert [len(first.deal(40)), len(second.deal(40))] == [20, 20]
    assert len(second.deal(40)) == 20  # it is one batch ahead

    assert first.agree(fast(), [1, 2])
    assert second.agree(fast(), [1, 2])

    assert first.latest.weights == (1 << 16, round((1 << 16) / 3))
    assert len(first.deal(40)) == 20
    assert [len(first.deal(40)), len(second.deal(40))] == [30, 10]


def test_the_same_terms_again_change_nothing() -> None:
    ranks = BatchShares(0, 2)
    assert ranks.agree(fast(), [0, 0])
    before = ranks.latest
    assert not ranks.agree(fast(), [5, 5])
    assert ranks.latest is before


def test_a_limit_is_no_new_weight_but_holds_from_then_on() -> None:
    ranks = BatchShares(0, 2)
    assert not ranks.agree([Standing(most_rows=5), Standing()], [0, 0])
    assert len(ranks.deal(40)) == 5
