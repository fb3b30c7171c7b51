"""`pmesh service`: the system starts the agent at boot, and again when it has crashed.

On Linux systemd does, that of the user or, for root, that of the machine. On a Mac it is a daemon
of launchd which runs as the user. For an agent of launchd macOS would ask for the Local Network
permission, and nobody may see the question; for a daemon it never asks (Apple's TN3179).
"""

import contextlib
import fcntl
import os
import plistlib
import pwd
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from pmesh.errors import AgentAlreadyRunning, ConfigError, KeyFileError
from pmesh.home_paths import LOCK_NAME, LOG_NAME, MESH_KEY_NAME, expand_user
from pmesh.terminal.lines import say

Command = tuple[str, ...]

UNIT: Final = "pmesh.service"
LABEL: Final = "org.pmesh.agent"
PLIST: Final = Path("/Library/LaunchDaemons") / f"{LABEL}.plist"
_QUOTES: Final = frozenset("\"'\\")
COMMAND_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentService:
    """Whose agent is to be started, and by which program."""

    system: Literal["linux", "darwin"]
    user: str
    user_home: Path
    home: Path
    """The agent's."""
    program: Command
    as_root: bool
    """True if root types the command, for whomever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemService:
    """What the system has to know, and the commands that tell it."""

    file: Path
    content: bytes
    log: str
    """The command that shows the agent's log."""
    begin: tuple[Command, ...]
    end: tuple[Command, ...]
    forget: tuple[Command, ...]
    """After the file is removed."""
    ask: Command
    """It returns 0 while the agent runs."""
    running: str = ""
    """What it then prints, too."""
    again: tuple[Command, ...] = ()
    """Before `begin` where there is a service already; they may fail."""


def service_for(wanted: AgentService) -> SystemService:
    """Raise ConfigError for what the system's files can't say, or for a user who may not ask."""
    for text in (wanted.user, str(wanted.home), *wanted.program):
        if not text.isprintable():
            raise ConfigError(f"no service can be made of {text!r}: it has unprintable characters")
    return _launchd(wanted) if wanted.system == "darwin" else _systemd(wanted)


