"""What a test needs of the machine, for all of them."""

import functools
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from tools.lab.net import why_not

# A busy machine is no finding. A blob in the log replays what CI found: its database is not kept.
settings.register_profile("untimed", deadline=None, print_blob=True)
settings.load_profile("untimed")

STORMS = (
    "tests/agent/jobs/test_storms.py::test_whatever_dies_every_op_has_one_result_and_nothing_hangs"
)
STORE_HISTORIES = (
    "tests/agent/store/test_histories.py::"
    "test_with_a_majority_all_calls_on_all_sides_are_as_on_one_machine"
)
OF_SUBPROCESSES = "COVERAGE_PROCESS_CONFIG"  # tells new processes to measure themselves
NEEDS_THE_MACHINE = ("tests/e2e/", "tests/tools/", "tests/docs/test_readme.py")
# `make test` leaves these to `make test-all`, which takes twice as long: short forms of campaigns,
# and tests of whole processes where one in a single process tests the same rule.
SLOW = (
    *("tests/agent/mesh/test_fuzz.py", "tests/simulation/test_simulation.py"),
    "tests/simulation/test_mutations.py::test_random_histories_notice_that_a_rule_is_missing",
    "tests/simulation/test_mutations.py::test_an_aimed_history_goes_well[a_ring_changes",
    "tests/simulation/test_mutations.py::test_an_aimed_history_goes_well[noise_does_not_change",
    "tests/simulation/test_mutations.py::test_an_aimed_history_notices_that_a_rule_is_missing[no_ring",
    "tests/simulation/test_mutations.py::test_an_aimed_history_notices_that_a_rule_is_missing[ring_f",
    *(f"{STORMS}[{seed}]" for seed in (1, 2)),
    *(f"{STORE_HISTORIES}[{seed}]" for seed in range(4, 8)),
    *("tests/tools/test_bench.py", "tests/tools/test_chaos.py", "tests/tools/test_training.py"),
    *("tests/tools/test_launches.py", "tests/tools/test_fuzz.py"),
    *("tests/tools/test_local_updates.py", "tests/tools/test_lora.py::test_killed_ranks_come_back"),
    "tests/tools/test_goodput.py::test_after",
    "tests/tools/test_torch_kills.py::test_a_short_campaign",
    *("tests/torch/test_elastic.py", "tests/torch/test_starts.py"),
    *("tests/tools/test_mlx_speed.py", "tests/tools/test_networks.py"),
    *("tests/tools/test_pipelined.py", "tests/tools/test_sharded.py"),
    "tests/tools/test_torch_suite.py",
    "tests/agent/lanes/test_edge_costs.py::test_what_is_known_is_not_measured_again",
    "tests/agent/mesh/test_relays.py::test_what_is_relayed_counts_once",
    "tests/agent/mesh/test_probing.py::test_machines_that_train_together",
    "tests/agent/mesh/test_probing.py::test_a_job_takes_at_most_a_fiftieth",
    "tests/mlx_lm/test_training.py::test_a_newcomer",
    *("tests/client/test_examples.py", "tests/docs/test_readme.py", "tests/e2e/"),
    "tests/docs/test_training_pages.py",
)
NOT_SLOW = ("tests/e2e/test_lan.py", "tests/e2e/test_losses.py", "tests/e2e/test_jobs.py")


@functools.cache
def _why_no_network_namespaces() -> str | None:
    return why_not()


class _OneMachine(LoadScopeScheduling):  # type: ignore[misc] # it has no types
    """A file's tests stay together; those with agents of their own go one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "the machine" if path.startswith(NEEDS_THE_MACHINE) else path


@pytest.hookimpl(optionalhook=True)  # where xdist is not used
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:  # noqa: ANN401 - xdist's own, without a name
    return _OneMachine(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a slow test, and its programs, without measuring coverage.

    To measure it makes a test three times as slow; what `make test` runs reaches the floors alone.
    pytest-cov has `no_cover` for this. In a worker of xdist it measures twice and stops once.
    """
    trace = sys.gettrace()
    if item.get_closest_marker("slow") is None or trace is None:
        return (yield)
    config = os.environ.pop(OF_SUBPROCESSES, None)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(trace)
        if config is not None:
            os.environ[OF_SUBPROCESSES] = config


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW) and not item.nodeid.startswith(NOT_SLOW):
            item.add_marker(pytest.mark.slow)


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
