"""Links that are lost during a launch, and are there again."""

from pathlib import Path

from pmesh.ids import Member
from pmesh.launches.agent.started import StartedHere
from pmesh.launches.rules.engines import ranks_untrusted
from pmesh.launches.wire.messages import (
    BeginRanks,
    Command,
    Launch,
    LaunchPrepared,
    LaunchTerms,
    PrepareLaunch,
)
from tests.launches.here import ANNA, EVE, ID, Here, launches_in

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
