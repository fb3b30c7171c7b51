"""Machines with copies of one store, without agents: a seed decides what happens to them.

Views are a list of rosters that each machine installs when it comes to it, or skips. Parts are
lost; machines die, are cut off and do not know it yet, and enter again.
"""

import functools
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from random import Random

from pmesh.core.wire.stream import Part
from pmesh.ids import Member, TrainerId
from pmesh.store.rules.pipe import Pipe
from pmesh.store.rules.replica import Finished, Keepers, Replica
from pmesh.store.wire import (
    Add,
    Append,
    Check,
    Command,
    CompareSet,
    Delete,
    Get,
    Keys,
    Set,
    Wait,
    decode_message_untrusted,
)
from tests.worlds.builders import ANNA, BERT, CARA, DORA, make_member
from tests.worlds.linearizable import ObservedCall

KEYS = ("a", "b")


class MachineWithCopy:
    """A machine with a copy, once it has a rank."""

    def __init__(self, me: Member) -> None:
        self.me = me
        self.lives = True
        self.version = -1
        self.keepers: Keepers | None = None
        self.replica = Replica(me)
        self.pipes: dict[Member, Pipe] = {}
        self.calls: dict[tuple[TrainerId, int], ObservedCall] = {}

    @property
    def trainers(self) -> list[TrainerId]:
        """Its ranks, by the roster that it has installed."""
        if self.keepers is None or not self.lives:
            return []
        return [t for t, home in self.keepers.homes.items() if home == self.me]


class StoreWorld:
    """All of it; `calls` is what the ranks have seen."""

    def __init__(self, seed: int, *, machines: int = 3) -> None:
        self.random = Random(seed)  # noqa: S311 - it decides what happens
        self.now = 0.0
        self.step = 0
        self.calls: list[ObservedCall] = []
        self.machines = {
            make_member(c): MachineWithCopy(make_member(c)) for c in "abcde"[: machines + 1]
        }
        self._wires: dict[tuple[Member, Member], deque[tuple[int, Part]]] = {}
        self._numbers = itertools.count()
        self._ids = itertools.count(machines)
        members = list(self.machines)[:machines]
        homes = {TrainerId(i): member for i, member in enumerate(members)}
        self.rosters = [Keepers(1, tuple(members), homes, is_first=True)]

    # --- what happens

    def run(self, steps: int, *, kill_at: int = -1) -> None:
        """Let so many things happen; the coordinator of then is lost at `kill_at`."""
        for _ in range(steps):
            self.step += 1
            if self.step == kill_at:
                self.kill(self.rosters[-1].hosts[0])
            kinds = [
                self._deliver,
                self._call,
                self._install,
                self._tick,
                self._lose,
                self._give_up,
            ]
            (happens,) = self.random.choices(kinds, [20, 4, 4, 2, 1, 0.3])
            happens()
            if kill_at < 0 and self.random.random() < 0.01:
                self._change()

    def settle(self) -> None:
        """Let everything arrive, and all calls that can end do so."""
        for _ in range(400):
            for machine in self.machines.values():
                if machine.lives and machine.version < len(self.rosters) - 1:
                    self._follow(machine, len(self.rosters) - 1)
                self._send_parts(machine)
            while any(self._wires.values()):
                self._deliver()
            self.now += 0.1

    def ask_all(self) -> None:
        """Every rank looks at everything, after all that has happened."""
        for machine in self.here():
            for trainer in machine.trainers:
                self.step += 1
                self.ask(machine, trainer, Keys(""))
                for key in KEYS:
                    self.ask(machine, trainer, CompareSet(key, b"unlikely", b""))
        self.settle()

    def here(self) -> list[MachineWithCopy]:
        """The machines of the last roster."""
        return [self.machines[host] for host in self.rosters[-1].hosts]

    def kill(self, member: Member) -> None:
        """The machine is gone; the others agree on a roster without it."""
        self.machines[member].lives = False
        self._agree_without({t for t, home in self.rosters[-1].homes.items() if home == member})

    def ask(self, machine: MachineWithCopy, trainer: TrainerId, command: Command) -> ObservedCall:
        number = next(self._numbers)
        call = ObservedCall(command, self.step)
        self.calls.append(call)
        machine.calls[trainer, number] = call
        self._carry_out(machine, machine.replica.ask(trainer, number, command))
        return call

    # --- kinds of events

    def _deliver(self) -> None:
        wire = self._some_wire()
        if wire is None:
            return
        version, part = self._wires[wire].popleft()
        machine = self.machines[wire[1]]
        if machine.lives and machine.version == version and wire[0] in machine.pipes:
            for message in machine.pipes[wire[0]].receive_untrusted(part, now=self.now):
                self._carry_out(machine, machine.replica.receive_untrusted(wire[0], message))
            self._send_parts(machine)

    def _lose(self) -> None:
        wire = self._some_wire()
        if wire is not None:
            self._wires[wire].popleft()

    def _some_wire(self) -> tuple[Member, Member] | None:
        busy = [wire for wire, parts in self._wires.items() if parts]
        return self.random.choice(busy) if busy else None

    def _tick(self) -> None:
        self.now += 0.2
        for machine in self.machines.values():
            if machine.lives:
                self._send_parts(machine)

    def _call(self) -> None:
        machine = self.random.choice(list(self.machines.values()))
        if machine.trainers and len(machine.calls) < 2:
            self.ask(machine, self.random.choice(machine.trainers), self._command())

    def _give_up(self) -> None:
        machine = self.random.choice(list(self.machines.values()))
        for key in list(machine.calls)[:1]:
            del machine.calls[key]
            self._carry_out(machine, machine.replica.give_up(*key))

    def _command(self) -> Command:
        key, value = self.random.choice(KEYS), b"%d" % self.random.randrange(3)
        kinds: list[Command] = [
            Set(key, value),
            Add(key, 1),
            Add(key, 1),
            CompareSet(key, b"1", value),
            CompareSet(key, b"", value),
            Append(key, value),
            Delete(key),
            Get(key),
            Get(key),
            Wait(KEYS),
            Check(KEYS),
            Keys(""),
        ]
        return self.random.choice(kinds)

    def _change(self) -> None:
        """Machines die or are cut off, trainers die and come, in a roster that is agreed on."""
        last = self.rosters[-1]
        gone = {t for t in last.homes if self.random.random() < 0.3}
        lost = [h for h in last.hosts if gone >= {t for t, home in last.homes.items() if home == h}]
        if self._have_a_copy(set(last.homes) - gone):
            for member in lost:
                self.machines[member].lives = self.random.random() < 0.4  # else only cut off
            self._agree_without(gone, newcomers=self.random.randrange(3))

    def _have_a_copy(self, trainers: set[TrainerId]) -> bool:
        return any(
            machine.replica.copy is not None and trainers.intersection(machine.trainers)
            for machine in self.machines.values()
        )

    def _agree_without(self, gone: set[TrainerId], newcomers: int = 0) -> None:
        homes = {t: home for t, home in self.rosters[-1].homes.items() if t not in gone}
        living = [machine.me for machine in self.machines.values() if machine.lives]
        for _ in range(newcomers):
            homes[TrainerId(next(self._ids))] = self.random.choice(living)
        hosts = tuple(dict.fromkeys(homes.values()))
        number = len(self.rosters) + 1
        self.rosters.append(Keepers(number, hosts, homes, is_first=False))

    def _install(self) -> None:
        """A machine follows a roster, perhaps not the next one."""
        machine = self.random.choice(list(self.machines.values()))
        later = range(machine.version + 1, len(self.rosters))
        if machine.lives and later:
            self._follow(machine, self.random.choice(later))

    def _follow(self, machine: MachineWithCopy, version: int) -> None:
        keepers, before = self.rosters[version], machine.trainers
        machine.version, machine.keepers = version, keepers
        if not set(before).intersection(machine.trainers):
            machine.replica = Replica(machine.me)  # S4
        for key in [key for key in machine.calls if key[0] not in machine.trainers]:
            del machine.calls[key]
        take, others = machine.replica.take, keepers.hosts if machine.trainers else ()
        machine.pipes = {host: Pipe(functools.partial(take, host)) for host in others}
        if machine.trainers:
            self._carry_out(machine, machine.replica.follow(keepers))

    # --- outputs

    def _carry_out(self, machine: MachineWithCopy, finished: tuple[Finished, ...]) -> None:
        for ended in finished:
            call = machine.calls.pop((ended.trainer, ended.call), None)
            if call is not None:
                call.ended, call.answer = self.step, ended.answer
        self._send_parts(machine)

    def _send_parts(self, machine: MachineWithCopy) -> None:
        for host, pipe in machine.pipes.items():
            wire = self._wires.setdefault((machine.me, host), deque())
            wire.extend((machine.version, part) for part in pipe.parts(now=self.now))

    def unanswered(self) -> Iterator[ObservedCall]:
        """The calls of ranks that are there, but for those that wait for a key."""
        for machine in self.here():
            yield from (c for c in machine.calls.values() if not isinstance(c.command, Get | Wait))


