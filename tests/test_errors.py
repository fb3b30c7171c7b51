import inspect
import traceback

import pytest

from pmesh import errors
from pmesh.errors import (
    NetworkError,
    OpTimedOut,
    PeerError,
    PmeshError,
    ProtocolError,
    RunError,
    UnsupportedArray,
    UsageError,
)

ALL = [error for _, error in inspect.getmembers(errors, inspect.isclass)]
FAMILIES = {UsageError: "caller", PeerError: "peer", NetworkError: "network", RunError: "run"}


@pytest.mark.parametrize("error", ALL)
def test_every_error_belongs_to_the_one_tree(error: type[Exception]) -> None:
    assert issubclass(error, PmeshError)


@pytest.mark.parametrize(("family", "fault"), FAMILIES.items())
def test_every_error_of_a_family_names_the_same_fault(family: type[PmeshError], fault: str) -> None:
    assert {error.fault for error in ALL if issubclass(error, family)} == {fault}


def test_every_error_has_exactly_one_family() -> None:
    roots = (*FAMILIES, ProtocolError)
    for error in set(ALL) - {PmeshError}:
        assert sum(issubclass(error, root) for root in roots) == 1, error


def test_every_error_says_in_its_docstring_what_it_means() -> None:
    assert all(error.__doc__ for error in ALL)


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    drawn = errors.__doc__ or ""
    for error in ALL:
        if PmeshError in error.__bases__:
            assert f"── {error.__name__}" in drawn


def test_scripts_that_know_only_builtin_errors_can_catch_these() -> None:
    assert issubclass(OpTimedOut, TimeoutError)
    assert issubclass(UnsupportedArray, TypeError)


def test_the_fault_of_garbage_is_the_peers_and_of_a_surprise_our_own() -> None:
    assert ProtocolError.fault == "peer"
    assert PmeshError.fault == "pmesh"


@pytest.mark.parametrize("error", [RunError, UnsupportedArray, OpTimedOut])
def test_what_others_have_written_into_a_message_is_printable(error: type[PmeshError]) -> None:
    raised = error("mac\x1b]0;x\x07 says:\npmesh: done\x9b")
    shown = traceback.format_exception(raised)
    assert shown[-1].endswith("mac�]0;x� says: pmesh: done�\n")
