"""A small form of `python -m tools run local-updates`."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.worlds.faults import Faults
from tools.__main__ import main
from tools.bench import local_updates

pytestmark = pytest.mark.slow


def test_all_ways_begin_with_the_same_synchronous_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], faults: Faults
) -> None:
    faults.limit(local_updates, "MEASURED_WINDOWS", 64)
    arguments = [
        "run",
        "local-updates",
        "--together-first",
        "2",
        "--steps",
        "4",
        "--inner-steps",
        "1",
        "2",
        "4",
    ]

    main([*arguments, "--rate", "0"])
    main(arguments)

    printed = capsys.readouterr().out
    runs = [json.loads(line) for line in printed.splitlines()]
    assert [each["inner_steps"] for each in runs] == [1, 2, 4] * 2
    assert all(each["same_bits"] for each in runs)
    losses = [each["loss"] for each in runs]
    assert losses[:3] == pytest.approx([losses[0]] * 3, abs=1e-6)
    assert max(losses[3:]) < losses[0]
    path = tmp_path / "runs.jsonl"
    path.write_text(printed)
    main(["run", "local-updates", "--report", str(path)])
    assert "1.0000 times synchronous" in capsys.readouterr().out
