"""The output of ranks as records of one line, so that lines of several ranks are never torn.

A record is `SEAT RANK KIND LINE`, where the seat is the index of the machine; a machine leaves out
its own seat, which the starter adds: no machine can speak for another.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pmesh.texts import printable

MAX_LINE_BYTES = 16 * 1024  # a longer one is broken into several: two fit in a message

OUT = b"o"
ERROR = b"e"
NOTE = b"n"
"""What pmesh says itself."""

MACHINE = -1
"""Instead of a rank: a note about the machine."""

STARTER = -1
"""The seat of notes of the starter."""


class LineSplitter:
    r"""Turns the output of one stream of a rank into records.

    >>> lines = LineSplitter(3, OUT)
    >>> lines.receive(b"one\ntw"), lines.receive(b"o\n"), lines.end()
    (b'3 o one\n', b'3 o two\n', b'')
    """

    def __init__(self, rank: int, kind: bytes) -> None:
        self.rank = rank
        """Its number now: it changes as ranks come and go."""
        self._kind = kind
        self._rest = b""

    def receive(self, data: bytes | bytearray) -> bytes:
        """Return the records of the lines that are whole now; b"" if there are none."""
        whole, newline, rest = (self._rest + bytes(data)).rpartition(b"\n")
        self._rest = rest
        lines = [*whole.split(b"\n")] if newline else []
        if len(rest) > MAX_LINE_BYTES:
            lines.append(rest)
            self._rest = b""
        return self._records(lines)

    def end(self) -> bytes:
        """Return the record of a last line without a line break."""
        rest, self._rest = self._rest, b""
        return self._records([rest] if rest else [])

    def _records(self, lines: list[bytes]) -> bytes:
        prefix = b"%d %b " % (self.rank, self._kind)
        return b"".join(
            b"%b%b\n" % (prefix, line[start : start + MAX_LINE_BYTES])
            for line in lines
            for start in range(0, max(1, len(line)), MAX_LINE_BYTES)
        )


def note(rank: int, text: str) -> bytes:
    r"""Return the record of a note about a rank.

    >>> note(0, "it failed")
    b'0 n it failed\n'
    """
    return b"%d %b %b\n" % (rank, NOTE, text.replace("\n", " ").encode())


def seated(data: bytes, seat: int) -> bytes:
    r"""Add the machine to the records of whole lines.

    >>> seated(b"0 o one\n0 o two\n", 2)
    b'2 0 o one\n2 0 o two\n'
    """
    prefix = b"%d " % seat
    return prefix + data[:-1].replace(b"\n", b"\n" + prefix) + data[-1:]


_IN_WORDS = frozenset("-_.'()")
_CATEGORIES = frozenset(("Lu", "Ll", "Lo", "Mn", "Mc", "Nd"))  # Lm has a letter like a colon
_LIKE_BARS = frozenset("ǀǁǂǃ")


def labels(names: Sequence[str]) -> tuple[str, ...]:
    r"""Return what stands before the lines of each machine, unlike what others and pmesh have.

    A machine chooses its name. One that could be taken for another, or for pmesh, is quoted, with
    the number of the machine; what others look like does not change.

    >>> labels(["mac-1", "Anna's Mac 2", "pmesh: done | mac-1"])
    ('mac-1', "Anna's Mac 2", '2 "pmesh: done � mac-1"')
    """
    keys = [unicodedata.normalize("NFKC", name).casefold() for name in names]
    counts = Counter(keys)
    return tuple(
        name
        if counts[key] == 1 and _is_plain(name, key, counts)
        else label_of(seat, printable(name).replace("|", "�").replace('"', "�"))
        for seat, (name, key) in enumerate(zip(names, keys, strict=True))
    )


def label_of(seat: int, name: str) -> str:
    """Return what no name of words alone looks like."""
    return f'{seat} "{name}"'


def _is_plain(name: str, key: str, others: Counter[str]) -> bool:
    """Return True for words that neither are pmesh's nor end as another machine's rank does."""
    words = name.split(" ")
    of_another = re.fullmatch(r"(.*) [0-9]+", key)
    return (
        all(word and all(map(_is_in_words, word)) for word in words)
        and key != "pmesh"
        and (of_another is None or of_another[1] not in others)
    )


def _is_in_words(c: str) -> bool:
    return c in _IN_WORDS or (unicodedata.category(c) in _CATEGORIES and c not in _LIKE_BARS)


class OutputLine(NamedTuple):
    """One record, read."""

    seat: int
    rank: int
    kind: bytes
    text: bytes


def read_lines(data: bytes) -> Iterator[OutputLine]:
    r"""Read whole records; one that is none is dropped, as only a program that lies writes it.

    >>> list(read_lines(b"2 0 o one\nnonsense\n"))
    [OutputLine(seat=2, rank=0, kind=b'o', text=b'one')]
    """
    for record in data.split(b"\n")[:-1]:
        seat, _, rest = record.partition(b" ")
        rank, _, rest = rest.partition(b" ")
        kind, space, text = rest.partition(b" ")
        try:
            number, place = int(rank), int(seat)
        except ValueError:
            continue
        if space:
            yield OutputLine(place, number, kind, text)
