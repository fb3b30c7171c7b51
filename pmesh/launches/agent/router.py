"""All launches of one agent: those started here, and those that others have run here."""

import contextlib
import itertools
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import trio

from pmesh.agent.containment import Contain
from pmesh.agent.events import EventKind, News
from pmesh.agent.mesh.links import Link
from pmesh.agent.mesh.names import MachineNames
from pmesh.core.ops.shard import Shard
from pmesh.core.values import MAX_TRAINERS, View
from pmesh.errors import PmeshError, UsageError
from pmesh.home_paths import remove_tree
from pmesh.ids import Member, NodeId, PathName, path_name, short_node
from pmesh.launches.agent.checks import Found, check_command, free_ports
from pmesh.launches.agent.fetching import Fetching
from pmesh.launches.agent.here import PartHere
from pmesh.launches.agent.permission import load_permission, why_not
from pmesh.launches.agent.shown import described, full_disk, sentence
from pmesh.launches.agent.spool import Spool
from pmesh.launches.agent.started import StartedHere, read_of
from pmesh.launches.agent.syncing import Syncing
from pmesh.launches.agent.ways import best_way
from pmesh.launches.rules.engines import LOOPBACK, MAX_RDMA_RANKS
from pmesh.launches.rules.lines import MACHINE, STARTER, note, seated
from pmesh.launches.rules.starting import LaunchMember
from pmesh.launches.wire.messages import (
    MAX_PORTS,
    AnyLaunchMessage,
    AskFiles,
    AskHosts,
    AskNewContents,
    AskNewFiles,
    BeginRanks,
    GiveUpRank,
    Launch,
    LaunchHost,
    LaunchPart,
    LaunchPrepared,
    LaunchRow,
    NewFiles,
    PrepareLaunch,
    SignalNumber,
    SignalRanks,
    StopLaunch,
    WayTo,
)
from pmesh.net.sessions.processes import sleep_in_step

LOOK_S = 0.1  # how soon a lost link ends the ranks
IDLE_LOOK_S = 0.4  # as heartbeats, where no launch goes on
KEPT = 20  # launches whose output is kept
MAX_STARTED = 64  # by programs of this machine at once: each is a terminal, or was detached
MAX_RUNNING = 16  # parts of launches at once
MAX_ASKED = 16  # questions of one member at once: each has 256 KiB, and takes a thread
ENDS_S = 10.0  # for the ranks of the last attempt, which a lost link has ended, to be gone
AGAIN_S = 60.0  # a member that is refused again and again is no news

_ToPart: TypeAlias = BeginRanks | SignalRanks | GiveUpRank | LaunchPart

_Kept = TypeVar("_Kept", StartedHere, PartHere)
_Key = TypeVar("_Key")

LaunchKey: TypeAlias = tuple[NodeId, str]
"""The node that has started a launch, and its id: another node may have chosen the same id."""


class _Question:
    """A member's question whether this machine can run a launch, not yet answered."""

    def __init__(self, member: Member, launch: str, link: Link | None) -> None:
        self.member = member
        self.launch = launch
        self.link = link
        self.allowed = False
        """Whether the member may run commands here; only then it counts for MAX_RUNNING."""
        self.scope = trio.CancelScope()


