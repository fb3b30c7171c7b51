"""Ops that fail: those that wait in line with them, and what they were given."""

import threading

import pytest
import torch
import torch.distributed as dist

from pmesh.torch.process_group import ProcessGroup
from tests.torch.groups import reducing, run
from tests.worlds.scripted_agent import PATIENCE_S


def test_a_reduction_that_is_impossible_fails_without_those_that_wait_with_it() -> None:
    def program(group: ProcessGroup) -> list[float]:
        may_begin = threading.Event()
        group._line.submit(lambda: may_begin.wait(PATIENCE_S))
        total, xs = reducing(dist.ReduceOp.SUM), [torch.ones(3), torch.ones(5)]
        first = group.allreduce([xs[0]], total)
        impossible = group.allreduce([torch.ones(3).to(torch.float8_e4m3fn)], total)
        last = group.allreduce([xs[1]], total)
        may_begin.set()
        with pytest.raises(dist.DistBackendError, match="float8_e4m3fn is not supported"):
            impossible.wait()
        first.wait()
        last.wait()
        return [float(x[0]) for x in xs]

    assert run(program) == [[3.0, 3.0]] * 3


def test_values_that_are_scaled_first_stay_as_they_were_if_the_op_fails() -> None:
    def program(group: ProcessGroup) -> list[float]:
        scaled, x = reducing(dist._make_nccl_premul_sum(2.0)), torch.ones(3 + group.rank())
        with pytest.raises(dist.DistBackendError, match="OpMismatch"):
            group.allreduce([x], scaled).wait()
        left = x.tolist()
        group.allreduce([x[:3]], scaled).wait()
        return left + x.tolist()

    for rank, found in enumerate(run(program)):
        assert found == [1.0] * (3 + rank) + [6.0] * 3 + [1.0] * rank