ID_OF = {member: TrainerId(i) for i, member in enumerate([ANNA, BERT, CARA, DORA])}


def make_keepers(*members: Member, number: int = 1, is_first: bool = False) -> Keepers:
    return Keepers(number, members, {ID_OF[m]: m for m in members}, is_first=is_first)


class DirectPost:
    """Brings messages between copies at once, but to those that are out of reach."""

    def __init__(self, *members: Member) -> None:
        self.replicas = {member: Replica(member) for member in members}
        self.answers: dict[tuple[int, int], object] = {}

    def follow(self, keepers: Keepers, *, out_of_reach: Collection[Member] = ()) -> None:
        for member, replica in self.replicas.items():
            if member in keepers.hosts:
                self.note(replica.follow(keepers))
        self.carry(out_of_reach)

    def ask(
        self, member: Member, call: int, command: Command, out_of_reach: Collection[Member] = ()
    ) -> None:
        self.note(self.replicas[member].ask(ID_OF[member], call, command))
        self.carry(out_of_reach)

    def give_up(self, member: Member, call: int) -> None:
        self.note(self.replicas[member].give_up(ID_OF[member], call))
        self.carry()

    def note(self, finished: Iterable[Finished]) -> None:
        for ended in finished:
            self.answers[ended.trainer, ended.call] = ended.answer.value

    def carry(self, out_of_reach: Collection[Member] = ()) -> None:
        carried = True
        while carried:
            carried = False
            for sender, replica in self.replicas.items():
                while replica.has_work:
                    self.note(replica.go_on())
                for to in self.replicas:
                    while (data := replica.take(to)) is not None:
                        carried = True
                        if to not in out_of_reach:
                            message = decode_message_untrusted(data)
                            self.note(self.replicas[to].receive_untrusted(sender, message))
