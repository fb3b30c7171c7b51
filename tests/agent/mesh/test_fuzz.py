"""Members and trainers that lie, against whole agents: they live, agree again, and count right.

PMESH_FUZZ_SEEDS=100-200 pytest tests/agent/mesh/test_fuzz.py
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from random import Random

import msgspec
import numpy as np
import psutil
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh import bans
from pmesh.agent.mesh.keyring import MAX_FORMER
from pmesh.agent.mesh.links import Link
from pmesh.agent.mesh.register import MAX_KNOWN
from pmesh.core.identity.removals import MAX_REMOVALS
from pmesh.core.values import Terms, View
from pmesh.core.views.limits import TOLERATED
from pmesh.core.wire.views import Heartbeat, TellView
from pmesh.home_paths import socket_path
from pmesh.ids import Member, NodeId, TrainerId
from pmesh.invites.wire import Invite, Invited
from pmesh.members.wire import KeyRotated, RotateKey
from pmesh.store.rules.pipe import Pipe
from pmesh.store.wire import Answer, Answered, Set
from simulation.wire import AnyMessage
from tests.worlds.faults import Faults, Real
from tests.worlds.store_connection import StoreConnection, stores_of
from tests.worlds.trainer import OpError, RefusedError, TrainerClient, together, until
from tests.worlds.village import MESH, Machine, Village, village
from tests.worlds.village_ops import kinds_of_events, machine_of
from tools.fuzz.agent import SHORT_BAN_S, accepts, lying
from tools.fuzz.agent import new_liar as new_lying_member
from tools.fuzz.claims import Claims, errors_of_ranks, waiting_in_jobs
from tools.fuzz.doors import new_guest
from tools.fuzz.later_views import LaterViews
from tools.fuzz.liar import Liar
from tools.fuzz.outsider import ACTIONS, OutsiderAttack
from tools.fuzz.store_lies import lie_about_stores, new_store_liar, sequences
from tools.fuzz.trainer import lie_to_agent
from tools.fuzz.trainer import new_liar as new_lying_trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads_run_at_once")]

FIRST, _, LAST = os.environ.get("PMESH_FUZZ_SEEDS", "0-3").partition("-")
FIRST_SEED = int(FIRST)
SEEDS = range(FIRST_SEED, int(LAST or FIRST) + 1)
LIES_FOR_S = 12.0
STORE_CALLS = 5
LIVES = 2  # of the member that is somebody else each time
OP_EVERY_S = 0.1
TERMS = (Terms(), Terms(quorum="majority"))
REST_S = 5.0
ROTATES_EVERY_S = 6.0  # longer than a member waits between two keys
SPARE_DESCRIPTORS = 2
INTERRUPTS_EVERY_S = 0.3
BEGINS_EVERY_S = 0.5
LARGEST_TABLE = TOLERATED  # of an agent that knows three


@contextmanager
def confessing(liar: Liar, seed: int) -> Iterator[None]:
    """If the test fails: what has been sent, last of all what matters most."""
    try:
        yield
    except BaseException:
        print(*liar.lies, f"the seed is {seed}", sep="\n")  # noqa: T201 - pytest shows it
        raise


@dataclass
class TrainingLoop:
    """One trainer's loop, and what it has come to."""

    trainer: TrainerClient
    gives: float
    ops: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of each op that was done: whose values are in its result."""
    error: str = ""

    async def run(self, gave: dict[TrainerId, float]) -> None:
        """Until something is wrong, and it is told so."""
        try:
            while not self.error:
                result = await self.trainer.reduce(np.full(5, self.gives))
                ids = self.trainer.world.trainers
                assert set(result) == {sum(gave[id_] for id_ in ids)}, (ids, result)
                self.ops[self.trainer.next_op - 1] = ids
                await trio.sleep(OP_EVERY_S)
        except OpError as e:
            self.error = e.verdict.error
        except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError) as e:
            self.error = type(e).__name__


async def trainings_on(here: Village, machines: Sequence[Machine]) -> list[TrainingLoop]:
    """A job with a trainer on each of these machines; they run."""
    trainings = [TrainingLoop(t, t.rank + 1.0) for t in await here.job(*machines)]
    gave = {t.trainer.id: t.gives for t in trainings}
    for training in trainings:
        here.nursery.start_soon(training.run, gave)
    return trainings


async def lie(faults: Faults, here: Village, hostile: Machine, liar: Liar) -> None:
    """For a while this machine's agent sends what the liar makes of its messages, and more."""

    async def begin_jobs() -> None:
        """View changes, in which most can be lied about."""
        for number in itertools.count():
            trainer = await here.trainer(hostile)
            with contextlib.suppress(RefusedError, trio.EndOfChannel, trio.BrokenResourceError):
                await trainer.join(f"short-{number}", 1)
            await trainer.leave()
            await trio.sleep(BEGINS_EVERY_S)

    def is_his(link: Link) -> bool:
        return any(own is link for own in hostile.agent.peers.links.values())

    faults.limit(bans, "BANNED_S", SHORT_BAN_S)
    faults.limit(bans, "LONGEST_BANNED_S", SHORT_BAN_S)
    send = lying(Link.send, liar, on=is_his, tell=lambda _: None)
    faults.instead(Link, "send", send)
    with trio.move_on_after(LIES_FOR_S):
        await begin_jobs()


