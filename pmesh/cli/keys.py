"""`pmesh key`, and the search for the agent's mesh key."""

import getpass
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from pmesh.agent.config import AgentSettings
from pmesh.agent.home import (
    load_mesh_key,
    open_home,
    read_mesh_key,
)
from pmesh.agent.mesh.keyring import latest_key, store_first_key
from pmesh.core.identity.keys import MeshKey, mesh_key_from_text, mesh_key_text
from pmesh.errors import ConfigError, KeyFileError
from pmesh.home_paths import MESH_KEY_NAME, check_home, home_directory
from pmesh.terminal.lines import complain, say

MESH_KEY_BYTES = 32
_PROMPT = "Paste the mesh key (it is not shown) and press Return: "
_LONGEST_INPUT_CHARACTERS = 4096  # a key is one line; we don't read a huge file piped by mistake


def make(home: Path | None) -> int:
    """`pmesh key new`. Raises KeyFileError if the home has a mesh key."""
    directory = open_home(home_directory(home))
    if load_mesh_key(directory) is not None:
        raise KeyFileError(
            f"{directory / MESH_KEY_NAME} already holds a mesh key ('pmesh key show' prints it);"
            " to start a new mesh, move that file away first"
        )
    say(*invitation(_new_key(directory)))
    return 0


def show(home: Path | None) -> int:
    """`pmesh key show`. Raises KeyFileError if there is none.

    Only the key goes to standard output, so that it can be piped to `pmesh key set`.
    """
    directory = home_directory(home)
    check_home(directory, holds_keys=True)
    text = os.environ.get("PMESH_KEY")
    key = _parse(text, "PMESH_KEY") if text else load_mesh_key(directory)
    if key is None:
        raise KeyFileError(f"{directory} holds no mesh key; 'pmesh key new' makes one")
    key = latest_key(directory, key)
    complain("Every machine with this key is a member of the mesh; add others with 'pmesh key set'")
    say(mesh_key_text(key))
    return 0


def take(words: Sequence[str], home: Path | None) -> int:
    """`pmesh key set`.

    Raises:
        ConfigError: The key is on the command line, or the input is not a key.
    """
    if words:
        raise ConfigError(
            "'pmesh key set' takes no key on the command line, where other users can see it and "
            "the shell records it; type 'pmesh key set' alone and paste the key when it asks. If "
            "you typed a key, delete that line from the shell's history, and preferably replace "
            "the key: 'pmesh key rotate' on a machine that has it"
        )
    directory = home_directory(home)
    check_home(directory, holds_keys=True)  # before the user is asked for anything
    key = _ask_key()
    store_first_key(open_home(directory), key)
    say(f"The mesh key is in {directory / MESH_KEY_NAME}. An agent takes it when it starts.")
    return 0


def has_mesh_key(settings: AgentSettings) -> bool:
    """Return whether the agent needs no new key. Raises KeyFileError if the home's is none."""
    given = settings.key_text is not None or settings.key_file is not None
    return given or load_mesh_key(settings.home) is not None


def find_mesh_key(settings: AgentSettings) -> MeshKey:
    """Return the agent's mesh key; if there is none at all, make one, and say how to add machines.

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
        say("This machine begins a new mesh. To add another machine to it, type here: pmesh invite")
    return key


def invitation(key: MeshKey) -> tuple[str, ...]:
    """Tell the user what to do with a new key, in lines."""
    to_do = "On each other machine run 'pmesh key set', and paste this line when it asks:"
    or_so = "Or run 'pmesh up' here, then 'pmesh invite': a short code replaces the key."
    return f"A new mesh key. {to_do}", "", f"    {mesh_key_text(key)}", "", or_so


def _ask_key() -> MeshKey:
    asks = sys.stdin.isatty()
    try:
        text = getpass.getpass(_PROMPT) if asks else sys.stdin.read(_LONGEST_INPUT_CHARACTERS)
    except (EOFError, UnicodeDecodeError):  # Ctrl-D, or a file that is not text
        text = ""
    return _parse(text, "what was pasted" if asks else "standard input")


def _new_key(home: Path) -> MeshKey:
    key = MeshKey(secrets.token_bytes(MESH_KEY_BYTES))
    store_first_key(home, key)
    return key


def _parse(text: str, source: str) -> MeshKey:
    try:
        return mesh_key_from_text(text)
    except ValueError as e:
        raise ConfigError(f"{source} is not a mesh key: {e}; 'pmesh key show' prints one") from e
