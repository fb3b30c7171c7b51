"""Output in records of one line."""

from hypothesis import given
from hypothesis import strategies as st

from pmesh.launches.rules.lines import (
    MAX_LINE_BYTES,
    OUT,
    LineSplitter,
    labels,
    read_lines,
    seated,
)


@given(st.lists(st.binary(max_size=50)), st.integers(0, 9))
def test_no_line_is_lost_or_torn_however_it_arrives(pieces: list[bytes], rank: int) -> None:
    lines = LineSplitter(rank, OUT)
    records = b"".join(map(lines.receive, pieces)) + lines.end()
    read = list(read_lines(seated(records, 3) if records else b""))
    whole = b"".join(pieces)
    expected = whole.split(b"\n")[:-1] + ([whole.split(b"\n")[-1]] if whole[-1:] != b"\n" else [])
    assert [line.text for line in read] == (expected if whole else [])
    assert {(line.seat, line.rank, line.kind) for line in read} <= {(3, rank, OUT)}


def test_a_line_has_the_number_that_its_rank_has_when_it_is_whole() -> None:
    lines = LineSplitter(3, OUT)
    records = lines.receive(b"before\nthe re")
    lines.rank = 2
    records += lines.receive(b"st\n")
    assert [(line.rank, line.text) for line in read_lines(seated(records, 0))] == [
        (3, b"before"),
        (2, b"the rest"),
    ]


def test_a_line_that_is_too_long_is_broken() -> None:
    lines = LineSplitter(0, OUT)
    records = lines.receive(b"x" * (MAX_LINE_BYTES + 1)) + lines.receive(b"y\n")
    texts = [line.text for line in read_lines(seated(records, 0))]
    assert b"".join(texts) == b"x" * (MAX_LINE_BYTES + 1) + b"y"
    assert max(map(len, texts)) == MAX_LINE_BYTES


def test_what_is_no_record_is_dropped() -> None:
    assert list(read_lines(b"x 0 o one\n0 x o one\n0 0 o\n0 0 o \n")) == [(0, 0, OUT, b"")]


WORDS = st.sampled_from(
    ["mac", "pmesh", "Mac", "mac 1", "1", " ", ":", "|", '"', "ö", "\u01c0", "\u02d0", "\x1b"]
)
NAMES = st.lists(st.lists(WORDS, max_size=3).map("".join), max_size=6)


@given(NAMES, st.integers(0, 9))
def test_no_machine_chooses_a_name_that_looks_like_another_or_like_pmesh(
    names: list[str], rank: int
) -> None:
    shown = labels(names)
    prefixes = [*shown, *(f"{label} {rank}" for label in shown), "pmesh:", "pmesh"]
    assert len({" ".join(prefix.casefold().split()) for prefix in prefixes}) == len(prefixes)
    assert not any(bar in label for label in shown for bar in "|\x1b\u01c0" if '"' not in label)
    assert "|" not in "".join(shown)


def test_names_of_words_stay_as_they_are() -> None:
    names = ["mac-1", "mac-1 (3f2a)", "Anna's Mac mini 2", "書斎", "Jürgen", "pmesh-4"]
    assert labels(names) == tuple(names)
