"""Contents on their way: both ends cut the stream in the same way."""

from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.wire.stream import PART_BYTES
from pmesh.launches.rules.pulling import Cutter, Slice
from pmesh.launches.wire.tree import Content

SIZES = st.lists(st.integers(1, 3 * PART_BYTES), max_size=12)


def contents(sizes: list[int]) -> list[Content]:
    return [Content(bytes([n]) * 32, size) for n, size in enumerate(sizes)]


@given(SIZES, st.data())
def test_however_a_stream_is_cut_all_contents_come_whole(
    sizes: list[int], data: st.DataObject
) -> None:
    wanted = contents(sizes)
    cutter = Cutter(wanted)
    came: dict[Content, int] = {}
    while cutter.left:
        before, nbytes = cutter.left, data.draw(st.integers(1, cutter.left))
        slices = cutter.cut(nbytes)
        for content, start, size in slices:
            assert start == came.get(content, 0)
            came[content] = start + size
        assert sum(one.nbytes for one in slices) == nbytes == before - cutter.left
    assert list(came.items()) == [(content, content.nbytes) for content in wanted]
    assert cutter.total == sum(sizes)
    assert cutter.cut(0) == []


def test_a_slice_ends_with_its_content() -> None:
    one, two = contents([3, 5])
    cutter = Cutter([one, two])
    assert cutter.cut(4) == [Slice(one, 0, 3), Slice(two, 0, 1)]
    assert cutter.cut(4) == [Slice(two, 1, 4)]
