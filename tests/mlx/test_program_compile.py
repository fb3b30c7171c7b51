"""`mx.compile` in a program that runs on several ranks."""

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from pmesh.mlx import ops, program
from pmesh.mlx.program import compile_what_does_not_wait
from tests.worlds.faults import Faults


class RunCounter:
    """A function that counts how often Python runs it: a compiled one runs in its trace only."""

    def __init__(self, *, communicates: bool = False) -> None:
        self.runs = 0
        self.communicates = communicates

    def __call__(self, x: mx.array) -> mx.array:
        self.runs += 1
        ops.calls[0] += self.communicates
        return x * 2


@pytest.fixture(autouse=True, scope="module")
def _compiled_before() -> None:
    """MLX traces the first function that a process compiles once more, at its second call."""
    compiled = mx.compile(mx.square)
    for number in (1.0, 2.0):
        compiled(mx.array(number))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> Callable[[bool], None]:
    monkeypatch.setattr(program, "_said", set())

    def share(yes: bool) -> None:  # noqa: FBT001
        faults.pretend(program, "is_shared", lambda: yes)

    share(True)  # noqa: FBT003
    return share


def runs_of(traced: RunCounter, **options: Any) -> int:  # noqa: ANN401 - as mx.compile has them
    """How often it runs in five calls."""
    compiled = compile_what_does_not_wait(traced, **options)
    for i in range(5):
        assert compiled(mx.array(float(i))).item() == 2 * i
    return traced.runs


def test_alone_everything_is_compiled(shared: Callable[[bool], None]) -> None:
    shared(False)  # noqa: FBT003
    assert runs_of(RunCounter(communicates=True)) == 1
    assert runs_of(RunCounter(), inputs=[], outputs=[]) == 1


@pytest.mark.usefixtures("shared")
def test_a_function_that_calls_no_other_rank_is_compiled_after_its_first_run() -> None:
    assert runs_of(RunCounter()) == 2


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("options", [{}, {"inputs": []}, {"outputs": []}])
def test_a_function_with_state_or_calls_is_never_traced_and_one_line_says_so(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pmesh"):
        assert runs_of(RunCounter(communicates=not options), **options) == 5
        assert runs_of(RunCounter(communicates=not options), **options) == 5
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("RunCounter runs uncompiled")


@pytest.mark.usefixtures("shared")
def test_it_is_used_as_a_decorator_as_mlxs_is() -> None:
    @compile_what_does_not_wait
    def double(x: mx.array) -> mx.array:
        """Twice x."""
        return x * 2

    assert double.__doc__ == "Twice x."
    assert double(mx.array(2.0)).item() == 4


@pytest.mark.parametrize("compiled", [mx.compile, compile_what_does_not_wait])
def test_in_a_class_it_does_not_become_a_method(compiled: Callable[[Any], Any]) -> None:
    class Layer:
        activate = compiled(lambda x: x * 2)

    assert Layer().activate(mx.array(3.0)).item() == 6
