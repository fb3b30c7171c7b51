"""Launches as local programs see them: `pmesh run --on`, `ps`, `logs` and `stop`."""

from collections.abc import Callable, Mapping

import trio

from pmesh.agent.features import Feature
from pmesh.agent.limits import Admission
from pmesh.ids import Member, NodeId, PathName, node_text
from pmesh.launches.agent.here import PartHere
from pmesh.launches.agent.router import Launches
from pmesh.launches.agent.started import StartedHere
from pmesh.launches.rules.lines import STARTER, note, seated
from pmesh.launches.wire.messages import (
    LAUNCH_REQUESTS,
    LAUNCHES,
    AnyLaunchMessage,
    AskHosts,
    AskLaunches,
    EndLaunch,
    Fetched,
    FetchedFiles,
    FetchFiles,
    FollowLaunch,
    Hosts,
    Launch,
    LaunchBegan,
    LaunchEnding,
    LaunchInput,
    LaunchInputTaken,
    LaunchLines,
    LaunchOver,
    LaunchQuestion,
    LaunchRows,
    LaunchSends,
    SignalLaunch,
    SignalNumber,
)
from pmesh.net.sessions.sessions import Session, refuse

LINES_BYTES = 64 * 1024  # of one message
SHOWN_AFTER_S = 1.0  # if all files arrive sooner, no progress is shown
SHOWN_EVERY_S = 0.2
_SIGTERM: SignalNumber = 15


class LaunchFeature(Feature[AnyLaunchMessage, LaunchQuestion]):
    """The launches of one agent, and the sessions of the programs that ask for them."""

    channel = LAUNCHES
    openings = (Launch, FollowLaunch, FetchFiles, AskLaunches, AskHosts, EndLaunch)

    def __init__(self, launches: Launches, admission: Callable[[], Admission]) -> None:
        self.launches = launches
        self._admission = admission

    def receive(self, member: Member, message: AnyLaunchMessage) -> None:
        self.launches.receive(member, message)

    async def run(self) -> None:
        await self.launches.run()

    def rank_is(self, pid: int, number: int) -> None:
        self.launches.rank_is(pid, number)

    def op_completed(self, pid: int, *, syncs: bool) -> None:
        self.launches.op_completed(pid, syncs=syncs)

    async def serve(self, session: Session, request: LaunchQuestion) -> None:
        """Serve a program until it has its answer, or is gone."""
        if isinstance(request, AskLaunches | AskHosts | EndLaunch):
            await _answer(session, request, self.launches)
            return
        with self._admission().follow():
            session.stay()
            await _answer(session, request, self.launches)


async def _answer(session: Session, request: LaunchQuestion, launches: Launches) -> None:
    match request:
        case AskLaunches():
            for row in launches.rows():
                await session.send(LaunchRows((row,)))
            await session.send(LaunchRows(()))
        case AskHosts():
            await session.send(Hosts(launches.hosts(request)))
        case EndLaunch(text):
            launch = launches.find(text)
            launches.end(launch, _SIGTERM)
            await session.send(LaunchEnding(launch.launch))
        case FollowLaunch(text, follow):
            launch = launches.find(text)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.await_end)
                await _follow(session, launch, follow=follow)
                nursery.cancel_scope.cancel()
        case FetchFiles(text):
            launch_id, names = launches.copies_of(text)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.await_end)
                found = await _fetch(launch_id, names, request, launches)
                await session.send(Fetched(launch_id, found))
                nursery.cancel_scope.cancel()
        case Launch():
            await _serve_starter(session, launches.start(request), launches)


async def _fetch(
    launch: PathName, names: Mapping[NodeId, str], request: FetchFiles, launches: Launches
) -> tuple[FetchedFiles, ...]:
    """Ask all machines that may have a copy, each by itself."""
    found = list[FetchedFiles]()

    async def ask(node: NodeId, name: str) -> None:
        files = await launches.fetching.fetch(
            launch, node, name, contents=request.contents, most_bytes=request.most_bytes
        )
        if files is not None:
            found.append(files)

    async with trio.open_nursery() as nursery:
        for node, name in names.items():
            nursery.start_soon(ask, node, name)
    return tuple(sorted(found, key=lambda files: files.name))


async def _serve_starter(session: Session, launch: StartedHere, launches: Launches) -> None:
    """Show what all ranks print; if the program is gone, end them, unless they are detached."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_take_requests, session, launch, nursery)
            nursery.start_soon(_show_files_sent, session, launch, launches)
            await launch.begun.wait()
            if launch.refusal:
                await refuse(session, "UsageError", launch.refusal)
            elif launch.request.terms.detach and not any(seat.ranks for seat in launch.state.seats):
                what = f"launch {launch.launch} was stopped before it began"
                await refuse(session, "UsageError", what)
            elif launch.request.terms.detach:
                await session.send(_began(launch))
            else:
                await _follow(session, launch, follow=True)
            nursery.cancel_scope.cancel()
    except* (trio.EndOfChannel, trio.BrokenResourceError):
        pass
    finally:
        if not (launch.request.terms.detach and launch.begun.is_set()):
            launch.interrupt(_SIGTERM)  # no effect once it is over


async def _show_files_sent(session: Session, launch: StartedHere, launches: Launches) -> None:
    await trio.sleep(SHOWN_AFTER_S)
    while not launch.begun.is_set():
        machines = launches.syncing.sent(launch)
        if machines:
            await session.send(LaunchSends(machines))
        await trio.sleep(SHOWN_EVERY_S)


async def _take_requests(session: Session, launch: StartedHere, nursery: trio.Nursery) -> None:
    while True:
        match await session.receive(LAUNCH_REQUESTS):
            case SignalLaunch(number):
                launch.interrupt(number)
            case LaunchInput(data):
                launch.send_input(data)
                nursery.start_soon(_tell_taken, session, launch.input_taken)


async def _tell_taken(session: Session, taken: trio.Event) -> None:
    await taken.wait()
    await session.send(LaunchInputTaken())


def _began(launch: StartedHere | PartHere) -> LaunchBegan:
    if isinstance(launch, StartedHere):
        nodes = [seat.node for seat in launch.state.seats]
    else:
        nodes = list(launch.prepare.nodes)
    ids = tuple(map(node_text, nodes))
    return LaunchBegan(launch.launch, launch.job, launch.names, launch.counts, ids)


async def _follow(session: Session, launch: StartedHere | PartHere, *, follow: bool) -> None:
    """Send the output as fast as the program reads it."""
    await session.send(_began(launch))
    offset = 0
    while True:
        is_over = launch.is_over  # read first: nothing is written after the end
        piece = await launch.spool.read_soon(offset, LINES_BYTES)
        data = piece.data
        if data and isinstance(launch, PartHere):
            data = seated(data, launch.prepare.seat)
        if piece.offset > offset:  # there may be nothing after what is gone
            text = f"{piece.offset - offset} bytes of output are not kept any more"
            data = seated(note(0, text), STARTER) + data
        if data:
            await session.send(LaunchLines(data))
            offset = piece.offset + len(piece.data)
        elif is_over or not follow:
            code = launch.code if is_over else None
            await session.send(LaunchOver(-1 if code is None else code))
            return
        else:
            await _more(launch, offset)


async def _more(launch: StartedHere | PartHere, offset: int) -> None:
    """Wait for lines after the offset, or for the end of the launch."""
    async with trio.open_nursery() as nursery:

        async def end() -> None:
            await launch.over.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(end)
        await launch.spool.grown_beyond(offset)
        nursery.cancel_scope.cancel()
