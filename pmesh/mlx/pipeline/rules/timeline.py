"""How long a schedule takes, and what part of it the ranks wait: the bubble."""

from collections.abc import Callable, Iterator, Mapping

from pmesh.mlx.pipeline.rules.schedules import Action, Schedule

TIMES: Mapping[str, float] = {"F": 1.0, "B": 1.0, "W": 1.0}
"""How long an action takes if all three take as long, as in torch's tables."""


def needs(action: Action, stages: int) -> Iterator[Action]:
    """Yield the actions that must have ended before this one begins.

    >>> print(*needs(Action("B", 1, 0), stages=3))
    F1.0 B2.0
    """
    kind, stage, micro_batch = action
    if kind == "F" and stage:
        yield Action("F", stage - 1, micro_batch)
    if kind == "B":
        yield Action("F", stage, micro_batch)
        if stage < stages - 1:
            yield Action("B", stage + 1, micro_batch)
    if kind == "W":
        yield Action("B", stage, micro_batch)


def ends(
    schedule: Schedule, seconds: Callable[[Action], float], travel_s: float = 0.0
) -> dict[Action, float]:
    """Return when each action ends.

    Args:
        schedule: the actions of each rank.
        seconds: how long an action takes.
        travel_s: how long a message takes from a rank to another.

    Raises:
        ValueError: actions wait for each other, or for one that is in no list.
    """
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    found: dict[Action, float] = {}
    next_of = [0] * len(schedule)
    free_at = [0.0] * len(schedule)
    total = sum(map(len, schedule))
    while len(found) < total:
        before = len(found)
        for rank, actions in enumerate(schedule):
            while next_of[rank] < len(actions):
                action = actions[next_of[rank]]
                needed = tuple(needs(action, stages))
                if not all(other in found for other in needed):
                    break
                come = (
                    found[other] + travel_s * ((other.stage - action.stage) % len(schedule) != 0)
                    for other in needed
                )
                begin = max([free_at[rank], *come])
                found[action] = free_at[rank] = begin + seconds(action)
                next_of[rank] += 1
        if len(found) == before:
            stuck = [
                str(actions[at])
                for actions, at in zip(schedule, next_of, strict=True)
                if at < len(actions)
            ]
            raise ValueError(f"these actions wait for each other: {', '.join(stuck)}")
    return found


def bubble(schedule: Schedule, times: Mapping[str, float] = TIMES) -> float:
    """Return the part of the time, from 0 to 1, in which the ranks wait on average.

    A B without a W of its own takes the time of both.

    >>> from pmesh.mlx.pipeline.rules.schedules import one_f_one_b
    >>> round(bubble(one_f_one_b(4, 12)), 9)  # (P - 1) / (M + P - 1)
    0.2
    """
    split = any(action.kind == "W" for actions in schedule for action in actions)
    whole = {**times, "B": times["B"] if split else times["B"] + times["W"]}

    def seconds(action: Action) -> float:
        return whole[action.kind]

    makespan = max(ends(schedule, seconds).values())
    busy = sum(seconds(action) for actions in schedule for action in actions)
    return 1 - busy / (makespan * len(schedule))
