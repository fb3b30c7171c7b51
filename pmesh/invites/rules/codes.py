"""Codes, such as 7-guitar-lemon: a number that anybody may know, and two secret words."""

import difflib
import re
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple, TypeAlias

from msgspec import Meta

from pmesh.invites.rules.words import WORDS

MOST_NUMBER: Final = 99  # two machines that invite at the same time rarely have the same
GUESSES: Final = len(WORDS) ** 2
"""The pairs of words, all as likely: 2048^2, which is 4,194,304 or 22 bits."""

Number: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_NUMBER)]
_PARTS = 3
_SEPARATORS = re.compile(r"[^a-z0-9]+")


class Code(NamedTuple):
    """What a person reads on one machine and types on another."""

    number: int
    """Announced by mDNS, so that the other machine finds this one."""
    first: str
    second: str

    @property
    def text(self) -> str:
        """The code as it is shown.

        >>> Code(7, "guitar", "lemon").text
        '7-guitar-lemon'
        """
        return f"{self.number}-{self.first}-{self.second}"


def draw_code(below: Callable[[int], int]) -> Code:
    """Draw a code; `below(n)` returns a random number from 0 to n - 1, as `secrets.randbelow`."""
    number = 1 + below(MOST_NUMBER)
    return Code(number, WORDS[below(len(WORDS))], WORDS[below(len(WORDS))])


def parse_code(text: str) -> Code:
    """Reverse `Code.text`; case does not matter, nor what stands between the parts.

    Raises ValueError for what can't be a code, so that a word with a typing error costs no guess.

    >>> parse_code(" 7 Guitar, LEMON ").text
    '7-guitar-lemon'
    >>> parse_code("7-gitar-lemon")
    Traceback (most recent call last):
    ...
    ValueError: no code has the word 'gitar'; did you mean guitar?
    """
    parts = [part for part in _SEPARATORS.split(text.lower()) if part]
    if len(parts) != _PARTS or not parts[0].isdecimal():
        raise ValueError("a code is a number and two words, such as 7-guitar-lemon")
    if not 1 <= int(parts[0][:_PARTS]) <= MOST_NUMBER:
        raise ValueError(f"the number of a code is 1 to {MOST_NUMBER}, not {parts[0][:8]}")
    for word in parts[1:]:
        if word not in WORDS:
            like = difflib.get_close_matches(word[:16], WORDS, n=3, cutoff=0.75)
            hint = f"; did you mean {' or '.join(like)}?" if like else ""
            raise ValueError(f"no code has the word {word[:16]!r}{hint}")
    return Code(int(parts[0]), parts[1], parts[2])
