"""Links that are lost during a launch, and are there again."""

from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from pmesh.core.wire.stream import PART_BYTES
from pmesh.errors import ProtocolError
from pmesh.ids import Member
from pmesh.launches.agent.here import UNSTARTED_S
from pmesh.launches.agent.started import StartedHere
from pmesh.launches.rules.engines import ranks_untrusted
from pmesh.launches.rules.lines import read_lines, seated
from pmesh.launches.wire.messages import (
    BeginRanks,
    Command,
    Launch,
    LaunchPart,
    LaunchPrepared,
    LaunchTerms,
    PrepareLaunch,
    RankEnded,
    RankFails,
    SignalRanks,
)
from tests.launches.here import ANNA, EVE, ID, FakePeer, Here, asks, launches_in
from tests.worlds.faults import Faults

PORTS = (7000, 7001)


def start(here: Here, *, terms: LaunchTerms | None = None) -> StartedHere:
    """A launch of this machine on those of Anna and Eve, who have not answered."""
    names = tuple(seat.name for seat in here.view.seats[1:])
    request = Launch("", Command(("true",), "/"), terms or LaunchTerms(), on=names)
    return here.launches.start(request)


def agree(here: Here, *members: Member) -> None:
    for member in members:
        here.launches.receive(member, LaunchPrepared(ID, "", PORTS))


# --- at the starter


async def test_a_machine_that_refuses_when_it_is_back_does_not_spoil_the_begin_of_others(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here)
        asked = await here.anna.next()
        assert isinstance(asked, PrepareLaunch)
        agree(here, ANNA, EVE)
        assert isinstance(await here.anna.next(), BeginRanks)
        for member in (ANNA, EVE):
            launch.lose(member, "the cable was out")
            launch.find(member)
        assert isinstance(await here.anna.next(), PrepareLaunch)
        here.launches.receive(EVE, LaunchPrepared(ID, "not again"))
        agree(here, ANNA)
        begin = await here.anna.next()
        assert isinstance(begin, BeginRanks)
        assert ranks_untrusted(asked, begin) == range(1)  # else Anna would ban this machine


