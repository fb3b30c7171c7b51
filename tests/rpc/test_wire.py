import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.errors import ProtocolError
from pmesh.rpc.wire import (
    FIRST_ARRAY,
    AnyFrame,
    Apart,
    Cancel,
    Failure,
    Kept,
    Release,
    Request,
    Result,
    Value,
    decode_untrusted,
    encode,
    join,
)

numbers = st.integers(0, 2**62)
arrays = st.binary(max_size=20) | st.builds(
    Apart, st.integers(FIRST_ARRAY, 2**62), st.integers(0, 2**48)
)
values = st.builds(Value, st.binary(max_size=20), st.lists(arrays, max_size=3).map(tuple))
texts = st.text(max_size=10)
frames: st.SearchStrategy[AnyFrame] = st.one_of(
    st.builds(
        Request, numbers, texts, values, st.floats(0.1, 100), st.integers(-1, 99), st.booleans()
    ),
    st.builds(Result, numbers, values),
    st.builds(Kept, numbers, numbers),
    st.builds(Failure, numbers, texts, texts, texts),
    st.builds(Cancel, numbers),
    st.builds(Release, numbers),
)


@given(st.lists(frames, max_size=5))
def test_frames_come_as_they_were_sent(sent: list[AnyFrame]) -> None:
    assert list(decode_untrusted(join(map(encode, sent)))) == sent


@given(
    st.binary(max_size=60) | st.lists(frames, min_size=1).map(lambda f: join(map(encode, f))[1:])
)
def test_any_bytes_are_frames_or_an_error(data: bytes) -> None:
    try:
        assert all(isinstance(frame, AnyFrame) for frame in decode_untrusted(data))
    except ProtocolError:
        return


def test_what_is_out_of_bounds_is_refused() -> None:
    for frame in (Cancel(-1), Result(0, Value(b"", (Apart(5, 9),))), Failure(0, "x" * 5000, "")):
        with pytest.raises(ProtocolError, match="not a batch of calls"):
            decode_untrusted(join([encode(frame)]))


def test_a_value_knows_its_size_and_what_travels_by_itself() -> None:
    value = Value(b"123", (b"45", Apart(FIRST_ARRAY, 10)))
    assert value.nbytes == 15
    assert value.apart == (Apart(FIRST_ARRAY, 10),)
