"""Runs one agent, from opening its listeners to leaving the mesh, in one nursery."""

import contextlib
import errno
import functools
import os
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import TypeAlias, Union, assert_never

import psutil
import structlog
import trio

from pmesh.agent.changes import describe_change, describe_reordered
from pmesh.agent.config import AgentSettings
from pmesh.agent.containment import ContainedTasks, Containment
from pmesh.agent.events import Event, EventLog, encode_events
from pmesh.agent.features import Kernel
from pmesh.agent.host_port import host_port_text, next_to
from pmesh.agent.jobs.driver import Jobs
from pmesh.agent.jobs.ranks import sum_of
from pmesh.agent.jobs.session import serve_trainer
from pmesh.agent.lanes.rendezvous import LaneRendezvous
from pmesh.agent.limits import Admission, open_files_limit, plan_files
from pmesh.agent.mesh.findings import Findings
from pmesh.agent.mesh.keyring import Keyring
from pmesh.agent.mesh.membership import DOUBT_S, Follower, Membership
from pmesh.agent.mesh.names import MachineNames, load_names
from pmesh.agent.mesh.peers import Peers
from pmesh.agent.mesh.ping import ping
from pmesh.agent.mesh.probing import Probing
from pmesh.agent.mesh.register import Register, load_records
from pmesh.agent.mesh.renewals import Renewals
from pmesh.agent.mesh.storms import count_packets, watch_storms
from pmesh.agent.mesh.turned_away import watch as watch_turned_away
from pmesh.agent.schema import (
    OTHER_MESH,
    Status,
    TurnedAwayStatus,
    describe_other_mesh,
    encode_status,
)
from pmesh.agent.snapshot import Sources, describe_peers, describe_unlinked, take_snapshot
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.core.identity.names import sign_name
from pmesh.core.links.addresses import announced_addresses, announced_interfaces
from pmesh.core.values import View
from pmesh.core.wire.channels import Channels
from pmesh.core.wire.control import (
    AgentEvents,
    AskEvents,
    AskMachines,
    AskPing,
    AskStatus,
    ControlRequest,
    ForgetName,
    Machines,
    StatusReply,
    StopAgent,
    Stopping,
)
from pmesh.core.wire.lanes import LANES
from pmesh.core.wire.link import PROTOCOL_VERSION, Hello
from pmesh.core.wire.session import SessionDecoder
from pmesh.core.wire.trainer import Connect
from pmesh.core.wire.views import VIEWS
from pmesh.errors import ConfigError, PmeshError, PortTaken, UsageError
from pmesh.features import make_features
from pmesh.home_paths import socket_path
from pmesh.ids import Incarnation, Member, NodeId, node_text
from pmesh.installed import installed_version
from pmesh.net.links.acceptor import Acceptor, listen_at_interfaces
from pmesh.net.links.dialer import error_numbers
from pmesh.net.links.discovery import minute_of_now
from pmesh.net.links.interfaces import AddressWatch
from pmesh.net.sessions.processes import Stall, sleep_in_step, tick
from pmesh.net.sessions.sessions import (
    ENDS_OF_A_SESSION,
    Session,
    SessionCounters,
    refuse,
    report_errors,
    serve_sessions,
)

MOST_FALLS = 3  # within ten minutes; after these the agent is not restarted
FALLS_WINDOW_S = 600.0
ALONE_S = 10.0  # mDNS takes about a second
LOOK_AROUND_S = 0.5
MOST_OTHERS_NAMED = 3  # meshes of the neighbours, in a house with many
LEAVE_S = 0.8  # a clean leave takes less than 1 s, whatever the peers do
LAG_WINDOW_S = 10.0

_log = structlog.get_logger()

_Opening: TypeAlias = Connect | ControlRequest
"""The first requests of sessions, except those of features."""