async def test_what_comes_over_another_link_counts_for_ranks_that_were_lost_with_the_first(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """It may come before this machine has looked at its links."""
    del autojump_clock
    async with launches_in(tmp_path) as here:
        launch = start(here)
        agree(here, ANNA, EVE)
        await trio.sleep(1)  # the links are known
        again = here.links[ANNA.node] = FakePeer(ANNA)
        here.launches.receive(ANNA, RankEnded(ID, 0, 0, -15))  # its agent has ended its ranks
        assert isinstance(await again.next(), PrepareLaunch)
        agree(here, ANNA)
        assert isinstance(await again.next(), BeginRanks)
        for rank, member in enumerate((ANNA, EVE)):
            here.launches.receive(member, RankEnded(ID, 0, rank, 0))
        assert launch.code == 0


async def test_a_link_that_was_replaced_before_a_launch_is_no_loss_to_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """As happens when both machines have dialled."""
    del autojump_clock
    async with launches_in(tmp_path) as here:
        await trio.sleep(1)  # the links are known
        here.links[ANNA.node] = FakePeer(ANNA)
        launch = start(here)
        agree(here, ANNA, EVE)
        assert (launch.phase, launch.refusal) == ("running", "")


async def test_an_error_of_ours_in_a_launch_does_not_end_the_link_that_brings_a_message(
    tmp_path: Path, faults: Faults
) -> None:
    async with launches_in(tmp_path) as here:
        with faults.fail(StartedHere, "find", RuntimeError()):
            start(here)
            here.links[ANNA.node] = FakePeer(ANNA)
            agree(here, ANNA)


async def test_a_detached_launch_is_refused_if_a_machine_is_lost_before_it_begins(
    tmp_path: Path,
) -> None:
    """The begin would be lost with the link, and the others wait for that machine's ranks."""
    async with launches_in(tmp_path) as here:
        launch = start(here, terms=LaunchTerms(detach=True))
        agree(here, ANNA)
        launch.lose(ANNA, "the cable was out")
        launch.find(ANNA)
        agree(here, EVE)
        assert launch.refusal == f"{launch.names[0]} is lost: the cable was out"
        assert [type(message) for message in here.eve.sent] == [PrepareLaunch, SignalRanks]


async def test_no_answer_of_another_machine_comes_before_a_link_that_was_lost(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    del autojump_clock
    async with launches_in(tmp_path) as here:
        launch = start(here, terms=LaunchTerms(detach=True))
        agree(here, ANNA)
        await trio.sleep(1)  # the links are known
        here.links[ANNA.node] = FakePeer(ANNA)
        agree(here, EVE)
        assert "is lost" in launch.refusal


async def test_detached_ranks_end_once_their_machine_is_back_if_it_missed_the_signal(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    del autojump_clock
    async with launches_in(tmp_path) as here:
        launch = start(here, terms=LaunchTerms(detach=True))
        agree(here, ANNA, EVE)
        await trio.sleep(1)  # the links are known
        del here.links[ANNA.node]
        await trio.sleep(1)
        here.launches.end(launch, 15)
        here.launches.receive(EVE, RankEnded(ID, 0, 1, -15))
        for after_s in (1, 60):  # before and after the starter has given it up
            again = here.links[ANNA.node] = FakePeer(ANNA)
            assert await again.next() == SignalRanks(ID, 15)
            del here.links[ANNA.node]
            await trio.sleep(after_s)
        assert launch.is_over


async def test_a_begin_that_was_lost_with_the_link_of_a_detached_launch_is_repeated(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here, terms=LaunchTerms(detach=True))
        agree(here, ANNA, EVE)
        begin = here.anna.sent[-1]
        assert isinstance(begin, BeginRanks)
        here.anna.sent.clear()
        launch.lose(ANNA, "the cable was out")
        launch.find(ANNA)
        assert here.anna.sent == [begin]


async def test_what_was_agreed_for_a_detached_launch_ends_once_its_machine_is_back(
    tmp_path: Path,
) -> None:
    """Else it kept its job there, with --sync for an hour."""
    async with launches_in(tmp_path) as here:
        launch = start(here, terms=LaunchTerms(detach=True))
        agree(here, ANNA)
        here.launches.receive(EVE, LaunchPrepared(ID, "no"))
        here.anna.sent.clear()  # the signal was lost with the link
        launch.lose(ANNA, "the cable was out")
        launch.find(ANNA)
        assert here.anna.sent == [SignalRanks(ID, 15)]


async def test_a_detached_machine_that_was_given_up_takes_part_again_once_it_is_back(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    del autojump_clock
    async with launches_in(tmp_path) as here:
        launch = start(here, terms=LaunchTerms(detach=True, hang_timeout_s=60))
        agree(here, ANNA, EVE)
        await trio.sleep(1)  # the links are known
        del here.links[ANNA.node]
        await trio.sleep(61)
        here.launches.receive(EVE, RankEnded(ID, 0, 1, -15))
        await trio.sleep(10)
        agree(here, EVE)
        again = here.links[ANNA.node] = FakePeer(ANNA)
        assert await again.next() == SignalRanks(ID, 15)
        assert isinstance(await again.next(), PrepareLaunch)
        agree(here, ANNA)
        begin = await again.next()
        assert isinstance(begin, BeginRanks)
        assert (begin.generation, begin.group, launch.phase) == (1, 0, "running")


# --- at a machine


async def test_an_end_that_the_starter_does_not_read_keeps_no_machine_busy(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("true")) == ""
        again = here.links[ANNA.node] = FakePeer(ANNA)
        mock_clock.jump(1)
        assert isinstance(await again.next(), LaunchPart)  # that its ranks are ended
        mock_clock.jump(UNSTARTED_S)
        mock_clock.rate = 1
        with trio.fail_after(5):
            await trio.testing.wait_all_tasks_blocked()


async def test_detached_ranks_begin_once_though_they_are_told_again_over_another_link(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("sh", "-c", "echo x", detach=True)) == ""
        for number in range(3):  # over the first link it was lost
            here.links[ANNA.node] = here.anna = FakePeer(ANNA)
            here.begin()
            if number:
                with pytest.raises(ProtocolError, match="began twice"):
                    here.begin()
        assert (await here.output())[0] == "x\n"
        assert [news.kind for news in here.news].count("command started") == 1


async def test_an_end_that_was_lost_with_the_link_is_reported_again(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("sh", "-c", "echo x", detach=True)) == ""
        here.begin()
        text, ended = await here.output()
        assert (text, ended.code) == ("x\n", 0)
        await trio.testing.wait_all_tasks_blocked()  # it has nothing to do any more
        again = here.links[ANNA.node] = FakePeer(ANNA)
        assert await again.next() == ended


async def reported(peer: FakePeer) -> RankFails | RankEnded:
    """The next report; output is dropped."""
    while not isinstance(message := await peer.next(), RankFails | RankEnded):
        pass
    return message


async def test_a_failure_that_is_over_is_not_reported_again(tmp_path: Path) -> None:
    """The starter would give up ranks of others that fail now, as if all did."""
    script = f"cd {tmp_path}; echo $$; [ -e ran ] && exec sleep 86400; touch ran; exit 1"
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("sh", "-c", script, detach=True, grace_s=0.1)) == ""
        here.begin()
        spool = here.launches.parts[ANNA.node, ID].spool
        assert await reported(here.anna) == RankFails(ID, 0, 0, "at once")
        await spool.grown_beyond(spool.end)  # it was started again
        *_, line = read_lines(seated(spool.read(0, PART_BYTES).data, 0))
        here.launches.op_completed(int(line.text), syncs=False)
        assert await reported(here.anna) == RankFails(ID, 0, 0, "no more")
        again = here.links[ANNA.node] = FakePeer(ANNA)
        assert await reported(again) == RankFails(ID, 0, 0, "no more")
        here.launches.receive(ANNA, SignalRanks(ID, 9))
        assert await reported(again) == RankEnded(ID, 0, 0, -9)
