"""torch's own suite of `torch.distributed`, on gloo and on pmesh: what passes there passes here?

The cases are those of `DistributedTest._DistTestBase` in torch's installed test modules. Three
ranks run each case in turn, in one process each, over a process group made anew for it. The
decorators that pick cases by the backend's name read gloo, so pmesh runs what gloo does. In a case
that compares the name itself, pmesh stands where gloo does: the table marks it. What the profiler
has seen is checked only of the backends that the suite names, as events that are asynchronous,
which none can be that Python makes.
"""

import contextlib
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from pmesh.testing import agent_in_a_thread
from tools.lab.call import words_for
from tools.lab.commands import Flag, LabError
from tools.lab.program import LabProgram, await_that

RANKS = 3
_RESULT = re.compile("^RESULT (.*)")
_ENDED = "its process has ended"
CASE_S = 60.0  # torch's own cases have timeouts of at most 10 s; a hang is a failure
_SUITE = "torch.testing._internal.distributed.distributed_test"
_NAMED = ("monitored_barrier", "Backend_enum", "_no_sync")
"""Parts of the names of cases that compare the backend's name with gloo's."""


def cases_named(parts: Sequence[str]) -> list[str]:
    os.environ.setdefault("BACKEND", "gloo")
    os.environ.setdefault("WORLD_SIZE", str(RANKS))
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    base = importlib.import_module(_SUITE).DistributedTest._DistTestBase
    cases = [name for name in sorted(dir(base)) if name.startswith("test_")]
    return [name for name in cases if any(part in name for part in parts)]


class Workers:
    """The ranks of one backend, as processes that live until one hangs."""

    def __init__(self, backend: str, home: str, folder: str) -> None:
        self._environment = dict(
            os.environ,
            BACKEND="gloo",
            WORLD_SIZE=str(RANKS),
            PMESH_HOME=home,
            TEMP_DIR=folder,
            OMP_NUM_THREADS="1",
        )
        self._backend = backend
        self._folder = folder
        self._ranks: list[LabProgram] = []
        self._count = 0

    def run(self, case: str) -> str:
        """Run a case on all ranks: "passed", "skipped", or the error of a rank that failed."""
        if not self._ranks:
            self._start()
        self._count += 1
        file = str(Path(self._folder, f"store-{self._count}"))
        barrier = Path(self._folder, "barrier")
        for old in barrier.iterdir():
            old.unlink()
        before = [len(rank.found(_RESULT)) for rank in self._ranks]
        for rank in self._ranks:
            rank.tell(json.dumps([case, file]))

        def found() -> list[list[re.Match[str]]]:
            pairs = zip(self._ranks, before, strict=True)
            return [rank.found(_RESULT)[done:] for rank, done in pairs]

        with contextlib.suppress(LabError):
            await_that(lambda: all(found()), case, within_s=CASE_S, of=self._ranks)
        results = [
            json.loads(its[0][1]) if its else "did not end" if rank.alive else _ENDED
            for rank, its in zip(self._ranks, found(), strict=True)
        ]
        failed = [result for result in results if result not in ("passed", "skipped")]
        if not all(found()):
            self.stop()
        return failed[0] if failed else max(set(results), key=results.count)

    def stop(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks = []

    def _start(self) -> None:
        Path(self._folder, "barrier").mkdir(exist_ok=True)
        Path(self._folder, "test_dir").mkdir(exist_ok=True)
        self._ranks = [
            LabProgram.start(
                f"rank {rank} of {self._backend}",
                [sys.executable, "-W", "ignore", *words_for(work, self._backend, rank)],
                environment=self._environment,
                errors=Path(self._folder, f"{self._backend}-{rank}.log"),
                told=True,
            )
            for rank in range(RANKS)
        ]


def work(backend: str, rank: int) -> None:
    """A rank: for each line of its input one case, for each case one line."""
    importlib.import_module("pmesh.torch")
    suite: Any = importlib.import_module(_SUITE)
    case_class = type(
        "Case",
        (suite.TestDistBackend, suite.DistributedTest._DistTestBase),
        {},
    )
    for line in sys.stdin:
        case, file = json.loads(line)
        print(
            "RESULT " + json.dumps(_outcome(suite, case_class, case, backend, rank=rank, file=file))
        )
        sys.stdout.flush()


def _outcome(suite: Any, case_class: Any, case: str, backend: str, *, rank: int, file: str) -> str:
    import unittest

    import torch
    import torch.distributed as dist

    named = any(part in case for part in _NAMED)
    seconds = suite.CUSTOM_PG_TIMEOUT.get(case, CASE_S)
    test = case_class(case)
    test.rank, test.file_name = rank, file
    suite.Barrier.barrier_id = 0
    torch.manual_seed(0)  # torch's own runner has new processes, which all begin with one seed
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{file}",
            world_size=RANKS,
            rank=rank,
            timeout=timedelta(seconds=seconds),
        )
        with _as_gloo(suite, dist) if named and backend != "gloo" else _by_its_name(suite, backend):
            test._barrier()
            getattr(test, case)()
            test._barrier()
        dist.destroy_process_group()
    except unittest.SkipTest:
        dist.destroy_process_group()
    except SystemExit:
        dist.destroy_process_group()  # how torch's decorators skip
    except BaseException as e:  # noqa: BLE001 - a failure is the result
        if dist.is_initialized():
            dist.destroy_process_group()
        return f"{type(e).__name__}: {e}"[:300]
    else:
        return "passed"
    return "skipped"


