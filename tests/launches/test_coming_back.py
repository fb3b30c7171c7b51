"""Links that are lost during a launch, and are there again."""

from pathlib import Path

import trio
import trio.testing

from pmesh.core.wire.stream import PART_BYTES
from pmesh.ids import Member
from pmesh.launches.agent.started import StartedHere
from pmesh.launches.rules.engines import ranks_untrusted
from pmesh.launches.rules.lines import read_lines, seated
from pmesh.launches.wire.messages import (
    BeginRanks,
    Command,
    Launch,
    LaunchPrepared,
    LaunchTerms,
    PrepareLaunch,
    RankEnded,
    RankFails,
    SignalRanks,
)
from tests.launches.here import ANNA, EVE, ID, FakePeer, Here, asks, launches_in

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


# --- at a machine with detached ranks


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
