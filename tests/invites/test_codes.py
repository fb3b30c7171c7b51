"""Codes as text, and what can't be one."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.invites.rules.codes import GUESSES, MOST_NUMBER, Code, draw_code, parse_code
from pmesh.invites.rules.words import WORDS

CODES = st.builds(Code, st.integers(1, MOST_NUMBER), st.sampled_from(WORDS), st.sampled_from(WORDS))


def test_the_words_are_2048_of_which_no_two_begin_with_the_same_four_letters() -> None:
    assert len(WORDS) == len({word[:4] for word in WORDS}) == 2048
    assert all(word.isascii() and word.islower() and 3 <= len(word) <= 8 for word in WORDS)
    assert GUESSES == 4_194_304


@given(CODES)
def test_a_code_is_read_as_it_is_shown(code: Code) -> None:
    assert parse_code(code.text) == code


@given(
    CODES,
    st.sampled_from([" ", "-", "  ", "_", ", ", "."]),
    st.sampled_from([str.upper, str.title]),
)
def test_case_and_what_stands_between_the_parts_do_not_matter(
    code: Code, between: str, typed: Callable[[str], str]
) -> None:
    assert parse_code(typed(f" {between.join(code.text.split('-'))} ")) == code


@given(st.text(max_size=40))
def test_any_text_is_a_code_or_a_valueerror(text: str) -> None:
    try:
        code = parse_code(text)
    except ValueError:
        return
    assert parse_code(code.text) == code


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a code is a number and two words, such as 7-guitar-lemon"),
        ("guitar-lemon", "a number and two words"),
        ("7-guitar", "a number and two words"),
        ("seven-guitar-lemon", "a number and two words"),
        ("7-guitar-lemon-lemon", "a number and two words"),
        ("0-guitar-lemon", "1 to 99, not 0"),
        ("123-guitar-lemon", "1 to 99, not 123"),
        ("9" * 9000 + "-guitar-lemon", "1 to 99, not 99999999$"),
        ("7-guitar-lemmon", "no code has the word 'lemmon'; did you mean lemon"),
        ("7-qqqqqqqq-lemon", "no code has the word 'qqqqqqqq'$"),
    ],
)
def test_what_can_be_no_code_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_code(text)


def test_each_part_of_a_code_is_drawn_by_itself_and_from_all_that_there_are() -> None:
    asked: list[int] = []

    def highest(count: int) -> int:
        asked.append(count)
        return count - 1

    assert draw_code(highest) == Code(99, "zoo", "zoo")
    assert asked == [99, 2048, 2048]
    assert draw_code(lambda _: 0) == Code(1, "abandon", "abandon")
