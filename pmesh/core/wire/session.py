"""Messages between a local program and its agent, over the Unix socket.

They are tagged, length-prefixed MessagePack. Tensors never travel in them: they lie in arenas,
shared memory whose descriptor the agent passes with `ArenaGranted`. The first request says what a
session is for: a trainer's ops, its messages and store, a question, or a launch. Each of these has
its messages in a module of its own, and reads nothing else from then on.
"""

from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from pmesh.core.values import Verdict
from pmesh.errors import ProtocolError
from pmesh.ids import PRINTABLE, JobName, TrainerId

SESSION_VERSION = 15
MAX_SESSION_MESSAGE_BYTES = 1024 * 1024  # a status of 64 peers is 60 KiB
MAX_REQUEST_BYTES = 64 * 1024  # the largest, an all_to_all among 1024 ranks, takes 22 KiB
ArenaKind: TypeAlias = Literal["input", "output"]
AnyVersion = Annotated[int, Meta(ge=0, le=2**16 - 1)]
JobText = Annotated[JobName, Meta(min_length=1, max_length=64, pattern=PRINTABLE)]
TrainerNumber = Annotated[TrainerId, Meta(ge=0, le=2**32 - 1)]
"""Each entry into a job takes one number: one per millisecond would last 50 days."""


TrainerNumbers = Annotated[tuple[TrainerNumber, ...], Meta(max_length=1024)]
Seconds = Annotated[float, Meta(gt=0)]
"""May be infinite, which means forever; a NaN is not greater than 0."""


Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A script numbers its calls from 0 and has no reason to get near the end."""


ArenaNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ArenaOrNone = Annotated[int, Meta(ge=-1, le=2**63 - 1)]


class SessionMessage(msgspec.Struct, frozen=True):
    """A request of a local program, or a reply of its agent."""


_encoder = msgspec.msgpack.Encoder()
_Any_co = TypeVar("_Any_co", bound=SessionMessage, covariant=True)


class SessionDecoder(Generic[_Any_co]):
    """Reads the requests, or the replies, of one kind of session."""

    def __init__(self, what: Literal["request", "reply"], kinds: Any) -> None:  # noqa: ANN401 - a union of classes
        self._what = what
        self._decoder: msgspec.msgpack.Decoder[_Any_co] = msgspec.msgpack.Decoder(kinds)

    def decode_untrusted(self, data: bytes) -> _Any_co:
        """Reverse `encode`; raise ProtocolError for anything else."""
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise ProtocolError(f"not a session {self._what}: {e}") from e


def encode(message: SessionMessage) -> bytes:
    """Return the message as bytes, without a length prefix."""
    return _encoder.encode(message)


class WantArena(SessionMessage, frozen=True, tag="want_arena"):
    """Requests an input arena of at least this size; answered by ArenaGranted or Refused."""

    nbytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """May be more than any machine has: the answer is then a named error."""
    lasting: bool = False
    """True if the trainer keeps values there between ops; else the agent may take it back while the
    trainer's group rests."""


class DropArena(SessionMessage, frozen=True, tag="drop_arena"):
    """The trainer no longer uses an input arena, or an output arena of a message or a loan."""

    arena: ArenaNumber


class Refused(SessionMessage, frozen=True, tag="refused"):
    """The request cannot be met. A session that asked to join ends; another may continue."""

    verdict: Verdict


class ArenaGranted(SessionMessage, frozen=True, tag="arena_granted"):
    """An arena; its descriptor comes with the last byte of this message."""

    arena: int
    kind: ArenaKind
    nbytes: int


class ArenaGone(SessionMessage, frozen=True, tag="arena_gone"):
    """The agent no longer uses this output arena; unmap it.

    Or it has taken an input arena back, and does not begin the op that names it: name another.
    """

    arena: int


class MessageFailed(SessionMessage, frozen=True, tag="message_failed"):
    """A call on a trainer's second session failed. Ranks need not agree on it."""

    call: int
    verdict: Verdict
