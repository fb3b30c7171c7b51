"""All launches of one agent: those started here, and those that others have run here."""

import itertools
import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from pmesh.agent.containment import Contain
from pmesh.agent.home import is_full
from pmesh.agent.launches.checks import Found, check_command, free_ports
from pmesh.agent.launches.here import PartHere
from pmesh.agent.launches.permission import load_permission, why_not
from pmesh.agent.launches.started import StartedHere
from pmesh.agent.launches.syncing import Syncing
from pmesh.agent.mesh.links import Link, bare_host, hosts_of
from pmesh.agent.mesh.names import Names
from pmesh.agent.status.events import EventKind, News
from pmesh.core.launches.engines import LOOPBACK, own_environment
from pmesh.core.launches.lines import MACHINE, STARTER, note, seated
from pmesh.core.launches.starting import Seat
from pmesh.core.values import View
from pmesh.core.wire.launches import (
    MAX_PORTS,
    AnyLaunchMessage,
    AskFiles,
    AskHosts,
    BeginRanks,
    FilePart,
    FilesStored,
    Launch,
    LaunchHost,
    LaunchPrepared,
    LaunchRow,
    OutputRead,
    PrepareLaunch,
    RankInput,
    SignalNumber,
    SignalRanks,
    StopLaunch,
    WayTo,
)
from pmesh.errors import PmeshError, UsageError
from pmesh.ids import Member, NodeId, PathName, path_name
from pmesh.net.local.spool import Spool
from pmesh.paths import remove_tree

LOOK_S = 0.1  # how soon a lost link ends the ranks
KEPT = 20  # launches whose output is kept
MAX_RUNNING = 16  # parts of launches at once
ENDS_S = 10.0  # the ranks of the last attempt, which a lost link has ended, must be gone
AGAIN_S = 60.0  # a member that is refused again and again is no news


_Kept = TypeVar("_Kept", StartedHere, PartHere)


class _Question:
    """Somebody has asked whether this machine can run a launch, and has no answer yet."""

    def __init__(self, member: Member, link: Link | None) -> None:
        self.member = member
        self.link = link
        self.scope = trio.CancelScope()


