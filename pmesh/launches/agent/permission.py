"""Whose commands this machine runs: what `pmesh allow run` has written into the home."""

from pathlib import Path

import msgspec

from pmesh.agent.home import move_away, read_private, write_private
from pmesh.errors import ConfigError, KeyFileError
from pmesh.ids import NodeId, node_text

PERMISSION_NAME = "allow_run"


class Permission(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner of this machine has allowed; by default nothing."""

    everyone: bool = False
    """Whether every member of the mesh may run commands."""
    members: tuple[str, ...] = ()
    """Otherwise only these may, by node id as text: a member chooses its name, but not its id."""
    as_root: bool = False
    """Whether commands may run as root, if the agent does."""


def load_permission(home: Path) -> Permission:
    """Return what is allowed; nothing if there is no such file.

    Raises:
        ConfigError: The file is not this user's own, can be read by others, or is not ours.
    """
    path = home / PERMISSION_NAME
    try:
        content = read_private(path)
        return Permission() if content is None else msgspec.json.decode(content, type=Permission)
    except KeyFileError as e:
        raise ConfigError(str(e)) from e
    except msgspec.DecodeError as e:
        raise ConfigError(f"{path} is not what 'pmesh allow' writes: {move_away(path)}") from e


def store_permission(home: Path, permission: Permission) -> None:
    """Write what is allowed; it counts from the next request on."""
    write_private(home / PERMISSION_NAME, msgspec.json.encode(permission) + b"\n")


def why_not(permission: Permission, asks: NodeId, *, allowed_by_option: bool, is_root: bool) -> str:
    """Return why this machine runs no command of a member; "" if it does.

    >>> why_not(Permission(), NodeId(bytes(32)), allowed_by_option=False, is_root=False)
    'it does not run what others ask for; if it shall, type there: pmesh allow run'
    >>> why_not(Permission(), NodeId(bytes(32)), allowed_by_option=True, is_root=False)
    ''
    """
    named = node_text(asks) in permission.members
    if not (permission.everyone or named or allowed_by_option):
        whom = "what this machine asks for" if permission.members else "what others ask for"
        return f"it does not run {whom}; if it shall, type there: pmesh allow run"
    if is_root and not permission.as_root:
        return (
            "its agent runs as root, and commands would, too; run 'pmesh up' as another user there,"
            " or type there: pmesh allow run --as-root"
        )
    return ""
