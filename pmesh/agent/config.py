"""Settings: flags override `PMESH_*`, which override config.toml, which overrides defaults.

Flags, variables and TOML give text or typed values. Each parser raises ValueError with what the
value must be; `load_settings` adds the source of the value.
"""

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, cast, get_args

from pmesh.agent.host_port import DEFAULT_PORT, host_port_text, parse_host_port
from pmesh.agent.log_level import LogLevel
from pmesh.compression.schemes import NAMES
from pmesh.core.wire.link import Address
from pmesh.errors import ConfigError
from pmesh.home_paths import expand_user

LONGEST_NAME_BYTES = 63  # a DNS label's length, which also fits in one TXT string


class Listen(NamedTuple):
    """The address at which the agent listens."""

    host: str = ""
    """Empty for all addresses."""
    port: int = DEFAULT_PORT
    """0 for a port that the system picks."""


EVERYWHERE: Final = Listen()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")  # noqa: TRY004 - one exception for every bad value
    return value


def _name(value: object) -> str:
    text = _text(value).strip()
    if not text or not text.isprintable() or len(text.encode()) > LONGEST_NAME_BYTES:
        raise ValueError(f"a name must be 1 to {LONGEST_NAME_BYTES} bytes of printable text")
    return text


def _listen(value: object) -> Listen:
    return Listen(*parse_host_port(_text(value)))


def _list(value: object, *, of: str) -> list[object]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"must be a list of {of}")  # noqa: TRY004 - as above
    return list(cast("list[object]", value))


def _names(value: object) -> tuple[str, ...]:
    return tuple(_text(item) for item in _list(value, of="names of interfaces"))


def _peers(value: object) -> tuple[Address, ...]:
    return tuple(_peer(item) for item in _list(value, of="HOST:PORT"))


def _peer(value: object) -> Address:
    host, port = parse_host_port(_text(value))
    if not host or not port:
        raise ValueError("a peer must be HOST:PORT")
    return Address(host, port)


def _truth(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, str):
        value = words.get(value.lower())
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - as above
    return value


