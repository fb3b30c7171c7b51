"""The mesh key of an agent, and those that it had before.

The file `mesh_keys` in the home says which key is the latest; it is written before anything else,
in one step. An agent that starts with an earlier key, from wherever it has it, takes the latest.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
import trio
from msgspec import Meta

from pmesh.agent.home import move_away, read_private, store_mesh_key, write_private
from pmesh.core.identity.certificates import issue_credentials
from pmesh.core.identity.keys import (
    KEY_BYTES,
    AdvertisementKey,
    MeshKey,
    NodeKey,
    namespace_tag,
)
from pmesh.core.identity.rotations import MAX_ROTATION_BYTES, Rotation, supersedes
from pmesh.errors import ConfigError, KeyFileError
from pmesh.home_paths import MESH_KEYS_NAME
from pmesh.net.links.tls import TlsContexts

MAX_FORMER: Final = 8  # a mesh whose key changes each week: two months
FORMER_S: Final = 90 * 24 * 3600.0  # how long a machine may be away and still get the latest key
MAX_FILE_BYTES: Final = 2 * MAX_ROTATION_BYTES + 4096  # base64 of the rotation, and former keys


class Former(msgspec.Struct, frozen=True):
    """A mesh key that was replaced."""

    key: Annotated[MeshKey, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    until: float
    """When it is forgotten: Unix seconds, by this machine's clock."""


class StoredKeys(msgspec.Struct, frozen=True):
    """What the file `mesh_keys` holds."""

    rotation: Rotation | None = None
    former: Annotated[tuple[Former, ...], Meta(max_length=MAX_FORMER)] = ()
    """The latest last."""


def load_keys(home: Path, mesh_key: MeshKey) -> StoredKeys:
    """Return what the home's file says of this key; nothing if the key is of another mesh.

    Raises ConfigError if the file is not this user's own, can be read by others, or is not ours.
    """
    stored = _read(home)
    keys = {former.key for former in stored.former}
    if stored.rotation is None or mesh_key not in keys | {stored.rotation.key}:
        return StoredKeys()  # somebody has typed 'pmesh key set' since
    return stored


def all_keys(home: Path) -> list[MeshKey]:
    """Return the latest key and those that it has replaced. Raises ConfigError as `load_keys`."""
    stored = _read(home)
    latest = [] if stored.rotation is None else [stored.rotation.key]
    return [*latest, *(former.key for former in stored.former)]


def latest_key(home: Path, mesh_key: MeshKey) -> MeshKey:
    """Return the key that has replaced this one; the key itself if none has."""
    stored = load_keys(home, mesh_key)
    return mesh_key if stored.rotation is None else stored.rotation.key


def store_first_key(home: Path, key: MeshKey) -> None:
    """Write a key that follows no other: what was known of earlier ones is forgotten.

    Raises KeyFileError if that fails.
    """
    store_mesh_key(home, key, in_place_of=home / MESH_KEYS_NAME)


class Keyring:
    """The keys of one agent.

    Args:
        home: Where they are kept.
        mesh_key: With which it starts.
        node_key: Its own.
        wall_clock: Returns the time, in Unix seconds.
    """

    def __init__(
        self,
        home: Path,
        mesh_key: MeshKey,
        node_key: NodeKey,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._home = home
        self._node_key = node_key
        self._wall_clock = wall_clock
        self._stored = load_keys(home, mesh_key)
        self._lock = trio.Lock()
        self.changed = trio.Event()
        """Another key is in use; replaced when it is set."""
        self._use(mesh_key if self._stored.rotation is None else self._stored.rotation.key)

    @property
    def rotation(self) -> Rotation | None:
        """By which the key in use has replaced another; None for a mesh's first key."""
        return self._stored.rotation

    def ways(self) -> list[tuple[bytes, TlsContexts]]:
        """Return the tags of all keys and their contexts, the key in use first."""
        former = [(namespace_tag(key), self._contexts_of(key)) for key in self._former_keys()]
        return [(self.advertisement_key.tag, self.contexts), *reversed(former)]

    def former_contexts(self, tag: bytes) -> TlsContexts | None:
        """Return the contexts of a key that was replaced; None if it is not known any more."""
        keys = (key for key in self._former_keys() if namespace_tag(key) == tag)
        return next(map(self._contexts_of, keys), None)

    async def adopt(
        self, rotation: Rotation, *, fits: Callable[[Rotation], bool] = lambda _: True
    ) -> bool:
        """Write a rotation to the disk, and use its key; return False if ours is as good.

        Args:
            rotation: It was checked.
            fits: Asked once no other rotation is being written; if it returns False, so does this.

        Raises KeyFileError if it can't be written: then nothing has changed.
        """
        async with self._lock:
            if not (supersedes(rotation, self.rotation) and fits(rotation)):
                return False
            now, former = self._wall_clock(), list(self._stored.former)
            if rotation.key != self.mesh_key:
                former.append(Former(self.mesh_key, now + FORMER_S))
            kept = [each for each in former if each.until > now and each.key != rotation.key]
            stored = StoredKeys(rotation, tuple(kept[-MAX_FORMER:]))
            with trio.CancelScope(shield=True):  # the file and what is in use must not differ
                await trio.to_thread.run_sync(_store, self._home, stored)
            self._stored = stored
            if rotation.key != self.mesh_key:
                self._use(rotation.key)
                self.changed.set()
                self.changed = trio.Event()
            return True

    def _use(self, key: MeshKey) -> None:
        self.mesh_key = key
        self.contexts = self._contexts_of(key)
        self.advertisement_key = AdvertisementKey.of(key)

    def _former_keys(self) -> list[MeshKey]:
        now = self._wall_clock()
        return [former.key for former in self._stored.former if former.until > now]

    def _contexts_of(self, key: MeshKey) -> TlsContexts:
        return TlsContexts.of(issue_credentials(key, self._node_key))


def _read(home: Path) -> StoredKeys:
    path = home / MESH_KEYS_NAME
    try:
        content = read_private(path, most_bytes=MAX_FILE_BYTES)
        return StoredKeys() if content is None else msgspec.json.decode(content, type=StoredKeys)
    except KeyFileError as e:
        raise ConfigError(str(e)) from e
    except ValueError as e:  # msgspec's, too
        raise ConfigError(f"{path} is not what the agent writes: {move_away(path)}") from e


def _store(home: Path, stored: StoredKeys) -> None:
    """Write both files. The first one counts; without the second, it leads from the old key."""
    assert stored.rotation is not None  # noqa: S101 - it is what is stored
    write_private(home / MESH_KEYS_NAME, msgspec.json.encode(stored) + b"\n")
    with contextlib.suppress(KeyFileError):  # the disk has become full in between
        store_mesh_key(home, stored.rotation.key)
