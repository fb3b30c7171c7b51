"""With the native library, without it, and with one end of each."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from pmesh import native
from tests.worlds.faults import Faults
from tests.worlds.system import without_library


@pytest.fixture(params=["library", "Python"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nullcontext() if request.param == "library" else without_library(monkeypatch):
        yield


@pytest.fixture(params=["library", "Python", "sender in Python", "receiver in Python"])
def ends(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> Iterator[None]:
    """Who moves the records of lanes over several connections: the sender's end is made first."""
    if request.param == "Python":
        with without_library(monkeypatch):
            yield
        return
    if request.param != "library":
        at_ends = [native.library(), None]
        in_turns = itertools.cycle(at_ends if request.param.startswith("r") else at_ends[::-1])
        faults.instead(native, "library", lambda: next(in_turns))
    yield
