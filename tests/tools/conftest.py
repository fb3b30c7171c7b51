"""What the tools start is not measured: coverage would take most of the time of their campaigns."""

import pytest


@pytest.fixture(autouse=True)
def _processes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # pyproject.toml: patch=subprocess
