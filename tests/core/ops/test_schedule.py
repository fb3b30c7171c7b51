import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.ops.schedule import chunk_bounds


@given(st.integers(0, 1000), st.integers(1, 9))
def test_chunks_are_those_of_numpy_array_split(count: int, chunks: int) -> None:
    bounds = chunk_bounds(count, chunks)
    expected = [len(part) for part in np.array_split(np.empty(count), chunks)]
    assert [end - begin for begin, end in itertools.pairwise(bounds)] == expected
