"""What an agent has refused is counted, and told once a minute while it is much."""

import msgspec
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.status import TurnedAwayStatus
from pmesh.agent.turned_away import FEW, describe
from tests.agent.fakes import Machine, village

NOTHING = TurnedAwayStatus(
    connections=0,
    forged_announcements=0,
    foreign_announcements=0,
    broken_links=0,
    programs=0,
)


def told(now: TurnedAwayStatus, **hosts: int) -> str | None:
    return describe(NOTHING, now, hosts, interval_s=60.0)


def test_little_is_not_worth_a_line() -> None:
    assert told(NOTHING) is None
    assert told(msgspec.structs.replace(NOTHING, connections=FEW - 1)) is None


def test_a_member_that_broke_the_protocol_always_is() -> None:
    text = "turned away in the last 60 s: 1 link of a member that broke the protocol"
    assert told(msgspec.structs.replace(NOTHING, broken_links=1)) == text


def test_much_is_told_with_where_most_of_it_came_from() -> None:
    now = msgspec.structs.replace(NOTHING, connections=5000, forged_announcements=700, programs=3)
    assert told(now, a=3000, b=1500, c=400, d=100) == (
        "turned away in the last 60 s: 5000 connections of strangers (3000 from a, 1500 from b, "
        "400 from c), 700 forged announcements, 3 local programs"
    )


def test_only_what_came_since_the_last_look_counts() -> None:
    before = msgspec.structs.replace(NOTHING, foreign_announcements=90)
    after = msgspec.structs.replace(NOTHING, foreign_announcements=100)
    text = describe(before, after, {}, interval_s=60.0)
    assert text == "turned away in the last 60 s: 10 announcements of other meshes"


def lines_of(machine: Machine) -> list[str]:
    return [line for line in machine.lines if line.startswith("turned away")]


async def test_an_attack_is_one_line_a_minute_and_stands_in_the_status(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        for _ in range(2):
            for _ in range(10):
                async with await trio.open_tcp_stream("127.0.0.1", one.port) as stream:
                    await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
                    with pytest.raises((trio.BrokenResourceError, AssertionError)):
                        assert await stream.receive_some(1)
            await trio.sleep(61)
        await trio.sleep(300)
        line = "turned away in the last 60 s: 10 connections of strangers (10 from 127.0.0.1)"
        assert lines_of(one) == [line, line]
        picture = one.agent._picture()  # noqa: SLF001 - as `pmesh status` does
        assert picture.turned_away.connections == 20
