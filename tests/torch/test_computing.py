"""What counts as computing, and what as waiting."""

import pytest

from pmesh.torch.computing import ComputingTime


def test_all_time_without_ops_is_computing() -> None:
    assert ComputingTime(5.0).until(8.0) == 3.0


def test_a_rank_that_calls_one_op_after_the_other_waits_in_each() -> None:
    time = ComputingTime(0.0)
    for called, ended in ((1.0, 4.0), (5.0, 6.0)):
        time.call(called)
        time.end(ended)
    assert time.until(7.0) == 3.0


def test_a_rank_computes_beside_its_ops_until_it_has_called_the_last() -> None:
    time = ComputingTime(0.0)
    time.call(1.0)
    time.call(2.0)
    time.end(2.5)
    time.call(3.0)
    assert time.until(9.0) == 3.0
    time.end(8.0)
    time.end(9.0)
    assert time.until(10.0) == pytest.approx(4.0)