async def run_agent(
    settings: AgentSettings,
    mesh_key: MeshKey,
    node_key: NodeKey,
    announce: Callable[[str], None],
) -> None:
    """Run until stopped or cancelled; in both cases inform the peers before the links end.

    Raises:
        PortTaken: Another program listens at the port.
        ConfigError: The listen address is not one of this machine's.
    """
    falls = deque[float](maxlen=MOST_FALLS)
    while True:
        agent: Agent | None = None
        try:
            async with trio.open_nursery() as outer:
                agent = await outer.start(serve_agent, settings, mesh_key, node_key, announce)
                assert agent is not None  # noqa: S101 - for the type checkers
                await _leave_once_stopped(agent)
        except Exception:  # an unexpected error that was not contained
            falls.append(trio.current_time())
            too_often = len(falls) == MOST_FALLS and falls[-1] - falls[0] < FALLS_WINDOW_S
            if agent is None or too_often:
                raise
            _log.exception("the agent failed and restarts")
            agent.begin_anew("an error inside pmesh, whose traceback is in the log")
        if agent.begins_anew is None:
            return
        announce(f"{settings.name} restarts: {agent.begins_anew}")


async def _leave_once_stopped(agent: "Agent") -> None:
    try:
        await agent.stopped.wait()
    finally:
        with trio.move_on_after(LEAVE_S) as leaving:
            leaving.shield = True
            await agent.peers.leave()
        agent.cancel()


