"""The measurement of the drop-in runs; its figures are for quiet machines."""

import pytest

pytest.importorskip("mlx.core")

from tools.__main__ import main

pytestmark = [pytest.mark.netns, pytest.mark.slow]


def test_a_call_is_measured_beside_the_meshs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mlx-call", "--kib", "4", "--calls", "3"]) in {0, 1}
    assert "mx.distributed.all_sum, evaluated, " in capsys.readouterr().out
