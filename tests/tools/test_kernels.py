import re

import pytest

from tools.bench.kernels import KERNELS, run


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_measured_in_numpy_and_where_it_is_compiled(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, values=1000, rounds=2)
    head, places, *lines = capsys.readouterr().out.splitlines()
    assert head == "1,000 fp32 values, ms: the shortest of 2 (their median)"
    assert places.split() == [name, "numpy", "C"]
    assert lines
    for text in lines:
        assert re.fullmatch(r"  \D+( +\d+\.\d \( +\d+\.\d\)){1,2}( +\d+\.\d x)?", text)
