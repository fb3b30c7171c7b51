"""Whole agents and their trainers in one event loop, over real sockets and real shared memory.

Time is a clock that jumps as soon as nobody has anything to do, so deadlines cost nothing.
"""

import contextlib
import math
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import trio
from trio.testing import MockClock

from pmesh.agent import run as agent_run
from pmesh.agent.config import AgentSettings, Listen
from pmesh.agent.features import AnyFeature
from pmesh.agent.run import Agent, serve_agent
from pmesh.agent.schema import DoorStatus
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.core.values import Terms
from pmesh.core.wire.lanes import OfferLane, Splice
from pmesh.core.wire.link import Address
from pmesh.errors import NetworkError
from pmesh.ids import Member
from pmesh.net.lanes.lane import Lane
from pmesh.net.lanes.multipath import LanePath
from tests.worlds.faults import InjectedFault
from tests.worlds.trainer import ANY, TrainerClient, together, until

MESH = MeshKey(b"m" * 32)
FeatureT = TypeVar("FeatureT", bound=AnyFeature)


class NoReach:
    """What a lane rendezvous needs of the links, for an agent that has none."""

    def send(self, member: Member, message: OfferLane | Splice) -> None:
        raise AssertionError(member, message)

    def we_dialled(self, member: Member) -> bool:
        raise AssertionError(member)

    def paths_to(self, _: Member) -> tuple[LanePath, ...]:
        return ()

    async def dial_member(self, member: Member) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        raise AssertionError(member)

    def relay_of(self, member: Member) -> Member | None:
        raise AssertionError(member)

    def name_of(self, member: Member) -> str:
        return f"mac-{member.incarnation}"

    def complain(self, member: Member, error: NetworkError) -> None:
        raise AssertionError(member, error)


class Machine:
    """One agent with a home of its own."""

    def __init__(
        self, settings: AgentSettings, key: NodeKey, nursery: trio.Nursery, clock: MockClock
    ) -> None:
        self._clock = clock
        self.settings = settings
        self.key = key
        self.mesh = MESH
        self.lines: list[str] = []
        self.agent: Agent
        self._nursery = nursery
        self._ended = trio.Event()
        self._killed = False

    @property
    def port(self) -> int:
        return self.agent.port

    @property
    def me(self) -> Member:
        """Which member its agent is, also while it begins anew."""
        return self.agent.jobs.me

    @property
    def door(self) -> DoorStatus:
        """Whom its agent lets in, counted."""
        return self.agent.snapshot().door

    def part(self, kind: type[FeatureT]) -> FeatureT:
        """The feature of its agent that is of this kind."""
        (found,) = (each for each in self.agent.features if isinstance(each, kind))
        return found

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    @property
    def names(self) -> list[str]:
        """Of the machines in its view, in ring order."""
        seats = self.agent.membership.view.seats
        return list(map(self.agent.membership.names.of_seat, seats))

    async def start(self) -> None:
        self._ended = trio.Event()
        await self._nursery.start(self._run)

    async def _run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """As `run_agent`, but it can also be killed."""
        try:
            while True:
                async with trio.open_nursery() as outer:
                    self._clock.autojump_threshold = math.inf  # a thread looks for addresses
                    self.agent = await outer.start(
                        serve_agent, self.settings, self.mesh, self.key, self.lines.append
                    )
                    self._clock.autojump_threshold = 0
                    task_status.started()
                    await self.agent.stopped.wait()
                    if not self._killed:
                        await self.agent.peers.leave()
                    self.agent.cancel()
                if self.agent.begins_anew is None:
                    return
                task_status = trio.TASK_STATUS_IGNORED
        finally:
            self._ended.set()

    async def stop(self) -> None:
        self.agent.stopped.set()
        await self._ended.wait()

    async def kill(self) -> None:
        """End it without a goodbye."""
        self._killed = True
        self.agent.cancel()
        self.agent.stopped.set()
        await self._ended.wait()

    def lanes(self) -> list[Lane]:
        """The lanes of all ranks here."""
        return [lane for rank in self.agent.jobs.ranks for lane in rank.lanes.all_open()]


