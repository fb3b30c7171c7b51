"""One whole agent, from its listeners to its goodbye."""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent import run
from pmesh.agent.config import AgentSettings, Listen
from pmesh.agent.events import decode_events
from pmesh.agent.host_port import host_port_text, parse_host_port
from pmesh.agent.mesh import findings
from pmesh.agent.mesh.peers import Peers
from pmesh.agent.run import MOST_FALLS, Agent, open_listeners, run_agent
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.keys import AdvertisementKey, NodeKey
from pmesh.core.values import View
from pmesh.core.views.limits import SOUND
from pmesh.core.wire.control import AgentEvents, AskEvents, StopAgent, Stopping
from pmesh.core.wire.trainer import Leave
from pmesh.errors import AgentAlreadyRunning, ConfigError, PmeshError, PortTaken
from pmesh.home_paths import socket_path
from pmesh.ids import Epoch, Incarnation
from pmesh.net.links.discovery import AgentFound, Discovered, Nameplate, minute_of_now
from pmesh.net.links.interfaces import AddressWatch
from pmesh.net.links.packet_filter import DiscoveryCounters
from pmesh.net.sessions.processes import Stall
from tests.worlds.faults import Faults, Real
from tests.worlds.lanes import is_closed
from tests.worlds.trainer import TrainerClient, until
from tests.worlds.village import MESH, training, village
from tests.worlds.village_ops import kinds_of_events, snapshot_of, turned_away

KEY = NodeKey.from_seed(b"k" * 32)


def settings_in(home: Path, *, port: int = 0, mdns: bool = False) -> AgentSettings:
    return AgentSettings(home=home, name="mac", listen=Listen("127.0.0.1", port), mdns=mdns)


@contextlib.contextmanager
def raises_inside(kind: type[PmeshError]) -> Iterator[list[PmeshError]]:
    """Expect it as the only error, however deep in nurseries."""
    found: list[PmeshError] = []
    try:
        yield found
    except* kind as group:
        inner: BaseException = group
        while isinstance(inner, BaseExceptionGroup):
            (inner,) = inner.exceptions
        assert isinstance(inner, kind)
        found.append(inner)
    assert found


async def test_stop_answers_first_and_ends_with_the_agent(tmp_path: Path) -> None:
    lines: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_agent, settings_in(tmp_path), MESH, KEY, lines.append)
        await until(lambda: bool(lines))
        assert lines[0].startswith("mac is up, listening at 127.0.0.1:")
        trainer = await TrainerClient.open(tmp_path)
        assert await trainer.ask(StopAgent()) == Stopping(os.getpid())
        with pytest.raises(trio.EndOfChannel):
            await trainer.receive()
        await trainer.die()
    assert not socket_path(tmp_path).exists()


async def test_cancelling_while_it_starts_ends_it(tmp_path: Path, faults: Faults) -> None:
    faults.hang(AddressWatch, "run")
    with trio.move_on_after(0.05) as scope:
        await run_agent(settings_in(tmp_path), MESH, KEY, lambda _: None)
    assert scope.cancelled_caught


async def test_cancelling_in_the_last_moment_of_the_start_ends_it(tmp_path: Path) -> None:
    with trio.CancelScope() as scope:
        await run_agent(settings_in(tmp_path), MESH, KEY, lambda _: scope.cancel())
    assert scope.cancelled_caught


async def test_a_port_that_is_taken_is_named_with_the_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with raises_inside(PortTaken) as found:
            await run_agent(settings_in(tmp_path, port=port), MESH, KEY, lambda _: None)
    assert f"port {port} is taken" in str(found[0])
    assert f"--listen 127.0.0.1:{port + 1}" in str(found[0])


@pytest.mark.parametrize(
    ("host", "port", "other"), [("::1", 24160, "[::1]:24161"), ("", 65535, ":65534")]
)
async def test_the_port_that_is_named_in_place_of_a_taken_one_can_be_typed(
    faults: Faults, host: str, port: int, other: str
) -> None:
    faults.fail(trio, "open_tcp_listeners", OSError(errno.EADDRINUSE, "Address already in use"))
    with pytest.raises(PortTaken) as found:
        await open_listeners(host, port)
    assert str(found.value).endswith(f"such as --listen {other}")
    assert host_port_text(*parse_host_port(other)) == other


async def test_a_second_agent_of_one_home_is_refused(tmp_path: Path) -> None:
    lines: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_agent, settings_in(tmp_path), MESH, KEY, lines.append)
        await until(lambda: bool(lines))
        with raises_inside(AgentAlreadyRunning):
            await run_agent(settings_in(tmp_path), MESH, KEY, lambda _: None)
        nursery.cancel_scope.cancel()


