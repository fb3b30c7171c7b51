"""The host files of MLX and of Open MPI, for `pmesh up --peers-from`."""

from pathlib import Path
from typing import Annotated

import msgspec

from pmesh.errors import ConfigError

MAX_HOSTS = 64  # a mesh has 8 machines


class _Host(msgspec.Struct):
    """One machine, as `mlx.launch --hostfile` and `mlx.distributed_config` know it."""

    ssh: str = ""
    ips: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_HOSTS)] = ()


class _Described(msgspec.Struct):
    """What newer versions of MLX write."""

    hosts: list[_Host]


def read_hosts(path: Path) -> tuple[str, ...]:
    """Return an address or a name of each machine, of which this one may be one.

    Raises ConfigError if the file can't be read, is none of the two kinds, or names no machine.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--peers-from: can't read {path}: {e}") from e
    try:
        hosts = hosts_of(text)
    except msgspec.ValidationError as e:
        raise ConfigError(f"--peers-from: {path} is no host file of MLX: {e}") from e
    except msgspec.DecodeError as e:
        raise ConfigError(f"--peers-from: {path} is no JSON: {e}") from e
    if not 0 < len(hosts) <= MAX_HOSTS:
        raise ConfigError(f"--peers-from: {path} names {len(hosts)} machines, not 1 to {MAX_HOSTS}")
    return hosts


def hosts_of(text: str) -> tuple[str, ...]:
    r"""Return what a file with this text names; raise msgspec.DecodeError for other JSON.

    >>> hosts_of('[{"ssh": "ana@mac-1", "ips": ["10.0.0.1"]}, {"ssh": "ana@mac-2.local"}]')
    ('10.0.0.1', 'mac-2.local')
    >>> hosts_of("# at home\nmac-1 slots=2\n\nmac-2.local   # the old one\n")
    ('mac-1', 'mac-2.local')
    """
    if not text.startswith(("[", "{")):
        lines = (line.partition("#")[0].split() for line in text.splitlines())
        return tuple(words[0] for words in lines if words)
    found = msgspec.json.decode(text, type=list[_Host] | _Described)
    hosts = found.hosts if isinstance(found, _Described) else found
    named = (next(iter(host.ips), host.ssh.rpartition("@")[2]) for host in hosts)
    return tuple(name for name in named if name)
