"""If nobody comes in place of a lost rank, a rank beside it takes over the layers of its stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from pmesh.errors import RosterChanged, UsageError
from pmesh.mlx.pipeline.rules.meeting import Holding, latest_common, neighbour, replaced, stages_of

Order: TypeAlias = Sequence[tuple[int, int]]
"""For each module of a joined stage: which of two stages has it (0 or 1), and its place there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """What follows from the holdings of the ranks that are left, the same on each.

    Stages have the numbers from before the loss here.
    """

    ranks: tuple[int, ...]
    """The rank that has each stage that is left, in their order."""
    layers: tuple[int, ...]
    """How many layers each of these has from now on."""
    step: int
    """Go on from the states after this step."""
    lost: int
    """The stage whose rank is lost."""
    keeper: int
    """The stage whose rank has the copy of its state."""
    has_copy: bool
    """False before the first copy: the state is that of the model as it was made."""
    heir: int
    """The stage that gets its layers: the one after it, or before it if it is the last."""

    def place_of(self, stage: int) -> int:
        """Return the number that a stage has from now on."""
        return stage - (stage > self.lost)


def is_due(holdings: Sequence[Holding]) -> bool:
    """Return True if one stage has no rank, and all others have waited long enough for one."""
    return (
        len(holdings) == stages_of(holdings) - 1
        and not replaced(holdings)
        and all(each.meetings and each.has_waited for each in holdings)
    )


def plan_takeover(holdings: Sequence[Holding]) -> Takeover:
    """Choose who takes over the layers of the lost stage, and the step from which all go on.

    Args:
        holdings: of each rank; a takeover `is_due`.

    Raises:
        RosterChanged: the copy of the lost stage's state is lost, too.
    """
    stages = len(holdings) + 1
    rank_of = {each.stage: rank for rank, each in enumerate(holdings)}
    (lost,) = set(range(stages)) - set(rank_of)
    keeper = neighbour(lost, stages)
    heir = keeper if lost < stages - 1 else lost - 1
    copies = {*holdings[rank_of[keeper]].copies}
    step = latest_common([copies or {0}, *({*each.own} for each in holdings)])
    newest = max(holdings, key=lambda each: each.meetings)
    if step is None:
        raise RosterChanged(
            f"stage {lost} of the pipeline is lost with {newest.machines[lost]}, and its copy was "
            "not whole: start all ranks again from a checkpoint"
        )
    layers = list(newest.layers)
    layers[heir] += layers[lost]
    del layers[lost]
    ranks = tuple(rank_of[stage] for stage in range(stages) if stage != lost)
    return Takeover(
        ranks=ranks,
        layers=tuple(layers),
        step=step,
        lost=lost,
        keeper=keeper,
        has_copy=bool(copies),
        heir=heir,
    )


def join_states(states: tuple[Any, Any], order: Order) -> Any:  # noqa: ANN401 - trees of arrays
    """Return the state of a stage that has the modules of two stages.

    Args:
        states: of both stages. In each, the lists `layers` that are not in a list have a place for
            each module; all else, such as the optimizer's number of steps, is that of the second.
        order: the modules of the joined stage.

    Raises:
        UsageError: the first, which another rank has sent, is of another kind.

    >>> first, second = {"layers": ["a", "b"], "step": 7}, {"layers": ["c"], "step": 7}
    >>> join_states((first, second), [(0, 0), (0, 1), (1, 0)])
    {'layers': ['a', 'b', 'c'], 'step': 7}
    """
    first, second = states
    if not isinstance(second, dict):
        return second
    joined: dict[str, Any] = {}
    for name, below in cast("dict[str, Any]", second).items():
        if name != "layers":
            joined[name] = join_states((first.get(name), below), order)
            continue
        try:
            joined[name] = [states[which]["layers"][place] for which, place in order]
        except (LookupError, TypeError):
            raise UsageError(
                "the copy of the lost stage has other modules than this model: start the same "
                "program on all ranks"
            ) from None
    return joined
