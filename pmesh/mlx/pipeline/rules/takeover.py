"""If nobody comes in place of a lost rank, the layers are dealt anew among those that are left.

Each of these has the state of its own stage, and one of them a copy of the lost stage's. A state is
of the form ``{"weights": {"layers": [...]}, "optimizer": {"layers": [...], "step": ...}}``: in
`layers` each module of the stage has its place, and all else belongs to no module. Random numbers
belong to the rank, in a part of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from pmesh.errors import RosterChanged, UsageError
from pmesh.mlx.pipeline.rules.meeting import Holding, latest_common, neighbour, replaced, stages_of

State: TypeAlias = Mapping[str, Any]
RANDOM = "random"
"""The part of a state that has no layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """What follows from the holdings of the ranks that are left, the same on each.

    Stages have the numbers from before the loss here.
    """

    left: tuple[int, ...]
    """The stages whose ranks are left, in their order."""
    ranks: tuple[int, ...]
    """The rank of each of them."""
    before: tuple[int, ...]
    """How many layers each stage had before the loss, lost ones too."""
    joined: tuple[int, ...]
    """How many each stage that is left has if one beside a lost one takes all of its layers."""
    step: int
    """Go on from the states after this step."""
    keepers: dict[int, int]
    """For each lost stage, the one whose rank has the copy of its state. None before the first
    copy, when the state is that of the model as it was made."""

    def place_of(self, stage: int) -> int:
        """Return the number that a stage has from now on."""
        return self.left.index(stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Modules of one stage whose state a rank gets.

    Stages have the numbers from before the loss here, too.
    """

    giver: int
    """The stage whose rank has it: if it is the receiver's, nothing is sent."""
    receiver: int
    """The stage whose rank gets it."""
    stage: int
    """The stage that the modules were in."""
    modules: tuple[int, ...]
    """Their numbers in the model."""
    places: tuple[int, ...]
    """Their places in that stage."""

    @property
    def between(self) -> tuple[int, int]:
        """The giver and the receiver."""
        return self.giver, self.receiver


def is_due(holdings: Sequence[Holding]) -> bool:
    """Return True if stages have no rank, and all others have waited long enough for one.

    Two neighbours are waited for without end: a rank that was only cut off still has its stage.
    """
    stages = stages_of(holdings)
    left = {each.stage for each in holdings}
    return (
        len(holdings) < stages
        and not replaced(holdings)
        and all(each.meetings and each.has_waited for each in holdings)
        and any(each.layers for each in holdings)
        and all(stage in left or neighbour(stage, stages) in left for stage in range(stages))
    )


def plan_takeover(holdings: Sequence[Holding]) -> Takeover:
    """Find who has the states of all layers, and the step from which all go on.

    Args:
        holdings: of each rank; a takeover `is_due`.

    Raises:
        RosterChanged: the copy of a lost stage's state is lost, too.
    """
    newest = max(holdings, key=lambda each: (each.meetings, each.layers))
    stages, joined = len(newest.machines), list(newest.layers)
    rank_of = {each.stage: rank for rank, each in enumerate(holdings)}
    lost = [stage for stage in range(stages) if stage not in rank_of]
    copies = {stage: {*holdings[rank_of[neighbour(stage, stages)]].copies} for stage in lost}
    step = latest_common([*({*h.own} for h in holdings), *(has or {0} for has in copies.values())])
    if step is None:
        without = min(lost, key=lambda stage: max(copies[stage], default=0))
        raise RosterChanged(
            f"stage {without} of the pipeline is lost with {newest.machines[without]}, and its "
            "copy was not whole: start all ranks again from a checkpoint"
        )
    for stage in reversed(lost):
        heir = stage + 1 if stage < stages - 1 else stage - 1
        joined[heir] += joined[stage]
    left = tuple(sorted(rank_of))
    return Takeover(
        left=left,
        ranks=tuple(rank_of[stage] for stage in left),
        before=newest.layers,
        joined=tuple(joined[stage] for stage in left),
        step=step,
        keepers={stage: neighbour(stage, stages) for stage in lost if copies[stage]},
    )


def plan_parcels(
    plan: Takeover, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> list[Parcel]:
    """Return who gives the state of which modules to whom, so that each stage has all of its own.

    What a rank has already it keeps. A module that is tied is in several stages with the same
    state: any of them gives it.

    Args:
        plan: who is left. Without a copy of a lost stage its state is that of the model as it was
            made: each receiver gives that to itself.
        before: the modules of each stage before the loss, by their numbers in the model.
        after: those of each stage that is left, from now on.

    >>> plan = Takeover(left=(0, 2), ranks=(0, 1), before=(1, 1, 1), joined=(1, 2), step=7,
    ...                 keepers={1: 2})
    >>> for parcel in plan_parcels(plan, [[0], [1], [2]], [[0, 1], [2]]):
    ...     print(parcel.between, parcel.stage, parcel.modules, parcel.places)
    (0, 0) 0 (0,) (0,)
    (2, 0) 1 (1,) (0,)
    (2, 2) 2 (2,) (0,)
    """
    parcels = list[Parcel]()
    for receiver, wanted in zip(plan.left, after, strict=True):
        taken = dict[int, list[int]]()
        for module in wanted:
            stages = [stage for stage, modules in enumerate(before) if module in modules]
            best = min(stages, key=lambda stage: (stage != receiver, stage not in plan.left))
            taken.setdefault(best, []).append(module)
        for stage, modules in taken.items():
            giver = stage if stage in plan.left else plan.keepers.get(stage, receiver)
            parcel = Parcel(
                giver=giver,
                receiver=receiver,
                stage=stage,
                modules=tuple(modules),
                places=tuple(before[stage].index(module) for module in modules),
            )
            parcels.append(parcel)
    return parcels


def check_divisible(optimizer: str, state: State) -> None:
    """Raise UsageError unless a new optimizer's state can be dealt out by layers.

    >>> check_divisible("Adam", {"step": 0, "layers": [{"weight": {"m": 0, "v": 0}}]})
    >>> check_divisible("Odd", {"states": [{"layers": []}]})
    Traceback (most recent call last):
    pmesh.errors.UsageError: fewer_after_s deals an optimizer's state out by layers, and Odd has \
'states', too: leave fewer_after_s out, or take another optimizer
    """
    odd = [name for name, x in state.items() if name != "layers" and isinstance(x, dict | list)]
    if odd or "layers" not in state:
        has = f"has {odd[0]!r}, too" if odd else "has no 'layers'"
        raise UsageError(
            f"fewer_after_s deals an optimizer's state out by layers, and {optimizer} {has}: "
            "leave fewer_after_s out, or take another optimizer"
        )


def pick_modules(state: State, places: Sequence[int]) -> dict[str, Any]:
    """Return the state of the modules at these places of a stage, and nothing else.

    Raises:
        UsageError: the state, which another rank has sent, is of another kind.

    >>> pick_modules({"optimizer": {"layers": ["a", "b", "c"], "step": 7}}, [0, 2])
    {'optimizer': {'layers': ['a', 'c']}}
    """
    try:
        return {
            name: {"layers": [part["layers"][place] for place in places]}
            for name, part in state.items()
            if name != RANDOM
        }
    except (LookupError, TypeError):
        raise UsageError(
            "the copy of the lost stage has other modules than this model: start the same "
            "program on all ranks"
        ) from None


def join_modules(
    own: State, found: Sequence[tuple[Sequence[int], State]], modules: Sequence[int]
) -> dict[str, Any]:
    """Return the state of a stage with these modules.

    Args:
        own: the state of this rank's stage before; what belongs to no module is taken from it.
        found: modules by their numbers, and their state as `pick_modules` returns it.
        modules: those of the stage.

    >>> own = {"optimizer": {"layers": ["a"], "step": 7}}
    >>> found = [([1], {"optimizer": {"layers": ["b"]}}), ([0], {"optimizer": {"layers": ["a"]}})]
    >>> join_modules(own, found, [0, 1])
    {'optimizer': {'layers': ['a', 'b'], 'step': 7}}
    """
    joined = dict[str, Any]()
    for name, part in own.items():
        if name == RANDOM:
            joined[name] = part
            continue
        of = {
            module: each
            for numbers, state in found
            for module, each in zip(numbers, state[name]["layers"], strict=True)
        }
        joined[name] = {**cast("State", part), "layers": [of[module] for module in modules]}
    return joined