async def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"can't listen at 192\.0\.2\.1:\d+: .*this machine"):
        await open_listeners("192.0.2.1", 0)


async def close(listeners: list[trio.SocketListener]) -> None:
    for listener in listeners:
        await listener.aclose()


async def test_any_port_everywhere_is_one_port_for_both_families(faults: Faults) -> None:
    listeners = await open_listeners("", 0)
    ports = {listener.socket.getsockname()[1] for listener in listeners}
    assert len(ports) == 1
    await close(listeners)

    async def no_v6(listen: Real, port: int, *, host: str | None = None) -> object:
        if host == "::":
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return await listen(port, host=host)

    faults.around(trio, "open_tcp_listeners", no_v6)
    listeners = await open_listeners("", 0)
    assert len(listeners) == 1
    await close(listeners)


async def test_mdns_finds_a_peer(clock: MockClock, faults: Faults) -> None:
    own: list[Advertisement] = []
    async with village(clock, 1) as here:
        (one,) = here.machines

        async def discover_one(
            advertisement: Advertisement,
            *,
            node_key: NodeKey,
            key: AdvertisementKey,
            watch: AddressWatch,
            found: trio.MemorySendChannel[Discovered],
            counters: DiscoveryCounters,
            nameplate: Nameplate,
        ) -> None:
            assert nameplate.number == 0
            assert node_key == KEY
            assert key == AdvertisementKey.of(MESH)
            assert counters.forged == 0
            assert watch.current
            own.append(advertisement)
            theirs = Advertisement(
                tag=advertisement.tag,
                node=one.key.node,
                incarnation=Incarnation(1),
                port=one.port,
                name="mac-0",
                hosts=(one.address.host,),
                minute=minute_of_now(),
            )
            async with found:
                await found.send(AgentFound(advertisement=theirs))
                await trio.sleep_forever()

        faults.instead(findings, "discover", discover_one)
        two = here.new_machine("two", mdns=True)
        two.key = KEY
        await two.start()
        await here.settle(one, two)
        assert own[0].name == "two"
        assert own[0].port == two.port


async def test_the_longest_stall_of_the_last_ten_seconds_is_shown(
    clock: MockClock, faults: Faults
) -> None:
    judges = list[Callable[[Stall], None]]()

    async def tick(real: Real, judge: Callable[[Stall], None], **how: object) -> None:
        judges.append(judge)
        await real(judge, **how)

    faults.around(run, "tick", tick)
    async with village(clock, 1) as here:
        (one,) = here.machines
        judges[0](Stall(late_s=0.5, slept_s=0.0))
        assert snapshot_of(one).loop_lag_ms >= 500
        await trio.sleep(11)
        assert snapshot_of(one).loop_lag_ms < 500
        assert "agent stalled" not in kinds_of_events(one)
        judges[0](Stall(late_s=0.0, slept_s=600.0))
        assert "agent stalled" in kinds_of_events(one)


