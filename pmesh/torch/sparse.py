"""The sum of sparse tensors, such as the gradients of `torch.nn.Embedding(sparse=True)`.

Ranks have other entries, and other numbers of them: each gets those of all, and adds them up.
"""

from collections.abc import Sequence

from pmesh.client.group import Collectives
from pmesh.torch.library import Tensor, torch
from pmesh.torch.reductions import Reduction


def is_sparse(x: Tensor) -> bool:
    """Whether it is a tensor that lists its entries (COO)."""
    return bool(x.layout == torch.sparse_coo)


def sum_sparse(calls: Collectives, x: Tensor, reduction: Reduction, timeout_s: float) -> None:
    """Write the sum, or the mean, of all ranks' tensors into this one; `timeout_s` for each op.

    All ranks add in the same order, so they have the same bits.

    Raises:
        ValueError: the reduction is another one, or the tensors differ in shape.
        PmeshError: as for `Collectives.all_gather_into`.
    """
    if reduction.name not in {"sum", "mean"}:
        raise ValueError(f"the backend 'pmesh' sums sparse tensors; it has no {reduction.name}")
    mine = x.detach().cpu().coalesce()
    indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
    form = torch.tensor([len(values), mine.sparse_dim(), *mine.shape])
    forms = _gather(calls, form, [len(form)] * calls.size, timeout_s)
    if any(other[1:].tolist() != form[1:].tolist() for other in forms):
        shapes = [tuple(other[2:].tolist()) for other in forms]
        raise ValueError(f"all_reduce: the sparse tensors of the ranks differ in shape: {shapes}")
    counts = [int(other[0]) for other in forms]
    entries = torch.cat(_gather(calls, indices, counts, timeout_s)).t()
    given = torch.cat(_gather(calls, values, counts, timeout_s))
    if reduction.factor is not None:
        given.mul_(reduction.factor)
    # Named, as torch warns of what it does not check by itself; the ranks' tensors are valid ones.
    total = torch.sparse_coo_tensor(entries, given, mine.shape, check_invariants=False).coalesce()
    if reduction.name == "mean":
        total.values().div_(calls.size)
    reduction.finish(total.values(), calls.size)
    with torch.no_grad():
        x.copy_(total)  # a copy into x.detach() would not reach x: it replaces the entries


def _gather(
    calls: Collectives, rows: Tensor, counts: Sequence[int], timeout_s: float
) -> list[Tensor]:
    """Return the rows of each rank, which has so many."""
    found = [torch.empty((count, *rows.shape[1:]), dtype=rows.dtype) for count in counts]
    calls.all_gather_into(found, rows, timeout_s)
    return found
