"""What a test needs of the machine, for all of them.

`make test` leaves tests that are marked slow to `make test-all`, which takes twice as long. They
are short forms of campaigns, tests of whole processes where a test in one process covers the same
rule, and those whose programs import torch or are compiled first.
"""

import functools
import gc
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import settings
from trio.testing import MockClock
from xdist.scheduler.loadscope import LoadScopeScheduling

import pmesh
from pmesh.net.lanes import executor
from tests.worlds.examples import ALL, QUICK
from tests.worlds.faults import Faults
from tests.worlds.watched_agent import WatchedAgent, watched_agent
from tools.lab.net import why_not

# A busy machine is no finding. A blob in the log replays what CI found: its database is not kept.
settings.register_profile("all", deadline=None, print_blob=True, max_examples=ALL)
settings.register_profile("quick", settings.get_profile("all"), max_examples=QUICK)

# Else each of the hundreds of processes that the tests start compiles the whole package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

OF_SUBPROCESSES = "COVERAGE_PROCESS_CONFIG"  # tells new processes to measure themselves
NEEDS_THE_MACHINE = ("tests/e2e/", "tests/tools/", "tests/docs/test_readme.py")
TESTS = Path(__file__).parent


@functools.cache
def _why_no_network_namespaces() -> str | None:
    return why_not()


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@functools.cache
def _scope_of(file: str) -> str:
    """What one worker runs: a file, or one of the two lanes of those that need the machine.

    Labs are counted and cleaned up for the whole machine, so those who make some share a lane.
    Those of torch share the processes that have imported it, Lightning and transformers.
    """
    if file.startswith("tests/torch/"):
        return "torch"
    if not file.startswith(NEEDS_THE_MACHINE):
        return file
    makes_labs = "mark.netns" in (TESTS.parent / file).read_text(encoding="utf-8")
    return "networks" if makes_labs else "loopback"


class _FilesInLanes(LoadScopeScheduling):  # type: ignore[misc] # it has no types
    """A file's tests stay together; those with agents of their own go in two lanes."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope_of(_file_of(nodeid))


def _is_quick(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "not slow")


def pytest_configure(config: pytest.Config) -> None:
    """`make test` tries fewer examples of a property than `make test-all`."""
    settings.load_profile("quick" if _is_quick(config) else "all")


@pytest.hookimpl(optionalhook=True)  # where xdist is not used
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:  # noqa: ANN401 - xdist's own, without a name
    config.option.loadscopereorder = False  # they come in the order that follows
    return _FilesInLanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What has the most slow tests comes first: begun last, it would leave the other cores idle."""
    tests: Counter[str] = Counter()
    slow_ones: Counter[str] = Counter()
    for item in items:
        scope = _scope_of(_file_of(item.nodeid))
        tests[scope] += 1
        slow_ones[scope] += item.get_closest_marker("slow") is not None

    def place(item: pytest.Item) -> tuple[int, int, str]:
        scope = _scope_of(_file_of(item.nodeid))
        return -slow_ones[scope], -tests[scope], scope

    items.sort(key=place)


def pytest_collection_finish() -> None:
    _freeze_what_stays()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """After the last test of a file nothing of the file is in use."""
    yield
    if nextitem is not None and _file_of(nextitem.nodeid) != _file_of(item.nodeid):
        _freeze_what_stays()


def _freeze_what_stays() -> None:
    """What has been imported, and what pytest has noted, is no garbage: nobody need look at it.

    Of torch, transformers and 10,000 tests there are millions of objects. A collection took a
    second or two in the middle of a run, and tests that count what is left make two of them.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a test that is slow or needs the machine, and its programs, without measuring coverage.

    So do those that are marked `unmeasured`: measuring takes two to three times as long. The other
    tests reach the floors, with a few slow ones that are marked `measured`. pytest-cov has the mark
    `no_cover` for this, but in a worker of xdist it begins two measurements, and stops one.
    """
    trace = sys.gettrace()
    marks = {mark.name for mark in item.iter_markers()}
    unmeasured = marks & {"slow", "unmeasured"} or item.nodeid.startswith(NEEDS_THE_MACHINE)
    if "measured" in marks or not unmeasured or trace is None:
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


@pytest.fixture
def is_quick(request: pytest.FixtureRequest) -> bool:
    """Whether `make test` runs: a test may try fewer examples then, and needs no second form."""
    return _is_quick(request.config)


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
def faults() -> Iterator[Faults]:
    made = Faults()
    yield made
    made.end()


@pytest.fixture
def no_threads(faults: Faults) -> None:
    """A clock that jumps when no task has anything to do doesn't see that threads have."""
    faults.limit(executor, "THREADS_FROM_BYTES", math.inf)
    faults.limit(executor, "COMPUTING_THREADS_FROM_BYTES", math.inf)


@pytest.fixture
def threads_run_at_once(faults: Faults) -> None:
    """As `no_threads`, for what an agent does in a thread of trio, such as writing to its disk."""

    async def run_here(call: Callable[..., object], *arguments: object, **_: object) -> object:
        await trio.lowlevel.checkpoint()
        return call(*arguments)

    faults.pretend(trio.to_thread, "run_sync", run_here)


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