class Village:
    """Machines that know the first one's address, and whoever trains on them."""

    def __init__(self, nursery: trio.Nursery, directory: Path, clock: MockClock) -> None:
        self._clock = clock
        self.nursery = nursery
        self.directory = directory
        self.machines: list[Machine] = []
        self.trainers: list[TrainerClient] = []

    def new_machine(
        self,
        name: str,
        *,
        peers: Sequence[Address] = (),
        key: NodeKey | None = None,
        min_peers: int = 0,
        compression: str = "",
        port: int = 0,
        mesh: bytes = MESH,
        mdns: bool = False,
        folder: str = "",
    ) -> Machine:
        home = self.directory / (folder or name)
        home.mkdir(mode=0o700, exist_ok=True)
        settings = AgentSettings(
            home=home,
            name=name,
            listen=Listen("127.0.0.1", port),
            peers=tuple(peers),
            mdns=mdns,
            min_peers=min_peers,
            compression=compression,
        )
        number = len(self.machines)
        key = key or NodeKey.from_seed(bytes([number + 1]) * 32)
        machine = Machine(settings, key, self.nursery, self._clock)
        machine.mesh = MeshKey(mesh)
        self.machines.append(machine)
        return machine

    async def settle(self, *machines: Machine) -> None:
        """Wait until these have one view, of these."""
        wanted = {machine.settings.name for machine in machines}
        epochs: Callable[[], set[object]] = lambda: {  # noqa: E731 - looked at again and again
            machine.agent.membership.view.epoch for machine in machines
        }
        await until(lambda: len(epochs()) == 1 and set(machines[0].names) == wanted)

    async def trainer(self, machine: Machine) -> TrainerClient:
        trainer = await TrainerClient.open(machine.settings.home)
        self.trainers.append(trainer)
        return trainer

    async def job(
        self,
        *machines: Machine,
        name: str = "digits",
        terms: Terms = ANY,
        straggler_after_s: float = 60.0,
        timeout_s: float = 30.0,
    ) -> list[TrainerClient]:
        """A trainer on each of the machines, joined; in the order of their ranks."""
        trainers = [await self.trainer(machine) for machine in machines]

        async def join(trainer: TrainerClient) -> None:
            await trainer.join(
                name,
                len(trainers),
                terms=terms,
                straggler_after_s=straggler_after_s,
                timeout_s=timeout_s,
            )

        await together(*[partial(join, trainer) for trainer in trainers])
        return sorted(trainers, key=lambda trainer: trainer.rank)


@asynccontextmanager
async def village(clock: MockClock, count: int) -> AsyncGenerator[Village]:
    """So many machines with one view, on a clock that jumps; all of it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pm") as directory:
        async with trio.open_nursery() as nursery:
            made = Village(nursery, Path(directory), clock)
            try:
                for number in range(count):
                    peers = [made.machines[0].address] if number else []
                    await made.new_machine(f"mac-{number}", peers=peers).start()
                if made.machines:
                    await made.settle(*made.machines)
                yield made
            finally:
                with trio.CancelScope(shield=True):
                    for trainer in made.trainers:
                        await trainer.die()
                nursery.cancel_scope.cancel()
                for machine in made.machines:
                    with contextlib.suppress(AttributeError):  # it was never started
                        machine.agent.cancel()  # its shield keeps it from ours


@asynccontextmanager
async def training(
    clock: MockClock, count: int
) -> AsyncGenerator[tuple[Village, list[TrainerClient]]]:
    """A village with a job that has a trainer on each machine."""
    async with village(clock, count) as here:
        yield here, await here.job(*here.machines)


@asynccontextmanager
async def small_machine(
    clock: MockClock, *, files: int = 10_240, memory_bytes: int = 2**30
) -> AsyncGenerator[tuple[Village, Machine]]:
    """A village of one machine, which may open so many files and has so much memory."""
    memory = psutil.virtual_memory()._replace(total=memory_bytes)
    with (
        InjectedFault(agent_run, "open_files_limit", lambda: files),
        InjectedFault(psutil, "virtual_memory", lambda: memory),
    ):
        async with village(clock, 1) as here:
            yield here, here.machines[0]
