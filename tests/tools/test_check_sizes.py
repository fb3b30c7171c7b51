from pathlib import Path

import pytest

from tools import check_sizes


def write(folder: Path, name: str, lines: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("x = 1\n" * lines)


def test_a_function_reaches_from_its_def_to_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("@decorated\ndef f():\n    '''Doc.'''\n    return (\n    1)\n")

    assert list(check_sizes.measure(tmp_path).functions.values()) == [4]


def test_methods_nested_and_async_functions_count(tmp_path: Path) -> None:
    source = "class A:\n    async def f(self):\n        def g(): ...\n        return g\n"
    (tmp_path / "a.py").write_text(source)

    names = {key.split()[-1]: n for key, n in check_sizes.measure(tmp_path).functions.items()}
    assert names == {"f": 3, "g": 1}


def test_empty_files_do_not_flatter_the_median(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("\n")
    write(tmp_path, "a.py", 10)

    assert list(check_sizes.measure(tmp_path).files.values()) == [10]


def test_a_file_of_600_lines_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a.py", 600)

    assert check_sizes.main([str(tmp_path)]) == 0
    assert "600" in capsys.readouterr().out


def test_a_file_of_601_lines_fails_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "long.py", 601)

    assert check_sizes.main([str(tmp_path)]) == 1
    assert "long.py: 601 lines" in capsys.readouterr().out


def test_a_folder_without_code_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_sizes.main([str(tmp_path)]) == 0
    assert str(tmp_path) not in capsys.readouterr().out


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (19, 19), (20, 19), (100, 95)])
def test_the_95th_percentile_is_the_nearest_rank(count: int, expected: int) -> None:
    assert check_sizes.percentile_95(range(1, count + 1)) == expected
