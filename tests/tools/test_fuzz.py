"""The fuzzer's dice and its memory: it changes what it should, and nothing that would go astray."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import pytest
import trio
from msgspec import inspect
from trio.testing import MockClock

from pmesh.agent.mesh.register import Records, store_records
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.core.identity.removals import sign_removal
from pmesh.core.identity.rotations import sign_rotation
from pmesh.core.links.delivery import PREFIX_BYTES
from pmesh.core.wire.channels import MAX_MESSAGE_BYTES, encode
from pmesh.core.wire.control import StopAgent
from pmesh.core.wire.framing import FIRST_BYTES, FirstBytes, frame, recognize
from pmesh.core.wire.link import Address, Hello, KnownPeers
from pmesh.core.wire.probes import AskProbe
from pmesh.core.wire.session import Refused
from pmesh.core.wire.session import encode as encode_request
from pmesh.core.wire.views import Commit
from pmesh.ids import Member, TrainerId
from pmesh.invites.wire import SEALED_BYTES, Knock, SealedKey, encode_guest
from pmesh.launches.wire.tree import DirectoryEntry, FileEntry, LinkEntry
from pmesh.members.wire import MemberRow, RemoveMachine, RotateKey, TellRotation
from pmesh.store.wire import Answer, Answered, Ask, Get, Keys, Set, decode_message_untrusted
from pmesh.store.wire import encode as encode_of_a_store
from simulation.wire import AnyReply, decode_request_untrusted, decode_untrusted
from tests.worlds.builders import ANNA, BERT, make_roster, make_view, unsigned
from tools.fuzz.agent import KINDS, accepts, new_liar
from tools.fuzz.corpus import KeptCase, MessageRecorder, keep, load, recorded
from tools.fuzz.doors import GREETED_BY, GUEST_KINDS, KeyGivenError, new_guest
from tools.fuzz.large import grow
from tools.fuzz.liar import MANY_TIMES, Seen, mutate
from tools.fuzz.life import LiarsLife
from tools.fuzz.oracles import (
    find_bans,
    find_lost_places,
    find_unprintable_in_json,
    is_called,
    is_rolled_back,
)
from tools.fuzz.outsider import ACTIONS
from tools.fuzz.parts import HOSTS, children, example
from tools.fuzz.store_lies import STORE_KINDS, sequences
from tools.fuzz.trainer import LIAR, NOBODY, REQUESTS, honest_sessions, spare

pytestmark = pytest.mark.slow

FEW_BYTES = 16 * 1024  # with as many kinds of parts as more of them
VIEW = make_view(3, ANNA, BERT, rosters=[make_roster(ANNA, BERT)])
COMMIT = Commit(VIEW, ((0, 1), (1, 0)))
PEERS = KnownPeers((Hello(5, ANNA, unsigned("mac-a"), (Address("127.0.0.1", 7000),)),))


def new_dice(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - no secret


def leaves(value: object, path: str = "") -> dict[str, object]:
    """Everything in a value that has no parts, by its place."""
    parts = children(value)
    if not parts:
        return {path: value}
    return {p: v for place, part in parts for p, v in leaves(part, f"{path}.{place}").items()}


def changed_fields(message: object, count: int) -> set[str]:
    dice, seen = new_dice(1), Seen()
    seen.learn(message)
    before, changed = leaves(message), set[str]()
    for _ in range(count):
        after = leaves(mutate(message, dice, seen))
        changed |= {place for place in before if before[place] != after.get(place)}
    return changed


def test_every_field_at_every_depth_is_changed_sooner_or_later() -> None:
    assert changed_fields(COMMIT, 2000) == set(leaves(COMMIT))


def test_no_lie_names_a_host_beyond_this_machine() -> None:
    said = [lie for seed in range(16) for lie in once_each(lies_of(seed))]
    few = [lie for lie in said if len(msgspec.msgpack.encode(lie)) < FEW_BYTES]
    addresses = [leaf for lie in few for leaf in leaves(lie).values() if isinstance(leaf, Address)]
    assert {address.host for address in addresses} == set(HOSTS)


def test_examples_of_all_messages_and_requests_can_be_decoded() -> None:
    for seed in range(20):
        for kind in KINDS:
            message = example(inspect.type_info(kind), new_dice(seed))
            assert decode_untrusted(encode(message)) == message
        for kind in REQUESTS:
            request = example(inspect.type_info(kind), new_dice(seed))
            assert decode_request_untrusted(encode_request(request)) == request


def test_what_an_honest_trainer_says_is_valid() -> None:
    sessions = honest_sessions()
    for _ in range(10):
        for request in next(sessions):
            assert decode_request_untrusted(encode_request(request)) == request


@cache
def lies_of(seed: int) -> list[Any]:
    liar = new_liar(seed)
    liar.hear(PEERS)
    return [lie for _ in range(300) for lie in (*liar.say(COMMIT), *liar.interrupt())]


def once_each(said: list[Any]) -> list[Any]:
    """Without the repetitions of one message."""
    return list({id(lie): lie for lie in said}.values())


def test_a_seed_tells_the_same_lies_again() -> None:
    assert lies_of(3) == lies_of.__wrapped__(3)
    assert lies_of(3) != lies_of(4)


def test_a_liar_says_the_truth_too_and_invents_all_kinds_of_messages() -> None:
    said = [lie for seed in range(16) for lie in once_each(lies_of(seed))]
    assert COMMIT in said
    assert {type(lie) for lie in said} == set(KINDS)


def test_a_liar_sends_messages_of_the_largest_size_and_thousands_of_one() -> None:
    said = [lies_of(seed) for seed in range(8)]
    taken = [lie for lies in said for lie in once_each(lies) if accepts(lie)]
    assert max(len(encode(lie)) / lie.most_bytes for lie in taken) > 0.9
    assert max(max(Counter(map(id, lies)).values()) for lies in said) >= max(MANY_TIMES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_of_any_kind_grows_up_to_what_its_receiver_takes(kind: type) -> None:
    room = MAX_MESSAGE_BYTES - PREFIX_BYTES
    for seed in range(4):
        dice = new_dice(seed)
        message = example(inspect.type_info(kind), dice)
        grown = grow(message, dice, accepts, room=room)
        assert len(encode(grown)) >= len(encode(message))
        assert decode_untrusted(encode(grown)) == grown


def test_a_part_that_may_be_of_several_kinds_grows_as_what_it_is() -> None:
    for command in (Keys("x"), Get("x"), Set("x", b"x")):
        grown = grow(Ask(TrainerId(0), 1, command), new_dice(1), lambda _: True, room=1000)
        assert type(grown.command) is type(command)
        assert len(msgspec.msgpack.encode(grown)) > 900


def test_a_case_is_kept_with_all_that_was_sent(tmp_path: Path) -> None:
    record = MessageRecorder(tmp_path / "lies", encode)
    record(COMMIT)
    record(PEERS)
    messages = recorded(tmp_path / "lies")
    assert [decode_untrusted(message) for message in messages] == [COMMIT, PEERS]
    case = KeptCase(liar="member", seed=7, finding="it died", messages=messages)
    assert load(keep(tmp_path / "corpus", case)) == case


@dataclass(eq=False, kw_only=True)
class Silent(LiarsLife):
    """It keeps what it would send."""

    sent: list[Any] = field(default_factory=list)

    async def send(self, messages: Iterable[Any]) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += messages

    @property
    def others(self) -> list[Member]:
        return [ANNA, BERT]


def new_life(door: Address) -> Silent:
    key, hello = NodeKey.from_seed(b"l" * 32), PEERS.peers[0]
    life = Silent(
        dice=new_dice(1),
        key=key,
        liar=new_liar(1),
        guest=new_guest(1),
        mesh_keys=[MeshKey(b"m" * 32)],
        hello=hello,
        largest=hello,
        doors=(door,),
    )
    life.liar.hear(life.beat)
    return life


AT_DOORS = {"greet", "knock", "ask_for_key"}  # they say nothing on links


@pytest.mark.parametrize("action", ACTIONS)
async def test_each_action_of_a_member_without_a_seat_is_taken_for_a_members(action: str) -> None:
    life = new_life(Address("127.0.0.1", 1))

    for _ in range(2):
        await ACTIONS[action](life)

    garbage = [message for message in life.sent if not accepts(message)]
    assert life.sent or action in AT_DOORS
    assert not garbage if action != "lie" else len(garbage) < len(life.sent)


async def test_a_member_without_a_seat_knocks_at_every_door() -> None:
    knocked = set[FirstBytes]()

    async def look(stream: trio.SocketStream) -> None:
        async with stream:
            knocked.add(recognize(await stream.receive_some(FIRST_BYTES)))

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, look, 0, host="127.0.0.1"))
        life = new_life(Address("127.0.0.1", listeners[0].socket.getsockname()[1]))
        for action in ACTIONS.values():
            await action(life)
        life.let_go()
        nursery.cancel_scope.cancel()
    assert knocked >= set(FirstBytes) - {FirstBytes.TOO_FEW, FirstBytes.GARBAGE}


def types_in(info: inspect.Type, found: set[type]) -> set[type]:
    """All classes of messages, and of their parts."""
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            if cls not in found:
                found.add(cls)
                for part in fields:
                    types_in(part.type, found)
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for each in types:
                types_in(each, found)
        case inspect.VarTupleType(item_type=item) | inspect.DictType(value_type=item):
            types_in(item, found)
        case _:
            pass
    return found


BETWEEN_TRAINERS = ("pmesh.bridge.", "pmesh.client.", "pmesh.rpc.")  # they read these of each other
NOT_DRAWN: dict[str, set[type]] = {
    "an agent's own answers to its programs": set(get_args(AnyReply)) | {MemberRow},
    "is obeyed": {StopAgent},
    "is read only where the liar may run commands: tests/launches/test_tree.py": {
        DirectoryEntry,
        FileEntry,
        LinkEntry,
    },
}


def subclasses_of(kind: type) -> Iterator[type]:
    own: list[type] = kind.__subclasses__()
    for each in own:
        yield each
        yield from subclasses_of(each)


def test_every_message_that_an_agent_takes_is_drawn() -> None:
    """A struct with a tag is a message; the agent imports all that it takes."""
    taken = {
        kind
        for kind in set(subclasses_of(msgspec.Struct))
        if kind.__module__.startswith("pmesh.")
        and not kind.__module__.startswith(BETWEEN_TRAINERS)
        and not kind.__name__.startswith("_")
        and kind.__struct_config__.tag is not None  # type: ignore[attr-defined]
    }
    drawn = set[type]()
    for kind in (*KINDS, *REQUESTS, *STORE_KINDS, *GUEST_KINDS, GREETED_BY):
        types_in(inspect.type_info(kind), drawn)
    spared = set[type]().union(*NOT_DRAWN.values())
    assert {TellRotation, Knock, AskProbe} <= taken
    assert taken - drawn - spared == set()
    assert drawn & spared <= {Refused}


def test_no_program_that_lies_removes_an_honest_machine() -> None:
    said = [RemoveMachine("honest-1", out=True), RotateKey(("honest-2", NOBODY))]
    assert list(map(spare, said)) == [RemoveMachine(LIAR, out=True), RotateKey((LIAR, NOBODY))]
    undone = RemoveMachine("honest-1", out=False)
    assert spare(undone) == undone


async def test_who_gives_its_key_to_a_guest_without_the_code_is_found(
    autojump_clock: MockClock,  # noqa: ARG001 - a fixture
) -> None:
    async def give(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(frame(encode_guest(SealedKey(bytes(SEALED_BYTES)))))
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.receive_some(FIRST_BYTES)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, give, 0, host="127.0.0.1"))
        life = new_life(Address("127.0.0.1", listeners[0].socket.getsockname()[1]))
        with pytest.raises(KeyGivenError):
            await ACTIONS["knock"](life)
        nursery.cancel_scope.cancel()


def test_a_rotation_that_is_rolled_back_is_found_and_a_later_one_is_not() -> None:
    key = NodeKey.from_seed(b"k" * 32)
    first = sign_rotation(key, MeshKey(b"1" * 32), [], before=None)
    second = sign_rotation(key, MeshKey(b"2" * 32), [], before=first)
    found = [is_rolled_back(*pair) for pair in [(second, first), (second, None)]]
    assert found == [True, True]
    fine = [(None, None), (None, first), (first, first), (first, second)]
    assert not any(is_rolled_back(*pair) for pair in fine)


def test_an_honest_machine_that_was_removed_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    key, honest = NodeKey.from_seed(b"k" * 32), NodeKey.from_seed(b"h" * 32).node
    entry = sign_removal(key, honest, {}, out=True)
    store_records(tmp_path, Records({}, {honest: entry}))
    assert find_lost_places(tmp_path, [key.node]) == ""
    assert "is removed" in find_lost_places(tmp_path, [key.node, honest])


def test_a_sequence_about_a_store_is_harmless_one_by_one() -> None:
    for sequence in sequences(Answered(TrainerId(1), 5, Answer())).values():
        for message in once_each(sequence()[:100]):
            assert decode_message_untrusted(encode_of_a_store(message)) == message


def test_only_bans_of_honest_machines_are_findings() -> None:
    output = "banned liar\nring: a → b\nbanned anna\nwho has banned bert?"
    assert find_bans(output, ["anna", "bert"]) == ["anna"]


def test_a_control_character_is_found_wherever_it_stands() -> None:
    assert "x1b" in find_unprintable_in_json(b'{"a": [{"b": "mac \\u001b[2J"}]}')
    assert find_unprintable_in_json(b'{"a": ["two\\nlines", 3, null]}') == ""


def test_a_machine_has_its_own_name_or_that_with_the_start_of_its_id() -> None:
    members = [{"id": "anna", "name": "mac (an)"}, {"id": "bert", "name": "anna's"}]
    assert is_called("anna", "mac", members)
    assert not is_called("bert", "mac", members)
    assert not is_called("cleo", "mac", members)
