"""Whether all ranks have the same state, such as their weights."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.jobs.comparing import compare, describe_difference, digest_text, naming
from pmesh.core.values import MAX_DIFFERING, Comparison
from pmesh.ids import OpNumber, TrainerId
from tests.worlds.ranks import roster, trainer

HALVES = st.integers(-(2**63), 2**63 - 1)
OP = OpNumber(12)


def ids(*numbers: int) -> list[TrainerId]:
    return [TrainerId(number) for number in numbers]


@given(st.lists(st.tuples(HALVES, st.just(0)), min_size=1, max_size=20))
def test_no_other_state_is_more_frequent_and_all_with_another_one_are_counted(
    digests: list[tuple[int, int]],
) -> None:
    found = compare(ids(*range(len(digests))), digests, op=OP, step=3)
    texts = [digest_text(digest) for digest in digests]
    assert texts.count(found.digest) == max(map(texts.count, texts))
    differ = [TrainerId(n) for n, text in enumerate(texts) if text != found.digest]
    assert (found.differing, found.others) == (len(differ), tuple(differ[:MAX_DIFFERING]))
    encoded = msgspec.msgpack.encode(found)
    assert msgspec.msgpack.decode(encoded, type=Comparison) == found


def test_of_two_states_as_frequent_that_of_the_lower_rank_counts() -> None:
    found = compare(ids(7, 4), [(2, 2), (1, 1)], op=OP, step=0)
    assert (found.digest, found.others) == (digest_text((2, 2)), (4,))


ROSTER = roster(2, trainers=[trainer(number) for number in ids(0, 1, 2)])
FIRST, SECOND, THIRD = (ROSTER.describe(number) for number in ids(0, 1, 2))


@pytest.mark.parametrize(
    ("others", "ranks", "who"),
    [
        ([2], 4, f"{THIRD} had another state than the other 3 ranks"),
        ([1], 2, f"{SECOND} had another state than the other rank"),
        ([0, 1, 2], 4, f"{FIRST}, {SECOND} and {THIRD} had another state than the other rank"),
        (
            range(2, 13),
            12,
            f"{THIRD}, a lost rank, a lost rank and 8 more had another state",
        ),
    ],
)
def test_an_event_names_the_ranks_that_differ(others: list[int], ranks: int, who: str) -> None:
    found = naming(ids(*others), Comparison(OP, 0, "0" * 32, ranks))
    text = describe_difference(ROSTER, found)
    assert text.startswith(f"job 'digits': {who}")
    assert text.endswith(" in op 12")


def test_an_event_says_in_which_sync_a_rank_got_the_state_of_the_others() -> None:
    found = naming(ids(2), Comparison(OP, 5, "0" * 32, 2, mended=True))
    assert describe_difference(ROSTER, found).endswith(" in step 5, and got theirs")
