"""One machine's launches, with fake peers that may lie."""

import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import cast

import trio
import trio.testing

from pmesh.agent.containment import Containment
from pmesh.agent.events import EventLog, News
from pmesh.agent.mesh.links import Link
from pmesh.agent.mesh.names import MachineNames
from pmesh.core.values import View
from pmesh.ids import Incarnation, Member, NodeId, PathName
from pmesh.launches.agent.permission import Permission, store_permission
from pmesh.launches.agent.router import Launches
from pmesh.launches.rules.lines import read_lines, seated
from pmesh.launches.wire.messages import (
    AnyLaunchMessage,
    BeginRanks,
    Command,
    LaunchPart,
    LaunchPrepared,
    LaunchTerms,
    PrepareLaunch,
    RankEnded,
    RankGroup,
    Variable,
)
from tests.worlds.builders import make_view

ME, ANNA, EVE = (Member(NodeId(bytes([n]) * 32), Incarnation(n)) for n in (77, 65, 69))
ID = PathName("0123456789ab")
EVERYONE = Permission(everyone=True, as_root=True)


class FakePeer:
    """What an addressee of messages keeps of them."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.current = None
        self.sent: list[AnyLaunchMessage] = []
        self.came = trio.Event()

    def send(self, message: AnyLaunchMessage) -> None:
        self.sent.append(message)
        self.came.set()

    async def next(self) -> AnyLaunchMessage:
        with trio.fail_after(20):
            while not self.sent:
                self.came = trio.Event()
                await self.came.wait()
        return self.sent.pop(0)


class Here:
    """The launches of this machine, with two members at the other ends of links."""

    def __init__(self, home: Path, nursery: trio.Nursery, *, allow_run: bool = False) -> None:
        self.home = home
        self.anna, self.eve = FakePeer(ANNA), FakePeer(EVE)
        self.links = {ANNA.node: self.anna, EVE.node: self.eve}
        self.news: list[News] = []
        self.ids: Iterator[PathName] = itertools.repeat(ID)
        self.offsets = Counter[Member]()
        """How much output the fake peers have sent."""
        self.view: View = make_view(1, ME, ANNA, EVE)
        self.names = MachineNames({}, noticed=self.news.append)
        self.names.follow(self.view)
        self.event_log = EventLog(
            ME,
            "mac-1",
            clock=trio.current_time,
            wall_clock=lambda: datetime.now().astimezone(),
            listener=lambda event: self.news.append(event),  # noqa: PLW0108 - a News, too
        )
        self.launches = Launches(
            ME,
            "mac-1",
            home=home,
            allow_run=allow_run,
            names=self.names,
            view=lambda: self.view,
            links=lambda: cast("dict[NodeId, Link]", self.links),
            nursery=nursery,
            noticed=self.news.append,
            contain=Containment(self.event_log, clock=trio.current_time).contain,
            launch_ids=lambda: next(self.ids),
        )

    async def prepare(self, message: PrepareLaunch, member: Member = ANNA) -> str:
        """Ask this machine; return why it refuses."""
        self.launches.receive(member, message)
        answer = await (self.anna if member == ANNA else self.eve).next()
        assert isinstance(answer, LaunchPrepared)
        return answer.refusal

    def begin(self, member: Member = ANNA, launch: PathName = ID) -> None:
        self.launches.receive(member, BeginRanks(launch, 0, 0, (RankGroup(1),)))

    async def output(self) -> tuple[str, RankEnded]:
        """All that comes back, until the rank has ended."""
        text = b""
        while not isinstance(message := await self.anna.next(), RankEnded):
            assert isinstance(message, LaunchPart)
            text += b"".join(b"%b\n" % line.text for line in read_lines(seated(message.data, 0)))
            read = message.offset + len(message.data)
            self.launches.receive(ANNA, LaunchPart(ID, 0, read))
        return text.decode(), message


@asynccontextmanager
async def launches_in(
    home: Path, permission: Permission | None = EVERYONE, *, allow_run: bool = False
) -> AsyncGenerator[Here]:
    home.chmod(0o700)  # noqa: ASYNC240 - before the loop has anything to do
    if permission is not None:
        store_permission(home, permission)
    async with trio.open_nursery() as nursery:
        here = Here(home, nursery, allow_run=allow_run)
        nursery.start_soon(here.launches.run)
        await trio.testing.wait_all_tasks_blocked()
        yield here
        nursery.cancel_scope.cancel()


def asks(
    *words: str, variables: tuple[tuple[str, str], ...] = (), **terms: object
) -> PrepareLaunch:
    return PrepareLaunch(
        launch=ID,
        job="digits",  # type: ignore[arg-type]
        command=Command(words, "/", tuple(Variable(*v) for v in variables)),
        terms=LaunchTerms(**terms),  # type: ignore[arg-type]
        seat=0,
        nodes=(ME.node,),
        names=("mac-1",),
        ranks=1,
    )