def check_tables(machine: Machine) -> None:
    """What others have said does not stay for ever."""
    state = machine.agent.membership.state
    tables = {f.name: getattr(state, f.name) for f in fields(state)}
    tables |= {"targets": machine.agent.peers.targets.wanted}
    sizes = {name: len(t) for name, t in tables.items() if isinstance(t, dict | tuple)}
    assert max(sizes.values()) <= LARGEST_TABLE, sizes


def check_places(honest: Sequence[Machine]) -> None:
    """All have a place, and the lists of members, removals and keys are bounded."""
    for machine in honest:
        register, keyring = machine.agent.register, machine.agent.keyring
        assert not any(register.removal_of(other.key.node) for other in honest)
        assert len(register.known) <= MAX_KNOWN
        assert len(register.removals) <= MAX_REMOVALS
        assert len(keyring.ways()) <= 1 + MAX_FORMER


async def await_one_key(honest: Sequence[Machine]) -> None:
    """Wait until a change of the mesh key is everywhere; an agent takes at most one in 5 s."""
    with trio.fail_after(60):
        while len({m.agent.keyring.mesh_key for m in honest}) > 1:  # noqa: ASYNC110 - no event tells of it
            await trio.sleep(0.1)


async def check_that_all_is_well(here: Village, honest: list[Machine]) -> None:
    """They agree, and a new job runs among them."""
    await here.settle(*honest)
    await await_one_key(honest)
    check_places(honest)
    for machine in honest:
        check_tables(machine)
        assert "internal error" not in kinds_of_events(machine)
    trainers = await here.job(*honest, name="afterwards")
    for result in await together(*[partial(t.reduce, np.ones(5)) for t in trainers]):
        assert set(result) == {float(len(honest))}