async def serve_agent(
    settings: AgentSettings,
    mesh_key: MeshKey,
    node_key: NodeKey,
    announce: Callable[[str], None],
    *,
    task_status: trio.TaskStatus["Agent"] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run an agent; shielded after the start: `run_agent` first leaves and then cancels it."""
    with contextlib.ExitStack() as leftovers:
        listeners = await open_listeners(*settings.listen)
        for listener in listeners:
            leftovers.callback(listener.socket.close)  # the acceptor closes them once it serves
        async with trio.open_nursery() as nursery:
            agent = Agent(
                settings, mesh_key, node_key, announce, listeners=listeners, nursery=nursery
            )
            leftovers.callback(agent.close)
            await agent.start()
            nursery.cancel_scope.shield = True  # not before: nobody else could cancel the start
            task_status.started(agent)


class Agent:
    """One agent, assembled from its parts, whose tasks run in its nursery."""

    def __init__(
        self,
        settings: AgentSettings,
        mesh_key: MeshKey,
        node_key: NodeKey,
        announce: Callable[[str], None],
        *,
        listeners: Sequence[trio.SocketListener],
        nursery: trio.Nursery,
    ) -> None:
        self._listeners = listeners
        self._nursery = nursery
        self._settings = settings
        self._node_key = node_key
        self.keyring = Keyring(settings.home, mesh_key, node_key)
        self._announce = announce
        self.stopped = trio.Event()
        self.channels = Channels()
        self.begins_anew: str | None = None
        """Why another agent, with another incarnation, must follow this one; else None."""
        self._me = Member(node_key.node, Incarnation(secrets.randbits(62) + 1))
        self._said = sign_name(node_key, self._me, settings.name)
        self.watch = AddressWatch(
            settings.listen.host, only=settings.interfaces, never=settings.not_interfaces
        )
        self._findings = Findings(self.keyring.advertisement_key.tag, minute=minute_of_now)
        self._sessions = SessionCounters()
        self._lags: deque[tuple[float, float]] = deque()
        self._began = trio.current_time()
        self.port: int = listeners[0].socket.getsockname()[1]
        """Where it listens; the system has chosen it if the settings say 0."""
        self.event_log = EventLog(
            self._me,
            settings.name,
            clock=trio.current_time,
            wall_clock=lambda: datetime.now().astimezone(),
            listener=self._say,
        )
        owners = load_names(settings.home)
        self._names = MachineNames(owners, noticed=self.event_log.add)
        self.register = Register(
            self._me.node,
            load_records(settings.home),
            names=self._names,
            wall_clock=time.time,
            noticed=self.event_log.add,
        )
        self._version = installed_version()  # it opens a file; later no descriptor may be left
        self._files = plan_files(open_files_limit())
        memory_bytes = psutil.virtual_memory().total
        self._admission = Admission(self._files, memory_bytes=memory_bytes)
        self._containment = Containment(self.event_log, clock=trio.current_time)
        self.peers = self._make_peers()
        self.renewals = self._make_renewals()
        self.jobs = self._make_jobs()
        self.membership = self.jobs.membership
        self.features = make_features(self._kernel)
        openings = (kind for feature in self.features for kind in feature.openings)
        self._openings = SessionDecoder[_Opening]("request", Union[_Opening, *openings])
        self._acceptor = Acceptor[trio.SocketStream](
            on_link=self.peers.welcome,
            on_lane=self.jobs.rendezvous.welcome,
            on_guest=next(each.welcome for each in self.features if each.takes_guests),
            on_renewal=self.renewals.give,
            is_offered=self.jobs.rendezvous.is_offered,
            uses=self.watch.uses,
            contain=self._containment.contain,
        )
        self.channels.register(VIEWS, self.membership.receive)
        self.channels.register(LANES, self.jobs.receive)
        for feature in self.features:
            if feature.channel is not None:
                self.channels.register(feature.channel, feature.receive)

    async def start(self) -> None:
        """Start all tasks."""
        nursery = self._nursery
        await nursery.start(self.watch.run)
        await nursery.start(self._acceptor.serve, self._listeners)
        if psutil.LINUX:
            listen = listen_at_interfaces
            nursery.start_soon(listen, self._listeners, self.watch, self._acceptor.add)
        await self._start_sessions()
        for address in self._settings.peers:
            self.peers.targets.aim_at(address)
        if self._settings.mdns:
            found_by = self._node_key, self.keyring, self.watch, self.peers
            nursery.start_soon(self._findings.discover, self._own_advertisement, *found_by)
        for feature in self.features:
            nursery.start_soon(feature.run)
        nursery.start_soon(self.peers.targets.run)
        nursery.start_soon(self.renewals.run)
        nursery.start_soon(self.peers.follow_interfaces)
        nursery.start_soon(self.peers.relays.keep)
        nursery.start_soon(self.membership.run)
        nursery.start_soon(self._names.keep, self._settings.home)
        nursery.start_soon(self.register.keep, self._settings.home)
        nursery.start_soon(self._tick)
        nursery.start_soon(self._poll_jobs)
        take_hosts = self._acceptor.take_hosts
        nursery.start_soon(watch_turned_away, self._count_turned_away, take_hosts, self.event_log)
        nursery.start_soon(watch_storms, self.watch, count_packets, self.event_log.add)
        self._say_ready()
        nursery.start_soon(self._report_alone)

    def cancel(self) -> None:
        """End all tasks."""
        self._nursery.cancel_scope.cancel()

    def close(self) -> None:
        """Free what is left, after all tasks have ended."""
        for feature in self.features:
            feature.close()
        self.jobs.close()

    def begin_anew(self, why: str) -> None:
        """Stop, and let another agent follow in this process, as if this one was restarted."""
        self.begins_anew = why
        self.stopped.set()

    def snapshot(self) -> Status:
        """Return what `pmesh status` shows."""
        return take_snapshot(
            Sources(
                version=self._version,
                me=self._me,
                name=self._settings.name,
                compression=self._settings.compression,
                uptime_s=trio.current_time() - self._began,
                hello=self._hello(),
                membership=self.membership,
                peers=self.peers,
                jobs=self.jobs,
                p2p_bytes=functools.reduce(sum_of, (each.traffic for each in self.features)),
                findings=self._findings,
                door=self._acceptor.counters,
                turned_away=self._count_turned_away(),
                loop_lag_s=max((late for _, late in self._lags), default=0.0),
            )
        )

    def _tasks(self, what: str) -> ContainedTasks:
        return ContainedTasks(self._nursery, self._containment.contain, what)

    def _make_peers(self) -> Peers:
        return Peers(
            self._hello,
            membership=lambda: self.membership,
            register=self.register,
            renewals=lambda: self.renewals,
            watch=self.watch,
            nursery=self._tasks("a link"),
            jitter=random.random,
            channels=self.channels,
            noticed=self.event_log.add,
            path_failed=self._leave_path,
            contain=self._containment.contain,
        )

    def _make_renewals(self) -> Renewals:
        return Renewals(
            self._me.node,
            self.keyring,
            self.register,
            elsewhere=self._findings.elsewhere,
            in_order=self.peers.in_order,
            found=self.peers.found,
            noticed=self.event_log.add,
        )

    def _make_jobs(self) -> Jobs:
        lanes = self._tasks("a data connection")
        return Jobs(
            self._me,
            self._tasks("the sending of a result"),
            self.event_log,
            self._settings,
            membership=self._join,
            rendezvous=lambda awaits: LaneRendezvous(
                self._me, self.peers.reach, lanes, secrets.token_bytes, awaits=awaits
            ),
        )

    def _join(self, follower: Follower) -> Membership:
        return Membership(
            self._me,
            self._said,
            names=self._names,
            follower=follower,
            send=self.peers.reach.send,
            drop=self.peers.drop,
            ban=self.peers.ban,
            installed=self._installed,
            noticed=self.event_log.note,
            led_astray=lambda: self.begin_anew("a member raised our epoch counter too far"),
            probing=Probing(self.peers.reach.probed_paths_to),
        )

    @property
    def _kernel(self) -> Kernel:
        return Kernel(
            me=self._me,
            settings=self._settings,
            version=self._version,
            key=self._node_key,
            names=self._names,
            register=self.register,
            renewals=self.renewals,
            peers=self.peers,
            jobs=self.jobs,
            nursery=self._nursery,
            contain=self._containment.contain,
            noticed=self.event_log.add,
            admission=lambda: self._admission,
            mesh_key=lambda: self.keyring.mesh_key,
            advertise_invitation=self._findings.nameplate.show,
        )

    def _leave_path(
        self, ours: AbstractSet[str], theirs: AbstractSet[str], *, outranked: bool = False
    ) -> None:
        self.jobs.rendezvous.lose_path(ours, theirs, outranked=outranked)

    async def _start_sessions(self) -> None:
        path = socket_path(self._settings.home)
        serve = functools.partial(
            serve_sessions, counters=self._sessions, most_visitors=self._files.visitors
        )
        await self._nursery.start(serve, path, self._serve_program)

    def _own_advertisement(self, tag: bytes) -> Advertisement:
        me, name = self._me, self._settings.name
        return Advertisement(
            tag=tag, node=me.node, incarnation=me.incarnation, port=self.port, name=name
        )

    def _hello(self) -> Hello:
        local = self.watch.announced
        addresses, interfaces = (
            announced_addresses(local, port=self.port),
            announced_interfaces(local),
        )
        return Hello(PROTOCOL_VERSION, self._me, self._said, addresses, interfaces)

    def _say_ready(self) -> None:
        where = host_port_text(self._settings.listen.host, self.port)
        text = f"{self._settings.name} is up, listening at {where}"
        self._announce(text)
        self.event_log.note("agent started", text)
        if self._settings.min_peers:
            self._announce(f"jobs begin when {self._settings.min_peers} peers are present")

    async def _report_alone(self) -> None:
        """Say once, to whoever has just started this agent, why no other is here."""
        said: set[str] = set()
        with trio.move_on_after(ALONE_S):
            while self._is_alone:
                self._report_other_meshes(said)
                await trio.sleep(LOOK_AROUND_S)
        if not self._is_alone:
            return
        self._announce(f"no other machine of this mesh in {ALONE_S:g} s; to add one: pmesh invite")
        lines = tuple(line for line in self._describe_unlinked() if OTHER_MESH not in line)
        if self._findings.deaf is not None:
            lines += (f"mDNS can't be used: {self._findings.deaf}",)
        elif self._settings.mdns and not (lines or said):
            lines += (
                "mDNS finds no agent; 'pmesh doctor' says why, or name one: pmesh up --peer HOST",
            )
        for line in lines:
            self._announce(line)

    @property
    def _is_alone(self) -> bool:
        return len(self.membership.view.seats) == 1

    def _report_other_meshes(self, said: set[str]) -> None:
        for peer in describe_peers(self.peers, self._findings):
            other = peer.state == "other_mesh_key" and not self.register.knows(peer.id)
            text = describe_other_mesh(peer, own_name=self._settings.name)
            if other and len(said) < MOST_OTHERS_NAMED and text not in said:
                said.add(text)
                self._announce(text)

    def _installed(self, before: View, after: View, losses: Mapping[Member, str]) -> None:
        for feature in self.features:
            feature.follow()
        name_of = self._names.of_seat
        for news in describe_change(before, after, losses, me=self._me, name_of=name_of):
            self.event_log.add(news)
        edges_among = self.membership.edges_among
        for news in describe_reordered(before, after, edges_among, name_of=name_of):
            self.event_log.add(news)

    def _say(self, event: Event) -> None:
        if event.is_announced:
            self._announce(event.text)

    async def _tick(self) -> None:
        await tick(self._judge, period_s=lambda: self.membership.tick_s)

    def _judge(self, stall: Stall) -> None:
        now = trio.current_time()
        if stall.total_s >= DOUBT_S:
            text = f"this machine or its agent stood still for {stall.total_s:.1f} s"
            self.event_log.note("agent stalled", text, duration_s=stall.total_s)
        self._lags.append((now, stall.late_s))
        while self._lags[0][0] < now - LAG_WINDOW_S:
            self._lags.popleft()
        self.membership.judge(stall)

    async def _poll_jobs(self) -> None:
        while True:
            await sleep_in_step(self.membership.pace_s)
            self.jobs.poll()
            for feature in self.features:
                feature.poll()

    async def _serve_program(self, session: Session) -> None:
        """Serve a local program; an error of ours ends its session, and not the agent."""
        errors = list[str]()
        contain = self._containment.contain
        with contain("a local program's session", errors.append, passing=ENDS_OF_A_SESSION):
            try:
                await self._answer(session)
            except UsageError as e:
                await refuse(session, "UsageError", str(e))
        await report_errors(session, errors)

    async def _answer(self, session: Session) -> None:
        request = await session.receive(self._openings)
        for feature in self.features:
            if isinstance(request, feature.openings):
                await feature.serve(session, request)
                return
        match request:
            case Connect():
                await self._serve_trainer(session, request)
            case AskStatus():
                await session.send(StatusReply(encode_status(self.snapshot())))
            case AskEvents(after):
                await session.send(AgentEvents(encode_events(self.event_log.since(after))))
            case AskPing(name):
                await self._ping(session, name)
            case AskMachines(names):
                await self._tell_machines(session, map(self._names.find, names))
            case ForgetName(name):
                await self._tell_machines(session, [self._names.forget(name)])
            case StopAgent():
                session.stay()
                await session.send(Stopping(os.getpid()))
                self.stopped.set()
                await trio.sleep_forever()  # closed last: its end shows that the agent has ended
            case _:
                assert_never(request)

    async def _ping(self, session: Session, name: str) -> None:
        try:
            pinged = await ping(name, self.peers, session.send, local=self.watch.current)
        except PmeshError as e:
            await refuse(session, type(e).__name__, str(e))
        else:
            await session.send(pinged)

    async def _tell_machines(self, session: Session, found: Iterable[NodeId]) -> None:
        await session.send(Machines(tuple(map(node_text, found))))

    async def _serve_trainer(self, session: Session, request: Connect) -> None:
        with self._admission.admit(session.pid) as share:
            session.stay()
            await serve_trainer(
                session,
                request,
                self.jobs,
                share,
                self._containment.contain,
                compression=self._settings.compression,
                unlinked=self._describe_unlinked,
                op_completed=functools.partial(self._op_completed, session.pid),
                rank_is=functools.partial(self._rank_is, session.pid),
            )

    def _rank_is(self, pid: int, number: int) -> None:
        for feature in self.features:
            feature.rank_is(pid, number)

    def _op_completed(self, pid: int, syncs: bool) -> None:  # noqa: FBT001 - as it is called
        for feature in self.features:
            feature.op_completed(pid, syncs=syncs)

    def _describe_unlinked(self) -> tuple[str, ...]:
        return describe_unlinked(self.peers, self._findings, own_name=self._settings.name)

    def _count_turned_away(self) -> TurnedAwayStatus:
        discovery, programs = self._findings.counters, self._sessions
        return TurnedAwayStatus(
            connections=self._acceptor.counters.turned_away,
            forged_announcements=discovery.forged,
            foreign_announcements=discovery.not_shown,
            broken_links=self.peers.broken_links,
            programs=programs.refused + programs.silent + programs.garbage,
        )


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listen at the address or at all; port 0 is one free port, the same at all addresses."""
    try:
        if host or port:
            return await trio.open_tcp_listeners(port, host=host or None)
        (first,) = await trio.open_tcp_listeners(0, host="0.0.0.0")  # noqa: S104 - asked for
        port = first.socket.getsockname()[1]
        try:
            return [first, *await trio.open_tcp_listeners(port, host="::")]
        except OSError:  # a machine without IPv6
            return [first]
    except OSError as e:
        text = host_port_text(host, port)
        if errno.EADDRINUSE in error_numbers(e):
            other = next_to(host, port)
            raise PortTaken(
                f"port {port} is taken by another program; choose another with "
                f"--listen HOST:PORT, such as --listen {other}"
            ) from e
        raise ConfigError(
            f"can't listen at {text}: {e}; --listen must be an address of this machine"
        ) from e
