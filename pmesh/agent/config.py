"""What a user may set: flags win over `PMESH_*`, these over config.toml, these over defaults."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pmesh.agent.parsing import (
    EVERYWHERE,
    LONGEST_NAME_BYTES,
    PARSERS,
    Listen,
    LogLevel,
    host_port_text,
)
from pmesh.core.messages import Address
from pmesh.errors import ConfigError

CONFIG_NAME = "config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `pmesh up` runs with."""

    home: Path
    name: str
    """What others call this machine."""
    listen: Listen = EVERYWHERE
    peers: tuple[Address, ...] = ()
    """Dialled for ever, besides what mDNS finds."""
    mdns: bool = True
    min_peers: int = 0
    """How many peers must be there before a job may begin."""
    compression: str = ""
    """Of gradients, for trainers here that do not say it; empty: none."""
    log_level: LogLevel = "info"
    log_json: bool = False
    key_file: Path | None = None
    """Where the mesh key lies, if not in the home."""
    key_text: str | None = field(default=None, repr=False)  # a secret: it must not reach a log
    """The mesh key as PMESH_KEY gives it."""


def load_settings(
    home: Path, *, flags: Mapping[str, object], environment: Mapping[str, str], host_name: str
) -> Settings:
    """Lay the four layers over each other.

    Args:
        home: The home directory, whose config.toml is read if there is one.
        flags: What the command line gave, by the names of `Settings`; None where it gave nothing.
        environment: As `os.environ`; an empty variable counts as absent.
        host_name: The machine's own, the default of `name`.

    Raises:
        ConfigError: A key of the file is unknown or a value can't be used; names where it stands.
    """
    chosen: dict[str, object] = {"name": _default_name(host_name)}
    path = home / CONFIG_NAME
    for key, value in _read_file(path).items():
        chosen[key] = _parse(key, value, source=f"{key} in {path}", base=home)
    for key in PARSERS:
        variable = variable_of(key)
        if environment.get(variable):
            chosen[key] = _parse(key, environment[variable], source=variable, base=Path.cwd())
    if environment.get("PMESH_KEY"):
        chosen |= {"key_text": environment["PMESH_KEY"], "key_file": None}
    for key, value in flags.items():
        if value is not None:
            chosen[key] = _parse(key, value, source=_flag_of(key), base=Path.cwd())
            if key == "key_file":
                chosen["key_text"] = None
    return Settings(home=home, **chosen)  # type: ignore[arg-type] # each was parsed to its field


def as_environment(settings: Settings) -> dict[str, str]:
    """The settings as the variables that `load_settings` reads; what a detached agent gets."""
    variables = {
        "PMESH_HOME": str(settings.home),
        "PMESH_NAME": settings.name,
        "PMESH_LISTEN": host_port_text(*settings.listen),
        "PMESH_PEERS": ",".join(host_port_text(p.host, p.port) for p in settings.peers),
        "PMESH_MDNS": str(settings.mdns).lower(),
        "PMESH_MIN_PEERS": str(settings.min_peers),
        "PMESH_COMPRESSION": settings.compression,
        "PMESH_LOG_LEVEL": settings.log_level,
        "PMESH_LOG_JSON": str(settings.log_json).lower(),
        "PMESH_KEY_FILE": str(settings.key_file or ""),
        "PMESH_KEY": settings.key_text or "",
    }
    return {key: value for key, value in variables.items() if value}


def variable_of(key: str) -> str:
    """The environment variable of a setting."""
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
    """The value as `Settings` holds it; a relative path is meant from `base`."""
    try:
        parsed = PARSERS[key](value)
    except ValueError as e:
        raise ConfigError(f"{source} = {value!r}: {e}") from e
    return base / parsed if isinstance(parsed, Path) else parsed


def _flag_of(key: str) -> str:
    special = {"peers": "--peer", "mdns": "--no-mdns"}
    return special.get(key, f"--{key.replace('_', '-')}")


def _default_name(host_name: str) -> str:
    label = host_name.partition(".")[0].encode()[:LONGEST_NAME_BYTES].decode(errors="ignore")
    return label if label and label.isprintable() else "unnamed"