async def test_nothing_is_left_open_when_an_agent_is_killed_in_the_middle_of_an_op(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (here, (a, _)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.barrier)
            await wait_all_tasks_blocked()
            await until(lambda: any(m.lanes() for m in here.machines))
            nursery.cancel_scope.cancel()
        lanes = [lane for machine in here.machines for lane in machine.lanes()]
        for machine in here.machines:
            await machine.kill()
        assert lanes
        assert all(map(is_closed, lanes))


async def test_garbage_at_the_port_and_at_the_socket_changes_nothing(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        for data in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, b"PMLN\x01" + bytes(16), b""):
            stream = await trio.open_tcp_stream("127.0.0.1", one.port)
            await stream.send_all(data)
            await stream.aclose()
            local = await trio.open_unix_socket(socket_path(one.settings.home))
            await local.send_all(b"\xff\xff\xff\xff" + data)
            await local.aclose()
        await trio.sleep(10)
        assert len(one.names) == len(two.names) == 2
        door = snapshot_of(one).door
        assert door.pending == 0
        assert door.garbage + door.closed_early + door.refused >= 4
        await here.job(one, two)


async def test_the_peers_are_told_before_the_asker_sees_the_end(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        asker = await here.trainer(two)
        assert await asker.ask(StopAgent()) == Stopping(os.getpid())
        with pytest.raises(trio.EndOfChannel):
            await asker.receive()
        assert "mac-1 is gone: its agent was stopped" in one.lines


async def test_a_peer_that_answers_nothing_does_not_hold_up_a_cancelled_agent(
    clock: MockClock, tmp_path: Path
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        settings = replace(settings_in(tmp_path), peers=(one.address,))
        told, may_answer = trio.Event(), trio.Event()

        clock.autojump_threshold = 0.05
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_agent, settings, MESH, KEY, lambda _: None)
            await until(lambda: len(one.names) == 2)
            (live,) = one.agent.peers.links.values()
            (path,) = live.paths.values()
            close = path.path.aclose

            async def close_late() -> None:
                told.set()
                await may_answer.wait()
                await close()

            path.path.aclose = close_late  # type: ignore[method-assign]
            began = trio.current_time()
            nursery.cancel_scope.cancel()
        took_s = trio.current_time() - began
        may_answer.set()
        assert took_s < 1
        assert told.is_set()
        assert "mac is gone: its agent was stopped" in one.lines


async def test_a_goodbye_that_hangs_is_cut_short(
    clock: MockClock, tmp_path: Path, faults: Faults
) -> None:
    faults.hang(Peers, "leave")
    lines: list[str] = []
    clock.autojump_threshold = 0.05
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_agent, settings_in(tmp_path), MESH, KEY, lines.append)
        await until(lambda: bool(lines))
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began < 1


async def test_what_has_happened_is_told_to_who_asks(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        asker = await here.trainer(here.machines[0])
        reply = await asker.ask(AskEvents(after=-1))
        assert isinstance(reply, AgentEvents)
        events = decode_events(reply.json).events
        assert [event.kind for event in events][:2] == ["agent started", "peer joined"]
        await asker.die()
        asker = await here.trainer(here.machines[0])
        reply = await asker.ask(AskEvents(after=events[-1].number))
        assert isinstance(reply, AgentEvents)
        assert decode_events(reply.json).events == ()


async def test_it_says_how_many_peers_jobs_wait_for(clock: MockClock) -> None:
    async with village(clock, 0) as here:
        one = here.new_machine("one", min_peers=2)
        await one.start()
        assert one.lines == [
            f"one is up, listening at 127.0.0.1:{one.port}",
            "jobs begin when 2 peers are present",
        ]


async def test_a_session_that_does_not_begin_with_a_beginning_is_closed(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        trainer = await here.trainer(one)
        await trainer.send(Leave())
        with pytest.raises(trio.EndOfChannel):
            await trainer.receive()
        assert turned_away(one) == 1


async def test_an_agent_whose_counter_was_led_astray_begins_anew(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await two.stop()
        await here.settle(one)
        before = one.agent.membership.state
        far = Epoch(SOUND + 1, *before.me)
        one.agent.membership.state = replace(
            before, promised=far, view=View.of_one(before.me, before.said, far)
        )
        await until(lambda: one.me != before.me)
        assert one.agent.membership.state.promised.counter < SOUND
        two = here.new_machine("mac-1", peers=[one.address], key=two.key)
        await two.start()
        await here.settle(one, two)


async def test_an_agent_that_falls_gets_up_again_under_another_incarnation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agents: list[Agent] = []
    polls = 0

    class Stumbles(Agent):
        def __init__(self, *args: Any, **more: Any) -> None:  # noqa: ANN401 - handed on
            super().__init__(*args, **more)
            agents.append(self)

        async def _poll_jobs(self) -> None:
            nonlocal polls
            polls += 1
            if polls == 1:
                raise ZeroDivisionError("nobody foresaw it")
            await trio.sleep_forever()

    monkeypatch.setattr(run, "Agent", Stumbles)
    lines: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_agent, settings_in(tmp_path), MESH, KEY, lines.append)
        await until(lambda: sum("is up" in line for line in lines) == 2)
        nursery.cancel_scope.cancel()
    assert agents[0].jobs.me.incarnation != agents[1].jobs.me.incarnation
    assert [line for line in lines if "restarts: an error inside pmesh" in line]


async def test_an_agent_that_falls_again_and_again_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Falls(Agent):
        async def _poll_jobs(self) -> None:
            await trio.lowlevel.checkpoint()
            raise ZeroDivisionError("nobody foresaw it")

    monkeypatch.setattr(run, "Agent", Falls)
    lines: list[str] = []
    with pytest.raises(ExceptionGroup) as fall:
        await run_agent(settings_in(tmp_path), MESH, KEY, lines.append)
    assert fall.group_contains(ZeroDivisionError, depth=None)
    assert len([line for line in lines if "restarts: " in line]) == MOST_FALLS - 1