def check_that_nobody_is_alone(trainings: list[TrainingLoop]) -> None:
    """V5: a job that has come apart has failed at one of its parts."""
    for one in trainings:
        for other in trainings:
            alone = not one.error and other.trainer.id not in one.trainer.world.trainers
            assert not alone or other.error, [(t.ops, t.error) for t in trainings]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_lying_member_breaks_nothing_for_good(
    clock: MockClock, faults: Faults, seed: int
) -> None:
    liar = new_lying_member(seed)
    with confessing(liar, seed):
        async with village(clock, 3) as here:
            (leader,) = [
                m
                for m in here.machines
                if m.agent.membership.view.by_seniority[0].node == m.key.node
            ]
            hostile = leader if seed % 3 else here.machines[0]
            honest = [machine for machine in here.machines if machine is not hostile]
            in_job = here.machines if seed % 2 else honest
            all_trainings = [
                TrainingLoop(t, 2.0**number)
                for number, t in enumerate(await here.job(*in_job, terms=TERMS[seed // 2 % 2]))
            ]
            trainings = [t for t in all_trainings if machine_of(here, t.trainer) is not hostile]
            gave = {t.trainer.id: t.gives for t in all_trainings}
            for training in all_trainings:
                here.nursery.start_soon(training.run, gave)
            await trio.sleep(1)
            await lie(faults, here, hostile, liar)
            await (hostile.stop() if liar.dice.random() < 0.5 else hostile.kill())
            await here.settle(*honest)
            done = [len(t.ops) for t in trainings]
            await until(
                lambda: all(
                    t.error or len(t.ops) > before + 3
                    for t, before in zip(trainings, done, strict=True)
                )
            )
            check_that_nobody_is_alone(trainings)
            await check_that_all_is_well(here, honest)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_lying_trainer_harms_no_other_job(clock: MockClock, seed: int) -> None:
    liar = new_lying_trainer(seed)
    with confessing(liar, seed):
        async with village(clock, 2) as here:
            trainings = await trainings_on(here, here.machines)
            with trio.move_on_after(LIES_FOR_S):
                await lie_to_agent(socket_path(here.machines[0].settings.home), liar)
            await until(lambda: all(len(t.ops) > LIES_FOR_S / OP_EVERY_S for t in trainings))
            assert [t.error for t in trainings] == ["", ""]
            await check_that_all_is_well(here, here.machines)


@contextmanager
def noting_bans(faults: Faults) -> Iterator[list[NodeId]]:
    """Whom the agents ban meanwhile."""
    banned = list[NodeId]()

    def note(add: Real, self: bans.Bans, node: NodeId, *, now: float) -> None:
        banned.append(node)
        add(self, node, now=now)

    with faults.watch(bans.Bans, "add", note):
        yield banned


@pytest.mark.parametrize("action", ACTIONS)
async def test_a_member_without_a_seat_parts_nobody_and_leaves_nothing_behind(
    clock: MockClock, faults: Faults, action: str
) -> None:
    async with village(clock, 2) as here:
        trainings = await trainings_on(here, here.machines)
        await trio.sleep(1)
        before = psutil.Process().num_fds()
        links = [dict(machine.agent.peers.links) for machine in here.machines]
        doors = tuple(machine.address for machine in here.machines)
        inviting = await here.trainer(here.machines[0])
        assert isinstance(await inviting.ask(Invite()), Invited)
        with noting_bans(faults) as banned:
            await OutsiderAttack(
                doors=doors,
                mesh_key=lambda: MESH,
                liar=new_lying_member(FIRST_SEED),
                actions=(action,),
                lives=LIVES,
            ).run()
        assert not {machine.key.node for machine in here.machines} & set(banned)
        for machine, had in zip(here.machines, links, strict=True):
            assert had.items() <= machine.agent.peers.links.items(), "their link has ended"
        assert {len(ids) for t in trainings for ids in t.ops.values()} == {2}
        await inviting.leave()
        await trio.sleep(REST_S)
        assert psutil.Process().num_fds() <= before + SPARE_DESCRIPTORS
        assert [t.error for t in trainings] == ["", ""]
        await check_that_all_is_well(here, here.machines)


async def test_a_mesh_key_that_changes_amid_lies_is_the_same_for_all_and_goes_to_no_stranger(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainings = await trainings_on(here, here.machines)
        guest, liar = new_guest(FIRST_SEED), new_lying_member(FIRST_SEED)
        attack = OutsiderAttack(
            doors=(one.address, two.address),
            mesh_key=lambda: one.agent.keyring.mesh_key,
            liar=liar,
            guest=guest,
            actions=("lie", "greet", "knock", "ask_for_key", "remove", "rotate"),
        )
        with noting_bans(faults) as banned, trio.move_on_after(LIES_FOR_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attack.run)
                for by in itertools.cycle(here.machines):
                    await trio.sleep(ROTATES_EVERY_S)
                    reply = await (await here.trainer(by)).ask(RotateKey())
                    assert isinstance(reply, KeyRotated), reply
        await trio.sleep(REST_S)
        assert not {machine.key.node for machine in here.machines} & set(banned)
        assert len(attack.had) > 1
        assert {len(ids) for t in trainings for ids in t.ops.values()} == {2}
        assert [t.error for t in trainings] == ["", ""]
        await check_that_all_is_well(here, here.machines)


@pytest.mark.parametrize("sequence", sequences(Answered(TrainerId(0), 0, Answer())))
async def test_what_a_rank_says_about_its_jobs_store_does_not_touch_another_job(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, faults: Faults, sequence: str
) -> None:
    liar, begun = new_store_liar(FIRST_SEED), list[bool]()

    async with village(clock, 3) as here:
        junior = here.machines[0].agent.membership.view.by_seniority[-1]  # a leader may do more
        (hostile,) = [machine for machine in here.machines if machine.key.node == junior.node]
        honest = [machine for machine in here.machines if machine is not hostile]

        def is_his(pipe: Pipe) -> bool:
            stores = stores_of(hostile)  # which pipes are its own
            return any(pipe is own for store in stores for own in store._pipes.values())  # noqa: SLF001

        for name in ("parts", "receive_untrusted"):
            monkeypatch.setattr(Pipe, name, getattr(Pipe, name))  # so that it is put back
        lie_about_stores(liar, lambda: bool(begun), on=is_his, only=sequence)
        trainings = await trainings_on(here, honest)
        sharing = await here.job(*here.machines, name="shared")
        stores = [
            await StoreConnection.attach(here, machine_of(here, t), t, job="shared")
            for t in sharing
        ]
        for store in stores:
            await store.ask(Set("key", b"value"))
        with noting_bans(faults) as banned:
            begun.append(True)
            for _ in range(STORE_CALLS):
                for store in stores:  # what comes of it may be spoiled
                    await store.begin(Set("key", b"value"), timeout_s=1.0)
                await trio.sleep(1)
        assert not {machine.key.node for machine in honest} & set(banned)
        await hostile.kill()
        assert {len(ids) for t in trainings for ids in t.ops.values()} == {2}
        assert [t.error for t in trainings] == ["", ""]
        await check_that_all_is_well(here, honest)


CLAIMS: dict[str, Callable[[View, Member, Random], Claims]] = {
    "1,000 trainers of one job": lambda _, __, dice: waiting_in_jobs(1000, dice, of_one=True),
    "1,000 jobs": lambda _, __, dice: waiting_in_jobs(1000, dice, of_one=False),
    "100 jobs": lambda _, __, dice: waiting_in_jobs(100, dice, of_one=False),
    "long errors": lambda view, me, _: errors_of_ranks(view, me, 240_000),
}


@pytest.mark.parametrize("claim", CLAIMS)
async def test_however_much_a_member_says_of_itself_the_others_pass_on_what_all_take(
    clock: MockClock, faults: Faults, claim: str
) -> None:
    async with village(clock, 3) as here:
        junior = here.machines[0].agent.membership.view.by_seniority[-1]
        (hostile,) = [machine for machine in here.machines if machine.key.node == junior.node]
        honest = [machine for machine in here.machines if machine is not hostile]
        trainings = await trainings_on(here, honest)
        await here.job(*here.machines, name="shared")
        view, me = honest[0].agent.membership.view, hostile.me
        claims = CLAIMS[claim](view, me, Random(FIRST_SEED))  # noqa: S311 - no secret

        def send_more(send: Real, link: Link, message: AnyMessage) -> None:
            his = any(own is link for own in hostile.agent.peers.links.values())
            if his and claims.keys() <= set(message.__struct_fields__):
                more = msgspec.structs.replace(message, **claims)
                message = more if accepts(more) else message
            send(link, message)

        with noting_bans(faults) as banned:
            lies = faults.around(Link, "send", send_more)
            await trio.sleep(2)
            for _ in range(2):  # each begins in a view
                short = await here.trainer(honest[0])
                with contextlib.suppress(RefusedError):  # the jobs of all are too many
                    await short.join("short", 1, timeout_s=5.0)
                await short.leave()
            await trio.sleep(2)
        assert not {machine.key.node for machine in honest} & set(banned)
        assert {len(ids) for t in trainings for ids in t.ops.values()} == {2}
        assert [t.error for t in trainings] == ["", ""]
        lies.end()
        await hostile.kill()
        await check_that_all_is_well(here, honest)


async def test_a_member_that_says_it_has_gone_on_without_others_parts_nobody_else(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 4) as here:
        hostile, *honest = here.machines
        trainings = await trainings_on(here, honest)
        later = LaterViews(Random(FIRST_SEED))  # noqa: S311 - no secret
        shown = list[View]()

        def show(send: Real, link: Link, message: AnyMessage) -> None:
            view = hostile.agent.membership.view
            his = any(own is link for own in hostile.agent.peers.links.values())
            instead: Sequence[AnyMessage] | None = None
            if his and isinstance(message, Heartbeat):
                instead = later.instead_of(message, view, hostile.me)
            for said in instead or (message,):
                send(link, said)
            shown.extend(said.view for said in instead or () if isinstance(said, TellView))

        lies = faults.around(Link, "send", show)
        await trio.sleep(2 * LIES_FOR_S)
        lies.end()
        assert len({view.epoch for view in shown}) > 3
        assert {len(ids) for t in trainings for ids in t.ops.values()} == {3}
        assert [t.error for t in trainings] == ["", "", ""]
        await hostile.kill()
        await check_that_all_is_well(here, honest)
