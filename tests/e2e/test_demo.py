"""`make demo`, as a new user runs it, and its verdict where results are not as they must be."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tools import demo

pytestmark = pytest.mark.slow

Said = dict[str, object]


def said(rank: int, **changes: object) -> Said:
    return {"rank": rank, "steps_per_s": 50.0, "accuracy": 0.97, "hash": "ab" * 32} | changes


def verdict(*measured: Said, difference: float = 1e-6) -> bool:
    return demo.report(measured, 1000.0, difference)


def demo_processes() -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(demo.CLONE / ".demo") in word for word in process.info["cmdline"] or ())
    ]


@pytest.mark.timeout(180)
def test_the_demo_trains_one_model_and_leaves_nothing_behind() -> None:
    script = Path(demo.__file__)
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=150, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "agreed on a ring" in result.stdout
    assert "NO" not in result.stdout
    assert not demo.CLONE.joinpath(".demo").exists()
    assert not demo_processes()


def test_ranks_that_agree_with_each_other_and_with_one_process_are_good() -> None:
    assert verdict(said(0), said(1))


def test_one_rank_with_other_weights_is_not_good() -> None:
    assert not verdict(said(0), said(1, hash="cd" * 32))


def test_weights_that_differ_from_the_single_process_are_not_good() -> None:
    assert not verdict(said(0), said(1), difference=1.1e-5)


def test_a_model_that_reads_too_few_digits_is_not_good() -> None:
    assert not verdict(said(0), said(1, accuracy=0.949))
