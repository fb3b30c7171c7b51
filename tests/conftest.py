"""What a test needs of the machine, for all of them.

`make test` leaves tests that are marked slow to `make test-all`, which takes twice as long. They
are short forms of campaigns, and tests of whole processes where a test in one process covers the
same rule.
"""

import functools
import math
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from trio.testing import MockClock
from xdist.scheduler.loadscope import LoadScopeScheduling

import pmesh
from pmesh.net.lanes import executor
from tests.worlds.watched_agent import WatchedAgent, watched_agent
from tools.lab.net import why_not

# A busy machine is no finding. A blob in the log replays what CI found: its database is not kept.
settings.register_profile("all", deadline=None, print_blob=True)
settings.register_profile("quick", settings.get_profile("all"), max_examples=40)

# Else each of the hundreds of processes that the tests start compiles the whole package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

OF_SUBPROCESSES = "COVERAGE_PROCESS_CONFIG"  # tells new processes to measure themselves
NEEDS_THE_MACHINE = ("tests/e2e/", "tests/tools/", "tests/docs/test_readme.py")


@functools.cache
def _why_no_network_namespaces() -> str | None:
    return why_not()


class _OneMachine(LoadScopeScheduling):  # type: ignore[misc] # it has no types
    """A file's tests stay together; those with agents of their own go one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return "the machine" if _needs_the_machine(nodeid) else nodeid.partition("::")[0]


def _needs_the_machine(nodeid: str) -> bool:
    return nodeid.startswith(NEEDS_THE_MACHINE)


def pytest_configure(config: pytest.Config) -> None:
    """`make test` tries fewer examples of a property than `make test-all`."""
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "all")


@pytest.hookimpl(optionalhook=True)  # where xdist is not used
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:  # noqa: ANN401 - xdist's own, without a name
    return _OneMachine(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a test that is slow or needs the machine, and its programs, without measuring coverage.

    Measuring takes three times as long. The other tests reach the floors, together with a few slow
    ones that are marked `measured`. pytest-cov has the mark `no_cover` for this, but in a worker of
    xdist it begins two measurements, and stops one.
    """
    trace = sys.gettrace()
    slow, measured = map(item.get_closest_marker, ("slow", "measured"))
    unmeasured = slow is not None or _needs_the_machine(item.nodeid)
    if measured is not None or not unmeasured or trace is None:
        return (yield)
    config = os.environ.pop(OF_SUBPROCESSES, None)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(trace)
        if config is not None:
            os.environ[OF_SUBPROCESSES] = config


@pytest.fixture(autouse=True, scope="session")
def _signals_are_heeded() -> Iterator[None]:
    """Children inherit signals that are ignored, as in a shell's background or under nohup."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("netns") is None:
        return
    reason = _why_no_network_namespaces()
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"in CI these tests run: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps when no task has anything to do doesn't see that threads have."""
    monkeypatch.setattr(executor, "THREADS_FROM_BYTES", math.inf)
    monkeypatch.setattr(executor, "COMPUTING_THREADS_FROM_BYTES", math.inf)


@pytest.fixture
def clock(no_threads: None) -> MockClock:  # noqa: ARG001 - a fixture
    """Jumps whenever no socket has anything for anybody: deadlines cost whole agents nothing."""
    return MockClock(autojump_threshold=0)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[WatchedAgent]:
    with watched_agent(tmp_path / "home") as running:
        yield running


@pytest.fixture
def mesh(agent: WatchedAgent) -> Iterator[pmesh.Mesh]:
    with pmesh.connect("job", home=agent.home) as mesh:
        yield mesh
