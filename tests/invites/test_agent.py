"""Invitations of whole agents, and of one in memory, as honest machines and strangers try them."""

import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from pmesh.agent.config import AgentSettings
from pmesh.agent.events import News
from pmesh.agent.limits import Admission, plan_files
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.core.identity.removals import sign_removal
from pmesh.core.wire.framing import GUEST_MAGIC, frame
from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.errors import (
    KeyFileError,
    MachineRemoved,
    PeerUnreachable,
    PmeshError,
    ProtocolVersionMismatch,
    UsageError,
)
from pmesh.ids import NodeId, short_node
from pmesh.invites.agent import EXCHANGE_S, GuestStream, Invites
from pmesh.invites.cli import join as join_module
from pmesh.invites.cli.join import Newcomer, get_key
from pmesh.invites.rules.codes import Code, parse_code
from pmesh.invites.rules.exchange import Guest
from pmesh.invites.rules.invitations import LASTS_S
from pmesh.invites.wire import (
    MAX_GUEST_BYTES,
    Declined,
    GuestMessage,
    InvitationOver,
    Invite,
    Invited,
    InviterHalf,
    KeyStored,
    Knock,
    Party,
    Proof,
    WrongCode,
    encode_guest,
)
from pmesh.net.sessions.sessions import Session
from simulation.wire import AnyReply
from tests.worlds.faults import Faults
from tests.worlds.village import MESH, village

pytestmark = pytest.mark.usefixtures("threads_run_at_once")

KEY = MeshKey(bytes(range(100, 132)))
OTHER_KEY = MeshKey(bytes(range(50, 82)))
ADA = Party(NodeKey.from_seed(b"a" * 32).node, "mac-1", 30)


class InviteSession:
    """What `pmesh invite` is sent."""

    def __init__(self) -> None:
        self.sent: list[AnyReply] = []
        self.shown = trio.Event()
        self.ended = trio.Event()

    def stay(self) -> None: ...

    async def send(self, reply: AnyReply) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(reply)
        self.shown.set()

    async def await_end(self) -> None:
        await self.ended.wait()
        raise trio.EndOfChannel

    @property
    def code(self) -> Code:
        (invited,) = (reply for reply in self.sent if isinstance(reply, Invited))
        return parse_code(invited.code)

    @property
    def over(self) -> InvitationOver | None:
        last = self.sent[-1]
        return last if isinstance(last, InvitationOver) else None


