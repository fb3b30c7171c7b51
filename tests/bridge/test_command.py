"""`pmesh bridge entrenar`: what is refused before any worker is waited for."""

from pathlib import Path

import pytest

from pmesh.cli.app import run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--job", "j", "--workers", "0"], "ConfigError: --workers is at least 1"),
        (["--job", "j", "--workers", "1", "--wait-for", "1"], "ConfigError: --wait-for counts"),
        (["--job", "", "--workers", "1"], "UsageError: a job's name has 1 to"),
        (["--job", "j", "--workers", "1", "--wait-for", "2000"], "UsageError: wait_for is at"),
    ],
)
def test_an_option_that_no_job_can_have_is_refused_first(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bridge", "entrenar", *options, "--home", str(tmp_path / "none")]) != 0
    assert capsys.readouterr().err.startswith(said)