class Launches:
    """What this agent has started, and what it runs."""

    def __init__(
        self,
        me: Member,
        name: str,
        *,
        home: Path,
        allow_run: bool,
        names: Names,
        view: Callable[[], View],
        links: Callable[[], Mapping[NodeId, Link]],
        nursery: trio.Nursery,
        noticed: Callable[[News], None],
        contain: Contain,
        launch_ids: Callable[[], PathName],
    ) -> None:
        self._me = me
        self._name = name
        self._home = home
        self._allow_run = allow_run
        self._names = names
        self._view = view
        self._links = links
        self._nursery = nursery
        self._noticed = noticed
        self._contain = contain
        self._launch_ids = launch_ids
        self._spools = itertools.count()
        self.started: dict[str, StartedHere] = {}
        self.parts: dict[str, PartHere] = {}
        self._linked: dict[NodeId, Link] = {}
        self._lost: dict[NodeId, Member] = {}
        self._refused_at: dict[NodeId, float] = {}
        self.questions: dict[str, _Question] = {}
        self.syncing = Syncing(
            home,
            send=self.send,
            link_with=lambda node: self._links().get(node),
            nursery=nursery,
            contain=contain,
        )
        self._own, self._own_messages = trio.open_memory_channel[AnyLaunchMessage](math.inf)

    # --- messages

    async def run(self) -> None:
        """Deliver what this agent says to itself, and follow the links."""
        remove_tree(self._home, "launches")  # of an agent before this one
        self.syncing.clean()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            async for message in self._own_messages:
                with self._contain("a launch on this machine"):
                    self.receive(self._me, message)

    def send(self, node: NodeId, message: AnyLaunchMessage) -> None:
        if node == self._me.node:
            self._own.send_nowait(message)
        elif node in self._links():
            self._links()[node].send(message)

    def receive(self, member: Member, message: AnyLaunchMessage) -> None:
        """Take a message of a member; what does not concern its own launches counts nothing."""
        match message:
            case PrepareLaunch():
                self._nursery.start_soon(self._prepare, member, message)
            case AskFiles() | FilePart() | FilesStored():
                launch = self.started.get(message.launch)
                self.syncing.receive_untrusted(member, message, launch)
            case BeginRanks() | SignalRanks() | OutputRead() | RankInput():
                if isinstance(message, SignalRanks):
                    self._withdraw(member, message.launch)
                part = self.parts.get(message.launch)
                if part is not None and part.starter == member:
                    self._pass_on(part, message)
            case _:
                launch = self.started.get(message.launch)
                if launch is not None:
                    launch.receive(member.node, message)

    def _pass_on(
        self, part: PartHere, message: BeginRanks | SignalRanks | OutputRead | RankInput
    ) -> None:
        match message:
            case BeginRanks():
                part.begin(message)
                command = described(part.prepare.command.words)
                starter = self._name_of(part.starter.node)
                self._note("command started", f"{starter} runs here: {command}", starter)
            case SignalRanks(_, number):
                part.end(number)
            case OutputRead(_, offset):
                part.read_up_to(offset)
            case RankInput():
                part.take_input(message)

    # --- what others ask for

    async def _prepare(self, member: Member, message: PrepareLaunch) -> None:
        refusals = list[str]()
        question = _Question(member, self._link_with(member))
        with self._contain("a question about a launch", refusals.append), question.scope:
            try:
                self._withdraw(member, message.launch)
                if self.questions.setdefault(message.launch, question) is not question:
                    raise UsageError("another machine has started a launch of this id")
                await self._begin_part(member, message)
            except PmeshError as e:
                refusals.append(str(e))
        if self.questions.get(message.launch) is question:
            del self.questions[message.launch]
        for refusal in refusals:
            self.send(member.node, LaunchPrepared(message.launch, _sentence(refusal)))

    def _withdraw(self, member: Member, launch: str) -> None:
        """Stop what is done for a question that this member has asked."""
        question = self.questions.get(launch)
        if question is not None and question.member == member:
            question.scope.cancel()
            del self.questions[launch]

    async def _begin_part(self, member: Member, message: PrepareLaunch) -> None:
        found = await self._check(member, message)
        spool = self._spool("part", lambda e: note(MACHINE, _full_disk(e)))
        part = PartHere(
            message,
            found,
            member,
            link=self._link_with(member),
            home=self._home,
            spool=spool,
            send=partial(self.send, member.node),
            nursery=self._nursery,
            contain=self._contain,
        )
        _keep(self.parts, message.launch, part)
        self._nursery.start_soon(self._run_part, part)
        ports = await trio.to_thread.run_sync(free_ports, 2 * message.ranks)
        self.send(member.node, LaunchPrepared(message.launch, "", ports, self._ways()))

    async def _check(self, member: Member, message: PrepareLaunch) -> Found:
        """Return the command as it runs here. Raises UsageError if it does not."""
        if member != self._me:
            permission = await trio.to_thread.run_sync(load_permission, self._home)
            refusal = why_not(
                permission,
                member.node,
                allowed_by_option=self._allow_run,
                is_root=os.geteuid() == 0,
            )
            if refusal:
                self._note_refusal(member, message, refusal)
                raise UsageError(refusal)
        before = self.parts.get(message.launch)
        if before is not None:
            if before.starter.node != member.node:
                raise UsageError("another machine has started a launch of this id")
            with trio.move_on_after(ENDS_S):
                await before.over.wait()
        running = [part for part in self.parts.values() if not part.is_over]
        if before in running:
            raise UsageError(f"the ranks of the last attempt have not ended after {ENDS_S:g} s")
        if len(running) + len(self.questions) > MAX_RUNNING:
            raise UsageError(f"it runs {len(running)} launches already; 'pmesh ps' lists them")
        same = [part.launch for part in running if part.job == message.job]
        if same:
            raise UsageError(
                f"launch {same[0]} runs the job {message.job!r} there already; end it by "
                f"'pmesh stop {same[0]}', or give another --job"
            )
        command = await self.syncing.bring(member, message)
        if message.command.tree is not None:
            await self._prune()
        check = partial(check_command, command, own_environment(os.environ))
        return await trio.to_thread.run_sync(check)

    async def _prune(self) -> None:
        with self._contain("the files of launches"):
            await self.syncing.prune(self._in_use())

    def _in_use(self) -> frozenset[str]:
        """Return the launches whose files are needed, or may be needed again."""
        alive = [launch for launch, part in self.parts.items() if not part.is_over]
        alive += [launch for launch, started in self.started.items() if not started.is_over]
        return frozenset({*alive, *self.questions})

    async def _run_part(self, part: PartHere) -> None:
        with self._contain("a launch on this machine"):
            await part.run()
        if part.has_begun:
            codes = {rank: here.code for rank, here in part.state.ranks.items()}
            ends = ", ".join(f"rank {rank} with {code}" for rank, code in codes.items())
            command = described(part.prepare.command.words)
            starter = self._name_of(part.starter.node)
            self._note("command ended", f"{command} of {starter} has ended: {ends}", starter)

    def _note_refusal(self, member: Member, message: PrepareLaunch, refusal: str) -> None:
        now = trio.current_time()
        if now - self._refused_at.get(member.node, -math.inf) < AGAIN_S:
            return
        self._refused_at[member.node] = now
        name = self._name_of(member.node)
        what = described(message.command.words)
        self._note("command refused", f"{name} wanted to run here: {what}; {refusal}", name)

    def _ways(self) -> tuple[WayTo, ...]:
        """Return how this machine reaches the others over the best paths."""
        return tuple(
            WayTo(node, *way)
            for node, link in self._links().items()
            if (way := _best_way(link)) is not None
        )

    # --- what is started here

    def start(self, request: Launch) -> StartedHere:
        """Begin a launch. Raises UsageError if the machines it names are not there."""
        seats = self._seats(request)
        launch_id = self._launch_ids()
        spool = self._spool(
            "started",
            lambda e: seated(
                note(MACHINE, f"{self._name}, which has started it: {_full_disk(e)}"), STARTER
            ),
        )
        launch = StartedHere(launch_id, request, seats, spool=spool, send=self.send)
        _keep(self.started, launch_id, launch)
        launch.start()
        if request.command.tree is not None:
            self._nursery.start_soon(self._prune)
        return launch

    def hosts(self, request: AskHosts) -> tuple[LaunchHost, ...]:
        """Return where ranks would run. Raises UsageError if a machine has no IPv4 address here."""
        hosts: list[LaunchHost] = []
        for seat in self._seats(request):
            host = self._host_of(seat.node)
            if host is None:
                raise UsageError(f"there is no way to an IPv4 address of {seat.name} from here")
            hosts.append(LaunchHost(seat.name, host, seat.count))
        return tuple(hosts)

    def _host_of(self, node: NodeId) -> str | None:
        links = self._links()
        if node != self._me.node:
            way = _best_way(links[node]) if node in links else None
            return None if way is None else way[0]
        own = (link.current.hosts[0] for link in links.values() if link.current is not None)
        return next((host for hosts in own for host in sorted(hosts) if ":" not in host), LOOPBACK)

    def _spool(self, kind: str, describe: Callable[[OSError], bytes]) -> Spool:
        directory = self._home / "launches" / path_name(f"{kind}-{next(self._spools)}")
        return Spool(directory, describe=describe)

    def _seats(self, request: Launch | AskHosts) -> list[Seat]:
        here = {seat.member.node: self._names.of_seat(seat) for seat in self._view().seats}
        named = self._names.find_each_here(request.on) if request.on else here.keys()
        nodes = [node for node in here if node in named]
        counts = (
            spread(request.count, len(nodes)) if request.count else [request.per_node] * len(nodes)
        )
        if max(counts) > MAX_PORTS:
            raise UsageError(
                f"{max(counts)} ranks on one machine are too many: at most {MAX_PORTS}; give a "
                "smaller -n or --per-node"
            )
        return [
            Seat(node=node, name=here[node], count=count)
            for node, count in zip(nodes, counts, strict=True)
            if count
        ]

    async def _look(self) -> None:
        """Follow the links with all who take part."""
        while True:
            await trio.sleep(LOOK_S)
            with self._contain("the launches of this machine"):
                self._follow_links()

    def _follow_links(self) -> None:
        """Tell launches which machines are lost and which are back, and the time."""
        links = dict(self._links())
        before, self._linked = self._linked, links
        for node in {*before, *links}:
            old, new = before.get(node), links.get(node)
            if old is not new:
                self._relink(node, old, new)
        self.syncing.follow_links()
        for question in self.questions.values():
            if self._link_with(question.member) is not question.link:
                question.scope.cancel()
        for part in self.parts.values():
            part.follow(self._link_with(part.starter))
        for launch in self.started.values():
            launch.pass_time()

    def _relink(self, node: NodeId, old: Link | None, new: Link | None) -> None:
        if old is not None:
            self._lost[node] = old.member
        same = new is not None and self._lost.get(node) == new.member
        for launch in self.started.values():
            if old is not None:
                launch.lose(node, "its agent has ended, or can't be reached")
            if new is not None:
                launch.find(node, same=same)

    def _link_with(self, member: Member) -> Link | None:
        link = self._links().get(member.node)
        return link if link is not None and link.member == member else None

    # --- for people

    def find(self, text: str) -> StartedHere | PartHere:
        """Return a launch by its id or its job; if there are several, the latest that runs.

        Raises:
            UsageError: There is none.
        """
        known: list[StartedHere | PartHere] = [
            *reversed(self.started.values()),
            *reversed(self.parts.values()),
        ]
        named = [launch for launch in known if text in {launch.launch, launch.job}]
        if not named:
            raise UsageError(f"this machine knows no launch {text!r}; 'pmesh ps' lists them")
        return next((launch for launch in named if not launch.is_over), named[0])

    def end(self, launch: StartedHere | PartHere, number: SignalNumber) -> None:
        """End a launch everywhere, or at least here if its starter is gone.

        Raises:
            UsageError: It has ended already.
        """
        if isinstance(launch, StartedHere):
            if launch.is_over:
                raise UsageError(f"launch {launch.launch} has ended already")
            launch.interrupt(number)
        else:
            launch.end(number)
            self.send(launch.starter.node, StopLaunch(launch.prepare.launch))

    def rows(self) -> tuple[LaunchRow, ...]:
        """Return what `pmesh ps` shows, the latest first."""
        now = trio.current_time()
        rows = [
            LaunchRow(
                launch=launch.launch,
                job=launch.job,
                command=described(launch.request.command.words),
                starter=self._name,
                here=True,
                machines=launch.names,
                state=launch.state.phase,
                age_s=round(now - launch.since, 1),
                code=launch.code,
            )
            for launch in self.started.values()
        ]
        rows += [
            LaunchRow(
                launch=launch_id,
                job=part.prepare.job,
                command=described(part.prepare.command.words),
                starter=self._name_of(part.starter.node),
                here=False,
                machines=part.prepare.names,
                state=part.phase,
                age_s=round(now - part.since, 1),
                code=None,
            )
            for launch_id, part in self.parts.items()
            if launch_id not in self.started
        ]
        return tuple(sorted(rows, key=lambda row: row.age_s))

    def _name_of(self, node: NodeId) -> str:
        if node == self._me.node:
            return self._name
        link = self._links().get(node)
        named = {seat.member.node: self._names.of_seat(seat) for seat in self._view().seats}
        if node in named or link is None:
            return named.get(node, "a machine that is gone")
        return self._names.of(node, link.peer.name)

    def _note(self, kind: EventKind, text: str, name: str) -> None:
        self._noticed(News(kind=kind, text=text, names=(name,)))


