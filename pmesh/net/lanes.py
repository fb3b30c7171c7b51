"""Lanes: TCP connections that carry a job's tensors along one edge of the ring, sealed.

A lane has one direction for data. The other carries one record, the receiver's greeting: each side
proves that it has read the offer before the other trusts it with anything.

A lane's calls may be cancelled at any await: what was half sent or half received is finished by the
next call, so a lane survives a view change if its edge does (V7). One task may send while another
receives; two may not do the same.
"""

import contextlib
import socket

import trio

from pmesh.core.messages import OfferLane
from pmesh.core.records import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    OVERHEAD_BYTES,
    PREAMBLE_BYTES,
    Opener,
    RecordHeader,
    Sealer,
    read_header_untrusted,
)
from pmesh.errors import LaneBroken, PmeshError, ProtocolError

GREETING_TIMEOUT_S = 5.0  # as for every connection that has not proven what it is


class CallsDiffer(PmeshError):  # noqa: N818 - a state, as in pmesh.errors
    """The neighbour's call of an op is not ours; for the agent to take to the leader (I5, O8)."""

    def __init__(self, op: int, peer: str) -> None:
        super().__init__(f"{peer} called something else as op {op}")
        self.op = op
        """The first op in which the two differ."""


class Lane:
    """One end of a lane. It owns its socket."""

    def __init__(self, sock: socket.socket, offer: OfferLane, *, sending: bool, peer: str) -> None:
        sock.setblocking(False)  # noqa: FBT003 - it takes no names
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # macOS: it was reset; the first send will say so
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours, theirs = offer.key, offer.return_key
        if not sending:
            ours, theirs = theirs, ours
        full, greeting = OVERHEAD_BYTES + MAX_BODY_BYTES, OVERHEAD_BYTES + PREAMBLE_BYTES
        self.peer = peer
        self.sending = sending
        self.bytes_sent = 0
        self.bytes_received = 0
        self.records_dropped = 0
        """Records of a lower roster, which came too late (V4)."""
        self.peer_completed = -1
        """How far the peer had come when it sent its last record (O2)."""
        self._roster = offer.number
        self._socket = sock
        self._closed = trio.Event()
        self._sealer = Sealer(ours)
        self._opener = Opener(theirs)
        self._out = memoryview(bytearray(full if sending else greeting))
        self._unsent = self._out[:0]
        self._in = memoryview(bytearray(greeting if sending else full))
        self._filled = 0  # bytes of _in that hold what has arrived

    def close(self) -> None:
        """Close the connection; whoever waits on it gets LaneBroken."""
        if self._socket.fileno() != -1:
            trio.lowlevel.notify_closing(self._socket)
        self._socket.close()
        self._closed.set()

    def __repr__(self) -> str:
        arrow = "to" if self.sending else "from"
        return f"<Lane {arrow} {self.peer}: {self.bytes_sent} sent, {self.bytes_received} received>"

    async def send(self, header: RecordHeader, body: bytes | memoryview) -> None:
        """Seal and send one record; `body` may be reused when this returns or is cancelled."""
        await self.flush()
        if self.post(header, body):
            await trio.lowlevel.checkpoint()  # a fast network must not keep the loop from others
        else:
            await self.flush()

    def post(self, header: RecordHeader, body: bytes | memoryview) -> bool:
        """Seal a record and hand over what the system takes at once; True if that was all.

        Otherwise the rest goes with `flush`, before which there is no other `post`.
        """
        assert self.idle, "flush before the next post"  # noqa: S101 - its buffer is in use
        self._unsent = self._out[: self._sealer.seal(header, body, self._out)]
        self._send_some()
        return self.idle

    @property
    def idle(self) -> bool:
        """Nothing waits to be sent: `post` may be called."""
        return not self._unsent

    async def flush(self) -> None:
        """Send what `post`, or a call that was cancelled, has left."""
        while self._unsent:
            try:
                await trio.lowlevel.wait_writable(self._socket)
            except (trio.ClosedResourceError, ValueError, OSError) as e:
                raise self._broken("was closed") from e
            self._send_some()

    def _send_some(self) -> None:
        try:
            count = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as e:
            raise self._broken(f"broke: {e.strerror}") from e
        self.bytes_sent += count
        self._unsent = self._unsent[count:]

    async def receive(self, expected: RecordHeader, into: memoryview) -> None:
        """Receive the next record straight into its place.

        The header is judged before its body is read, and nobody is accused on the word of a header
        that is not authenticated. Records of a lower roster are dropped and counted; one of a
        higher stays here until a call expects it: this call then waits to be cancelled (V4).

        Args:
            expected: what the record must be; its `completed` doesn't matter.
            into: as many bytes as `expected.body_bytes`. Garbage after LaneBroken.

        Raises:
            CallsDiffer: the peer's op, or its call, is another.
            LaneBroken: the connection ended, or what it brought is no record of this lane.
        """
        waited = False
        while True:
            waited |= await self._fill(HEADER_BYTES, OVERHEAD_BYTES + expected.body_bytes)
            header = self._header()
            if header.roster > expected.roster:
                await self._closed.wait()
                raise self._broken("was closed")
            if header[:5] == expected[:5]:
                break
            await self._refuse(header, expected)
        end = OVERHEAD_BYTES + header.body_bytes
        waited |= await self._fill(end, end)
        self._open(end, into)
        self.peer_completed = header.completed
        if not waited:
            await trio.lowlevel.checkpoint()  # a fast network must not keep the loop from others

    async def _refuse(self, header: RecordHeader, expected: RecordHeader) -> None:
        """Drop a record that comes too late; raise for any other that is not the expected one."""
        same_call = (header.op, header.fingerprint) == (expected.op, expected.fingerprint)
        if header.roster == expected.roster and same_call:
            raise self._broken("brought a record out of its place")
        end = OVERHEAD_BYTES + header.body_bytes
        await self._fill(end, end)
        self._open(end, bytearray(header.body_bytes))
        if header.roster == expected.roster:
            # Lower: that op ended here without reading it. Higher: there without sending it.
            raise CallsDiffer(min(header.op, expected.op), self.peer)
        self.records_dropped += 1
        await trio.lowlevel.checkpoint()

    async def _fill(self, enough: int, limit: int) -> bool:
        """Receive until `_in` holds `enough`, at most `limit`; True if that took a wait."""
        waited = False
        while self._filled < enough:
            try:
                count = self._socket.recv_into(self._in[self._filled : limit])
            except BlockingIOError:
                waited = True
                await self._wait_readable()
                continue
            except OSError as e:
                raise self._broken(f"broke: {e.strerror}") from e
            if not count:
                raise self._broken("ended")
            self._filled += count
            self.bytes_received += count
        return waited

    async def _wait_readable(self) -> None:
        try:
            await trio.lowlevel.wait_readable(self._socket)
        except (trio.ClosedResourceError, ValueError, OSError) as e:
            raise self._broken("was closed") from e

    def _header(self) -> RecordHeader:
        try:
            return read_header_untrusted(self._in, max_body_bytes=len(self._in) - OVERHEAD_BYTES)
        except ProtocolError as e:
            raise self._broken(f"broke: {e}") from e

    def _open(self, end: int, into: bytearray | memoryview) -> None:
        """Open the record that fills `_in` up to `end`; what came after it moves to the front."""
        try:
            self._opener.open_untrusted(self._in[:end], into)
        except ProtocolError as e:
            raise self._broken(f"broke: {e}") from e
        rest = self._filled - end
        if rest:  # only after a record that was shorter than the expected one
            self._in[:rest] = bytes(self._in[end : self._filled])
        self._filled = rest

    def _broken(self, what: str) -> LaneBroken:
        arrow = "to" if self.sending else "from"
        return LaneBroken(f"the data connection {arrow} {self.peer} {what}")

    async def greet(self, preamble: bytes = b"") -> None:
        """Prove to the peer that we know the offer."""
        begin = len(preamble)
        self._out[:begin] = preamble
        end = begin + self._sealer.seal(self._greeting, b"", self._out[begin:])
        self._unsent = self._out[:end]
        await self.flush()

    async def receive_greeting(self) -> None:
        """Wait until the peer has proven that it knows the offer; else LaneBroken."""
        try:
            with trio.fail_after(GREETING_TIMEOUT_S):
                await self.receive(self._greeting, memoryview(bytearray()))
        except (trio.TooSlowError, CallsDiffer) as e:
            raise self._broken("was never greeted") from e

    @property
    def _greeting(self) -> RecordHeader:
        return RecordHeader(0, self._roster, op=0, segment=0, fingerprint=0, completed=-1)
