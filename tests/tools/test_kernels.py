import re

import pytest

from tools.bench.kernels import KERNELS, NUMBA, NUMPY, Row, main, measure


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_measured_in_numpy_and_where_it_is_compiled(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([name, "--values", "1000", "--rounds", "2"])
    head, places, *lines = capsys.readouterr().out.splitlines()
    assert head == "1,000 fp32 values, ms: the shortest of 2 (their median)"
    assert places.split() == [name, "numpy", "numba"]
    assert lines
    for text in lines:
        assert re.fullmatch(r"  \D+( +\d+\.\d \( +\d+\.\d\)){1,2}( +\d+\.\d x)?", text)


def test_runs_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    rows = [
        Row(name="a", runs={NUMPY: lambda: calls.append("a"), NUMBA: lambda: calls.append("a'")}),
        Row(name="b", runs={NUMPY: lambda: calls.append("b")}),
    ]
    taken = measure(rows, 2)
    assert calls == ["a", "a'", "b"] * 3
    assert {key: len(times) for key, times in taken.items()} == {
        ("a", NUMPY): 2,
        ("a", NUMBA): 2,
        ("b", NUMPY): 2,
    }
