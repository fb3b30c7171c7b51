"""Training with torch while ranks come and go: `pmesh.torch.init(elastic=True)` and `sync`."""

from collections.abc import Sequence
from typing import Any, Literal, cast, overload

from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.connect import connect
from pmesh.client.mesh import Mesh
from pmesh.errors import RankLost, UsageError
from pmesh.torch.library import Tensor, dist, torch
from pmesh.torch.options import Options, options_of
from pmesh.torch.ranks import WORLDS, Elastic


@overload
def init(options: Options | None = ..., *, elastic: Literal[True]) -> Mesh: ...
@overload
def init(options: Options | None = ..., *, elastic: Literal[False] = ...) -> None: ...
def init(options: Options | None = None, *, elastic: bool = False) -> Mesh | None:
    """Join the job of this script.

    With `elastic=True` the number of ranks may change: wrap the model in
    `pmesh.torch.DistributedDataParallel` and call `pmesh.torch.sync` at the top of the training
    loop. A trainer that is cut off from the others trains alone until its next `sync`. With
    `elastic=False` this is `torch.distributed.init_process_group("pmesh", pg_options=options)`.

    Args:
        options: the job, the number of ranks at the start, and so on; see `pmesh.torch.Options`.
        elastic: True if ranks may come and go.

    Returns:
        The mesh, with `mesh.rank`, `mesh.size`, `mesh.step`, `mesh.shard` and all collectives, or
        None if not elastic. Leave the job by `mesh.close()`.

    Raises:
        UsageError: an option is invalid, or this program has joined a job already.
        PmeshError: as for `pmesh.connect`.
    """
    chosen = options_of(options)
    if not elastic:
        dist.init_process_group("pmesh", pg_options=chosen)
        return None
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed has a process group already, whose number of ranks is fixed: leave "
            "init_process_group out of a program that calls pmesh.torch.init(elastic=True)"
        )
    WORLDS.end()
    mesh = connect(
        chosen.job_name(),
        chosen.ranks(),
        home=chosen.home,
        min_ranks=chosen.min_ranks,
        quorum=chosen.quorum,
        on_superseded="sync",
    )
    WORLDS.begin_elastic(mesh, chosen.ranks())
    return mesh


def current() -> Elastic:
    """Return the elastic job of this program. Raises UsageError if there is none."""
    if WORLDS.elastic is None:
        raise UsageError("call pmesh.torch.init(elastic=True) first")
    return WORLDS.elastic


def sync(*parts: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:  # noqa: ANN401 - any object of the user
    """Give all ranks the same state, and let newcomers enter the job.

    Call it at the top of each step with everything that the next steps depend on. A newcomer gets
    the model, the optimizer's state, `mesh.step` and so on from the other ranks. If all ranks have
    the same state already, this costs a hash of it and one small op. Buffers, such as the running
    means of BatchNorm, differ after a step, since ranks have seen different samples. So all ranks
    first get the buffers of rank 0, as in torch's DDP.

    Args:
        parts: modules, optimizers, schedulers and other objects with `state_dict` and
            `load_state_dict`, and dicts of arrays and plain values. Pass the same parts in the same
            order on every rank. They are changed in place.
        timeout_s: as for `mesh.sync`.

    Raises:
        UsageError: a part has no state, or another rank has passed other parts.
        PmeshError: as for `mesh.sync`.
    """
    elastic = current()
    elastic.finish_ops()
    for part in parts:
        _check_part(part)
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    if elastic.mesh.step:  # a newcomer's first op is its first sync
        _share_buffers(elastic.mesh, modules, timeout_s)
    state = [_state_of(part) for part in parts]
    received = elastic.mesh.sync(state, timeout_s)
    if received is not state:
        _load(parts, received)
    for module in modules:
        elastic.synced.update(module.modules())


def _check_part(part: Any) -> None:  # noqa: ANN401 - any object of the user
    if isinstance(part, dict):
        return
    if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
        raise UsageError(
            f"sync takes modules, optimizers, dicts, and what has state_dict and load_state_dict, "
            f"not a {type(part).__name__}"
        )


def _state_of(part: Any) -> object:  # noqa: ANN401 - any object of the user
    state: object = cast("object", part) if isinstance(part, dict) else part.state_dict()
    return state


def _load(parts: Sequence[Any], states: Sequence[object]) -> None:
    if len(parts) != len(states):
        raise UsageError(
            f"this rank has passed {len(parts)} parts to sync, and the job's state has "
            f"{len(states)}: run the same script on all machines"
        )
    for part, state in zip(parts, states, strict=True):
        if isinstance(part, dict):
            mine = cast("dict[object, object]", part)
            mine.clear()
            mine.update(cast("dict[object, object]", state))
        else:
            part.load_state_dict(state)


def _share_buffers(mesh: Mesh, modules: Sequence[Any], timeout_s: float) -> None:
    buffers: dict[str, Tensor] = {}
    for i, module in enumerate(modules):
        saved = module.state_dict()
        named = {name: each for name, each in module.named_buffers() if name in saved}
        buffers |= {f"{i}.{name}": each.detach() for name, each in named.items()}
    while buffers:
        try:
            shared = mesh.broadcast(buffers, 0, timeout_s)
        except RankLost:
            continue  # rank 0 was lost: all ranks get this error, and another one is rank 0 now
        for name, each in shared.items():
            buffers[name].copy_(each)
        return
