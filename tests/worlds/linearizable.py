"""A store as one sees it from outside: an executable model, and a check of histories against it.

The check is that of Wing and Gong, "Testing and Verifying Concurrent Objects" (1993), with the memo
of Lowe, "Testing for linearizability" (2017).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pmesh.store.wire import (
    Add,
    Answer,
    Append,
    Check,
    Command,
    CompareSet,
    Delete,
    Get,
    Keys,
    Set,
    Wait,
)

State: TypeAlias = frozenset[tuple[str, bytes]]


def carry_out(  # noqa: C901 - one arm for each command
    state: State, command: Command
) -> tuple[State, object] | None:
    """Return the next state and the answer's value; None if the command has to wait."""
    held = dict(state)
    value: object = None
    match command:
        case Set(key, new):
            held[key] = new
        case Add(key, amount):
            value = int(held.get(key, b"0")) + amount
            held[key] = str(value).encode()
        case CompareSet(key, expected, desired):
            value = held.get(key)
            if (value or b"") == expected:
                held[key], value = desired, True
        case Append(key, more):
            held[key] = held.get(key, b"") + more
        case Delete(key):
            value = held.pop(key, None) is not None
        case Get(key):
            if key not in held:
                return None
            value = held[key]
        case Wait(keys):
            if not set(keys) <= held.keys():
                return None
        case Check(keys):
            value = set(keys) <= held.keys()
        case Keys(prefix):
            value = tuple(sorted(key for key in held if key.startswith(prefix)))
    return frozenset(held.items()), value


@dataclass(slots=True, eq=False)
class ObservedCall:
    """A call as its caller has seen it."""

    command: Command
    began: int
    ended: float = math.inf
    """It may take effect at any time, or never, while nobody has got its answer."""
    answer: Answer | None = None

    @property
    def has_only_looked(self) -> bool:
        """True if its answer shows that it has changed nothing."""
        swaps = isinstance(self.command, CompareSet)
        looks = isinstance(self.command, LOOKS)
        return self.answer is not None and (looks or (swaps and self.answer.value is not True))


LOOKS = (Get, Wait, Check, Keys)


def is_linearizable(calls: list[ObservedCall]) -> bool:
    """Whether the calls could have been carried out one by one, each while it was under way."""
    # Those without an answer first: they are tried last, as a stack is read from its end.
    calls = sorted(
        (c for c in calls if c.answer is not None or not isinstance(c.command, LOOKS)),
        key=lambda call: (-call.ended, call.began),
    )
    answered = sum(1 << i for i, call in enumerate(calls) if call.answer is not None)
    seen = set[tuple[int, State]]()
    left = [(0, State())]
    while left:
        done, state = left.pop()
        if done & answered == answered:
            return True
        steps = list(_steps(calls, done, state))
        left += [step for step in steps if step not in seen]
        seen.update(steps)
    return False


def _steps(calls: list[ObservedCall], done: int, state: State) -> Iterator[tuple[int, State]]:
    """Carry out each call that can be the next: before whose begin no other has ended.

    One that has only looked, and has seen what is there now, is taken at once: no other order can
    do without it.
    """
    open_calls = [i for i in range(len(calls)) if not done >> i & 1]
    first_end = min(calls[i].ended for i in open_calls)
    steps = list[tuple[int, State]]()
    for i in open_calls:
        call = calls[i]
        after = carry_out(state, call.command) if call.began <= first_end else None
        if after is not None and (call.answer is None or call.answer.value == after[1]):
            steps.append((done | 1 << i, after[0]))
            if call.has_only_looked:
                return iter(steps[-1:])
    return iter(steps)
