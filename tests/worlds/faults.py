"""Faults that a test puts into calls of the program or of the system, in one place.

A fault that no call has met is an error: the test would have shown nothing. What a fixture
pretends for several tests need not be met by each of them.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import pytest
import trio

Real = Callable[..., Any]
"""What would have been called: the first argument of what is called around it."""


class InjectedFault:
    """It ends with the test, or with the `with` statement that it is the subject of."""

    def __init__(self, where: object, call: str, run: Callable[..., Any]) -> None:
        self._what = f"{getattr(where, '__name__', type(where).__name__)}.{call}"
        self._patch = pytest.MonkeyPatch()
        self._was_met = False

        def instead(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as the call's own
            self._was_met = True
            return run(*arguments, **named)

        self._patch.setattr(where, call, instead)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        self._patch.undo()

    def check(self, *, met: bool) -> None:
        assert self._was_met == met, f"{self._what}: called is {self._was_met}"


class Faults:
    """What calls do instead: `where` is a module, a class or an object that has such a `call`."""

    def __init__(self) -> None:
        self._all: list[InjectedFault] = []
        self._pretended: list[InjectedFault] = []
        self._forbidden: list[InjectedFault] = []
        self._limits = pytest.MonkeyPatch()

    def instead(self, where: object, call: str, run: Callable[..., Any]) -> InjectedFault:
        """Let `run` be called."""
        self._all.append(InjectedFault(where, call, run))
        return self._all[-1]

    def pretend(self, where: object, call: str, run: Callable[..., Any]) -> InjectedFault:
        """As `instead`, in a world in which a test need not get that far."""
        self._pretended.append(InjectedFault(where, call, run))
        return self._pretended[-1]

    def around(self, where: object, call: str, run: Callable[..., Any]) -> InjectedFault:
        """Let `run` be called: its first argument is the real call, the others are the call's."""
        return self.instead(where, call, partial(run, getattr(where, call)))

    def watch(self, where: object, call: str, run: Callable[..., Any]) -> InjectedFault:
        """As `around`, where the test itself says how often it is called, perhaps never."""
        return self.pretend(where, call, partial(run, getattr(where, call)))

    def forbid(self, where: object, call: str) -> None:
        """It must not be called, and is an error of the test even where nobody sees it fail."""
        self._forbidden.append(InjectedFault(where, call, _must_not_be_called))

    def fail(self, where: object, call: str, error: BaseException) -> InjectedFault:
        """Let each call raise this error, at once or when it is awaited."""

        def fail(*_: object, **__: object) -> None:
            raise error

        async def fail_later(*_: object, **__: object) -> None:
            await trio.lowlevel.checkpoint()
            raise error

        is_awaited = inspect.iscoroutinefunction(getattr(where, call))
        return self.instead(where, call, fail_later if is_awaited else fail)

    def hang(self, where: object, call: str) -> InjectedFault:
        """Let each call be awaited until somebody cancels it."""

        async def hang(*_: object, **__: object) -> None:
            await trio.sleep_forever()

        return self.instead(where, call, hang)

    def skip(self, where: object, call: str) -> InjectedFault:
        """Let each call do nothing."""
        return self.instead(where, call, lambda *_, **__: None)

    def limit(self, where: object, limit: str, value: float) -> None:
        """Let a limit, a time-out or a size of a module have a value that a test can reach."""
        assert limit.isupper()
        assert getattr(where, limit) != value, f"{limit} is {value} anyway"
        self._limits.setattr(where, limit, value)

    def undo(self) -> None:
        self._limits.undo()
        for fault in reversed(self._pretended + self._forbidden + self._all):
            fault.end()

    def end(self) -> None:
        """End what has not ended yet; all of them must have been met."""
        self.undo()
        for fault in self._all:
            fault.check(met=True)
        for fault in self._forbidden:
            fault.check(met=False)


def _must_not_be_called(*_: object, **__: object) -> None:
    raise AssertionError("it must not be called")
