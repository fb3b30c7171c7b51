"""Store messages of agents that have no business with a job here."""

from trio.testing import MockClock

from pmesh.core.values import MAX_MEMBERS
from pmesh.core.wire.framing import frame
from pmesh.ids import Incarnation, JobName, Member, NodeId
from pmesh.store.agent.stores import EARLY_S, MAX_EARLY, Stores
from pmesh.store.wire import Add, Report, StorePart, encode
from tests.worlds.builders import ANNA
from tests.worlds.kept import kept
from tests.worlds.store_connection import sharing, stores_of

JOB = JobName("digits")


async def test_what_strangers_say_of_a_job_changes_nothing(clock: MockClock) -> None:
    async with sharing(clock, 2) as there:
        stores = there.machine_of(0).part(Stores)
        (store,) = stores_of(there.machine_of(0))
        stores.receive(ANNA, StorePart(JOB, store.number, 0, 0, frame(encode(Report(9, 9)))))
        assert await there.stores[1].ask(Add("n", 1)) == 1


async def test_what_strangers_say_ahead_of_a_view_is_bounded(clock: MockClock) -> None:
    async with sharing(clock, 1) as there:
        stores = there.machine_of(0).part(Stores)
        for number in range(2 * MAX_MEMBERS):
            member = Member(NodeId(bytes([number]) * 32), Incarnation(1))
            for offset in range(2 * MAX_EARLY):
                stores.receive(member, StorePart(JOB, 1, offset, 0))
        early = stores._early.values()  # noqa: SLF001
        assert (len(early), {len(parts) for parts in early}) == (MAX_MEMBERS, {MAX_EARLY})
        stores.poll()
        assert kept(stores)["early"]
        clock.jump(EARLY_S)
        stores.poll()
        assert not kept(stores)["early"]
