import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression.codecs import Codec, codec_of
from pmesh.core.ops.coded import (
    PIECE_VALUES,
    coded_chunks,
    draw_key,
    hop_terms,
    plan_coded_ring,
)
from pmesh.core.ops.kinds import ring_codec_name
from pmesh.core.ops.plan import SMALL_BYTES, RankPlan
from pmesh.core.ops.reducing import plan_ring
from pmesh.core.wire.records import MAX_BODY_BYTES, OVERHEAD_BYTES
from tests.worlds.plans import check_shape

NAMES = st.sampled_from(["bf16", "fp16", "int8"])
SIZES = st.integers(1, 9)
COUNTS = st.integers(0, 40 * 256) | st.integers(0, 3 * PIECE_VALUES)


def plans(size: int, count: int, codec: Codec) -> list[RankPlan]:
    return [plan_coded_ring(rank=rank, size=size, count=count, codec=codec) for rank in range(size)]


@given(SIZES, COUNTS, NAMES)
def test_what_a_rank_sends_is_what_the_next_receives(size: int, count: int, name: str) -> None:
    all_plans = plans(size, count, codec_of(name))
    check_shape(all_plans, segment_bytes=MAX_BODY_BYTES)


@given(SIZES, COUNTS, NAMES)
def test_each_value_is_encoded_once_and_decoded_once(size: int, count: int, name: str) -> None:
    """So the residual is one array of that size."""
    chunks = coded_chunks(size=size, count=count, codec=codec_of(name))
    pieces = sorted(piece for chunk in chunks for piece in chunk if size > 1)
    for plan in plans(size, count, codec_of(name)):
        works = [work for queue in plan.works for work in queue]
        for decodes in (False, True):
            done = [(w.begin, w.length, w.nbytes) for w in works if w.decodes == decodes]
            assert sorted(done) == pieces


@given(SIZES, COUNTS, NAMES)
def test_pieces_cover_the_tensor_begin_with_a_block_and_fit_a_record(
    size: int, count: int, name: str
) -> None:
    codec = codec_of(name)
    chunks = coded_chunks(size=size, count=count, codec=codec)
    assert len(chunks) == size
    assert all(chunks)  # a record at least, or an op would be no barrier
    pieces = [piece for chunk in chunks for piece in chunk]
    ends = [piece.begin + piece.length for piece in pieces]
    assert [piece.begin for piece in pieces] == [0, *ends[:-1]]
    assert ends[-1] == count
    for piece in pieces:
        assert piece.begin % codec.block == 0 or not piece.length
        assert piece.length <= PIECE_VALUES
        assert piece.nbytes == codec.wire_bytes(piece.length) <= MAX_BODY_BYTES
    (plan, *_) = plans(size, count, codec)
    assert size == 1 or plan.small == (max(p.nbytes for p in pieces) <= SMALL_BYTES)
    if not plan.small:  # else their bytes are kept apart from the result
        assert all(piece.nbytes <= 4 * piece.length for piece in pieces)


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("name", ["bf16", "fp16", "int8"])
def test_steps_and_bytes_are_those_of_the_formula(size: int, name: str) -> None:
    """2(n-1) steps, and 2(n-1)/n of the encoded tensor."""
    codec = codec_of(name)
    count = 3 * 256 * size * 1000
    for plan in plans(size, count, codec):
        assert plan.steps == 2 * (size - 1)
        assert plan.bytes_sent == 2 * (size - 1) * codec.wire_bytes(count) // size
        assert plan.moving_bytes == 2 * plan.bytes_sent


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize(("name", "factor"), [("bf16", 1.98), ("fp16", 1.98), ("int8", 3.85)])
def test_with_all_headers_it_is_so_much_less_than_fp32(size: int, name: str, factor: float) -> None:
    count = 4_000_000
    plain = plan_ring(rank=0, size=size, count=count, itemsize=4)
    coded = plan_coded_ring(rank=0, size=size, count=count, codec=codec_of(name))
    plain_bytes = plain.bytes_sent + OVERHEAD_BYTES * len(plain.sends[1])
    assert plain_bytes >= factor * (coded.bytes_sent + OVERHEAD_BYTES * len(coded.sends[1]))


def test_a_codec_that_needs_more_bytes_than_values_has_smaller_pieces() -> None:
    class Fat:
        name = "fat"
        block = 1000
        divides_first = False

        def wire_bytes(self, count: int) -> int:
            return 32 * count

    fat: Codec = Fat()  # type: ignore[assignment] # the plan asks no more of it
    pieces = [p for chunk in coded_chunks(size=2, count=10**6, codec=fat) for p in chunk]
    assert max(piece.nbytes for piece in pieces) <= MAX_BODY_BYTES
    assert all(piece.begin % 1000 == 0 for piece in pieces)

    class Huge(Fat):
        block = 10**6

    huge: Codec = Huge()  # type: ignore[assignment] # likewise
    assert [len(chunk) for chunk in coded_chunks(size=2, count=10**6, codec=huge)] == [1, 1]


def test_a_mean_is_divided_by_the_owner_or_before_anything_can_overflow() -> None:
    int8, fp16 = codec_of("int8"), codec_of("fp16")
    for owner in (False, True):
        assert hop_terms(int8, "sum", size=4, owner=owner) == (1.0, 1)
        assert hop_terms(int8, "mean", size=4, owner=owner) == (1.0, 4 if owner else 1)
        assert hop_terms(fp16, "mean", size=4, owner=owner) == (0.25, 1)


def test_no_two_hops_draw_the_same_lots() -> None:
    codec = codec_of("int8-stochastic")
    keys = [
        draw_key(op=op, rank=rank, begin=begin, codec=codec)
        for op, rank, begin in itertools.product(
            (0, 1, 2**30 - 1), (0, 1, 1023), (0, 256, 256 * (2**24 - 1))
        )
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_what_the_trainers_compute_themselves_is_no_codec_of_the_ring() -> None:
    assert ring_codec_name("int8") == "int8"
    assert ring_codec_name("topk(0.01)") == ""
    assert ring_codec_name("") == ""
