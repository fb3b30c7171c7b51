"""The tree of a directory: what is decoded, and what could lead out of a directory."""

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.errors import ProtocolError
from pmesh.launches.wire.tree import (
    Content,
    DirectoryEntry,
    Entry,
    FileEntry,
    LinkEntry,
    content_of,
    contents_of,
    decode_tree_untrusted,
    encode_tree,
    flaw_of,
)

HASH = bytes(32)


def file(path: str, nbytes: int = 1, sha256: bytes = HASH) -> FileEntry:
    return FileEntry(path, sha256, nbytes)


TREE: list[Entry] = [
    file("train.py"),
    FileEntry("bin/run", bytes([1]) * 32, 3, executable=True),
    file("a name\nof two lines"),
    DirectoryEntry("out"),
    LinkEntry("bin/deep/link", "../../train.py"),
    LinkEntry("latest", "bin/run"),
    LinkEntry("above", "."),
    LinkEntry("bin/up", ".."),
]


def test_a_tree_comes_back_as_it_was_and_equal_ones_have_equal_bytes() -> None:
    data = encode_tree(TREE)
    assert sorted(decode_tree_untrusted(data), key=lambda e: e.path) == sorted(
        TREE, key=lambda e: e.path
    )
    assert encode_tree(list(reversed(TREE))) == data


def test_each_content_counts_once_and_empty_files_need_none() -> None:
    tree: list[Entry] = [
        file("a", 5),
        file("b", 5),
        file("c", 0),
        DirectoryEntry("d"),
        file("e", 7, b"e" * 32),
    ]
    assert contents_of(tree) == (Content(HASH, 5), Content(b"e" * 32, 7))


def test_a_content_is_named_by_its_hash() -> None:
    assert content_of(b"abc").sha256.hex().startswith("ba7816bf8f01cfea")


@pytest.mark.parametrize(
    ("entries", "flaw"),
    [
        ([file("../x")], "no path below"),
        ([file("/etc/passwd")], "no path below"),
        ([file("a/../../x")], "no path below"),
        ([file("a//x")], "no path below"),
        ([file("./x")], "no path below"),
        ([file("a/")], "no path below"),
        ([file("a\0b")], "null character"),
        ([file("\udc80")], "not valid UTF-8"),
        ([file("é" * 128)], "more than 255 bytes"),
        ([file("x"), file("x")], "twice"),
        ([file("x"), LinkEntry("x", "y")], "twice"),
        ([file("x"), file("x/y")], "no directory with files"),
        ([LinkEntry("x", "y"), file("x/y")], "no directory with files"),
        ([LinkEntry("x", "y"), file("x/y/z")], "no directory with files"),
        ([DirectoryEntry("x"), file("x/y")], "no directory with files"),
        ([LinkEntry("x", "/etc")], "outside"),
        ([LinkEntry("x", "..")], "outside"),
        ([LinkEntry("a/x", "../..")], "outside"),
        ([LinkEntry("a/x", "..//etc")], "outside"),
        ([LinkEntry("a/x", "b/../c")], "outside"),
        ([LinkEntry("x", "y\0z")], "outside"),
    ],
)
def test_what_could_lead_out_of_the_directory_is_refused(entries: list[Entry], flaw: str) -> None:
    assert flaw in flaw_of(entries)
    if "\udc80" not in entries[0].path:
        with pytest.raises(ProtocolError, match=r"not the tree of a directory"):
            decode_tree_untrusted(encode_tree(entries))


@given(st.binary(max_size=100))
def test_other_bytes_raise_one_error(data: bytes) -> None:
    try:
        decode_tree_untrusted(data)
    except ProtocolError:
        return


@pytest.mark.parametrize("data", [msgspec.msgpack.encode([["f", "x", b"short", 1]]), b"\xc1"])
def test_what_is_no_tree_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_tree_untrusted(data)


NAMES = st.sampled_from(["a", "b", "c", "..", "."])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


@given(st.lists(st.tuples(PATHS, PATHS), min_size=1, max_size=6))
def test_no_set_of_links_leads_out(tmp_path_factory: pytest.TempPathFactory, links: list) -> None:  # type: ignore[type-arg]
    """What is made of a tree without a flaw is looked at as the system sees it."""
    entries = [LinkEntry(path, target) for path, target in links]
    if flaw_of(entries):
        return
    root = tmp_path_factory.mktemp("root")
    for entry in entries:
        path = root / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(entry.target)
    for entry in entries:
        seen = Path(os.path.realpath(root / entry.path))
        assert seen.is_relative_to(os.path.realpath(root))
