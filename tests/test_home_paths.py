import os
import socket
from pathlib import Path

import pytest

from pmesh import home_paths
from pmesh.errors import ConfigError
from pmesh.home_paths import MAX_SOCKET_PATH_BYTES, home_directory, socket_path
from tests.worlds.system import be_user


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(home_paths, "SYSTEM_TEMPORARY", tmp_path)
    return tmp_path


def long_home(tmp_path: Path) -> Path:
    return tmp_path / ("long" * 30)


def test_an_argument_wins_over_the_environment_and_that_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PMESH_HOME", raising=False)
    assert home_directory() == tmp_path.resolve() / ".pmesh"
    monkeypatch.setenv("PMESH_HOME", "~/two")
    assert home_directory() == tmp_path.resolve() / "two"
    assert home_directory("~/three") == tmp_path.resolve() / "three"


def test_a_path_that_leads_nowhere_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="knows no home directory of ~nobody-here; write the wh"):
        home_directory("~nobody-here/home")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"can.t use home as home: .*; choose another"):
        home_directory("home")


def test_links_that_lead_to_each_other_are_no_home(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.symlink_to(there)
    there.symlink_to(here)
    with pytest.raises(ConfigError, match=f"can't use {here} as home: "):
        home_directory(here)


def test_an_empty_environment_variable_counts_as_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PMESH_HOME", "")
    assert home_directory().name == ".pmesh"


def test_a_link_to_a_home_leads_to_the_same_socket(tmp_path: Path, temporary: Path) -> None:
    real = long_home(tmp_path)
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    assert socket_path(home_directory(link)) == socket_path(home_directory(real))
    assert socket_path(home_directory(real)).parent.parent == temporary


def test_a_short_home_holds_its_socket(tmp_path: Path) -> None:
    assert socket_path(Path("/home/me/.pmesh")) == Path("/home/me/.pmesh/agent.sock")
    assert not (tmp_path / "pmesh").exists()


def test_the_longest_path_that_fits_is_used_as_it_is(temporary: Path) -> None:
    fits = Path("/" + "h" * (MAX_SOCKET_PATH_BYTES - len("//agent.sock")))
    assert len(os.fsencode(socket_path(fits))) == MAX_SOCKET_PATH_BYTES
    assert socket_path(Path(f"{fits}h")).parent.parent == temporary


def test_a_path_is_measured_in_bytes_not_characters(temporary: Path) -> None:
    assert socket_path(Path("/" + "ü" * 60)).parent.parent == temporary


def test_long_homes_get_different_sockets_in_a_private_directory(temporary: Path) -> None:
    one, other = (socket_path(long_home(temporary) / name) for name in ("one", "other"))
    assert one != other
    assert one.parent == other.parent
    assert one.parent.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_enter_is_refused(temporary: Path) -> None:
    directory = socket_path(long_home(temporary)).parent
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="remove it, or set PMESH_HOME"):
        socket_path(long_home(temporary))


def test_a_link_in_place_of_the_directory_is_refused(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (temporary / f"pmesh-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="remove it"):
        socket_path(long_home(temporary))


def test_a_directory_of_another_user_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = socket_path(long_home(temporary)).parent
    be_user(monkeypatch, 12345)
    directory.rename(directory.with_name("pmesh-12345"))
    with pytest.raises(ConfigError, match="only you can enter"):
        socket_path(long_home(temporary))


def test_a_file_in_place_of_the_directory_is_refused(temporary: Path) -> None:
    (temporary / f"pmesh-{os.getuid()}").write_text("")
    with pytest.raises(ConfigError, match="remove it"):
        socket_path(long_home(temporary))


def test_a_home_need_not_exist(tmp_path: Path) -> None:
    assert home_directory(tmp_path / "none" / "yet") == tmp_path / "none" / "yet"


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        home_directory(tmp_path / "file")
    with pytest.raises(ConfigError, match="as home: Not a directory; choose another with --home"):
        home_directory(tmp_path / "file" / "home")


def test_a_link_to_a_home_is_judged_by_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert home_directory(tmp_path / "link") == tmp_path / "real"
    (tmp_path / "real").chmod(0o770)
    with pytest.raises(ConfigError, match=f"run: chmod 700 {tmp_path}/real$"):
        home_directory(tmp_path / "link")


def test_a_home_that_others_can_read_is_refused_only_where_it_holds_keys(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    home_paths.check_home(tmp_path)
    with pytest.raises(ConfigError, match="holds keys, and other users can enter it"):
        home_paths.check_home(tmp_path, holds_keys=True)


def test_a_socket_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as somebody:
        somebody.bind(str(tmp_path / "agent.sock"))
        assert socket_path(tmp_path) == tmp_path / "agent.sock"
        be_user(monkeypatch, tmp_path.stat().st_uid + 1)
        with pytest.raises(ConfigError, match=r"is not a socket of yours; run: mv .*\.bad$"):
            socket_path(tmp_path)