def _count(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("must be a number, 0 or more")
    return value


def _compression(value: object) -> str:
    text = _text(value).strip().lower()
    if text in ("", "none"):
        return ""
    if text not in NAMES:
        raise ValueError(f"must be none or one of {', '.join(NAMES)}")
    return text


def _log_level(value: object) -> LogLevel:
    text = _text(value).lower()
    if text not in get_args(LogLevel):
        raise ValueError(f"must be one of {', '.join(get_args(LogLevel))}")
    return cast("LogLevel", text)


def _path(value: object) -> Path:
    if isinstance(value, str) and (not value or "\0" in value):
        raise ValueError("must be the path of a file")
    return expand_user(Path(value if isinstance(value, Path) else _text(value)))


PARSERS: Final[Mapping[str, Callable[[object], object]]] = MappingProxyType(
    {
        "name": _name,
        "listen": _listen,
        "peers": _peers,
        "interfaces": _names,
        "not_interfaces": _names,
        "mdns": _truth,
        "min_peers": _count,
        "allow_run": _truth,
        "compression": _compression,
        "log_level": _log_level,
        "log_json": _truth,
        "key_file": _path,
    }
)


CONFIG_NAME = "config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The settings of `pmesh up`."""

    home: Path
    name: str
    """The name of this machine."""
    listen: Listen = EVERYWHERE
    peers: tuple[Address, ...] = ()
    """Dialled for ever, besides what mDNS finds."""
    interfaces: tuple[str, ...] = ()
    """The only network interfaces that the agent uses; empty for all that lead to others."""
    not_interfaces: tuple[str, ...] = ()
    """Interfaces that it does not use."""
    mdns: bool = True
    min_peers: int = 0
    """How many peers must be present before a job may begin."""
    allow_run: bool = False
    """Run what any member asks for, as after `pmesh allow run`."""
    find_others_s: float = 2.0
    """For so long after its start an agent finds its mesh, where a job of its trainers may run
    already; none begins here until then."""
    compression: str = ""
    """Gradient compression of trainers here that choose none; empty for no compression."""
    log_level: LogLevel = "info"
    log_json: bool = False
    key_file: Path | None = None
    """The file with the mesh key, if it is not in the home."""
    key_text: str | None = field(default=None, repr=False)  # a secret: it must not reach a log
    """The mesh key in PMESH_KEY."""


def load_settings(
    home: Path, *, flags: Mapping[str, object], environment: Mapping[str, str], host_name: str
) -> AgentSettings:
    """Combine flags, variables, config.toml and defaults.

    Args:
        home: The home directory, whose config.toml is read if there is one.
        flags: Command-line options by the names of `AgentSettings`; None if not given.
        environment: As `os.environ`; an empty variable counts as absent.
        host_name: The machine's host name, the default of `name`.

    Raises:
        ConfigError: A key of the file is unknown, or a value is invalid; names its source.
    """
    chosen: dict[str, object] = {"name": _default_name(host_name)}
    path = home / CONFIG_NAME
    for key, value in _read_file(path).items():
        chosen[key] = _parse(key, value, source=f"{key} in {path}", base=home)
    for key in PARSERS:
        variable = variable_of(key)
        if environment.get(variable):
            chosen[key] = _parse(key, environment[variable], source=variable, base=Path())
    if environment.get("PMESH_KEY"):
        chosen |= {"key_text": environment["PMESH_KEY"], "key_file": None}
    for key, value in flags.items():
        if value is not None:
            chosen[key] = _parse(key, value, source=_flag_of(key), base=Path())
            if key == "key_file":
                chosen["key_text"] = None
    return AgentSettings(home=home, **chosen)  # type: ignore[arg-type] # each was parsed to its field


def as_environment(settings: AgentSettings) -> dict[str, str]:
    """Return the settings as variables for `load_settings`, which a detached agent reads.

    What is empty has a word, too, where config.toml may have something else.
    """
    variables = {
        "PMESH_HOME": str(settings.home),
        "PMESH_NAME": settings.name,
        "PMESH_LISTEN": host_port_text(*settings.listen),
        "PMESH_PEERS": ",".join(host_port_text(p.host, p.port) for p in settings.peers) or ",",
        "PMESH_INTERFACES": ",".join(settings.interfaces) or ",",
        "PMESH_NOT_INTERFACES": ",".join(settings.not_interfaces) or ",",
        "PMESH_MDNS": str(settings.mdns).lower(),
        "PMESH_MIN_PEERS": str(settings.min_peers),
        "PMESH_ALLOW_RUN": str(settings.allow_run).lower(),
        "PMESH_COMPRESSION": settings.compression or "none",
        "PMESH_LOG_LEVEL": settings.log_level,
        "PMESH_LOG_JSON": str(settings.log_json).lower(),
        "PMESH_KEY_FILE": str(settings.key_file or ""),
        "PMESH_KEY": settings.key_text or "",
    }
    return {key: value for key, value in variables.items() if value}


def variable_of(key: str) -> str:
    return f"PMESH_{key.upper()}"


def _read_file(path: Path) -> Mapping[str, object]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}") from e
    except ValueError as e:  # not TOML, or not UTF-8
        raise ConfigError(f"{path} is not TOML: {e}") from e
    for key in content:
        if key not in PARSERS:
            near = difflib.get_close_matches(key, PARSERS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it may hold {', '.join(PARSERS)}"
            raise ConfigError(f"unknown key {key!r} in {path}; {hint}")
    return content


def _parse(key: str, value: object, *, source: str, base: Path) -> object:
    """Parse a value of `AgentSettings`; a relative path is relative to `base`."""
    try:
        parsed = PARSERS[key](value)
    except ValueError as e:
        raise ConfigError(f"{source} = {value!r}: {e}") from e
    return (base / parsed).absolute() if isinstance(parsed, Path) else parsed


def _flag_of(key: str) -> str:
    special = {
        "peers": "--peer",
        "mdns": "--no-mdns",
        "interfaces": "--interface",
        "not_interfaces": "--not-interface",
    }
    return special.get(key, f"--{key.replace('_', '-')}")


def _default_name(host_name: str) -> str:
    name = host_name.partition(".")[0].encode(errors="replace")
    label = name[:LONGEST_NAME_BYTES].decode(errors="ignore")
    return label if label and label.isprintable() else "unnamed"
