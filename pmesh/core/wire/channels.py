"""What every control message between two agents is, whichever part of an agent it is for."""

from typing import ClassVar

import msgspec

MAX_MESSAGE_BYTES = 256 * 1024  # 0.2 s at 10 Mbit/s: heartbeats behind it are not late
MAX_ENTRIES = 1024  # entries of any kind about one member's own jobs in one message


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A control message, with its bound in bytes."""

    most_bytes: ClassVar[int] = MAX_MESSAGE_BYTES
    """The bound: smaller for what contains others' values, so that it fits whatever they say."""


class ForRanks(Message, frozen=True):
    """A message between two agents about what ranks send each other or share."""