def _keep(kept: dict[str, _Kept], launch_id: str, launch: _Kept) -> None:
    """Add the latest launch, and forget the oldest ones that are over."""
    before = kept.pop(launch_id, None)
    if before is not None:
        before.close()
    kept[launch_id] = launch
    for old in [old for old, one in kept.items() if one.is_over][: max(0, len(kept) - KEPT)]:
        kept.pop(old).close()


def _full_disk(error: OSError) -> str:
    cure = ", as it is full: free some space there" if is_full(error) else f": {error.strerror}"
    return (
        f"its disk takes no output{cure}; only the latest lines are kept, in memory, and the ranks "
        "go on"
    )


def _best_way(link: Link) -> tuple[str, str] | None:
    """Return an IPv4 address of the peer on the best path, and the interface here; None if none."""
    live = link.current
    if live is None:
        return None
    for host in (
        bare_host(live.path.remote_address),
        *sorted(live.hosts[1]),
        *sorted(hosts_of(link.peer)),
    ):
        if ":" not in host:
            return host, live.key.interface
    return None


def spread(count: int, machines: int) -> list[int]:
    """Return how many ranks each machine runs.

    >>> spread(4, 3), spread(2, 3)
    ([2, 1, 1], [1, 1, 0])
    """
    each, more = divmod(count, machines)
    return [each + (index < more) for index in range(machines)]


def described(words: Iterable[str]) -> str:
    r"""Return a command as one line of printable text.

    >>> described(["python", "-c", "print()\n"])
    "python -c 'print()\\n'"
    """
    text = shlex.join(words)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _sentence(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:4096]
