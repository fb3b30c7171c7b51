"""A loop of cables is named; only the counters of packets are made up."""

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.events import News
from pmesh.agent.mesh.storms import (
    ANSWERED,
    COUNT_EVERY_S,
    LASTS,
    STORM_PACKETS_PER_S,
    Packets,
    count_packets,
    storm_packets_per_s,
    watch_storms,
)
from pmesh.core.links.addresses import InterfaceKind, LocalAddress
from pmesh.net.links.interfaces import AddressWatch

MANY = round(STORM_PACKETS_PER_S * COUNT_EVERY_S)


@dataclass
class PacketCounts:
    packets_sent: int
    packets_recv: int


@pytest.mark.parametrize(
    ("received", "sent", "per_s"),
    [
        (MANY, 0, STORM_PACKETS_PER_S),
        (2 * MANY, MANY // ANSWERED, 2 * STORM_PACKETS_PER_S),
        (MANY - 1, 0, 0),  # not so many
        (2 * MANY, 2 * MANY // 45, 0),  # a large file comes, and TCP answers
        (2 * MANY, 2 * MANY, 0),  # tensors go around the ring
    ],
)
def test_a_storm_is_very_many_packets_that_nobody_answers(
    received: int, sent: int, per_s: float
) -> None:
    before, after = PacketCounts(7, 9), PacketCounts(7 + sent, 9 + received)
    assert storm_packets_per_s(before, after, interval_s=COUNT_EVERY_S) == per_s


async def news_of(
    clock: MockClock,
    received: Iterator[int],
    *,
    seconds: float,
    kind: InterfaceKind = "thunderbolt",
) -> list[str]:
    """Return what is noted while an interface receives so many packets in each interval."""
    watch = AddressWatch()
    watch.current = (LocalAddress(interface="bridge0", host="10.0.0.1", prefix_bits=24, kind=kind),)
    total = 0
    noted: list[News] = []

    def count() -> Mapping[str, Packets]:
        nonlocal total
        total += next(received)
        return {"bridge0": PacketCounts(0, total), "en0": PacketCounts(0, 100 * total)}

    began = clock.current_time()
    with trio.move_on_after(seconds):
        await watch_storms(watch, count, noted.append)
    assert clock.current_time() == began + seconds
    assert {news.kind for news in noted} <= {"network loop"}
    return [news.text for news in noted]


def each(*amounts: int) -> Iterator[int]:
    yield from amounts
    while True:
        yield amounts[-1]


async def test_a_storm_is_told_once_with_what_to_do(clock: MockClock) -> None:
    (text,) = await news_of(clock, each(0, 2 * MANY), seconds=100)
    assert text == (
        "bridge0 receives 20,000 packets a second that nobody answers: its cables may form a "
        "loop; unplug one cable of the ring, or turn off the Thunderbolt bridge"
    )


async def test_a_second_storm_is_told_again(clock: MockClock) -> None:
    storm = [2 * MANY] * LASTS
    assert len(await news_of(clock, each(0, *storm, 0, *storm, 0), seconds=100)) == 2


async def test_a_burst_is_no_storm(clock: MockClock) -> None:
    assert not await news_of(clock, each(0, 2 * MANY, 0), seconds=100)


class CountsInVain(Iterator[int]):
    """Of the first packets there is no count: no descriptor is left."""

    def __init__(self, then: Iterator[int]) -> None:
        self._failed, self._then = False, then

    def __next__(self) -> int:
        if not self._failed:
            self._failed = True
            raise OSError(errno.EMFILE, "Too many open files")
        return next(self._then)


async def test_a_system_that_can_not_count_now_is_asked_again(clock: MockClock) -> None:
    assert await news_of(clock, CountsInVain(each(0, 2 * MANY)), seconds=100)


async def test_other_kinds_of_interfaces_are_not_judged(clock: MockClock) -> None:
    assert not await news_of(clock, each(0, 2 * MANY), seconds=100, kind="wired")


def test_the_system_counts_packets_of_each_interface() -> None:
    assert all(counted.packets_recv >= 0 for counted in count_packets().values())