@contextlib.contextmanager
def _by_its_name(suite: Any, backend: str) -> Iterator[None]:
    suite.BACKEND = backend
    yield


@contextlib.contextmanager
def _as_gloo(suite: Any, dist: Any) -> Iterator[None]:
    """Let the process group say that it is gloo's."""
    suite.BACKEND = "gloo"
    of_torch = dist.get_backend
    modules = (dist, dist.distributed_c10d)
    for module in modules:
        module.get_backend = lambda *_: "gloo"
    try:
        yield
    finally:
        for module in modules:
            module.get_backend = of_torch


def compare(parts: Sequence[str], backends: Sequence[str]) -> dict[str, dict[str, str]]:
    """For each case what it gives on each backend."""
    found: dict[str, dict[str, str]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="pmesh-") as home,
        tempfile.TemporaryDirectory(prefix="suite-") as folder,
        agent_in_a_thread(Path(home)),
    ):
        workers = {name: Workers(name, home, folder) for name in backends}
        try:
            for case in cases_named(parts):
                found[case] = {name: each.run(case) for name, each in workers.items()}
                print(
                    case,
                    *(each.splitlines()[0] for each in found[case].values()),
                    sep=" | ",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            for each in workers.values():
                each.stop()
    return found


def _print_table(found: dict[str, dict[str, str]]) -> None:
    groups: dict[tuple[str, ...], list[str]] = {}
    for case, results in found.items():
        ended = tuple(
            result if result in {"passed", "skipped"} else "failed"
            for result in (results.get("gloo", "skipped"), results.get("pmesh", "skipped"))
        )
        mark = " (*)" if any(part in case for part in _NAMED) else ""
        groups.setdefault(ended, []).append(f"`{case.removeprefix('test_')}`{mark}")
    print("| gloo | pmesh | | cases |\n|---|---|---|---|")
    for (on_gloo, on_pmesh), cases in sorted(groups.items(), key=lambda group: -len(group[1])):
        print(f"| {on_gloo} | {on_pmesh} | {len(cases)} | {', '.join(cases)} |")


def run(
    *,
    cases: tuple[str, ...] = ("",),
    backends: tuple[str, ...] = ("gloo", "pmesh"),
    markdown: Flag = False,
) -> int:
    """Run torch's own cases; exits with 1 if one passes on gloo and not on pmesh.

    Args:
        cases: Part of their names, if not all; may be repeated.
        backends: May be repeated.
        markdown: Print the table of docs/explanation/torch.md.
    """
    found = compare(cases, backends)
    if markdown:
        _print_table(found)
    passed = [case for case, each in found.items() if each.get("gloo") == "passed"]
    failed = [case for case in passed if found[case].get("pmesh", "passed") != "passed"]
    print(f"{len(found)} cases, {len(passed)} pass on gloo, {len(failed)} of them not on pmesh")
    for case in failed:
        print(f"  {case}: {found[case]['pmesh']}")
    return int(bool(failed))
