"""`pmesh service`: what the system is told, and what the user is told where that fails.

Only the system's commands are replaced: `systemctl` on Linux, `launchctl` on a Mac.
"""

import fcntl
import plistlib
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pmesh.cli import service
from pmesh.cli.app import run
from pmesh.cli.service import AgentService, service_for
from pmesh.errors import ConfigError
from pmesh.home_paths import LOCK_NAME
from tests.cli.homes import use_home
from tests.worlds.faults import Faults
from tests.worlds.system import be_on, be_user

PROGRAM = ("/opt/my python/bin/python", "-m", "pmesh.cli", "up")


def wanted(**changes: object) -> AgentService:
    given: dict[str, Any] = {
        "system": "linux",
        "user": "ana",
        "user_home": Path("/home/ana"),
        "home": Path("/home/ana/.pmesh"),
        "program": PROGRAM,
        "as_root": False,
    }
    return AgentService(**given | changes)


class SystemCommands:
    """Notes the commands it gets; some fail."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.failing: dict[str, Exception | str] = {}
        self.says = ""

    def run(self, command: tuple[str, ...], **_: object) -> "subprocess.CompletedProcess[str]":
        words = " ".join(command)
        self.told.append(words)
        failure = next((f for word, f in self.failing.items() if word in words), None)
        if isinstance(failure, Exception):
            raise failure
        code = int(failure is not None)
        return subprocess.CompletedProcess(command, code, self.says, failure or "")


@pytest.fixture
def system(faults: Faults) -> SystemCommands:
    found = SystemCommands()
    faults.pretend(subprocess, "run", found.run)
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults) -> Path:
    """A home with a key, of a user who is not root."""
    ana = pwd.struct_passwd(("ana", "x", 501, 20, "", str(tmp_path), "/bin/sh"))
    be_user(monkeypatch, 501)
    faults.pretend(pwd, "getpwuid", lambda _: ana)
    faults.pretend(pwd, "getpwnam", lambda _: ana)
    monkeypatch.delenv("SUDO_USER", raising=False)
    place = tmp_path / ".pmesh"
    place.mkdir()
    (place / "mesh_key").write_text("a key")
    use_home(place, monkeypatch)
    return place


def as_sudo_on_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "Library" / "org.pmesh.agent.plist"
    be_on(monkeypatch, "darwin")
    monkeypatch.setattr(service, "PLIST", file)
    be_user(monkeypatch, 0)
    monkeypatch.setenv("SUDO_USER", "ana")
    monkeypatch.delenv("PMESH_HOME")  # sudo keeps no variable
    return file


# --- what the system's files say


def test_a_user_of_linux_has_a_unit_that_runs_without_a_login() -> None:
    found = service_for(wanted())
    assert found.file == Path("/home/ana/.config/systemd/user/pmesh.service")
    text = found.content.decode()
    assert 'ExecStart=:"/opt/my python/bin/python" "-m" "pmesh.cli" "up"\n' in text
    assert 'Environment="PMESH_HOME=/home/ana/.pmesh"\n' in text
    assert "Restart=on-failure\n" in text
    assert text.endswith("WantedBy=default.target\n")
    assert found.begin[-1] == ("loginctl", "enable-linger", "ana")


def test_root_of_linux_has_a_unit_of_the_machine() -> None:
    found = service_for(wanted(as_root=True, user="root"))
    assert found.file == Path("/etc/systemd/system/pmesh.service")
    assert found.content.endswith(b"WantedBy=multi-user.target\n")
    assert found.begin == (
        ("systemctl", "daemon-reload"),
        ("systemctl", "enable", "--now", "pmesh.service"),
    )


@pytest.mark.parametrize("name", ["50%", "$HOME", "with space", "%h"])
def test_systemd_reads_any_path_as_it_is(name: str, tmp_path: Path) -> None:
    """systemd itself judges: it knows the program only if it has read its path as we wrote it."""
    if not (verify := shutil.which("systemd-analyze")):
        pytest.skip("needs systemd-analyze")
    program = tmp_path / name / "python"
    program.parent.mkdir()
    program.symlink_to(sys.executable)
    found = service_for(
        wanted(program=(str(program), "-m", "pmesh.cli", "up"), home=tmp_path / name)
    )
    file = tmp_path / "pmesh.service"
    file.write_bytes(found.content)
    ran = subprocess.run(
        [verify, "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    assert "pmesh.service" not in ran.stderr
    program.unlink()
    ran = subprocess.run(
        [verify, "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    assert "is not executable" in ran.stderr  # it looks at all


@pytest.mark.parametrize("name", ['a "b"', "back\\slash", "it's"])
def test_a_program_that_systemd_cant_start_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"systemd can't start .* quote or backslash"):
        service_for(wanted(program=(f"/opt/{name}/python", "up")))


def test_a_mac_has_a_daemon_that_runs_as_the_user() -> None:
    found = service_for(wanted(system="darwin", as_root=True))
    assert found.file == Path("/Library/LaunchDaemons/org.pmesh.agent.plist")
    said = plistlib.loads(found.content)
    assert said["UserName"] == "ana"
    assert said["ProgramArguments"] == list(PROGRAM)
    assert said["EnvironmentVariables"] == {"PMESH_HOME": "/home/ana/.pmesh"}
    assert said["KeepAlive"] == {"SuccessfulExit": False}
    assert said["StandardErrorPath"] == "/home/ana/.pmesh/agent.log"


def test_a_mac_wants_root() -> None:
    with pytest.raises(
        ConfigError, match=r"type 'sudo '/opt/my python/bin/python' -m pmesh.cli service …'"
    ):
        service_for(wanted(system="darwin"))


def test_what_a_file_of_the_system_cant_say_is_refused() -> None:
    with pytest.raises(ConfigError, match="unprintable"):
        service_for(wanted(home=Path("/home/a\nExecStart=/bin/evil")))


# --- the commands


def test_install_status_and_remove(
    home: Path, system: SystemCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = home.parent / ".config/systemd/user/pmesh.service"
    assert run(["service", "status"]) == 1
    assert run(["service", "remove"]) == 0
    assert system.told == []
    assert run(["service", "install"]) == 0
    assert unit.exists()
    assert system.told == [
        "systemctl --user daemon-reload",
        "systemctl --user enable --now pmesh.service",
        "loginctl enable-linger ana",
    ]
    assert run(["service", "status"]) == 0
    system.failing["is-active"] = ""
    assert run(["service", "status"]) == 1
    assert run(["service", "remove"]) == 0
    assert not unit.exists()
    assert system.told[-2:] == [
        "systemctl --user disable --now pmesh.service",
        "systemctl --user daemon-reload",
    ]
    shown = capsys.readouterr().out
    assert "journalctl --user --unit pmesh.service --follow" in shown
    assert "it runs" in shown
    assert "it does not run" in shown


def test_sudo_on_a_mac_makes_a_daemon_of_the_user_and_its_home(
    home: Path, system: SystemCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = as_sudo_on_a_mac(tmp_path, monkeypatch)
    assert run(["service", "install"]) == 0
    assert plistlib.loads(file.read_bytes())["EnvironmentVariables"] == {"PMESH_HOME": str(home)}
    assert system.told == [f"launchctl bootstrap system {file}"]
    assert run(["service", "remove"]) == 0
    assert system.told[1:] == ["launchctl bootout system/org.pmesh.agent"]


@pytest.mark.usefixtures("home")
def test_on_a_mac_a_daemon_that_is_known_need_not_run(
    system: SystemCommands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = as_sudo_on_a_mac(tmp_path, monkeypatch)
    assert run(["service", "install"]) == 0
    system.says = f"system/org.pmesh.agent = {{\n\tpath = {file}\n\tstate = running\n}}\n"
    assert run(["service", "status"]) == 0
    be_user(monkeypatch, 501)  # to ask needs no root
    assert run(["service", "status"]) == 0
    system.says = system.says.replace("= running", "= not running")  # after 'pmesh down'
    assert run(["service", "status"]) == 1
    assert "it does not run" in capsys.readouterr().out


@pytest.mark.usefixtures("home")
def test_on_a_mac_a_daemon_that_is_installed_again_is_taken_out_first(
    system: SystemCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = as_sudo_on_a_mac(tmp_path, monkeypatch)
    assert run(["service", "install"]) == 0
    system.failing["bootout"] = "No such process"  # it had failed to start
    assert run(["service", "install"]) == 0
    assert system.told[1:] == [
        "launchctl bootout system/org.pmesh.agent",
        f"launchctl bootstrap system {file}",
    ]


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ("no bus", "'systemctl --user daemon-reload' has failed: no bus"),
        ("", "'systemctl --user daemon-reload' has failed: it returned 1"),
        (FileNotFoundError(), "this machine has no systemctl: start 'pmesh up' otherwise"),
        (subprocess.TimeoutExpired("", 30), "has not ended within 30 s"),
    ],
)
@pytest.mark.usefixtures("home")
def test_a_system_that_refuses_is_quoted(
    failing: Exception | str, said: str, system: SystemCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    system.failing["daemon-reload"] = failing
    assert run(["service", "install"]) != 0
    assert said in capsys.readouterr().err
    assert run(["service", "status"]) == 1
    assert "pmesh is no service here" in capsys.readouterr().out


@pytest.mark.usefixtures("home")
def test_an_agent_that_may_not_outlive_the_login_is_stopped_again(system: SystemCommands) -> None:
    system.failing["enable-linger"] = "Access denied"
    assert run(["service", "install"]) == 2
    assert system.told[-3:] == [
        "loginctl enable-linger ana",
        "systemctl --user disable --now pmesh.service",
        "systemctl --user daemon-reload",
    ]
    assert run(["service", "status"]) == 1


@pytest.mark.usefixtures("home", "system")
def test_a_home_may_be_written_with_a_tilde_as_for_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PMESH_HOME", "~/.pmesh")
    assert run(["service", "install"]) == 0
    (unit,) = (tmp_path / ".config/systemd/user").iterdir()
    assert f'Environment="PMESH_HOME={tmp_path}/.pmesh"' in unit.read_text()


@pytest.mark.usefixtures("home", "system")
@pytest.mark.parametrize("command", ["install", "status", "remove"])
def test_a_user_whom_the_system_does_not_know_has_no_service(
    command: str, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.fail(pwd, "getpwuid", KeyError("the uid of a container"))
    assert run(["service", command]) == 2
    assert "the system knows no user with the id 501, so it can" in capsys.readouterr().err


def test_a_home_without_a_key_is_no_service(
    home: Path, system: SystemCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "mesh_key").unlink()
    assert run(["service", "install"]) != 0
    assert "holds no mesh key yet: first 'pmesh key new'" in capsys.readouterr().err
    assert system.told == []


@pytest.mark.usefixtures("home")
def test_a_home_that_can_not_be_looked_into_is_no_service(
    system: SystemCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    home = f"/{'x' * 300}"
    assert run(["service", "install", "--home", home]) == 2
    said = capsys.readouterr().err
    assert said == f"ConfigError: can't look into {home}: File name too long\n"
    assert system.told == []


@pytest.mark.parametrize("on_a_mac", [False, True])
def test_an_agent_that_runs_is_stopped_by_the_user_first(
    home: Path,
    system: SystemCommands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    on_a_mac: bool,
) -> None:
    if on_a_mac:  # root, who is no agent's user
        as_sudo_on_a_mac(tmp_path, monkeypatch)
    with (home / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(["service", "install"]) != 0
    assert "runs already: first 'pmesh down'" in capsys.readouterr().err
    assert system.told == []
    assert run(["service", "install"]) == 0  # the lock of one that has ended


@pytest.mark.usefixtures("home")
def test_sudo_on_linux_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_user(monkeypatch, 0)
    monkeypatch.setenv("SUDO_USER", "ana")
    assert run(["service", "install"]) != 0
    assert "type the same as ana, without sudo" in capsys.readouterr().err


@pytest.mark.usefixtures("home")
def test_other_systems_have_no_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_on(monkeypatch, "freebsd14")
    assert run(["service", "status"]) != 0
    assert "pmesh can't be a service of freebsd14" in capsys.readouterr().err


def test_a_file_that_cant_be_written_is_named(
    home: Path, system: SystemCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.parent / ".config").write_text("a file")
    assert run(["service", "install"]) != 0
    assert "can't write" in capsys.readouterr().err
    assert system.told == []


def test_a_file_that_cant_be_removed_is_named(
    home: Path, system: SystemCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = home.parent / ".config/systemd/user/pmesh.service"
    unit.mkdir(parents=True)
    assert run(["service", "remove"]) == 2
    assert f"can't remove {unit}: " in capsys.readouterr().err
    assert len(system.told) == 1  # the agent has been stopped
