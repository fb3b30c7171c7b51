"""The native library's own tests in C (native/tests/), under the sanitizers of the compiler."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from native import build

pytestmark = [
    pytest.mark.slow,  # in one process, without sanitizers: the other files here
    pytest.mark.skipif(not build.find_compiler(), reason="needs a C compiler"),
]

TESTS = build.SOURCES / "tests"
MEMORY: Final = "address,undefined"
THREADS: Final = "thread"
LANES = ("lane.c", "subflows.c", "windows.c")
ANSWERING = ("executor.c", "meeting.c")
COMPUTING = ("combine.c", "fits.c", "reduce.c", "coding.c", "kernels.c")
SOURCES = {
    "ranks": ("tests/ranks.c", *LANES, *COMPUTING),  # it includes executor.c
    "faults": ("tests/faults.c", *LANES, *COMPUTING),  # likewise
    "persistent": (  # persistent.c
        "tests/persistent.c",
        *ANSWERING,
        *LANES,
        *COMPUTING,
    ),
    "works": ("tests/works.c", "executor.c", *LANES, *COMPUTING),
    "combine": ("tests/combine.c", "combine.c", "reduce.c"),
    "meeting": ("tests/meeting.c", "combine.c", "reduce.c"),  # it includes meeting.c
    "fuzz_records": ("tests/fuzz_records.c", "tests/fuzz_driver.c", *LANES[1:]),  # lane.c
    "fuzz_plans": ("tests/fuzz_plans.c", "tests/fuzz_driver.c", *COMPUTING),  # executor.c
    "fuzz_subflows": (
        "tests/fuzz_subflows.c",
        "tests/fuzz_driver.c",
        "lane.c",
        "windows.c",
    ),  # subflows.c
    "fuzz_persistent": (  # persistent.c
        "tests/fuzz_persistent.c",
        "tests/fuzz_driver.c",
        *ANSWERING,
        *LANES,
        *COMPUTING,
    ),
}
FLAGS = ("-std=c11", "-O1", "-g", "-pthread", "-ffp-contract=off", "-fno-sanitize-recover=all")
ENVIRONMENT = {
    "ASAN_OPTIONS": "abort_on_error=1",  # the driver then says in which run
    "UBSAN_OPTIONS": "abort_on_error=1:print_stacktrace=1",
}


class SanitizedPrograms:
    """Compiles a source once for all programs with the same sanitizers; each takes seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, name: str, sanitizers: str, *arguments: object) -> str:
        """Return what the program prints; the test fails, with all it says, if the program does."""
        folder = self._folder / sanitizers
        folder.mkdir(exist_ok=True)
        program = str(folder / name)
        objects = [self._compiled(source, sanitizers, folder) for source in SOURCES[name]]
        self._compile(sanitizers, *objects, "-o", program, "-lm")
        command = [*_fixed_addresses(), program, *map(str, arguments)]
        environment = os.environ | ENVIRONMENT
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-20000:]
        return ran.stdout

    def _compiled(self, source: str, sanitizers: str, folder: Path) -> str:
        compiled = folder / f"{Path(source).stem}.{Path(source).parent.name}.o"
        if not compiled.exists():
            self._compile(sanitizers, "-c", str(build.SOURCES / source), "-o", str(compiled))
        return str(compiled)

    def _compile(self, sanitizers: str, *words: str) -> None:
        compiler = [*build.find_compiler(), *FLAGS, f"-fsanitize={sanitizers}"]
        subprocess.run([*compiler, *words], check=True)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> SanitizedPrograms:
    return SanitizedPrograms(tmp_path_factory.mktemp("programs"))


def _fixed_addresses() -> list[str]:
    """TSan of gcc before 14 can't run where Linux spreads addresses as widely as Ubuntu does."""
    command = ["setarch", "-R"]
    if shutil.which("setarch") is None:
        return []
    works = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    return command if works else []


@pytest.mark.parametrize(
    ("sanitizers", "seeds"),
    [(MEMORY, 40), (THREADS, 12)],  # with threads a seed takes a second, or more
)
def test_ranks_that_run_any_plans_and_are_stopped_have_the_values_of_a_plain_loop(
    sanitizers: str, seeds: int, programs: SanitizedPrograms, *, is_quick: bool
) -> None:
    seeds = 4 if is_quick else seeds
    said = programs.run("ranks", sanitizers, seeds, seeds)
    assert int(said.split()[0]) > 0  # stops; how many records then come too late is chance


@pytest.mark.parametrize("sanitizers", [MEMORY, THREADS])
def test_lies_of_peers_plans_that_do_not_fit_and_a_full_system_are_noticed(
    sanitizers: str, programs: SanitizedPrograms
) -> None:
    programs.run("faults", sanitizers)


@pytest.mark.parametrize(("sanitizers", "seeds"), [(MEMORY, 40), (THREADS, 20)])
def test_calls_that_trainers_repeat_end_once_each_while_servers_are_recalled_at_any_moment(
    sanitizers: str, seeds: int, programs: SanitizedPrograms, *, is_quick: bool
) -> None:
    said = programs.run("persistent", sanitizers, 1, 4 if is_quick else seeds)
    # Ops answered, begun, lent, stopped, and those of ranks that met:
    assert 0 not in map(int, re.findall(r"\d+", said))


@pytest.mark.parametrize("sanitizers", [MEMORY, THREADS])
def test_codecs_take_any_bytes_and_works_that_do_not_fit_are_noticed(
    sanitizers: str, programs: SanitizedPrograms
) -> None:
    programs.run("works", sanitizers)


@pytest.mark.parametrize("sanitizers", [MEMORY, THREADS])
def test_ranks_of_one_machine_have_the_values_of_a_plain_loop_or_were_stopped(
    sanitizers: str, programs: SanitizedPrograms
) -> None:
    said = programs.run("combine", sanitizers, 1, 60)
    assert said.endswith(" stopped\n")


@pytest.mark.parametrize("sanitizers", [MEMORY, THREADS])
def test_threads_that_meet_and_are_recalled_at_any_moment_do_each_op_for_all_or_for_none(
    sanitizers: str, programs: SanitizedPrograms, *, is_quick: bool
) -> None:
    said = programs.run("meeting", sanitizers, 1, 15 if is_quick else 30)
    assert 0 not in map(int, re.findall(r"\d+", said))  # tries in vain, ops of several threads


@pytest.mark.parametrize("target", ["records", "plans", "subflows", "persistent"])
def test_no_bytes_of_a_peer_or_a_trainer_and_no_plan_make_the_library_leave_its_memory(
    target: str, programs: SanitizedPrograms, *, is_quick: bool
) -> None:
    runs = 100_000 if is_quick else 400_000
    said = programs.run(f"fuzz_{target}", MEMORY, TESTS / "corpus" / target, runs)
    seeds = len(list((TESTS / "corpus" / target).iterdir()))
    assert said == f"{seeds} seeds, {runs} runs\n"
    assert seeds > 0
