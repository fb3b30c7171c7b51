"""The order in which each rank of a pipeline computes forward and backward passes.

A pipeline of P ranks has P · V stages, V on each rank: rank r has the stages r, r + P, r + 2P and
so on, in the order of the model. A batch is cut into M micro-batches.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from pmesh.core.ops.shard import Shard
from pmesh.errors import UsageError

MOST_SENDING = 128
"""How many messages of a rank may wait for their receivers; `send` refuses more than 256."""
AHEAD = 2
"""How many messages a rank asks for before it needs them, so that they travel meanwhile."""

Kind: TypeAlias = Literal["F", "B", "W"]


class Action(NamedTuple):
    """What a rank computes next."""

    kind: Kind
    """F: the forward pass. B: the backward pass. If the schedule also has a W for the stage and the
    micro-batch, B gives the gradient of the stage's input alone, and W those of its weights."""
    stage: int
    """From 0 to P · V - 1."""
    micro_batch: int
    """From 0 to M - 1."""

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order."""


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """Return all forward passes, then all backward passes (GPipe, Huang et al. 2019, 1811.06965).

    Each rank keeps what all micro-batches need for the backward pass.

    >>> print(*gpipe(2, 2)[1])
    F1.0 F1.1 B1.0 B1.1
    """
    return tuple(
        tuple(Action(kind, rank, i) for kind in ("F", "B") for i in range(micro_batches))
        for rank in range(ranks)
    )


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Return a schedule that takes turns (1F1B, Narayanan et al. 2021, arXiv 2104.04473).

    It takes as long as `gpipe`; rank r keeps what P - r micro-batches need for the backward pass.

    >>> print(*one_f_one_b(2, 3)[0])
    F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    """
    return tuple(_looped(rank, ranks, micro_batches, 1, hop=1) for rank in range(ranks))


def eager_one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Return 1F1B that begins with twice as many forward passes (Zhuang et al. 2022, 2211.05322).

    So messages travel while a rank computes; rank r keeps what 2 (P - r) - 1 micro-batches need.

    >>> print(*eager_one_f_one_b(2, 4)[0])
    F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
    """
    return tuple(_looped(rank, ranks, micro_batches, 1, hop=2) for rank in range(ranks))


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """Return 1F1B with several stages on each rank: V times the messages, the bubble through V.

    This is the interleaved schedule of Narayanan et al. 2021, arXiv 2104.04473, for any number of
    micro-batches. They go through the stages of a rank in rounds of about P.

    >>> print(*interleaved(2, 2)[1])
    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1
    """
    return tuple(
        _looped(rank, ranks, micro_batches, stages_per_rank, hop=2) for rank in range(ranks)
    )


def zero_bubble(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Return 1F1B with the weights' gradients put off into the bubble.

    This is ZB-H1 of Qi et al. 2023, arXiv 2401.10241: its bubble is about a third of that of 1F1B.

    >>> print(*zero_bubble(2, 2)[1])
    F1.0 B1.0 F1.1 B1.1 W1.0 W1.1
    """
    return tuple(
        _with_weights(_looped(rank, ranks, micro_batches, stages_per_rank, hop=1), put_off=rank)
        for rank in range(ranks)
    )


_ONE_STAGE: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "eager_1f1b": eager_one_f_one_b}
)
_SEVERAL_STAGES: Mapping[str, Callable[[int, int, int], Schedule]] = MappingProxyType(
    {"interleaved": interleaved, "zero_bubble": zero_bubble}
)
SCHEDULES = (*_ONE_STAGE, *_SEVERAL_STAGES)


def make_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Return the schedule with this name.

    Raises:
        UsageError: there is none, or it takes another number of stages on each rank.
    """
    if name not in SCHEDULES:
        raise UsageError(f"schedule is one of {', '.join(SCHEDULES)}, not {name!r}")
    if name in _ONE_STAGE:
        if stages_per_rank > 1:
            raise UsageError(
                f"the schedule {name!r} takes one stage on each rank, not {stages_per_rank}: pass "
                "schedule='interleaved'"
            )
        return _ONE_STAGE[name](ranks, micro_batches)
    if name == "interleaved" and stages_per_rank == 1:
        raise UsageError(
            "the schedule 'interleaved' takes several stages on each rank: pass stages_per_rank=2 "
            "to split_layers()"
        )
    return _SEVERAL_STAGES[name](ranks, micro_batches, stages_per_rank)


def _looped(
    rank: int, ranks: int, micro_batches: int, stages_per_rank: int, *, hop: int
) -> tuple[Action, ...]:
    """Return forward passes to fill the pipeline, then turns, then the rest of the backward ones.

    Args:
        rank: from 0 to `ranks` - 1.
        ranks: P.
        micro_batches: M.
        stages_per_rank: V.
        hop: how many more forward passes a rank begins with than the next one.
    """
    count = max(1, micro_batches // ranks)
    rounds = [Shard.of(i, count, micro_batches) for i in range(count)]
    order = [
        (local, i)
        for each in rounds
        for local in range(stages_per_rank)
        for i in range(each.begin, each.end)
    ]
    forward = [Action("F", local * ranks + rank, i) for local, i in order]
    last = stages_per_rank - 1
    backward = [Action("B", (last - local) * ranks + rank, i) for local, i in order]
    begin = min(last * rounds[0].size + hop * (ranks - 1 - rank), len(forward))
    turns = zip(forward[begin:], backward, strict=False)
    rest = backward[len(forward) - begin :]
    return (*forward[:begin], *(action for turn in turns for action in turn), *rest)


def _with_weights(actions: tuple[Action, ...], *, put_off: int) -> tuple[Action, ...]:
    """Return the actions with a W for each B, `put_off` B's later, or at the end."""
    found, waiting = list[Action](), list[Action]()
    for action in actions:
        found.append(action)
        if action.kind == "B":
            waiting.append(action._replace(kind="W"))
            if len(waiting) > put_off:
                found.append(waiting.pop(0))
    return (*found, *waiting)
