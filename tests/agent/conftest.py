import pytest


@pytest.fixture(autouse=True)
def _on_a_clock_that_jumps(no_threads: None) -> None:
    """Some of these tests have pytest-trio's own clock."""
