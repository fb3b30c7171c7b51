"""`pmesh demo`, as a new user runs it, and its verdict where results are not as they must be."""

import signal
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import psutil
import pytest

from pmesh.cli import demo
from pmesh.cli.app import run
from pmesh.errors import RunError
from pmesh.terminal.rows import Output
from tests.worlds.faults import Faults

Said = dict[str, object]


def said(rank: int, **changes: object) -> Said:
    return {"rank": rank, "steps_per_s": 50.0, "held_out_bits": 3.0, "hash": "ab" * 32} | changes


def verdict(*measured: Said, difference: float = 1e-6) -> bool:
    console = Output(width=100)
    console.file = StringIO()
    good = demo.report(console, measured, 1000.0, difference)
    assert ("NO" in console.file.getvalue()) is not good
    return good


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the demo makes its own; nothing of it may be left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("pmesh.cli.demo_training" in word for word in process.info["cmdline"] or ())
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("folder")
def test_the_demo_trains_one_model_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "agreed on a ring" in shown
    assert shown.endswith("Good.\n")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("folder")
def test_agents_that_do_not_hear_each_other_get_an_address(faults: Faults) -> None:
    faults.limit(demo, "MEET_S", 0.0)
    with demo.DemoMachines() as machines:
        assert not machines.meet()
        assert len(machines.statuses()) == demo.MACHINES


@pytest.mark.usefixtures("folder")
def test_a_program_that_fails_is_named_with_what_it_has_printed(tmp_path: Path) -> None:
    home = tmp_path / "mac-1"
    program = demo.DemoProgram("the trainer", tmp_path / "log", ["pmesh.cli", "no-such"], home)
    try:
        with pytest.raises(RunError, match=r"the trainer ended with 2; it had printed: .*no-such"):
            demo.await_end([program])
    finally:
        program.end()
        (tmp_path / "log").unlink()


@pytest.mark.usefixtures("folder")
def test_what_hangs_is_named_and_ended(tmp_path: Path, faults: Faults) -> None:
    faults.limit(demo, "PATIENCE_S", 0.0)
    program = demo.DemoProgram("the trainer", tmp_path / "log", ["http.server", "0"], tmp_path)
    try:
        with pytest.raises(RunError, match="the training did not end within 0 s"):
            demo.await_end([program])
    finally:
        program.end()
        (tmp_path / "log").unlink()
    assert program.code == -signal.SIGTERM


def test_ranks_that_agree_with_each_other_and_with_one_trainer_are_good() -> None:
    assert verdict(said(0), said(1))


def test_one_rank_with_other_weights_is_not_good() -> None:
    assert not verdict(said(0), said(1, hash="cd" * 32))


def test_weights_that_differ_from_those_of_one_trainer_are_not_good() -> None:
    assert not verdict(said(0), said(1), difference=1.1e-5)


def test_a_model_that_has_learned_too_little_is_not_good() -> None:
    assert not verdict(said(0), said(1, held_out_bits=3.6))
