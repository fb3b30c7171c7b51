"""Sparse tensors, among threads."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from pmesh.torch.process_group import ProcessGroup
from tests.torch.groups import reducing, run


def sparse(entries: dict[int, list[float]], rows: int = 5, dtype: Any = torch.float32) -> Any:
    """A matrix with two columns; the rows of `entries` are there."""
    values = torch.tensor(list(entries.values()), dtype=dtype).reshape(len(entries), 2)
    return torch.sparse_coo_tensor([list(entries)], values, (rows, 2), check_invariants=True)


@pytest.mark.parametrize(("op", "divisor"), [(ReduceOp.SUM, 1), (ReduceOp.AVG, 3)])
def test_sparse_tensors_are_summed_with_whatever_entries_each_rank_has(
    op: Any, divisor: int
) -> None:
    given = [{0: [1.0, 2.0], 3: [6.0, 3.0]}, {}, {3: [3.0, 3.0]}]

    def sum_up(group: ProcessGroup) -> Any:
        x = sparse(given[group.rank()])
        group.allreduce([x], reducing(op)).wait()
        return x

    for total in run(sum_up):
        assert total.coalesce().indices().tolist() == [[0, 3]]
        want = torch.tensor([[1.0, 2.0], [0, 0], [0, 0], [9.0, 6.0], [0, 0]]) / divisor
        assert torch.equal(total.to_dense(), want)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # by torch.nn.EmbeddingBag
def test_sparse_gradients_train_as_dense_ones_do() -> None:
    def weights(group: ProcessGroup, *, is_sparse: bool) -> Any:
        start = torch.arange(30.0).reshape(10, 3) / 30
        net = torch.nn.EmbeddingBag(10, 3, sparse=is_sparse, mode="sum", _weight=start.clone())
        net(torch.tensor([[group.rank(), 7], [7, 7 + group.rank()]])).square().sum().backward()
        assert net.weight.grad is not None
        group.allreduce([net.weight.grad]).wait()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        return net.weight.detach()

    for one, other in run(lambda g: [weights(g, is_sparse=sparse) for sparse in (True, False)]):
        torch.testing.assert_close(one, other)


def test_sparse_tensors_that_do_not_go_together_fail_on_all_ranks() -> None:
    def refused(group: ProcessGroup) -> list[str]:
        errors = list[str]()
        for x, op in [
            (sparse({0: [1.0, 1.0]}, rows=5 + group.rank()), ReduceOp.SUM),
            (sparse({}, dtype=(torch.float32, torch.float64)[group.rank()]), ReduceOp.SUM),
            (sparse({}), ReduceOp.MAX),
        ]:
            with pytest.raises((ValueError, dist.DistBackendError)) as e:
                group.allreduce([x], reducing(op)).wait()
            errors.append(str(e.value))
        x = sparse({0: [1.0, 1.0]})
        group.allreduce([x]).wait()
        assert x.to_dense()[0, 0] == 2.0
        return errors

    for shapes, dtypes, name in run(refused, ranks=2):
        assert shapes.endswith("differ in shape: [(5, 2), (6, 2)]")
        assert "OpMismatch" in dtypes
        assert name == "the backend 'pmesh' sums sparse tensors; it has no max"
