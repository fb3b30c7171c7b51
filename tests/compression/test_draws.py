import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression.draws import draw_uniform, draw_words, start_of

KEYS = st.integers(0, 2**64 - 1)
ALL = 2**64 - 1


def split_mix_64(state: int) -> int:
    """As published, in Python's integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & ALL
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & ALL
    return state ^ (state >> 31)


@given(KEYS, st.integers(0, 2**40), st.integers(0, 20))
def test_words_are_those_of_split_mix_64(key: int, first: int, count: int) -> None:
    start = start_of(key)
    assert start == split_mix_64(key)
    expected = [
        split_mix_64(start + i * 0x9E3779B97F4A7C15 & ALL) for i in range(first, first + count)
    ]
    assert draw_words(key, first, count).tolist() == expected


def test_the_reference_generator_s_first_words_are_ours() -> None:
    """Of state 1234567, which stands behind key `split_mix_64`'s inverse: so by its own counter."""
    words = [split_mix_64(1234567 + i * 0x9E3779B97F4A7C15 & ALL) for i in range(1, 4)]
    assert words == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(KEYS, st.integers(0, 2**30), st.integers(0, 40))
def test_random_numbers_do_not_depend_on_where_one_begins(key: int, word: int, count: int) -> None:
    whole = draw_uniform(key, 4 * word, 8 + count)
    np.testing.assert_array_equal(draw_uniform(key, 4 * word + 8, count), whole[8:])


def test_random_numbers_are_even_and_below_one() -> None:
    drawn = draw_uniform(7, 0, 1_000_001)
    assert len(drawn) == 1_000_001
    counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
    assert np.abs(counts - 10_000).max() < 500  # five standard deviations
    assert drawn.max() == 1 - 2**-16
    assert not drawn.min()


def test_neighbouring_keys_have_nothing_in_common() -> None:
    first, second = draw_uniform(1, 0, 100_000), draw_uniform(2, 0, 100_000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
