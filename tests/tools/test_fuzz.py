"""The fuzzer's dice and its memory: it changes what it should, and nothing that would go astray."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import pytest
import trio
from msgspec import inspect

from pmesh.core.links.delivery import PREFIX_BYTES
from pmesh.core.wire.channels import MAX_MESSAGE_BYTES, encode
from pmesh.core.wire.link import Address, Hello, KnownPeers
from pmesh.core.wire.session import encode as encode_request
from pmesh.core.wire.views import Commit
from pmesh.ids import Member, TrainerId
from pmesh.store.wire import Answer, Answered, decode_message_untrusted
from pmesh.store.wire import encode as encode_of_a_store
from simulation.wire import AnyMessage, decode_request_untrusted, decode_untrusted
from tests.worlds.builders import ANNA, BERT, make_roster, make_view, unsigned
from tools.fuzz.agent import accepts, new_liar
from tools.fuzz.corpus import KeptCase, Recorder, keep, load, recorded
from tools.fuzz.large import grow
from tools.fuzz.liar import MANY_TIMES, Seen, mutate
from tools.fuzz.oracles import find_bans, find_unprintable_in_json, is_called
from tools.fuzz.outsider import ACTIONS, LiarsLife
from tools.fuzz.parts import HOSTS, children, example
from tools.fuzz.store_lies import sequences
from tools.fuzz.trainer import REQUESTS, honest_sessions

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
    assert changed_fields(COMMIT, 4000) == set(leaves(COMMIT))


def test_no_lie_names_a_host_beyond_this_machine() -> None:
    said = [lie for seed in range(8) for lie in once_each(lies_of(seed))]
    few = [lie for lie in said if len(msgspec.msgpack.encode(lie)) < FEW_BYTES]
    addresses = [leaf for lie in few for leaf in leaves(lie).values() if isinstance(leaf, Address)]
    assert {address.host for address in addresses} == set(HOSTS)


def test_examples_of_all_messages_and_requests_can_be_decoded() -> None:
    for seed in range(20):
        for kind in get_args(AnyMessage):
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
    assert {type(lie) for lie in said} == set(get_args(AnyMessage))


def test_a_liar_sends_messages_of_the_largest_size_and_thousands_of_one() -> None:
    said = [lies_of(seed) for seed in range(8)]
    taken = [lie for lies in said for lie in once_each(lies) if accepts(lie)]
    assert max(len(encode(lie)) / lie.most_bytes for lie in taken) > 0.9
    assert max(max(Counter(map(id, lies)).values()) for lies in said) >= max(MANY_TIMES)


@pytest.mark.parametrize("kind", get_args(AnyMessage), ids=lambda kind: kind.__name__)
def test_a_message_of_any_kind_grows_up_to_what_its_receiver_takes(kind: type) -> None:
    room = MAX_MESSAGE_BYTES - PREFIX_BYTES
    for seed in range(4):
        dice = new_dice(seed)
        message = example(inspect.type_info(kind), dice)
        grown = grow(message, dice, accepts, room=room)
        assert len(encode(grown)) >= len(encode(message))
        assert decode_untrusted(encode(grown)) == grown


def test_a_case_is_kept_with_all_that_was_sent(tmp_path: Path) -> None:
    record = Recorder(tmp_path / "lies", encode)
    record(COMMIT)
    record(PEERS)
    messages = recorded(tmp_path / "lies")
    assert [decode_untrusted(message) for message in messages] == [COMMIT, PEERS]
    case = KeptCase(liar="member", seed=7, finding="it died", messages=messages)
    assert load(keep(tmp_path / "corpus", case)) == case


@dataclass(eq=False)
class Silent(LiarsLife):
    """It keeps what it would send."""

    sent: list[Any] = field(default_factory=list)

    async def send(self, messages: Iterable[Any]) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += messages

    @property
    def others(self) -> list[Member]:
        return [ANNA, BERT]


@pytest.mark.parametrize("action", ACTIONS)
async def test_each_action_of_a_member_without_a_seat_is_taken_for_a_members(action: str) -> None:
    nobody = Address("127.0.0.1", 1)
    hello = PEERS.peers[0]
    life = Silent(new_dice(1), new_liar(1), hello, hello, [], (nobody,), lambda _: None)
    life.liar.hear(life.beat)

    for _ in range(2):
        await ACTIONS[action](life)

    garbage = [message for message in life.sent if not accepts(message)]
    assert life.sent
    assert not garbage if action != "lie" else len(garbage) < len(life.sent)


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
