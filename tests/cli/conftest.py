from pathlib import Path

import pytest

from pmesh.home_paths import home_directory, socket_path


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    return socket_path(home_directory())
