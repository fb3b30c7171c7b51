"""The calls that wait at a coordinator until keys are set."""

from collections import OrderedDict
from collections.abc import Container
from typing import TypeAlias

from pmesh.ids import TrainerId
from pmesh.store.wire import Ask, Command, Get, Wait

CallId: TypeAlias = tuple[TrainerId, int]


def awaited(command: Command) -> tuple[str, ...]:
    """Return the keys that must be set before the command can be answered."""
    match command:
        case Get(key):
            return (key,)
        case Wait(keys):
            return keys
        case _:
            return ()


class Waiting:
    """Counts the keys that each call lacks.

    So a key that is set or deleted costs one step for each call that waits for it, no matter how
    many other keys these calls wait for.
    """

    def __init__(self) -> None:
        self._asked: dict[CallId, Ask] = {}
        self._lacks: dict[CallId, int] = {}
        self._calls: dict[str, dict[CallId, None]] = {}
        """For each key, set or not, the calls that wait for it."""
        self.ready = OrderedDict[CallId, Ask]()
        """Calls that lack no key any more; they are answered before any other command."""

    def __contains__(self, call: CallId) -> bool:
        return call in self._asked or call in self.ready

    def add(self, asked: Ask, keys: Container[str]) -> bool:
        """Let a call wait. Return False if all its keys are set."""
        call, wanted = (asked.trainer, asked.call), dict.fromkeys(awaited(asked.command))
        lacks = sum(key not in keys for key in wanted)
        if lacks:
            self._asked[call], self._lacks[call] = asked, lacks
            for key in wanted:
                self._calls.setdefault(key, {})[call] = None
        return lacks > 0

    def remove(self, call: CallId) -> Ask | None:
        """Forget a call, and return it; None if it does not wait."""
        return self._take(call) if call in self._asked else self.ready.pop(call, None)

    def note(self, key: str, *, is_set: bool) -> None:
        """Note that an unset key was set, or that a set key was deleted."""
        for call in list(self._calls.get(key, ())):
            self._lacks[call] += -1 if is_set else 1
            if not self._lacks[call]:
                self.ready[call] = self._take(call)

    def _take(self, call: CallId) -> Ask:
        asked = self._asked.pop(call)
        del self._lacks[call]
        for key in dict.fromkeys(awaited(asked.command)):
            calls = self._calls[key]
            del calls[call]
            if not calls:
                del self._calls[key]
        return asked
