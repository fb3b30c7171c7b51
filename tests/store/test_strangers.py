"""Store messages of agents that have no business with a job here."""

import pytest
from structlog.testing import capture_logs
from trio.testing import MockClock

from pmesh.core.values import MAX_MEMBERS
from pmesh.core.wire.channels import Channels, Message
from pmesh.core.wire.framing import frame
from pmesh.core.wire.views import Commit
from pmesh.ids import Incarnation, JobName, Member, NodeId
from pmesh.store.agent.stores import EARLY_S, MAX_EARLY, Stores, _hash
from pmesh.store.wire import Add, Report, StorePart, encode
from tests.worlds.builders import ANNA
from tests.worlds.control import change_received
from tests.worlds.kept import kept
from tests.worlds.store_connection import sharing, stores_of
from tests.worlds.trainer import until

JOB = JobName("digits")


async def test_what_strangers_say_of_a_job_changes_nothing(clock: MockClock) -> None:
    async with sharing(clock, 2) as there:
        stores = there.machine_of(0).part(Stores)
        (store,) = stores_of(there.machine_of(0))
        stores.receive(ANNA, StorePart(JOB, store.number, 0, 0, frame(encode(Report(9, 9)))))
        assert await there.stores[1].ask(Add("n", 1)) == 1


async def test_who_lies_ahead_of_a_view_is_banned_and_not_the_leader_whose_view_it_is(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sharing(clock, 4) as there:
        by_member = {machine.agent.membership.state.me: machine for machine in there.here.machines}
        seniors = there.machine_of(0).agent.membership.view.by_seniority
        leader, deceived, liar, gone = (by_member[member] for member in seniors)

        def lie_first(channels: Channels, _: Member, message: Message) -> Message:
            if channels is deceived.agent.channels and isinstance(message, Commit):
                (roster,) = message.view.rosters
                number = _hash(roster)  # any member can compute it
                part = StorePart(roster.job, number, 0, 0, frame(b"?"))
                deceived.part(Stores).receive(seniors[2], part)
            return message

        change_received(monkeypatch, lie_first)
        with capture_logs() as lines:
            await gone.kill()
            await until(lambda: any("broke the protocol" in line["event"] for line in lines))
        (broke,) = [line["peer"] for line in lines if "broke the protocol" in line["event"]]
        assert broke == liar.settings.name
        assert leader.key.node in deceived.agent.peers.links
        assert liar.key.node not in deceived.agent.peers.links


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
