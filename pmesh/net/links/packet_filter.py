"""Drops useless mDNS packets before zeroconf reads them.

zeroconf takes a hundred times as long for a packet as this filter does, and keeps its records. A
machine that announces a thousand names a second would take half a core of each agent.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pmesh.core.identity import advertisement as adverts
from pmesh.core.identity.keys import AdvertisementKey
from pmesh.ids import NodeId, node_text

PACKETS_PER_S: Final = 20.0  # each for strangers and questions; 8 agents that start send 40
REPEATS_PER_S: Final = 2.0  # an agent announces itself three times in a second, and answers others
MAX_HEARD: Final = 128
_FLAGS_AT: Final = 2  # RFC 1035, section 4.1.1
_IS_RESPONSE: Final = 0x80


@dataclass(slots=True)
class DiscoveryCounters:
    """Announcements received but not reported since the agent's start; for `pmesh status`."""

    forged: int = 0
    """Announcements with our tag from a sender without our mesh key."""
    not_shown: int = 0
    """Announcements of other meshes and versions, beyond those that are shown."""
    purges: int = 0
    """How often zeroconf's cache was purged."""


class PacketFilter:
    """Passes each advertisement made with our mesh key, twice a second.

    Of other packets about pmesh only a few a second pass: questions, and announcements of other
    meshes, which `pmesh status` shows.
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
        """Return True if zeroconf may read the packet."""
        if not any(label in packet for label in self._labels):
            return False  # from printers and televisions
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
        """Limit repeats: any machine can replay an advertisement inside a changed packet."""
        if code not in self._heard:
            self._heard[code] = _Allowance(REPEATS_PER_S, self._clock)
            if len(self._heard) > MAX_HEARD:
                del self._heard[next(iter(self._heard))]
        return self._heard[code].take()


class FilteringLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that drops the datagrams which the filter rejects."""

    def __init__(self, passes: Callable[[bytes], bool]) -> None:
        super().__init__()
        self._passes = passes

    async def create_datagram_endpoint(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.DatagramProtocol],
        **options: Any,  # noqa: ANN401 - passed on
    ) -> tuple[asyncio.DatagramTransport, asyncio.DatagramProtocol]:
        """Return the caller's own protocol, as every loop does."""
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
    """A token bucket: `per_s` a second on average, and twice as many at once."""

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
