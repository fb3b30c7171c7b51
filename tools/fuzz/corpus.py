"""What has broken something once is kept, and tried again first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from pmesh.core.wire.framing import FrameReader, frame

ANY_SIZE = 1 << 30
LAST = 8000  # messages: what has broken something was among the last; one may be sent 2,000 times


class KeptCase(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of one liar, up to a finding. Members are the same at each replay."""

    liar: Literal["member", "trainer"]
    seed: int
    finding: str
    messages: tuple[bytes, ...]


class MessageRecorder:
    """Writes what is sent into a file, so that it is there however the process ends."""

    def __init__(self, file: Path, encode: Callable[[Any], bytes]) -> None:
        self._file = file
        self._encode = encode

    def __call__(self, message: object) -> None:
        with self._file.open("ab") as file:
            file.write(frame(self._encode(message)))


def recorded(file: Path) -> tuple[bytes, ...]:
    """The last messages in a recorder's file; none if there is no file."""
    reader, messages = FrameReader(max_bytes=ANY_SIZE), list[bytes]()
    reader.receive_data(file.read_bytes() if file.exists() else b"")
    while (message := reader.next_message_untrusted()) is not None:
        messages.append(message)
    return tuple(messages[-LAST:])


def keep(corpus: Path, case: KeptCase) -> Path:
    """Write the case into the folder; returns its file."""
    corpus.mkdir(parents=True, exist_ok=True)
    file = corpus / f"{case.liar}-{case.seed}.msgpack"
    file.write_bytes(msgspec.msgpack.encode(case))
    return file


def load(file: Path) -> KeptCase:
    """The reverse of `keep`; raises msgspec.ValidationError for anything else."""
    return msgspec.msgpack.decode(file.read_bytes(), type=KeptCase)
