"""Length-prefixed messages: a buffer in, whole messages out. Links and sessions share it."""

from pmesh.errors import ProtocolError

PREFIX_BYTES = 4


def frame(message: bytes) -> bytes:
    r"""The message behind its length.

    >>> frame(b"hi")
    b'\x00\x00\x00\x02hi'
    """
    return len(message).to_bytes(PREFIX_BYTES, "big") + message


class FrameReader:
    """A byte protocol: `receive_data` what arrived, then take whole messages with `next_message`.

    It never holds more than one message beyond what was received at once, and refuses a length over
    `max_bytes` when it sees the prefix: a claim of 4 GiB costs four bytes.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes as they came from the stream."""
        self._buffer += data

    def next_message_untrusted(self) -> bytes | None:
        """The next whole message; None until more arrives. Raises ProtocolError if too long."""
        if len(self._buffer) < PREFIX_BYTES:
            return None
        length = int.from_bytes(self._buffer[:PREFIX_BYTES], "big")
        if length > self._max_bytes:
            raise ProtocolError(f"a message claims {length} bytes, {self._max_bytes} are allowed")
        end = PREFIX_BYTES + length
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[PREFIX_BYTES:end])
        del self._buffer[:end]
        return message

    @property
    def buffered(self) -> int:
        """Bytes received and not yet taken."""
        return len(self._buffer)
