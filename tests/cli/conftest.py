import gc
from pathlib import Path

import pytest

from pmesh.home_paths import home_directory, socket_path
from tests.worlds.faults import Faults, InjectedFault


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    return socket_path(home_directory())


@pytest.fixture(autouse=True)
def freezing(faults: Faults) -> InjectedFault:
    """An agent of a test has no process of its own, in which it may freeze what there is."""
    return faults.pretend(gc, "freeze", lambda: None)
