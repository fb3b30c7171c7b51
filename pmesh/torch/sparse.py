"""The sum of sparse tensors, such as the gradients of `torch.nn.Embedding(sparse=True)`.

Each rank has different entries, so every rank gathers the entries of all ranks and adds them up.
"""

from collections.abc import Sequence

from pmesh.client.group import Collectives
from pmesh.torch.library import Tensor, torch
from pmesh.torch.reductions import Reduction


def is_sparse(x: Tensor) -> bool:
    """Return True for a tensor that lists its entries (COO)."""
    return bool(x.layout == torch.sparse_coo)


def sum_sparse(calls: Collectives, x: Tensor, reduction: Reduction, timeout_s: float) -> None:
    """Write the sum or the mean of all ranks' tensors into `x`. Each op has this timeout.

    All ranks add in the same order, so they have the same bits.

    Raises:
        ValueError: the reduction is neither sum nor mean, or the tensors differ in shape.
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
    # Without the argument torch warns that it does not check; the ranks' tensors are valid.
    total = torch.sparse_coo_tensor(entries, given, mine.shape, check_invariants=False).coalesce()
    if reduction.name == "mean":
        total.values().div_(calls.size)
    reduction.finish(total.values(), calls.size)
    with torch.no_grad():
        x.copy_(total)  # a copy into x.detach() would not reach x: it replaces the entries


def _gather(
    calls: Collectives, rows: Tensor, counts: Sequence[int], timeout_s: float
) -> list[Tensor]:
    """Return the rows of each rank; `counts` has their numbers."""
    found = [torch.empty((count, *rows.shape[1:]), dtype=rows.dtype) for count in counts]
    calls.all_gather_into(found, rows, timeout_s)
    return found
