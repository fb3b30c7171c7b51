"""Programs that tools start: what they print is kept and waited for."""

import os
import sys
from pathlib import Path

import pytest

from tools.lab.commands import LabError
from tools.lab.mesh import ROOT
from tools.lab.program import LabProgram, await_that
from tools.lab.warm import ForkOrder, Warm

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def python(source: str) -> LabProgram:
    return LabProgram.start(
        "it", [sys.executable, "-c", source], environment=ENVIRONMENT, told=True
    )


def test_reports_are_the_json_objects_among_the_lines() -> None:
    lines = ["hello", '{"step": 1}', "{no", '{"step": 2, "loss": 0.5}']
    with python(f"print(*{lines!r}, sep='\\n')") as program:
        assert program.join() == 0
        assert program.reports == [{"step": 1}, {"step": 2, "loss": 0.5}]
        assert program.last("step") == 2
        assert program.last("rank") is None


def test_lines_are_heard_once_and_in_order() -> None:
    with python("while True: print(input(), flush=True)") as program:
        for word in ("one", "two"):
            program.tell(word)
            assert program.hear() == word


def test_who_waits_for_a_program_that_ends_is_told_at_once_what_it_has_said() -> None:
    with (
        python('print("too much"); raise SystemExit(3)') as program,
        pytest.raises(LabError, match=r"a step did not come(?s:.*)ended with 3(?s:.*)too much"),
    ):
        await_that(lambda: program.last("step"), "a step", within_s=1000, of=[program])


def test_a_warm_start_becomes_the_program_with_its_own_environment_and_patch() -> None:
    warm = Warm(["tests.tools.test_program"], ENVIRONMENT)
    order = ForkOrder(
        program="tests.tools.test_program:say",
        arguments=("a", "b"),
        environment={"WHAT": "said"},
        patch="import os; os.environ['MORE'] = 'patched'",
    )
    try:
        with LabProgram("it", *warm.start(order)) as program:
            assert program.hear() == "['a', 'b'] said patched"
            program.join()
    finally:
        warm.close()


def say() -> None:
    sys.stdout.write(f"{sys.argv[1:]} {os.environ['WHAT']} {os.environ['MORE']}\n")


def test_the_errors_of_a_program_go_into_a_file_if_it_has_one(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    command = ["sh", "-c", "echo line; echo wrong >&2"]
    with LabProgram.start("it", command, environment={}, errors=errors) as program:
        program.join()
        assert program.printed() == ["line"]
        assert program.shown.endswith("wrong")