class InvitesAlone:
    """An agent's invitations, without the agent."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.announced: list[int] = []
        self.events: list[News] = []
        self.authenticated = 0
        self.removed = set[NodeId]()
        admission = Admission(plan_files(1024), memory_bytes=2**30)
        self.invites = Invites(
            ADA,
            lambda: KEY,
            advertise=self.announced.append,
            is_removed=self.removed.__contains__,
            admission=lambda: admission,
            noticed=self.events.append,
            below=random.Random(7).randrange,  # noqa: S311 - a test's, the same each time
        )

    async def invite(self) -> InviteSession:
        """Run a `pmesh invite`, which shows a code now."""
        session = InviteSession()

        async def serve() -> None:
            with contextlib.suppress(trio.EndOfChannel), contextlib.suppress(BaseExceptionGroup):
                await self.invites.serve(cast("Session", session), Invite())

        self._nursery.start_soon(serve)
        await session.shown.wait()
        return session

    def call(self) -> trio.abc.HalfCloseableStream:
        """Connect to the agent's port; returns the caller's end."""
        outside, inside = trio.testing.memory_stream_pair()

        async def welcome() -> None:
            try:
                assert await inside.receive_some(len(GUEST_MAGIC)) == GUEST_MAGIC
                await self.invites.welcome(inside, GUEST_MAGIC, self._authenticate)
            except PmeshError:
                pass  # as the acceptor does with a stranger
            finally:
                await trio.aclose_forcefully(inside)

        self._nursery.start_soon(welcome)
        return outside

    def _authenticate(self) -> None:
        self.authenticated += 1


@asynccontextmanager
async def inviting() -> AsyncGenerator[InvitesAlone]:
    async with trio.open_nursery() as nursery:
        yield InvitesAlone(nursery)
        nursery.cancel_scope.cancel()


def newcomer(key: MeshKey | None = None, *, name: str = "mac-2", home: str = "x") -> Newcomer:
    return Newcomer(
        settings=AgentSettings(home=Path(home), name=name),
        node_key=NodeKey.from_seed(b"b" * 32),
        mesh_key=key,
    )


async def joins(ada: InvitesAlone, code: Code, who: Newcomer | None = None) -> list[MeshKey]:
    """`pmesh join`: the keys that it stores."""
    stored: list[MeshKey] = []
    async with ada.call() as stream:
        await get_key(stream, code, who or newcomer(), stored.append)
    return stored


def other_than(code: Code) -> Code:
    return code._replace(second="zoo" if code.second != "zoo" else "zebra")


settled = trio.testing.wait_all_tasks_blocked


@pytest.fixture(autouse=True)
def our_version(faults: Faults) -> None:
    faults.limit(join_module, "PROTOCOL_VERSION", ADA.protocol)


async def test_a_machine_with_the_code_gets_the_key_and_the_inviter_learns_its_name() -> None:
    async with inviting() as ada:
        session = await ada.invite()
        assert session.sent == [Invited(session.code.text, LASTS_S)]
        assert ada.announced == [session.code.number]
        assert await joins(ada, session.code) == [KEY]
        await settled()
        assert session.over == InvitationOver("joined", "mac-2", "unknown")
        assert ada.announced[-1] == 0
        assert ada.authenticated == 1
        assert [event.kind for event in ada.events] == ["invitation"]
        assert ada.events[0].names == ("mac-2",)
        assert session.code.first not in ada.events[0].text


async def test_a_wrong_code_ends_the_code_for_everybody() -> None:
    async with inviting() as ada:
        session = await ada.invite()
        with pytest.raises(UsageError, match="not the code that mac-1 shows"):
            await joins(ada, other_than(session.code))
        await settled()
        assert session.over == InvitationOver("wrong code", "mac-2", "unknown")
        with pytest.raises(UsageError, match="mac-1 shows no such code now"):
            await joins(ada, session.code)
        assert not ada.authenticated


async def test_a_stranger_that_sends_a_proof_of_its_own_gets_no_key() -> None:
    async with inviting() as ada:
        session = await ada.invite()
        stream = ada.call()
        guest = GuestStream(stream)
        exchange = Guest(other_than(session.code), newcomer().party, entropy=bytes)
        await guest.send(exchange.knock, after=GUEST_MAGIC)
        assert isinstance(await guest.receive(), InviterHalf)
        await guest.send(Proof(bytes(32)))
        assert await guest.receive() == Declined(ADA, "wrong code")
        await settled()
        assert session.over is not None
        assert session.over.outcome == "wrong code"


async def test_ten_thousand_guesses_get_one_try(*, is_quick: bool) -> None:
    """Each with other words; the code itself is among the later ones, and is refused, too."""
    async with inviting() as ada:
        session = await ada.invite()
        number = session.code.number
        words = [other_than(session.code), session.code]
        answers = {"offers": 0, "not invited": 0}
        guesses = 500 if is_quick else 10_000
        for guess in range(guesses):
            async with ada.call() as stream:
                guest = GuestStream(stream)
                if guess < 2:  # an element of a real guess; the rest repeats the last one
                    exchange = Guest(words[guess], newcomer().party, entropy=bytes)
                await guest.send(exchange.knock, after=GUEST_MAGIC)
                reply = await guest.receive()
                if isinstance(reply, InviterHalf):
                    answers["offers"] += 1
                    await guest.send(Proof(bytes(32)))
                else:
                    assert reply == Declined(ADA, "not invited")
                    answers["not invited"] += 1
        assert answers == {"offers": 1, "not invited": guesses - 1}
        assert exchange.knock.number == number
        assert not ada.authenticated


async def test_an_hour_of_guesses_at_every_code_gets_three_tries(
    autojump_clock: MockClock,  # noqa: ARG001 - a fixture
) -> None:
    async with inviting() as ada:
        began, tries = trio.current_time(), 0
        refused: list[float] = []
        while trio.current_time() < began + 7190:
            session = InviteSession()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ada.invites.serve, cast("Session", session), Invite())
                    await settled()
                    if session.sent:
                        with contextlib.suppress(UsageError):
                            await joins(ada, other_than(session.code))
                        tries += 1
            except* UsageError:
                refused.append(trio.current_time())
            await trio.sleep(60)
        assert tries == 6  # in two hours
        assert len(refused) > 100


async def test_a_code_is_void_after_ten_minutes(
    autojump_clock: MockClock,  # noqa: ARG001 - a fixture
) -> None:
    async with inviting() as ada:
        session = await ada.invite()
        await trio.sleep(LASTS_S + 1)
        assert session.over == InvitationOver("expired")
        assert ada.announced[-1] == 0
        with pytest.raises(UsageError, match="no such code"):
            await joins(ada, session.code)


async def test_an_exchange_that_began_in_time_may_end_after_the_ten_minutes(
    autojump_clock: MockClock,  # noqa: ARG001 - a fixture
) -> None:
    async with inviting() as ada:
        session = await ada.invite()
        await trio.sleep(LASTS_S - 1)
        async with ada.call() as stream:
            guest = GuestStream(stream)
            exchange = Guest(session.code, newcomer().party, entropy=bytes)
            await guest.send(exchange.knock, after=GUEST_MAGIC)
            offer = await guest.receive()
            assert isinstance(offer, InviterHalf)
            await trio.sleep(2)
            await guest.send(exchange.prove(offer))
            await guest.receive()
            await guest.send(KeyStored())
            await settled()
        assert session.over == InvitationOver("joined", "mac-2", "unknown")


async def test_the_end_of_pmesh_invite_withdraws_the_code_even_within_an_exchange() -> None:
    async with inviting() as ada:
        session = await ada.invite()
        async with ada.call() as stream:
            guest = GuestStream(stream)
            exchange = Guest(session.code, newcomer().party, entropy=bytes)
            await guest.send(exchange.knock, after=GUEST_MAGIC)
            offer = await guest.receive()
            assert isinstance(offer, InviterHalf)
            session.ended.set()
            await settled()
            with contextlib.suppress(PeerUnreachable):
                await guest.send(exchange.prove(offer))
            with pytest.raises(PeerUnreachable):
                await guest.receive()
        assert not ada.authenticated
        assert ada.announced[-1] == 0
        assert (await ada.invite()).code != session.code


async def test_the_end_of_pmesh_invite_withdraws_the_code_and_another_may_follow() -> None:
    async with inviting() as ada:
        session = await ada.invite()
        session.ended.set()
        await settled()
        with pytest.raises(UsageError, match="no such code"):
            await joins(ada, session.code)
        later = await ada.invite()
        with pytest.raises(UsageError, match=r"no such code|not the code"):
            await joins(ada, session.code)
        assert later.code != session.code


async def test_a_second_pmesh_invite_is_refused() -> None:
    async with inviting() as ada:
        await ada.invite()
        with pytest.raises(UsageError, match="invites already"):
            await ada.invites.serve(cast("Session", InviteSession()), Invite())


SILENT: dict[str, Callable[[Guest], list[GuestMessage]]] = {
    "before its proof": lambda _: [],
    "after another message": lambda _: [KeyStored()],
    "after a knock": lambda guest: [guest.knock],
}


@pytest.mark.parametrize("says", SILENT.values(), ids=SILENT)
async def test_who_breaks_off_has_used_up_the_code(
    says: Callable[[Guest], list[GuestMessage]],
    autojump_clock: MockClock,  # noqa: ARG001 - a fixture
) -> None:
    async with inviting() as ada:
        session = await ada.invite()
        stream = ada.call()
        guest = GuestStream(stream)
        exchange = Guest(session.code, newcomer().party, entropy=bytes)
        await guest.send(exchange.knock, after=GUEST_MAGIC)
        offer = await guest.receive()
        assert isinstance(offer, InviterHalf)
        await guest.send(*says(exchange))
        began = trio.current_time()
        await trio.sleep(EXCHANGE_S + 1)
        assert session.over is not None
        assert session.over.outcome in {"broken off", "wrong code"}
        assert trio.current_time() - began <= EXCHANGE_S + 1
        with pytest.raises(UsageError, match="no such code"):
            await joins(ada, session.code)
        await stream.aclose()


async def test_a_machine_that_got_the_key_and_is_silent_is_said_to_have_it() -> None:
    async with inviting() as ada:
        session = await ada.invite()

        async def fail_to_store() -> None:
            def store(_: MeshKey) -> None:
                raise KeyFileError("can't write it: the disk is full")

            async with ada.call() as stream:
                await get_key(stream, session.code, newcomer(), store)

        with pytest.raises(KeyFileError, match="the disk is full"):
            await fail_to_store()
        await settled()
        assert session.over == InvitationOver("key sent", "mac-2", "unknown")


async def test_a_machine_has_joined_also_if_its_time_is_over_once_a_slow_disk_has_the_key(
    autojump_clock: MockClock,
) -> None:
    async with inviting() as ada:
        session = await ada.invite()
        joined: list[Party] = []
        async with ada.call() as stream:
            with trio.move_on_after(EXCHANGE_S):
                party = await get_key(
                    stream, session.code, newcomer(), lambda _: autojump_clock.jump(EXCHANGE_S)
                )
                joined.append(party)
        assert joined == [ADA]


async def test_a_member_learns_that_it_is_one_and_uses_nothing_up() -> None:
    async with inviting() as ada:
        session = await ada.invite()
        assert await joins(ada, session.code, newcomer(KEY)) == []
        assert await joins(ada, session.code) == [KEY]


async def test_a_machine_of_another_mesh_is_told_how_to_leave_it_and_uses_nothing_up() -> None:
    async with inviting() as ada:
        session = await ada.invite()
        with pytest.raises(KeyFileError, match=r"another mesh than mac-1.*join --replace"):
            await joins(ada, session.code, newcomer(OTHER_KEY))
        assert await joins(ada, session.code) == [KEY]


@pytest.mark.parametrize("key", [None, KEY, OTHER_KEY], ids=["none", "ours", "another"])
async def test_a_machine_that_was_removed_gets_no_key_and_uses_nothing_up(
    key: MeshKey | None,
) -> None:
    async with inviting() as ada:
        session = await ada.invite()
        who = newcomer(key)
        ada.removed.add(who.party.node)
        undo = f"type there: pmesh remove --undo {short_node(who.party.node)}; "
        with pytest.raises(MachineRemoved, match=f"removed from the mesh of mac-1.*{undo}"):
            await joins(ada, session.code, who)
        ada.removed.clear()
        assert await joins(ada, session.code) == [KEY]


async def test_another_version_is_named_and_uses_nothing_up(faults: Faults) -> None:
    async with inviting() as ada:
        session = await ada.invite()
        faults.limit(join_module, "PROTOCOL_VERSION", 29)
        with pytest.raises(ProtocolVersionMismatch, match=r"mac-1 speaks version 30 .* machine 29"):
            await joins(ada, session.code)
        faults.limit(join_module, "PROTOCOL_VERSION", 30)
        assert await joins(ada, session.code) == [KEY]


async def test_another_number_uses_nothing_up() -> None:
    async with inviting() as ada:
        session = await ada.invite()
        code = session.code
        with pytest.raises(UsageError, match="no such code"):
            await joins(ada, code._replace(number=code.number % 99 + 1))
        assert await joins(ada, code) == [KEY]


GARBAGE = {
    "nothing": b"",
    "half a frame": frame(encode_guest(KeyStored()))[:3],
    "a frame that is too long": (MAX_GUEST_BYTES + 1).to_bytes(4, "big"),
    "a frame of 4 GiB": b"\xff" * 4,
    "no message": frame(b"\xc1"),
    "another message": frame(encode_guest(KeyStored())),
    "a knock without an element": frame(encode_guest(Knock(newcomer().party, 7, None))),
}


@pytest.mark.parametrize("said", GARBAGE)
async def test_garbage_ends_its_connection_and_uses_nothing_up(said: str) -> None:
    async with inviting() as ada:
        session = await ada.invite()
        async with ada.call() as stream:
            await stream.send_all(GUEST_MAGIC + GARBAGE[said])
            if said in {"nothing", "half a frame"}:
                await stream.send_eof()
            assert len(await stream.receive_some(4096)) < 200
        await settled()
        assert await joins(ada, session.code) == [KEY]


async def test_an_element_that_is_none_uses_the_code_up() -> None:
    async with inviting() as ada:
        session = await ada.invite()
        async with ada.call() as stream:
            guest = GuestStream(stream)
            knock = Knock(newcomer().party, session.code.number, bytes(33))
            await guest.send(knock, after=GUEST_MAGIC)
            with pytest.raises(PeerUnreachable):
                await guest.receive()
        await settled()
        assert session.over == InvitationOver("broken off", "mac-2", "unknown")


INVITERS: dict[str, list[GuestMessage]] = {
    "nothing": [],
    "no offer": [KeyStored()],
    "a claim that we are a member": [Declined(ADA, "member")],
    "an offer of nonsense": [InviterHalf(ADA, bytes(33), bytes(32))],
    "a wrong code": [Declined(ADA, "wrong code")],
}


@pytest.mark.parametrize("said", INVITERS)
async def test_an_inviter_that_lies_brings_a_named_error_and_no_key(said: str) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    stored: list[MeshKey] = []
    await theirs.send_all(b"".join(frame(encode_guest(message)) for message in INVITERS[said]))
    await theirs.send_eof()
    with pytest.raises((PeerUnreachable, UsageError), match="for a new one, type there 'pmesh inv"):
        await get_key(ours, Code(7, "guitar", "lemon"), newcomer(), stored.append)
    assert stored == []


async def test_a_fake_inviter_that_offers_another_code_is_told_that_it_is_wrong() -> None:
    ours, theirs = trio.testing.memory_stream_pair()

    async def fake() -> None:
        guest = GuestStream(theirs)
        assert await theirs.receive_some(len(GUEST_MAGIC)) == GUEST_MAGIC
        knock = await guest.receive()
        assert isinstance(knock, Knock)
        assert knock.element is not None
        await guest.send(InviterHalf(ADA, b"A" + knock.element[1:], bytes(32)))
        with contextlib.suppress(PeerUnreachable):
            assert isinstance(await guest.receive(), WrongCode)
        await theirs.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fake)
        with pytest.raises((UsageError, PeerUnreachable)):
            await get_key(ours, Code(7, "guitar", "lemon"), newcomer(), lambda _: None)
        await ours.aclose()


async def test_a_whole_agent_gives_its_key_at_its_port_but_to_no_removed_machine(
    clock: MockClock,
) -> None:
    async with village(clock, 1) as here:
        (machine,) = here.machines
        session = InviteSession()
        invites = machine.part(Invites)
        serve = cast("Callable[[object, object], Awaitable[None]]", invites.serve)
        here.nursery.start_soon(serve, session, Invite())
        await session.shown.wait()
        register, stored = machine.agent.register, list[MeshKey]()
        who, member = newcomer(), NodeKey.from_seed(b"m" * 32)

        async def join() -> None:
            async with await trio.open_tcp_stream(machine.address.host, machine.port) as stream:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(join_module, "PROTOCOL_VERSION", PROTOCOL_VERSION)
                    await get_key(stream, session.code, who, stored.append)

        for out in (True, False):
            entry = sign_removal(member, who.party.node, register.removals, out=out)
            register.take_untrusted([entry])
            with contextlib.nullcontext() if not out else pytest.raises(MachineRemoved):
                await join()
        assert stored == [MESH]
