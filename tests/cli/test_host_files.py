"""Host files of MLX and Open MPI as a list of peers."""

from pathlib import Path

import pytest

from pmesh.cli.host_files import MAX_HOSTS, read_hosts
from pmesh.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ('[{"ssh": "mac-1", "ips": ["10.0.0.1", "10.0.1.1"], "rdma": [null]}]', ("10.0.0.1",)),
        ('{"backend": "ring", "envs": [], "hosts": [{"ssh": "a@mac-2", "ips": []}]}', ("mac-2",)),
        ("mac-1 slots=4 max-slots=4\nmac-2\n", ("mac-1", "mac-2")),
        ("mac-1:24161\n", ("mac-1:24161",)),
    ],
)
def test_each_kind_of_file_names_its_machines(
    text: str, hosts: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_hosts(tmp_path / "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names 0 machines"),
        ("# nobody\n", "names 0 machines"),
        ("[{}]", "names 0 machines"),
        ("\n".join(f"mac-{n}" for n in range(MAX_HOSTS + 1)), f"names {MAX_HOSTS + 1} machines"),
        ("[{", "is no JSON"),
        ('[{"ips": "10.0.0.1"}]', "is no host file of MLX"),
        ("[1]", "is no host file of MLX"),
    ],
)
def test_another_file_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=f"--peers-from: .*hosts.*{said}"):
        read_hosts(tmp_path / "hosts")


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*hosts"):
        read_hosts(tmp_path / "hosts")
