from pathlib import Path

import pytest

from tools import check_sizes


def write(folder: Path, name: str, lines: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("x = 1\n" * lines)


def test_methods_nested_and_async_functions_count(tmp_path: Path) -> None:
    source = "class A:\n    async def f(self):\n        def g(): ...\n        return g\n"
    (tmp_path / "a.py").write_text(source)

    names = {key.split()[-1]: n for key, n in check_sizes.measure(tmp_path).functions.items()}
    assert names == {"f": 3, "g": 1}


def test_a_file_of_601_lines_fails_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "long.py", 601)

    assert check_sizes.main([str(tmp_path)]) == 1
    assert "long.py: 601 lines" in capsys.readouterr().out