def _systemd(wanted: AgentService) -> SystemService:
    if not _QUOTES.isdisjoint(wanted.program[0]):
        raise ConfigError(f"systemd can't start {wanted.program[0]}: it has a quote or backslash")
    systemctl: Command = ("systemctl",)
    journal: Command = ("journalctl",)
    folder, target = Path("/etc/systemd/system"), "multi-user.target"
    linger: tuple[Command, ...] = ()
    if not wanted.as_root:
        systemctl, journal = (*systemctl, "--user"), (*journal, "--user")
        folder, target = wanted.user_home / ".config/systemd/user", "default.target"
        linger = (("loginctl", "enable-linger", wanted.user),)  # else it runs only while logged in
    program = " ".join(map(_quoted, wanted.program))
    return SystemService(
        file=folder / UNIT,
        content=(
            "[Unit]\n"
            "Description=pmesh agent\n"
            "After=network.target\n"
            "\n"
            "[Service]\n"
            f"Environment={_quoted(f'PMESH_HOME={wanted.home}')}\n"
            f"ExecStart=:{program}\n"  # a colon: $ has no meaning
            "Restart=on-failure\n"
            "RestartSec=5\n"
            "\n"
            "[Install]\n"
            f"WantedBy={target}\n"
        ).encode(),
        log=shlex.join((*journal, "--unit", UNIT, "--follow")),
        begin=((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", UNIT), *linger),
        end=((*systemctl, "disable", "--now", UNIT),),
        forget=((*systemctl, "daemon-reload"),),
        ask=(*systemctl, "--quiet", "is-active", UNIT),
    )


def _quoted(word: str) -> str:
    """One word of a unit file; systemd.service(5) and systemd.unit(5) say what must be escaped."""
    for special in ("\\", '"'):  # the backslash first
        word = word.replace(special, f"\\{special}")
    return f'"{word.replace("%", "%%")}"'


def _launchd(wanted: AgentService) -> SystemService:
    if not wanted.as_root:
        program = shlex.join((*wanted.program[:-1], "service"))
        raise ConfigError(f"only root may do this on a Mac: type 'sudo {program} …' instead")
    log = str(wanted.home / LOG_NAME)
    return SystemService(
        file=PLIST,
        content=plistlib.dumps(
            {
                "Label": LABEL,
                "UserName": wanted.user,
                "ProgramArguments": list(wanted.program),
                "EnvironmentVariables": {"PMESH_HOME": str(wanted.home)},
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "StandardOutPath": log,
                "StandardErrorPath": log,
            }
        ),
        log=shlex.join(("tail", "-f", log)),
        begin=(("launchctl", "bootstrap", "system", str(PLIST)),),
        end=(("launchctl", "bootout", f"system/{LABEL}"),),
        forget=(),
        ask=("launchctl", "print", f"system/{LABEL}"),  # 0 also for one that has ended
        running="\tstate = running\n",
        again=(("launchctl", "bootout", f"system/{LABEL}"),),  # it takes no second one
    )


def wanted_here(home: Path | None = None) -> AgentService:
    """Raise ConfigError on another system, or for sudo where it would ask for root's agent."""
    system = sys.platform
    if system not in {"linux", "darwin"}:
        raise ConfigError(f"pmesh can't be a service of {system}")
    as_root = os.geteuid() == 0
    sudoer = os.environ.get("SUDO_USER", "") if as_root else ""
    if sudoer and system == "linux":
        raise ConfigError(f"no root is needed here: type the same as {sudoer}, without sudo")
    try:
        user = pwd.getpwnam(sudoer) if sudoer else pwd.getpwuid(os.geteuid())
    except KeyError as e:
        whom = sudoer or f"with the id {os.geteuid()}"
        raise ConfigError(
            f"the system knows no user {whom}, so it can start no agent at boot; run 'pmesh up'"
        ) from e
    chosen = home or Path(os.environ.get("PMESH_HOME") or Path(user.pw_dir, ".pmesh"))
    return AgentService(
        system="darwin" if system == "darwin" else "linux",
        user=user.pw_name,
        user_home=Path(user.pw_dir),
        home=expand_user(chosen).absolute(),
        program=(sys.executable, "-m", "pmesh.cli", "up"),
        as_root=as_root,
    )


def install(home: Path | None) -> int:
    """`pmesh service install`.

    Raises:
        KeyFileError: The home has no mesh key: at boot nobody would see the one that is made.
        AgentAlreadyRunning: Another agent of this home runs.
        ConfigError: As for `wanted_here` and `service_for`, or the system has refused.
    """
    wanted = wanted_here(home)
    service = service_for(wanted)
    try:
        (wanted.home / MESH_KEY_NAME).stat()
    except (FileNotFoundError, NotADirectoryError) as e:
        raise KeyFileError(
            f"{wanted.home} holds no mesh key yet: first 'pmesh key new' on the first machine,"
            " or 'pmesh join' on another one"
        ) from e
    except OSError as e:  # it is another user's
        raise ConfigError(f"can't look into {wanted.home}: {e.strerror}") from e
    begins = not service.file.exists()
    if begins and _is_held(wanted.home):
        raise AgentAlreadyRunning(f"an agent of {wanted.home} runs already: first 'pmesh down'")
    try:
        service.file.parent.mkdir(parents=True, exist_ok=True)
        service.file.write_bytes(service.content)
    except OSError as e:
        raise ConfigError(f"can't write {service.file}: {e.strerror}") from e
    try:
        for command in () if begins else service.again:
            _run(command)
        for command in service.begin:
            _tell(command)
    except ConfigError:
        if begins:  # else the next 'status' would speak of a service that there never was
            _undo(service)
        raise
    say(
        f"The agent runs, and starts at boot ({service.file}). Its log: {service.log}",
        "'pmesh down' stops it until the next boot, 'pmesh service remove' for good.",
    )
    return 0


def remove() -> int:
    """`pmesh service remove`. Raises ConfigError if the system has refused."""
    service = service_for(wanted_here())
    if not service.file.exists():
        say("pmesh is no service here.")
        return 0
    for command in service.end:
        _tell(command)
    _remove(service.file)
    for command in service.forget:
        _tell(command)
    say("The agent has stopped, and does not start at boot any more.")
    return 0


def _undo(service: SystemService) -> None:
    """Stop what may have been started before a command failed."""
    with contextlib.suppress(ConfigError):
        for command in service.end:
            _run(command)
    _remove(service.file)
    with contextlib.suppress(ConfigError):
        for command in service.forget:
            _run(command)


def _remove(file: Path) -> None:
    try:
        file.unlink()
    except OSError as e:
        raise ConfigError(f"can't remove {file}: {e.strerror}") from e


def show() -> int:
    """`pmesh service status`: 0 if it is installed and runs, else 1."""
    wanted = wanted_here()
    on_a_mac = wanted.system == "darwin"  # where nobody needs to be root to ask
    service = service_for(replace(wanted, as_root=on_a_mac or wanted.as_root))
    if not service.file.exists():
        say("pmesh is no service here; 'pmesh service install' makes it one.")
        return 1
    asked = _run(service.ask)
    runs = asked.returncode == 0 and service.running in asked.stdout
    say(f"{service.file}: it {'runs' if runs else 'does not run'}. Its log: {service.log}")
    return 0 if runs else 1


def _is_held(home: Path) -> bool:
    """Return True while an agent of this home runs, also for root: its user alone may ask it."""
    try:
        with (home / LOCK_NAME).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there was none yet
        return False
    return False


def _tell(command: Command) -> None:
    ran = _run(command)
    if ran.returncode:
        said = ran.stderr.strip() or f"it returned {ran.returncode}"
        raise ConfigError(f"'{shlex.join(command)}' has failed: {said}")


def _run(command: Command) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(  # noqa: S603 - the system's own commands
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError as e:
        raise ConfigError(f"this machine has no {command[0]}: start 'pmesh up' otherwise") from e
    except subprocess.TimeoutExpired as e:
        raise ConfigError(
            f"'{shlex.join(command)}' has not ended within {COMMAND_TIMEOUT_S:.0f} s"
        ) from e
