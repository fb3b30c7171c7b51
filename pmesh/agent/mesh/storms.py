"""Notices cables that form a loop: each broadcast then goes round for ever, and takes all there is.

Three Macs with three Thunderbolt cables are such a loop, as a Thunderbolt bridge passes on what it
receives. Only packets are counted: a storm is very many that nobody answers.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Final, NoReturn, Protocol

import psutil
import trio

from pmesh.agent.events import News
from pmesh.net.links.interfaces import AddressWatch

COUNT_EVERY_S: Final = 5.0
STORM_PACKETS_PER_S: Final = 10_000  # an idle bridge receives some tens
ANSWERED: Final = 200  # TCP sends a packet for 45 of 1,500 bytes at the latest (64 KiB)
LASTS: Final = 2  # intervals in a row: a burst of something else is over by then


class Packets(Protocol):
    """What `psutil.net_io_counters` says of an interface."""

    @property
    def packets_sent(self) -> int:
        """Since the system started."""
        ...

    @property
    def packets_recv(self) -> int:
        """Since the system started."""
        ...


def count_packets() -> Mapping[str, Packets]:
    """Return the packets of each interface, as the system counts them."""
    return psutil.net_io_counters(pernic=True)


def storm_packets_per_s(before: Packets, after: Packets, *, interval_s: float) -> float:
    """Return how many packets came a second if hardly one was answered; 0.0 if it is no storm."""
    received = after.packets_recv - before.packets_recv
    sent = after.packets_sent - before.packets_sent
    is_storm = received >= STORM_PACKETS_PER_S * interval_s and received > ANSWERED * sent
    return received / interval_s if is_storm else 0.0


async def watch_storms(
    watch: AddressWatch,
    count: Callable[[], Mapping[str, Packets]],
    noticed: Callable[[News], None],
) -> NoReturn:
    """Note each storm on a Thunderbolt interface once, when it has lasted for ten seconds.

    Args:
        watch: This machine's addresses.
        count: Returns the packets of each interface, since the system started.
        noticed: Is called with the event.
    """
    lasted: dict[str, int] = {}
    before: Mapping[str, Packets] = {}
    counted_at = trio.current_time()
    while True:
        cables = {own.interface for own in watch.current if own.kind == "thunderbolt"}
        after: Mapping[str, Packets] = {}
        with contextlib.suppress(OSError):  # no descriptor is left now
            after = count() if cables else {}
        now = trio.current_time()
        for interface in cables & before.keys() & after.keys():
            per_s = storm_packets_per_s(
                before[interface], after[interface], interval_s=now - counted_at
            )
            lasted[interface] = lasted.get(interface, 0) + 1 if per_s else 0
            if lasted[interface] == LASTS:
                noticed(News(kind="network loop", text=_describe(interface, per_s)))
        before, counted_at = after, now
        await trio.sleep(COUNT_EVERY_S)


def _describe(interface: str, per_s: float) -> str:
    return (
        f"{interface} receives {per_s:,.0f} packets a second that nobody answers: its cables may "
        "form a loop; unplug one cable of the ring, or turn off the Thunderbolt bridge"
    )
