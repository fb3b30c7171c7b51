"""Drops mDNS packets that are not worth zeroconf's time, before zeroconf sees them.

Reading a packet takes it a hundred times as long as a glance at the bytes, and it keeps what it has
read. Whoever announces a thousand machines a second would have half a core of each agent.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pmesh.core.identity import advertisement as adverts
from pmesh.core.identity.keys import AdvertisementKey
from pmesh.ids import NodeId, node_text

PACKETS_PER_S: Final = 20.0  # of strangers, and of questions; 8 agents that start together send 40
REPEATS_PER_S: Final = 2.0  # an agent announces itself three times in a second, and answers others
MAX_HEARD: Final = 128
_FLAGS_AT: Final = 2  # RFC 1035, section 4.1.1
_IS_RESPONSE: Final = 0x80


@dataclass(slots=True)
class DiscoveryCounters:
    """What was heard and not reported, since the agent's start; for `pmesh status`."""

    forged: int = 0
    """Announcements with our tag, of somebody who lacks our mesh key."""
    not_shown: int = 0
    """Announcements of other meshes and versions, beyond those that are shown."""
    purges: int = 0
    """How often what zeroconf keeps had become too much."""


class PacketFilter:
    """Lets pass what carries an advertisement made with our mesh key, each twice a second.

    Of all else that concerns pmesh a few packets a second pass: questions, and announcements of
    other meshes, which `pmesh status` shows.
    """

    def __init__(
        self,
        service_type: str,
        node: NodeId,
        key: AdvertisementKey,
        counters: DiscoveryCounters,
        *,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is monotonic, in seconds."""
        self._clock = clock
        self._heard: dict[bytes, _Allowance] = {}
        self._labels = service_type.partition(".")[0].encode(), node_text(node).encode()
        self._key = key
        self._counters = counters
        self._questions = _Allowance(PACKETS_PER_S, clock)
        self._others = _Allowance(PACKETS_PER_S, clock)

    def passes(self, packet: bytes) -> bool:
        """Whether zeroconf shall read it."""
        if not any(label in packet for label in self._labels):
            return False  # of printers and televisions
        if not packet[_FLAGS_AT] & _IS_RESPONSE:
            return self._questions.take()
        match code := adverts.judge_untrusted(packet, key=self._key):
            case "forged":
                self._counters.forged += 1
                return False
            case "other":
                return self._others.take()
            case _:
                return self._is_news(code)

    def _is_news(self, code: bytes) -> bool:
        """Whoever has heard an advertisement can send it again, and change what is around it."""
        if code not in self._heard:
            self._heard[code] = _Allowance(REPEATS_PER_S, self._clock)
            if len(self._heard) > MAX_HEARD:
                del self._heard[next(iter(self._heard))]
        return self._heard[code].take()


class FilteringLoop(asyncio.SelectorEventLoop):
    """Hands a datagram on only if it passes."""

    def __init__(self, passes: Callable[[bytes], bool]) -> None:
        super().__init__()
        self._passes = passes

    async def create_datagram_endpoint(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.DatagramProtocol],
        **options: Any,  # noqa: ANN401 - handed on
    ) -> tuple[asyncio.DatagramTransport, asyncio.DatagramProtocol]:
        """As every loop's; the protocol that is returned is the caller's own."""
        transport, outer = await super().create_datagram_endpoint(
            lambda: _Filtered(protocol_factory(), self._passes), **options
        )
        return transport, outer.inner


class _Filtered(asyncio.DatagramProtocol):
    """A protocol behind the filter."""

    def __init__(self, inner: asyncio.DatagramProtocol, passes: Callable[[bytes], bool]) -> None:
        self.inner = inner
        self._passes = passes

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.inner.connection_lost(exc)

    def error_received(self, exc: Exception) -> None:
        self.inner.error_received(exc)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        if self._passes(data):
            self.inner.datagram_received(data, addr)


class _Allowance:
    """So many a second on average, and twice as many at once."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = 2 * per_s
        self._at = clock()

    def take(self) -> bool:
        now = self._clock()
        self._left = min(2 * self._per_s, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
