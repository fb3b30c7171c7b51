"""`pmesh key`, and how a command finds the mesh key."""

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from pmesh.agent.config import Settings
from pmesh.agent.home import open_home
from pmesh.agent.key_files import (
    MESH_KEY_NAME,
    load_mesh_key,
    read_mesh_key,
    store_mesh_key,
)
from pmesh.cli.terminal import say
from pmesh.client.home import home_directory
from pmesh.core.identity import MeshKey, mesh_key_from_text, mesh_key_text
from pmesh.errors import ConfigError, KeyFileError

MESH_KEY_BYTES = 32


def make(home: Path | None) -> int:
    """`pmesh key new`. Raises KeyFileError if the home has a mesh key."""
    directory = open_home(home_directory(home))
    if load_mesh_key(directory) is not None:
        raise KeyFileError(
            f"{directory / MESH_KEY_NAME} holds a mesh key: 'pmesh key show' prints it; to leave"
            " its mesh for a new one, move that file away first"
        )
    say(invitation(_new_key(directory)))
    return 0


def show(home: Path | None) -> int:
    """`pmesh key show`. Raises KeyFileError if there is none."""
    directory = home_directory(home)
    text = os.environ.get("PMESH_KEY")
    key = _parse(text, "PMESH_KEY") if text else load_mesh_key(directory)
    if key is None:
        raise KeyFileError(f"{directory} holds no mesh key; 'pmesh key new' makes one")
    say("Whoever holds this key is a member of the mesh; other machines take it by 'pmesh key set'")
    say(mesh_key_text(key))
    return 0


def take(words: Sequence[str], home: Path | None) -> int:
    """`pmesh key set`: the key may come in several words, as a terminal has broken it."""
    if words:
        text = " ".join(words)
    else:
        if sys.stdin.isatty():
            say("Paste the mesh key, then press Return and Ctrl-D:")
        text = sys.stdin.read()
    key = _parse(text, "TEXT")
    directory = open_home(home_directory(home))
    store_mesh_key(directory, key)
    say(f"The mesh key is in {directory / MESH_KEY_NAME}. An agent takes it when it starts.")
    return 0


def find_mesh_key(settings: Settings) -> MeshKey:
    """The mesh key that an agent shall use; makes one, and says so, where there is none at all.

    Raises:
        ConfigError: PMESH_KEY holds no mesh key.
        KeyFileError: The key file can't be used.
    """
    if settings.key_text is not None:
        return _parse(settings.key_text, "PMESH_KEY")
    if settings.key_file is not None:
        return read_mesh_key(settings.key_file)
    key = load_mesh_key(settings.home)
    if key is None:
        key = _new_key(settings.home)
        say(invitation(key))
    return key


def invitation(key: MeshKey) -> str:
    """What the user does next with a new key."""
    command = f"pmesh key set {mesh_key_text(key)}"
    return f"A new mesh key. On each other machine type:\n\n    {command}\n"


def _new_key(home: Path) -> MeshKey:
    key = MeshKey(secrets.token_bytes(MESH_KEY_BYTES))
    store_mesh_key(home, key)
    return key


def _parse(text: str, source: str) -> MeshKey:
    try:
        return mesh_key_from_text(text)
    except ValueError as e:
        raise ConfigError(f"{source} is not a mesh key: {e}; 'pmesh key show' prints one") from e
