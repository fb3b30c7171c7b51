"""A test file imports no other: what tests share stands in a helper module or in tests/worlds."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def imported_test_files(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                imported = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names):
                imported = [f"{module}.{alias.name}" for alias in names]
            case _:
                continue
        for name in imported:
            if any(part.startswith("test_") for part in name.split(".")):
                yield name


@pytest.mark.parametrize(
    "line",
    [
        "import tests.agent.mesh.test_ping",
        "from tests.agent.mesh import test_ping",
        "from tests.agent.mesh.test_ping import ping",
        "from . import test_ping",
        "from .test_ping import ping",
    ],
)
def test_the_import_of_a_test_file_is_found(line: str) -> None:
    assert list(imported_test_files(f"import pytest\n\n\ndef f():\n    {line}\n"))


def test_no_file_below_tests_imports_a_test_file() -> None:
    found = {
        file.relative_to(TESTS).as_posix(): imported
        for file in sorted(TESTS.rglob("*.py"))
        if (imported := list(imported_test_files(file.read_text(encoding="utf-8"))))
    }
    assert found == {}
