"""What one member says, however much, no honest machine is banned for.

See also tests/core/views/test_bounds.py.
"""

import contextlib
from functools import partial

import msgspec
import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh import links as links_module
from pmesh.agent.mesh.links import Link
from pmesh.core.wire.channels import CHANNEL_BYTES, encode
from pmesh.core.wire.link import MAX_ADDRESSES, PROTOCOL_VERSION, Hello, PeerInterface
from pmesh.core.wire.views import AskToJoin, Candidate, Flushed, Heartbeat, Propose, TellView
from pmesh.errors import PmeshError
from pmesh.ids import JobName, Slot
from pmesh.net.links import path as path_module
from simulation.wire import AnyMessage, encode_unbounded
from tests.agent.mesh.liar import LIAR, SAID, lying_to, of
from tests.worlds.builders import make_heartbeat, make_view
from tests.worlds.faults import Faults, InjectedFault, Real
from tests.worlds.trainer import TrainerClient, together
from tests.worlds.village import Machine, village

HELLO = Hello(PROTOCOL_VERSION, LIAR, SAID[LIAR], link=1)


def together_as_before(one: Machine, two: Machine, links: tuple[Link, Link]) -> bool:
    """Neither has given up its link with the other, nor banned it."""
    now = one.agent.peers.links.get(two.key.node), two.agent.peers.links.get(one.key.node)
    return now == links


def links_between(one: Machine, two: Machine) -> tuple[Link, Link]:
    return one.agent.peers.links[two.key.node], two.agent.peers.links[one.key.node]


def large_hello(nbytes: int, machine: Machine) -> Hello:
    """Of an agent that names very many addresses, and listens where this machine does."""
    hello = msgspec.structs.replace(HELLO, addresses=(machine.address,))
    interfaces = [PeerInterface("eth0", "wired", 1000, ())]
    while (left := nbytes - size_of(hello, interfaces)) > 0:
        hosts = interfaces[-1].hosts
        if len(hosts) == MAX_ADDRESSES:
            interfaces.append(PeerInterface("eth1", "wired", 1000, ()))
        else:
            host = "h" * max(0, min(250, left - 2))
            interfaces[-1] = msgspec.structs.replace(interfaces[-1], hosts=(*hosts, host))
    hello = msgspec.structs.replace(hello, interfaces=tuple(interfaces))
    assert 0 <= len(msgspec.msgpack.encode(hello)) - nbytes <= 2  # prefixes grow, too
    return hello


def size_of(hello: Hello, interfaces: list[PeerInterface]) -> int:
    return len(msgspec.msgpack.encode(msgspec.structs.replace(hello, interfaces=tuple(interfaces))))


async def trains_on(trainers: list[TrainerClient]) -> None:
    for _ in range(3):
        results = await together(*[partial(t.reduce, np.ones(5)) for t in trainers])
        assert [set(result) for result in results] == [{float(len(trainers))}] * len(trainers)


@pytest.mark.parametrize("nbytes", [16_380, 262_142])
async def test_a_hello_of_any_size_parts_nobody(
    clock: MockClock, faults: Faults, nbytes: int
) -> None:
    faults.instead(path_module, "encode_hello", msgspec.msgpack.encode)
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers, links = await here.job(one, two), links_between(one, two)
        with contextlib.suppress(PmeshError):
            async with lying_to(one, large_hello(nbytes, one)) as liar:
                await trio.sleep(3.0)
                del liar
        await trains_on(trainers)
        assert together_as_before(one, two, links)


@pytest.mark.parametrize("count", [128, 1000])
async def test_trainers_that_wait_in_any_number_part_nobody(clock: MockClock, count: int) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers, links = await here.job(one, two), links_between(one, two)
        waiting = tuple(Candidate(JobName("theirs"), Slot(slot), 1) for slot in range(count))
        async with lying_to(one) as first, lying_to(two) as second:
            view = make_view(1, LIAR)
            beat = make_heartbeat(view, of(one), of(two), waiting=waiting)
            for _ in range(25):
                for liar in (first, second):
                    if liar.ended:
                        break
                    liar.link.send(TellView(view))
                    liar.link.send(beat)
                    liar.link.send(AskToJoin(view.epoch))
                    for asked in [m for m in liar.heard if isinstance(m, Propose)]:
                        liar.heard.remove(asked)
                        liar.link.send(Flushed(asked.epoch, SAID[LIAR], view, (), waiting))
                await trio.sleep(0.1)
        await trains_on(trainers)
        assert together_as_before(one, two, links)


async def test_error_texts_of_any_size_part_nobody(clock: MockClock, faults: Faults) -> None:
    """They come from a rank of a job; another job, in which it has none, goes on."""
    async with village(clock, 3) as here:
        one, two, hostile = here.machines
        await here.job(one, two, hostile, name="shared")
        trainers, links = await here.job(one, two, name="ours"), links_between(one, two)
        (rank,) = hostile.agent.jobs.ranks
        roster = rank.roster
        asked = [
            [roster.job, roster.born, roster.number, ["OpTimedOut", "x" * 65_300, []], op]
            for op in range(4)
        ]

        def ask_too(send: Real, link: Link, message: AnyMessage) -> None:
            """In each heartbeat, in bytes that no agent of ours would make."""
            if link in hostile.agent.peers.links.values() and isinstance(message, Heartbeat):
                raw = msgspec.msgpack.decode(encode(message)[CHANNEL_BYTES:])
                raw[8] = asked
                unbounded = encode_unbounded(raw, Heartbeat.channel)
                with InjectedFault(links_module, "encode", lambda _: unbounded):
                    send(link, message)
            else:
                send(link, message)

        faults.around(Link, "send", ask_too)
        await trio.sleep(3.0)
        await trains_on(trainers)
        assert together_as_before(one, two, links)