class Launches:
    """The launches that this agent has started, and those that it runs."""

    def __init__(
        self,
        me: Member,
        name: str,
        *,
        home: Path,
        allow_run: bool,
        names: MachineNames,
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
        self.parts: dict[LaunchKey, PartHere] = {}
        self._linked: dict[NodeId, Link] = {}
        self._refused_at: dict[NodeId, float] = {}
        self.questions: list[_Question] = []
        """A question stays until its task has ended, as a thread can't be cancelled."""
        self.syncing = Syncing(
            home,
            send=self.send,
            link_with=lambda node: self._links().get(node),
            nursery=nursery,
            contain=contain,
        )
        self.fetching = Fetching(
            home,
            me.node,
            send=self.send,
            link_with=lambda node: self._links().get(node),
            why_not=self._why_not,
            nursery=nursery,
            contain=contain,
        )
        # Unbounded, as sending can't wait; but launches are few, and their windows are bounded.
        self._own, self._own_messages = trio.open_memory_channel[AnyLaunchMessage](math.inf)

    # --- messages

    async def run(self) -> None:
        """Deliver the messages of this agent to itself, and follow the links."""
        remove_tree(self._home, "launches")  # the output of an agent before this one
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
        """Handle a member's message; ignore it if that member has no part in the launch."""
        if self._linked != self._links():  # first: what was begun over another link is lost
            with self._contain("the launches of this machine"):
                self._follow_links()
        match message:
            case PrepareLaunch():
                self._ask(member, message)
            case AskFiles() | LaunchPart(stream="files"):
                launch = self.started.get(message.launch)
                self.syncing.receive_untrusted(member, message, launch)
            case AskNewFiles() | NewFiles() | AskNewContents() | LaunchPart(stream="new files"):
                self.fetching.receive_untrusted(member, message)
            case BeginRanks() | SignalRanks() | GiveUpRank() | LaunchPart(to_starter=False):
                if isinstance(message, SignalRanks):
                    self._withdraw(member, message.launch)
                part = self.parts.get((member.node, message.launch))
                if part is not None and part.starter == member:
                    self._pass_on(part, message)
            case _:
                launch = self.started.get(message.launch)
                if launch is not None:
                    launch.receive(member.node, message)
                elif isinstance(message, LaunchPart) and message.data:  # it is forgotten here
                    self.send(member.node, read_of(message))

    def _pass_on(self, part: PartHere, message: _ToPart) -> None:
        match message:
            case BeginRanks():
                if part.begin(message):
                    command = described(part.prepare.command.words)
                    starter = self._name_of(part.starter.node)
                    self._note("command started", f"{starter} runs here: {command}", starter)
            case SignalRanks(_, number):
                part.end(number)
            case GiveUpRank(_, generation, rank):
                part.give_up(generation, rank)
            case LaunchPart():
                part.take_part(message)

    def rank_is(self, pid: int, number: int) -> None:
        """Note the rank of a program in its job; the program may be a rank of a launch."""
        with contextlib.suppress(OSError):  # it has just ended
            session = os.getsid(pid)
            for part in self.parts.values():
                part.rank_is(session, number)

    def op_completed(self, pid: int, *, syncs: bool) -> None:
        """Note that a program has completed an op; the program may be a rank of a launch."""
        with contextlib.suppress(OSError):  # it has just ended
            session = os.getsid(pid)
            for part in self.parts.values():
                part.op_completed(session, syncs=syncs)

    # --- what others ask for

    def _ask(self, member: Member, message: PrepareLaunch) -> None:
        self._withdraw(member, message.launch)
        if sum(question.member.node == member.node for question in self.questions) >= MAX_ASKED:
            refusal = f"it looks at {MAX_ASKED} launches of this machine already; try again"
            self.send(member.node, LaunchPrepared(message.launch, refusal))
            return
        question = _Question(member, message.launch, self._link_with(member))
        self.questions.append(question)
        self._nursery.start_soon(self._prepare, question, message)

    async def _prepare(self, question: _Question, message: PrepareLaunch) -> None:
        refusals = list[str]()
        with self._contain("a question about a launch", refusals.append), question.scope:
            try:
                await self._begin_part(question, message)
            except PmeshError as e:
                refusals.append(str(e))
            except OSError as e:  # no descriptor, no process, a disk that fails
                refusals.append(f"it can't prepare the launch: {e.strerror or e}")
        self.questions.remove(question)
        for refusal in refusals:
            self.send(question.member.node, LaunchPrepared(message.launch, sentence(refusal)))

    def _withdraw(self, member: Member, launch: str) -> None:
        """Cancel the work for a question that this member has asked."""
        for question in self.questions:
            if (question.member, question.launch) == (member, launch):
                question.scope.cancel()

    async def _begin_part(self, question: _Question, message: PrepareLaunch) -> None:
        member = question.member
        found = await self._check(question, message)
        ports = await trio.to_thread.run_sync(free_ports, 2 * message.ranks)
        self._follow_links()  # the one over which this was asked may be lost
        await trio.lowlevel.checkpoint_if_cancelled()  # a thread is not cancelled
        self._check_job(message)  # again: another launch of it may have been faster
        before = self.parts.get((member.node, message.launch))
        begin = 0 if before is None else before.written  # it may still be acknowledged
        spool = self._spool("part", lambda e: note(MACHINE, full_disk(e)))
        part = PartHere(
            message,
            found,
            member,
            link=self._link_with(member),
            home=self._home,
            spool=spool,
            begin=begin,
            send=partial(self.send, member.node),
            nursery=self._nursery,
            contain=self._contain,
        )
        _keep(self.parts, (member.node, message.launch), part)
        self._nursery.start_soon(self._run_part, part)
        answer = LaunchPrepared(message.launch, "", ports, self._ways(), begin)
        self.send(member.node, answer)

    async def _check(self, question: _Question, message: PrepareLaunch) -> Found:
        """Return the command as it runs here. Raises UsageError if it does not."""
        member = question.member
        refusal = await self._why_not(member)
        if refusal:
            self._note_refusal(member, message, refusal)
            raise UsageError(refusal)
        question.allowed = True
        before = self.parts.get((member.node, message.launch))
        if before is not None:
            with trio.move_on_after(ENDS_S):
                await before.over.wait()
        running = [part for part in self.parts.values() if not part.is_over]
        if before in running:
            raise UsageError(f"the ranks of the last attempt have not ended after {ENDS_S:g} s")
        if len(running) + sum(one.allowed for one in self.questions) > MAX_RUNNING:
            raise UsageError(f"it runs {len(running)} launches already; 'pmesh ps' lists them")
        self._check_job(message)
        command = await self.syncing.bring(member, message)
        if message.command.tree is not None:
            await self._prune()
        check = partial(check_command, command, os.environ)
        return await trio.to_thread.run_sync(check)

    def _check_job(self, message: PrepareLaunch) -> None:
        """Raise UsageError if another launch runs this job here."""
        for part in self.parts.values():
            if part.job == message.job and not part.is_over:
                raise UsageError(
                    f"launch {part.launch} runs the job {message.job!r} there already; end it by "
                    f"'pmesh stop {part.launch}', or give another --job"
                )

    async def _why_not(self, member: Member) -> str:
        """Return why a member may not run commands here, nor fetch what they have written."""
        if member == self._me:
            return ""
        permission = await trio.to_thread.run_sync(load_permission, self._home)
        is_root = os.geteuid() == 0
        allowed = self._allow_run
        return why_not(permission, member.node, allowed_by_option=allowed, is_root=is_root)

    async def _prune(self) -> None:
        with self._contain("the files of launches"):
            await self.syncing.prune(self._in_use())

    def _in_use(self) -> frozenset[str]:
        """Return the launches whose files are needed, or may be needed again."""
        launches: list[StartedHere | PartHere] = [*self.parts.values(), *self.started.values()]
        alive = [one.launch for one in launches if not one.is_over]
        return frozenset({*alive, *(question.launch for question in self.questions)})

    async def _run_part(self, part: PartHere) -> None:
        with self._contain("a launch on this machine"):
            await part.run()
        if not part.is_over:  # an error of ours: nobody watches its ranks any more
            part.end(signal.SIGKILL)
        if part.has_begun:
            codes = {rank: here.code for rank, here in part.state.ranks.items()}
            ends = ", ".join(f"rank {rank} with {code}" for rank, code in codes.items())
            command = described(part.prepare.command.words)
            starter = self._name_of(part.starter.node)
            self._note("command ended", f"{command} of {starter} has ended: {ends}", starter)

    def _note_refusal(self, member: Member, message: PrepareLaunch, refusal: str) -> None:
        now = trio.current_time()
        recent = {node: at for node, at in self._refused_at.items() if now - at < AGAIN_S}
        self._refused_at = {member.node: now, **recent}
        if member.node in recent:
            return
        name = self._name_of(member.node)
        what = described(message.command.words)
        self._note("command refused", f"{name} wanted to run here: {what}; {refusal}", name)

    def _ways(self) -> tuple[WayTo, ...]:
        """Return how this machine reaches the others over the best paths."""
        return tuple(
            WayTo(node, *way)
            for node, link in self._links().items()
            if (way := best_way(link)) is not None
        )

    # --- what is started here

    def start(self, request: Launch) -> StartedHere:
        """Begin a launch. Raises UsageError if the machines it names are not there."""
        self._follow_links()  # a link that was lost before is no loss to this launch
        seats = self._seats(request)
        running = sum(not launch.is_over for launch in self.started.values())
        if running >= MAX_STARTED:
            raise UsageError(
                f"this machine has started {running} launches that go on; 'pmesh ps' lists them, "
                "and 'pmesh stop' ends one"
            )
        ranks = sum(seat.count for seat in seats)
        if request.terms.engine == "jaccl" and ranks > MAX_RDMA_RANKS:
            raise UsageError(f"--engine jaccl takes at most {MAX_RDMA_RANKS} ranks, not {ranks}")
        launch_id = self._launch_ids()
        spool = self._spool(
            "started",
            lambda e: seated(
                note(MACHINE, f"{self._name}, which has started it: {full_disk(e)}"), STARTER
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
            way = best_way(links[node]) if node in links else None
            return None if way is None else way[0]
        own = (link.current.hosts[0] for link in links.values() if link.current is not None)
        return next((host for hosts in own for host in sorted(hosts) if ":" not in host), LOOPBACK)

    def _spool(self, kind: str, describe: Callable[[OSError], bytes]) -> Spool:
        directory = self._home / "launches" / path_name(f"{kind}-{next(self._spools)}")
        return Spool(directory, describe=describe)

    def _seats(self, request: Launch | AskHosts) -> list[LaunchMember]:
        here = {seat.member.node: self._names.of_seat(seat) for seat in self._view().seats}
        named = self._names.find_each_here(request.on) if request.on else here.keys()
        nodes = [node for node in here if node in named]
        start = nodes.index(self._me.node) if self._me.node in nodes else 0
        nodes = nodes[start:] + nodes[:start]  # the same ring, but rank 0 is where somebody types
        machines = len(nodes)
        counts = (
            [Shard.of(place, machines, request.count).size for place in range(machines)]
            if request.count
            else [request.per_node] * machines
        )
        if max(counts) > MAX_PORTS:
            raise UsageError(
                f"{max(counts)} ranks on one machine are too many: at most {MAX_PORTS}; give a "
                "smaller -n or --per-node"
            )
        if sum(counts) > MAX_TRAINERS:
            raise UsageError(f"{sum(counts)} ranks are too many: at most {MAX_TRAINERS}")
        return [
            LaunchMember(node=node, name=here[node], count=count)
            for node, count in zip(nodes, counts, strict=True)
            if count
        ]

    async def _look(self) -> None:
        """Follow the links with all machines that take part."""
        while True:
            await sleep_in_step(LOOK_S if self._in_use() else IDLE_LOOK_S)
            with self._contain("the launches of this machine"):
                self._follow_links()

    def _follow_links(self) -> None:
        """Tell launches which machines are lost, which are back, and that time has passed."""
        links = dict(self._links())
        before, self._linked = self._linked, links
        for node in {*before, *links}:
            if (old := before.get(node)) is not (new := links.get(node)):
                self._relink(old, new)
        self.syncing.follow_links()
        self.fetching.follow_links()
        for question in self.questions:
            if self._link_with(question.member) is not question.link:
                question.scope.cancel()
        for part in self.parts.values():
            part.follow(self._link_with(part.starter))
        for launch in self.started.values():
            launch.pass_time()

    def _relink(self, old: Link | None, new: Link | None) -> None:
        for launch in self.started.values():
            if old is not None:
                launch.lose(old.member, "its agent has ended, or can't be reached")
            if new is not None:
                launch.find(new.member)

    def _link_with(self, member: Member) -> Link | None:
        link = self._links().get(member.node)
        return link if link is not None and link.member == member else None

    # --- for people

    def copies_of(self, text: str) -> tuple[PathName, Mapping[NodeId, str]]:
        """Return a launch that was started here, and the names of machines that may have a copy.

        Raises:
            UsageError: Another machine has started it, or it has no copies.
        """
        is_id = re.fullmatch(r"[0-9a-f]{12}", text) is not None
        if is_id and text not in {one.launch for one in self._known()}:  # of an agent before this
            return path_name(text), {n: self._name_of(n) for n in (self._me.node, *self._links())}
        launch = self.find(text)
        if isinstance(launch, PartHere):
            starter = self._name_of(launch.starter.node)
            raise UsageError(f"{starter} has started launch {launch.launch}; fetch its files there")
        if launch.command.tree is None:
            raise UsageError(
                f"launch {launch.launch} ran without --sync: what it has written is where its "
                "ranks ran, and not in a copy"
            )
        return launch.launch, {seat.node: seat.name for seat in launch.state.seats}

    def find(self, text: str) -> StartedHere | PartHere:
        """Return a launch by ID@MACHINE, by its id, or by its job: then the latest that runs.

        Raises:
            UsageError: There is none, or machines have started several.
        """
        known = self._known()
        named = (
            [one for one in known if text in self._full_names(one)]
            or [one for one in known if text == one.launch]
            or [one for one in known if text == one.job and not one.is_over]
            or [one for one in known if text == one.job and not one.refusal]
            or [one for one in known if text == one.job]
        )
        if not named:
            raise UsageError(f"this machine knows no launch {text!r}; 'pmesh ps' lists them")
        latest = {self._starter_of(one): one for one in reversed(named)}
        if len(latest) > 1:
            those = ", or ".join(
                f"{self._full_names(one)[1]} (of {self._name_of(node)})"
                for node, one in latest.items()
            )
            raise UsageError(f"several machines have started {text!r}; give {those}")
        return named[0]

    def _known(self) -> Sequence[StartedHere | PartHere]:
        """Return all launches, of both kinds the latest first."""
        parts = [
            part
            for (starter, launch), part in self.parts.items()
            if starter != self._me.node or launch not in self.started
        ]
        return (*reversed(self.started.values()), *reversed(parts))

    def _starter_of(self, launch: StartedHere | PartHere) -> NodeId:
        return self._me.node if isinstance(launch, StartedHere) else launch.starter.node

    def _full_names(self, launch: StartedHere | PartHere) -> tuple[str, str]:
        """Return two names of this launch alone; only the second is certain to be unique."""
        node = self._starter_of(launch)
        return f"{launch.launch}@{self._name_of(node)}", f"{launch.launch}@{short_node(node)}"

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
        known = self._known()
        ids = Counter(launch.launch for launch in known)
        rows = (self._row(one, is_alone=ids[one.launch] == 1) for one in known)
        return tuple(sorted(rows, key=lambda row: row.age_s))

    def _row(self, launch: StartedHere | PartHere, *, is_alone: bool) -> LaunchRow:
        here = isinstance(launch, StartedHere)
        return LaunchRow(
            launch=launch.launch if is_alone else self._full_names(launch)[1],
            job=launch.job,
            command=described(launch.command.words),
            starter=self._name_of(self._starter_of(launch)),
            here=here,
            machines=launch.names,
            state=launch.phase,
            age_s=round(trio.current_time() - launch.since, 1),
            code=launch.code if here else None,
        )

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


def _keep(kept: dict[_Key, _Kept], key: _Key, launch: _Kept) -> None:
    """Add the latest launch, and forget the oldest ones that are over.

    They are taken from the starter that has most: so none can push out those of others.
    """
    before = kept.pop(key, None)
    if before is not None:
        before.close()
    kept[key] = launch
    while len(kept) > KEPT:
        over = {old: _starter(one) for old, one in kept.items() if one.is_over}
        if not over:
            return
        ((most, _),) = Counter(over.values()).most_common(1)
        oldest = next(old for old, starter in over.items() if starter == most)
        kept.pop(oldest).close()


def _starter(launch: StartedHere | PartHere) -> NodeId | None:
    return launch.starter.node if isinstance(launch, PartHere) else None
