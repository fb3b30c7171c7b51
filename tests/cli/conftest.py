import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmesh.home_paths import home_directory, socket_path


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    return socket_path(home_directory())


@pytest.fixture(autouse=True)
def _objects_are_collected() -> Iterator[None]:
    """An agent of a test has no process of its own, in which it may freeze what there is."""
    before = gc.get_freeze_count()
    yield
    if gc.get_freeze_count() > before:  # else it stays as `tests/conftest.py` has frozen it
        gc.unfreeze()
