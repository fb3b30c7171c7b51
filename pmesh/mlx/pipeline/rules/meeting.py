"""After a loss the ranks meet: who has which stage, and from which step do all go on?

A state of a stage is its weights and its optimizer's state after so many steps. Each rank keeps
the state of its own stage after this step and after the one before, and a copy of that of the stage
before it, which has the first stage's neighbour in the last one. So while a rank with its stage is
lost, there is a step of which all states are left.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from pmesh.core.values import MAX_TRAINERS
from pmesh.errors import RosterChanged, UsageError

MOST_LAYERS = 4096  # GPT-4 is said to have 120
Name = Annotated[str, msgspec.Meta(max_length=256)]
Step = Annotated[int, msgspec.Meta(ge=0)]
States = Annotated[tuple[Step, ...], msgspec.Meta(max_length=4)]


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """What a rank brings to a meeting."""

    meetings: Step = 0
    """How many meetings it was in: it is new, or was away, if others were in more."""
    stage: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """The stage that the last meeting gave it; -1 if there was none."""
    own: States = ()
    """The steps after which it has the state of its stage. A new rank can make that after step 0 of
    any stage."""
    copies: States = ()
    """The steps after which it has the state of the stage before."""
    layers: Annotated[tuple[Step, ...], msgspec.Meta(max_length=MOST_LAYERS)] = ()
    """How many layers each stage has; empty if it does not know."""
    machines: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_TRAINERS)] = ()
    """The machine that had each stage; empty if it is new."""
    has_waited: bool = False
    """True if it has waited long enough for a rank in place of a lost one (`takeover`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What follows from the holdings of all ranks, the same on each."""

    ranks: tuple[int, ...]
    """The rank that has each stage."""
    layers: tuple[int, ...]
    """How many layers each stage has; empty if nobody knows yet."""
    step: int
    """Go on from the states after this step."""
    receivers: tuple[int, ...]
    """The stages whose rank gets the state from the rank of the next stage."""


def neighbour(stage: int, stages: int) -> int:
    """Return the stage whose rank keeps a copy of this stage's state."""
    return (stage + 1) % stages


def stages_of(holdings: Sequence[Holding]) -> int:
    """Return how many ranks there must be: as many as in the latest meeting."""
    newest = max(holdings, key=lambda each: each.meetings)
    return len(newest.machines) or len(holdings)


def replaced(holdings: Sequence[Holding]) -> set[int]:
    """Return the ranks that were away while another rank got their stage."""
    latest, stages = dict[int, int](), stages_of(holdings)
    for each in holdings:
        latest[each.stage] = max(each.meetings, latest.get(each.stage, 0))
    return {
        rank
        for rank, each in enumerate(holdings)
        if each.meetings < latest[each.stage] or each.stage >= stages
    }


def is_superfluous(rank: int, holdings: Sequence[Holding]) -> bool:
    """Return True if the rank is new, and there are enough others for all stages."""
    placed = sum(each.meetings > 0 for each in holdings) - len(replaced(holdings))
    room = stages_of(holdings) - placed
    new = [other for other, each in enumerate(holdings) if not each.meetings]
    return rank in new[max(0, room) :]


def is_settled(holdings: Sequence[Holding], steps: int) -> bool:
    """Return True if all were in the last meeting and have made so many steps."""
    met = {each.meetings for each in holdings}
    return (
        len(met) == 1
        and 0 not in met
        and all(max(each.own, default=0) >= steps for each in holdings)
    )


def agree(holdings: Sequence[Holding], names: Sequence[str]) -> Agreement:
    """Give each rank a stage, and choose the latest step of which the states of all are left.

    A rank keeps its stage. A new one takes that of a lost rank: if it can, of its own machine.

    Args:
        holdings: of each rank, as many as there are stages; none of them is `replaced`.
        names: the machine of each rank.

    Raises:
        UsageError: at the first meeting, ranks have different numbers of layers for the stages.
        RosterChanged: the state of a stage is lost.

    >>> been = Holding(1, 1, own=(6, 7), copies=(6,), machines=("mac-1", "mac-2"))
    >>> agree([been, Holding(own=(0,))], ["mac-2", "mac-1"])
    Agreement(ranks=(1, 0), layers=(), step=6, receivers=(0,))
    """
    stages = len(holdings)
    latest = max(each.meetings for each in holdings)
    layers = max(each.layers for each in holdings if each.meetings == latest)
    if not latest:
        if len(told := sorted({each.layers for each in holdings if each.layers})) > 1:
            raise UsageError(
                f"some ranks have by={list(told[0])}, others {list(told[1])}: pass the same"
            )
        return Agreement(ranks=tuple(range(stages)), layers=layers, step=0, receivers=())
    rank_of = {h.stage: rank for rank, h in enumerate(holdings) if h.meetings}
    before = max(each.machines for each in holdings if each.meetings == latest)
    new = [rank for rank, holding in enumerate(holdings) if not holding.meetings]
    lost = [stage for stage in range(stages) if stage not in rank_of]
    at_home = {stage: [r for r in new if names[r] == before[stage]] for stage in lost}
    for stage in sorted(lost, key=lambda stage: not at_home[stage]):
        rank_of[stage] = next((r for r in at_home[stage] if r in new), new[0])
        new.remove(rank_of[stage])
    ranks = tuple(rank_of[stage] for stage in range(stages))
    copies = [holdings[ranks[neighbour(stage, stages)]].copies for stage in range(stages)]
    own = [holdings[rank].own for rank in ranks]
    step = latest_common({*o, *c} for o, c in zip(own, copies, strict=True))
    if step is None:
        without = max(
            range(stages), key=lambda s: (s in lost, -max((*own[s], *copies[s]), default=-1))
        )
        raise RosterChanged(
            f"stage {without} of the pipeline is lost, as {before[without]} was lost together with "
            "the rank that had its copy: start all ranks again from a checkpoint"
        )
    receivers = tuple(s for s in range(stages) if step not in own[s])
    return Agreement(ranks=ranks, layers=layers, step=step, receivers=receivers)


def latest_common(steps: Iterable[set[int]]) -> int | None:
    """Return the latest step that is in all of these sets, if any."""
    first, *others = steps
    return max(first.intersection(*others), default=None)
